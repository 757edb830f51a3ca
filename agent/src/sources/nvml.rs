//! GPU readings through NVML, in a child process that may be killed: a driver that hangs takes the child, never the agent (I4).
//!
//! The child (`truebeat agent nvml-probe`) prints one JSON line a second; the parent takes the newest, and kills and restarts a
//! child that falls silent. No driver: the child says so once and the source stays off. Only cheap calls are made.

use std::io::Write;
use std::process::{ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio_util::task::AbortOnDropHandle;
use vitals::observation::{GpuObs, Signal};

use super::clock::monotonic_ms;

const READ_EVERY: Duration = Duration::from_secs(1);

/// How the parent treats its child.
#[derive(Debug, Clone)]
pub struct ProbeCommand {
    pub program: String,
    pub args: Vec<String>,
    /// For the first line: loading the driver takes seconds on big hosts.
    pub first_line: Duration,
    /// For every later line.
    pub line: Duration,
    /// Between a child's death and the next child.
    pub pause: Duration,
}

impl Default for ProbeCommand {
    fn default() -> Self {
        Self {
            program: "/proc/self/exe".to_owned(),
            args: vec!["agent".to_owned(), "nvml-probe".to_owned()],
            first_line: Duration::from_secs(15),
            line: Duration::from_secs(3),
            pause: Duration::from_secs(5),
        }
    }
}

/// One line of the child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// There is no driver or no device: asking again is useless.
    Absent(String),
    Gpus(Vec<GpuObs>),
}

/// The source; its child is killed when it is dropped.
#[derive(Debug)]
pub struct NvmlSource {
    state: Arc<Mutex<NvmlState>>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug, Clone, Default)]
struct NvmlState {
    gpus: Signal<Vec<GpuObs>>,
    note: String,
}

impl NvmlSource {
    /// Starts the child. Needs a tokio runtime.
    pub fn spawn(command: ProbeCommand) -> Self {
        let state =
            Arc::new(Mutex::new(NvmlState { note: "NVML has not answered yet".to_owned(), ..Default::default() }));
        let task = AbortOnDropHandle::new(tokio::spawn(watch(command, Arc::clone(&state))));
        Self { state, _task: task }
    }

    /// The newest readings. While NVML is silent they are the last known ones, marked with when the silence began.
    pub fn latest(&self) -> Signal<Vec<GpuObs>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).gpus.clone()
    }

    /// For people: what NVML is, or why it is not there.
    pub fn note(&self) -> String {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).note.clone()
    }
}

/// How one child ended.
enum Ended {
    Absent,
    Silent { since_ms: u64 },
    Exited(String),
}

async fn watch(command: ProbeCommand, state: Arc<Mutex<NvmlState>>) {
    let update = |change: &dyn Fn(&mut NvmlState)| change(&mut state.lock().unwrap_or_else(PoisonError::into_inner));
    loop {
        match follow_child(&command, &update).await {
            Ended::Absent => return,
            Ended::Silent { since_ms } => update(&|state| {
                state.note = format!("NVML fell silent at {since_ms} ms; its child was killed");
                for gpu in state.gpus.value.iter_mut().flatten() {
                    gpu.silent_since_ms.get_or_insert(since_ms);
                }
            }),
            Ended::Exited(why) => update(&|state| state.note = format!("the NVML child ended: {why}")),
        }
        tokio::time::sleep(command.pause).await;
    }
}

async fn follow_child(command: &ProbeCommand, update: &impl Fn(&dyn Fn(&mut NvmlState))) -> Ended {
    let mut child = match start(command) {
        Ok(child) => child,
        Err(error) => return Ended::Exited(format!("could not start {}: {error}", command.program)),
    };
    let Some(stdout) = child.stdout.take() else { return Ended::Exited("it has no output".to_owned()) };
    let mut lines = BufReader::new(stdout).lines();
    let mut heard_ms = monotonic_ms();
    let mut wait = command.first_line;
    let ended = loop {
        let Ok(line) = tokio::time::timeout(wait, next_line(&mut lines)).await else {
            break Ended::Silent { since_ms: heard_ms };
        };
        (heard_ms, wait) = (monotonic_ms(), command.line);
        match line {
            Ok(Line::Absent(why)) => {
                update(&|state| state.note = format!("NVML absent: {why}"));
                break Ended::Absent;
            }
            Ok(Line::Gpus(gpus)) => update(&|state| {
                state.note = format!("NVML answers for {} GPUs", gpus.len());
                state.gpus = Signal::at(heard_ms, gpus.clone());
            }),
            Err(why) => break Ended::Exited(why),
        }
    };
    // SIGKILL; a child stuck in the driver dies when the driver lets go, and nobody waits for it here
    let _ = child.start_kill();
    ended
}

fn start(command: &ProbeCommand) -> std::io::Result<Child> {
    Command::new(&command.program)
        .args(&command.args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
}

async fn next_line(lines: &mut Lines<BufReader<ChildStdout>>) -> Result<Line, String> {
    match lines.next_line().await {
        Ok(Some(line)) => serde_json::from_str(&line).map_err(|error| format!("it said something else: {error}")),
        Ok(None) => Err("it closed its output".to_owned()),
        Err(error) => Err(format!("its output could not be read: {error}")),
    }
}

/// The child: reads every GPU once a second and prints a line, until nobody reads it or its parent dies.
pub fn nvml_child_main() -> ExitCode {
    // without a parent this process has no purpose
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    probe(&mut std::io::stdout().lock(), &|| std::thread::sleep(READ_EVERY))
}

/// The child's work, written to `out`; `pause` runs between readings. Ends when there is no NVML or `out` is closed.
pub fn probe(out: &mut dyn Write, pause: &dyn Fn()) -> ExitCode {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(error) => return absent(out, &format!("{error}")),
    };
    let mut seen = false;
    loop {
        let gpus = match readings(&nvml) {
            Ok(gpus) => gpus,
            Err(error) if !seen => return absent(out, &format!("the driver does not tell its GPUs: {error}")),
            // it answered before: the parent starts a new child
            Err(_) => return ExitCode::FAILURE,
        };
        if gpus.is_empty() && !seen {
            return absent(out, "the driver tells of no GPU whose use can be read");
        }
        seen = true;
        if say(out, &Line::Gpus(gpus)).is_err() {
            return ExitCode::SUCCESS;
        }
        pause();
    }
}

fn absent(out: &mut dyn Write, why: &str) -> ExitCode {
    // a parent that is gone need not be told
    let _ = say(out, &Line::Absent(why.to_owned()));
    ExitCode::SUCCESS
}

fn say(out: &mut dyn Write, line: &Line) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Every GPU whose use can be read. Power is 0 where the card does not tell it.
fn readings(nvml: &Nvml) -> Result<Vec<GpuObs>, nvml_wrapper::error::NvmlError> {
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1_000.0;
    let mut gpus = Vec::new();
    for index in 0..nvml.device_count()? {
        // one lost card must not hide the others
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let (Ok(uuid), Ok(used)) = (device.uuid(), device.utilization_rates()) else { continue };
        gpus.push(GpuObs {
            uuid,
            util: used.gpu,
            memory_util: used.memory,
            power_watts: device.power_usage().map_or(0.0, watts),
            power_limit_watts: device.enforced_power_limit().map_or(0.0, watts),
            silent_since_ms: None,
        });
    }
    Ok(gpus)
}
