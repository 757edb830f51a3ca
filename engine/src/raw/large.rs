//! Memory in large pages. Weights and caches are read from end to end at every step; in pages of 4 KiB a processor spends a good part of
//! that on finding them (`docs/engine-bench.md`). Systems give large pages to whoever asks, and only to pieces as large as such a page:
//! so pieces are cut from large chunks.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use memmap2::{Advice, MmapMut, MmapRaw};

/// Smaller pieces are the allocator's.
const PIECE_MIN: usize = 256 << 10;
/// Larger pieces have a chunk of their own.
const PIECE_MAX: usize = CHUNK / 4;
const CHUNK: usize = 64 << 20;
const PAGE: usize = 2 << 20;
const LINE: usize = 64;

/// The chunk that pieces are cut from; whoever holds a piece keeps it.
static NEWEST: Mutex<Weak<Chunk>> = Mutex::new(Weak::new());

/// Bytes, zero at first, that begin on a cache line.
#[derive(Debug)]
pub struct LargeBytes(Place);

#[derive(Debug)]
enum Place {
    /// `len` bytes from `start` on: what a Vec holds stays in its place wherever the Vec goes.
    Few {
        bytes: Vec<u8>,
        start: usize,
        len: usize,
    },
    Many(Piece),
}

/// A range of a chunk that nobody else has.
#[derive(Debug)]
struct Piece {
    chunk: Arc<Chunk>,
    start: usize,
    len: usize,
}

#[derive(Debug)]
struct Chunk {
    map: MmapRaw,
    used: AtomicUsize,
}

impl LargeBytes {
    /// `None` where the system refuses.
    pub fn zeroed(len: usize) -> Option<Self> {
        if let Some(piece) = (len >= PIECE_MIN).then(|| Piece::new(len)).flatten() {
            return Some(Self(Place::Many(piece)));
        }
        let room = len.checked_add(LINE)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(room).ok()?;
        bytes.resize(room, 0);
        let start = bytes.as_ptr().align_offset(LINE).min(LINE);
        Some(Self(Place::Few { bytes, start, len }))
    }
}

impl Piece {
    fn new(len: usize) -> Option<Self> {
        if len > PIECE_MAX {
            return Chunk::new(len)?.cut(len);
        }
        // a lock that is taken costs a chunk, not a wait
        let Ok(mut newest) = NEWEST.try_lock() else { return Chunk::new(len)?.cut(len) };
        if let Some(piece) = newest.upgrade().and_then(|chunk| chunk.cut(len)) {
            return Some(piece);
        }
        let chunk = Chunk::new(CHUNK)?;
        *newest = Arc::downgrade(&chunk);
        chunk.cut(len)
    }
}

impl Chunk {
    fn new(len: usize) -> Option<Arc<Self>> {
        let map = MmapMut::map_anon(len.checked_next_multiple_of(PAGE)?).ok()?;
        // a wish, not a need
        let _ = map.advise(Advice::HugePage);
        Some(Arc::new(Self { map: MmapRaw::from(map), used: AtomicUsize::new(0) }))
    }

    /// The next `len` bytes, if there are as many: each byte is given away once.
    fn cut(self: Arc<Self>, len: usize) -> Option<Piece> {
        let after = |start: usize| start.checked_add(len)?.checked_next_multiple_of(LINE);
        let fits = |start: usize| after(start).filter(|end| *end <= self.map.len());
        let start = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Piece { chunk: self, start, len })
    }
}

impl Deref for LargeBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Place::Few { bytes, start, len } => &bytes[*start..start + len],
            // SAFETY: `start..start + len` lies in the mapping, which lives as long as `chunk` and is readable; `cut` gave these bytes
            // to this piece alone, so whoever writes them has a `&mut` of it.
            Place::Many(Piece { chunk, start, len }) => unsafe {
                std::slice::from_raw_parts(chunk.map.as_ptr().add(*start), *len)
            },
        }
    }
}

impl DerefMut for LargeBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Place::Few { bytes, start, len } => &mut bytes[*start..*start + *len],
            // SAFETY: as above; the mapping is private and writable.
            Place::Many(Piece { chunk, start, len }) => unsafe {
                std::slice::from_raw_parts_mut(chunk.map.as_mut_ptr().add(*start), *len)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_apart_and_on_a_line() {
        let lens = [0, 1, PIECE_MIN - 1, PIECE_MIN, PIECE_MIN + 1, 3 << 20, PIECE_MAX, PIECE_MAX + 1, CHUNK + 1];
        let mut pieces: Vec<LargeBytes> = lens.iter().map(|len| LargeBytes::zeroed(*len).unwrap()).collect();
        for (index, piece) in pieces.iter_mut().enumerate() {
            assert!(piece.len() == lens[index] && piece.iter().all(|byte| *byte == 0));
            assert!(piece.as_ptr().addr().is_multiple_of(LINE));
            piece.fill(index as u8 + 1);
        }
        for (index, piece) in pieces.iter().enumerate() {
            assert!(piece.iter().all(|byte| *byte == index as u8 + 1), "piece {index} was written by another");
        }
    }

    #[test]
    fn what_no_machine_has_is_refused() {
        assert!(LargeBytes::zeroed(usize::MAX).is_none() && LargeBytes::zeroed(isize::MAX as usize).is_none());
    }

    #[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
    #[test]
    fn threads_that_cut_at_once_get_different_bytes() {
        let starts = std::thread::scope(|scope| {
            let cut = || (0..20).map(|_| LargeBytes::zeroed(PIECE_MIN).unwrap()).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(cut)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let mut at: Vec<usize> = starts.iter().map(|piece| piece.as_ptr().addr()).collect();
        at.sort_unstable();
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= PIECE_MIN));
    }
}
