//! What a restart of its node mends, pure.
//!
//! Tools that look after nodes reboot one because of what its condition says. The record of that outlasts the reboot, and so does what the
//! agents there have said before it, until they are up again: whoever judged by these would accuse the new node of what the old one
//! did, and have it rebooted for ever. So each record bears the boot in which it was made (`status.nodeInfo.bootID`), and of one that is over
//! only that stays true which no restart mends.

use crds::{Avoided, AvoidedBecause, EngineIncident, xid::XidRemedy};

use super::view::NodeView;
use crate::controllers::inference_deployment::observed::PodView;

/// The boot of this node as it was seen last; empty: nobody knows.
pub fn of<'a>(nodes: &'a [NodeView], node: &str) -> &'a str {
    nodes.iter().find(|known| known.name == node).map(|known| known.boot_id.as_str()).unwrap_or_default()
}

/// The boot in which the open episode of this pod was recorded first; where it is not recorded yet that is the one of now.
pub fn of_episode<'a>(pod: &PodView, incidents: &'a [EngineIncident], nodes: &'a [NodeView]) -> &'a str {
    let Some(episode) = pod.open_episode() else { return of(nodes, &pod.node) };
    let record = incidents.iter().find(|incident| incident.tells_of(&episode.id, &pod.uid));
    record.map_or_else(|| of(nodes, &pod.node), |incident| &incident.spec.boot_id)
}

/// Was the node started anew between these two boots? What is not known was not.
pub fn is_another(then: &str, now: &str) -> bool {
    !then.is_empty() && !now.is_empty() && then != now
}

/// What is left of a bad place in the boot of `now`: after a restart nothing but Xids for which a person must look.
pub fn left_of(mut place: Avoided, now: &str) -> Option<Avoided> {
    if !is_another(&place.boot_id, now) {
        return Some(place);
    }
    place.xids.retain(|xid| xid.remedy == XidRemedy::ContactSupport);
    place.because = AvoidedBecause::GpuFault;
    now.clone_into(&mut place.boot_id);
    (!place.xids.is_empty()).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{healthy, pod};
    use crds::xid::Xid;
    use serde_json::json;

    fn place(boot_id: &str, because: AvoidedBecause, remedies: &[XidRemedy]) -> Avoided {
        let xids = remedies.iter().map(|remedy| Xid { remedy: *remedy, ..Xid::default() }).collect();
        Avoided { boot_id: boot_id.to_owned(), because, xids, ..Avoided::default() }
    }

    #[test]
    fn a_restart_mends_all_but_what_a_person_must_look_at() {
        use AvoidedBecause::{GpuFault, RestartsDidNotCure, Unkillable};
        use XidRemedy::{ContactSupport, ResetGpu, RestartNode};
        for because in [GpuFault, RestartsDidNotCure, Unkillable] {
            let bad = place("b1", because, &[ResetGpu, RestartNode]);
            assert_eq!(left_of(bad.clone(), "b1"), Some(bad.clone()));
            assert_eq!(left_of(bad.clone(), ""), Some(bad.clone()), "nobody knows of a restart");
            assert_eq!(left_of(bad, "b2"), None);
        }
        let old = place("", Unkillable, &[]);
        assert_eq!(left_of(old.clone(), "b2"), Some(old), "of an operator that did not ask for it");
        let cable = place("b1", Unkillable, &[ResetGpu, ContactSupport]);
        let left = left_of(cable, "b2");
        assert_eq!(left, Some(place("b2", GpuFault, &[ContactSupport])));
        assert_eq!(left_of(left.clone().unwrap(), "b2"), left, "said once (P7)");
    }

    #[test]
    fn an_episode_is_of_the_boot_in_which_it_was_recorded() {
        let nodes = [NodeView { name: "n1".into(), boot_id: "b2".into(), ..NodeView::default() }];
        let told = pod("a", "Killed", 1);
        assert_eq!(of_episode(&told, &[], &nodes), "b2", "it is new");
        let record = |boot: &str| -> EngineIncident {
            let spec = json!({"deployment": "chat", "pod": "a", "podUid": "uid-a", "class": "x", "episodeId": "e-a", "bootId": boot});
            serde_json::from_value(json!({"metadata": {"name": "i"}, "spec": spec})).unwrap()
        };
        assert_eq!(of_episode(&told, &[record("b1")], &nodes), "b1");
        assert_eq!(of_episode(&told, &[record("")], &nodes), "", "recorded when no node could be listed");
        assert_eq!(of_episode(&pod("b", "Killed", 1), &[record("b1")], &nodes), "b2", "another's");
        assert_eq!(of_episode(&healthy("a"), &[record("b1")], &nodes), "b2");
        assert_eq!(of(&nodes, "n9"), "");
    }
}
