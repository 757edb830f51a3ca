//! GPU readings and Xids through NVML, in a child process that may be killed: a driver that hangs takes the child, never the agent (I4).
//!
//! The child (`truebeat agent nvml-probe`) prints one JSON line a second; the parent takes the newest. A child that falls silent is
//! said to be within two seconds, killed a little later, and followed by another one only when it is really gone: one that the driver
//! holds (state D) must not be joined by more. No driver: the child says so once and the source stays off, unless a child before it was
//! answered. Xids outlive the child that told them: a GPU that breaks is what ends children.

mod child;
mod visible;
mod xids;

use std::borrow::Cow;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio_util::task::AbortOnDropHandle;
use vitals::observation::{GpuObs, Signal, XidObs};
use vitals::xid::CODE_MAX;

pub use self::child::{nvml_child_main, probe};
pub use self::visible::VisibleGpus;
use super::clock::monotonic_ms;
use super::renew;
use crate::own_program::{OWN_PROGRAM, is_truebeat};

/// A line of 64 GPUs has 15 KiB.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// The name of a GPU while NVML has never told one.
const UNKNOWN: &str = "unknown";
/// Xids that are remembered, by GPU and code, and for how long they are told.
const XIDS_KEPT: usize = 32;
const XID_AGE_MS_MAX: u64 = 600_000;

/// How the parent treats its child.
#[derive(Debug, Clone)]
pub struct ProbeCommand {
    pub program: String,
    pub args: Vec<String>,
    /// Added to the child's environment.
    pub envs: Vec<(String, String)>,
    /// Silence after which NVML is said not to answer.
    pub say: Duration,
    /// Silence after which the child is killed: before its first line (loading the driver takes seconds on big hosts), and later.
    pub first_line: Duration,
    pub line: Duration,
    /// Between a child's death and the next child; doubles with each child that brought no line.
    pub pause: Duration,
    pub pause_max: Duration,
}

impl Default for ProbeCommand {
    fn default() -> Self {
        Self {
            program: OWN_PROGRAM.to_owned(),
            args: vec!["agent".to_owned(), "nvml-probe".to_owned()],
            envs: Vec::new(),
            say: Duration::from_millis(1_900),
            first_line: Duration::from_secs(15),
            line: Duration::from_secs(3),
            pause: Duration::from_secs(5),
            pause_max: Duration::from_secs(300),
        }
    }
}

/// One line of the child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// There is no driver or no device: asking again is useless where there never was one.
    Absent(String),
    Gpus(Vec<GpuObs>),
    /// GPUs that have a name and no reading, such as one that is cut into parts (MIG). Told anew where others are.
    Unread(Vec<GpuObs>),
    /// Xids since the last such line.
    Xids(Vec<XidObs>),
}

/// The source; its child is killed when it is dropped.
#[derive(Debug)]
pub struct NvmlSource {
    state: Shared,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug, Clone)]
struct Shared(Arc<Mutex<NvmlState>>);

#[derive(Debug, Clone, Default)]
struct NvmlState {
    gpus: Signal<Vec<GpuObs>>,
    /// Known by name alone: whose their Xids are.
    unread: Vec<GpuObs>,
    /// The newest of each GPU and code, oldest first.
    xids: Vec<XidObs>,
    /// What is known of which GPUs are the engine's. All are kept, only its own are told.
    visible: Option<VisibleGpus>,
    note: String,
}

impl NvmlSource {
    /// Starts the child. Needs a tokio runtime.
    pub fn spawn(command: ProbeCommand) -> Self {
        let state = NvmlState { note: "NVML has not answered yet".to_owned(), ..Default::default() };
        let state = Shared(Arc::new(Mutex::new(state)));
        let task = AbortOnDropHandle::new(tokio::spawn(watch(command, state.clone())));
        Self { state, _task: task }
    }

    /// Which GPUs are the engine's, as far as that is known; `None`: all of them.
    pub fn set_visible(&self, visible: Option<VisibleGpus>) {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner).visible = visible;
    }

    /// The newest readings of the engine's GPUs. While NVML is silent they are the last known ones, marked with when the silence began; one that never
    /// spoke is a GPU of the name `unknown`.
    pub fn latest(&self) -> Signal<Vec<GpuObs>> {
        let mut gpus = Signal::default();
        self.renew(&mut gpus);
        gpus
    }

    /// The same into what was seen before; copies only what is new.
    pub fn renew(&self, seen: &mut Signal<Vec<GpuObs>>) {
        let state = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        if renew(&state.gpus, seen)
            && let (Some(visible), Some(gpus)) = (&state.visible, &mut seen.value)
        {
            visible.keep(gpus);
        }
    }

    /// The Xids of the last minutes into those that were seen before.
    pub fn renew_xids(&self, seen: &mut Vec<XidObs>) {
        let mut state = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.xids.is_empty() {
            let now_ms = monotonic_ms();
            state.xids.retain(|xid| now_ms.saturating_sub(xid.at_ms) <= XID_AGE_MS_MAX);
        }
        let mut own = Cow::Borrowed(&state.xids);
        if let Some(visible) = state.visible.as_ref().filter(|_| !state.xids.is_empty()) {
            visible.keep_xids(state.gpus.value.as_deref().unwrap_or_default(), &state.unread, own.to_mut());
        }
        if *own != *seen {
            seen.clone_from(&own);
        }
    }

    /// For people: what NVML is, or why it is not there.
    pub fn note(&self) -> String {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner).note.clone()
    }
}

impl Shared {
    fn note(&self, note: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note = note;
    }

    fn readings(&self, at_ms: u64, gpus: Vec<GpuObs>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut note = format!("NVML answers for {} GPUs", gpus.len());
        if !state.unread.is_empty() {
            note += &format!("; {} more do not tell their use", state.unread.len());
        }
        (state.gpus, state.note) = (Signal::at(at_ms, gpus), note);
    }

    fn unread(&self, gpus: Vec<GpuObs>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).unread = gpus;
    }

    /// Xids have come; what no driver can mean is none.
    fn heard(&self, xids: Vec<XidObs>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for xid in xids.into_iter().filter(|xid| (1..=CODE_MAX).contains(&xid.code)) {
            tracing::warn!(code = xid.code, gpu = xid.uuid, "the driver reports a Xid");
            state.xids.retain(|known| (known.code, &known.uuid) != (xid.code, &xid.uuid));
            state.xids.push(xid);
        }
        let over = state.xids.len().saturating_sub(XIDS_KEPT);
        state.xids.drain(..over);
    }

    /// NVML does not answer: that is a signal of its own, renewed as long as it lasts.
    fn silent(&self, since_ms: u64, why: &str) {
        let now_ms = monotonic_ms();
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.note = format!("{why}; silent for {} ms", now_ms.saturating_sub(since_ms));
        let gpus = state.gpus.value.get_or_insert_default();
        if gpus.is_empty() {
            gpus.push(unknown());
        }
        gpus.iter_mut().for_each(|gpu| _ = gpu.silent_since_ms.get_or_insert(since_ms));
        state.gpus.at_ms = now_ms;
    }

    /// There is no NVML: nothing is known, and nothing is silent.
    fn absent(&self, why: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.gpus, state.note) = (Signal::default(), format!("NVML absent: {why}"));
    }
}

fn unknown() -> GpuObs {
    GpuObs {
        uuid: UNKNOWN.to_owned(),
        index: None,
        pci: None,
        util: 0,
        memory_util: 0,
        power_watts: None,
        power_limit_watts: None,
        sm_clock_mhz: None,
        silent_since_ms: None,
    }
}

/// How one child ended.
enum Ended {
    Absent(String),
    /// In words for people.
    Silent(String),
}

const MUTE: &str = "NVML does not answer";

async fn watch(command: ProbeCommand, state: Shared) {
    // a program that only uses this library would run itself, not the child's role
    if command.program == OWN_PROGRAM && !is_truebeat() {
        return state.absent("this program has no role that asks it");
    }
    let mut pause = command.pause;
    let mut answered = false;
    loop {
        let mut spoke = false;
        let mut child = match start(&command) {
            Ok(child) => child,
            Err(error) => {
                state.note(format!("NVML is not asked: could not start {}: {error}", command.program));
                tokio::time::sleep(command.pause_max).await;
                continue;
            }
        };
        let began_ms = monotonic_ms();
        let ended = follow(&mut child, &command, &state, &mut spoke).await;
        bury(child, &state, began_ms).await;
        answered |= spoke;
        let why = match ended {
            Ended::Absent(why) if !answered => return state.absent(&why),
            // a GPU that is lost or being reset takes its driver along for a while
            Ended::Absent(why) => format!("NVML answers no more: {why}"),
            Ended::Silent(why) => why,
        };
        pause = if spoke { command.pause } else { (pause * 2).min(command.pause_max) };
        rest(pause, &state, heard_ms(&state).max(began_ms), &why).await;
    }
}

/// When NVML was last heard, as far as the state tells.
fn heard_ms(state: &Shared) -> u64 {
    let state = state.0.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = state.gpus.value.as_deref().unwrap_or_default();
    gpus.iter().find_map(|gpu| gpu.silent_since_ms).unwrap_or(state.gpus.at_ms)
}

/// Waits for the next child's turn; meanwhile the silence goes on being said.
async fn rest(pause: Duration, state: &Shared, since_ms: u64, why: &str) {
    let until = tokio::time::Instant::now() + pause;
    while tokio::time::Instant::now() < until {
        state.silent(since_ms, why);
        let step = Duration::from_secs(1).min(until - tokio::time::Instant::now());
        tokio::time::sleep(step).await;
    }
}

async fn follow(child: &mut Child, command: &ProbeCommand, state: &Shared, spoke: &mut bool) -> Ended {
    let Some(stdout) = child.stdout.take() else { return Ended::Silent("NVML's child has no output".to_owned()) };
    let mut lines = BufReader::new(stdout);
    let mut heard_ms = monotonic_ms();
    let mut patience = command.first_line;
    loop {
        let line = next_line(&mut lines);
        let mut line = std::pin::pin!(line);
        let said = loop {
            let silent = Duration::from_millis(monotonic_ms().saturating_sub(heard_ms));
            if silent >= patience {
                return Ended::Silent(format!("{MUTE}, its child was killed"));
            }
            // wakes to say that NVML is silent, then to kill
            let next =
                if silent < command.say { command.say.min(patience) } else { patience.min(silent + command.say) };
            match tokio::time::timeout(next.saturating_sub(silent), &mut line).await {
                Ok(said) => break said,
                Err(_) => state.silent(heard_ms, MUTE),
            }
        };
        (heard_ms, patience) = (monotonic_ms(), command.line);
        match said {
            Ok(Line::Absent(why)) => return Ended::Absent(why),
            Ok(Line::Gpus(gpus)) => {
                *spoke = true;
                state.readings(heard_ms, gpus);
            }
            Ok(Line::Unread(gpus)) => state.unread(gpus),
            Ok(Line::Xids(xids)) => state.heard(xids),
            Err(why) => return Ended::Silent(format!("NVML's child ended: {why}")),
        }
    }
}

/// SIGKILL, and the wait for the end, which comes only when the driver lets go. Until then there is no other child.
async fn bury(mut child: Child, state: &Shared, since_ms: u64) {
    let _ = child.start_kill();
    while tokio::time::timeout(Duration::from_secs(1), child.wait()).await.is_err() {
        state.silent(since_ms.max(heard_ms(state)), "NVML does not answer and its child cannot be killed");
    }
}

fn start(command: &ProbeCommand) -> std::io::Result<Child> {
    Command::new(&command.program)
        .args(&command.args)
        .envs(command.envs.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
}

async fn next_line(lines: &mut BufReader<ChildStdout>) -> Result<Line, String> {
    let mut line = Vec::new();
    match lines.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await {
        Ok(0) => Err("it closed its output".to_owned()),
        Ok(_) => serde_json::from_slice(&line).map_err(|error| format!("it said something else: {error}")),
        Err(error) => Err(format!("its output could not be read: {error}")),
    }
}
