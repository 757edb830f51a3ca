//! One engine's pages in their order: what rose since the last one. A counter that falls is a new process or a liar, either way a
//! new baseline and no progress; a value that makes no sense neither moves nor resets anything (G4).

use std::collections::HashMap;

use super::{Meaning, RANKS_MAX, Reading, meanings, read};
use crate::exposition::Exposition;
use crate::observation::MetricsObs;

/// Follows the pages of one engine process.
#[derive(Debug, Clone, Default)]
pub struct Meter {
    last: HashMap<(&'static str, Meaning, Option<u32>), f64>,
    /// Pages on which something moved: in all, and by rank.
    moves: u64,
    /// Pages on which a counter did.
    counter_moves: u64,
    rank_moves: HashMap<u32, u64>,
    /// The first that came: an engine that names others on each page fills no memory.
    ranks: Vec<u32>,
    resets: u32,
}

impl Meter {
    /// [`super::map`] with memory: `progress_digest` is the number of pages on which something moved, `counters_digest` of those on which a counter did.
    pub fn map(&mut self, page: &Exposition) -> MetricsObs {
        let ranks = &mut self.ranks;
        let readings = read(page, |rank| told_apart(ranks, rank));
        let reset = readings.iter().any(|reading| self.fell(reading));
        let moved: Vec<&Reading> = readings.iter().filter(|reading| self.moved(reading)).collect();
        let counted = moved.iter().any(|reading| reading.series.meaning.is_counter());
        let mut moved_ranks: Vec<u32> = moved.iter().filter_map(|reading| reading.rank).collect();
        moved_ranks.sort_unstable();
        moved_ranks.dedup();
        if reset {
            // what rose beside it belongs to the new process: a baseline as well
            self.resets = self.resets.saturating_add(1);
        } else if !moved.is_empty() {
            self.moves += 1;
            self.counter_moves += u64::from(counted);
            moved_ranks.iter().for_each(|rank| *self.rank_moves.entry(*rank).or_insert(0) += 1);
        }
        for reading in readings.iter().filter(|reading| reading.value.is_finite()) {
            self.last.insert((reading.series.name, reading.series.meaning, reading.rank), reading.value);
        }
        let mut obs = meanings(page, &readings);
        (obs.progress_digest, obs.counters_digest) = (self.moves, self.counter_moves);
        obs.resets = self.resets;
        for rank in &mut obs.ranks {
            rank.progress_digest = self.rank_moves.get(&rank.rank).copied().unwrap_or(0);
        }
        obs
    }

    fn before(&self, reading: &Reading) -> Option<f64> {
        self.last.get(&(reading.series.name, reading.series.meaning, reading.rank)).copied()
    }

    fn fell(&self, reading: &Reading) -> bool {
        reading.series.meaning.is_counter() && self.before(reading).is_some_and(|before| reading.value < before)
    }

    fn moved(&self, reading: &Reading) -> bool {
        let meaning = reading.series.meaning;
        let changed = match self.before(reading) {
            Some(before) if meaning.is_counter() => reading.value > before,
            Some(before) => reading.value.is_finite() && reading.value != before,
            // a series that a first request brings into being has moved, unless everything is new
            None => !self.last.is_empty() && meaning.is_counter() && reading.value > 0.0,
        };
        meaning.proves_progress() && changed
    }
}

/// All that are not among the first are one.
fn told_apart(known: &mut Vec<u32>, rank: u32) -> u32 {
    if known.contains(&rank) {
        return rank;
    }
    if known.len() >= RANKS_MAX {
        return u32::MAX;
    }
    known.push(rank);
    rank
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::{Limits, parse};

    #[test]
    fn ranks_that_are_others_on_each_page_fill_no_memory_and_are_counted_all_the_same() {
        let mut meter = Meter::default();
        let page = |n: u32| {
            let lines =
                (0..100).map(|k| format!("vllm:generation_tokens_total{{engine=\"{}\"}} {}\n", 100 * n + k, n + 1));
            parse(&lines.collect::<String>(), Limits::default())
        };
        let told: Vec<_> = (0..20).map(|n| meter.map(&page(n))).collect();
        assert!(meter.last.len() <= RANKS_MAX + 1 && meter.rank_moves.len() <= RANKS_MAX + 1, "{meter:?}");
        assert_eq!(told[19].generation_tokens, Some(2_000.0));
        assert!(told[19].progress_digest > told[1].progress_digest, "their sum goes on");
    }
}
