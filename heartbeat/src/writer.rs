//! The engine's side: creates the page once, then publishes by plain stores (H7).
//!
//! Touches one file in the page directory and its own mapping of it. Times are arguments: it reads no clock.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::layout::{self, BEAT_OFFSET, BEAT_WORDS, FILE_LEN, HEADER_LEN, RECORD_LEN, RECORD_WORDS};
use crate::map::Map;
use crate::page::{Beat, Identity, RING_LEN, StepRecord};
use crate::seqlock::{self, Sink};

/// Owner writes, group may read: engine and agent share a user, and a page holds no secret.
const PAGE_MODE: u32 = 0o640;

/// Why a page could not be created.
#[derive(Debug, thiserror::Error)]
pub enum WriterError {
    #[error("identity of rank {rank} cannot be written: {field} = {value} is out of bounds")]
    Identity { rank: u32, field: &'static str, value: u64 },
    #[error("cannot create {path}: {source}; the page directory must exist and be writable (TRUEBEAT_PAGE_DIR)")]
    Create { path: PathBuf, source: std::io::Error },
    #[error("cannot fill {path}: {source}; is the page directory full?")]
    Fill { path: PathBuf, source: std::io::Error },
    #[error("cannot map {path}: {source}")]
    Map { path: PathBuf, source: nix::errno::Errno },
    #[error("cannot rename {from} to {to}: {source}")]
    Rename { from: PathBuf, to: PathBuf, source: std::io::Error },
}

/// The page as the words that both sides agree on.
type PageMap = Map<{ FILE_LEN / 8 }>;

/// The one writer of a rank's page. The file stays after a drop: it is evidence, and stale once the process is gone.
#[derive(Debug)]
pub struct Writer {
    map: PageMap,
    path: PathBuf,
    // Kept here and never read back: whatever somebody scribbles into the page, the writer's own sequence stands.
    beat_seq: u64,
    records: u64,
}

impl Writer {
    /// Creates `rank-<n>.beat` in `dir` (which must exist), replacing an older page atomically: a reader sees the old
    /// file or the new one, whole (H1).
    ///
    /// # Errors
    /// An identity out of bounds (H2), or the step at the file that failed. No half-made file is left under the name.
    pub fn create(dir: &Path, identity: &Identity) -> Result<Self, WriterError> {
        if let Some((field, value)) = layout::identity_fault(identity) {
            return Err(WriterError::Identity { rank: identity.rank, field, value });
        }
        let path = dir.join(layout::file_name(identity.rank));
        let temp = dir.join(format!(".{}.{}.tmp", layout::file_name(identity.rank), std::process::id()));
        let made = make_file(&temp, identity).and_then(|map| match fs::rename(&temp, &path) {
            Ok(()) => Ok(map),
            Err(source) => Err(WriterError::Rename { from: temp.clone(), to: path.clone(), source }),
        });
        let map = made.inspect_err(|_| {
            // Best effort: the error that matters is the one on its way to the caller.
            let _ = fs::remove_file(&temp);
        })?;
        Ok(Self { map, path, beat_seq: 0, records: 0 })
    }

    /// Makes `beat` the page's state, as one atomic unit. Wait-free; no lock, allocation or syscall (H7).
    ///
    /// The counters must not go back, and no time in it may be after `published_ns`: readers refuse such a beat (H3, H5).
    #[inline]
    pub fn publish(&mut self, beat: &Beat) {
        self.beat_seq = self.beat_seq.wrapping_add(2);
        let slot = WordSlot::<{ BEAT_WORDS + 1 }>::at(&self.map, BEAT_OFFSET / 8);
        if let Some(slot) = slot {
            seqlock::write(&slot, self.beat_seq, &layout::beat_words(beat));
        }
    }

    /// Adds a line to the flight recorder, over the oldest of the last 256 (H6). As cheap as [`Self::publish`].
    #[inline]
    pub fn record(&mut self, record: &StepRecord) {
        let index = self.records;
        self.records = index.wrapping_add(1);
        let slot = HEADER_LEN + (index % RING_LEN as u64) as usize * RECORD_LEN;
        if let Some(slot) = WordSlot::<{ RECORD_WORDS + 1 }>::at(&self.map, slot / 8) {
            // The sequence tells the record's number, so that a reader can order the slots: 2 for the first, 4 …
            seqlock::write(&slot, self.records.wrapping_mul(2), &layout::record_words(record));
        }
    }

    /// Where the page is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Makes and maps the whole file under a name that no reader looks at.
fn make_file(temp: &Path, identity: &Identity) -> Result<PageMap, WriterError> {
    // A leftover of an earlier process with this pid; its absence is the normal case.
    let _ = fs::remove_file(temp);
    let mut file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(PAGE_MODE)
        .open(temp)
        .map_err(|source| WriterError::Create { path: temp.to_owned(), source })?;
    // Real bytes and not a hole: on a full tmpfs a hole is a SIGBUS at the first store, a write is an error now.
    file.write_all(&layout::fresh_page(identity))
        .map_err(|source| WriterError::Fill { path: temp.to_owned(), source })?;
    Map::shared(&file).map_err(|source| WriterError::Map { path: temp.to_owned(), source })
}

/// One slot of the mapping, of a length that the compiler knows: the stores need no bounds checks.
struct WordSlot<'a, const N: usize>(&'a [AtomicU64; N]);

impl<'a, const N: usize> WordSlot<'a, N> {
    /// `None` beyond the page, which no caller asks for; a missed beat is better than a panic in an engine.
    #[inline]
    fn at(map: &'a PageMap, word: usize) -> Option<Self> {
        map.words().get(word..)?.first_chunk().map(WordSlot)
    }
}

impl<const N: usize> Sink for WordSlot<'_, N> {
    #[inline]
    fn store_relaxed(&self, word: usize, value: u64) {
        self.0[word].store(value.to_le(), Ordering::Relaxed);
    }

    #[inline]
    fn store_release(&self, word: usize, value: u64) {
        self.0[word].store(value.to_le(), Ordering::Release);
    }

    #[inline]
    fn fence_release(&self) {
        fence(Ordering::Release);
    }
}
