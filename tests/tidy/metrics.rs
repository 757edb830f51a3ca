//! `docs/metrics.md` against the code, both ways: every metric of agent and operator has a row, and no row is left of one that is gone.
//! A metric is told by its name, wherever in its file's text before the tests it stands.

use std::collections::BTreeSet;

use crate::tree::{Finding, Tree};

const PAGE: &str = "docs/metrics.md";
/// Where metrics are made.
const MAKERS: [&str; 3] = ["agent/src/metrics.rs", "agent/src/supervisor/board.rs", "operator/src/metrics.rs"];
const PREFIX: &str = "truebeat_";

/// Every metric that is in one of the two alone, and every file that makes none.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let told: BTreeSet<&str> = text(tree, PAGE).lines().filter_map(row).collect();
    let mut findings = Vec::new();
    let mut made = BTreeSet::new();
    for path in MAKERS {
        let here = names(text(tree, path));
        if here.is_empty() {
            findings.push(Finding { path: path.to_owned(), line: 0, what: "no metric is made here".to_owned() });
        }
        let untold = here.difference(&told).map(|name| format!("`{name}` is not in {PAGE}"));
        findings.extend(untold.map(|what| Finding { path: path.to_owned(), line: 0, what }));
        made.extend(here);
    }
    let gone = told.difference(&made).map(|name| format!("`{name}` is made by nobody"));
    findings.extend(gone.map(|what| Finding { path: PAGE.to_owned(), line: 0, what }));
    findings
}

/// Empty where there is no such file.
fn text<'a>(tree: &'a Tree, path: &str) -> &'a str {
    tree.files.iter().find(|file| file.path == path).map_or("", |file| file.text.as_str())
}

/// The name in a row's first column.
fn row(line: &str) -> Option<&str> {
    let (name, _) = line.strip_prefix("| `")?.split_once('`')?;
    name.starts_with(PREFIX).then_some(name)
}

fn names(source: &str) -> BTreeSet<&str> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(PREFIX) && word.len() > PREFIX.len()).collect()
}

#[test]
fn a_metric_of_either_alone_is_found() {
    let code = "//! Names begin with `truebeat_`.\nconst A: &str = \"truebeat_a\";\n\
                #[cfg(test)]\nmod tests { const C: &str = \"truebeat_c\"; }";
    let page = "| `truebeat_a` | x |\n| `truebeat_b` | x |\n";
    let other = "fn f() { format!(\"truebeat_d_total{{}} 1\"); }";
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let tree = Tree::new(vec![file(MAKERS[0], code), file(MAKERS[1], other), file(PAGE, page)]).unwrap();
    let found: Vec<_> = check(&tree).into_iter().map(|one| one.what).collect();
    let expected =
        ["`truebeat_d_total` is not in docs/metrics.md", "no metric is made here", "`truebeat_b` is made by nobody"];
    assert_eq!(found, expected);
}
