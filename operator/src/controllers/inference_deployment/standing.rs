//! How many replicas a deployment adds to the fleet (I2), pure: those that are there, and not those that its spec asks for.
//!
//! A spec is its tenant's word alone: whoever asked for a thousand replicas that no node takes would widen everybody's restart budget, and
//! make a common cause look small. There is whoever the kubelet calls ready, whoever an open episode keeps from that, and whoever is away to
//! be replaced. Whoever starts, finds no node, or is kept aside by a person (an annotation, which a tenant can write on any pod) is not: a
//! count that is too low grants less and holds sooner. From a status it is told no more than twice what runs, by pods that are ready
//! and say that they are fenced.

use crds::{Grant, GrantAction, InferenceDeploymentStatus};
use serde_json::Value;

use super::{escalate::in_stall, observed::PodView};

/// What a status counts of the pods that are not on their way out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub pods: usize,
    pub ready: usize,
    /// Kept out of traffic by an open episode.
    pub fenced: usize,
    pub stalled: usize,
    /// Grants to be replaced.
    pub replaced: usize,
}

impl Counts {
    pub fn of(status: &InferenceDeploymentStatus) -> Self {
        let count = |n: i32| usize::try_from(n).unwrap_or(0);
        Counts {
            pods: count(status.replicas),
            ready: count(status.ready_replicas),
            fenced: count(status.fenced_replicas.saturating_sub(status.fenced_by_person)),
            stalled: count(status.stalled_replicas),
            replaced: replaced(&status.recovery.grants),
        }
    }

    /// The same of a status that this version may not be able to read whole.
    pub fn of_json(status: &Value) -> Self {
        let count = |field: &str| status[field].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        let grants = status["recovery"]["grants"].as_array().into_iter().flatten();
        Counts {
            pods: count("replicas"),
            ready: count("readyReplicas"),
            fenced: count("fencedReplicas").saturating_sub(count("fencedByPerson")),
            stalled: count("stalledReplicas"),
            replaced: grants.filter(|grant| grant["action"] == "Replace").count(),
        }
    }

    /// Who stalls, fenced or not: the last replica that serves is spared the fence (I3), and a fleet of single replicas would seem well. So
    /// does who is fenced and not confirmed yet, but not whom a person fenced: that is no stall (I2).
    pub fn alarmed(&self) -> usize {
        self.stalled.max(self.fenced)
    }

    pub fn standing(&self) -> usize {
        (self.ready + self.fenced + self.replaced).max(self.stalled).min(self.pods)
    }
}

/// The same by a look at the pods themselves.
pub fn of_pods(pods: &[PodView], grants: &[Grant]) -> usize {
    let here = || pods.iter().filter(|pod| !pod.leaving);
    let there = here().filter(|pod| pod.ready || pod.fenced() || in_stall(pod)).count();
    (there + replaced(grants)).min(here().count())
}

fn replaced(grants: &[Grant]) -> usize {
    grants.iter().filter(|grant| grant.action == GrantAction::Replace).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{healthy, leaving, pod};
    use crds::fence::Fence;
    use serde_json::json;

    fn standing(status: Value) -> usize {
        let typed: InferenceDeploymentStatus = serde_json::from_value(status.clone()).unwrap();
        assert_eq!(Counts::of(&typed), Counts::of_json(&status), "both ways to read it are one");
        Counts::of(&typed).standing()
    }

    #[test]
    fn who_is_there_counts_and_who_is_only_wished_for_does_not() {
        let counts = |pods, ready, fenced, stalled| {
            standing(json!({
                "replicas": pods, "readyReplicas": ready, "fencedReplicas": fenced, "stalledReplicas": stalled,
            }))
        };
        assert_eq!(standing(json!({})), 0, "nobody has looked yet");
        assert_eq!(counts(1000, 4, 0, 0), 4, "no node takes the others");
        assert_eq!(counts(6, 0, 0, 0), 0, "all start");
        assert_eq!(counts(6, 0, 6, 6), 6, "all stall");
        assert_eq!(counts(6, 6, 0, 6), 6, "all stall where nobody fences");
        assert_eq!(counts(6, 0, 0, 6), 6, "all stall before they have served");
        assert_eq!(counts(2, 6, 0, 0), 2, "counted a moment apart in a scale-in");
        let aside = json!({"replicas": 900, "readyReplicas": 1, "fencedReplicas": 900, "fencedByPerson": 899});
        assert_eq!(standing(aside), 2, "an annotation makes no replica");
    }

    #[test]
    fn who_is_replaced_counts_until_its_successor_does() {
        let grant =
            |action: &str| json!({"episode": "e", "pod": "p", "podUid": "u", "action": action, "grantedAt": ""});
        let grants = |grants: &[Value]| json!({"replicas": 3, "readyReplicas": 2, "recovery": {"grants": grants}});
        assert_eq!(standing(grants(&[grant("Replace")])), 3);
        assert_eq!(standing(grants(&[grant("Restart")])), 2, "who restarts tells so itself");
        let both = [grant("Replace"), grant("Restart"), grant("Replace")];
        assert_eq!(standing(grants(&both)), 3, "no more than there are");
    }

    #[test]
    fn a_look_counts_as_its_status_does() {
        let starts = PodView { ready: false, progressing: None, ..healthy("starts") };
        let aside = PodView { ready: false, fence: Fence::read("yes"), ..healthy("aside") };
        let gone = leaving(healthy("gone"), "2026-01-01T00:00:00Z");
        let pods = [healthy("a"), pod("b", "Stalled", 1), pod("c", "Suspect", 1), starts, aside, gone];
        assert_eq!(of_pods(&pods, &[]), 3);
        let replace = Grant { action: GrantAction::Replace, ..Grant::default() };
        assert_eq!(of_pods(&pods, &[replace, Grant::default()]), 4);
        assert_eq!(of_pods(&[], &[Grant { action: GrantAction::Replace, ..Grant::default() }]), 0);
    }
}
