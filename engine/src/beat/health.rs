//! `/health` as a pure function of the last beat and the clock (E6). It asks nothing of the engine thread.

use heartbeat::page::{Beat, Phase};

use crate::beat::board::View;

/// Between two steps, and for a step's bookkeeping, the loop gets at least this long.
const TURN_MS_MIN: u64 = 2_000;

/// What the last beat says about the engine now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Serving,
    /// Not ready yet, within its leases.
    Starting,
    /// Past a lease, or turning without delivering: the reason, for people.
    Stalled(String),
}

/// Judges the last beat. `None`: it could not be read, which is a writer that stopped in the middle of a publish.
pub fn judge(view: Option<&View>, now_ns: u64) -> Health {
    let Some(View { beat, progress_ns }) = view else {
        return Health::Stalled("the engine thread stopped while it published its state".into());
    };
    let stalled = late(beat, now_ns).or_else(|| barren(beat, *progress_ns, now_ns));
    stalled.map(Health::Stalled).unwrap_or(match beat.phase {
        Phase::Load | Phase::Compile | Phase::Capture | Phase::WarmUp => Health::Starting,
        _ => Health::Serving,
    })
}

/// Is the step, or the phase, past its lease?
pub(crate) fn late(beat: &Beat, now_ns: u64) -> Option<String> {
    let since_ms = |from_ns: u64| now_ns.saturating_sub(from_ns) / 1_000_000;
    let lease_ms = u64::from(beat.lease_ms);
    let phase = format!("{:?}", beat.phase).to_lowercase();
    let in_steps = matches!(beat.phase, Phase::Prefill | Phase::Decode);
    let (what, lasted_ms, allowed_ms) = match (beat.step_started_ns, in_steps) {
        (0, true) => ("the loop between two steps of", since_ms(beat.published_ns), lease_ms.max(TURN_MS_MIN)),
        (0, false) => ("phase", since_ms(beat.phase_entered_ns), lease_ms),
        (started_ns, _) => ("a step of", since_ms(started_ns), lease_ms),
    };
    (lasted_ms > allowed_ms).then(|| format!("{what} {phase} has lasted {lasted_ms} ms, its lease was {allowed_ms} ms"))
}

/// Do steps turn while nothing that is owed moves (a livelock, H3)?
pub(crate) fn barren(beat: &Beat, progress_ns: u64, now_ns: u64) -> Option<String> {
    let owed = beat.running + beat.waiting;
    let lasted_ms = now_ns.saturating_sub(progress_ns) / 1_000_000;
    let allowed_ms = 2 * u64::from(beat.lease_ms).max(TURN_MS_MIN / 2);
    let in_steps = matches!(beat.phase, Phase::Prefill | Phase::Decode);
    (in_steps && owed > 0 && lasted_ms > allowed_ms)
        .then(|| format!("steps turn, but nothing was delivered to {owed} requests for {lasted_ms} ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn view(edit: impl FnOnce(&mut View)) -> View {
        let mut v = View { beat: Beat::of_phase(Phase::Load, 1_000 * MS), progress_ns: 1_000 * MS };
        v.beat.lease_ms = 1_000;
        edit(&mut v);
        v
    }

    #[test]
    fn a_phase_is_judged_from_its_entry_and_a_step_from_its_start() {
        let loading = view(|_| ());
        assert_eq!(judge(Some(&loading), 2_000 * MS), Health::Starting);
        assert!(matches!(judge(Some(&loading), 2_001 * MS), Health::Stalled(r) if r.contains("phase load")));
        let step = view(|v| (v.beat.phase, v.beat.step_started_ns) = (Phase::Decode, 9_000 * MS));
        assert_eq!(judge(Some(&step), 10_000 * MS), Health::Serving);
        assert!(matches!(judge(Some(&step), 10_001 * MS), Health::Stalled(r) if r.contains("a step of decode")));
    }

    #[test]
    fn steps_that_deliver_nothing_are_a_stall_only_while_work_is_owed() {
        let turn = |running| {
            view(|v| {
                (v.beat.phase, v.beat.step_started_ns, v.beat.running) = (Phase::Decode, 9_000 * MS, running);
            })
        };
        assert!(matches!(judge(Some(&turn(1)), 9_100 * MS), Health::Stalled(r) if r.contains("nothing was delivered")));
        assert_eq!(judge(Some(&turn(0)), 9_100 * MS), Health::Serving);
    }

    #[test]
    fn a_beat_that_cannot_be_read_is_a_stall() {
        assert!(matches!(judge(None, 0), Health::Stalled(_)));
    }
}
