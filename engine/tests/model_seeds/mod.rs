//! Inputs of the fuzz targets that are made: each takes one way through the parsers of a model's files, and what is refused says which. They
//! lie in the corpus as `made-NAME`, because libFuzzer reads files; `TRUEBEAT_REGENERATE=1` writes them anew.

mod files;
mod folders;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::targets::{file_refusals, folder_refusals};

/// One input.
pub struct Made {
    name: &'static str,
    bytes: Vec<u8>,
    /// A part of what is refused of it; empty: it is whole.
    says: &'static str,
}

/// A file of the corpus.
pub fn corpus_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(path)
}

/// What is there is what is made, no more and no less.
fn are_fresh(target: &str, all: &[Made]) {
    let names: BTreeSet<String> = all.iter().map(|made| format!("made-{}", made.name)).collect();
    assert_eq!(names.len(), all.len(), "{target}: two of one name");
    let path = |name: &str| corpus_file(&format!("{target}/{name}"));
    let there = std::fs::read_dir(path("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let old: Vec<String> = there.filter(|name| name.starts_with("made-") && !names.contains(name)).collect();
    if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
        old.iter().for_each(|name| std::fs::remove_file(path(name)).unwrap());
        all.iter().for_each(|made| std::fs::write(path(&format!("made-{}", made.name)), &made.bytes).unwrap());
        return;
    }
    assert!(old.is_empty(), "{target}: nobody makes {old:?}");
    for made in all {
        let there = std::fs::read(path(&format!("made-{}", made.name))).ok();
        assert!(there.as_ref() == Some(&made.bytes), "{target}: {} is stale: TRUEBEAT_REGENERATE=1", made.name);
    }
}

/// Each goes the way that it was made for.
fn say_what_they_are_made_for(all: &[Made], refusals: fn(&[u8]) -> Vec<String>) {
    let wrong = all.iter().filter_map(|made| {
        let said = refusals(&made.bytes);
        let right = if made.says.is_empty() { said.is_empty() } else { said.iter().any(|why| why.contains(made.says)) };
        (!right).then(|| format!("{}: {said:?}, not {:?}", made.name, made.says))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_made_inputs_are_fresh() {
    are_fresh("model_folder", &folders::all());
    are_fresh("gguf_model", &files::all());
}

#[test]
fn every_made_folder_is_refused_for_its_own_reason_or_whole() {
    say_what_they_are_made_for(&folders::all(), folder_refusals);
}

#[test]
fn every_made_file_is_refused_for_its_own_reason_or_whole() {
    say_what_they_are_made_for(&files::all(), file_refusals);
}
