//! How often the sources that cost are asked: by the pace, by what the last time cost, and by whether anybody else tells the same. Pure.

use vitals::observation::{Ms, Observation};

use super::pace::Pace;

/// The look for processes that are new in `/proc`: when, and at most one part in so many of the time. First at a stare, then where work
/// stands still, then while it is delivered or none is owed: what that puts off is due at the first tick at which work stands still.
const WALKS: [Turn; 3] = [
    Turn { ms_min: 500, ms_max: Ms::MAX, cost_factor: 20 },
    Turn { ms_min: 2_000, ms_max: Ms::MAX, cost_factor: 2_000 },
    Turn { ms_min: 10_000, ms_max: Ms::MAX, cost_factor: 20_000 },
];
/// Between walks over all processes, of which there may be very many.
const WHOLE_WALK_MS: [Ms; 3] = [10_000, 60_000, 60_000];
/// The same of the facts that are gathered off the tick.
const FACTS: [Turn; 3] = [
    Turn { ms_min: 1_000, ms_max: 30_000, cost_factor: 1_000 },
    Turn { ms_min: 5_000, ms_max: 60_000, cost_factor: 10_000 },
    Turn { ms_min: 10_000, ms_max: 60_000, cost_factor: 20_000 },
];
/// The processes, where each tick does not look at them.
const PROCESSES_MS: [Ms; 3] = [0, 0, 2_000];
/// Where the gate is silent, the connections of the engine's port alone say that nobody waits: however dear, they are counted this often.
const FACTS_ALONE: Turn = Turn { ms_min: 1_000, ms_max: 5_000, cost_factor: 1_000 };
/// Connections that were counted longer ago say nothing of now.
const SOCKETS_MS_MAX: Ms = 10_000;
/// A gate that was heard so lately is not silent: an idle one is asked once a second.
const GATE_HEARD_MS_MAX: Ms = 2_000;

/// How often something that costs is done.
#[derive(Debug, Clone, Copy)]
struct Turn {
    ms_min: Ms,
    ms_max: Ms,
    cost_factor: u64,
}

/// What was done last: when it ended, and what it cost.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    pub at_ms: Ms,
    pub cost_us: u64,
}

impl Turn {
    fn is_due(self, now_ms: Ms, last: Option<Done>) -> bool {
        let pause =
            |done: Done| (done.cost_us.saturating_mul(self.cost_factor) / 1_000).clamp(self.ms_min, self.ms_max);
        last.is_none_or(|done| now_ms.saturating_sub(done.at_ms) >= pause(done))
    }
}

fn by_pace<T: Copy>([stare, still, calm]: [T; 3], pace: Pace) -> T {
    match pace {
        Pace::Stare => stare,
        Pace::Look => still,
        Pace::Glance | Pace::Rest => calm,
    }
}

/// How old the facts of the processes may be.
pub fn processes_ms(pace: Pace) -> Ms {
    by_pace(PROCESSES_MS, pace)
}

/// Is it time to look for new processes?
pub fn is_walk_due(pace: Pace, now_ms: Ms, last: Option<Done>) -> bool {
    by_pace(WALKS, pace).is_due(now_ms, last)
}

/// How long the list of all processes is good for.
pub fn whole_walk_ms(pace: Pace) -> Ms {
    by_pace(WHOLE_WALK_MS, pace)
}

/// Is it time to gather facts?
pub fn are_facts_due(pace: Pace, gate_is_silent: bool, now_ms: Ms, last: Option<Done>) -> bool {
    let alone = gate_is_silent && FACTS_ALONE.is_due(now_ms, last);
    alone || by_pace(FACTS, pace).is_due(now_ms, last)
}

/// Are connections worth counting? A gate that was heard knows better what is owed, and nothing else asks while all is calm.
pub fn are_sockets_wanted(pace: Pace, gate_is_silent: bool) -> bool {
    gate_is_silent || by_pace([true, true, false], pace)
}

/// Is what was counted at `at_ms` still worth telling?
pub fn tells_of_now(at_ms: Ms, now_ms: Ms) -> bool {
    now_ms.saturating_sub(at_ms) <= SOCKETS_MS_MAX
}

/// Does the gate not tell what is owed?
pub fn is_gate_silent(now_ms: Ms, obs: &Observation) -> bool {
    obs.gate.fresh(now_ms, GATE_HEARD_MS_MAX).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::observation::{GateObs, Signal};

    #[test]
    fn dear_facts_wait_a_minute_while_the_gate_tells_what_is_owed_and_seconds_while_it_does_not() {
        let dear = Some(Done { at_ms: 1_000, cost_us: 20_000 });
        let due = |silent, now_ms| are_facts_due(Pace::Glance, silent, now_ms, dear);
        assert_eq!([due(false, 60_999), due(false, 61_000)], [false, true]);
        assert_eq!([due(true, 5_999), due(true, 6_000)], [false, true]);
        let cheap = Some(Done { at_ms: 1_000, cost_us: 100 });
        assert!(are_facts_due(Pace::Glance, true, 2_000, cheap) && !are_facts_due(Pace::Glance, false, 10_999, cheap));
        assert!(are_facts_due(Pace::Glance, false, 0, None), "never gathered");
    }

    #[test]
    fn a_stare_asks_more_often_but_never_for_more_than_its_share() {
        let done = Some(Done { at_ms: 0, cost_us: 100_000 });
        let due = |pace, now_ms| is_walk_due(pace, now_ms, done);
        assert_eq!(
            [due(Pace::Stare, 1_999), due(Pace::Stare, 2_000), due(Pace::Glance, 199_999)],
            [false, true, false]
        );
        assert!(whole_walk_ms(Pace::Stare) < whole_walk_ms(Pace::Look));
        assert_eq!([Pace::Stare, Pace::Look, Pace::Glance].map(processes_ms), [0, 0, 2_000]);
    }

    #[test]
    fn what_was_put_off_while_all_was_calm_is_due_as_soon_as_work_stands_still() {
        let done = Some(Done { at_ms: 1_000, cost_us: 100 });
        let due =
            |pace, now_ms| [is_walk_due(pace, now_ms, done), are_facts_due(pace, false, now_ms, done)].map(u8::from);
        for calm in [Pace::Rest, Pace::Glance] {
            assert_eq!([due(calm, 10_999), due(calm, 11_000)], [[0, 0], [1, 1]]);
        }
        assert_eq!([due(Pace::Look, 3_000), due(Pace::Look, 6_000)], [[1, 0], [1, 1]]);
    }

    #[test]
    fn connections_are_counted_where_no_gate_speaks_or_work_stands_still() {
        let wanted =
            |silent| [Pace::Rest, Pace::Glance, Pace::Look, Pace::Stare].map(|p| are_sockets_wanted(p, silent));
        assert_eq!((wanted(false), wanted(true)), ([false, false, true, true], [true; 4]));
    }

    #[test]
    fn a_gate_that_was_never_heard_or_not_lately_is_silent() {
        let mut obs = Observation::default();
        assert!(is_gate_silent(0, &obs));
        obs.gate = Signal::at(1_000, GateObs::default());
        assert_eq!([3_000, 3_001].map(|now_ms| is_gate_silent(now_ms, &obs)), [false, true]);
    }
}
