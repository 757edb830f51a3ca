//! The lease on a piece of start-up work that one process does for all (E5, S4): a file that says who does it, how far it is, and how long
//! it may be silent. Reads and writes that file and `/proc`. Nothing in the file is believed beyond that: the work is done into a file of
//! its owner's own, so that two owners at once cost time and nothing else.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use heartbeat::page::Identity;
use heartbeat::process::PROC_ROOT;
use heartbeat::{Stale, Unknown};
use serde::{Deserialize, Serialize};

/// An owner that says nothing for so long has lost its lease.
pub const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Between two times that an owner writes how far it is.
const RENEW_EVERY: Duration = Duration::from_millis(100);
/// Between two looks after an owner's process.
const OWNER_EVERY: Duration = Duration::from_millis(250);
/// More than this is no lease.
const BYTES_MAX: u64 = 4096;

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseDoc {
    pub pid: u32,
    pub start_ticks: u64,
    /// The boot, and the set of process numbers, in which `pid` means anything.
    pub place: String,
    /// 1 for the first owner, and one more for each that took over.
    pub generation: u64,
    /// What its owner promises to be silent at most.
    pub silence_ms_max: u64,
    pub done: u64,
    pub total: u64,
    /// One more with each word of its owner: work of one big piece goes on and is no further.
    #[serde(default)]
    pub words: u64,
    /// Why its owner could not do it.
    pub failed: Option<String>,
}

/// What can be known of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Alive,
    /// It will not go on: its process has ended, or is another one by now.
    Gone,
    /// It is not of this machine, or of other process numbers; only its silence tells.
    Unseen,
}

impl LeaseDoc {
    /// A lease for this process, of the first generation.
    fn of_this_process() -> io::Result<Self> {
        let me = Identity::of_this_process(0, 1, 0).map_err(io::Error::other)?;
        Ok(Self {
            pid: me.pid,
            start_ticks: me.pid_start_ticks,
            place: place()?,
            generation: 1,
            silence_ms_max: u64::try_from(SILENCE_MAX.as_millis()).unwrap_or(u64::MAX),
            done: 0,
            total: 0,
            words: 0,
            failed: None,
        })
    }

    /// What a file that cannot be read as a lease stands for: nobody's.
    fn nobody() -> Self {
        let (place, failed) = (String::new(), None);
        Self { pid: 0, start_ticks: 0, place, generation: 0, silence_ms_max: 0, done: 0, total: 0, words: 0, failed }
    }

    fn same_owner(&self, other: &Self) -> bool {
        (self.pid, self.start_ticks, &self.place, self.generation)
            == (other.pid, other.start_ticks, &other.place, other.generation)
    }

    /// Looks after the owner's process.
    pub fn owner(&self) -> Owner {
        if self.pid == 0 {
            return Owner::Gone;
        }
        let Ok(mut identity) = Identity::of_this_process(0, 1, 0) else { return Owner::Unseen };
        if place().ok().as_ref() != Some(&self.place) {
            return Owner::Unseen;
        }
        (identity.pid, identity.pid_start_ticks) = (self.pid, self.start_ticks);
        match heartbeat::process::check_live(&identity, self.pid, Path::new(PROC_ROOT)) {
            Ok(()) => Owner::Alive,
            Err(Unknown::Stale(Stale::NoProcess { .. } | Stale::OtherProcess { .. } | Stale::Zombie { .. })) => {
                Owner::Gone
            }
            Err(_) => Owner::Unseen,
        }
    }
}

/// A new file beside `path`, that nobody else writes. Containers that share a volume have the same process numbers, so a number alone is
/// no name; chance makes it one, and the file must not be there yet.
///
/// # Errors
/// What the system says.
pub fn temporary(path: &Path, kind: &str) -> io::Result<(PathBuf, File)> {
    let chance = RandomState::new().hash_one(std::process::id());
    let path = path.with_extension(format!("{kind}-{}-{chance:016x}", std::process::id()));
    let file = File::create_new(&path)?;
    Ok((path, file))
}

/// Boot and set of process numbers of this process.
fn place() -> io::Result<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let numbers = fs::read_link("/proc/self/ns/pid")?;
    Ok(format!("{} {}", boot.trim(), numbers.display()))
}

/// The file of one piece of work.
#[derive(Debug, Clone)]
pub struct Lease {
    path: PathBuf,
}

impl Lease {
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Who has it; `None`: nobody has asked for it.
    pub fn read(&self) -> Option<LeaseDoc> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(_) => return Some(LeaseDoc::nobody()),
        };
        let mut text = String::new();
        let read = file.take(BYTES_MAX).read_to_string(&mut text);
        let doc = read.ok().and_then(|_| serde_json::from_str(&text).ok());
        Some(doc.unwrap_or_else(LeaseDoc::nobody))
    }

    /// Takes the lease if it still says what was `seen`. `None`: somebody was faster, or is at it right now.
    ///
    /// # Errors
    /// What the system says where the file cannot be written.
    pub fn take(&self, seen: Option<&LeaseDoc>) -> io::Result<Option<Held>> {
        // the lock is for the moment between look and write alone; its holder may be stopped in it, and is then not waited for
        let lock = File::options().create(true).append(true).open(self.path.with_extension("lock"))?;
        match lock.try_lock() {
            Ok(()) => (),
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        if self.read().as_ref() != seen {
            return Ok(None);
        }
        let generation = seen.map_or(0, |doc| doc.generation).saturating_add(1);
        let doc = LeaseDoc { generation, ..LeaseDoc::of_this_process()? };
        self.write(&doc)?;
        Ok(Some(Held { lease: self.clone(), doc, written: Instant::now() }))
    }

    fn write(&self, doc: &LeaseDoc) -> io::Result<()> {
        let (temporary, mut file) = temporary(&self.path, "lease")?;
        let written = serde_json::to_vec(doc).map_err(io::Error::from).and_then(|bytes| file.write_all(&bytes));
        written.and_then(|()| fs::rename(&temporary, &self.path)).inspect_err(|_| drop(fs::remove_file(&temporary)))
    }
}

/// Repeated looks at a lease of another. They read only what has changed: whoever watches this process would take many small reads for
/// weights on their way.
#[derive(Debug)]
pub struct Glance<'a> {
    lease: &'a Lease,
    stamp: Option<(u64, SystemTime)>,
    doc: Option<LeaseDoc>,
    owner: (Owner, Instant),
}

impl<'a> Glance<'a> {
    pub fn at(lease: &'a Lease) -> Self {
        Self { lease, stamp: None, doc: None, owner: (Owner::Unseen, Instant::now()) }
    }

    /// Who has it, and what is known of him; `None`: nobody has asked for it.
    pub fn look(&mut self) -> Option<(&LeaseDoc, Owner)> {
        // each word is a file of its own, put in place of the last one
        let stamp = fs::metadata(&self.lease.path).and_then(|about| Ok((about.ino(), about.modified()?))).ok();
        let changed = stamp.is_none() || stamp != self.stamp;
        if changed {
            (self.stamp, self.doc) = (stamp, self.lease.read());
        }
        let doc = self.doc.as_ref()?;
        if changed || self.owner.1.elapsed() >= OWNER_EVERY {
            self.owner = (doc.owner(), Instant::now());
        }
        Some((doc, self.owner.0))
    }
}

/// A lease of this process. Dropped, it is given back; a process that is killed leaves it behind.
#[derive(Debug)]
pub struct Held {
    lease: Lease,
    doc: LeaseDoc,
    written: Instant,
}

impl Held {
    pub fn generation(&self) -> u64 {
        self.doc.generation
    }

    /// Says how far the work is, not too often. False: the lease is another's by now.
    pub fn renew(&mut self, done: u64, total: u64) -> bool {
        if self.doc.total == total && self.written.elapsed() < RENEW_EVERY {
            return true;
        }
        (self.doc.done, self.doc.total, self.written) = (done, total, Instant::now());
        self.doc.words += 1;
        // one that cannot be written is one that others will take over
        self.is_mine() && self.lease.write(&self.doc).is_ok()
    }

    /// Says that the work cannot be done, and leaves that word behind.
    pub fn fail(mut self, reason: &str) {
        self.doc.failed = Some(reason.chars().take(400).collect());
        if self.is_mine() {
            drop(self.lease.write(&self.doc));
        }
    }

    fn is_mine(&self) -> bool {
        self.lease.read().is_some_and(|doc| doc.same_owner(&self.doc))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.doc.failed.is_none() && self.is_mine() {
            drop(fs::remove_file(&self.lease.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> (tempfile::TempDir, Lease) {
        let dir = tempfile::tempdir().unwrap();
        let lease = Lease::at(dir.path().join("work.lease"));
        (dir, lease)
    }

    #[test]
    fn one_takes_it_others_do_not_and_it_is_given_back() {
        let (_dir, lease) = lease();
        assert_eq!(lease.read(), None);
        let mut held = lease.take(None).unwrap().unwrap();
        assert!(lease.take(None).unwrap().is_none(), "it is not free any more");
        assert!(held.renew(3, 9));
        let doc = lease.read().unwrap();
        assert_eq!((doc.done, doc.total, doc.generation, doc.owner()), (3, 9, 1, Owner::Alive));
        drop(held);
        assert_eq!(lease.read(), None);
    }

    #[test]
    fn each_word_of_an_owner_is_another_however_far_he_is() {
        let (_dir, lease) = lease();
        let mut held = lease.take(None).unwrap().unwrap();
        let mut says = || {
            held.written = Instant::now().checked_sub(RENEW_EVERY).unwrap();
            assert!(held.renew(3, 9));
            lease.read().unwrap()
        };
        assert_ne!(says(), says());
    }

    #[test]
    fn a_word_that_cannot_be_put_in_its_place_leaves_nothing_behind() {
        let (dir, lease) = lease();
        fs::create_dir(&lease.path).unwrap();
        assert!(lease.write(&LeaseDoc::nobody()).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the folder that was in the way");
    }

    #[test]
    fn who_took_over_keeps_it_and_the_old_owner_finds_out() {
        let (_dir, lease) = lease();
        let mut first = lease.take(None).unwrap().unwrap();
        let seen = lease.read();
        let second = lease.take(seen.as_ref()).unwrap().unwrap();
        assert_eq!(second.generation(), 2);
        assert!(lease.take(seen.as_ref()).unwrap().is_none(), "a second taker has seen what is past");
        assert!(!first.renew(1, 2), "it is another's");
        drop(first);
        assert_eq!(lease.read().unwrap().generation, 2, "an old owner gives nothing back");
    }

    #[test]
    fn owners_that_are_gone_are_seen_and_strangers_are_not_judged() {
        let mut doc = LeaseDoc::of_this_process().unwrap();
        assert_eq!(doc.owner(), Owner::Alive);
        doc.start_ticks += 1;
        assert_eq!(doc.owner(), Owner::Gone, "its number is another's");
        doc.place.push('x');
        assert_eq!(doc.owner(), Owner::Unseen);
    }

    #[test]
    fn any_bytes_are_a_lease_of_nobody_or_of_somebody() {
        let (_dir, lease) = lease();
        for bytes in [&b""[..], b"{", b"\xff\xfe", b"[1]", &[b'7'; 10_000]] {
            fs::write(&lease.path, bytes).unwrap();
            let seen = lease.read().unwrap();
            assert_eq!(seen.owner(), Owner::Gone);
            assert!(lease.take(Some(&seen)).unwrap().is_some());
        }
    }

    #[test]
    fn the_names_of_two_containers_with_the_same_process_numbers_differ() {
        // two fresh processes count alike: what tells them apart must be chance
        let (_dir, lease) = lease();
        let chance = |(path, _): (PathBuf, File)| path.to_string_lossy().rsplit('-').next().map(str::len);
        assert_eq!(chance(temporary(&lease.path, "lease").unwrap()), Some(16));
        let names = (0..100).map(|_| temporary(&lease.path, "lease").unwrap().0);
        assert_eq!(names.collect::<std::collections::BTreeSet<_>>().len(), 100);
    }

    #[test]
    fn a_failure_stays_to_be_read() {
        let (_dir, lease) = lease();
        lease.take(None).unwrap().unwrap().fail("no space");
        assert_eq!(lease.read().unwrap().failed.as_deref(), Some("no space"));
    }
}
