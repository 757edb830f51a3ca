//! How long a granted restart may take, pure. Its slot of the budget is held until the engine serves again, and an engine that never does
//! would hold it for ever: nobody else would be recovered, and in a small fleet nobody anywhere (I2).
//!
//! Two speeds, as everywhere (V6). Silence alone destroys nothing, for a large model takes long to load: after as long as a new replica has to
//! come up the slot is given back, and the pod is left to its start. (A start in which nothing moves is a stall of its own, which its agent
//! confirms.) An engine that ended again and again since is not starting but failing. No restart in place cures that, and its pod is
//! replaced on the slot that it has.
//!
//! Before the kill, and while the old process is there, no time bounds a grant: the key may be used at any moment. But an agent that is not
//! there uses none. Where the kubelet says so, and has for as long as anybody waits, its pod is replaced on the slot that it has.

use crds::{Grant, episode::Episode, rollout::Rollout};
use jiff::SignedDuration;

use super::{
    blame::CRASHES_MIN,
    escalate::{Terms, older},
    observed::PodView,
};

/// The deadline of a rollout is for people who load models of any size, and by default an hour. Others do not wait for a slot so long, nor
/// does an impatient rollout make a restart of minutes one that is in vain.
pub const PATIENCE_MAX: SignedDuration = SignedDuration::from_mins(30);
/// So long at least, also where nobody can be asked for more.
pub const PATIENCE_MIN: SignedDuration = SignedDuration::from_mins(10);

/// Stages of a confirmed stall whose process has not ended, as far as its agent tells.
pub const BEFORE_ITS_END: [&str; 3] = ["Stalled", "Granted", "Killed"];

/// For so long a granted restart is waited for: as the deployment's author waits for a new replica, within bounds.
pub fn patience(rollout: &Rollout) -> SignedDuration {
    SignedDuration::from_secs(rollout.progress_deadline_seconds.into()).clamp(PATIENCE_MIN, PATIENCE_MAX)
}

/// Has the engine ended since, on its way up from the restart that this grant is for? (The first end is the kill.)
pub fn fails(grant: &Grant, pod: &PodView) -> bool {
    failed_starts(grant, pod) > 0
}

/// Is the restart in vain? Its engine ended so often as nobody takes for chance, or once at least and its time is over.
pub fn in_vain(grant: &Grant, pod: &PodView, terms: &Terms<'_>, now: &str) -> bool {
    let failed = failed_starts(grant, pod);
    failed >= CRASHES_MIN || (failed > 0 && overdue(pod, &grant.granted_at, terms, now)) || is_unheard(grant, pod, now)
}

/// Was this restart granted to an agent that is not there any more, and that will not be back? What it confirmed stands (I1), and nobody else
/// could take it back.
fn is_unheard(grant: &Grant, pod: &PodView, now: &str) -> bool {
    let same = pod.open_episode().is_some_and(|episode| episode.id == grant.episode);
    same && is_left(pod) && older(&grant.granted_at, PATIENCE_MIN, now)
}

/// Has an agent confirmed a stall and gone before its restart was done? It says that it has the key as soon as it sees it, and uses it only when
/// the evidence is in.
pub fn is_left(pod: &PodView) -> bool {
    let begun = |episode: &Episode| BEFORE_ITS_END.contains(&episode.stage.as_str());
    pod.agent_away && !pod.leaving && pod.open_episode().is_some_and(begun)
}

/// Is this pod on its way up again for longer than anybody waits for it?
pub fn overdue(pod: &PodView, granted_at: &str, terms: &Terms<'_>, now: &str) -> bool {
    on_its_way_up(pod).is_some() && older(granted_at, terms.patience, now)
}

/// The same of a restart that stands in no budget, by what was seen of it: when it began only its agent says, by the clock of its node.
pub fn seen_too_long(pod: &PodView, terms: &Terms<'_>) -> bool {
    on_its_way_up(pod).is_some() && pod.coming_up_for > terms.patience
}

/// What an older operator granted does not say from where to count.
fn failed_starts(grant: &Grant, pod: &PodView) -> i32 {
    let same = on_its_way_up(pod).is_some_and(|episode| episode.id == grant.episode);
    let ends = grant.restarts.filter(|_| same).map(|before| pod.restarts.saturating_sub(before));
    ends.unwrap_or(0).saturating_sub(1)
}

/// The old process is proven gone, and no new one has served yet.
pub fn on_its_way_up(pod: &PodView) -> Option<&Episode> {
    pod.open_episode().filter(|episode| episode.stage == "Restarting" && !pod.leaving)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        grants,
        testing::{granted_by, healthy, infd, pod},
    };
    use crds::{
        GrantAction, InferenceDeployment,
        inference_deployment::RecoveryMode::{Fence, Recover},
    };
    use jiff::Timestamp;

    const GRANTED: &str = "2026-01-01T00:01:00Z";

    /// `GRANTED` and so many seconds.
    fn at(seconds: i64) -> String {
        (GRANTED.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seconds)).to_string()
    }

    fn terms() -> Terms<'static> {
        Terms::simple(Recover, 1)
    }

    /// The pod whose restart was granted, `restarts` after it was created.
    fn restarting(restarts: i32) -> PodView {
        let mut pod = PodView { restarts, ..pod("a", "Restarting", 1) };
        granted_by(&mut pod, "operator");
        pod
    }

    fn granted() -> Grant {
        let stalled = PodView { restarts: 2, ..pod("a", "Stalled", 1) };
        let held = grants::next(&[], &[stalled], &Terms::simple(Recover, 1), GRANTED);
        held.into_iter().next().unwrap()
    }

    /// The grants of a deployment of three, after so many seconds: one restarts, one waits.
    fn look(
        infd: &InferenceDeployment,
        held: &[Grant],
        restarting: PodView,
        seconds: i64,
    ) -> Vec<(String, GrantAction)> {
        let pods = [restarting, pod("b", "Stalled", 2), healthy("c")];
        let mut infd = infd.clone();
        infd.spec.recovery.restart_backoff = "0s".to_owned();
        let next = grants::next(held, &pods, &Terms::of(&infd, &pods, None), &at(seconds));
        next.into_iter().map(|grant| (grant.episode, grant.action)).collect()
    }

    fn of(name: &str, action: GrantAction) -> Vec<(String, GrantAction)> {
        vec![(format!("e-{name}"), action)]
    }

    #[test]
    fn an_engine_that_ends_at_every_start_is_replaced_on_its_own_slot() {
        let (infd, held) = (infd("chat"), [granted()]);
        let look = |restarts, seconds| look(&infd, &held, restarting(restarts), seconds);
        assert_eq!(look(3, 300), of("a", GrantAction::Restart), "the kill is no failed start");
        assert_eq!(look(5, 300), of("a", GrantAction::Restart), "two may be chance");
        assert_eq!(look(6, 300), of("a", GrantAction::Replace));
        let (after, in_time) = (30 * 60 + 1, 30 * 60);
        assert_eq!(look(4, in_time), of("a", GrantAction::Restart));
        assert_eq!(look(4, after), of("a", GrantAction::Replace), "its time is over, and it has ended since");
    }

    #[test]
    fn a_replacement_of_what_fails_goes_on_until_it_is_made() {
        let held = [granted()];
        let pods = [restarting(6), healthy("b")];
        let next = |held: &[Grant], pods: &[PodView]| grants::next(held, pods, &Terms::simple(Recover, 1), &at(300));
        let replace = next(&held, &pods);
        assert_eq!(replace[0].action, GrantAction::Replace);
        assert!(grants::to_replace(&replace, &pods[0], &terms()), "counted from where it was");
        assert_eq!(next(&replace, &pods), replace, "quiescent is silent (P7)");
        let spared = [PodView { leaving: true, ..restarting(6) }, pod("a", "Recovered", 1), pod("a", "Suspect", 1)];
        spared.iter().for_each(|pod| assert!(!grants::to_replace(&replace, pod, &terms()), "{pod:?}"));
    }

    #[test]
    fn an_agent_that_is_gone_hears_of_no_grant_and_its_pod_is_replaced() {
        ["Stalled", "Granted", "Killed"].into_iter().for_each(an_agent_is_gone_in);
    }

    fn an_agent_is_gone_in(stage: &str) {
        let (infd, held) = (infd("chat"), [granted()]);
        let stalled = |agent_away| PodView { restarts: 2, agent_away, ..pod("a", stage, 1) };
        let look = |agent_away, seconds| look(&infd, &held, stalled(agent_away), seconds);
        assert_eq!(look(true, 600), of("a", GrantAction::Restart), "it may be back");
        assert_eq!(look(true, 601), of("a", GrantAction::Replace));
        assert_eq!(look(false, 7_200), of("a", GrantAction::Restart), "whoever runs may use its key at any moment");
        let replace = grants::next(&held, &[stalled(true), healthy("b")], &Terms::simple(Recover, 1), &at(601));
        assert!(grants::to_replace(&replace, &stalled(true), &terms()));
        let back = PodView { agent_away: false, ..pod("a", "Cleared", 1) };
        assert!(!grants::to_replace(&replace, &back, &terms()), "one that came back in time is spared");
        let fence = grants::next(&held, &[stalled(true)], &Terms::simple(Fence, 1), &at(7_200));
        assert_eq!(fence, held, "nothing new in a mode that grants nothing");
    }

    #[test]
    fn a_slow_start_gives_its_slot_back_and_is_left_alone() {
        let held = [granted()];
        let mut infd = infd("chat");
        let last = |infd: &InferenceDeployment| {
            (0..120)
                .map(|minute| 60 * minute)
                .rfind(|s| look(infd, &held, restarting(3), *s) == of("a", GrantAction::Restart))
        };
        for (deadline, wanted) in [(60, 600), (900, 900), (3_600, 1_800)] {
            infd.spec.rollout.progress_deadline_seconds = deadline;
            assert_eq!(last(&infd), Some(wanted), "{deadline}");
        }
        assert_eq!(look(&infd, &held, pod("a", "Killed", 1), 7_200), of("a", GrantAction::Restart), "not gone yet");
    }

    #[test]
    fn who_may_not_be_replaced_gives_the_slot_back_all_the_same() {
        let (held, pods) = ([granted()], [restarting(9), healthy("b")]);
        let next = |terms: Terms<'_>, seconds| grants::next(&held, &pods, &terms, &at(seconds));
        let refused = || Terms { pods_refused: true, ..Terms::simple(Recover, 1) };
        for terms in [refused, || Terms::simple(Fence, 1)] {
            assert_eq!(next(terms(), 300), held);
            assert_eq!(next(terms(), 1_801), []);
        }
    }

    #[test]
    fn what_was_granted_elsewhere_holds_up_nobody_for_ever() {
        let seen = |seconds, granted_at: &str| {
            let mut pod = PodView { coming_up_for: SignedDuration::from_secs(seconds), ..restarting(1) };
            if let crate::controllers::inference_deployment::observed::EpisodeView::Known(known) = &mut pod.episode {
                known.episode.granted_at = Some(granted_at.to_owned());
            }
            look(&infd("chat"), &[], pod, seconds)
        };
        for agents_clock in [GRANTED, "2025-12-31T22:00:00Z", "2026-01-01T04:00:00Z"] {
            assert_eq!(seen(1_800, agents_clock), [], "{agents_clock}");
            assert_eq!(seen(1_801, agents_clock), of("b", GrantAction::Restart), "{agents_clock}");
        }
    }

    #[test]
    fn a_grant_of_an_older_operator_is_bounded_by_time_alone() {
        let held = [Grant { restarts: None, ..granted() }];
        let look = |seconds, seen| {
            let pod = PodView { coming_up_for: SignedDuration::from_secs(seen), ..restarting(9) };
            look(&infd("chat"), &held, pod, seconds)
        };
        assert_eq!(
            (look(1_800, 1_800), look(1_801, 1_801)),
            (of("a", GrantAction::Restart), of("b", GrantAction::Restart))
        );
        assert_eq!(look(1_801, 60), [], "whoever leads anew waits as long as it has seen it come up");
    }
}
