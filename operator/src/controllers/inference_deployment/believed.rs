//! What of a pod's last word is believed, pure. A condition outlives the agent that wrote it, and may be sent once more.

use crds::{EngineIncident, Grant};
use jiff::Timestamp;

use super::{
    observed::{EpisodeView, PodView},
    restarts::{BEFORE_ITS_END, PATIENCE_MIN},
};

/// An episode that has ended never begins again, and no two have one id: what tells of it as open is an old report that somebody sent
/// once more (H8). It is no evidence for anything.
pub fn refuse_replays(pods: &mut [PodView], incidents: &[EngineIncident]) {
    for pod in pods {
        let Some(id) = pod.open_episode().map(|episode| episode.id.clone()) else { continue };
        let ended = |incident: &&EngineIncident| {
            let stage = incident.status.as_ref().map_or("", |status| status.stage.as_str());
            incident.tells_of(&id, &pod.uid) && matches!(stage, "Recovered" | "Cleared")
        };
        if incidents.iter().any(|incident| ended(&incident)) {
            pod.episode =
                EpisodeView::Unreadable(format!("episode {id} has ended before, this is an old report of it"));
        }
    }
}

/// A pod whose engine was started again after its stall was confirmed, and that serves by the kubelet's word, is mended: the kubelet asks the
/// agent. Where the pod tells of the stall all the same for as long as a restart is waited for at least, its agent is not heard (the network of
/// pods, or its right to report, is gone), and what it said last is no evidence for anything.
pub fn refuse_outlived(pods: &mut [PodView], grants: &[Grant], now: Timestamp) {
    for pod in pods {
        let told = pod.open_episode().filter(|episode| BEFORE_ITS_END.contains(&episode.stage.as_str()));
        let parsed = |at: Option<&str>| at.and_then(|at| at.parse::<Timestamp>().ok());
        let times = told
            .and_then(|episode| parsed(episode.confirmed_at.as_deref().or(episode.suspect_at.as_deref())))
            .zip(parsed(pod.engine_since.as_deref()));
        let Some((stalled_at, since)) = times else { continue };
        // where the count at the grant is known it says the same, and no clock that was set meanwhile can make it up
        let again = grants.iter().find(|grant| grant.pod_uid == pod.uid).and_then(|grant| grant.restarts);
        if pod.ready
            && again.is_none_or(|before| pod.restarts > before)
            && since > stalled_at
            && now.duration_since(since) > PATIENCE_MIN
        {
            pod.episode = EpisodeView::Unreadable(format!(
                "its engine was started again at {since:.0}, after the stall of {stalled_at:.0} that it still tells of, and it is Ready: its \
                 agent does not reach the API server"
            ));
            pod.progressing = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{escalate::Terms, grants, testing};
    use crds::inference_deployment::RecoveryMode::Recover;
    use serde_json::json;

    #[test]
    fn fault_h8_an_episode_that_has_ended_is_not_reported_open_again() {
        let record = |stage: &str, uid: &str| -> EngineIncident {
            let spec =
                json!({"deployment": "chat", "pod": "a", "podUid": uid, "class": "Livelock", "episodeId": "e-a"});
            serde_json::from_value(json!({"metadata": {"name": "i"}, "spec": spec, "status": {"stage": stage}}))
                .unwrap()
        };
        for (stage, uid, open) in [
            ("Recovered", "uid-a", false),
            ("Cleared", "uid-a", false),
            ("Killed", "uid-a", true),
            ("Recovered", "uid-b", true),
        ] {
            let mut pods = [testing::pod("a", "Stalled", 1)];
            refuse_replays(&mut pods, &[record(stage, uid)]);
            assert_eq!(pods[0].open_episode().is_some(), open, "{stage} {uid}");
            assert_eq!(matches!(&pods[0].episode, EpisodeView::Unreadable(why) if why.contains("e-a")), !open);
        }
    }

    const NOT_AGAIN: &str = "2026-01-01T00:04:00Z";

    /// It stalled at 00:00:01, its agent used the key and lost the API server: the kubelet alone tells the rest.
    #[test]
    fn an_agent_that_is_not_heard_after_its_restart_holds_no_slot() {
        let stalled = PodView { restarts: 2, ..testing::pod("a", "Stalled", 1) };
        let held =
            grants::next(&[], std::slice::from_ref(&stalled), &Terms::simple(Recover, 1), "2026-01-01T00:02:00Z");
        assert_eq!(held.len(), 1);
        let look = |stage: &str, ready, since: &str, now: &str| {
            let mut pods = [PodView {
                ready,
                restarts: if since == NOT_AGAIN { 2 } else { 3 },
                progressing: Some(false),
                engine_since: Some(since.to_owned()),
                ..testing::pod("a", stage, 1)
            }];
            refuse_outlived(&mut pods, &held, now.parse().unwrap());
            let kept = grants::next(&held, &pods, &Terms::simple(Recover, 1), now).len();
            (kept, pods[0].progressing, pods[0].stalled())
        };
        let (believed, unheard) = ((1, Some(false), true), (0, None, false));
        let (before, after) = ("2025-12-31T23:59:00Z", "2026-01-01T00:05:00Z");
        let (soon, later) = ("2026-01-01T00:15:00Z", "2026-01-01T00:15:01Z");
        assert_eq!(look("Stalled", true, after, later), unheard);
        assert_eq!(look("Granted", true, after, later), unheard);
        assert_eq!(look("Stalled", true, after, soon), believed, "its word may be on its way");
        assert_eq!(look("Stalled", true, before, later), believed, "the last that serves is Ready while it stalls");
        assert_eq!(look("Stalled", true, NOT_AGAIN, later), believed, "a clock that was set since");
        assert_eq!(look("Stalled", false, after, later), believed, "it may stall as it did");
        assert!(look("Restarting", true, after, later).2, "that was said after the end");
    }
}
