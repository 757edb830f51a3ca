//! The words that the operator writes, against `docs/conditions.md`, both ways: whatever it says in a run is listed there, and whatever is listed
//! there is said in some run of `once`, or where a test that is named here brings it about.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::LazyLock,
};

use crds::node::CONDITION_ENGINE_STALLS;
use serde_json::Value;

use super::kube::object::Object;

const PAGE: &str = include_str!("../../../docs/conditions.md");
const CONDITIONS: &str = "Conditions of an InferenceDeployment";
/// `Ready/ScaledToZero`: of what, and the reason.
const REASONS: &str = "Reasons of an InferenceDeployment's conditions";
const STATUS: &str = "Words of the status";
const OUTCOMES: &str = "Outcomes of an incident";
const NODES: &str = "Condition of a node, and its reasons";
/// `Warning/NodeSuspect`: its type, and the reason.
const EVENTS: &str = "Events";
const HEADINGS: [&str; 6] = [CONDITIONS, REASONS, STATUS, OUTCOMES, NODES, EVENTS];

/// What no story brings about, and the test that does.
/// (The file holds the word, and the test, or bears its name.)
const ELSEWHERE: [(&str, &str, &str, &str); 5] = [
    (STATUS, "Nothing", "incidents/effects.rs", "every_remedy_of_a_xid_is_recorded_and_weighed_and_put_into_words"),
    (STATUS, "NoProgress", "inference_deployment/rollout_tests.rs", "crashes_and_silence_have_names_of_their_own"),
    (REASONS, "EnginesProgressing/NotHeard", TABLE, "conditions_as_a_table"),
    (REASONS, "EnginesProgressing/FencedByPerson", TABLE, "conditions_as_a_table"),
    (REASONS, "Ready/FencedByPerson", TABLE, "conditions_as_a_table"),
];
const TABLE: &str = "inference_deployment/snapshots/operator__controllers__inference_deployment__status__tests__conditions_as_a_table.snap";

/// Words by the heading under which they are listed.
pub type Spoken = BTreeMap<&'static str, BTreeSet<String>>;

/// What the page lists.
static LISTED: LazyLock<Spoken> =
    LazyLock::new(|| HEADINGS.into_iter().map(|heading| (heading, table(heading))).collect());

fn table(heading: &str) -> BTreeSet<String> {
    let wanted = format!("## {heading}");
    let rows = PAGE.lines().skip_while(|line| *line != wanted).skip(1).take_while(|line| !line.starts_with("## "));
    let cells = rows.filter_map(|row| row.strip_prefix("| `")?.split_once("` | "));
    let with_its_kinds = |(word, rest): (&str, &str)| {
        let kinds = rest.split(" | ").next().unwrap_or_default().replace('`', "");
        let kinds: Vec<String> = kinds.split(", ").map(|kind| format!("{kind}/{word}")).collect();
        if matches!(heading, REASONS | EVENTS) { kinds } else { vec![word.to_owned()] }
    };
    cells.flat_map(with_its_kinds).collect()
}

/// Adds the words of what an operator has just written; whatever is listed nowhere.
pub fn hear(said: &mut Spoken, plural: &str, written: &Object) -> Vec<String> {
    let mut unlisted = Vec::new();
    for (heading, word) in words(plural, written) {
        if !LISTED[heading].contains(&word) {
            unlisted.push(format!("{word} is not under `{heading}`"));
        }
        said.entry(heading).or_default().insert(word);
    }
    unlisted
}

/// What is listed and was not said, in words.
pub fn unsaid(said: &Spoken) -> Vec<String> {
    let mut faults = Vec::new();
    for (heading, listed) in LISTED.iter() {
        for word in listed {
            let elsewhere = ELSEWHERE.iter().find(|row| (row.0, row.1) == (*heading, word));
            match (said.get(heading).is_some_and(|said| said.contains(word)), elsewhere) {
                (false, None) => faults.push(format!("nobody said {word} (`{heading}`)")),
                (true, Some(_)) => faults.push(format!("{word} (`{heading}`) is said in a story, and called untold")),
                (false, Some((_, _, file, test))) => faults.extend(no_test(file, test, word)),
                (true, None) => {}
            }
        }
    }
    let gone = ELSEWHERE.iter().filter(|row| !LISTED[row.0].contains(row.1));
    faults.extend(gone.map(|row| format!("{} is not under `{}`", row.1, row.0)));
    faults
}

fn no_test(file: &str, test: &str, word: &str) -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/controllers").join(file);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let (named, word) = (file.contains(test) || text.contains(&format!("fn {test}(")), word.rsplit('/').next());
    let there = named && word.is_some_and(|word| text.contains(word));
    (!there).then(|| format!("there is no test {test} of {word:?} in {file}"))
}

fn words(plural: &str, written: &Object) -> Vec<(&'static str, String)> {
    let status = &written["status"];
    match plural {
        "inferencedeployments" => of_an_infd(status),
        "engineincidents" => {
            let remedies = [&written["spec"], status].map(|part| all(&part["xids"], "remedy")).into_iter().flatten();
            let outcome = text(&status["outcome"]).map(|word| (OUTCOMES, word));
            outcome.into_iter().chain(remedies.map(|word| (STATUS, word))).collect()
        }
        "nodes" => {
            let conditions = status["conditions"].as_array().into_iter().flatten();
            let own = conditions.filter(|condition| condition["type"] == CONDITION_ENGINE_STALLS);
            own.filter_map(|condition| Some((NODES, text(&condition["reason"])?))).collect()
        }
        "events" => pair(&written["type"], &written["reason"]).map(|word| (EVENTS, word)).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn of_an_infd(status: &Value) -> Vec<(&'static str, String)> {
    let mut words = Vec::new();
    // (what has a domain in its name is somebody else's)
    let own = |condition: &&Value| condition["type"].as_str().is_some_and(|name| !name.contains('/'));
    for condition in status["conditions"].as_array().into_iter().flatten().filter(own) {
        words.extend(text(&condition["type"]).map(|word| (CONDITIONS, word)));
        words.extend(pair(&condition["type"], &condition["reason"]).map(|word| (REASONS, word)));
    }
    let (recovery, hold) = (&status["recovery"], &status["recovery"]["hold"]);
    let mut fields = all(&status["rollout"]["failed"], "reason");
    fields.extend(["grants", "recent"].into_iter().flat_map(|list| all(&recovery[list], "action")));
    for place in ["avoid", "broken"].into_iter().flat_map(|list| recovery[list].as_array().into_iter().flatten()) {
        fields.extend(text(&place["because"]));
        fields.extend(all(&place["xids"], "remedy"));
    }
    fields.extend([&hold["scope"], &hold["trial"]["outcome"]].into_iter().filter_map(text));
    words.extend(fields.into_iter().map(|word| (STATUS, word)));
    words
}

fn all(list: &Value, field: &str) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|item| text(&item[field])).collect()
}

fn pair(of: &Value, word: &Value) -> Option<String> {
    Some(format!("{}/{}", of.as_str()?, word.as_str()?))
}

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|word| !word.is_empty()).map(str::to_owned)
}
