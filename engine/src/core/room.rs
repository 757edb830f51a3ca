//! How many blocks the KV cache gets. All of it is touched at once, so one that does not fit is refused before: the system would kill the
//! engine over it, without a word. Pure.

use crate::model::ModelError;

/// A cache that nobody asked for by number leaves this part of what is free to others: weights that are mapped count as free, and steps
/// need memory too.
const LEFT_TO_OTHERS: u64 = 2;

/// What blocks take, and what there is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Of one block on all ranks, and of the same block of whoever guesses beside them.
    pub block_bytes: u64,
    pub free_bytes: u64,
}

/// Blocks that hold certain things.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// What the operator asked for.
    pub asked: Option<usize>,
    /// What is taken where he did not.
    pub usual: usize,
    /// With fewer the engine is of no use.
    pub least: usize,
}

/// The number of blocks; without `room`, because the cache lies elsewhere or nothing is known of the memory, it is what is wanted.
///
/// # Errors
/// [`ModelError::OutOfMemory`], which says how much there is and what to do.
pub(super) fn num_blocks(wanted: Wanted, room: Option<Room>) -> Result<usize, ModelError> {
    let Wanted { asked, usual, least } = wanted;
    let blocks = asked.unwrap_or(usual);
    let Some(Room { block_bytes, free_bytes }) = room.filter(|room| room.block_bytes > 0) else { return Ok(blocks) };
    let bytes_max = if asked.is_some() { free_bytes } else { free_bytes / LEFT_TO_OTHERS };
    let fit = usize::try_from(bytes_max / block_bytes).unwrap_or(usize::MAX);
    let refuse = |blocks: usize, reason: String| {
        Err(ModelError::OutOfMemory { needed_bytes: (blocks as u64).saturating_mul(block_bytes), reason })
    };
    match asked {
        Some(_) if blocks > fit => {
            refuse(blocks, format!("{free_bytes} bytes of memory are free, at most --kv-blocks {fit} would fit"))
        }
        None if fit < least => refuse(
            least,
            format!(
                "{free_bytes} bytes of memory are free, of which it may take {bytes_max}; --kv-blocks can ask for more"
            ),
        ),
        None => Ok(blocks.min(fit)),
        Some(_) => Ok(blocks),
    }
}

#[test]
fn a_cache_that_was_asked_for_fits_or_is_refused_and_the_usual_one_is_what_fits() {
    let blocks = |asked, free_bytes| {
        let room = Room { block_bytes: 10, free_bytes };
        num_blocks(Wanted { asked, usual: 100, least: 4 }, Some(room)).ok()
    };
    let cases = [
        (None, u64::MAX, Some(100)),
        (None, 2000, Some(100)),
        (None, 1990, Some(99)),
        (None, 80, Some(4)),
        (None, 79, None),
        (None, 0, None),
        (Some(7), 70, Some(7)),
        (Some(7), 69, None),
        (Some(1), 10, Some(1)),
        (Some(500), u64::MAX, Some(500)),
    ];
    for (asked, free, want) in cases {
        assert_eq!(blocks(asked, free), want, "{asked:?} of {free} bytes");
    }
    for room in [None, Some(Room { block_bytes: 0, free_bytes: 0 })] {
        let of = |asked| num_blocks(Wanted { asked, usual: 100, least: 4 }, room).ok();
        assert_eq!((of(None), of(Some(7))), (Some(100), Some(7)));
    }
    let room = Room { block_bytes: 10, free_bytes: 69 };
    let error = num_blocks(Wanted { asked: Some(7), usual: 100, least: 4 }, Some(room)).unwrap_err().to_string();
    assert!(error.contains("needs 70 bytes: 69 bytes") && error.contains("--kv-blocks 6"), "{error}");
}
