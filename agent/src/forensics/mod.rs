//! Evidence before destruction, bounded (I6): 2 s for what a kill would lose, then the bundle, written off the decision path.
//!
//! [`capture`] cannot fail: each piece has a deadline of its own, what is missing becomes a note, and a full disk costs the file
//! alone. Prompts and secrets are redacted before anything is packed; the environment is never read.

pub mod bundle;
pub mod proc_facts;
pub mod redact;
mod stacks;
pub mod summary;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crds::episode::Episode;
use heartbeat::page::StepRecord;
use http::Uri;
use vitals::verdict::Outcome;

use self::bundle::{BundleEntry, Manifest, Piece};
pub use self::stacks::{PythonFrame, PythonThread, py_stacks_main, python_threads};
use crate::sources::procs::ProcRoot;
use crate::sources::scrape::scrape_once;
use crate::sources::{EngineProcess, process_tree};

/// The walk over `/proc`; the pieces that need its result come after it and run side by side: 1.9 s in all.
const TREE_DEADLINE: Duration = Duration::from_millis(400);
const PIECE_DEADLINE: Duration = Duration::from_millis(1_500);
const METRICS_DEADLINE: Duration = Duration::from_millis(1_000);
/// The slow part: packing and writing.
const WRITE_DEADLINE: Duration = Duration::from_secs(15);
/// Flight-recorder lines of one bundle: every rank has 256.
const STEPS_MAX: usize = 256 * 64;

/// What to save, and what the caller knows already.
#[derive(Debug, Clone)]
pub struct CaptureRequest {
    pub episode: Episode,
    pub outcome: Outcome,
    /// `None`: the engine is gone; what was gathered before is saved.
    pub engine: Option<EngineProcess>,
    pub steps: Vec<StepRecord>,
    /// The last scrape before the capture, and when (ms of `CLOCK_MONOTONIC`).
    pub metrics_before: Option<(u64, String)>,
    pub engine_url: Uri,
    pub log_tail: Vec<String>,
    pub gpu_note: String,
    pub bundle_dir: PathBuf,
    /// The engine's, program first.
    pub command_line: Vec<String>,
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

/// Takes the evidence. Infallible, and bounded by about 17 s; the fast part by 2 s.
pub async fn capture(request: CaptureRequest) -> Captured {
    let mut taken = Taken::default();
    let (facts, pythons) = taken.fast_part(&request).await;
    let class = summary::class_of(&request.episode, &request.outcome);
    let command_line = redact::redact_command(&request.command_line);
    let fingerprint = summary::fingerprint(class, &facts.mains, &pythons.mains, &command_line);
    let intended = bundle::path_of(&request.bundle_dir, &request.episode.id).display().to_string();
    let text = |bundle: Option<&str>, notes: &[String]| {
        summary::summary(&summary::Facts {
            episode: &request.episode,
            outcome: &request.outcome,
            mains: &facts.mains,
            pythons: &pythons.mains,
            gpu_note: &request.gpu_note,
            fingerprint: &fingerprint,
            bundle,
            notes,
        })
    };
    let mut entries = vec![entry("summary.txt", text(Some(&intended), &taken.notes))];
    entries.extend(known_entries(&request, &command_line));
    entries.append(&mut taken.entries);
    let mut manifest = bundle::manifest(&request.episode.id, class, &fingerprint);
    manifest.pieces = std::mem::take(&mut taken.pieces);
    manifest.notes = taken.notes.clone();
    let mut notes = taken.notes;
    let path = match write_within_deadline(&request, manifest, entries).await {
        Ok(path) => Some(path),
        Err(why) => {
            notes.push(format!("no bundle: {why}"));
            None
        }
    };
    let shown = path.as_ref().map(|path| path.display().to_string());
    let summary = text(shown.as_deref(), &notes);
    Captured { bundle: path, summary, fingerprint, notes }
}

/// What the fast part has gathered so far.
#[derive(Debug, Default)]
struct Taken {
    entries: Vec<BundleEntry>,
    pieces: Vec<Piece>,
    notes: Vec<String>,
}

impl Taken {
    /// What a kill would lose: `/proc`, stacks and a last scrape, side by side.
    async fn fast_part(&mut self, request: &CaptureRequest) -> (proc_facts::Collected, stacks::PythonStacks) {
        let began = Instant::now();
        let (tree, note) = tree(request.engine.clone()).await;
        self.piece("tree", began, note);
        let began = Instant::now();
        let (mut facts, mut pythons, after) = tokio::join!(
            timed(proc_facts(tree.clone())),
            timed(stacks::collect(&tree, PIECE_DEADLINE)),
            timed(scrape_once(&request.engine_url, METRICS_DEADLINE)),
        );
        self.entries.append(&mut facts.0.entries);
        self.entries.append(&mut pythons.0.entries);
        let facts_note = joined(&facts.0.notes);
        self.piece_took("proc", facts.1, facts_note);
        let pythons_note = joined(&pythons.0.notes);
        self.piece_took("python stacks", pythons.1, pythons_note);
        let scrape_note = match after.0 {
            Ok(text) => {
                self.entries.push(entry("metrics-after.txt", text));
                None
            }
            Err(why) => Some(why),
        };
        self.piece_took("metrics after", after.1, scrape_note);
        self.piece("fast part", began, None);
        (facts.0, pythons.0)
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

/// The entries made of what the caller gave: no I/O.
fn known_entries(request: &CaptureRequest, command_line: &[String]) -> Vec<BundleEntry> {
    let verdict = serde_json::json!({
        "episode": request.episode, "outcome": request.outcome, "command_line": command_line, "gpu": request.gpu_note,
    });
    let steps = &request.steps[request.steps.len().saturating_sub(STEPS_MAX)..];
    let mut entries = vec![
        entry("verdict.json", format!("{verdict:#}\n")),
        entry("steps.json", steps_json(steps)),
        entry("steps.txt", steps_text(steps)),
        entry("log-tail.txt", redact::redact_text(&request.log_tail.join("\n"))),
        entry("gpu.txt", format!("{}\n", request.gpu_note)),
    ];
    if let Some((at_ms, text)) = &request.metrics_before {
        entries.push(entry("metrics-before.txt", format!("# scraped at {at_ms} ms of CLOCK_MONOTONIC\n{text}")));
    }
    entries
}

fn steps_json(steps: &[StepRecord]) -> String {
    let steps: Vec<serde_json::Value> = steps
        .iter()
        .map(|step| {
            serde_json::json!({
                "step": step.step, "started_ns": step.started_ns, "ended_ns": step.ended_ns, "requests": step.requests,
                "prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens,
                "graph_key": step.graph_key, "outcome": format!("{:?}", step.outcome),
            })
        })
        .collect();
    format!("{:#}\n", serde_json::Value::Array(steps))
}

fn steps_text(steps: &[StepRecord]) -> String {
    if steps.is_empty() {
        return "the engine publishes no steps\n".to_owned();
    }
    let mut text = format!(
        "{:>10} {:>16} {:>10} {:>8} {:>8} {:>7} {:>16} outcome\n",
        "step", "started ms", "took us", "requests", "prefill", "decode", "graph"
    );
    for step in steps {
        text.push_str(&format!(
            "{:>10} {:>16} {:>10} {:>8} {:>8} {:>7} {:>16x} {:?}\n",
            step.step,
            step.started_ns / 1_000_000,
            step.ended_ns.saturating_sub(step.started_ns) / 1_000,
            step.requests,
            step.prefill_tokens,
            step.decode_tokens,
            step.graph_key,
            step.outcome
        ));
    }
    text
}

/// Packs and writes on a thread of its own. One that a dead disk holds is left behind, and does not rename later.
async fn write_within_deadline(
    request: &CaptureRequest,
    manifest: Manifest,
    entries: Vec<BundleEntry>,
) -> Result<PathBuf, String> {
    let given_up = Arc::new(AtomicBool::new(false));
    let (directory, id, stop) = (request.bundle_dir.clone(), request.episode.id.clone(), Arc::clone(&given_up));
    let writing = tokio::task::spawn_blocking(move || bundle::write(&directory, &id, manifest, entries, &stop));
    match tokio::time::timeout(WRITE_DEADLINE, writing).await {
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
