//! Which process is the engine now? In `truebeat run` the supervisor says so in `engine.json`; in a pod it is found in `/proc`.
//!
//! The search and the command line wait for other processes' memory locks, and `engine.json` may lie on a disk that hangs, so all are read
//! aside: no tick opens them (I4).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::aside::Aside;
use crate::forensics::program_of;
use crate::launch::EngineFile;
use crate::sources::clock::TickClock;
use crate::sources::{EngineProcess, ExitWatch, Found, container_of, find_pod_engine};

/// A search over `/proc` is not repeated before this while there is no engine, …
const SEARCH_EVERY_MS: u64 = 200;
/// … and while the engine is a guess.
const DOUBT_EVERY_MS: u64 = 1_000;
/// `engine.json` is looked at this often while its engine lives: another one comes only after its end, which is heard. Each look wakes two threads.
const FILE_EVERY_MS: u64 = 10_000;
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

/// Device, inode and time of change of the `engine.json` that was read.
type Mark = (u64, u64, i64, i64);

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
    file: Aside<Option<(Mark, EngineFile)>>,
    file_seen: Option<Mark>,
    /// Whom `exit` is about.
    watched: Option<EngineProcess>,
    /// Hears the engine's end; `None` where it has gone, or the kernel cannot tell: then `/proc` is asked.
    exit: Option<ExitWatch>,
    /// At the last look the engine had ended.
    ended: bool,
    search: Aside<Option<Found>>,
    words: Vec<String>,
    image: String,
    reading: Aside<Reading>,
    /// The engine and its container, in a pod where that can be told: what is in there once it has ended is no engine.
    container: Option<(EngineProcess, String)>,
}

/// What was read of a process.
#[derive(Debug)]
struct Reading {
    engine: EngineProcess,
    words: Vec<String>,
    image: String,
    container: Option<String>,
}

impl Follow {
    /// `agent_dir` where `engine.json` tells; `None` in a pod. `known`: whom our forerunner followed, and in which container; if it lives, it
    /// is the engine until a search says otherwise, for an engine that hangs may not be searchable.
    pub fn new(
        agent_dir: Option<PathBuf>,
        page_dir: &Path,
        known: Option<EngineProcess>,
        container: Option<String>,
    ) -> Self {
        let engine = known.clone().filter(|engine| agent_dir.is_none() && engine.lives());
        // of one of whom nobody can say now whether it lives, the container is not said to have ended
        let container = known.filter(|known| engine.is_some() || known.is_gone()).zip(container);
        Self {
            engine,
            agent_dir,
            page_dir: page_dir.to_owned(),
            sure: false,
            named_before: false,
            nonce: None,
            file: Aside::default(),
            file_seen: None,
            watched: None,
            exit: None,
            ended: false,
            search: Aside::default(),
            words: Vec::new(),
            image: String::new(),
            reading: Aside::default(),
            container,
        }
    }

    /// The first look, for which the launcher's word is waited for, so long at most: whom a forerunner fenced must be known.
    pub async fn look_first(&mut self, now_ms: u64, max: Duration) -> Option<EngineProcess> {
        if self.agent_dir.is_none() {
            return self.look(now_ms);
        }
        self.read_file(now_ms);
        let read = self.file.take_within(max).await;
        self.hear_file(read.flatten());
        self.looked(now_ms)
    }

    /// The engine as of now. An engine that ended stays the answer until another one is there. Runs inside a runtime.
    pub fn look(&mut self, now_ms: u64) -> Option<EngineProcess> {
        if self.agent_dir.is_some() {
            let read = self.file.take();
            self.hear_file(read.flatten());
            self.read_file(now_ms);
        } else {
            self.search(now_ms);
        }
        self.looked(now_ms)
    }

    /// The same engine as at the last look, whoever else is there: it is not gone yet. (In a pod; a launcher starts nobody beside it.)
    pub fn stay(&mut self, now_ms: u64) -> Option<EngineProcess> {
        self.looked(now_ms)
    }

    /// From now on this one, which has ended, but for what is left of it.
    pub fn stay_with(&mut self, now_ms: u64, engine: EngineProcess) -> Option<EngineProcess> {
        self.engine = Some(engine);
        self.looked(now_ms)
    }

    fn looked(&mut self, now_ms: u64) -> Option<EngineProcess> {
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
    pub fn lives_now(&self) -> bool {
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

    /// What names the container of this engine, where it is known.
    pub fn container_of(&self, engine: &EngineProcess) -> Option<&str> {
        self.container.as_ref().filter(|(known, _)| known == engine).map(|(_, container)| container.as_str())
    }

    /// The container whose engine has ended: nobody in there is one. Before anybody is followed it is that of a forerunner's engine.
    fn ended_container(&self) -> Option<String> {
        if self.lives_now() {
            return None;
        }
        let of = self.container.as_ref().filter(|(known, _)| self.engine.as_ref().is_none_or(|engine| engine == known));
        of.map(|(_, container)| container.clone())
    }

    fn hear_file(&mut self, read: Option<(Mark, EngineFile)>) {
        let Some((mark, file)) = read else { return };
        if self.engine.as_ref() != Some(&file.process()) {
            self.reading = Aside::default();
        }
        (self.engine, self.file_seen) = (Some(file.process()), Some(mark));
        (self.sure, self.nonce, self.words) = (true, Some(file.nonce), file.command);
    }

    fn read_file(&mut self, now_ms: u64) {
        let every_ms = if self.hears_the_end() { FILE_EVERY_MS } else { 0 };
        let due = self.file.is_due(now_ms, every_ms);
        let Some(agent_dir) = self.agent_dir.as_ref().filter(|_| due).cloned() else { return };
        let seen = self.file_seen;
        self.file.start(now_ms, every_ms, move || new_file(&agent_dir, seen));
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
        let ended = self.ended_container();
        self.search.start(now_ms, every_ms, move || find_pod_engine(&page_dir, ended.as_deref()));
    }

    fn read_words(&mut self, now_ms: u64) {
        if let Some(read) = self.reading.take().filter(|read| Some(&read.engine) == self.engine.as_ref()) {
            self.hear(read);
        }
        if let Some(engine) = self.engine.clone().filter(|_| self.lives_now()) {
            self.reading.start(now_ms, WORDS_EVERY_MS, move || {
                // in this order: of a process that has words afterwards, the name of its program was there to be read
                let (image, words) = (program_of(&engine), words_of(&engine));
                Reading { container: container_of(&engine), engine, words, image }
            });
        }
    }

    fn hear(&mut self, read: Reading) {
        let Reading { engine, words, image, container } = read;
        self.container = container.map(|container| (engine, container)).or(self.container.take());
        if words.is_empty() {
            return;
        }
        self.image = image;
        // a launcher knows what it has started
        if self.agent_dir.is_none() {
            self.words = words;
        }
    }
}

/// `engine.json`, where it is another file than the one that was read last.
fn new_file(agent_dir: &Path, seen: Option<Mark>) -> Option<(Mark, EngineFile)> {
    let meta = std::fs::metadata(EngineFile::path(agent_dir)).ok()?;
    let mark = (meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec());
    if seen == Some(mark) {
        return None;
    }
    Some((mark, EngineFile::read(agent_dir)?))
}

/// Is what was found the engine from now on?
fn takes_over(named: bool, engine_lives: bool, named_before: bool) -> bool {
    named || !engine_lives && !named_before
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
                output: Vec::new(),
                starts: 1,
                command: Vec::new(),
                last_exit: None,
            };
            crate::files::write_json(&EngineFile::path(dir.path()), &file).unwrap();
        };
        let mut follow = Follow::new(Some(dir.path().to_owned()), Path::new("/run/truebeat"), None, None);
        says(1);
        let soon = Duration::from_secs(60);
        // what a look has begun to read is there at the next
        let nonce_at = async |follow: &mut Follow, now_ms| {
            follow.look(now_ms);
            follow.look_first(now_ms, soon).await;
            follow.nonce()
        };
        assert_eq!(nonce_at(&mut follow, 0).await, Some(1));
        says(2);
        assert_eq!(nonce_at(&mut follow, FILE_EVERY_MS - 1).await, Some(1));
        assert_eq!(nonce_at(&mut follow, FILE_EVERY_MS).await, Some(2));
        child.kill().unwrap();
        child.wait().unwrap();
        tokio::time::timeout(soon, follow.ended()).await.unwrap();
        says(3);
        assert_eq!(nonce_at(&mut follow, FILE_EVERY_MS + 1).await, Some(3), "whoever comes next comes at once");
    }

    #[tokio::test]
    async fn whom_the_forerunner_followed_is_the_engine_at_once_and_a_guess() {
        let me = EngineProcess::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut follow = Follow::new(None, Path::new("/run/truebeat"), Some(me.clone()), None);
        assert_eq!((follow.look(0), follow.is_guess()), (Some(me.clone()), true));
        while follow.program().command_line.is_empty() {
            tokio::task::yield_now().await;
            follow.look(1);
        }
        assert_eq!(follow.program().image, program_of(&me), "its program is known before it hangs");
        let gone = EngineProcess { start_ticks: me.start_ticks + 1, ..me };
        assert_eq!(Follow::new(None, Path::new("/run/truebeat"), Some(gone), None).engine, None);
    }

    /// Its container is on its way out, and a shell in there is its oldest process.
    #[test]
    fn of_an_engine_that_ended_while_nobody_watched_the_container_is_known() {
        let me = EngineProcess::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let follow = |known: &EngineProcess| {
            Follow::new(None, Path::new("/run/truebeat"), Some(known.clone()), Some("0::/../a".to_owned()))
        };
        let lives = follow(&me);
        assert_eq!((lives.container_of(&me), lives.ended_container()), (Some("0::/../a"), None), "it lives");
        let gone = EngineProcess { start_ticks: me.start_ticks + 1, ..me };
        let mut follow = follow(&gone);
        assert_eq!(follow.ended_container().as_deref(), Some("0::/../a"));
        follow.engine = Some(EngineProcess { start_ticks: gone.start_ticks + 1, ..gone });
        assert_eq!(follow.ended_container(), None, "another one ended since, of which nothing is known");
    }
}
