//! Whom a rank that gives up blames, as one word of its block: a rank that only waited for another ends as well, and whoever hears of its end
//! is to name the other one. Pure; any word has a meaning.

use super::RANKS_MAX;
use crate::stuck::StuckKind;

const SILENT: u64 = 1;
const GONE: u64 = 2;
const MISMATCH: u64 = 3;
/// The kind lies above the ranks, one bit each.
const KIND_AT: usize = RANKS_MAX;

/// As a word; 0: nobody else.
pub fn word_of(kind: &StuckKind) -> u64 {
    let bits = |ranks: &[usize]| ranks.iter().filter(|rank| **rank < RANKS_MAX).fold(0, |bits, rank| bits | 1 << rank);
    match kind {
        StuckKind::RankSilent { ranks } => SILENT << KIND_AT | bits(ranks),
        StuckKind::RankGone { rank } => GONE << KIND_AT | bits(&[*rank]),
        StuckKind::PlanMismatch => MISMATCH << KIND_AT,
        // its own device, its own loop: that rank is at fault itself
        StuckKind::DeviceWait | StuckKind::Loop | StuckKind::Panic => 0,
    }
}

/// From a word; `None`: nobody of `world` ranks but the one that wrote it.
pub fn kind_of(word: u64, world: usize) -> Option<StuckKind> {
    let ranks: Vec<usize> = (0..world.min(RANKS_MAX)).filter(|rank| word >> rank & 1 == 1).collect();
    match (word >> KIND_AT, ranks.as_slice()) {
        (MISMATCH, _) => Some(StuckKind::PlanMismatch),
        (GONE, [rank]) => Some(StuckKind::RankGone { rank: *rank }),
        (SILENT, [_, ..]) => Some(StuckKind::RankSilent { ranks }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_is_blamed_is_read_as_it_was_written() {
        let silent = |ranks: &[usize]| StuckKind::RankSilent { ranks: ranks.to_vec() };
        for kind in [silent(&[0]), silent(&[1, 3, 15]), StuckKind::RankGone { rank: 2 }, StuckKind::PlanMismatch] {
            assert_eq!(kind_of(word_of(&kind), RANKS_MAX), Some(kind));
        }
        for own in [StuckKind::DeviceWait, StuckKind::Loop, StuckKind::Panic] {
            assert_eq!(kind_of(word_of(&own), RANKS_MAX), None);
        }
        assert_eq!(kind_of(word_of(&silent(&[1, 3])), 2), Some(silent(&[1])), "no rank that is not there");
    }

    proptest! {
        #[test]
        fn any_word_is_read(word: u64, world in 0..RANKS_MAX + 2) {
            if let Some(StuckKind::RankSilent { ranks }) = kind_of(word, world) {
                prop_assert!(!ranks.is_empty() && ranks.iter().all(|rank| *rank < world));
            }
        }
    }
}
