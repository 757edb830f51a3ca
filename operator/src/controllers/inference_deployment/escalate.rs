//! The terms on which restarts are granted (I2, I3), pure: when to hold because of a common cause, when a restart in place
//! has failed often enough to replace the pod, and which pod is the last that serves.

use crds::{
    Grant, GrantAction, InferenceDeployment, PastGrant,
    inference_deployment::{LastReplica, Recovery, RecoveryMode},
};
use jiff::{SignedDuration, Timestamp};

use super::{
    fleet::{Fleet, Slots},
    grants::wants_slot,
    observed::{PodView, ReportedEpisode},
    places::Places,
    restarts, standing, trials,
};
use crate::{controllers::nodes::view::NodeView, wall::ahead};

/// Fewer stalls than this are never called a common cause: two of two may be chance.
pub const HOLD_COUNT_MIN: usize = 3;
/// A replacement that does not come up gives its slot back after this; the stall of the others waits no longer for it.
pub const REPLACE_MAX: SignedDuration = SignedDuration::from_mins(10);
/// A pod that is still there so long after its grace does not end soon: a process outlives SIGKILL, or its node is not heard.
const LINGERS_AFTER: SignedDuration = SignedDuration::from_secs(30);
/// A delete that was sent has been felt by then, if it ever is.
const DELETED_BY: SignedDuration = SignedDuration::from_secs(30);

/// Of whoever has not looked at the fleet.
const ALL_SLOTS: Slots = Slots { count: usize::MAX, one_is_kept: false };

/// Why nothing is granted although something is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Hold {
    #[default]
    No,
    /// In words, for the condition.
    Deployment(String),
    Fleet(String),
    /// Only where these places are; elsewhere restarts are granted.
    Place(String),
}

/// The terms of one look.
#[derive(Debug, Clone)]
pub struct Terms<'a> {
    pub mode: RecoveryMode,
    pub max_unavailable: i32,
    /// What the fleet leaves to this deployment, its own grants included.
    pub fleet: Slots,
    pub hold: Hold,
    /// Does so much of the whole fleet stall that it is held, whatever else holds this deployment?
    pub fleet_alarmed: bool,
    /// One restart may be tried although restarts are held (`trials`).
    pub trial: bool,
    pub restarts_before_replace: usize,
    /// The first pause between two recoveries of one pod, and the longest.
    pub backoff: (SignedDuration, SignedDuration),
    pub window: SignedDuration,
    /// For so long a granted restart is waited for.
    pub patience: SignedDuration,
    /// So many replicas are kept up.
    pub replicas: usize,
    pub recent: &'a [PastGrant],
    /// Since when the run of trials goes on, if one does.
    pub run_since: Option<Timestamp>,
    /// What nodes and failure domains may bear.
    pub places: Places,
    /// Pods that are wanted cannot be made: whoever is deleted now may have no successor (A18).
    pub pods_refused: bool,
    /// A revision whose replicas get no restart any more; empty: none.
    pub revision_taken_back: &'a str,
}

impl<'a> Terms<'a> {
    /// The terms by the spec, by what the pods say, and by the fleet where somebody looked at it.
    pub fn of(infd: &'a InferenceDeployment, pods: &[PodView], fleet: Option<&Fleet>) -> Self {
        let recovery = &infd.spec.recovery;
        let count = |n: i32| usize::try_from(n).unwrap_or(0);
        let replicas = count(infd.spec.replicas);
        let remembered = infd.status.as_ref().and_then(|status| status.recovery.hold.as_ref());
        let stalled = pods.iter().filter(|pod| in_stall(pod)).count() + trials::unproven(remembered, pods);
        // a frozen or slow scale-in leaves more than the spec says, and of all that stand so many stall
        let standing = replicas.max(pods.iter().filter(|pod| !pod.leaving).count());
        let mut hold = hold_of(stalled, standing, count(recovery.hold_percent));
        let held = infd.status.as_ref().map(|s| s.recovery.grants.as_slice()).unwrap_or_default();
        let there = standing::of_pods(pods, held);
        let alarm = fleet.and_then(|fleet| fleet.alarm((there, stalled)));
        let fleet_alarmed = alarm.is_some();
        if hold == Hold::No {
            hold = alarm.map_or(Hold::No, Hold::Fleet);
        }
        let hold = if pods.iter().any(wants_slot) { hold } else { Hold::No };
        Terms {
            mode: recovery.mode,
            max_unavailable: recovery.max_unavailable,
            fleet: fleet.map_or(ALL_SLOTS, |fleet| fleet.slots(there)),
            hold: if recovery.mode == RecoveryMode::Recover { hold } else { Hold::No },
            fleet_alarmed,
            trial: false,
            restarts_before_replace: count(recovery.restarts_before_replace),
            backoff: backoff_of(recovery),
            window: window_of(recovery),
            patience: restarts::patience(&infd.spec.rollout),
            replicas,
            recent: infd.status.as_ref().map(|s| s.recovery.recent.as_slice()).unwrap_or_default(),
            run_since: trials::run_since(remembered),
            places: Places::default(),
            pods_refused: false,
            revision_taken_back: "",
        }
    }

    /// The same where pods cannot be made now.
    pub fn with_pods_refused(self, pods_refused: bool) -> Self {
        Terms { pods_refused, ..self }
    }

    /// The same without new restarts for replicas of this revision.
    pub fn without_restarts_of(self, revision_taken_back: &'a str) -> Self {
        Terms { revision_taken_back, ..self }
    }

    /// The same where another number of replicas than the spec's is kept up meanwhile.
    pub fn with_replicas(self, replicas: Option<usize>) -> Self {
        Terms { replicas: replicas.unwrap_or(self.replicas), ..self }
    }

    /// Is this pod of a revision that is taken back? It goes with its revision, and needs no restart, unless a person knows better.
    pub fn taken_back(&self, pod: &PodView) -> bool {
        !self.revision_taken_back.is_empty() && pod.revision == self.revision_taken_back && pod.asked().is_none()
    }

    /// Does this pod wait for a slot of the budget that it may have now?
    pub fn may_restart(&self, pod: &PodView, now: &str) -> bool {
        wants_slot(pod) && self.may_recover(pod, now)
    }

    /// May this pod have a recovery now, if there is a slot for it?
    pub fn may_recover(&self, pod: &PodView, now: &str) -> bool {
        !self.taken_back(pod) && self.backs_off_until(pod, now).is_none()
    }

    /// Until when this pod gets no further recovery, because the last one is too young; `None`: it may have one. A person does not wait.
    pub fn backs_off_until(&self, pod: &PodView, now: &str) -> Option<Timestamp> {
        if pod.asked().is_some() {
            return None;
        }
        let own: Vec<&PastGrant> = self.recoveries(pod, now).collect();
        let doublings = u32::try_from(own.len()).ok()?.checked_sub(1)?;
        let (first, longest) = self.backoff;
        let factor = 2_i32.checked_pow(doublings).unwrap_or(i32::MAX);
        let pause = first.checked_mul(factor).unwrap_or(longest).min(longest);
        let now: Timestamp = now.parse().ok()?;
        // What a former leader dated further ahead than that, by a clock that was wrong, withholds nobody for longer.
        let dated = own.iter().filter_map(|past| past.granted_at.parse::<Timestamp>().ok());
        let last = dated.filter(|at| at.duration_since(now) <= pause).max()?;
        let until = last.checked_add(pause).ok()?;
        (now < until).then_some(until)
    }

    /// Can no pod be made that could take the place of this one? Where no restart helps, it is of no use where it is.
    pub fn nobody_follows(&self, pod: &PodView) -> bool {
        self.pods_refused && !pod.needs_another_place()
    }

    /// The granted recoveries of this pod that still count.
    fn recoveries<'b>(&'b self, pod: &'b PodView, now: &'b str) -> impl Iterator<Item = &'b PastGrant> {
        self.recent.iter().filter(move |past| past.pod_uid == pod.uid && young(past, self.window, now))
    }

    /// The same with what is known of nodes.
    pub fn with_places(self, nodes: &[NodeView], pods: &[PodView], fleet: Option<&Fleet>, percent: i32) -> Self {
        let (others, most) = fleet.map_or((&[][..], (0, 0)), |fleet| (fleet.grants_at.as_slice(), fleet.place_max));
        let mut places = Places::new(nodes, others, most);
        places.hold(pods, usize::try_from(percent).unwrap_or(100));
        let hold = match (&self.hold, places.why_held(pods)) {
            (Hold::No, Some(why)) if self.mode == RecoveryMode::Recover => Hold::Place(why),
            _ => self.hold.clone(),
        };
        Terms { hold, places, ..self }
    }

    /// The same where one restart may be tried.
    pub fn with_trial(self, trial: bool) -> Self {
        Terms { trial, ..self }
    }

    /// Are restarts held on this node?
    pub fn holds_at(&self, node: &str) -> bool {
        match self.hold {
            Hold::No => false,
            Hold::Deployment(_) | Hold::Fleet(_) => true,
            Hold::Place(_) => self.places.holds(node),
        }
    }

    /// Terms with nothing but a budget, for the tests of it.
    #[cfg(test)]
    pub fn simple(mode: RecoveryMode, max_unavailable: i32) -> Self {
        let window = SignedDuration::from_mins(10);
        let (hold, places) = (Hold::No, Places::default());
        Terms {
            mode,
            max_unavailable,
            fleet: ALL_SLOTS,
            hold,
            fleet_alarmed: false,
            trial: false,
            restarts_before_replace: 2,
            backoff: (SignedDuration::ZERO, SignedDuration::ZERO),
            window,
            patience: SignedDuration::from_mins(30),
            replicas: 0,
            recent: &[],
            run_since: None,
            places,
            pods_refused: false,
            revision_taken_back: "",
        }
    }
}

/// How long a recovery counts.
pub fn window_of(recovery: &Recovery) -> SignedDuration {
    duration_of(&recovery.stability_window).unwrap_or(SignedDuration::from_mins(10))
}

/// The first pause between two recoveries of one pod, and the longest. One that cannot be read is none.
fn backoff_of(recovery: &Recovery) -> (SignedDuration, SignedDuration) {
    let pause = |text: &str| duration_of(text).unwrap_or_default();
    (pause(&recovery.restart_backoff), pause(&recovery.restart_backoff_max))
}

/// A duration of the API; `None`: it cannot be read, which `validate` tells its author.
pub fn duration_of(text: &str) -> Option<SignedDuration> {
    humantime::parse_duration(text).ok().and_then(|duration| SignedDuration::try_from(duration).ok())
}

/// Do so many of so many stall at once that they have one cause?
pub fn common_cause(stalled: usize, all: usize, percent: usize) -> bool {
    percent < 100 && stalled >= HOLD_COUNT_MIN && stalled * 100 > all * percent
}

/// Does this pod count where a common cause is looked for? Whoever was granted a restart and is not up again does: a grant that took its
/// pod out of the count would hide the very cause for which the next one is to be held.
pub fn in_stall(pod: &PodView) -> bool {
    !pod.leaving && (pod.stalled() || wants_slot(pod))
}

fn hold_of(stalled: usize, replicas: usize, percent: usize) -> Hold {
    if common_cause(stalled, replicas, percent) {
        return Hold::Deployment(format!("{stalled} of {replicas} replicas stall at once"));
    }
    Hold::No
}

/// How the recovery of this pod is to be carried out. Where a restart is in vain none is tried: the GPU needs more (F1), or the process
/// does not end (I5). Restarts that were in vain so far may help yet, and are better than no pod where none can be made (A18).
pub fn action(pod: &PodView, terms: &Terms<'_>, now: &str) -> GrantAction {
    let in_vain = terms.recoveries(pod, now).count() >= terms.restarts_before_replace;
    let somebody_follows = !terms.pods_refused;
    if (in_vain && somebody_follows) || pod.needs_another_place() { GrantAction::Replace } else { GrantAction::Restart }
}

/// Is a granted replacement over? The pod is gone, and its successor is up or has had its time; or it went on by itself before it was
/// deleted, so that nothing is replaced any more. A pod that does not end is as good as gone here: a slot is for a replica that is away,
/// and its successor is not. (Its GPUs stay taken in the scheduler's eyes for as long as its object stands, so nobody gets them: I5.)
pub fn replaced(grant: &Grant, pods: &[PodView], terms: &Terms<'_>, now: &str) -> bool {
    if pods.iter().any(|pod| pod.uid == grant.pod_uid && !lingers(pod, now)) {
        return spared(grant, pods) && older(&grant.granted_at, DELETED_BY, now);
    }
    let here = pods.iter().filter(|pod| !pod.leaving);
    let (count, starting) = here.fold((0, 0), |(count, starting), pod| {
        let starts = !pod.ready && pod.open_episode().is_none() && pod.fence.is_none();
        (count + 1, starting + usize::from(starts))
    });
    (count >= terms.replicas && starting == 0) || older(&grant.granted_at, REPLACE_MAX, now)
}

/// Is this pod on its way out and does not end?
pub fn lingers(pod: &PodView, now: &str) -> bool {
    pod.leaving && pod.grace_until.as_deref().is_some_and(|at| older(at, LINGERS_AFTER, now))
}

/// Is what this grant was for over, and its pod not on its way out? What began on it since is another case.
fn spared(grant: &Grant, pods: &[PodView]) -> bool {
    let pod = pods.iter().find(|pod| pod.uid == grant.pod_uid);
    let over = |reported: &ReportedEpisode| !reported.open || reported.episode.id != grant.episode;
    pod.is_some_and(|pod| !pod.leaving && pod.reported().map_or(pod.ready, over))
}

/// The pods that must carry the mark of the last one that serves (I3). While none serves the mark stays where it is.
pub fn last_serving(policy: LastReplica, mode: RecoveryMode, pods: &[PodView]) -> Vec<String> {
    if policy == LastReplica::Fence || mode == RecoveryMode::Observe {
        return Vec::new();
    }
    let here = || pods.iter().filter(|pod| !pod.leaving);
    let serving: Vec<&PodView> = here().filter(|pod| pod.ready && pod.open_episode().is_none()).collect();
    match serving.as_slice() {
        [] => here().filter(|pod| pod.last_serving).map(|pod| pod.uid.clone()).collect(),
        [only] => vec![only.uid.clone()],
        _ => Vec::new(),
    }
}

/// Does this recovery still count? One that a former leader dated ahead, by a clock that was wrong, would count until that clock's time.
pub fn young(past: &PastGrant, age: SignedDuration, now: &str) -> bool {
    !is_past(&past.granted_at, age, now)
}

/// [`older`], and what a former leader dated ahead, by a clock that was wrong, is not waited for.
pub fn is_past(at: &str, age: SignedDuration, now: &str) -> bool {
    let times = at.parse::<Timestamp>().ok().zip(now.parse::<Timestamp>().ok());
    older(at, age, now) || times.is_some_and(|(at, now)| ahead(at, now))
}

/// Is `at` longer ago than `age`? What cannot be read is not.
pub fn older(at: &str, age: SignedDuration, now: &str) -> bool {
    let times = at.parse::<Timestamp>().ok().zip(now.parse::<Timestamp>().ok());
    times.is_some_and(|(at, now)| now.duration_since(at) > age)
}

#[cfg(test)]
#[path = "escalate_tests.rs"]
pub(super) mod tests;

#[cfg(test)]
#[path = "clock_tests.rs"]
mod clock_tests;
