//! What a run came to, and how it is held against another.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::spoken::Spoken;

/// Objects that tell of the world, and how many times more they may be written for each fault.
const TELLING: [&str; 4] = ["/inferencedeployments/", "/engineincidents", "/pods", "/events"];
const TOLD_MORE_MAX: u64 = 6;

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    pub violations: Vec<String>,
    pub hash: u64,
    /// Writes of operators, the Lease not counted.
    pub writes: u64,
    pub effective: u64,
    /// The same by object (P7).
    pub written: BTreeMap<String, u64>,
    pub events: u64,
    pub virtual_ms: u64,
    /// The objects as they are in the end, without what differs from run to run.
    pub end_state: Value,
    pub lines: Vec<String>,
    /// The words that operators said.
    pub said: Spoken,
}

impl Report {
    /// One that could not be run.
    pub fn failed(why: String) -> Self {
        Report {
            violations: vec![why],
            hash: 0,
            writes: 0,
            effective: 0,
            written: BTreeMap::new(),
            events: 0,
            virtual_ms: 0,
            end_state: Value::Null,
            lines: Vec::new(),
            said: Spoken::new(),
        }
    }

    /// The end must be that of `other`, which is `what`.
    pub fn compare(&mut self, property: &str, what: &str, other: &Report) {
        let (ours, theirs) = (self.end_state.clone(), &other.end_state);
        self.compare_ends(property, what, (&ours, theirs));
    }

    /// The same without what tells of the past: who stalled and was recorded, and what is avoided or was tried for it, depends on when
    /// somebody looked.
    pub fn compare_what_stands(&mut self, property: &str, what: &str, other: &Report) {
        let (ours, theirs) = (what_stands(&self.end_state), what_stands(&other.end_state));
        self.compare_ends(property, what, (&ours, &theirs));
    }

    fn compare_ends(&mut self, property: &str, what: &str, (ours, theirs): (&Value, &Value)) {
        let (Some(a), Some(b)) = (ours.as_object(), theirs.as_object()) else { return };
        let keys: BTreeSet<&String> = a.keys().chain(b.keys()).filter(|key| a.get(*key) != b.get(*key)).collect();
        let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), ToString::to_string);
        let differ = keys.into_iter().map(|key| format!("{key} is {} and not {}", text(a.get(key)), text(b.get(key))));
        let differ: Vec<String> = differ.collect();
        if !differ.is_empty() {
            self.violations.push(format!("{property}: the end differs from {what}: {}", differ.join("; ")));
        }
    }

    /// P7: no object was written more often than in `other`, a run without them, but once for each of so many faults. Status, incidents and
    /// pods' notes tell of the world, which somebody else gets to see in other pieces: they may be written some times more.
    pub fn writes_no_more(&mut self, other: &Report, faults: u64) {
        let most = |object: &String| {
            let each = if TELLING.iter().any(|kind| object.contains(kind)) { TOLD_MORE_MAX } else { 1 };
            other.written.get(object).copied().unwrap_or(0) + each * faults
        };
        let more = self.written.iter().filter(|(object, count)| **count > most(object));
        let more: Vec<String> =
            more.map(|(object, count)| format!("{object} {count} times and not {} at most", most(object))).collect();
        if !more.is_empty() {
            self.violations.push(format!("P7: written more often than without a fault: {}", more.join("; ")));
        }
    }

    /// What the log must and must not hold, where the end alone does not tell.
    pub fn has_words(&mut self, words: &[(&str, &str, bool)]) {
        for (property, word, wanted) in words {
            if self.lines.iter().any(|line| line.contains(word)) != *wanted {
                let which = if *wanted { "lacks" } else { "has" };
                self.violations.push(format!("{property}: the log {which} {word}"));
            }
        }
    }
}

fn what_stands(end: &Value) -> Value {
    let mut left = Map::new();
    for (key, value) in end.as_object().into_iter().flatten().filter(|(key, _)| !key.starts_with("engineincidents/")) {
        let mut value = value.clone();
        if key.starts_with("inferencedeployments/") {
            value["status"]["recovery"] = Value::Null;
        }
        left.insert(key.clone(), value);
    }
    left.into()
}

/// Writes by `METHOD /path`, by object; those of a kind together whose names are others in another run.
pub fn by_object(writes: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let mut objects = BTreeMap::new();
    for (write, count) in writes {
        let path = write.split_once(' ').map_or(write.as_str(), |(_, path)| path);
        let path = path.trim_end_matches("/status").trim_end_matches("/scale");
        let nameless = ["/pods/", "/engineincidents/"].iter().find_map(|kind| Some(path.find(kind)? + kind.len() - 1));
        *objects.entry(path[..nameless.unwrap_or(path.len())].to_owned()).or_default() += count;
    }
    objects
}
