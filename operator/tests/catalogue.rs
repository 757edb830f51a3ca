//! Holds `docs/faults-catalogue.md` to the code: a table of tests that nobody checks names tests that are gone. The same for the places
//! of the mutants. Reads files, and runs nothing of the operator.

#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests; the lint sees test functions alone")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// How many rows of each letter fall to this table.
const ROWS: [(&str, usize); 4] = [("A", 21), ("B", 10), ("F", 6), ("H", 11)];
/// The tests that bear another name than their row's: modes of the simulator, and tests that prove a row of `docs/security.md` as well.
const OTHER_NAMES: [(&str, &str); 5] = [
    ("B1", "crashes"),
    ("B2", "pairs"),
    ("H7", "s07_a_token_speaks_for_its_own_pod_alone"),
    ("H9", "s06_a_stranger_gets_no_answer_and_no_action"),
    ("H9", "s09_what_the_network_policy_lets_through"),
];
/// Where sources are.
const CRATES: [&str; 10] =
    ["agent", "cli", "crds", "engine", "heartbeat", "kernels", "operator", "role", "tests", "vitals"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// One line of the table.
struct Line {
    row: String,
    /// Empty: the row is open, and `place` says why.
    tests: Vec<String>,
    place: String,
}

fn lines() -> Vec<Line> {
    let page = text("docs/faults-catalogue.md");
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let table = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Row "));
    table
        .map(|line| match cells(line).as_slice() {
            [row, _, tests, place] => {
                let tests =
                    tests.split(", ").filter_map(|name| Some(name.strip_prefix('`')?.strip_suffix('`')?.to_owned()));
                Line { row: row.clone(), tests: tests.collect(), place: place.trim_matches('`').to_owned() }
            }
            cells => panic!("{} cells: {line}", cells.len()),
        })
        .collect()
}

/// The names in quotes, or after `fn `, that begin so.
fn names<'a>(source: &'a str, before: &str, until: char) -> Vec<&'a str> {
    source.split(before).skip(1).filter_map(|rest| Some(rest.split_once(until)?.0)).collect()
}

/// Does it begin with the name of a row that falls to this table?
fn bears_a_row(name: &str) -> bool {
    let row = name.split(['-', '_']).next().unwrap_or_default();
    let of = |(letter, count): &(&str, usize)| (1..=*count).any(|n| row.eq_ignore_ascii_case(&format!("{letter}{n}")));
    ROWS.iter().any(of)
}

#[test]
fn every_row_stands_in_the_table_once_and_in_order() {
    let mut rows: Vec<String> = lines().into_iter().map(|line| line.row).collect();
    rows.dedup();
    let wanted = ROWS.iter().flat_map(|(letter, count)| (1..=*count).map(move |n| format!("{letter}{n}")));
    assert_eq!(rows, wanted.collect::<Vec<_>>());
}

#[test]
fn every_test_that_is_named_is_there_and_bears_its_row() {
    let mut others = OTHER_NAMES.to_vec();
    for Line { row, tests, place } in lines() {
        if tests.is_empty() {
            assert!(place.len() > 20, "{row}: open, and nobody says why");
            continue;
        }
        let source = text(&place);
        for name in tests {
            let there = [format!("fn {name}("), format!("\"{name}\"")];
            assert!(there.iter().any(|form| source.contains(form)), "{row}: there is no {name} in {place}");
            let own = name.strip_prefix("fault_").unwrap_or(&name).split(['-', '_']).next().unwrap_or_default();
            let count = others.len();
            others.retain(|other| *other != (row.as_str(), name.as_str()));
            assert!(
                others.len() < count || own.eq_ignore_ascii_case(&row),
                "{row}: {name} does not bear the name of its row"
            );
        }
    }
    assert!(others.is_empty(), "not in docs/faults-catalogue.md: {others:?}");
}

#[test]
fn every_row_of_the_simulator_and_every_fault_test_is_in_the_table() {
    let told: BTreeSet<String> = lines().into_iter().flat_map(|line| line.tests).collect();
    let mut found: BTreeSet<String> = BTreeSet::new();
    let mut folders: Vec<PathBuf> = CRATES.iter().map(|name| root().join(name)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of this crate").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let source = fs::read_to_string(&path).expect("a source file");
                let faults = names(&source, "fn fault_", '(').into_iter().filter(|name| bears_a_row(name));
                found.extend(faults.map(|name| format!("fault_{name}")));
                let rows = source
                    .split("row(")
                    .skip(1)
                    .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
                found.extend(rows.filter(|name| name.contains('-') && bears_a_row(name)).map(str::to_owned));
            }
        }
    }
    let of_the_simulator = found.iter().filter(|name| !name.starts_with("fault_")).count();
    assert!(of_the_simulator >= 50, "{of_the_simulator}: the rows are written in another way");
    let untold: Vec<&String> = found.difference(&told).collect();
    assert!(untold.is_empty(), "not in docs/faults-catalogue.md: {untold:?}");
}

#[test]
fn the_page_counts_right() {
    let rows: BTreeSet<String> = lines().into_iter().map(|line| line.row).collect();
    let tested: BTreeSet<String> =
        lines().into_iter().filter(|line| !line.tests.is_empty()).map(|line| line.row).collect();
    let said = format!("**{} of {} rows have a test.**", tested.len(), rows.len());
    assert!(text("docs/faults-catalogue.md").contains(&said), "the page should say: {said}");
}

/// A mutant whose place is gone is never tried again, and nobody notices.
#[test]
fn every_mutant_finds_its_place() {
    let said = Command::new("python3").arg(root().join("operator/tests/mutants.py")).arg("--check").output();
    let said = said.expect("python3, as for the other scripts of the tests");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stdout));
}
