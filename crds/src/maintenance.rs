//! Maintenance: an annotation on a pod by which a person or a platform says that its engine may be silent on purpose (weights are
//! exchanged, a profiler holds it). The agent reads it from a file (downward API) and holds no silence against the engine meanwhile: a
//! suspicion ends, a stall is not wanted restarted, and traffic goes on. Whoever wants none fences as well (see [`crate::fence`]).

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fence::Fence;

/// Pod annotation, written by people and platforms: a [`Maintenance`] as JSON.
pub const ANNOTATION_MAINTENANCE: &str = "truebeat.io/maintenance";

/// Who declared it, when and why: what a fence says too. And for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Maintenance {
    #[serde(flatten)]
    pub fence: Fence,
    /// Its end, RFC 3339; `None`: until somebody takes it off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct End {
    until: Option<String>,
}

impl Maintenance {
    /// What the annotation says; `None`: it is absent, empty, or `false`. One that cannot be read counts all the same: somebody meant it.
    pub fn read(text: &str) -> Option<Self> {
        if text.trim() == "false" {
            return None;
        }
        let fence = Fence::read(text)?;
        let end: End = serde_json::from_str(text).unwrap_or_default();
        let until = end.until.map(|text| text.chars().filter(|c| !c.is_control()).take(64).collect());
        Some(Self { fence, until })
    }

    /// Does it still hold? One whose end cannot be read has none.
    pub fn holds(&self, now: Timestamp) -> bool {
        self.ends().is_none_or(|end| now < end)
    }

    /// In words, for the log and for people.
    pub fn words(&self) -> String {
        let Fence { by, why, .. } = &self.fence;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        let end = match (&self.until, self.ends()) {
            (Some(_), Some(end)) => format!(" until {end}"),
            (Some(text), None) => format!(" without an end (`until` {text:?} is no time in RFC 3339)"),
            (None, _) => " without an end".to_owned(),
        };
        format!("maintenance declared by {by}{end}{why}")
    }

    fn ends(&self) -> Option<Timestamp> {
        self.until.as_ref()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maintenance_is_read_like_a_fence_and_false_is_none() {
        let words = |text: &str| Maintenance::read(text).map(|it| it.words());
        let open = "maintenance declared by ann without an end: weights";
        assert_eq!(words(r#"{"by":"ann","why":"weights"}"#).as_deref(), Some(open));
        assert_eq!(words("true").as_deref(), Some("maintenance declared by somebody without an end"));
        assert_eq!((words(""), words(" false\n")), (None, None));
    }

    #[test]
    fn one_with_an_end_holds_until_then_and_one_whose_end_is_no_time_for_good() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        for (until, holds) in [
            ("2026-01-01T00:00:01Z", true),
            ("2026-01-01T00:00:00Z", false),
            ("2025-12-31T23:59:59Z", false),
            ("later", true),
        ] {
            let said = Maintenance { fence: Fence { by: "ann".into(), ..Fence::default() }, until: Some(until.into()) };
            let read = Maintenance::read(&serde_json::to_string(&said).unwrap()).unwrap();
            assert_eq!(read, said);
            assert_eq!(read.holds(now), holds, "{until}");
            assert!(read.words().contains(until), "{}", read.words());
        }
        assert!(Maintenance::read("true").unwrap().holds(now));
    }
}
