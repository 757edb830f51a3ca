//! What a run came to, and how it is held against another.

use std::collections::BTreeSet;

use serde_json::Value;

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    pub violations: Vec<String>,
    pub hash: u64,
    /// Writes of operators, the Lease not counted.
    pub writes: u64,
    pub effective: u64,
    pub events: u64,
    pub virtual_ms: u64,
    /// The objects as they are in the end, without what differs from run to run.
    pub end_state: Value,
    pub lines: Vec<String>,
}

impl Report {
    /// One that could not be run.
    pub fn failed(why: String) -> Self {
        Report {
            violations: vec![why],
            hash: 0,
            writes: 0,
            effective: 0,
            events: 0,
            virtual_ms: 0,
            end_state: Value::Null,
            lines: Vec::new(),
        }
    }

    /// The end must be that of `other`, which is `what`.
    pub fn compare(&mut self, property: &str, what: &str, other: &Report) {
        let (Some(a), Some(b)) = (self.end_state.as_object(), other.end_state.as_object()) else { return };
        let keys: BTreeSet<&String> = a.keys().chain(b.keys()).filter(|key| a.get(*key) != b.get(*key)).collect();
        let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), ToString::to_string);
        let differ = keys.into_iter().map(|key| format!("{key} is {} and not {}", text(a.get(key)), text(b.get(key))));
        let differ: Vec<String> = differ.collect();
        if !differ.is_empty() {
            self.violations.push(format!("{property}: the end differs from {what}: {}", differ.join("; ")));
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
