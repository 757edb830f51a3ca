//! Bystanders of an engine that lives: NCCL's RAS, the driver's Xids, NVML. None of them knows of the work that is owed, and each now and then
//! says what it says beside a hang as well: a rank is silent (in a communicator that is none of this engine's steps), an application was ended
//! (a neighbour's), nothing at all (a busy driver). Whatever they say, a healthy engine must not be evicted the sooner for it.

use super::agent::Agent;
use super::chance::Chance;
use super::profile::{HOUR, MINUTE, Profile, SECOND, Us};
use super::world::World;
use crate::observation::{RasObs, Signal, XidObs};

/// Applications' own faults, as a neighbour on the same GPU has them (`crate::xid`).
const NEIGHBOURS: [u32; 5] = [13, 31, 43, 45, 69];
/// As the agent asks RAS (`agent/src/sources/ras.rs`).
const RAS_EVERY: Us = 5 * SECOND;
const ELSEWHERE: &str = "RAS has no answer from rank 0 of a communicator which has 9 ranks and numbers of its own";
/// The agent remembers so many Xids.
const XIDS_KEPT: usize = 8;

type Span = (Us, Us);

/// What the bystanders of one history say, and when; nothing by default.
#[derive(Debug, Clone, Default)]
pub struct Bystanders {
    /// There are several ranks on GPUs, so that RAS answers.
    ras: bool,
    /// RAS names a rank that is none of this engine's.
    elsewhere: Vec<Span>,
    /// RAS answers nothing before its deadline.
    late: Vec<Span>,
    nvml: Vec<Span>,
    xids: Vec<(Us, u32)>,
}

impl Bystanders {
    /// From one moment to another.
    pub fn draw(profile: &Profile, (from, until): Span, chance: &mut Chance) -> Self {
        if !profile.on_gpu {
            return Self::default();
        }
        let mut spans = |mean: Us, least: Us, most: Us| {
            let (mut all, mut at) = (Vec::new(), from + chance.exponential(mean / 4));
            while at < until {
                let ends = at + chance.scale(least, most);
                all.push((at, ends));
                at = ends + chance.exponential(mean);
            }
            all
        };
        let ras = profile.ranks > 1;
        let elsewhere = spans(HOUR, 10 * SECOND, 2 * HOUR);
        let late = spans(HOUR, 10 * SECOND, 20 * MINUTE);
        let nvml = spans(HOUR, 3 * SECOND, 10 * MINUTE);
        let told = spans(20 * MINUTE, SECOND, 2 * SECOND);
        let xids = told.into_iter().map(|(at, _)| (at, chance.pick(&NEIGHBOURS))).collect();
        Self { ras, elsewhere, late, nvml, xids }
    }

    /// Since when NVML does not answer, if it does not.
    pub fn nvml_silent_since(&self, now: Us) -> Option<Us> {
        within(&self.nvml, now).map(|(from, _)| from)
    }
}

/// The span that this moment is in.
fn within(spans: &[Span], now: Us) -> Option<Span> {
    let begun = spans.partition_point(|(from, _)| *from <= now);
    begun.checked_sub(1).and_then(|last| spans.get(last)).copied().filter(|(_, until)| now < *until)
}

/// What the agent has of RAS and of the driver's events.
pub(super) fn show(world: &World, agent: &mut Agent) {
    let by = &world.bystanders;
    if world.engine.profile.signals.gpu {
        let told = by.xids.partition_point(|(at, _)| *at <= world.now);
        if agent.xids_told != told {
            agent.xids_told = told;
            let kept = by.xids.get(told.saturating_sub(XIDS_KEPT)..told).unwrap_or_default();
            let xid = |(at, code): &(Us, u32)| XidObs { code: *code, at_ms: at / 1_000, ..XidObs::default() };
            agent.obs.xids = kept.iter().map(xid).collect();
        }
    }
    if !by.ras || world.now < world.env.ready {
        agent.obs.ras = Signal::default();
        return;
    }
    let asked = world.now - world.now % RAS_EVERY;
    let (late, elsewhere) = (within(&by.late, asked).is_some(), within(&by.elsewhere, asked).is_some());
    let ras = agent.obs.ras.value.get_or_insert_with(RasObs::default);
    ras.answered = !late;
    if ras.silent_elsewhere != (elsewhere && !late) {
        ras.silent_elsewhere = elsewhere && !late;
        ras.text = if ras.silent_elsewhere { ELSEWHERE.to_owned() } else { String::new() };
    }
    agent.obs.ras.at_ms = asked / 1_000;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_in_the_span_that_began_last_or_in_none() {
        let spans = [(10, 20), (30, 40)];
        let found = [9, 10, 19, 20, 35, 40].map(|now| within(&spans, now).map(|(from, _)| from));
        assert_eq!(found, [None, Some(10), Some(10), None, Some(30), None]);
    }
}
