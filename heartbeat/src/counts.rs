//! A few counters of one process for another's eyes, by the page's own protocol (H7, H8) and in no file of any directory: one slot in
//! memory that the writer makes, stores into without a system call, and lets others open. No part of the page's contract: both ends are
//! of one program, so that what the words mean is theirs.
//!
//! Nobody but the maker can write what is behind the descriptor, and nobody at all can cut it: so the reader may map it, unlike a page
//! (H8), and looks at it without a system call.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::map::{Map, View};
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

/// The reader's end. What it reads stays there when the writer has gone.
#[derive(Debug)]
pub struct CountsReader(View<WORDS>);

impl CountsReader {
    /// Of what a [`CountsWriter`] has made; the descriptor is not needed any more.
    ///
    /// # Errors
    /// For any file that somebody could cut.
    pub fn open(file: &File) -> io::Result<Self> {
        Ok(Self(View::sealed(file)?))
    }

    /// The counters as they were last stored; `None` where nobody has yet, or where they cannot be read just now.
    pub fn read(&self) -> Option<[u64; COUNTS]> {
        match seqlock::read(&mut Reads(&self.0), TRIES_MAX) {
            Ok(Slot::Stable(counts)) => Some(counts),
            Ok(Slot::Empty | Slot::Torn) => None,
        }
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

struct Reads<'a>(&'a View<WORDS>);

impl Source for Reads<'_> {
    type Payload = [u64; COUNTS];
    type Error = Infallible;

    fn seq(&mut self) -> Result<u64, Infallible> {
        Ok(self.0.load_relaxed(0))
    }

    fn payload(&mut self) -> Result<[u64; COUNTS], Infallible> {
        Ok(std::array::from_fn(|n| self.0.load_relaxed(1 + n)))
    }

    fn fence_acquire(&self) {
        fence(Ordering::Acquire);
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
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
        let reader = CountsReader::open(&File::open(path(&writer)).unwrap()).unwrap();
        assert_eq!(reader.read(), None, "nobody has stored anything");
        let writes = std::thread::spawn(move || {
            (1..=100_000).for_each(|n| writer.store(&[n; COUNTS]));
            writer
        });
        let mut last = 0;
        while last < 100_000 {
            let Some(counts) = reader.read() else { continue };
            assert!(counts.iter().all(|count| *count == counts[0]) && counts[0] >= last, "{counts:?} after {last}");
            last = counts[0];
        }
        drop(writes.join().unwrap());
        assert_eq!(reader.read(), Some([last; COUNTS]), "the words of one that has gone stay");
    }

    #[test]
    fn nobody_else_can_write_or_cut_them() {
        let mut writer = CountsWriter::create("test").unwrap();
        let other = OpenOptions::new().read(true).write(true).open(path(&writer)).unwrap();
        assert!(other.write_all_at(&[1; 8], 0).is_err() && other.set_len(0).is_err());
        assert!(Map::<WORDS>::shared(&other).is_err());
        writer.store(&[3; COUNTS]);
        assert_eq!(CountsReader::open(&other).unwrap().read(), Some([3; COUNTS]));
    }

    #[test]
    fn what_somebody_could_cut_is_not_mapped() {
        let open = File::from(memfd_create("test", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        open.write_all_at(&[0; WORDS * 8], 0).unwrap();
        assert!(CountsReader::open(&open).is_err());
        fcntl(&open, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        assert!(CountsReader::open(&open).is_ok());
        let short = File::from(memfd_create("test", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        fcntl(&short, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        assert!(CountsReader::open(&short).is_err());
        assert!(CountsReader::open(&File::open("/proc/self/exe").unwrap()).is_err(), "no memory at all");
    }
}
