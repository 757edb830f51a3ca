//! The agent's side: reads a page by `pread` alone and believes nothing in it (H8).
//!
//! Touches the page's path and `/proc`. Never maps, never blocks on what lies there (a FIFO, a symlink), never panics:
//! every surprise is an [`Unknown`].

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use nix::fcntl::OFlag;

use crate::layout::{self, BEAT_OFFSET, BEAT_WORDS, FILE_LEN, HEADER_LEN, IDENTITY_LEN, RECORD_LEN, RECORD_WORDS};
use crate::page::{Beat, Identity, Page, RING_LEN, StepRecord};
use crate::process;
use crate::seqlock::{self, Slot, Source};
use crate::unknown::Unknown;

/// Tries at a slot before the reader says Unknown (H7).
pub const TRIES_MAX: u32 = 64;

const RING_BYTES: usize = RING_LEN * RECORD_LEN;

/// Reads one rank's page, again and again. Follows the path: a page that was replaced is opened anew.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    rank: u32,
    proc_root: PathBuf,
    pid: Option<u32>,
    nonce: Option<u64>,
    open: Option<OpenPage>,
}

/// The file that the path named at the last look, and the last page believed from it.
#[derive(Debug)]
struct OpenPage {
    file: File,
    dev_ino: (u64, u64),
    owner: u32,
    last: Option<Page>,
}

impl Reader {
    /// A reader of `rank-<rank>.beat` in `dir`. Touches nothing yet: the page may come later.
    pub fn open(dir: &Path, rank: u32) -> Self {
        let path = dir.join(layout::file_name(rank));
        Self { path, rank, proc_root: PathBuf::from(process::PROC_ROOT), pid: None, nonce: None, open: None }
    }

    /// Looks for the writer's process below another root than `/proc`.
    #[must_use]
    pub fn with_proc_root(mut self, root: impl Into<PathBuf>) -> Self {
        self.proc_root = root.into();
        self
    }

    /// Checks this pid instead of the one in the page: for a writer in another PID namespace, or one known beforehand.
    /// Its start ticks must be the page's all the same (H2).
    #[must_use]
    pub fn with_pid(mut self, pid: u32) -> Self {
        self.pid = Some(pid);
        self
    }

    /// Believes only pages with the nonce that the launcher gave (H2).
    #[must_use]
    pub fn with_nonce(mut self, nonce: u64) -> Self {
        self.nonce = Some(nonce);
        self
    }

    /// Whose the file is that was read last.
    pub fn owner(&self) -> Option<u32> {
        self.open.as_ref().map(|open| open.owner)
    }

    /// Where the page is looked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The page, from a process that is alive and the right one (H2).
    ///
    /// # Errors
    /// Why nothing can be said. A counter that went back is reported once and then taken as the new ground.
    pub fn read(&mut self) -> Result<Page, Unknown> {
        let page = self.read_unverified()?;
        let pid = self.pid.unwrap_or(page.identity.pid);
        process::check_live(&page.identity, pid, &self.proc_root)?;
        self.owner().map_or(Ok(()), |owner| process::check_owner(owner, pid, &self.proc_root))?;
        Ok(page)
    }

    /// As [`Self::read`], of a process that may be dead: the last words for an evidence bundle (I6). Never a sign of life.
    ///
    /// # Errors
    /// As [`Self::read`], without `Stale`.
    pub fn read_unverified(&mut self) -> Result<Page, Unknown> {
        let path = self.path.clone();
        self.current()?.check_length(&path)?;
        self.reread()
    }

    /// As [`Self::read_unverified`], of the file that the path named when it was last asked: three reads, and no way through the file
    /// system. For whoever looks ten times a second, and asks the path as soon as what is read stands still. The first look asks it.
    ///
    /// # Errors
    /// As [`Self::read_unverified`]; of a file that became shorter only where the page itself is cut.
    pub fn reread(&mut self) -> Result<Page, Unknown> {
        if self.open.is_none() {
            self.current()?;
        }
        let Some(open) = &mut self.open else { return Err(Unknown::Missing { path: self.path.clone() }) };
        let page = open.page(&self.path, self.rank)?;
        if let Some(expected) = self.nonce.filter(|n| *n != page.identity.nonce) {
            return Err(Unknown::WrongNonce { found: page.identity.nonce, expected });
        }
        let last = open.last.replace(page.clone());
        match last.filter(|last| last.identity == page.identity) {
            Some(last) => went_back(&last.beat, &page.beat).map_or(Ok(page), Err),
            None => Ok(page),
        }
    }

    /// The flight recorder (H6): up to 256 records, oldest first, of a process alive or dead. Slots that are torn or
    /// hold impossible values are left out: in evidence, part is better than nothing.
    ///
    /// # Errors
    /// When there is no page to read, or it is not one.
    pub fn steps(&mut self) -> Result<Vec<StepRecord>, Unknown> {
        let (path, rank) = (self.path.clone(), self.rank);
        let open = self.current()?;
        open.check_length(&path)?;
        identity_of(&open.bytes::<IDENTITY_LEN>(&path, 0)?, rank)?;
        open.steps(&path)
    }

    /// The file that the path names now; opens it where it is new (POD.md: a new writer renames a new file into place).
    fn current(&mut self) -> Result<&mut OpenPage, Unknown> {
        let named = fs::symlink_metadata(&self.path).map_err(|e| self.io("looking at", e));
        let open = match (named, self.open.take()) {
            (Ok(named), Some(open)) if open.dev_ino == dev_ino(&named) => open,
            (Ok(named), _) if !named.is_file() => return Err(Unknown::NotAFile { path: self.path.clone() }),
            (Ok(_), _) => self.open_anew()?,
            (Err(unknown), _) => return Err(unknown),
        };
        Ok(self.open.insert(open))
    }

    fn open_anew(&self) -> Result<OpenPage, Unknown> {
        // What lies there may have changed since the look: no wait on a FIFO, no way out of the directory by a symlink.
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(&self.path);
        let file = opened.map_err(|e| self.io("opening", e))?;
        let meta = file.metadata().map_err(|e| self.io("looking at", e))?;
        if !meta.is_file() {
            return Err(Unknown::NotAFile { path: self.path.clone() });
        }
        Ok(OpenPage { file, dev_ino: dev_ino(&meta), owner: meta.uid(), last: None })
    }

    fn io(&self, op: &'static str, error: Error) -> Unknown {
        io_unknown(op, &self.path, &error)
    }
}

impl OpenPage {
    fn page(&self, path: &Path, rank: u32) -> Result<Page, Unknown> {
        // the beat's sequence lies behind the identity: one read has both, and is the first of the seqlock's
        let head = self.bytes::<{ BEAT_OFFSET + 8 }>(path, 0)?;
        let identity = identity_of(head.first_chunk().unwrap_or(&[0; IDENTITY_LEN]), rank)?;
        let mut source = BeatSource { open: self, path, seq: Some(word(&head, BEAT_OFFSET)) };
        match seqlock::read(&mut source, TRIES_MAX)? {
            Slot::Stable(words) => Ok(Page { identity, beat: layout::beat_of(&words)? }),
            Slot::Empty => Err(Unknown::NoBeat),
            Slot::Torn => Err(Unknown::Torn { tries: TRIES_MAX }),
        }
    }

    /// Is the whole file there, ring and all? It can shrink under us.
    fn check_length(&self, path: &Path) -> Result<(), Unknown> {
        let found = self.file.metadata().map_err(|e| io_unknown("looking at", path, &e))?.len();
        let expected = FILE_LEN as u64;
        if found < expected { Err(Unknown::TooShort { found, expected }) } else { Ok(()) }
    }

    /// Three looks at the whole ring make one try at all its slots; slots that moved are tried again.
    fn steps(&self, path: &Path) -> Result<Vec<StepRecord>, Unknown> {
        let mut found: Vec<Option<(u64, Option<StepRecord>)>> = vec![None; RING_LEN];
        for _ in 0..TRIES_MAX {
            let before = self.bytes::<RING_BYTES>(path, HEADER_LEN)?;
            fence(Ordering::Acquire);
            let body = self.bytes::<RING_BYTES>(path, HEADER_LEN)?;
            fence(Ordering::Acquire);
            let after = self.bytes::<RING_BYTES>(path, HEADER_LEN)?;
            for (i, slot) in found.iter_mut().enumerate().filter(|(_, slot)| slot.is_none()) {
                let seq = word(&before, i * RECORD_LEN);
                if seqlock::is_stable(seq, word(&after, i * RECORD_LEN)) {
                    *slot = Some((seq, slot_record(i, seq, &body[i * RECORD_LEN..])));
                }
            }
            if found.iter().all(Option::is_some) {
                break;
            }
        }
        let mut records: Vec<_> = found.into_iter().flatten().filter_map(|(seq, r)| r.map(|r| (seq, r))).collect();
        records.sort_unstable_by_key(|(seq, _)| *seq);
        Ok(records.into_iter().map(|(_, record)| record).collect())
    }

    /// `N` bytes at `offset` by `pread`; a file that has become shorter is `TooShort`, and never a SIGBUS.
    fn bytes<const N: usize>(&self, path: &Path, offset: usize) -> Result<[u8; N], Unknown> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, offset as u64).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                let found = self.file.metadata().map_or(0, |m| m.len());
                Unknown::TooShort { found, expected: FILE_LEN as u64 }
            }
            _ => io_unknown("reading", path, &error),
        })?;
        Ok(bytes)
    }
}

/// The beat's slot by `pread`: sequence and payload are separate reads, so that the fences stand between them.
struct BeatSource<'a> {
    open: &'a OpenPage,
    path: &'a Path,
    /// The sequence as the read before this slot had it; taken once.
    seq: Option<u64>,
}

impl Source for BeatSource<'_> {
    type Payload = [u64; BEAT_WORDS];
    type Error = Unknown;

    fn seq(&mut self) -> Result<u64, Unknown> {
        if let Some(seq) = self.seq.take() {
            return Ok(seq);
        }
        Ok(u64::from_le_bytes(self.open.bytes(self.path, BEAT_OFFSET)?))
    }

    fn payload(&mut self) -> Result<Self::Payload, Unknown> {
        Ok(layout::words_of(&self.open.bytes::<{ BEAT_WORDS * 8 }>(self.path, BEAT_OFFSET + 8)?))
    }

    fn fence_acquire(&self) {
        fence(Ordering::Acquire);
    }
}

/// Magic, version and identity of a page of this rank; afresh at each read, for a file can change under us.
fn identity_of(bytes: &[u8; IDENTITY_LEN], rank: u32) -> Result<Identity, Unknown> {
    let identity = layout::identity_of(bytes)?;
    if identity.rank != rank {
        return Err(Unknown::BadField { field: "rank", value: u64::from(identity.rank) });
    }
    Ok(identity)
}

/// The record of a stable slot; `None` where it is empty, impossible, or numbered for another slot.
fn slot_record(slot: usize, seq: u64, bytes: &[u8]) -> Option<StepRecord> {
    let index = (seq / 2).checked_sub(1)?;
    let belongs_here = index % RING_LEN as u64 == slot as u64;
    layout::record_of(&layout::words_of::<RECORD_WORDS>(bytes.get(8..)?)).filter(|_| belongs_here)
}

/// Counters and publication time of one file and one process never go back (H3).
fn went_back(last: &Beat, beat: &Beat) -> Option<Unknown> {
    [
        ("steps_completed", last.steps_completed, beat.steps_completed),
        ("tokens_delivered", last.tokens_delivered, beat.tokens_delivered),
        ("requests_finished", last.requests_finished, beat.requests_finished),
        ("published_ns", last.published_ns, beat.published_ns),
    ]
    .into_iter()
    .find(|(_, from, to)| to < from)
    .map(|(field, from, to)| Unknown::WentBack { field, from, to })
}

fn word(bytes: &[u8], at: usize) -> u64 {
    layout::words_of::<1>(bytes.get(at..).unwrap_or_default())[0]
}

fn dev_ino(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

fn io_unknown(op: &'static str, path: &Path, error: &Error) -> Unknown {
    match error.kind() {
        ErrorKind::NotFound => Unknown::Missing { path: path.to_owned() },
        _ => Unknown::Io { op, path: path.to_owned(), message: error.to_string() },
    }
}
