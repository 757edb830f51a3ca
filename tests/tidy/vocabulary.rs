//! `docs/conditions.md` against the code, both ways: no word that it explains is gone, and no word of the code is unexplained. The tables
//! are told by their headings; a word is what stands in back quotes in a row's first column.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};

use crate::tree::{Finding, Tree, is_test};

const PAGE: &str = "docs/conditions.md";
const EVENTS: &str = "operator/src/controllers/inference_deployment/events.rs";
const NODES: &str = "operator/src/controllers/nodes/plan.rs";
const OUTCOMES: &str = "operator/src/controllers/incidents/plan.rs";
const BY_HAND: &str = "operator/src/controllers/incidents/by_hand.rs";
const RECOVERY: &str = "vitals/src/recovery.rs";
/// Of two words and no reason: what an event says was done, and kinds.
const NO_REASONS: [&str; 3] = ["BackOff", "RollBack", "InferenceDeployment"];

type Words = BTreeSet<String>;

/// Every word that is in one of the two alone.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.files.iter().find(|file| file.path == PAGE) else {
        return vec![finding(0, "the page is not there".to_owned())];
    };
    let mut findings = Vec::new();
    for (heading, in_code) in in_code(tree) {
        let Some((line, in_page)) = table(&page.text, heading) else {
            findings.push(finding(0, format!("no heading `{heading}`")));
            continue;
        };
        let unexplained =
            in_code.difference(&in_page).map(|word| format!("`{word}` of the code is not under `{heading}`"));
        let gone = in_page.difference(&in_code).map(|word| format!("`{word}` under `{heading}` is not in the code"));
        findings.extend(unexplained.chain(gone).map(|what| finding(line, what)));
    }
    findings
}

/// What each table must explain.
fn in_code(tree: &Tree) -> Vec<(&'static str, Words)> {
    let names = |path: &str, prefix: &str| constants(tree, path, prefix);
    let status = [
        variants(tree, "crds/src/rollout.rs", "FailureReason"),
        variants(tree, "crds/src/status.rs", "AvoidedBecause"),
        variants(tree, "crds/src/status.rs", "GrantAction"),
        variants(tree, "crds/src/hold.rs", "TrialOutcome"),
        variants(tree, "crds/src/hold.rs", "HoldScope"),
        variants(tree, "crds/src/xid.rs", "XidRemedy"),
    ];
    // what is no variant of an enum: the end of an engine, and what a person did
    let mut classes = variants(tree, "vitals/src/verdict.rs", "StallClass");
    classes.extend(literals(tree, RECOVERY, |word| word == "Dead"));
    classes.extend(names("crds/src/fence.rs", "FENCED_BY_PERSON"));
    let mut stages = variants(tree, RECOVERY, "EpisodeStage");
    stages.extend(literals(tree, BY_HAND, |word| !word.is_empty()));
    vec![
        ("Conditions of an InferenceDeployment", names("crds/src/conditions.rs", "")),
        ("Reasons of an InferenceDeployment's conditions", variants(tree, "crds/src/conditions.rs", "Reason")),
        ("Conditions of a pod", names("crds/src/episode.rs", "CONDITION_")),
        ("Verdicts", variants(tree, "vitals/src/verdict.rs", "Verdict")),
        ("Stall classes", classes),
        ("Stages of an episode", stages),
        ("Outcomes of an incident", literals(tree, OUTCOMES, |word| !word.is_empty())),
        ("Words of the status", status.into_iter().flatten().collect()),
        ("Condition of a node, and its reasons", literals(tree, NODES, two_words)),
        ("Annotations", names("", "ANNOTATION_")),
        ("Labels", names("crds/", "LABEL_")),
        ("Events", literals(tree, EVENTS, two_words)),
    ]
}

/// Line and words of the table under a heading.
fn table(page: &str, heading: &str) -> Option<(usize, Words)> {
    let wanted = format!("## {heading}");
    let line = page.lines().position(|line| line == wanted)?;
    let rows = page.lines().skip(line + 1).take_while(|line| !line.starts_with("## "));
    let word = |row: &str| Some(row.strip_prefix("| `")?.split_once('`')?.0.to_owned());
    Some((line + 1, rows.filter_map(word).collect()))
}

/// The values of public string constants whose names begin so, in files whose paths do.
fn constants(tree: &Tree, path: &str, prefix: &str) -> Words {
    let files = tree.sources().filter(|(file, _)| file.path.starts_with(path));
    let items = files.flat_map(|(_, source)| &source.items);
    let value = |item: &syn::Item| match item {
        syn::Item::Const(item) if item.ident.to_string().starts_with(prefix) && is_public(&item.vis) => {
            text(&item.expr)
        }
        _ => None,
    };
    items.filter_map(value).collect()
}

fn is_public(visibility: &syn::Visibility) -> bool {
    matches!(visibility, syn::Visibility::Public(_))
}

fn text(expression: &syn::Expr) -> Option<String> {
    match expression {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

/// The variants of an enum, which are the words as they are written.
fn variants(tree: &Tree, path: &str, name: &str) -> Words {
    let files = tree.sources().filter(|(file, _)| file.path == path);
    let items = files.flat_map(|(_, source)| &source.items);
    let of = |item: &syn::Item| match item {
        syn::Item::Enum(item) if item.ident == name => item.variants.iter().map(|one| one.ident.to_string()).collect(),
        _ => Vec::new(),
    };
    items.flat_map(of).collect()
}

/// Literals of a file, tests left out, that are one capitalised word and fit.
fn literals(tree: &Tree, path: &str, fits: fn(&str) -> bool) -> Words {
    let mut found = Literals::default();
    tree.sources().filter(|(file, _)| file.path == path).for_each(|(_, source)| found.visit_file(source));
    let capitalised = |word: &String| {
        word.starts_with(|first: char| first.is_ascii_uppercase()) && word.chars().all(|c| c.is_ascii_alphabetic())
    };
    found.0.into_iter().filter(capitalised).filter(|word| fits(word)).collect()
}

fn two_words(word: &str) -> bool {
    let capitals = word.chars().filter(char::is_ascii_uppercase).count();
    (2..word.len()).contains(&capitals) && !NO_REASONS.contains(&word)
}

#[derive(Default)]
struct Literals(Words);

impl<'a> Visit<'a> for Literals {
    fn visit_item_mod(&mut self, module: &'a syn::ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_lit_str(&mut self, literal: &'a syn::LitStr) {
        self.0.insert(literal.value());
    }
}

fn finding(line: usize, what: String) -> Finding {
    Finding { path: PAGE.to_owned(), line, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_either_alone_is_found() {
        let code = "pub const READY: &str = \"Ready\";\npub enum Reason { Fine, New }\n";
        let page = "## Conditions of an InferenceDeployment\n\n| `Ready` | x |\n\n\
                    ## Reasons of an InferenceDeployment's conditions\n\n| `Fine` | x |\n| `Old` | x |\n";
        let text = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let tree = Tree::new(vec![text("crds/src/conditions.rs", code), text(PAGE, page)]).unwrap();
        let found: Vec<String> = check(&tree).into_iter().filter(|one| one.line > 0).map(|one| one.what).collect();
        let under = "`Reasons of an InferenceDeployment's conditions`";
        assert_eq!(
            found,
            [format!("`New` of the code is not under {under}"), format!("`Old` under {under} is not in the code")]
        );
    }

    #[test]
    fn literals_of_tests_are_none() {
        let code =
            "fn f() -> &'static str { \"GpuNeedsReset\" }\n#[cfg(test)] mod tests { const X: &str = \"OnlyHere\"; }";
        let words = literals(&Tree::one(NODES, code), NODES, two_words);
        assert_eq!(words, ["GpuNeedsReset".to_owned()].into());
    }
}
