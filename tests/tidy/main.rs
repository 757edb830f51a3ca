//! The rules of the house that no compiler knows: forbidden edges between crates and modules, sizes, where `unsafe` and panics may
//! live, what the text may not say. It reads the files that git knows or would add, and nothing else. Every rule is a function
//! from a tree to findings, with a test of its own that shows it can fail.

mod advisories;
mod code;
mod device_waits;
mod edges;
mod metrics;
mod paths;
mod sizes;
mod supply;
mod tree;
mod vocabulary;
mod waits;
mod words;

use truebeat_tests::story;

use tree::{Finding, Tree};

fn assert_none(findings: Vec<Finding>) {
    let lines: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert!(lines.is_empty(), "{} finding(s):\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn no_crate_depends_on_one_it_must_not_know() {
    assert_none(edges::manifests(&edges::metadata().unwrap()));
}

#[test]
fn no_module_names_one_it_must_not_know() {
    assert_none(edges::modules(&Tree::of_this_repository().unwrap()));
}

#[test]
fn files_and_functions_are_small() {
    let tree = Tree::of_this_repository().unwrap();
    println!("{}", sizes::table(&tree));
    assert_none(sizes::check(&tree));
}

#[test]
fn unsafe_lives_in_listed_modules() {
    assert_none(code::unsafe_places(&Tree::of_this_repository().unwrap()));
}

#[test]
fn nothing_panics_outside_tests() {
    assert_none(code::panics(&Tree::of_this_repository().unwrap()));
}

#[test]
fn every_exception_to_a_lint_has_a_reason() {
    assert_none(code::reasons(&Tree::of_this_repository().unwrap()));
}

#[test]
fn every_file_says_why_it_exists() {
    assert_none(code::heads(&Tree::of_this_repository().unwrap()));
}

#[test]
fn e1_nothing_waits_for_a_device_without_a_deadline() {
    assert_none(device_waits::check(&Tree::of_this_repository().unwrap()));
}

#[test]
fn e1_nothing_in_the_engines_process_waits_without_a_deadline() {
    let tree = Tree::of_this_repository().unwrap();
    assert_none(waits::check(&tree));
    assert_none(waits::of_each_crate(&tree, &edges::metadata().unwrap()));
    let list = tree.files.iter().find(|file| file.path == waits::LIST).unwrap();
    assert_none(waits::idle_lines(&list.text).unwrap());
}

#[test]
fn h11_what_comes_in_comes_from_one_place_under_listed_licences() {
    assert_none(supply::Supply::of_this_repository().unwrap().check());
}

#[test]
fn h11_nothing_is_known_against_what_comes_in() {
    let supply = supply::Supply::of_this_repository().unwrap();
    let Some(folder) = advisories::folder() else {
        let why = ["TRUEBEAT_ADVISORIES names no copy of RustSec's database".to_owned()];
        return story::record("tidy::h11_nothing_is_known_against_what_comes_in", &why).unwrap();
    };
    let known = advisories::read(&folder).unwrap();
    println!("{} advisories", known.len());
    assert_none(advisories::check(&supply.lock, &supply.deny, &known).unwrap());
}

#[test]
fn the_text_speaks_of_the_project_alone() {
    assert_none(words::check(&Tree::of_this_repository().unwrap()));
}

#[test]
fn every_metric_is_explained() {
    assert_none(metrics::check(&Tree::of_this_repository().unwrap()));
}

#[test]
fn every_word_of_the_api_is_explained() {
    assert_none(vocabulary::check(&Tree::of_this_repository().unwrap()));
}
