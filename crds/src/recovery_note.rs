//! How far recovery goes, said to a pod that runs: an annotation that the kubelet shows to the agent as a file. So a change of mode stops or
//! allows restarts within a minute, and replaces no pod for it.

use serde::{Deserialize, Serialize};

use crate::recovery::{Recovery, RecoveryMode};

/// Pod annotation, written by the operator (and at first by the pod template): a [`RecoveryNote`] as JSON.
pub const ANNOTATION_RECOVERY: &str = "truebeat.io/recovery";

/// What of `spec.recovery` an agent goes by. It is started with the same as arguments, which hold until this is read. An agent outlives
/// upgrades of the operator: fields that it does not know are for its successors, and what it cannot read is no licence ([`RecoveryNote::mode`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
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

    /// What the annotation says; `None`: nothing that can be gone by whole.
    pub fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// How far recovery goes by the annotation alone; `None`: it is absent. A mode that is not known, of an operator that is newer, and a text
    /// that cannot be read are taken for the one that destroys nothing.
    pub fn mode(text: &str) -> Option<RecoveryMode> {
        #[derive(Deserialize)]
        struct Least {
            mode: RecoveryMode,
        }
        let said = |text| serde_json::from_str(text).map_or(RecoveryMode::Observe, |least: Least| least.mode);
        (!text.trim().is_empty()).then(|| said(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_another_version_is_read_and_never_for_a_licence() {
        let note = RecoveryNote::of(&Recovery { mode: RecoveryMode::Observe, ..Recovery::default() });
        assert_eq!(note.text(), r#"{"mode":"Observe","unattendedAfter":"5m","unattendedWindow":"1h"}"#);
        assert_eq!(RecoveryNote::read(&note.text()), Some(note));
        let newer = r#"{"mode":"Fence","unattendedAfter":"5m","unattendedWindow":"1h","drain":{"first":true}}"#;
        assert_eq!(RecoveryNote::read(newer).map(|note| note.mode), Some(RecoveryMode::Fence));
        assert_eq!(RecoveryNote::mode(newer), Some(RecoveryMode::Fence));
        assert_eq!(RecoveryNote::mode(r#"{"mode":"Recover"}"#), Some(RecoveryMode::Recover));
        assert_eq!((RecoveryNote::mode(""), RecoveryNote::mode(" \n")), (None, None));
        for odd in [
            "Observe",
            "{}",
            r#"{"mode":"observe","unattendedAfter":"5m","unattendedWindow":"1h"}"#,
            r#"{"mode":"Migrate"}"#,
        ] {
            assert_eq!(
                (RecoveryNote::read(odd), RecoveryNote::mode(odd)),
                (None, Some(RecoveryMode::Observe)),
                "{odd}"
            );
        }
    }
}
