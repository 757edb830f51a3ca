//! A person's fence: an annotation on a pod that keeps new requests away from it until a person takes it off. The agent
//! reads it from a file (downward API) and shuts the gate; the operator keeps the record. Nobody restarts anything for it:
//! a restart needs the two keys as ever (I1).

use serde::{Deserialize, Serialize};

/// Pod annotation, written by people (`kubectl truebeat fence`): a [`Fence`] as JSON.
pub const ANNOTATION_FENCE: &str = "truebeat.io/fence";
/// Class of the incidents that tell of a person's fence, and the reason that the agent gives.
pub const FENCED_BY_PERSON: &str = "FencedByPerson";

const TEXT_BYTES_MAX: usize = 4096;

/// Who took a replica out of traffic, when and why.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Fence {
    /// The person, as the API server knows them.
    pub by: String,
    /// When, RFC 3339.
    pub at: String,
    /// Why, in words.
    pub why: String,
}

impl Fence {
    /// What the annotation says; `None`: it is absent or empty. One that cannot be read fences all the same: somebody
    /// meant it, and traffic for a replica that a person wants spared does more harm than its absence.
    pub fn read(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.is_empty() {
            return None;
        }
        let read: Self =
            (text.len() <= TEXT_BYTES_MAX).then(|| serde_json::from_str(text).ok()).flatten().unwrap_or_default();
        let by = if read.by.is_empty() { "somebody" } else { &read.by };
        Some(Self::of(by, &read.at, &read.why))
    }

    /// What is written and what is read: in one line, and no longer than a condition bears. An annotation that is longer than
    /// [`Fence::read`] reads would lose who wrote it as well.
    pub fn of(by: &str, at: &str, why: &str) -> Self {
        let cut = |text: &str, max: usize| text.chars().filter(|c| !c.is_control()).take(max).collect::<String>();
        Self { by: cut(by, 128), at: cut(at, 64), why: cut(why, 256) }
    }

    /// In words, for clients and conditions.
    pub fn words(&self) -> String {
        let why = if self.why.is_empty() { String::new() } else { format!(": {}", self.why) };
        format!("fenced by {}{why}", self.by)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_is_read_whole_and_nonsense_still_fences() {
        let fence = Fence { by: "ann".into(), at: "2026-01-01T00:00:00Z".into(), why: "to look at it".into() };
        let text = serde_json::to_string(&fence).unwrap();
        assert_eq!(Fence::read(&text), Some(fence.clone()));
        assert_eq!(fence.words(), "fenced by ann: to look at it");
        assert_eq!((Fence::read(""), Fence::read(" \n")), (None, None));
        for odd in ["yes", "{}", "[1]", &"x".repeat(9999)] {
            assert_eq!(Fence::read(odd).map(|fence| fence.words()).as_deref(), Some("fenced by somebody"), "{odd:.20}");
        }
        let long = Fence { why: "a\n".repeat(400), ..fence };
        let read = Fence::read(&serde_json::to_string(&long).unwrap()).unwrap();
        assert_eq!(read.why, "a".repeat(256), "bounded, and one line");
        let pasted = Fence::of("ann", "2026-01-01T00:00:00Z", &"x".repeat(9999));
        let read = Fence::read(&serde_json::to_string(&pasted).unwrap()).unwrap();
        assert_eq!(
            (read.by.as_str(), read.why.len()),
            ("ann", 256),
            "whoever gives a long reason is known all the same"
        );
    }
}
