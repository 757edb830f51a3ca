//! The heartbeat pages as observations: nanoseconds to milliseconds, and silence where a page cannot be believed (H2, H8).
//!
//! Reads `rank-<n>.beat` in the page directory and `/proc`, through `heartbeat` alone.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use heartbeat::page::{Identity, Page, Phase};
use heartbeat::process::{PROC_ROOT, check_live, check_owner, check_still_live};
use heartbeat::{Reader, Unknown};
use vitals::observation::{Ms, PageObs};

use super::beat::{ms, observed, phase};
use super::pace::Pace;
use super::steps::RankSteps;

/// Ranks that are read, whatever the configuration says.
const RANKS_MAX: u32 = 1_024;
/// How often the directory is looked at, and the writer of a page that nothing hangs on is checked (H2), at a glance; and how often ranks
/// without a page are looked for in a directory that says nothing of them, at any closer look.
const RARELY_MS: Ms = 1_000;
/// A directory that changed less than this before it was looked at may have changed once more since, and tell the same time: its clock is
/// the kernel's tick.
const SETTLED_MS: u128 = 50;
/// An engine must have stood so much longer than the one that is watched for its process to be looked at instead: a thread's time in line
/// for a core is known from two looks on end.
const STANDS_MS_MIN: Ms = 100;

/// The pages of one engine.
#[derive(Debug)]
pub struct PageSource {
    dir: PathBuf,
    ranks: Vec<Rank>,
    /// The data-parallel engine whose process is looked at.
    watched: u32,
    dir_seen: Option<DirSeen>,
    /// When ranks without a page were looked for last.
    sought_ms: Ms,
}

/// The last look at the directory.
#[derive(Debug, Clone, Copy)]
struct DirSeen {
    at_ms: Ms,
    /// When something in it had come or gone.
    changed: Option<SystemTime>,
    /// That was long enough ago for the next change to tell another time.
    settled: bool,
}

#[derive(Debug)]
struct Rank {
    rank: u32,
    reader: Reader,
    /// Why the last read said nothing: told once, not ten times a second.
    unknown: Option<&'static str>,
    /// There was no such file.
    missing: bool,
    believed: Option<Believed>,
    /// The boot of a page that was believed once: it is still the same.
    boot_id: Option<[u8; 16]>,
    /// The process that wrote the page that was read last.
    pid: Option<i32>,
    /// Its steps and the step under way, and when these last moved.
    moved: (u64, u64, Ms),
}

/// The last page that was believed.
#[derive(Debug)]
struct Believed {
    identity: Identity,
    /// Whose the file is.
    owner: Option<u32>,
    published_ns: u64,
    tokens_delivered: u64,
    /// When its writer was last found to live.
    checked_ms: Ms,
}

impl PageSource {
    /// Touches nothing yet. Without a nonce every live process's page is taken.
    pub fn new(dir: &Path, ranks: u32, nonce: Option<u64>) -> Self {
        let reader = |rank| match nonce {
            Some(nonce) => Reader::open(dir, rank).with_nonce(nonce),
            None => Reader::open(dir, rank),
        };
        let ranks = (0..ranks.min(RANKS_MAX)).map(|rank| Rank {
            rank,
            reader: reader(rank),
            unknown: None,
            missing: false,
            believed: None,
            boot_id: None,
            pid: None,
            moved: (0, 0, 0),
        });
        Self { dir: dir.to_owned(), ranks: ranks.collect(), watched: 0, dir_seen: None, sought_ms: 0 }
    }

    /// Reads the ranks into `pages`, those that can be believed, by rank: a stale, torn or absent page is no entry. Returns the process
    /// to look at: of the rank that is furthest behind in the data-parallel engine that has stood for longest with work.
    pub fn look(&mut self, now_ms: Ms, pace: Pace, pages: &mut Vec<PageObs>) -> Option<i32> {
        pages.clear();
        let closely = pace > Pace::Glance;
        // there may be many more ranks than pages: one look at the directory is for all that have none
        let seek = self.directory_changed(now_ms, closely);
        for rank in &mut self.ranks {
            if rank.missing && !seek {
                continue;
            }
            let Some(page) = rank.read(now_ms, closely || seek) else { continue };
            rank.note(now_ms, &page);
            pages.push(observed(&page));
        }
        let stood_ms = |page: &PageObs| self.rank(page).map_or(0, |rank| now_ms.saturating_sub(rank.moved.2));
        self.watched = engine_to_watch(pages, stood_ms, self.watched);
        let watched = pages.iter().filter(|page| page.engine() == self.watched);
        let known = watched.filter_map(|page| Some((page.steps_completed, self.rank(page)?.pid?)));
        known.min_by_key(|(steps, _)| *steps).map(|(_, pid)| pid)
    }

    fn rank(&self, page: &PageObs) -> Option<&Rank> {
        self.ranks.get(usize::try_from(page.rank).ok()?)
    }

    /// Do the pages say what they said in `seen`, which owed nothing? A short look between two ticks: it reads the ranks that have pages,
    /// from the files that were found, and judges nothing. Any doubt is a no.
    pub fn rest_still(&mut self, seen: &[PageObs]) -> bool {
        let mut present = self.ranks.iter_mut().filter(|rank| !rank.missing);
        let mut known = seen.iter();
        present.all(|rank| known.next().is_some_and(|seen| rank.rests_as(seen))) && known.next().is_none()
    }

    /// Does every rank deliver: have tokens come since it was last looked at, and is no step older than `step_ms_max`? A short look, as
    /// [`Self::rest_still`].
    pub fn deliver_still(&mut self, now_ms: Ms, step_ms_max: Ms) -> bool {
        let mut present = self.ranks.iter_mut().filter(|rank| !rank.missing).peekable();
        present.peek().is_some() && present.all(|rank| rank.delivers(now_ms, step_ms_max))
    }

    /// May a file have come or gone since the last look at the directory? Looks now and then, `closely` each time.
    fn directory_changed(&mut self, now_ms: Ms, closely: bool) -> bool {
        let rarely = |at_ms: Ms| now_ms.saturating_sub(at_ms) >= RARELY_MS;
        let before = self.dir_seen;
        if !closely && before.is_some_and(|before| !rarely(before.at_ms)) {
            return false;
        }
        let changed = std::fs::metadata(&self.dir).and_then(|meta| meta.modified()).ok();
        // (no directory, and a clock that was set back, are settled and not, and both are right)
        let settled = changed.is_none_or(|at| at.elapsed().is_ok_and(|age| age.as_millis() >= SETTLED_MS));
        self.dir_seen = Some(DirSeen { at_ms: now_ms, changed, settled });
        let same = before.is_some_and(|before| before.settled && before.changed == changed);
        let seek = !same || (closely && rarely(self.sought_ms));
        if seek {
            self.sought_ms = now_ms;
        }
        seek
    }

    /// The flight recorders of all ranks that have a page.
    pub fn steps(&mut self) -> Vec<RankSteps> {
        self.ranks.iter_mut().filter_map(|rank| RankSteps::read(rank.rank, &mut rank.reader)).collect()
    }
}

impl Rank {
    /// `anew`: whatever was read before, the path is asked which file it names, and `/proc` whether its writer lives.
    fn read(&mut self, now_ms: Ms, anew: bool) -> Option<Page> {
        let read = match if anew { None } else { self.read_on(now_ms) } {
            Some(read) => read,
            None => self.reader.read_unverified().and_then(|page| self.believe(page, now_ms)),
        };
        self.missing = matches!(read, Err(Unknown::Missing { .. }));
        match read {
            Ok(page) => {
                self.unknown = None;
                Some(page)
            }
            Err(unknown) => {
                let reason = unknown.reason();
                if self.unknown.replace(reason) != Some(reason) {
                    // all others are what a start, an end or an upgrade looks like
                    match unknown {
                        Unknown::WrongOwner { .. } => {
                            tracing::warn!(rank = self.rank, reason, %unknown, "page is not believed")
                        }
                        _ => tracing::debug!(rank = self.rank, reason, %unknown, "page says nothing"),
                    }
                }
                None
            }
        }
    }

    /// Remembers whose page that was, and when it moved.
    fn note(&mut self, now_ms: Ms, page: &Page) {
        self.pid = i32::try_from(page.identity.pid).ok();
        let (steps, began_ns) = (page.beat.steps_completed, page.beat.step_started_ns);
        if (self.moved.0, self.moved.1) != (steps, began_ns) {
            self.moved = (steps, began_ns, now_ms);
        }
    }

    /// The page from the file that was read last; `None` where that cannot be believed without a look at anything else.
    fn read_on(&mut self, now_ms: Ms) -> Option<Result<Page, Unknown>> {
        self.believed.as_ref().filter(|known| known.is_fresh(now_ms))?;
        let read = self.reader.reread();
        read.as_ref().map_or(true, |page| self.is_believed(page, now_ms)).then_some(read)
    }

    /// Does it owe nothing still, and has it done nothing since?
    fn rests_as(&mut self, seen: &PageObs) -> bool {
        let Ok(Page { beat, .. }) = self.reader.reread() else { return false };
        let counts = (beat.steps_completed, beat.tokens_delivered, beat.requests_finished);
        (beat.running, beat.waiting, phase(beat.phase)) == (0, 0, seen.phase)
            && counts == (seen.steps_completed, seen.tokens_delivered, seen.requests_finished)
    }

    /// Has it handed out tokens since the last look, and is its step young still?
    fn delivers(&mut self, now_ms: Ms, step_ms_max: Ms) -> bool {
        let Some(tokens) = self.believed.as_ref().map(|known| known.tokens_delivered) else { return false };
        let Ok(page) = self.reader.reread() else { return false };
        let beat = &page.beat;
        let begun_ns = if beat.step_started_ns == 0 { beat.published_ns } else { beat.step_started_ns };
        matches!(beat.phase, Phase::Prefill | Phase::Decode)
            && beat.tokens_delivered > tokens
            && now_ms.saturating_sub(ms(begun_ns)) <= step_ms_max
            && self.is_believed(&page, now_ms)
    }

    /// A page that moved was written by somebody who lived, and one that owes nothing can wait: neither is checked at each look.
    fn is_believed(&mut self, page: &Page, now_ms: Ms) -> bool {
        let idle = page.beat.running == 0 && page.beat.waiting == 0;
        let owner = self.reader.owner();
        let trusted = self.believed.as_mut().filter(|known| {
            known.identity == page.identity
                && known.owner == owner
                && known.is_fresh(now_ms)
                && (idle || page.beat.published_ns > known.published_ns)
        });
        let Some(known) = trusted else { return false };
        (known.published_ns, known.tokens_delivered) = (page.beat.published_ns, page.beat.tokens_delivered);
        true
    }

    /// Is the writer the live process that the page names (H2), and the file its user's (G9)? Asked now and then, and of a page that stands
    /// still with work in it every time; whose the file is, once of each file.
    fn believe(&mut self, page: Page, now_ms: Ms) -> Result<Page, Unknown> {
        if self.is_believed(&page, now_ms) {
            return Ok(page);
        }
        let (before, owner) = (self.believed.take(), self.reader.owner());
        let check = if self.boot_id == Some(page.identity.boot_id) { check_still_live } else { check_live };
        check(&page.identity, page.identity.pid, Path::new(PROC_ROOT))?;
        self.boot_id = Some(page.identity.boot_id);
        let same = |known: Believed| known.identity == page.identity && known.owner == owner;
        if let Some(uid) = owner.filter(|_| !before.is_some_and(same)) {
            check_owner(uid, page.identity.pid, Path::new(PROC_ROOT))?;
        }
        self.believed = Some(Believed {
            identity: page.identity.clone(),
            owner,
            published_ns: page.beat.published_ns,
            tokens_delivered: page.beat.tokens_delivered,
            checked_ms: now_ms,
        });
        Ok(page)
    }
}

impl Believed {
    fn is_fresh(&self, now_ms: Ms) -> bool {
        now_ms.saturating_sub(self.checked_ms) < RARELY_MS
    }
}

/// Of several data-parallel engines (`pages` are by rank, so each one's follow one another) the one to look at: whichever has stood for
/// longest with work. How many steps each has taken in all says nothing, for each has its own load. Where none has stood much longer
/// than the one that was looked at before, that one.
fn engine_to_watch(pages: &[PageObs], stood_ms: impl Fn(&PageObs) -> Ms, watched: u32) -> u32 {
    let stood = |group: &[PageObs]| {
        let works = group.iter().any(|page| page.owed() > 0 || page.step_started_ms.is_some());
        let ms = group.iter().map(&stood_ms).min().filter(|_| works);
        group.first().map(|page| (page.engine(), ms))
    };
    let engines = || pages.chunk_by(|one, next| one.engine() == next.engine()).filter_map(stood);
    let before = engines().find(|(engine, _)| *engine == watched);
    // of those that have stood for equally long the first
    let longest = engines().rev().max_by_key(|(_, ms)| *ms);
    match (before, longest) {
        (Some((_, Some(before_ms))), Some((_, Some(ms)))) if ms < before_ms.saturating_add(STANDS_MS_MIN) => watched,
        (Some(_), Some((_, None))) => watched,
        (_, Some((engine, _))) => engine,
        (_, None) => watched,
    }
}

#[cfg(test)]
mod tests {
    use vitals::observation::PagePhase;

    use super::*;

    fn page(rank: u32, engines: u32, steps_completed: u64, running: u32) -> PageObs {
        PageObs {
            rank,
            world_size: 4,
            engines,
            steps_completed,
            tokens_delivered: 0,
            requests_finished: 0,
            running,
            waiting: 0,
            prompt_tokens_owed: 0,
            phase: PagePhase::Decode,
            phase_tokens: 0,
            phase_entered_ms: 0,
            lease_ms: 0,
            step_started_ms: None,
            work_done: 0,
            work_total: 0,
            published_ms: 0,
        }
    }

    #[test]
    fn the_engine_that_stands_with_work_is_looked_at_however_many_steps_it_has_taken() {
        // the first engine has taken few steps and moves, the last is idle, and has been for long
        let pages = [page(0, 4, 10, 1), page(1, 4, 900, 1), page(2, 4, 500, 1), page(3, 4, 5, 0)];
        let stood = |ms: [Ms; 4]| move |page: &PageObs| ms[page.rank as usize];
        assert_eq!(engine_to_watch(&pages, stood([20, 400, 10, 90_000]), 0), 1);
        assert_eq!(engine_to_watch(&pages, stood([20, 90, 10, 90_000]), 0), 0, "no longer than others now and then");
        assert_eq!(engine_to_watch(&pages, stood([20, 90, 10, 90_000]), 2), 2);
        assert_eq!(engine_to_watch(&pages, stood([20, 90, 10, 90_000]), 3), 1, "idle, and so not worth a look");
        let idle = [page(0, 2, 10, 0), page(2, 2, 10, 0)];
        assert_eq!(engine_to_watch(&idle, stood([20, 0, 400, 0]), 1), 1);
        assert_eq!(engine_to_watch(&idle, stood([20, 0, 400, 0]), 7), 0, "its pages are gone");
    }

    #[test]
    fn ranks_without_a_page_are_sought_where_the_directory_has_changed_and_now_and_then() {
        let dir = tempfile::tempdir().unwrap();
        let hour = std::time::Duration::from_secs(3_600);
        let set = |changed| std::fs::File::open(dir.path()).unwrap().set_modified(changed).unwrap();
        let (long_ago, later) = (SystemTime::now() - 2 * hour, SystemTime::now() - hour);
        let mut source = PageSource::new(dir.path(), 64, None);
        let mut sought = |now_ms, pace| {
            source.look(now_ms, pace, &mut Vec::new());
            source.sought_ms == now_ms
        };
        set(long_ago);
        assert!(sought(100, Pace::Stare), "the first look");
        assert!(!sought(200, Pace::Stare) && !sought(300, Pace::Look), "nothing came and nothing went");
        set(later);
        assert!(sought(400, Pace::Stare));
        assert!(!sought(500, Pace::Stare) && !sought(1_399, Pace::Stare));
        assert!(sought(1_400, Pace::Stare), "a directory need not tell");
        assert!(!sought(9_000, Pace::Glance), "at a glance it must");
        set(SystemTime::now() + hour);
        assert!(sought(10_000, Pace::Glance));
        assert!(sought(10_001, Pace::Stare), "it has changed just now, and may have again");
    }

    #[test]
    fn ranks_of_one_engine_stand_only_together() {
        // the second engine's first rank waits for its second, which moves
        let pages = [page(0, 2, 10, 1), page(1, 2, 10, 1), page(2, 2, 10, 1), page(3, 2, 10, 1)];
        let stood = |page: &PageObs| [300, 300, 900, 0][page.rank as usize];
        assert_eq!(engine_to_watch(&pages, stood, 1), 0);
        assert_eq!(engine_to_watch(&[], |_| 0, 3), 3);
    }
}
