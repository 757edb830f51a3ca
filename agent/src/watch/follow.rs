//! Which process is the engine now? In `truebeat run` the supervisor says so in `engine.json`; in a pod it is found in `/proc`.
//!
//! The search and the command line wait for other processes' memory locks, so both are read aside: no tick opens them (I4).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tokio::sync::oneshot;

use crate::forensics::program_of;
use crate::launch::EngineFile;
use crate::sources::clock::TickClock;
use crate::sources::{EngineProcess, ExitWatch, Found, find_pod_engine};

/// A search over `/proc` is not repeated before this while there is no engine, …
const SEARCH_EVERY_MS: u64 = 200;
/// … and while the engine is a guess.
const DOUBT_EVERY_MS: u64 = 1_000;
/// `engine.json` is looked at this often while its engine lives: another one comes only after its end, which is heard.
const FILE_EVERY_MS: u64 = 1_000;
/// A container's first process replaces its program once or twice while it starts.
const WORDS_EVERY_MS: u64 = 10_000;

/// What an engine is, for whoever compares it with others.
#[derive(Debug, Clone, Copy, Default)]
pub struct Program<'a> {
    /// Program first.
    pub command_line: &'a [String],
    /// What names the program (see [`program_of`]); of a process that has gone, where the next was not read yet; empty: never read.
    pub image: &'a str,
}

/// Follows the engine from process to process.
#[derive(Debug)]
pub struct Follow {
    /// `Some`: `truebeat run`, with the directory of `engine.json`.
    agent_dir: Option<PathBuf>,
    page_dir: PathBuf,
    engine: Option<EngineProcess>,
    /// Is the engine known by more than its age? A guess is looked at again (I1: nobody kills on a guess that can be bettered).
    sure: bool,
    /// This pod's engine names the page directory: whoever does not is no engine, even while the engine's container restarts.
    named_before: bool,
    nonce: Option<u64>,
    /// Device, inode and time of change of the `engine.json` that was read, and when it was looked at.
    file_seen: Option<(u64, u64, i64, i64)>,
    file_ms: Option<u64>,
    /// Whom `exit` is about.
    watched: Option<EngineProcess>,
    /// Hears the engine's end; `None` where it has gone, or the kernel cannot tell: then `/proc` is asked.
    exit: Option<ExitWatch>,
    /// At the last look the engine had ended.
    ended: bool,
    search: Aside<Option<Found>>,
    words: Vec<String>,
    image: String,
    reading: Aside<(EngineProcess, Vec<String>, String)>,
}

impl Follow {
    /// `agent_dir` where `engine.json` tells; `None` in a pod. `known`: whom our forerunner followed; if it lives, it is the
    /// engine until a search says otherwise, for an engine that hangs may not be searchable.
    pub fn new(agent_dir: Option<PathBuf>, page_dir: &Path, known: Option<EngineProcess>) -> Self {
        Self {
            engine: known.filter(|engine| agent_dir.is_none() && engine.lives()),
            agent_dir,
            page_dir: page_dir.to_owned(),
            sure: false,
            named_before: false,
            nonce: None,
            file_seen: None,
            file_ms: None,
            watched: None,
            exit: None,
            ended: false,
            search: Aside::default(),
            words: Vec::new(),
            image: String::new(),
            reading: Aside::default(),
        }
    }

    /// The engine as of now. An engine that ended stays the answer until another one is there. Runs inside a runtime.
    pub fn look(&mut self, now_ms: u64) -> Option<EngineProcess> {
        let file_due =
            !self.hears_the_end() || self.file_ms.is_none_or(|at| now_ms.saturating_sub(at) >= FILE_EVERY_MS);
        match &self.agent_dir {
            Some(_) if !file_due => {}
            Some(agent_dir) => {
                self.file_ms = Some(now_ms);
                if let Some(file) = new_file(agent_dir, &mut self.file_seen) {
                    if self.engine.as_ref() != Some(&file.process()) {
                        self.reading = Aside::default();
                    }
                    self.engine = Some(file.process());
                    (self.sure, self.nonce, self.words) = (true, Some(file.nonce), file.command);
                }
            }
            None => {
                self.search(now_ms);
            }
        }
        self.read_words(now_ms);
        if self.watched != self.engine {
            self.watched.clone_from(&self.engine);
            self.exit = self.engine.as_ref().and_then(|engine| ExitWatch::of(engine).ok());
        }
        self.ended = !self.lives_now();
        self.engine.clone()
    }

    /// Did the engine live at the last look? An end that is heard after it ends the wait for the next.
    pub fn engine_lives(&self) -> bool {
        self.engine.is_some() && !self.ended
    }

    /// Does the engine live, as far as anybody has heard? Asked once a look: the runtime's answer takes locks.
    fn lives_now(&self) -> bool {
        match (&self.engine, &self.exit) {
            (Some(_), Some(exit)) if self.watched == self.engine => !exit.has_ended(),
            (Some(engine), _) => engine.lives(),
            (None, _) => false,
        }
    }

    /// Does the engine live, and will its end be heard when it comes?
    pub fn hears_the_end(&self) -> bool {
        self.watched == self.engine && self.exit.as_ref().is_some_and(|exit| !exit.has_ended())
    }

    /// Returns when the engine ends that lived at the last look.
    pub async fn ended(&self) {
        match &self.exit {
            Some(exit) if !self.ended => exit.ended().await,
            _ => std::future::pending().await,
        }
    }

    /// What the engine is, as it was when it could be read last.
    pub fn program(&self) -> Program<'_> {
        Program { command_line: &self.words, image: &self.image }
    }

    /// What the launcher gave the engine, where it told us.
    pub fn nonce(&self) -> Option<u64> {
        self.nonce
    }

    /// Is the engine a guess?
    pub fn is_guess(&self) -> bool {
        !self.sure
    }

    fn search(&mut self, now_ms: u64) {
        if let Some(found) = self.search.take().flatten() {
            let living = self.lives_now();
            if takes_over(found.named, living, self.named_before) {
                if self.engine.as_ref() != Some(&found.process) {
                    self.words.clear();
                    self.reading = Aside::default();
                }
                (self.engine, self.sure) = (Some(found.process), found.named);
                self.named_before |= found.named;
            }
        }
        let living = self.lives_now();
        if living && self.sure {
            return;
        }
        let page_dir = self.page_dir.clone();
        let every_ms = if living { DOUBT_EVERY_MS } else { SEARCH_EVERY_MS };
        self.search.start(now_ms, every_ms, move || find_pod_engine(&page_dir));
    }

    fn read_words(&mut self, now_ms: u64) {
        if let Some((engine, words, image)) = self.reading.take()
            && Some(&engine) == self.engine.as_ref()
            && !words.is_empty()
        {
            self.image = image;
            // a launcher knows what it has started
            if self.agent_dir.is_none() {
                self.words = words;
            }
        }
        if let Some(engine) = self.engine.clone().filter(|_| self.lives_now()) {
            self.reading.start(now_ms, WORDS_EVERY_MS, move || {
                // in this order: of a process that has words afterwards, the name of its program was there to be read
                let (image, words) = (program_of(&engine), words_of(&engine));
                (engine, words, image)
            });
        }
    }
}

/// `engine.json`, where it is another file than the one that was read last.
fn new_file(agent_dir: &Path, seen: &mut Option<(u64, u64, i64, i64)>) -> Option<EngineFile> {
    let meta = std::fs::metadata(EngineFile::path(agent_dir)).ok()?;
    let mark = (meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec());
    if *seen == Some(mark) {
        return None;
    }
    let file = EngineFile::read(agent_dir)?;
    *seen = Some(mark);
    Some(file)
}

/// Is what was found the engine from now on?
fn takes_over(named: bool, engine_lives: bool, named_before: bool) -> bool {
    named || !engine_lives && !named_before
}

/// One read at a time, on a thread that may be left behind: a read that never returns is the last of its kind.
#[derive(Debug)]
struct Aside<T> {
    running: Option<oneshot::Receiver<T>>,
    started_ms: Option<u64>,
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self { running: None, started_ms: None }
    }
}

impl<T: Send + 'static> Aside<T> {
    /// What has been read since the last call.
    fn take(&mut self) -> Option<T> {
        let taken = match self.running.as_mut()?.try_recv() {
            Err(oneshot::error::TryRecvError::Empty) => return None,
            taken => taken.ok(),
        };
        self.running = None;
        taken
    }

    fn start(&mut self, now_ms: u64, every_ms: u64, read: impl FnOnce() -> T + Send + 'static) {
        let due = self.started_ms.is_none_or(|at| now_ms.saturating_sub(at) >= every_ms);
        if !due || self.running.is_some() {
            return;
        }
        let (tell, told) = oneshot::channel();
        tokio::task::spawn_blocking(move || _ = tell.send(read()));
        (self.running, self.started_ms) = (Some(told), Some(now_ms));
    }
}

fn words_of(engine: &EngineProcess) -> Vec<String> {
    let words = std::fs::read(format!("/proc/{}/cmdline", engine.pid)).unwrap_or_default();
    let words = words.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// `CLOCK_MONOTONIC` of the engine's start; now where there is none.
pub fn started_ms(engine: Option<&EngineProcess>, now_ms: u64) -> u64 {
    engine.map_or(now_ms, |engine| TickClock::live().started_ms(engine.start_ticks))
}

/// Another number for another process.
pub fn process_key(engine: &EngineProcess) -> u64 {
    engine.start_ticks.rotate_left(24) ^ u64::from(engine.pid.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_read_that_hangs_holds_nobody_and_is_not_repeated() {
        let mut aside = Aside::<u32>::default();
        let (free, held) = std::sync::mpsc::channel::<()>();
        aside.start(0, 10, move || held.recv().map_or(1, |()| 2));
        assert_eq!(aside.take(), None);
        aside.start(1_000, 10, || 3);
        assert_eq!(aside.take(), None, "one at a time");
        drop(free);
        let mut taken = None;
        while taken.is_none() {
            tokio::task::yield_now().await;
            taken = aside.take();
        }
        assert_eq!(taken, Some(1));
    }

    #[test]
    fn a_sidecar_never_takes_the_place_of_an_engine_that_named_the_directory() {
        assert!(takes_over(true, true, false), "a guess is bettered while it lives");
        assert!(takes_over(false, false, false), "where nobody names it, the oldest");
        assert!(!takes_over(false, true, false), "one guess is as good as another");
        assert!(!takes_over(false, false, true), "its container restarts");
    }

    #[tokio::test]
    async fn the_launchers_word_is_looked_for_now_and_then_while_its_engine_lives_and_at_every_look_after() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = EngineProcess::of(child.id().cast_signed()).unwrap();
        let says = |nonce| {
            let (pid, start_ticks) = (process.pid, process.start_ticks);
            let file = EngineFile {
                pid,
                start_ticks,
                boot_id: String::new(),
                nonce,
                starts: 1,
                command: Vec::new(),
                last_exit: None,
            };
            crate::files::write_json(&EngineFile::path(dir.path()), &file).unwrap();
        };
        let mut follow = Follow::new(Some(dir.path().to_owned()), Path::new("/run/truebeat"), None);
        says(1);
        let mut nonce_at = |now_ms| {
            follow.look(now_ms);
            follow.nonce()
        };
        assert_eq!(nonce_at(0), Some(1));
        says(2);
        assert_eq!([nonce_at(999), nonce_at(1_000)], [Some(1), Some(2)]);
        child.kill().unwrap();
        child.wait().unwrap();
        says(3);
        tokio::time::timeout(std::time::Duration::from_secs(60), follow.ended()).await.unwrap();
        follow.look(1_100);
        says(4);
        follow.look(1_200);
        assert_eq!(follow.nonce(), Some(4), "whoever comes next comes at once");
    }

    #[tokio::test]
    async fn whom_the_forerunner_followed_is_the_engine_at_once_and_a_guess() {
        let me = EngineProcess::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut follow = Follow::new(None, Path::new("/run/truebeat"), Some(me.clone()));
        assert_eq!((follow.look(0), follow.is_guess()), (Some(me.clone()), true));
        while follow.program().command_line.is_empty() {
            tokio::task::yield_now().await;
            follow.look(1);
        }
        assert_eq!(follow.program().image, program_of(&me), "its program is known before it hangs");
        let gone = EngineProcess { start_ticks: me.start_ticks + 1, ..me };
        assert_eq!(Follow::new(None, Path::new("/run/truebeat"), Some(gone)).engine, None);
    }
}
