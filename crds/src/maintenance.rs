//! Maintenance: an annotation on a pod by which a person or a platform says that its engine may be silent on purpose (weights are
//! exchanged, a profiler holds it). The agent reads it from a file (downward API) and holds no silence against the engine meanwhile: a
//! suspicion ends, a stall is not wanted restarted, and traffic goes on. Whoever wants none fences as well (see [`crate::fence`]).

use crate::fence::Fence;

/// Pod annotation, written by people and platforms: a [`Maintenance`] as JSON.
pub const ANNOTATION_MAINTENANCE: &str = "truebeat.io/maintenance";

/// Who declared it, when and why: what a fence says too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Maintenance(Fence);

impl Maintenance {
    /// What the annotation says; `None`: it is absent, empty, or `false`. One that cannot be read counts all the same: somebody meant it.
    pub fn read(text: &str) -> Option<Self> {
        if text.trim() == "false" {
            return None;
        }
        Fence::read(text).map(Self)
    }

    /// In words, for the log.
    pub fn words(&self) -> String {
        let Fence { by, why, .. } = &self.0;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        format!("maintenance declared by {by}{why}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maintenance_is_read_like_a_fence_and_false_is_none() {
        let words = |text: &str| Maintenance::read(text).map(|it| it.words());
        assert_eq!(words(r#"{"by":"ann","why":"weights"}"#).as_deref(), Some("maintenance declared by ann: weights"));
        assert_eq!(words("true").as_deref(), Some("maintenance declared by somebody"));
        assert_eq!((words(""), words(" false\n")), (None, None));
    }
}
