//! Evidence before destruction, bounded (I6): 2 s for what a kill would lose, then the bundle, written off the decision path.
//!
//! [`capture`] cannot fail: each piece has a deadline of its own, what is missing becomes a note, and a full disk costs the file
//! alone. Prompts and secrets are redacted before anything is packed.

mod announced;
pub mod bundle;
pub mod fingerprint;
mod identity;
mod known;
pub mod proc_facts;
pub mod redact;
pub mod shelf;
mod stacks;
pub mod summary;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crds::episode::Episode;
use http::Uri;
use vitals::observation::Observation;
use vitals::verdict::Outcome;

use self::bundle::{BundleEntry, Manifest, Piece};
use self::fingerprint::Places;
pub use self::stacks::{PythonFrame, PythonThread, py_stacks_main, python_threads};
use self::summary::Facts;
use crate::sources::procs::ProcRoot;
use crate::sources::scrape::scrape_once;
use crate::sources::{EngineProcess, LogReader, RankSteps, process_tree, ras};

/// The walk over `/proc`; the pieces that need its result come after it and run side by side: 1.9 s in all.
const TREE_DEADLINE: Duration = Duration::from_millis(400);
const PIECE_DEADLINE: Duration = Duration::from_millis(1_500);
/// An engine whose names take long to look up has told its bare addresses before.
const ANSWER_DEADLINE: Duration = Duration::from_millis(1_300);
const METRICS_DEADLINE: Duration = Duration::from_millis(1_000);
/// A service that waits for a silent rank takes longer: then its last answer is what there is.
const RAS_DEADLINE: Duration = Duration::from_millis(1_000);
/// What a dead engine said last comes through a pipe and a file: it is given this time to lie there, and then this to be read.
const LAST_WORDS_COME: Duration = Duration::from_millis(150);
const LAST_WORDS_READ: Duration = Duration::from_millis(300);
/// The slow part: packing and writing.
const WRITE_DEADLINE: Duration = Duration::from_secs(12);
/// A kill waits for it so long; a disk that takes longer writes beside the recovery.
const WRITE_WAITED: Duration = Duration::from_secs(1);
/// Before it: a process that has told addresses and, on a machine without a free CPU, still looks up their names.
const NAMES_DEADLINE: Duration = Duration::from_secs(5);

/// What to save, and what the caller knows already.
#[derive(Debug, Clone)]
pub struct CaptureRequest {
    pub episode: Episode,
    pub outcome: Outcome,
    /// `None`: the engine is gone; what was gathered before is saved.
    pub engine: Option<EngineProcess>,
    pub steps: Vec<RankSteps>,
    /// The last scrape before the capture, and when (ms of `CLOCK_MONOTONIC`).
    pub metrics_before: Option<(u64, String)>,
    pub engine_url: Uri,
    /// Where its metrics page is.
    pub metrics_path: &'static str,
    /// What NCCL's RAS answered last, and where it can be asked once more.
    pub ras_before: Option<ras::Answer>,
    pub ras_address: Option<String>,
    pub log_tail: LogReader,
    pub gpu_note: String,
    /// Everything that the detector saw at its last tick: GPU readings, gate, pages, metrics.
    pub observation: Option<Observation>,
    /// Where processes announce that they tell their stacks (H10).
    pub page_dir: PathBuf,
    pub bundle_dir: PathBuf,
    /// The engine's, program first.
    pub command_line: Vec<String>,
    /// What names its program (see [`program_of`]), as it was seen while all was well; empty: not seen yet.
    pub image: String,
}

/// What was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// The file; `None` where it could not be written (a note says why).
    pub bundle: Option<PathBuf>,
    /// Human text of at most 4096 bytes.
    pub summary: String,
    /// 16 hex digits: the same for the same disease.
    pub fingerprint: String,
    pub notes: Vec<String>,
}

/// Takes the evidence. Infallible, and bounded by 20 s; the fast part by 2 s.
///
/// `gathered` hears what is known as soon as a kill loses nothing any more and the disk is seen to be slow, or never.
pub async fn capture(request: CaptureRequest, gathered: impl FnOnce(Captured)) -> Captured {
    let mut taken = Taken::default();
    let facts = taken.fast_part(&request).await;
    taken.await_names(&request.page_dir).await;
    let class = summary::class_of(&request.episode, &request.outcome);
    let command_line = redact::redact_command(&request.command_line);
    let places = Places { told: &taken.told, pythons: &taken.pythons, mains: &facts.mains };
    // what is seen now comes first: a container's first process is a shell for a moment
    let unseen = facts.image.is_empty() || facts.image == identity::UNKNOWN;
    let image = if unseen && !request.image.is_empty() { &request.image } else { &facts.image };
    let fingerprint = fingerprint::fingerprint(class, places, &command_line, image);
    let mut secrets = redact::secrets(&request.command_line, &[]);
    secrets.extend(facts.secrets);
    let secrets = redact::once(secrets);
    let intended = bundle::path_of(&request.bundle_dir, &request.episode.id).display().to_string();
    let text = |bundle: &str, notes: &[String]| {
        let (episode, outcome, gpu_note) = (&request.episode, &request.outcome, request.gpu_note.as_str());
        let facts = Facts { episode, outcome, places, gpu_note, fingerprint: &fingerprint, bundle, notes };
        redact::strike_out(&summary::summary(&facts), &secrets)
    };
    let mut manifest = bundle::manifest(&request.episode.id, class, &fingerprint);
    manifest.top_frames = fingerprint::top_frames(places);
    manifest.image.clone_from(image);
    let mut entries = vec![entry("summary.txt", text(&intended, &taken.notes))];
    entries.extend(known::entries(&request, &command_line, &taken.log, &taken.tree));
    entries.extend(taken.entries.iter().cloned());
    for entry in &mut entries {
        entry.text = redact::strike_out(&entry.text, &secrets);
    }
    manifest.pieces.clone_from(&taken.pieces);
    manifest.notes.clone_from(&taken.notes);
    let so_far = || {
        let notes = vec![format!("the disk is slow: the bundle is not written after {} ms", WRITE_WAITED.as_millis())];
        let summary = text(&format!("{intended}, if the disk takes it: it was not written yet"), &taken.notes);
        Captured { bundle: None, summary, fingerprint: fingerprint.clone(), notes }
    };
    let mut notes = taken.notes.clone();
    let written = write_within_deadline(&request, manifest, entries, || gathered(so_far())).await;
    notes.extend(written.as_ref().err().map(|why| format!("no bundle: {why}")));
    let shown = written.as_ref().map_or_else(|_| "none could be written".to_owned(), |path| path.display().to_string());
    let summary = text(&shown, &notes);
    Captured { bundle: written.ok(), summary, fingerprint, notes }
}

/// What names the engine's program: the image that its environment tells, else name and length of its executable. May wait for the memory
/// lock of the process.
pub fn program_of(engine: &EngineProcess) -> String {
    identity::image(&ProcRoot::live(), engine.pid)
}

/// Says so where no bundle could be written: it would show at the first stall otherwise. On a thread of its own, for the disk may hang.
/// Where that is no pod's volume, a folder that it makes for that goes again.
pub fn try_to_write(bundle_dir: PathBuf, in_pod: bool) {
    let hint = if in_pod { "is the volume writable for group 1000?" } else { "choose another with --bundle-dir" };
    let tried = move || {
        let stays = in_pod || bundle_dir.exists();
        if let Err(error) = bundle::probe(&bundle_dir) {
            let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            tracing::error!(%error, why, "no evidence can be saved there: {hint}");
        } else if !stays {
            // one in which a bundle lies by now is not empty, and stays
            let _ = std::fs::remove_dir(&bundle_dir);
        }
    };
    let _ = std::thread::Builder::new().name("try-to-write".to_owned()).spawn(tried);
}

/// What the fast part has gathered so far.
#[derive(Debug, Default)]
struct Taken {
    entries: Vec<BundleEntry>,
    pieces: Vec<Piece>,
    notes: Vec<String>,
    /// Where processes stand: told by themselves, and as py-spy reads them.
    told: Vec<(i32, Vec<String>)>,
    unnamed: Vec<i32>,
    pythons: Vec<(i32, PythonThread)>,
    log: Vec<String>,
    /// The engine's processes, root first.
    tree: Vec<i32>,
}

impl Taken {
    /// What a kill would lose: `/proc`, stacks and a last scrape, side by side.
    async fn fast_part(&mut self, request: &CaptureRequest) -> proc_facts::Collected {
        let whole = Instant::now();
        let (tree, note) = tree(request.engine.clone()).await;
        self.piece("tree", whole, note);
        let (facts, told, pythons, after, ras, log) = tokio::join!(
            timed(proc_facts(tree.clone())),
            timed(announced_stacks(tree.clone(), request.page_dir.clone())),
            timed(stacks::collect(&tree, PIECE_DEADLINE)),
            timed(scrape_once(&request.engine_url, request.metrics_path, METRICS_DEADLINE)),
            timed(ras_now(request.ras_address.as_deref())),
            timed(last_words(request)),
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
        let (ras, took) = ras;
        self.piece_took("nccl ras", took, ras.as_ref().err().cloned());
        let answers = request.ras_before.iter().chain(ras.iter().flatten());
        let told: String = answers.map(|(at_ms, text)| ras_text(*at_ms, text)).collect();
        self.entries.extend((!told.is_empty()).then(|| entry("ras.txt", told)));
        let (log, took) = log;
        self.log = log;
        self.piece_took("log", took, None);
        self.tree = tree;
        self.piece("fast part", whole, None);
        facts
    }

    /// The names of what the fast part got as addresses alone: without them the fingerprint would hang on the machine's load.
    async fn await_names(&mut self, page_dir: &Path) {
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

async fn ras_now(address: Option<&str>) -> Result<Option<ras::Answer>, String> {
    let Some(address) = address else { return Ok(None) };
    ras::ask_once(address, RAS_DEADLINE).await.map_err(|error| error.to_string())
}

/// It has no words of users, unless whoever speaks there is not NCCL.
fn ras_text(asked_ms: u64, answer: &str) -> String {
    format!("# asked at {asked_ms} ms of CLOCK_MONOTONIC\n{}\n", redact::redact_text(answer.trim_end()))
}

/// The log as it is by now. An engine that is dead was noticed before its last words were read.
async fn last_words(request: &CaptureRequest) -> Vec<String> {
    let reader = request.log_tail.clone();
    if request.engine.is_some() {
        return reader.lines();
    }
    tokio::time::sleep(LAST_WORDS_COME).await;
    let read = tokio::task::spawn_blocking(move || reader.lines_until_now(LAST_WORDS_READ));
    tokio::time::timeout(PIECE_DEADLINE, read).await.ok().and_then(Result::ok).unwrap_or_default()
}

async fn timed<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    let result = work.await;
    (result, began.elapsed())
}

async fn tree(engine: Option<EngineProcess>) -> (Vec<i32>, Option<String>) {
    let Some(engine) = engine else { return (Vec::new(), Some("there is no engine process".to_owned())) };
    let root = engine.pid;
    let walk = tokio::task::spawn_blocking(move || process_tree(&engine));
    match tokio::time::timeout(TREE_DEADLINE, walk).await {
        Ok(Ok(tree)) if tree.is_empty() => (tree, Some(format!("process {root} is gone"))),
        Ok(Ok(tree)) => (tree, None),
        Ok(Err(_)) | Err(_) => {
            (vec![root], Some("the walk over /proc did not end in time; the root alone is read".to_owned()))
        }
    }
}

async fn proc_facts(tree: Vec<i32>) -> proc_facts::Collected {
    let collection = proc_facts::Collection::default();
    let into = collection.clone();
    let reading = tokio::task::spawn_blocking(move || proc_facts::collect(&ProcRoot::live(), &tree, &into));
    let ended = tokio::time::timeout(PIECE_DEADLINE, reading).await;
    let mut collected = collection.take();
    if !matches!(ended, Ok(Ok(()))) {
        collected.notes.push("reading /proc did not end in time; what was read until then is here".to_owned());
    }
    collected
}

/// Asks for stacks on a thread of its own: the page directory is the engine's.
async fn announced_stacks(tree: Vec<i32>, page_dir: PathBuf) -> announced::Announced {
    let asking = tokio::task::spawn_blocking(move || announced::collect(&tree, &page_dir, ANSWER_DEADLINE));
    match tokio::time::timeout(PIECE_DEADLINE, asking).await {
        Ok(Ok(told)) => told,
        _ => {
            let notes = vec!["the page directory did not answer in time".to_owned()];
            announced::Announced { notes, ..announced::Announced::default() }
        }
    }
}

/// Packs and writes on a thread of its own; `slow` is called where that takes longer than who waits for it has time. One that a dead disk
/// holds is left behind, and does not rename later.
async fn write_within_deadline(
    request: &CaptureRequest,
    manifest: Manifest,
    entries: Vec<BundleEntry>,
    slow: impl FnOnce(),
) -> Result<PathBuf, String> {
    let given_up = Arc::new(AtomicBool::new(false));
    let (directory, id, stop) = (request.bundle_dir.clone(), request.episode.id.clone(), Arc::clone(&given_up));
    let mut writing = tokio::task::spawn_blocking(move || bundle::write(&directory, &id, manifest, entries, &stop));
    let mut ended = tokio::time::timeout(WRITE_WAITED, &mut writing).await;
    if ended.is_err() {
        slow();
        ended = tokio::time::timeout(WRITE_DEADLINE - WRITE_WAITED, writing).await;
    }
    match ended {
        Ok(Ok(Ok(path))) => Ok(path),
        Ok(Ok(Err(error))) => Err(with_source(&error)),
        Ok(Err(_)) => Err("the writer ended abnormally".to_owned()),
        Err(_) => {
            given_up.store(true, Ordering::Relaxed);
            Err(format!("not written within {} s", WRITE_DEADLINE.as_secs()))
        }
    }
}

fn with_source(error: &bundle::BundleError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn joined(notes: &[String]) -> Option<String> {
    (!notes.is_empty()).then(|| notes.join("; "))
}

fn entry(name: &str, text: String) -> BundleEntry {
    BundleEntry { name: name.to_owned(), text }
}
