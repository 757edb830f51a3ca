//! What is known against engine flags: each entry with an engine as people write it and one that looks like it; Rust and CEL, read by the very
//! text that the API server gets, agree on these and on many put together at random; what CEL may cost; the table in the documentation.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, helpers as well")]

mod cases;
mod policy;

use std::collections::BTreeSet;
use std::fmt::Write;

use crds::InferenceDeployment;
use crds::inference_deployment::Engine;
use crds::known_bad::{self, ENTRIES, TOLD_CHARS_MAX};
use proptest::prelude::*;
use serde_json::{Value, json};

use cases::CASES;
use policy::Policy;

fn engine(text: &str) -> Engine {
    serde_json::from_value(json(text)).unwrap()
}

fn json(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn names(engine: &Engine) -> Vec<&'static str> {
    known_bad::of(engine).iter().map(|entry| entry.name).collect()
}

#[test]
fn an_entry_is_found_and_its_near_misses_are_not() {
    for (name, bad, good) in CASES {
        assert!(names(&engine(bad)).contains(name), "{name} is not found in {bad}");
        for good in *good {
            assert!(!names(&engine(good)).contains(name), "{name} is found in {good}");
        }
    }
    let told: BTreeSet<_> = CASES.iter().map(|(name, ..)| *name).collect();
    let known: BTreeSet<_> = ENTRIES.iter().map(|entry| entry.name).collect();
    assert_eq!(told, known, "every entry has a case, every case an entry");
    assert_eq!(known.len(), ENTRIES.len(), "two entries have one name");
}

#[test]
fn rust_and_cel_agree_on_every_case() {
    let policy = Policy::new();
    for (_, bad, good) in CASES {
        for text in good.iter().chain([bad]) {
            assert_eq!(policy.hits(&json(text)), names(&engine(text)), "{text}");
        }
    }
}

#[test]
fn the_smallest_engine_and_the_oddest_are_looked_at_without_an_error() {
    let policy = Policy::new();
    let long = "--x=y ".repeat(700);
    for odd in [
        json!({"kind": "VLLM", "image": ""}),
        json!({"kind": "VLLM", "image": "/:@", "args": [], "command": [], "env": []}),
        json!({"kind": "SGLang", "image": "a@sha256:0", "args": ["", "'\"\\\n\t", "ä 漢 🙂"], "env": [{"name": "A"}]}),
        json!({"kind": "VLLM", "image": "a:99999.1", "args": vec![long.as_str(); 256], "tensorParallel": 64}),
    ] {
        let typed: Engine = serde_json::from_value(odd.clone()).unwrap();
        assert_eq!(policy.hits(&odd), names(&typed), "{:.200}", odd.to_string());
    }
}

#[test]
fn what_lies_beyond_the_first_characters_is_not_looked_at() {
    let flag = |before: usize| {
        let args = ["x".repeat(before), "--speculative-config.method=mtp".to_owned()];
        json!({"kind": "VLLM", "image": "vllm:v0.23.0", "args": args})
    };
    let policy = Policy::new();
    for (before, found) in [(TOLD_CHARS_MAX - 40, true), (TOLD_CHARS_MAX, false)] {
        let typed: Engine = serde_json::from_value(flag(before)).unwrap();
        assert_eq!(names(&typed).contains(&"vllm-mtp-async-scheduling"), found, "{before}");
        assert_eq!(policy.hits(&flag(before)), names(&typed), "{before}");
    }
}

/// By the factors of Kubernetes: a tenth of the text's length times a tenth of the word's, each rounded up, for each look; a million for one
/// expression, ten millions for the policy. The text itself: each replacement is twice a tenth.
#[test]
fn the_longest_arguments_cost_a_fraction_of_what_an_expression_may() {
    let text = TOLD_CHARS_MAX.div_ceil(10);
    let costs: Vec<usize> = ENTRIES
        .iter()
        .map(|entry| entry.needles().iter().map(|needle| text * needle.len().div_ceil(10)).sum())
        .collect();
    assert!(costs.iter().all(|cost| *cost < 500_000) && costs.iter().sum::<usize>() < 5_000_000, "{costs:?}");
    let replaced = known_bad::cel_variables().iter().map(|(_, cel)| cel.matches(".replace(").count()).max().unwrap();
    let joined = 320 * 4097; // every character that the schema lets through
    assert!(2 * joined / 10 + joined / 10 + replaced * 2 * text < 1_000_000, "{replaced} replacements");
}

#[test]
fn words_fit_a_warning() {
    for entry in ENTRIES {
        let words = entry.words();
        assert!(words.len() <= 400 && words.is_ascii() && !words.contains('\n'), "{}: {words}", entry.name);
        for part in [entry.flags, entry.happens, entry.instead, entry.issue] {
            assert!(!part.is_empty() && words.contains(part) && !part.ends_with('.'), "{}: {part}", entry.name);
        }
        assert!(entry.issue.starts_with("https://"), "{}", entry.name);
    }
}

/// Whoever begins with an example is not warned.
#[test]
fn nothing_is_known_against_the_examples() {
    let folder = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/examples");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut seen = 0;
    for path in files.filter(|path| path.is_file()) {
        for document in std::fs::read_to_string(&path).unwrap().split("\n---\n") {
            let value: Value = serde_saphyr::from_str(document).unwrap();
            if value["kind"] == "InferenceDeployment" {
                let object: InferenceDeployment = serde_json::from_value(value).unwrap();
                assert_eq!(names(&object.spec.engine), [""; 0], "{}", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen >= 6, "{seen} examples");
}

/// Words of the cases, however they fall together.
fn any_engine() -> impl Strategy<Value = Value> {
    let mut words: BTreeSet<String> = BTreeSet::new();
    let mut images: BTreeSet<String> =
        ["a:latest", "b:5000/c", "d:v0.23", "e:26.01-py3", "f:1.2.3.4.5"].map(str::to_owned).into();
    let mut variables: BTreeSet<String> = ["{name: A, value: '1'}", "{name: A}"].map(str::to_owned).into();
    for (_, bad, good) in CASES {
        for text in good.iter().chain([bad]) {
            let engine = json(text);
            images.insert(engine["image"].as_str().unwrap().to_owned());
            let list = |field: &str| engine[field].as_array().cloned().unwrap_or_default();
            words.extend(list("args").iter().chain(&list("command")).map(|word| word.as_str().unwrap().to_owned()));
            variables.extend(list("env").iter().map(Value::to_string));
        }
    }
    let pick = |set: BTreeSet<String>| prop::sample::select(set.into_iter().collect::<Vec<_>>());
    (
        prop::sample::select(vec!["VLLM", "SGLang", "Custom", "Truebeat"]),
        pick(images),
        prop::collection::vec(pick(words), 0..12),
        prop::collection::vec(pick(variables), 0..3),
        prop::option::of(1..9_i32),
    )
        .prop_map(|(kind, image, args, env, ranks)| {
            let env: Vec<Value> = env.iter().map(|variable| json(variable)).collect();
            let mut engine = json!({"kind": kind, "image": image, "args": args, "env": env});
            if let Some(ranks) = ranks {
                engine["tensorParallel"] = json!(ranks);
            }
            engine
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn rust_and_cel_agree_on_engines_put_together_at_random(engine in any_engine()) {
        let typed: Engine = serde_json::from_value(engine.clone()).unwrap();
        prop_assert_eq!(Policy::new().hits(&engine), names(&typed));
    }

    /// A tag is read as the expression of the policy reads it, whatever stands there.
    #[test]
    fn tags_are_read_alike(tag in "(v?[0-9.]{0,8}|v?0[.][12][0-9]([.][0-9]{1,5}){0,3}[.]?)([a-z.-][0-9a-z.-]{0,6})?") {
        let engine = json!({
            "kind": "VLLM", "image": format!("b:5000/vllm:{tag}@sha256:0"), "args": ["--speculative-config.method=mtp"],
            "env": [{"name": "VLLM_USE_FLASHINFER_SAMPLER", "value": "1"}],
        });
        let typed: Engine = serde_json::from_value(engine.clone()).unwrap();
        prop_assert_eq!(Policy::new().hits(&engine), names(&typed));
    }
}

#[test]
fn the_table_is_in_the_documentation() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/known-bad.md");
    let mut wanted =
        "\n| entry | versions | what is told | what happens | instead | upstream |\n|---|---|---|---|---|---|\n"
            .to_owned();
    for entry in ENTRIES {
        let (versions, instead) = (entry.versions_in_words(), entry.instead);
        writeln!(
            wanted,
            "| `{}` | {versions} | {} | {} | {instead} | [{}]({}) |",
            entry.name,
            entry.flags,
            entry.happens,
            reference(entry.issue),
            entry.issue
        )
        .unwrap();
    }
    wanted.push('\n');
    let text = std::fs::read_to_string(path).unwrap();
    let (head, rest) = text.split_once("<!-- entries -->\n").unwrap();
    let (_, tail) = rest.split_once("<!-- end of entries -->").unwrap();
    let whole = format!("{head}<!-- entries -->\n{wanted}<!-- end of entries -->{tail}");
    if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
        std::fs::write(path, &whole).unwrap();
    }
    assert!(text == whole || std::env::var_os("TRUEBEAT_REGENERATE").is_some(), "run `make regenerate`");
}

/// `vllm#40926`, `CVE-2025-9141`.
fn reference(issue: &str) -> String {
    let parts: Vec<&str> = issue.split('/').collect();
    match parts[..] {
        [.., repository, "issues" | "pull", number] => format!("{repository}#{number}"),
        [.., last] => last.to_owned(),
        [] => String::new(),
    }
}
