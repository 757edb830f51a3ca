//! The files under examination: their text, and which of them are tests. Reads the working tree through `git ls-files`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// One text file.
pub struct File {
    /// Path from the repository's root, with `/`.
    pub path: String,
    pub text: String,
    /// Is all of it test code?
    pub test: bool,
    /// The parsed source; `None` when it is not Rust.
    pub rust: Option<syn::File>,
}

/// The repository.
pub struct Tree {
    pub files: Vec<File>,
}

/// One breach of one rule.
#[derive(Debug)]
pub struct Finding {
    pub path: String,
    pub line: usize,
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

impl Tree {
    /// What git tracks or would add; deleted and binary files are left out.
    pub fn of_this_repository() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&root)
            .output()
            .context("cannot start git")?;
        if !output.status.success() {
            bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr));
        }
        let names = String::from_utf8(output.stdout).context("a file name that is not UTF-8")?;
        let texts = names.split('\0').filter(|name| !name.is_empty());
        let texts = texts.filter_map(|name| Some((name.to_owned(), std::fs::read_to_string(root.join(name)).ok()?)));
        Self::new(texts.collect())
    }

    /// A tree of given texts (also for the rules' own tests).
    pub fn new(texts: Vec<(String, String)>) -> Result<Self> {
        let mut files = Vec::new();
        for (path, text) in texts {
            let rust = if path.ends_with(".rs") {
                Some(syn::parse_file(&text).with_context(|| format!("{path} is not Rust"))?)
            } else {
                None
            };
            files.push(File { test: in_test_folder(&path), path, text, rust });
        }
        let declared: BTreeSet<String> = files.iter().flat_map(test_modules).collect();
        for file in &mut files {
            let behind =
                |module: &String| file.path == format!("{module}.rs") || file.path.starts_with(&format!("{module}/"));
            file.test |= declared.iter().any(behind);
        }
        Ok(Self { files })
    }

    /// One file, for the rules' own tests.
    #[cfg(test)]
    pub fn one(path: &str, text: &str) -> Self {
        Self::new(vec![(path.to_owned(), text.to_owned())]).unwrap()
    }

    /// Rust files that are not tests.
    pub fn sources(&self) -> impl Iterator<Item = (&File, &syn::File)> {
        self.files.iter().filter(|file| !file.test).filter_map(|file| Some((file, file.rust.as_ref()?)))
    }
}

fn in_test_folder(path: &str) -> bool {
    let inside = path.split_once('/').map_or("", |(_, rest)| rest);
    inside.starts_with("tests/") || inside.starts_with("benches/") || path.starts_with("tests/tidy/")
}

/// Paths (without `.rs`) of the modules that a file declares as `#[cfg(test)] mod name;`.
fn test_modules(file: &File) -> Vec<String> {
    let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
    let folder = match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
        other => format!("{folder}/{}", other.trim_end_matches(".rs")),
    };
    let items = file.rust.iter().flat_map(|source| &source.items);
    let modules = items.filter_map(|item| match item {
        syn::Item::Mod(module) if module.content.is_none() && is_test(&module.attrs) => Some(module),
        _ => None,
    });
    let beside = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let place = |module: &syn::ItemMod| match path_attribute(&module.attrs) {
        Some(path) => format!("{beside}/{}", path.trim_end_matches(".rs")),
        None => format!("{folder}/{}", module.ident),
    };
    modules.map(place).collect()
}

/// The file that `#[path = "…"]` names.
fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    let named = attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("path"))
        .find_map(|attribute| attribute.meta.require_name_value().ok())?;
    match &named.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
        _ => None,
    }
}

/// `#[test]`, `#[tokio::test]`, `#[cfg(test)]`, `#[cfg(all(test, …))]`.
pub fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let last = attribute.path().segments.last().map(|segment| segment.ident.to_string());
        let tokens = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
        match last.as_deref() {
            Some("test") => true,
            Some("cfg") => {
                tokens.split(|c: char| !c.is_alphanumeric()).any(|word| word == "test") && !tokens.contains("not")
            }
            _ => false,
        }
    })
}

#[test]
fn a_module_behind_cfg_test_is_test_code_wherever_its_file_lies() {
    let files = [
        ("a/src/lib.rs", "#[cfg(test)] mod probe;\nmod real;"),
        ("a/src/real.rs", "#[cfg(test)] #[path = \"real_tests.rs\"] mod tests;"),
        ("a/src/probe.rs", ""),
        ("a/src/real_tests.rs", ""),
        ("a/tests/x.rs", ""),
    ];
    let tree = Tree::new(files.map(|(path, text)| (path.to_owned(), text.to_owned())).to_vec()).unwrap();
    let tests: Vec<_> = tree.files.iter().filter(|file| file.test).map(|file| file.path.as_str()).collect();
    assert_eq!(tests, ["a/src/probe.rs", "a/src/real_tests.rs", "a/tests/x.rs"]);
}
