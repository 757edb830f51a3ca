//! Histories that are mixed of others: any two disturbances at once, a hang beside something that excuses silence, a world in which signals are
//! missing and the host is loaded.

use super::chance::Chance;
use super::profile::{HOUR, MINUTE, SECOND, Us};
use super::script::{START, bearable, disturbance};
use super::world::{Act, Missing, World};

/// The kinds whose disturbances are mixed.
const MIXED: [&str; 11] = ["B2", "B4", "B5", "B6", "B7", "B8", "late", "scrapes", "agent", "restarts", "preempt"];
/// How much slower all that slows an engine may make it together, in thousandths: the field has seen no slower one that was alive.
const SLOWER_MILLI_MAX: u64 = 120_000;

/// Any two disturbances at once, again and again.
pub(super) fn disturb(world: &mut World, (from, until): (Us, Us), chance: &mut Chance) {
    let host_milli = miss_signals(world, chance);
    let mut at = from + chance.scale(30 * SECOND, 10 * MINUTE);
    while at < until && world.script.len() < 4_000 {
        let pair = [chance.pick(&MIXED), chance.pick(&MIXED)].map(|name| disturbance(name, chance));
        let [Some((one, rest)), Some((other, more))] = pair else { return };
        let second = at + chance.between(0, rest);
        let [one, other] = [together(one, other, host_milli), together(other, one, host_milli)];
        world.plan(at, bearable(one, &world.engine.profile));
        world.plan(second, bearable(other, &world.engine.profile));
        at = (at + rest).max(second + more) + chance.exponential(10 * MINUTE) + 30 * SECOND;
    }
}

/// What an act is beside another, on a host that is so much slower all the time: no slower than the field has seen, and no excuse goes unseen.
fn together(act: Act, beside: Act, host_milli: u64) -> Act {
    match (act, beside) {
        (Act::Crawl(span, pace), _) => {
            let host = if let Act::Loaded(_, host) = beside { host.max(host_milli) } else { host_milli };
            Act::Crawl(span, pace.min(SLOWER_MILLI_MAX * 1_000 / host))
        }
        // compilers, quota, freezer and debugger are seen in /proc alone
        (Act::Blind(span, Missing::Proc), Act::Jit(_) | Act::Throttle(..) | Act::Freeze(_) | Act::Debug(_)) => {
            Act::Blind(span, Missing::Metrics)
        }
        // a sleep is told by the engine's own page of either sort, while it lasts
        (Act::Blind(span, Missing::Metrics | Missing::Page), Act::Sleep(_)) => Act::Blind(span, Missing::Frontend),
        // who is frozen or about to be restarted is not asked to pause, and one resumption ends all pauses
        (Act::Pause(span), Act::Pause(_) | Act::Freeze(_) | Act::Debug(_) | Act::Restart(..)) => Act::Maintenance(span),
        (act, _) => act,
    }
}

/// Signals that this replica's agent never gets, and a host that is loaded all the time: by how much.
fn miss_signals(world: &mut World, chance: &mut Chance) -> u64 {
    world.clients.hasty_permille = chance.pick(&[0, 20, 500]);
    let signals = &mut world.engine.profile.signals;
    match chance.between(0, 9) {
        0 => signals.metrics = false,
        1 => signals.frontend = false,
        2 => (signals.gpu, signals.log) = (false, false),
        3 => signals.load = false,
        _ => {}
    }
    if !chance.permille(250) {
        return 1_000;
    }
    let host_milli = chance.scale(1_000, 4_000);
    world.plan(START + 10 * SECOND, Act::Loaded(4 * HOUR, host_milli));
    host_milli
}

/// Something that excuses silence begins shortly before the hang, or with it, and ends within minutes. That it serves has been seen before.
pub(super) fn excuse(world: &mut World, at: Us, chance: &mut Chance) {
    let span = chance.scale(5 * SECOND, 4 * MINUTE);
    let act = match chance.between(0, 6) {
        0 => Act::Throttle(span, chance.scale(2_000, 30_000)),
        1 => Act::Freeze(span),
        2 => Act::Debug(span),
        3 => Act::VmPause(span),
        4 => Act::Maintenance(span),
        5 => Act::Loaded(span, chance.scale(1_000, 8_000)),
        _ => Act::Jit(span),
    };
    let begins = at.saturating_sub(chance.between(0, 20 * SECOND)).max(world.env.ready + 15 * SECOND);
    world.env.excused_until = begins + span;
    world.plan(begins, act);
}

/// A mutant's world: other clients, missing signals, a loaded host.
pub(super) fn mutate(world: &mut World, chance: &mut Chance) {
    world.clients.hasty_permille = chance.pick(&[0, 20, 500]);
    let signals = &mut world.engine.profile.signals;
    match chance.between(0, 9) {
        0 => signals.metrics = false,
        1 => signals.proc = false,
        2 => signals.frontend = false,
        3 => (signals.gpu, signals.log) = (false, false),
        4 => signals.load = false,
        _ => {}
    }
    if chance.permille(200) {
        world.plan(START + 10 * SECOND, Act::Loaded(4 * HOUR, chance.scale(1_000, 4_000)));
    }
    if chance.permille(150) {
        world.plan(START + 12 * SECOND, Act::SlowScrapes(4 * HOUR));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_at_once_are_no_slower_than_the_field_has_seen_and_hide_no_excuse() {
        let crawl = Act::Crawl(SECOND, 100_000);
        assert_eq!(together(crawl, Act::Loaded(SECOND, 4_000), 1_000), Act::Crawl(SECOND, 30_000));
        assert_eq!(together(crawl, Act::AgentRestart, 2_000), Act::Crawl(SECOND, 60_000));
        assert_eq!(together(crawl, Act::AgentRestart, 1_000), crawl);
        let blind = Act::Blind(SECOND, Missing::Proc);
        assert_eq!(together(blind, Act::Jit(SECOND), 1_000), Act::Blind(SECOND, Missing::Metrics));
        assert_eq!(together(blind, Act::Sleep(SECOND), 1_000), blind);
        let pause = Act::Pause(SECOND);
        assert_eq!(together(pause, Act::Freeze(SECOND), 1_000), Act::Maintenance(SECOND));
        assert_eq!(together(pause, Act::AgentRestart, 1_000), pause);
        let blind = Act::Blind(SECOND, Missing::Page);
        assert_eq!(together(blind, Act::Sleep(SECOND), 1_000), Act::Blind(SECOND, Missing::Frontend));
    }
}
