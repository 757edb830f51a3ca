//! What others published, against this engine: vocabularies with the tokens that `transformers` makes of texts, and chat templates with
//! what jinja2 makes of chats. They are fetched once, into the cache of this user, and are no part of this repository.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

mod templates;
mod vocabularies;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/published")
}

/// The folder that `install.sh` makes. Once: two at a time would both fetch.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let made = Command::new(here().join("install.sh")).output().unwrap();
        assert!(made.status.success(), "what was published cannot be had: {}", String::from_utf8_lossy(&made.stderr));
        PathBuf::from(String::from_utf8(made.stdout).unwrap().trim())
    })
}

/// Paths of a folder whose names end so, in order.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.to_string_lossy().ends_with(end)).collect();
    files.sort();
    files
}
