//! A test that this machine cannot show is neither passed off as shown nor failed: it is on record in `target/not-run.jsonl`, one object a line,
//! where `tests/run-all.sh` finds it and counts it apart from those that passed.
//!
//! What `tests/tools/prerequisites.sh` asks for is no reason: without that a test fails.

#![allow(dead_code, reason = "not every test that may lack something may lack all")]

use std::io::Write;

/// This test, for want of something that is no fault of the machine's: of its kernel, processor or network.
pub fn not_run(why: &str) {
    on_record(std::thread::current().name().unwrap_or("?"), why);
}

/// One that goes by this name.
pub fn on_record(test: &str, why: &str) {
    let test = format!("{}::{test}", env!("CARGO_PKG_NAME"));
    eprintln!("NOT RUN: {test}: {why}");
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/../target");
    std::fs::create_dir_all(target).unwrap();
    let record = std::fs::File::options().create(true).append(true).open(format!("{target}/not-run.jsonl"));
    let line = serde_json::json!({ "not_run": test, "why": [why] });
    // in one piece, for others write there as well
    record.unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// This test, for want of a right that whoever can run a cluster has. Where this machine must be able to (`TRUEBEAT_REQUIRE_CLUSTER=1`) it is a failure.
pub fn without_right(why: &str) {
    let required = std::env::var("TRUEBEAT_REQUIRE_CLUSTER").is_ok_and(|word| word == "1");
    assert!(!required, "{why} (and TRUEBEAT_REQUIRE_CLUSTER=1)");
    not_run(why);
}
