//! How far recovery goes, said to a pod that runs: an annotation that the kubelet shows to the agent as a file. So a change of mode stops or
//! allows restarts within a minute, and replaces no pod for it.

use serde::{Deserialize, Serialize};

use crate::recovery::{Recovery, RecoveryMode};

/// Pod annotation, written by the operator (and at first by the pod template): a [`RecoveryNote`] as JSON.
pub const ANNOTATION_RECOVERY: &str = "truebeat.io/recovery";

/// What of `spec.recovery` an agent goes by. It is started with the same as arguments, which hold until this is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RecoveryNote {
    pub mode: RecoveryMode,
    /// A duration as in the spec.
    pub unattended_after: String,
    /// A duration as in the spec.
    pub unattended_window: String,
}

impl RecoveryNote {
    /// What `recovery` says to its pods.
    pub fn of(recovery: &Recovery) -> Self {
        RecoveryNote {
            mode: recovery.mode,
            unattended_after: recovery.unattended_after.clone(),
            unattended_window: recovery.unattended_window.clone(),
        }
    }

    /// As it stands on a pod; equal notes are equal texts.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() // three words are always JSON
    }

    /// What the annotation says; `None`: it is absent, or nothing that can be gone by.
    pub fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_whole_or_not_at_all() {
        let note = RecoveryNote::of(&Recovery { mode: RecoveryMode::Observe, ..Recovery::default() });
        assert_eq!(note.text(), r#"{"mode":"Observe","unattendedAfter":"5m","unattendedWindow":"1h"}"#);
        assert_eq!(RecoveryNote::read(&note.text()), Some(note));
        for odd in ["", "Observe", "{}", r#"{"mode":"observe","unattendedAfter":"5m","unattendedWindow":"1h"}"#] {
            assert_eq!(RecoveryNote::read(odd), None, "{odd}");
        }
    }
}
