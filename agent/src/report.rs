//! The declaration: three conditions on the agent's own pod, by server-side apply (DESIGN §4.4), and the operator's grant that comes
//! back in the response (I1). The one file of the agent that talks to Kubernetes.
//!
//! A task of its own: it takes the newest wish and hands out the newest grant; the tick never waits for it, an API that is away is
//! only asked again. It needs one right: `pods/status: patch`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crds::episode::{
    AGENT_FIELD_MANAGER, ANNOTATION_LAST_SERVING, ANNOTATION_RESTART_GRANT, ANNOTATION_RESTART_QUEUED,
    CONDITION_EPISODE, CONDITION_HEALTH_LIE, CONDITION_PROGRESSING, Episode, REPEATED_EVERY, VOUCHED_EVERY,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::sources::clock::monotonic_ms;
use crate::watch::kept::KeptFile;
use crate::watch::latest::Written;
use crate::watch::leave::Said;

/// Every call has its own deadline; the client's own retries are off (RELIABILITY.md §7).
const CALL_MAX: Duration = Duration::from_secs(2);
/// While a grant is awaited the apply is repeated: its response carries the pod's annotations.
const GRANT_EVERY: Duration = Duration::from_secs(1);
/// An operator says every 20 s whom it lets wait; a note that has stood for longer is an operator's that has gone.
const QUEUED_MS_MAX: u64 = 60_000;
const RETRY_FIRST: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// The API refuses longer condition messages (32768); this stays well below, in whole characters.
const MESSAGE_CHARS_MAX: usize = 8_000;

/// Which pod this is.
#[derive(Debug, Clone)]
pub struct PodIdentity {
    pub name: String,
    pub namespace: String,
    /// Sent along, so that a namesake pod is never written to.
    pub uid: Option<String>,
}

/// What the pod should say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Declaration {
    /// `True`, `False` or `Unknown`.
    pub progressing: String,
    /// Verdict or stall class.
    pub reason: String,
    pub message: String,
    /// Stalled, while the engine's own `/health` answers 200.
    pub health_lies: bool,
    /// The newest episode, open or just closed.
    pub episode: Option<Episode>,
    /// Nobody is fenced here (mode `Observe`): the word ages.
    pub unfenced: bool,
    /// Processes that its engine left are waited for in vain, and the message says so.
    pub left: bool,
    /// The order to drain of which the answer tells whether the pod leaves; a new one is a new question.
    pub drain: Option<u64>,
}

impl Declaration {
    fn awaits_grant(&self) -> bool {
        self.episode.as_ref().is_some_and(Episode::awaits_grant)
    }
}

/// What the API said last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Heard {
    /// The id of the episode whose restart is granted.
    pub grant: Option<String>,
    /// The episode that an operator held in its queue when it spoke last, and `CLOCK_MONOTONIC` of that answer.
    pub queued: Option<(String, u64)>,
    /// This is the last replica of its deployment that serves, and the policy is to let it serve (I3).
    pub last_serving: bool,
    /// `CLOCK_MONOTONIC` of the last answer; `None` before the first.
    pub answered_ms: Option<u64>,
    /// Whether the pod is being deleted, by the answer to the last question.
    pub said: Option<Said>,
    pub failures: u64,
}

/// Why a declaration did not arrive. None of these stops anything.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("could not read the pod's service account: {0}")]
    Config(#[from] kube::config::InClusterError),
    #[error("could not make a Kubernetes client: {0}")]
    Client(#[source] kube::Error),
    #[error("the API did not take the conditions of pod {pod}: {source}")]
    Apply { pod: String, source: kube::Error },
    #[error("the API did not answer within {} s", CALL_MAX.as_secs())]
    Late,
}

/// The detector's end of the reporter.
#[derive(Debug)]
pub struct Reporter {
    wish: watch::Sender<Option<Declaration>>,
    heard: watch::Receiver<Heard>,
    written: Written,
}

impl Reporter {
    /// Starts the task. `agent_dir` keeps the transition times over a restart of the detector; `last_serving` is what the API told the one
    /// before, until it answers this one.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(pod: PodIdentity, agent_dir: &Path, last_serving: bool) -> io::Result<Self> {
        let (wish, wishes) = watch::channel(None);
        let (says, heard) = watch::channel(Heard { last_serving, ..Heard::default() });
        let book = TransitionBook::in_dir(agent_dir)?;
        let written = book.file.written().clone();
        tokio::spawn(report(pod, book, connect, wishes, says));
        Ok(Self { wish, heard, written })
    }

    /// How far the writing of the transition times is.
    pub fn written(&self) -> &Written {
        &self.written
    }

    /// The newest wish; an equal one costs nothing.
    pub fn declare(&self, declaration: Declaration) {
        self.wish.send_if_modified(|wish| {
            let changed = wish.as_ref() != Some(&declaration);
            *wish = Some(declaration);
            changed
        });
    }

    /// What the API said last of the pod's end.
    pub fn said(&self) -> Option<Said> {
        self.heard.borrow().said
    }

    /// What the API said last.
    pub fn heard(&self) -> Heard {
        self.heard.borrow().clone()
    }
}

/// Since when each condition has had its status.
type Transitions = BTreeMap<String, Transition>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Transition {
    status: String,
    since: String,
}

/// The file of them. It is nobody's to wait for: a declaration is part of the way of a fence.
#[derive(Debug)]
struct TransitionBook {
    path: PathBuf,
    file: KeptFile,
    /// What was put there last.
    kept: Transitions,
}

impl TransitionBook {
    fn in_dir(agent_dir: &Path) -> io::Result<Self> {
        let path = agent_dir.join("conditions.json");
        Ok(Self { file: KeptFile::start("conditions", path.clone())?, path, kept: Transitions::new() })
    }

    /// What a forerunner left. From a disk that hangs it is as from none: the conditions' times begin anew.
    async fn recalled(&mut self) -> Transitions {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || crate::files::read_json::<Transitions>(&path));
        let read = tokio::time::timeout(CALL_MAX, read).await.ok().and_then(Result::ok).flatten();
        self.kept = read.unwrap_or_default();
        self.kept.clone()
    }

    fn keep(&mut self, transitions: &Transitions) {
        if self.kept == *transitions && !self.file.wants_it_again() {
            return;
        }
        self.kept.clone_from(transitions);
        if let Ok(text) = serde_json::to_vec(transitions) {
            self.file.put(text);
        }
    }
}

/// When the word of progress was given that is sent, by `CLOCK_MONOTONIC` and by the wall.
#[derive(Debug, Default)]
struct Vouched(Option<(u64, String)>);

impl Vouched {
    /// Puts its time beside the word, if it `ages`. An equal apply writes nothing, so a time stands for a while.
    fn put(&mut self, conditions: &mut Value, ages: bool, now: (u64, String)) {
        let old = |at: u64| u128::from(now.0.saturating_sub(at)) >= VOUCHED_EVERY.as_millis();
        self.0.take_if(|(at, _)| !ages || old(*at));
        if ages {
            let (_, at) = self.0.get_or_insert(now);
            conditions[0]["lastProbeTime"] = at.as_str().into();
        }
    }
}

async fn report(
    pod: PodIdentity,
    mut book: TransitionBook,
    connect: impl Fn(&PodIdentity) -> Result<Api<Pod>, ReportError>,
    mut wishes: watch::Receiver<Option<Declaration>>,
    says: watch::Sender<Heard>,
) {
    let mut transitions = book.recalled().await;
    let (mut api, mut retry) = (None, RETRY_FIRST);
    let (mut vouched, mut note) = (Vouched::default(), QueueNote::default());
    while wishes.wait_for(Option::is_some).await.is_ok() {
        let Some(wish) = wishes.borrow_and_update().clone() else { continue };
        let (asked_ms, now) = (monotonic_ms(), crate::files::wall_clock());
        let mut conditions = conditions(&wish, &mut transitions, &now);
        book.keep(&transitions);
        vouched.put(&mut conditions, wish.unfenced || says.borrow().last_serving, (asked_ms, now));
        let called = match api.take().map_or_else(|| connect(&pod), Ok) {
            Ok(connected) => apply(api.insert(connected), &pod, &conditions).await,
            Err(error) => Err(error),
        };
        let pause = match called {
            Ok(Answer { grant, queued, last_serving, deleted }) => {
                retry = RETRY_FIRST;
                let now_ms = monotonic_ms();
                let queued = note.queued_now(queued, now_ms);
                says.send_modify(|heard| {
                    // The last word stays with its time: from then on the agent is alone again.
                    let queued = queued.map(|id| (id, now_ms)).or(heard.queued.take());
                    let said = Some(Said { asked_ms, deleted });
                    let failures = heard.failures;
                    *heard = Heard { grant, queued, last_serving, answered_ms: Some(now_ms), said, failures };
                });
                if wish.awaits_grant() { GRANT_EVERY } else { REPEATED_EVERY }
            }
            Err(error) => {
                tracing::warn!(error = %error_chain(&error), "the pod's conditions are not up to date");
                says.send_modify(|heard| heard.failures += 1);
                // A client made from a token or an address of yesterday is no use.
                api = None;
                let pause = retry;
                retry = (retry * 2).min(RETRY_MAX);
                pause
            }
        };
        // A failed call waits its pause even if the wish changes: an API in trouble is not hammered.
        match retry == RETRY_FIRST {
            true => _ = tokio::time::timeout(pause, wishes.changed()).await,
            false => tokio::time::sleep(pause).await,
        }
    }
}

/// What the pod carries of the operator's.
#[derive(Debug, Default, PartialEq, Eq)]
struct Answer {
    grant: Option<String>,
    queued: Option<String>,
    last_serving: bool,
    deleted: bool,
}

/// The operator's note of whom it lets wait, and `CLOCK_MONOTONIC` of when it was first seen so. Its clock and ours may differ by minutes: that
/// it lives is known by the change of what it writes, and not by the time that it writes.
#[derive(Debug, Default)]
struct QueueNote(Option<(String, u64)>);

impl QueueNote {
    /// The episode that an annotation `<id>@<time>` holds in the queue, unless the operator that wrote it has gone silent since.
    fn queued_now(&mut self, text: Option<String>, now_ms: u64) -> Option<String> {
        if self.0.as_ref().map(|(text, _)| text) != text.as_ref() {
            self.0 = text.map(|text| (text, now_ms));
        }
        let (text, seen_ms) = self.0.as_ref()?;
        let (id, _) = text.rsplit_once('@')?;
        (now_ms.saturating_sub(*seen_ms) < QUEUED_MS_MAX).then(|| id.to_owned())
    }
}

/// One apply.
async fn apply(api: &Api<Pod>, pod: &PodIdentity, conditions: &Value) -> Result<Answer, ReportError> {
    let params = PatchParams::apply(AGENT_FIELD_MANAGER).force();
    let body = Patch::Apply(body(pod, conditions));
    let call = tokio::time::timeout(CALL_MAX, api.patch_status(&pod.name, &params, &body)).await;
    let answer = call.map_err(|_| ReportError::Late)?;
    let answer =
        answer.map_err(|source| ReportError::Apply { pod: format!("{}/{}", pod.namespace, pod.name), source })?;
    let deleted = answer.metadata.deletion_timestamp.is_some();
    let mut notes = answer.metadata.annotations.unwrap_or_default();
    let last_serving = notes.contains_key(ANNOTATION_LAST_SERVING);
    let (grant, queued) = (notes.remove(ANNOTATION_RESTART_GRANT), notes.remove(ANNOTATION_RESTART_QUEUED));
    Ok(Answer { grant, queued, last_serving, deleted })
}

fn connect(pod: &PodIdentity) -> Result<Api<Pod>, ReportError> {
    // A second installation of the same provider is refused, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = Config::incluster()?;
    config.default_retry = false;
    config.connect_timeout = Some(CALL_MAX);
    config.read_timeout = Some(CALL_MAX);
    config.write_timeout = Some(CALL_MAX);
    config.reset_reader_on_write = true;
    let client = Client::try_from(config).map_err(ReportError::Client)?;
    Ok(Api::namespaced(client, &pod.namespace))
}

fn body(pod: &PodIdentity, conditions: &Value) -> Value {
    let mut metadata = json!({ "name": pod.name, "namespace": pod.namespace });
    if let Some(uid) = &pod.uid {
        metadata["uid"] = uid.as_str().into();
    }
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": { "conditions": conditions } })
}

/// The three conditions. A transition time changes with the status alone.
fn conditions(wish: &Declaration, transitions: &mut Transitions, now: &str) -> Value {
    let episode = wish.episode.clone().unwrap_or_default();
    let open = wish.episode.is_some() && !episode.closed();
    let stage = if wish.episode.is_some() { episode.stage.as_str() } else { "None" };
    let text = wish.episode.as_ref().and_then(|episode| serde_json::to_string(episode).ok()).unwrap_or_default();
    let all = [
        (CONDITION_PROGRESSING, wish.progressing.as_str(), wish.reason.as_str(), shorten(&wish.message)),
        // The episode is JSON: it is whole or it is nothing.
        (CONDITION_EPISODE, if open { "True" } else { "False" }, stage, text),
        lie(wish.health_lies),
    ];
    let list = all.into_iter().map(|(kind, status, reason, message)| {
        let fresh = || Transition { status: status.to_owned(), since: now.to_owned() };
        let known = transitions.entry(kind.to_owned()).or_insert_with(fresh);
        if known.status != status {
            *known = fresh();
        }
        json!({ "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": known.since })
    });
    list.collect()
}

/// The condition that tells whoever routes by `/health` alone.
fn lie(lies: bool) -> (&'static str, &'static str, &'static str, String) {
    match lies {
        true => {
            (CONDITION_HEALTH_LIE, "True", "Answers200", "/health answers 200 while the engine is stalled".to_owned())
        }
        false => (CONDITION_HEALTH_LIE, "False", "NoLieSeen", String::new()),
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(MESSAGE_CHARS_MAX).collect()
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text += &format!(": {inner}");
        cause = inner.source();
    }
    text
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
