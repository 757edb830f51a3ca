//! What no file of this repository may say: paths of somebody's machine, hosts of registries (the project pulls from no place by
//! name), and words that speak of how the text came to be instead of what it is. The words are put together at run time, so that this
//! file passes its own rule.

use crate::tree::{Finding, Tree};

/// Beginnings of machine paths; a hit only where a path begins (`/proc/<pid>/root/` is none).
const FOLDERS: [&str; 3] = ["work", "root", "home"];

/// Hosts of registries and module proxies.
const HOSTS: [(&str, &str); 12] = [
    ("docker", "io"),
    ("ghcr", "io"),
    ("quay", "io"),
    ("gcr", "io"),
    ("nvcr", "io"),
    ("registry.k8s", "io"),
    ("proxy.golang", "org"),
    ("sum.golang", "org"),
    ("index.crates", "io"),
    ("pypi", "org"),
    ("files.pythonhosted", "org"),
    ("registry.npmjs", "org"),
];

/// In lower case; found as whole words.
const WORDS: [(&str, &str); 7] =
    [("clau", "de"), ("copi", "lot"), ("chat", "gpt"), ("sub", "agent"), ("to", "do:"), ("fix", "me"), ("x", "xx:")];

/// Checksums and locks are written by tools and name what they must.
const EXEMPT: [&str; 2] = ["Cargo.lock", "go.sum"];

/// Every line that says one of them.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| !EXEMPT.iter().any(|name| file.path.ends_with(name))) {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(what) = forbidden(line) {
                findings.push(Finding { path: file.path.clone(), line: index + 1, what });
            }
        }
    }
    findings
}

fn forbidden(line: &str) -> Option<String> {
    let lower = line.to_lowercase();
    let begins = |at: usize| lower[..at].chars().next_back().is_none_or(|before| " \t\"'`(=:,[".contains(before));
    let mut folders = FOLDERS.iter().map(|name| format!("/{name}/"));
    if let Some(folder) = folders.find(|name| lower.match_indices(name.as_str()).any(|(at, _)| begins(at))) {
        return Some(format!("a path of one machine (`{folder}…`)"));
    }
    let free = |neighbour: Option<char>| neighbour.is_none_or(|c| !c.is_alphanumeric() && c != '-' && c != '_');
    let whole = |word: &str| {
        let mut hits = lower.match_indices(word);
        hits.any(|(at, _)| free(lower[..at].chars().next_back()) && free(lower[at + word.len()..].chars().next()))
    };
    if let Some(host) = HOSTS.iter().map(|(name, top)| format!("{name}.{top}")).find(|host| whole(host)) {
        return Some(format!("a registry's host ({host})"));
    }
    // a word that ends in a colon is whole whatever follows
    let said = |word: &String| {
        whole(word) || (word.ends_with(':') && lower.contains(word.as_str()) && whole(word.trim_end_matches(':')))
    };
    let word = WORDS.iter().map(|(a, b)| format!("{a}{b}")).find(said)?;
    Some(format!("a word that has no place here ({word})"))
}

#[test]
fn each_kind_is_found_and_look_alikes_are_not() {
    let said = |line: &str| !check(&Tree::one("docs/a.md", line)).is_empty();
    for (name, top) in HOSTS {
        assert!(said(&format!("image: {name}.{top}/x")), "{name}");
    }
    for (a, b) in WORDS {
        assert!(said(&format!("// {a}{b} this")), "{a}");
    }
    for folder in FOLDERS {
        assert!(said(&format!("cd \"/{folder}/x\"")), "{folder}");
    }
    for fine in
        ["/proc/<pid>/root/dev/termination-log", "a framework/home", "methodology", "k8s.io/api", "what to do next"]
    {
        assert!(!said(fine), "{fine}");
    }
}
