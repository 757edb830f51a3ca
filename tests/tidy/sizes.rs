//! Sizes: what a person can hold in the head at once. Files at most 400 lines (all of it: comments and tests too), functions at most
//! 70 outside tests, nine in ten of them at most 30.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt::Write;

use syn::visit::{self, Visit};

use crate::tree::{Finding, Tree, is_test};

const FILE_LINES_MAX: usize = 400;
const FUNCTION_LINES_MAX: usize = 70;
const FUNCTION_LINES_P90: usize = 30;

/// Files that may be longer, and why.
const LONG_FILES: [(&str, &str); 0] = [];

struct Function {
    path: String,
    name: String,
    line: usize,
    lines: usize,
}

/// Every file and function that is too long, and the ninth decile if it is.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let rust = tree.files.iter().filter(|file| file.rust.is_some());
    let bound = rust.filter(|file| !LONG_FILES.iter().any(|(path, _)| *path == file.path));
    let long = bound.map(|file| (file, file.text.lines().count())).filter(|(_, lines)| *lines > FILE_LINES_MAX);
    let mut findings: Vec<_> = long
        .map(|(file, lines)| Finding {
            path: file.path.clone(),
            line: 1,
            what: format!("{lines} lines (at most {FILE_LINES_MAX})"),
        })
        .collect();
    let functions = functions(tree);
    for function in functions.iter().filter(|function| function.lines > FUNCTION_LINES_MAX) {
        let what = format!("fn {} has {} lines (at most {FUNCTION_LINES_MAX})", function.name, function.lines);
        findings.push(Finding { path: function.path.clone(), line: function.line, what });
    }
    let p90 = quantile(&functions, 90);
    if p90 > FUNCTION_LINES_P90 {
        let what = format!("nine in ten functions have at most {p90} lines (goal {FUNCTION_LINES_P90})");
        findings.push(Finding { path: "(all)".to_owned(), line: 0, what });
    }
    findings
}

#[derive(Default)]
struct Row {
    files: usize,
    lines: usize,
    test_lines: usize,
    longest: usize,
}

/// Files, lines and functions of each crate.
pub fn table(tree: &Tree) -> String {
    let mut crates: BTreeMap<&str, Row> = BTreeMap::new();
    for file in tree.files.iter().filter(|file| file.rust.is_some()) {
        let lines = file.text.lines().count();
        let row = crates.entry(crate_of(&file.path)).or_default();
        row.files += 1;
        row.lines += lines;
        row.test_lines += if file.test { lines } else { 0 };
        row.longest = row.longest.max(lines);
    }
    let mut text = "crate      files   lines  in tests longest functions  p90  max\n".to_owned();
    let all = functions(tree);
    for (name, row) in crates {
        let mine: Vec<_> = all.iter().filter(|function| crate_of(&function.path) == name).collect();
        let Row { files, lines, test_lines, longest } = row;
        let (count, p90, max) = (mine.len(), quantile(&mine, 90), quantile(&mine, 100));
        let _ = writeln!(
            text,
            "{name:<10} {files:>5} {lines:>7} {test_lines:>9} {longest:>7} {count:>9} {p90:>4} {max:>4}"
        );
    }
    let _ = writeln!(
        text,
        "all functions outside tests: {}, p90 {} lines, longest {}",
        all.len(),
        quantile(&all, 90),
        quantile(&all, 100)
    );
    text
}

fn crate_of(path: &str) -> &str {
    path.split('/').next().unwrap_or(path)
}

fn quantile<F: Borrow<Function>>(functions: &[F], percent: usize) -> usize {
    let mut lines: Vec<_> = functions.iter().map(|function| function.borrow().lines).collect();
    lines.sort_unstable();
    let rank = (lines.len() * percent).div_ceil(100);
    lines.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

fn functions(tree: &Tree) -> Vec<Function> {
    let mut all = Vec::new();
    for (file, source) in tree.sources() {
        let mut finder = Finder { path: &file.path, found: Vec::new() };
        finder.visit_file(source);
        all.append(&mut finder.found);
    }
    all
}

struct Finder<'a> {
    path: &'a str,
    found: Vec<Function>,
}

impl Finder<'_> {
    fn take(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let line = signature.fn_token.span.start().line;
        let lines = block.brace_token.span.close().end().line + 1 - line;
        self.found.push(Function { path: self.path.to_owned(), name: signature.ident.to_string(), line, lines });
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            self.take(&item.sig, &item.block);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.take(&item.sig, &item.block);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.take(&item.sig, block);
        }
    }
}

#[test]
fn a_long_file_and_a_long_function_are_found_and_a_long_test_is_not() {
    let long = format!("fn f() {{\n{}}}", "g();\n".repeat(FUNCTION_LINES_MAX));
    let whats: Vec<_> = check(&Tree::one("a/src/a.rs", &long)).into_iter().map(|finding| finding.what).collect();
    assert!(whats.iter().any(|what| what.contains("fn f has 72 lines")), "{whats:?}");
    assert!(check(&Tree::one("a/src/a.rs", &format!("#[test]\n{long}"))).is_empty());
    assert_eq!(check(&Tree::one("a/tests/a.rs", &"// x\n".repeat(FILE_LINES_MAX + 1))).len(), 1);
}

#[test]
fn the_ninth_decile_is_found() {
    let function = format!("fn f() {{\n{}}}\n", "g();\n".repeat(FUNCTION_LINES_P90));
    let whats: Vec<_> =
        check(&Tree::one("a/src/a.rs", &function.repeat(3))).into_iter().map(|finding| finding.what).collect();
    assert!(whats.len() == 1 && whats[0].contains("nine in ten"), "{whats:?}");
    let mostly_small = format!("{function}{}", "fn s() {}\n".repeat(9));
    assert!(check(&Tree::one("a/src/a.rs", &mostly_small)).is_empty());
}
