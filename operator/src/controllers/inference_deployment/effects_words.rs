//! P11 of the words that a field may hold: where a spec may say one of a few words, each does something that no other of them does. The table
//! must speak of each word that the generated schema has: one that is added without a row here, or does what another does, fails.

use std::collections::BTreeMap;

use crds::InferenceDeployment;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::effects::{children, each_in, merge, spec_with, troubled};

/// Where a word shows.
#[derive(Debug, Clone, Copy)]
enum Place {
    Children,
    Plan,
}
use Place::{Children, Plan};

/// Whoever says one of `with` has `text` there, and whoever says one of `without` has not.
struct Row {
    path: &'static str,
    /// What sets the stage (a merge patch of the spec).
    stage: Value,
    place: Place,
    text: String,
    with: Vec<&'static str>,
    without: Vec<&'static str>,
}

/// A row for each of these words, which shows nowhere but where it is said.
fn each<const N: usize>(
    path: &'static str,
    stage: &Value,
    words: [&'static str; N],
    text: impl Fn(&str) -> String,
) -> Vec<Row> {
    let others = |word: &str| words.into_iter().filter(|other| *other != word).collect();
    let row = |word: &'static str| Row {
        path,
        stage: stage.clone(),
        place: Children,
        text: text(word),
        with: vec![word],
        without: others(word),
    };
    words.map(row).into()
}

fn one(path: &'static str, (place, text): (Place, &str), with: &[&'static str], without: &[&'static str]) -> Row {
    let (with, without) = (with.to_vec(), without.to_vec());
    Row { path, stage: json!({}), place, text: text.to_owned(), with, without }
}

fn table() -> Vec<Row> {
    let pulled = ["Always", "IfNotPresent", "Never"];
    let pull = |word: &str| format!("\"imagePullPolicy\":\"{word}\"");
    let oci = json!({"model": {"source": {"file": null, "oci": {"reference": "that:1"}}}});
    let kinds = ["Truebeat", "VLLM", "SGLang", "Custom"];
    let fewer = |row: Row| Row { stage: json!({"replicas": 3}), ..row };
    // replicas of a revision that is taken back are not recovered
    let kept = |row: Row| Row { stage: json!({"rollout": {"toleratedStalls": 3}}), ..row };
    let mut rows = vec![
        kept(one("recovery.mode", (Plan, "Grant { episode: \"e-"), &["Recover"], &["Observe", "Fence"])),
        kept(one("recovery.mode", (Plan, LAST_SERVING), &["Recover", "Fence"], &["Observe"])),
        kept(one("recovery.lastReplica", (Plan, LAST_SERVING), &["Serve"], &["Fence"])),
        kept(one("recovery.poisonRequests", (Plan, "\"truebeat.io/poison\": Some"), &["Refuse"], &["Ignore"])),
        one("rollout.proof", (Children, "\"--prove-through\""), &["Tokens"], &["None"]),
        one("rollout.onFailure", (Plan, "\"paused\": Bool(true)"), &["Hold"], &["RollBack"]),
        one("rollout.onFailure", (Plan, "RolledBack("), &["RollBack"], &["Hold"]),
        one(SCALING, (Plan, "5 replicas are wanted, 4 stay"), &["Hold"], &["Follow", "NoScaleIn"]),
        fewer(one(SCALING, (Plan, "3 replicas are wanted, 4 stay"), &["Hold", "NoScaleIn"], &["Follow"])),
    ];
    rows.extend(each("engine.kind", &json!({}), kinds, |word| format!("/engine-kind\":\"{word}\"")));
    rows.extend(each("engine.imagePullPolicy", &json!({"agent": {"imagePullPolicy": null}}), pulled, pull));
    rows.extend(each("agent.imagePullPolicy", &json!({"engine": {"imagePullPolicy": null}}), pulled, pull));
    rows.extend(each("model.source.oci.pullPolicy", &oci, pulled, |word| format!("\"pullPolicy\":\"{word}\"")));
    rows
}

const LAST_SERVING: &str = "\"truebeat.io/last-serving\": Some";
const SCALING: &str = "scaling.duringIncidents";

/// The text in which the word shows, of a spec that says it.
fn shown(row: &Row, word: &str) -> String {
    let said = row.path.rsplit('.').fold(json!(word), |value, name| json!({name: value}));
    let mut patch = row.stage.clone();
    merge(&mut patch, &said);
    let infd = spec_with(&patch);
    match row.place {
        Children => children(&infd),
        Plan => troubled(&infd),
    }
}

#[test]
fn every_word_of_a_spec_does_what_no_other_does() {
    for row in table() {
        for (words, there) in [(&row.with, true), (&row.without, false)] {
            for word in words {
                let shown = shown(&row, word);
                assert_eq!(shown.contains(&row.text), there, "{} {word}: {}\n{shown}", row.path, row.text);
            }
        }
    }
}

#[test]
fn the_table_speaks_of_every_word_and_tells_each_from_each() {
    let crd = serde_json::to_value(InferenceDeployment::crd()).unwrap();
    let fields = words(&crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]);
    let table = table();
    let unknown: Vec<_> = table.iter().map(|row| row.path).filter(|path| !fields.contains_key(*path)).collect();
    assert!(unknown.is_empty(), "no such field, or not one of a few words: {unknown:?}");
    for (path, known) in &fields {
        let rows: Vec<&Row> = table.iter().filter(|row| row.path == path).collect();
        for row in &rows {
            let mut spoken_of: Vec<&str> = row.with.iter().chain(&row.without).copied().collect();
            spoken_of.sort_unstable();
            assert_eq!(spoken_of, *known, "{path}: {}", row.text);
        }
        let differ = |a: &str, b: &str| rows.iter().any(|row| row.with.contains(&a) != row.with.contains(&b));
        for (nth, word) in known.iter().enumerate() {
            let alike: Vec<_> = known[nth + 1..].iter().filter(|other| !differ(word, other)).collect();
            assert!(alike.is_empty(), "{path}: nothing tells {word} from {alike:?}");
        }
    }
}

/// Each field of a schema that holds one of a few words, and these in the order of the alphabet.
fn words(schema: &Value) -> BTreeMap<String, Vec<String>> {
    let mut fields = BTreeMap::new();
    each_in("", schema, &mut |path, schema| {
        let Some(list) = schema["enum"].as_array() else { return };
        let mut list: Vec<String> = list.iter().filter_map(|word| word.as_str().map(str::to_owned)).collect();
        list.sort_unstable();
        fields.insert(path.to_owned(), list);
    });
    fields
}
