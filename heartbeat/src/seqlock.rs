//! The seqlock that makes a slot of words one atomic unit (H7), written once over two small traits.
//!
//! The writer runs it over the mapping, the reader over `pread` (of memory that is sealed: over its own mapping), and the model test
//! over loom's atomics, so that what is model-checked is what runs. Pure: no memory, file or clock of its own.
//!
//! Why it is right (W writer, R reader; numbers as in H7 of the contract):
//! W: `seq = odd; release fence; payload…; seq = even (release)`. R: `a = seq; acquire fence; payload…; acquire fence;
//! b = seq`, and believe only `a == b`, even. If R saw any payload word of a write, W's release fence and R's second
//! acquire fence make that write's odd store happen before `b`, so `b` is at least odd, and differs from an older `a`.
//! If `a` is the even value of a write, that release store and R's first fence make the whole write visible.
//! `pread` is a load of the kernel on the reader's own thread: it is before or after the reader's fences in program
//! order as any load is, and within the payload no order is assumed. Payload words may tear; a torn sequence word
//! could only be believed if it tore twice into the same even value while the counter ran on.

/// The writer's view of one slot: word 0 is the sequence, the payload follows. All accesses are atomic.
pub(crate) trait Sink {
    fn store_relaxed(&self, word: usize, value: u64);
    fn store_release(&self, word: usize, value: u64);
    fn fence_release(&self);
}

/// The reader's view of one slot. Loads are relaxed; `fence_acquire` orders them.
pub(crate) trait Source {
    type Payload;
    type Error;
    fn seq(&mut self) -> Result<u64, Self::Error>;
    fn payload(&mut self) -> Result<Self::Payload, Self::Error>;
    fn fence_acquire(&self);
}

/// How a read of a slot ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Slot<T> {
    /// Nothing was ever written.
    Empty,
    Stable(T),
    /// Not one of the tries was undisturbed.
    Torn,
}

/// Writes one payload. `seq` is the slot's new, even sequence; one writer at a time.
#[inline]
pub(crate) fn write<S: Sink, const N: usize>(sink: &S, seq: u64, payload: &[u64; N]) {
    sink.store_relaxed(0, seq.wrapping_sub(1));
    sink.fence_release();
    for (i, value) in payload.iter().enumerate() {
        sink.store_relaxed(1 + i, *value);
    }
    sink.store_release(0, seq);
}

/// Reads one payload in at most `tries` tries.
///
/// # Errors
/// The source's own.
pub(crate) fn read<S: Source>(source: &mut S, tries: u32) -> Result<Slot<S::Payload>, S::Error> {
    for _ in 0..tries {
        let before = source.seq()?;
        if before == 0 {
            return Ok(Slot::Empty);
        }
        source.fence_acquire();
        let payload = source.payload()?;
        source.fence_acquire();
        if is_stable(before, source.seq()?) {
            return Ok(Slot::Stable(payload));
        }
    }
    Ok(Slot::Torn)
}

/// Whether what was read between these two sequences may be believed.
pub(crate) fn is_stable(before: u64, after: u64) -> bool {
    before == after && before.is_multiple_of(2)
}

#[cfg(test)]
mod tests;
