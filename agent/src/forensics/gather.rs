//! What a kill would lose. The fast part (I6): `/proc`, stacks and a last scrape, side by side, each within a deadline of its own, 2 s in all
//! whatever blocks. After it what takes longer and is worth the wait: NCCL's RAS where a rank is silent, and the names of stacks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio_util::task::AbortOnDropHandle;

use super::bundle::{BundleEntry, Piece};
use super::stacks::{PythonStacks, PythonThread};
use super::{CaptureRequest, announced, entry, proc_facts, redact, stacks};
use crate::sources::clock::monotonic_ms;
use crate::sources::procs::ProcRoot;
use crate::sources::scrape::scrape_once;
use crate::sources::{EngineProcess, LogReader, process_tree, ras};

/// The walk over `/proc`; the pieces that need its result come after it and run side by side: 1.9 s in all.
const TREE_DEADLINE: Duration = Duration::from_millis(400);
const PIECE_DEADLINE: Duration = Duration::from_millis(1_500);
/// Where several processes answer, each has so long: those that do are not lost with one that does not. An engine whose names take long to
/// look up has told its bare addresses before.
const ANSWER_DEADLINE: Duration = Duration::from_millis(1_300);
const METRICS_DEADLINE: Duration = Duration::from_millis(1_000);
/// What a dead engine said last comes through a pipe and a file: it is given this time to lie there, and then this to be read.
const LAST_WORDS_COME: Duration = Duration::from_millis(150);
const LAST_WORDS_READ: Duration = Duration::from_millis(300);
/// After the fast part: a process that has told addresses and, on a machine without a free CPU, still looks up their names.
const NAMES_DEADLINE: Duration = Duration::from_secs(5);
/// From the fast part's beginning on: the service names a silent rank when it has waited two seconds for it.
const RAS_DEADLINE: Duration = Duration::from_secs(3);
/// The service is asked every five seconds, and answers after two where a rank is silent.
const RAS_RECENT_MS: u64 = 10_000;

/// Who is asked in the fast part. A test puts in the place of each one that never answers.
#[derive(Clone, Copy)]
pub struct Ways {
    tree: fn(&EngineProcess) -> Vec<i32>,
    proc_facts: fn(&[i32], &proc_facts::Collection),
    announced: fn(&[i32], &Path, Duration) -> announced::Announced,
    pythons: for<'a> fn(&'a [i32], Duration) -> BoxFuture<'a, PythonStacks>,
    last_words: fn(&LogReader, Duration) -> Vec<String>,
}

impl Ways {
    /// The engine's processes themselves.
    pub const LIVE: Self = Self {
        tree: process_tree,
        proc_facts: |tree, into| proc_facts::collect(&ProcRoot::live(), tree, into),
        announced: announced::collect,
        pythons: |tree, deadline| Box::pin(stacks::collect(tree, deadline)),
        last_words: LogReader::lines_until_now,
    };
}

/// What has been gathered so far.
#[derive(Debug, Default)]
pub struct Taken {
    pub entries: Vec<BundleEntry>,
    pub pieces: Vec<Piece>,
    pub notes: Vec<String>,
    /// Where processes stand: told by themselves, and as py-spy reads them.
    pub told: Vec<(i32, Vec<String>)>,
    unnamed: Vec<i32>,
    pub pythons: Vec<(i32, PythonThread)>,
    pub log: Vec<String>,
    /// The engine's processes, root first.
    pub tree: Vec<i32>,
}

impl Taken {
    /// What a kill would lose.
    pub async fn fast_part(&mut self, ways: &Ways, request: &CaptureRequest) -> proc_facts::Collected {
        let whole = Instant::now();
        let (tree, note) = tree(ways, request.engine.clone()).await;
        self.piece("tree", whole, note);
        let (facts, told, pythons, after, log) = tokio::join!(
            timed(proc_facts(ways, tree.clone())),
            timed(announced_stacks(ways, tree.clone(), request.page_dir.clone())),
            timed(python_stacks(ways, &tree)),
            timed(scrape_once(&request.engine_url, request.metrics_path, METRICS_DEADLINE)),
            timed(last_words(ways, request)),
        );
        let (mut facts, took) = facts;
        self.entries.append(&mut facts.entries);
        self.piece_took("proc", took, joined(&facts.notes));
        let (mut told, took) = told;
        self.entries.append(&mut told.entries);
        self.told = told.places;
        self.unnamed = told.unnamed;
        self.piece_took("own stacks", took, joined(&told.notes));
        let (mut pythons, took) = pythons;
        self.entries.append(&mut pythons.entries);
        self.pythons = pythons.mains;
        self.piece_took("python stacks", took, joined(&pythons.notes));
        let (after, took) = after;
        self.piece_took("metrics after", took, after.as_ref().err().cloned());
        self.entries.extend(after.ok().map(|text| entry("metrics-after.txt", text)));
        let (log, took) = log;
        self.log = log;
        self.piece_took("log", took, None);
        self.tree = tree;
        self.piece("fast part", whole, None);
        facts
    }

    /// What NCCL's RAS says now, beside what it said last.
    pub async fn await_ras(&mut self, before: Option<&ras::Answer>, asked: AskedRas) {
        let (told, took) = asked.await.unwrap_or((Ok(None), Duration::ZERO));
        self.piece_took("nccl ras", took, told.as_ref().err().cloned());
        let answers = before.into_iter().chain(told.iter().flatten());
        let text: String = answers.map(|(at_ms, text)| ras_text(*at_ms, text)).collect();
        self.entries.extend((!text.is_empty()).then(|| entry("ras.txt", text)));
    }

    /// The names of what the fast part got as addresses alone: without them the fingerprint would hang on the machine's load.
    pub async fn await_names(&mut self, page_dir: &Path) {
        if self.unnamed.is_empty() {
            return;
        }
        let (began, pids, dir) = (Instant::now(), std::mem::take(&mut self.unnamed), page_dir.to_owned());
        let asking = tokio::task::spawn_blocking(move || announced::named(pids, &dir, NAMES_DEADLINE));
        let told = tokio::time::timeout(NAMES_DEADLINE + Duration::from_millis(500), asking).await;
        let told = told.ok().and_then(Result::ok).unwrap_or_default();
        self.entries.retain(|old| !told.entries.iter().any(|new| new.name == old.name));
        self.entries.extend(told.entries);
        self.told.extend(told.places);
        self.piece("names of own stacks", began, None);
    }

    fn piece(&mut self, name: &str, began: Instant, note: Option<String>) {
        self.piece_took(name, began.elapsed(), note);
    }

    fn piece_took(&mut self, name: &str, took: Duration, note: Option<String>) {
        self.notes.extend(note.iter().map(|note| format!("{name}: {note}")));
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.pieces.push(Piece { name: name.to_owned(), took_ms, note });
    }
}

/// A question to NCCL's RAS under way, and how long its answer took.
pub type AskedRas = AbortOnDropHandle<(Result<Option<ras::Answer>, String>, Duration)>;

/// Asks NCCL's RAS beside the fast part, which does not wait for it. Where its last answer has named a silent rank already, another would
/// say the same two seconds later: nobody is asked.
pub fn ask_ras(request: &CaptureRequest) -> AskedRas {
    let address = request.ras_address.clone().filter(|_| !has_named_a_silent_rank(request, monotonic_ms()));
    AbortOnDropHandle::new(tokio::spawn(timed(ras_now(address))))
}

fn has_named_a_silent_rank(request: &CaptureRequest, now_ms: u64) -> bool {
    let said = request.observation.as_ref().and_then(|seen| seen.ras.fresh(now_ms, RAS_RECENT_MS));
    let named = said.is_some_and(|ras| !ras.silent_ranks.is_empty() || ras.silent_elsewhere);
    named && request.ras_before.is_some()
}

async fn ras_now(address: Option<String>) -> Result<Option<ras::Answer>, String> {
    let Some(address) = address else { return Ok(None) };
    ras::ask_once(&address, RAS_DEADLINE).await.map_err(|error| error.to_string())
}

/// It has no words of users, unless whoever speaks there is not NCCL.
fn ras_text(asked_ms: u64, answer: &str) -> String {
    format!("# asked at {asked_ms} ms of CLOCK_MONOTONIC\n{}\n", redact::redact_text(answer.trim_end()))
}

/// The log as it is by now. An engine that is dead was noticed before its last words were read.
async fn last_words(ways: &Ways, request: &CaptureRequest) -> Vec<String> {
    let (reader, read) = (request.log_tail.clone(), ways.last_words);
    if request.engine.is_some() {
        return reader.lines();
    }
    tokio::time::sleep(LAST_WORDS_COME).await;
    let read = tokio::task::spawn_blocking(move || read(&reader, LAST_WORDS_READ));
    tokio::time::timeout(PIECE_DEADLINE, read).await.ok().and_then(Result::ok).unwrap_or_default()
}

async fn timed<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    let result = work.await;
    (result, began.elapsed())
}

async fn tree(ways: &Ways, engine: Option<EngineProcess>) -> (Vec<i32>, Option<String>) {
    let Some(engine) = engine else { return (Vec::new(), Some("there is no engine process".to_owned())) };
    let (root, walk) = (engine.pid, ways.tree);
    let walk = tokio::task::spawn_blocking(move || walk(&engine));
    match tokio::time::timeout(TREE_DEADLINE, walk).await {
        Ok(Ok(tree)) if tree.is_empty() => (tree, Some(format!("process {root} is gone"))),
        Ok(Ok(tree)) => (tree, None),
        Ok(Err(_)) | Err(_) => {
            (vec![root], Some("the walk over /proc did not end in time; the root alone is read".to_owned()))
        }
    }
}

async fn proc_facts(ways: &Ways, tree: Vec<i32>) -> proc_facts::Collected {
    let collection = proc_facts::Collection::default();
    let (read, into) = (ways.proc_facts, collection.clone());
    let reading = tokio::task::spawn_blocking(move || read(&tree, &into));
    let ended = tokio::time::timeout(PIECE_DEADLINE, reading).await;
    let mut collected = collection.take();
    if !matches!(ended, Ok(Ok(()))) {
        collected.notes.push("reading /proc did not end in time; what was read until then is here".to_owned());
    }
    collected
}

/// Asks for stacks on a thread of its own: the page directory is the engine's.
async fn announced_stacks(ways: &Ways, tree: Vec<i32>, page_dir: PathBuf) -> announced::Announced {
    let ask = ways.announced;
    let asking = tokio::task::spawn_blocking(move || ask(&tree, &page_dir, ANSWER_DEADLINE));
    match tokio::time::timeout(PIECE_DEADLINE, asking).await {
        Ok(Ok(told)) => told,
        _ => {
            let notes = vec!["the page directory did not answer in time".to_owned()];
            announced::Announced { notes, ..announced::Announced::default() }
        }
    }
}

async fn python_stacks(ways: &Ways, tree: &[i32]) -> PythonStacks {
    tokio::time::timeout(PIECE_DEADLINE, (ways.pythons)(tree, ANSWER_DEADLINE)).await.unwrap_or_else(|_| {
        let notes = vec!["the helpers did not end in time".to_owned()];
        PythonStacks { notes, ..PythonStacks::default() }
    })
}

fn joined(notes: &[String]) -> Option<String> {
    (!notes.is_empty()).then(|| notes.join("; "))
}

#[cfg(test)]
#[path = "gather_tests.rs"]
mod tests;
