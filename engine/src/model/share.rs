//! Which part of a decoder a rank holds: some heads, some of the MLP's width, some of the vocabulary. Pure.

use std::ops::Range;

use thiserror::Error;

use super::config::DecoderConfig;
use crate::backend::Part;
use crate::weights::RawWeight;

/// One rank of so many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    pub rank: usize,
    pub world: usize,
}

/// Why a model cannot be shared by so many ranks.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{world} ranks cannot share {what} of {count}: {needed}")]
pub struct ShareError {
    pub world: usize,
    pub what: &'static str,
    pub count: usize,
    pub needed: &'static str,
}

impl Share {
    /// All of it.
    pub const WHOLE: Self = Self { rank: 0, world: 1 };

    /// Whether the model's sizes can be shared so.
    ///
    /// # Errors
    /// [`ShareError`] naming the size at fault.
    pub fn check(self, config: &DecoderConfig) -> Result<(), ShareError> {
        let refuse = |what, count, needed| Err(ShareError { world: self.world, what, count, needed });
        let (world, kv) = (self.world, config.kv_heads);
        let experts = config.experts.as_ref().map(|experts| experts.intermediate);
        if !config.heads.is_multiple_of(world) {
            refuse("attention heads", config.heads, "the heads must be a multiple of the ranks")
        } else if !kv.is_multiple_of(world) && !world.is_multiple_of(kv) {
            refuse("KV heads", kv, "one must be a multiple of the other")
        } else if !config.intermediate.is_multiple_of(world) {
            refuse("an MLP", config.intermediate, "its width must be a multiple of the ranks")
        } else if let Some(width) = experts.filter(|width| !width.is_multiple_of(world)) {
            refuse("an expert", width, "its width must be a multiple of the ranks")
        } else if config.vocab < world {
            // a rank without a row of it would bring nothing to the gather, and leave the others there
            refuse("a vocabulary", config.vocab, "it must have a row for each rank")
        } else {
            Ok(())
        }
    }

    /// The sizes of this rank's part.
    pub fn of_config(self, config: &DecoderConfig) -> DecoderConfig {
        let mut local = config.clone();
        local.heads = config.heads / self.world;
        local.kv_heads = (config.kv_heads / self.world).max(1);
        local.intermediate = config.intermediate / self.world;
        local
    }

    /// Rows of Q, in units of `unit` rows a head.
    pub fn heads(self, heads: usize, unit: usize) -> Range<usize> {
        let count = heads / self.world;
        self.rank * count * unit..(self.rank + 1) * count * unit
    }

    /// Rows of K and V. Where there are more ranks than heads several ranks hold the same one.
    pub fn kv_heads(self, heads: usize, unit: usize) -> Range<usize> {
        let first = self.rank * heads / self.world;
        first * unit..(first + (heads / self.world).max(1)) * unit
    }

    /// A part of an MLP's width.
    pub fn width(self, width: usize) -> Range<usize> {
        self.heads(width, 1)
    }

    /// Rows of a weight whose products all ranks get, the output head's; the parts need not be equal.
    pub fn gathered(self, rows: usize) -> Part {
        if self.world == 1 {
            return Part::Whole;
        }
        let edge = |rank: usize| rank * rows / self.world;
        let widths = (0..self.world).map(|rank| edge(rank + 1) - edge(rank)).collect();
        Part::Gathered { mine: edge(self.rank)..edge(self.rank + 1), widths }
    }
}

/// What `part` says of a weight; `None` where quantised blocks would be cut through.
pub(super) fn cut(raw: RawWeight, part: &Part) -> Option<RawWeight> {
    match part {
        Part::Whole => Some(raw),
        Part::Outputs(rows) | Part::Gathered { mine: rows, .. } if *rows == (0..raw.rows) => Some(raw),
        Part::Outputs(rows) | Part::Gathered { mine: rows, .. } => raw.part(rows.clone()),
        Part::Inputs(columns) if *columns == (0..raw.cols) => Some(raw),
        Part::Inputs(columns) => raw.columns(columns.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_of_fewer_rows_than_ranks_is_refused() {
        let raw = serde_json::json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 8, "max_position_embeddings": 8, "vocab_size": 8});
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), raw.to_string()).unwrap();
        let config = DecoderConfig::from_dir(dir.path()).unwrap();
        let check = |vocab| Share { rank: 0, world: 8 }.check(&DecoderConfig { vocab, ..config.clone() });
        assert_eq!(check(8), Ok(()));
        assert_eq!(check(7).unwrap_err().what, "a vocabulary");
    }

    #[test]
    fn parts_cover_everything_once_and_few_kv_heads_are_held_by_several() {
        for world in [1, 2, 4, 8] {
            let parts = |f: &dyn Fn(Share) -> Range<usize>| -> Vec<usize> {
                (0..world).flat_map(|rank| f(Share { rank, world })).collect()
            };
            assert_eq!(parts(&|s| s.heads(8, 4)), (0..32).collect::<Vec<_>>());
            let vocab = |s: Share| match s.gathered(1001) {
                Part::Gathered { mine, widths } => {
                    assert_eq!(widths.iter().sum::<usize>(), 1001);
                    assert_eq!(widths[s.rank], mine.len());
                    mine
                }
                _ => 0..1001,
            };
            assert_eq!(parts(&vocab), (0..1001).collect::<Vec<_>>());
        }
        let kv = |rank| Share { rank, world: 8 }.kv_heads(2, 16);
        assert_eq!((kv(0), kv(3), kv(4), kv(7)), (0..16, 0..16, 16..32, 16..32));
        assert_eq!(Share { rank: 1, world: 2 }.kv_heads(4, 16), 32..64);
    }
}
