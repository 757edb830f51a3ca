//! Room in memory for what comes in, or goes out, in any number: the first part of each and what is beyond it are counted apart, so that a few
//! that are long and slow do not keep out the many that are short.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The first part of each.
pub const FIRST_BYTES: usize = 64 << 10;
/// What these may hold together.
pub const FIRST_PARTS_BYTES_MAX: usize = 128 << 20;

/// What all of them may hold together.
#[derive(Debug, Clone)]
pub struct Rooms {
    /// For first parts, and for the rest.
    parts: [Arc<Semaphore>; 2],
}

/// One's part of that, which is back when this is gone.
#[derive(Debug, Default)]
pub struct Room {
    permits: [Option<OwnedSemaphorePermit>; 2],
    bytes: usize,
}

impl Rooms {
    /// Of so many bytes for first parts, and for what is beyond them.
    pub fn of(first_parts_bytes: usize, bytes: usize) -> Self {
        Self { parts: [first_parts_bytes, bytes].map(|places| Arc::new(Semaphore::new(places))) }
    }

    /// Makes `room` larger by so many bytes; `None`: they are taken.
    pub fn widen(&self, room: &mut Room, bytes: usize) -> Option<()> {
        let first = bytes.min(FIRST_BYTES.saturating_sub(room.bytes));
        for ((held, places), bytes) in room.permits.iter_mut().zip(&self.parts).zip([first, bytes - first]) {
            let more = places.clone().try_acquire_many_owned(u32::try_from(bytes).ok()?).ok()?;
            match held {
                Some(held) => held.merge(more),
                None => *held = Some(more),
            }
        }
        room.bytes += bytes;
        Some(())
    }

    /// Bytes that are free, for first parts and beyond them.
    #[cfg(test)]
    pub fn free(&self) -> [usize; 2] {
        self.parts.each_ref().map(|places| places.available_permits())
    }
}
