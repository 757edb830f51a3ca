//! A few counters of one process for another's eyes, by the page's own protocol (H7, H8) and in no file of any directory: one slot in
//! memory that the writer makes, stores into without a system call, and lets others open. No part of the page's contract: both ends are
//! of one program, so that what the words mean is theirs.
//!
//! The reader uses `pread` alone, as for a page, and nobody but the maker can write or cut what is behind the descriptor.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::map::Map;
use crate::seqlock::{self, Sink, Slot, Source};

/// How many counters there are.
pub const COUNTS: usize = 15;
/// The sequence, then the counters.
const WORDS: usize = COUNTS + 1;
/// Tries at the slot; whoever reads it looks again soon.
const TRIES_MAX: u32 = 8;

/// The writer's end.
#[derive(Debug)]
pub struct CountsWriter {
    map: Map<WORDS>,
    file: File,
    seq: u64,
}

impl CountsWriter {
    /// Counters that nobody has stored yet, under a name for people who look at descriptors.
    ///
    /// # Errors
    /// When the kernel gives no such memory.
    pub fn create(name: &str) -> io::Result<Self> {
        let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
        // real bytes: a hole could be a SIGBUS at the first store where memory is short
        file.write_all_at(&[0; WORDS * 8], 0)?;
        let map = Map::shared(&file)?;
        let cut = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        let seals = cut | SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(Self { map, file, seq: 0 })
    }

    /// Makes `counts` what readers see, as one atomic unit. Wait-free; no lock, allocation or system call.
    #[inline]
    pub fn store(&mut self, counts: &[u64; COUNTS]) {
        self.seq = self.seq.wrapping_add(2);
        seqlock::write(&Words(self.map.words()), self.seq, counts);
    }

    /// What others open to read them.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// The counters as they were last stored; `None` where nobody has yet, or where they cannot be read just now.
pub fn read(file: &File) -> Option<[u64; COUNTS]> {
    match seqlock::read(&mut Reads(file), TRIES_MAX) {
        Ok(Slot::Stable(counts)) => Some(counts),
        Ok(Slot::Empty | Slot::Torn) | Err(_) => None,
    }
}

struct Words<'a>(&'a [AtomicU64; WORDS]);

impl Sink for Words<'_> {
    #[inline]
    fn store_relaxed(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Relaxed);
    }

    #[inline]
    fn store_release(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Release);
    }

    #[inline]
    fn fence_release(&self) {
        fence(Ordering::Release);
    }
}

struct Reads<'a>(&'a File);

impl Reads<'_> {
    fn words<const N: usize>(&self, from: usize) -> io::Result<[u64; N]> {
        let mut bytes = [[0; 8]; N];
        self.0.read_exact_at(bytes.as_flattened_mut(), (from * 8) as u64)?;
        Ok(bytes.map(u64::from_ne_bytes))
    }
}

impl Source for Reads<'_> {
    type Payload = [u64; COUNTS];
    type Error = io::Error;

    fn seq(&mut self) -> io::Result<u64> {
        self.words::<1>(0).map(|[seq]| seq)
    }

    fn payload(&mut self) -> io::Result<[u64; COUNTS]> {
        self.words(1)
    }

    fn fence_acquire(&self) {
        fence(Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::os::fd::AsRawFd;

    fn path(writer: &CountsWriter) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), writer.file().as_raw_fd())
    }

    #[test]
    fn what_was_stored_last_is_read_whole() {
        let mut writer = CountsWriter::create("test").unwrap();
        let reader = File::open(path(&writer)).unwrap();
        assert_eq!(read(&reader), None, "nobody has stored anything");
        let writes = std::thread::spawn(move || {
            (1..=100_000).for_each(|n| writer.store(&[n; COUNTS]));
            writer
        });
        let mut last = 0;
        while last < 100_000 {
            let Some(counts) = read(&reader) else { continue };
            assert!(counts.iter().all(|count| *count == counts[0]) && counts[0] >= last, "{counts:?} after {last}");
            last = counts[0];
        }
        drop(writes.join().unwrap());
        assert_eq!(read(&reader), Some([last; COUNTS]), "the words of one that has gone stay");
    }

    #[test]
    fn nobody_else_can_write_or_cut_them() {
        let mut writer = CountsWriter::create("test").unwrap();
        let other = OpenOptions::new().read(true).write(true).open(path(&writer)).unwrap();
        assert!(other.write_all_at(&[1; 8], 0).is_err() && other.set_len(0).is_err());
        assert!(Map::<WORDS>::shared(&other).is_err());
        writer.store(&[3; COUNTS]);
        assert_eq!(read(&other), Some([3; COUNTS]));
    }
}
