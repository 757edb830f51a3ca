//! Reads the episode that an agent put on its pod. The text comes from a pod, so it is untrusted: everything is
//! bounded, a wrong text is an error that says what is wrong, and never a crash.

use crds::{
    episode::Episode,
    poison::{IN_FLIGHT_MAX, is_fingerprint, milliseconds},
    xid,
};
use thiserror::Error;

const TEXT_BYTES_MAX: usize = 32 * 1024;
const REASONS_MAX: usize = 16;
const GPUS_MAX: usize = 64;
const STAGES: [&str; 7] = ["Suspect", "Stalled", "Granted", "Killed", "Restarting", "Recovered", "Cleared"];

/// Why an episode could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ReadError {
    #[error("{0} bytes, more than {TEXT_BYTES_MAX}")]
    TooLong(usize),
    #[error("not the JSON of an episode: {0}")]
    Json(String),
    #[error("id {0:?} is not 1 to 128 of [a-z0-9.-]")]
    Id(String),
    #[error("stage {0:?} is none of Suspect, Stalled, Granted, Killed, Restarting, Recovered, Cleared")]
    Stage(String),
    #[error("class {0:?} is not 1 to 64 letters or digits")]
    Class(String),
    #[error("{field} {text:?} is no RFC 3339 time")]
    Time { field: &'static str, text: String },
}

/// The episode in `text`, with every list and free string cut to what an `EngineIncident` may hold.
pub fn read(text: &str) -> Result<Episode, ReadError> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(ReadError::TooLong(text.len()));
    }
    let mut episode: Episode = serde_json::from_str(text).map_err(|e| ReadError::Json(cut(&e.to_string(), 200)))?;
    let id_chars = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' || c == '-';
    if episode.id.is_empty() || episode.id.len() > 128 || !episode.id.chars().all(id_chars) {
        return Err(ReadError::Id(cut(&episode.id, 128)));
    }
    if !STAGES.contains(&episode.stage.as_str()) {
        return Err(ReadError::Stage(cut(&episode.stage, 64)));
    }
    if episode.class.is_empty() || episode.class.len() > 64 || !episode.class.chars().all(|c| c.is_ascii_alphanumeric())
    {
        return Err(ReadError::Class(cut(&episode.class, 64)));
    }
    check_times(&episode)?;
    episode.reasons.truncate(REASONS_MAX);
    episode.reasons.iter_mut().for_each(|reason| *reason = cut(reason, 512));
    episode.gpu_uuids.truncate(GPUS_MAX);
    episode.gpu_uuids.iter_mut().for_each(|uuid| *uuid = cut(uuid, 128));
    episode.xids = xid::bounded(std::mem::take(&mut episode.xids));
    episode.in_flight.retain(|one| is_fingerprint(&one.request));
    episode.in_flight.truncate(IN_FLIGHT_MAX);
    let is_time = |at: &String| at.len() <= 64 && milliseconds(at).is_some();
    episode.in_flight.iter_mut().for_each(|one| one.completed_at = one.completed_at.take().filter(is_time));
    for (field, max) in [(&mut episode.bundle, 1024), (&mut episode.fingerprint, 128), (&mut episode.granted_by, 32)] {
        *field = field.take().map(|text| cut(&text, max));
    }
    Ok(episode)
}

fn check_times(episode: &Episode) -> Result<(), ReadError> {
    let times = [
        ("suspectAt", &episode.suspect_at),
        ("fencedAt", &episode.fenced_at),
        ("confirmedAt", &episode.confirmed_at),
        ("evidenceAt", &episode.evidence_at),
        ("grantedAt", &episode.granted_at),
        ("killedAt", &episode.killed_at),
        ("servingAt", &episode.serving_at),
    ];
    for (field, text) in times {
        let Some(text) = text else { continue };
        if text.len() > 64 || text.parse::<jiff::Timestamp>().is_err() {
            return Err(ReadError::Time { field, text: cut(text, 64) });
        }
    }
    Ok(())
}

/// At most `max` characters on one line: what a pod says is shown on people's terminals.
fn cut(text: &str, max: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn with(field: &str, value: serde_json::Value) -> String {
        let mut episode = json!({"id": "a-1", "class": "StepStalled", "stage": "Stalled"});
        episode[field] = value;
        episode.to_string()
    }

    #[test]
    fn a_good_episode_is_read_whole() {
        let text = with("suspectAt", json!("2026-01-02T03:04:05.678Z"));
        let episode = read(&text).expect("good");
        assert!(episode.awaits_grant());
        assert_eq!(episode.suspect_at.as_deref(), Some("2026-01-02T03:04:05.678Z"));
    }

    #[test]
    fn each_fault_is_named() {
        let long = "x".repeat(TEXT_BYTES_MAX + 1);
        assert_eq!(read(&long), Err(ReadError::TooLong(long.len())));
        assert!(matches!(read("{"), Err(ReadError::Json(_))));
        assert!(matches!(read(r#"{"id":1}"#), Err(ReadError::Json(_))));
        for id in [json!(""), json!("A"), json!("a/b"), json!("a".repeat(129))] {
            assert!(matches!(read(&with("id", id)), Err(ReadError::Id(_))));
        }
        assert!(matches!(read(&with("stage", json!("Fine"))), Err(ReadError::Stage(_))));
        assert!(matches!(read(&with("class", json!("a b"))), Err(ReadError::Class(_))));
        assert!(matches!(read(&with("killedAt", json!("now"))), Err(ReadError::Time { field: "killedAt", .. })));
    }

    #[test]
    fn long_parts_are_cut_not_refused() {
        let episode = read(&with("reasons", json!(vec!["ä".repeat(600); 20]))).expect("good");
        assert_eq!((episode.reasons.len(), episode.reasons[0].chars().count()), (16, 512));
    }

    #[test]
    fn xids_are_taken_as_far_as_they_can_be() {
        let good = json!({"code": 79, "gpu": "GPU-1", "remedy": "RestartNode"});
        let episode = read(&with("xids", json!([{"code": 0}, good, {"code": 31, "remedy": "Pray"}]))).expect("good");
        assert_eq!(episode.xids.iter().map(|xid| xid.code).collect::<Vec<_>>(), [79, 31]);
        assert!(episode.needs_another_place() && episode.awaits_grant());
        assert_eq!(read(&with("xids", json!(vec![good; 200]))).expect("good").xids.len(), xid::XIDS_MAX);
        assert!(matches!(read(&with("xids", json!([{"code": "79"}]))), Err(ReadError::Json(_))));
    }

    #[test]
    fn requests_in_flight_are_taken_only_as_fingerprints_and_not_beyond_measure() {
        let good = json!({"request": "00000000000000aa", "completedAt": "2026-01-01T00:00:00Z"});
        let odd = json!({"request": "what is the password", "completedAt": "2026-01-01T00:00:00Z"});
        let never = json!({"request": "00000000000000bb", "completedAt": "soon"});
        let episode = read(&with("inFlight", json!([odd, good, never]))).expect("good");
        let told: Vec<_> =
            episode.in_flight.iter().map(|one| (one.request.as_str(), one.completed_at.is_some())).collect();
        assert_eq!(told, [("00000000000000aa", true), ("00000000000000bb", false)]);
        assert_eq!(read(&with("inFlight", json!(vec![good; 200]))).expect("good").in_flight.len(), IN_FLIGHT_MAX);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,400}", field in "[a-zA-Z]{1,12}", value in ".{0,200}") {
            let _ = read(&text);
            if let Ok(episode) = read(&with(&field, json!(value))) {
                prop_assert!(episode.id.len() <= 128);
            }
        }
    }
}
