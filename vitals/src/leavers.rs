//! Clients who give up: an engine whose loop turns and works for nobody takes them off its books all the same and gives their room back. Its
//! page moves by that, and it is no work.

use std::collections::VecDeque;

use crate::excuse::Tick;
use crate::observation::{MetricsObs, Ms};
use crate::signs::Sight;

/// Front ends ask every few seconds only whether their client is still there.
pub const TOLD_MS_MAX: Ms = 15_000;

/// Who left, and whether the engine's page has shown it.
#[derive(Debug, Clone, Default)]
pub struct Leavers {
    /// When (counted time), and how many of them the engine may still have in its books; the oldest first.
    left: VecDeque<(Ms, u64)>,
    before: Option<Books>,
    /// Nothing at all had moved at the scrape before.
    stood: bool,
}

/// What a scrape says of the whole engine.
#[derive(Debug, Clone, Copy)]
struct Books {
    /// Requests, running and waiting.
    held: f64,
    /// Of its cache.
    used: f64,
    /// Changes when anything was counted.
    counters: u64,
}

impl Leavers {
    /// Takes one look in; `scraped` is whether the page is a new one, `moved` whether anything of it did. True where that is no more than
    /// room that leavers gave back: an engine that works beside them takes room as well, which a fall may hide at one scrape, and not at the
    /// one before.
    pub fn gave_back(&mut self, tick: &Tick, sight: &Sight<'_>, scraped: bool, moved: bool) -> bool {
        self.left.retain(|(at, _)| tick.since(*at) < TOLD_MS_MAX);
        if sight.left_count > 0 {
            self.left.push_back((tick.counted_ms, sight.left_count));
        }
        if !scraped {
            return false;
        }
        let stood = std::mem::replace(&mut self.stood, !moved);
        let Some(now) = sight.metrics.and_then(Books::of) else {
            self.before = None;
            return false;
        };
        let Some(before) = self.before.replace(now) else { return false };
        let told = self.tell((before.held - now.held).clamp(0.0, 1e9) as u64);
        told && stood && now.used < before.used && now.counters == before.counters
    }

    /// Nothing is known of the engine's books for now, and may become otherwise meanwhile.
    pub fn lose_sight(&mut self) {
        self.before = None;
        self.stood = false;
    }

    /// So many are in the books no more. Have they all left?
    fn tell(&mut self, gone: u64) -> bool {
        let all: u64 = self.left.iter().map(|(_, count)| count).sum();
        if gone == 0 || gone > all {
            return false;
        }
        let mut rest = gone;
        for (_, count) in &mut self.left {
            let told = rest.min(*count);
            (rest, *count) = (rest - told, *count - told);
        }
        true
    }
}

impl Books {
    /// Of an engine that tells all of it, and as one: data-parallel engines are told a rank at a time.
    fn of(metrics: &MetricsObs) -> Option<Self> {
        let (running, waiting, used) = (metrics.running?, metrics.waiting?, metrics.kv_usage?);
        let whole = metrics.ranks.is_empty() && [running, waiting, used].iter().all(|figure| figure.is_finite());
        whole.then_some(Self { held: running + waiting, used, counters: metrics.counters_digest })
    }
}
