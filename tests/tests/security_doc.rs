//! The table of `docs/security.md` against the code: every row that is due is there, every test that it names exists, and no test of a row
//! is left out. Reads files alone.

#![allow(clippy::panic, reason = "a helper of tests fails by panicking")]

use std::path::Path;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const DUE: [&str; 12] = ["S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "S9", "S10", "S15", "S16"];

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// `file.rs::name` of everything in backticks.
fn named(row: &str) -> Vec<(&str, &str)> {
    row.split('`').filter_map(|word| word.split_once("::")).filter(|(file, _)| file.ends_with(".rs")).collect()
}

#[test]
fn every_row_names_tests_and_every_test_is_there() {
    let doc = read("docs/security.md");
    let rows: Vec<&str> = doc.lines().filter(|line| line.starts_with("| S")).collect();
    let numbers: Vec<&str> = rows.iter().filter_map(|row| row.split_whitespace().nth(1)).collect();
    assert_eq!(numbers, DUE);
    for row in rows {
        let tests = named(row);
        assert!(!tests.is_empty(), "no test: {row}");
        for (file, name) in tests {
            let text = read(file);
            let there = text.contains(&format!("fn {name}(")) || text.contains(&format!("    \"{name}\",\n"));
            assert!(there, "docs/security.md names {file}::{name}, which is not there");
        }
    }
}

/// S10 is all of G1 to G10, the faults of untrusted input.
#[test]
fn each_fault_of_untrusted_input_has_a_test_in_the_row_of_input_caps() {
    let doc = read("docs/security.md");
    let row = doc.lines().find(|line| line.starts_with("| S10 ")).unwrap_or_default();
    let missing: Vec<u8> =
        (1..=10).filter(|n| !named(row).iter().any(|(_, name)| name.starts_with(&format!("g{n:02}_")))).collect();
    assert!(missing.is_empty(), "G{missing:?} have no test in the row");
}

#[test]
fn no_row_of_the_cluster_is_left_out() {
    let (doc, main) = (read("docs/security.md"), read("tests/tests/cluster_security/main.rs"));
    let rows = main.lines().filter_map(|line| line.trim().strip_prefix("\"s")?.strip_suffix("\","));
    let missing: Vec<&str> = rows.filter(|row| !doc.contains(&format!("::s{row}`"))).collect();
    assert!(missing.is_empty(), "not in docs/security.md: {missing:?}");
}
