//! What `truebeat replay` prints: the JSON contract, the table, the chart, and errors that say what to do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn trace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vitals/tests/traces").join(format!("{name}.jsonl.gz"))
}

fn replay(args: &[&str], traces: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_truebeat")).arg("replay").args(args).args(traces).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn keys(object: &serde_json::Value) -> Vec<&str> {
    let mut keys: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn json_is_one_object_for_each_trace_and_rule_with_these_keys() {
    let (hang, idle) = (trace("k2_core_lock"), trace("a_idle"));
    let text = stdout(&replay(&["--rules", "truebeat,gonka", "--output", "json"], &[&hang, &idle]));
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let named: Vec<_> =
        lines.iter().map(|line| (line["trace"].as_str().unwrap(), line["rule"].as_str().unwrap())).collect();
    assert_eq!(
        named,
        [("k2_core_lock", "truebeat"), ("a_idle", "truebeat"), ("k2_core_lock", "gonka"), ("a_idle", "gonka")]
    );
    for line in &lines {
        assert_eq!(keys(line), ["rule", "timeline", "trace"]);
        let changes = line["timeline"].as_array().unwrap();
        assert!(!changes.is_empty());
        for (i, change) in changes.iter().enumerate() {
            assert_eq!(keys(change), ["class", "reasons", "t", "verdict"]);
            assert!(change["t"].is_f64() && change["reasons"].is_array());
            assert!(i == 0 || change != &changes[i - 1], "one entry for each change");
        }
    }
    let ours = lines[0]["timeline"].as_array().unwrap();
    assert!(ours.iter().any(|change| change["verdict"] == "Suspect" && change["class"].is_string()));
}

#[test]
fn the_table_has_a_row_for_each_stretch_and_a_sum_for_each_rule() {
    let dir = tempfile::tempdir().unwrap();
    let (chart, scores) = (dir.path().join("chart.svg"), dir.path().join("scores.jsonl"));
    let (hang, prefill) = (trace("k1_core_spin"), trace("c3_chunked_prefill_alone"));
    let mut args = vec!["--rules", "all", "--output", "table", "--hold-hangs", "400"];
    args.extend(["--chart", chart.to_str().unwrap(), "--write-scores", scores.to_str().unwrap()]);
    let text = stdout(&replay(&args, &[&hang, &prefill]));
    let row = text.lines().find(|line| line.starts_with("k1_core_spin+held") && line.contains(" hang ")).unwrap();
    assert!(row.contains('*') && row.contains("- "), "some catch it, some miss it: {row}");
    let healthy = text.lines().find(|line| line.starts_with("c3_chunked") && line.contains("progress")).unwrap();
    assert!(healthy.contains('*') && healthy.contains(". "), "36 s without a token: {healthy}");
    let naive = text.lines().rfind(|line| line.starts_with("running-no-rate")).unwrap();
    assert!(naive.contains("1/1"), "{naive}");
    assert!(std::fs::read_to_string(&chart).unwrap().contains("truebeat, kill"));
    let written = std::fs::read_to_string(&scores).unwrap();
    assert_eq!(written.lines().count(), 14, "ours and thirteen rivals");
    let doubled = stdout(&replay(
        &[
            "--rules",
            "all",
            "--output",
            "table",
            "--scores",
            scores.to_str().unwrap(),
            "--scores",
            scores.to_str().unwrap(),
        ],
        &[],
    ));
    let naive = doubled.lines().rfind(|line| line.starts_with("running-no-rate")).unwrap();
    assert!(naive.contains("2/2"), "accounts add up: {naive}");
}

#[test]
fn bad_input_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let said = refused(&replay(&["--rules", "vllm"], &[&trace("a_idle")]));
    assert!(said.contains("\"vllm\"") && said.contains("vllm-execute-timeout"), "{said}");
    let said = refused(&replay(&[], &[&dir.path().join("missing.jsonl.gz")]));
    assert!(said.contains("missing.jsonl.gz"), "{said}");
    let said = refused(&replay(&[], &[&file("bad.jsonl", "{\"t\":1}\nnot json\n")]));
    assert!(said.contains("bad.jsonl") && said.contains("line 2"), "{said}");
    let said = refused(&replay(&[], &[&file("neither.jsonl.gz", "\u{1f}\u{0}{\"t\":1}\n")]));
    assert!(said.contains("neither.jsonl.gz") && said.contains("line 1"), "{said}");
    let lonely = file("lonely.jsonl", "{\"t\":1}\n");
    file("lonely.labels.json", "{\"truth\": 3}");
    let said = refused(&replay(&[], &[&lonely]));
    assert!(said.contains("lonely.labels.json") && said.contains("truth"), "{said}");
    let said = refused(&replay(&["--chart", dir.path().join("x.svg").to_str().unwrap()], &[&trace("a_idle")]));
    assert!(said.contains("--chart needs hangs"), "{said}");
}

#[test]
fn a_reader_that_has_seen_enough_ends_it_without_a_word() {
    let traces = ["b_steady", "e_bursty", "k2_core_lock", "c1_long_prefill_alone"].map(trace);
    let mut program = Command::new(env!("CARGO_BIN_EXE_truebeat"));
    program.args(["replay", "--rules", "all", "--output", "json"]).args(&traces);
    let mut running = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(running.stdout.take());
    let output = running.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(141), "as a shell says of a program whose pipe is closed");
}

/// `make rivals` writes it; whoever changes a rule, ours or a rival's, sees here what that does to the recordings.
#[test]
fn the_table_in_the_docs_is_what_the_rules_say_today() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let listed = std::fs::read_dir(root.join("vitals/tests/traces")).unwrap().map(|entry| entry.unwrap().path());
    let mut traces: Vec<PathBuf> = listed.filter(|path| path.to_string_lossy().ends_with(".jsonl.gz")).collect();
    traces.sort();
    let traces: Vec<&Path> = traces.iter().map(PathBuf::as_path).collect();
    let chart = tempfile::tempdir().unwrap();
    let chart = chart.path().join("rivals.svg");
    let chart_word = chart.to_str().unwrap();
    let words = ["--rules", "all", "--output", "table", "--hold-hangs", "900", "--chart", chart_word];
    let table = stdout(&replay(&words, &traces));
    let docs = |name: &str| std::fs::read_to_string(root.join("docs").join(name)).unwrap();
    assert!(table == docs("rivals.txt"), "docs/rivals.txt is old: make rivals");
    assert!(std::fs::read_to_string(&chart).unwrap() == docs("rivals.svg"), "docs/rivals.svg is old: make rivals");
}
