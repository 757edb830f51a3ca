//! Evidence before destruction, bounded (I6): 2 s for what a kill would lose, then the bundle, written off the decision path.
//!
//! [`capture`] cannot fail: each piece has a deadline of its own, what is missing becomes a note, and a full disk costs the file
//! alone. Prompts and secrets are redacted before anything is packed.

mod announced;
pub mod bundle;
pub mod fingerprint;
mod gather;
mod identity;
mod known;
pub mod proc_facts;
pub mod redact;
pub mod shelf;
mod stacks;
pub mod summary;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crds::episode::Episode;
use http::Uri;
use vitals::observation::Observation;
use vitals::verdict::Outcome;

use self::bundle::{BundleEntry, Manifest};
use self::fingerprint::Places;
use self::gather::{Taken, Ways};
pub use self::stacks::{PythonFrame, PythonThread, py_stacks_main, python_threads};
use self::summary::Facts;
use crate::sources::procs::ProcRoot;
use crate::sources::{EngineProcess, LogReader, RankSteps, ras};

/// The slow part: packing and writing.
const WRITE_DEADLINE: Duration = Duration::from_secs(12);
/// A kill waits for it so long; a disk that takes longer writes beside the recovery.
const WRITE_WAITED: Duration = Duration::from_secs(1);
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
    let asked = gather::ask_ras(&request);
    let facts = taken.fast_part(&Ways::LIVE, &request).await;
    taken.await_ras(request.ras_before.as_ref(), asked).await;
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

fn entry(name: &str, text: String) -> BundleEntry {
    BundleEntry { name: name.to_owned(), text }
}
