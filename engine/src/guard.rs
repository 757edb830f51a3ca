//! The guard outside the step loop: it looks at what the loop published, and at the rank processes, and makes the engine give up when
//! the loop itself stands still (S0), turns without delivering, or a rank has died, or is frozen in a step. Nothing that the loop can do
//! stops it (E4).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use heartbeat::monotonic_ns;
use heartbeat::page::Phase;
use serde_json::json;

use crate::beat::{View, barren, late};
use crate::handle::Shared;
use crate::ranks::{Beside, Fleet};
use crate::stack_dump;
use crate::stuck::{Stuck, StuckKind};
use crate::waits::RunQueue;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(25);
/// A look that comes later than this was held up by the machine, which held up the loop as well.
const LOOK_MAX: Duration = Duration::from_millis(50);
/// Past its lease the loop gets this long to notice by itself, which says more of the reason.
const GRACE: Duration = Duration::from_millis(400);
/// The same in a start, whose leases are guesses: a tensor may come from a slow disk.
const START_GRACE: Duration = Duration::from_secs(50);
/// Own stacks, when the engine gives up.
const STACKS_MAX: Duration = Duration::from_millis(250);

/// Looks at the loop; pure.
#[derive(Debug, Default)]
struct LoopWatch {
    pulse: u64,
    silent: Duration,
    starting: bool,
}

impl LoopWatch {
    /// Takes in what is published, as far as it can be read, `passed` after the last look. Gives the reason once it has stood for its grace.
    fn look(&mut self, view: Option<&View>, pulse: u64, now_ns: u64, passed: Duration) -> Option<String> {
        let turns = std::mem::replace(&mut self.pulse, pulse) != pulse;
        let reason = match view {
            Some(View { beat, progress_ns }) => {
                self.starting = matches!(beat.phase, Phase::Load | Phase::Compile | Phase::Capture | Phase::WarmUp);
                let silent = late(beat, now_ns).filter(|_| !turns);
                silent.or_else(|| barren(beat, *progress_ns, now_ns))
            }
            // it stopped in the middle of a few stores
            None => (!turns).then(|| "the loop stopped while it published its state".to_owned()),
        };
        self.silent = if reason.is_some() { self.silent + passed.min(LOOK_MAX) } else { Duration::ZERO };
        reason.filter(|_| self.silent >= if self.starting { START_GRACE } else { GRACE })
    }
}

/// Watches until the engine is to give up, and makes it so. Ends when it has.
pub async fn watch(shared: Arc<Shared>, fleet: Fleet) {
    let (mut watch, mut last, mut run_queue) = (LoopWatch::default(), Instant::now(), RunQueue::default());
    let mut beside = Beside::default();
    loop {
        tokio::time::sleep(LOOK).await;
        if shared.stop.load(Ordering::Relaxed) {
            // told to stop: ranks that end now have been asked to
            return;
        }
        // a loop that wants the processor and does not get it is late, not silent; at most half of the time is forgiven
        let passed = std::mem::replace(&mut last, Instant::now()).elapsed();
        let kept = run_queue.held_up(shared.loop_tid.load(Ordering::Relaxed), passed);
        let passed = passed.saturating_sub(kept.min(passed / 2));
        let pulse = shared.pulse.get().map_or(0, |pulse| pulse.load(Ordering::Relaxed));
        let view = shared.board.load();
        let reason = watch.look(view.as_ref(), pulse, monotonic_ns(), passed);
        let ended = fleet.ended().or_else(|| frozen(&fleet, view.as_ref(), &mut beside, passed));
        let stuck = match (ended, reason) {
            (Some(gone), _) => gone,
            (None, Some(text)) => Stuck { kind: StuckKind::Loop, text, waited: watch.silent },
            (None, None) => continue,
        };
        shared.give_up(stuck);
        return;
    }
}

/// A rank that is frozen in the step under way, whose lease may be long.
fn frozen(fleet: &Fleet, view: Option<&View>, beside: &mut Beside, passed: Duration) -> Option<Stuck> {
    if view.is_some_and(|view| view.beat.step_started_ns != 0) {
        return fleet.frozen(beside, passed.min(LOOK_MAX));
    }
    *beside = Beside::default();
    None
}

/// Saves what explains the end: a line in the log, `stuck-<pid>.json` with the last beat, and this process's own stacks (H10).
pub fn evidence(stuck: &Stuck, shared: &Shared, page_dir: Option<&Path>) {
    tracing::error!(kind = stuck.kind.name(), waited_ms = stuck.waited.as_millis(), "the engine gives up: {stuck}");
    let Some(dir) = page_dir else { return };
    let beat = shared.board.load().map(|view| view.beat);
    let details = json!({
        "beat": beat.map(|beat| format!("{beat:?}")),
        "in_flight": shared.in_flight(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    match stuck.write(dir, &details) {
        Ok(path) => tracing::error!(path = %path.display(), "evidence is saved"),
        Err(error) => tracing::error!(%error, dir = %dir.display(), "evidence cannot be saved"),
    }
    if !stack_dump::dump_now(STACKS_MAX) {
        tracing::warn!("the stacks are not all there, or without names");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use heartbeat::page::Beat;

    const MS: u64 = 1_000_000;

    fn view(edit: impl FnOnce(&mut View)) -> View {
        let mut beat = Beat::of_phase(Phase::Load, 1_000 * MS);
        (beat.running, beat.phase, beat.lease_ms, beat.step_started_ns) = (1, Phase::Decode, 400, 1_000 * MS);
        let mut view = View { beat, progress_ns: 1_000 * MS };
        edit(&mut view);
        view
    }

    /// Looks every 25 ms from second 1 on; gives the time at which it gives up.
    fn gives_up(view: &View, pulse: impl Fn(u64) -> u64, until_ms: u64) -> Option<u64> {
        let mut watch = LoopWatch::default();
        let looks = (1_000..until_ms).step_by(25);
        looks
            .map(|ms| (ms, watch.look(Some(view), pulse(ms), ms * MS, LOOK)))
            .find(|(_, r)| r.is_some())
            .map(|(ms, _)| ms)
    }

    #[test]
    fn a_frozen_loop_is_given_up_a_second_after_its_step_began() {
        let at = gives_up(&view(|_| ()), |_| 7, 5_000).unwrap();
        assert!((1_750..=1_900).contains(&at), "{at}");
        assert_eq!(gives_up(&view(|v| v.beat.lease_ms = 3_000), |_| 7, 4_300), None, "a long step has its lease");
    }

    #[test]
    fn a_loop_that_looks_after_its_device_is_not_frozen_but_a_livelock_is() {
        assert_eq!(gives_up(&view(|_| ()), |ms| ms, 2_900), None);
        let at = gives_up(&view(|_| ()), |ms| ms, 9_000).unwrap();
        assert!((3_300..=3_500).contains(&at), "nothing delivered for 2 s, and the grace: {at}");
    }

    #[test]
    fn a_start_that_stands_is_given_up_too_but_later() {
        let start = |v: &mut View| {
            (v.beat.phase, v.beat.step_started_ns, v.beat.lease_ms) = (Phase::Load, 0, 10_000);
            v.beat.phase_entered_ns = 1_000 * MS;
        };
        let at = gives_up(&view(start), |_| 0, 90_000).unwrap();
        assert!((61_000..=61_100).contains(&at), "{at}");
        assert_eq!(gives_up(&view(start), |ms| ms, 90_000), None, "its wait for the device has a deadline of its own");
    }

    #[test]
    fn a_loop_that_stopped_while_it_published_is_given_up() {
        let mut watch = LoopWatch::default();
        let mut looks = (1_000..5_000).step_by(25).map(|ms| (ms, watch.look(None, 0, ms * MS, LOOK)));
        let (at, reason) = looks.find(|(_, reason)| reason.is_some()).unwrap();
        assert!(at <= 1_500 && reason.unwrap().contains("published"), "{at}");
    }

    #[test]
    fn a_held_up_look_hardly_counts() {
        let mut watch = LoopWatch::default();
        watch.look(Some(&view(|_| ())), 0, 1_000 * MS, LOOK);
        assert_eq!(watch.look(Some(&view(|_| ())), 0, 60_000 * MS, Duration::from_secs(59)), None);
    }
}
