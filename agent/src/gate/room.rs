//! Memory that bodies and whole answers may take in the gate. Nobody waits for it: a few slow senders that hold it would stop everybody else.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// All of bodies that is held in memory together; what finds no room streams through, counted by its length.
const HELD_BYTES_MAX: usize = 64 << 20;
/// The beginnings of all bodies, so many bytes of each, have room of their own: however many long ones come slowly, short ones are read.
pub const BEGINNING_BYTES: usize = 64 << 10;
const BEGINNINGS_BYTES_MAX: usize = 16 << 20;
/// Whole answers that their clients have not taken yet: slow ones are no reason to leave bodies unread.
const ANSWERS_BYTES_MAX: usize = 64 << 20;

/// A permit a byte.
#[derive(Debug)]
pub struct Room {
    beginnings: Arc<Semaphore>,
    rest: Arc<Semaphore>,
    answers: Arc<Semaphore>,
}

impl Default for Room {
    fn default() -> Self {
        Self::of(HELD_BYTES_MAX)
    }
}

impl Room {
    fn of(bytes_max: usize) -> Self {
        Self {
            beginnings: Arc::new(Semaphore::new(BEGINNINGS_BYTES_MAX)),
            rest: Arc::new(Semaphore::new(bytes_max)),
            answers: Arc::new(Semaphore::new(ANSWERS_BYTES_MAX)),
        }
    }

    /// Of bodies, what is held now.
    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        BEGINNINGS_BYTES_MAX + HELD_BYTES_MAX - self.beginnings.available_permits() - self.rest.available_permits()
    }

    /// For an answer of this length, for as long as what is given is there; `None` where there is none now.
    pub fn for_whole(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        reserve(&self.answers, usize::try_from(bytes).ok()?)
    }
}

/// What gives its room back when the last of it was taken: by its client, or by the engine. Whoever writes it forgets its body as soon as all
/// of that waits to be written.
pub fn in_room(bytes: Bytes, room: impl Send + 'static) -> Bytes {
    Bytes::from_owner(InRoom { bytes, _room: room })
}

struct InRoom<R> {
    bytes: Bytes,
    _room: R,
}

impl<R> AsRef<[u8]> for InRoom<R> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// What of the room one body holds, until the engine has taken it (see [`in_room`]).
#[derive(Debug, Default)]
pub struct Share {
    beginning: Option<OwnedSemaphorePermit>,
    rest: Option<OwnedSemaphorePermit>,
}

impl Share {
    /// For so many bytes more, behind those that it has; `false` where there is no room for all of them.
    pub fn grow(&mut self, room: &Room, has: usize, more: usize) -> bool {
        let beginning = BEGINNING_BYTES.saturating_sub(has).min(more);
        add(&mut self.beginning, &room.beginnings, beginning) && add(&mut self.rest, &room.rest, more - beginning)
    }
}

fn add(share: &mut Option<OwnedSemaphorePermit>, room: &Arc<Semaphore>, bytes: usize) -> bool {
    match (reserve(room, bytes), &mut *share) {
        (Some(more), Some(share)) => share.merge(more),
        (Some(first), None) => *share = Some(first),
        (None, _) => return false,
    }
    true
}

fn reserve(room: &Arc<Semaphore>, bytes: usize) -> Option<OwnedSemaphorePermit> {
    Arc::clone(room).try_acquire_many_owned(u32::try_from(bytes).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_its_room_until_its_client_has_all_of_it() {
        let room = Room::default();
        let mut answers: Vec<Bytes> =
            (0..8).map(|_| in_room(Bytes::from_static(b"{}"), room.for_whole(8 << 20).unwrap())).collect();
        assert!(room.for_whole(1).is_none(), "the next ones stream");
        assert!(Share::default().grow(&room, 0, 1 << 20), "bodies have room of their own");
        let left = answers[0].split_off(1);
        drop(answers.remove(0));
        assert!(room.for_whole(1).is_none(), "half of it is still to be sent");
        drop(left);
        assert!(room.for_whole(8 << 20).is_some());
    }

    #[test]
    fn many_long_bodies_leave_room_for_a_short_one() {
        let room = Room::of(1 << 20);
        let mut long = Share::default();
        let steps: Vec<bool> = (0..20).map(|n| long.grow(&room, n * BEGINNING_BYTES, BEGINNING_BYTES)).collect();
        assert_eq!(steps.iter().take_while(|fits| **fits).count(), 17, "its beginning, and all of the rest: {steps:?}");
        let mut short = Share::default();
        assert!(
            short.grow(&room, 0, 40_000) && !short.grow(&room, 40_000, BEGINNING_BYTES),
            "up to its beginning's end"
        );
        drop(long);
        assert!(Share::default().grow(&room, 0, 1 << 20));
    }
}
