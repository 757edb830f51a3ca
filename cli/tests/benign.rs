//! One of each of the field's healthy look-alikes, in real processes, and the four ways to hold an engine: the bench that a long run of
//! them is made with, and none of them is killed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

use std::process::Command;

/// The bench's figures by name.
fn benign(out: &std::path::Path, words: &[&str]) -> Vec<(String, String)> {
    let server = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/stranger/server.py");
    let mut bench = Command::new(env!("CARGO_BIN_EXE_truebeat"));
    bench.args(["bench", "--out"]).arg(out).args(["benign", "--server", server, "--burners", "0"]).args(words);
    let output = bench.output().unwrap();
    let (told, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}{said}");
    let figure = |line: &str| {
        let mut words = line.split(' ').map(str::to_owned);
        Some((words.next()?, words.next()?))
    };
    told.lines().filter_map(figure).collect()
}

fn value<'a>(figures: &'a [(String, String)], name: &str) -> &'a str {
    &figures.iter().find(|(of, _)| of == name).unwrap().1
}

#[test]
fn no_healthy_look_alike_is_killed() {
    let out = tempfile::tempdir().unwrap();
    let all = benign(out.path(), &["--runs", "9", "--lanes", "9"]);
    assert_eq!(value(&all, "benign_runs"), "9");
    assert_eq!(value(&all, "benign_evictions"), "0");
    for kind in 1..=9 {
        assert_eq!(value(&all, &format!("benign_B{kind}_runs")), "1");
    }
    let held = benign(out.path(), &["--runs", "4", "--lanes", "4", "--only", "B6"]);
    assert_eq!((value(&held, "benign_B6_runs"), value(&held, "benign_evictions")), ("4", "0"));
}

#[test]
fn a_kind_that_there_is_not_is_an_error() {
    let out = tempfile::tempdir().unwrap();
    let mut bench = Command::new(env!("CARGO_BIN_EXE_truebeat"));
    bench.args(["bench", "--out"]).arg(out.path()).args(["benign", "--only", "B10", "--burners", "0"]);
    let output = bench.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("B1 to B9"), "{said}");
}
