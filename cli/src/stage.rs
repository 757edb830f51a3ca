//! `truebeat run -- ENGINE` as a child on loopback, with the handles that demo and bench need: addresses, signals, incidents.
//! Everything that is started here is ended here, by process id.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use crds::episode::Episode;
use jiff::Timestamp;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::TcpSocket;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::http::{self, HttpClient};

const START_MAX: Duration = Duration::from_secs(120);
/// Longer than `truebeat run` itself leaves an engine that hangs (`--grace`, 40 s).
const STOP_MAX: Duration = Duration::from_secs(60);
/// Of the log of a `truebeat run` that ended.
const TAIL_LINES: usize = 20;
/// Deadline of one call to an agent or an engine.
pub const CALL: Duration = Duration::from_secs(2);

/// Which engine is put on the stage.
#[derive(Debug, Clone)]
pub enum EngineKind {
    /// Our engine with `--lie`, and `--fault KIND@sigusr2` where there is one.
    Truebeat { model: PathBuf, fault: Option<String> },
    /// Our engine as it is deployed: it tells the truth and has its guards on, also with `--fault KIND@sigusr2`. Requests in flight at
    /// two stalls are served all the same: the fault is not theirs. With more words for it.
    Guarded { model: PathBuf, fault: Option<String>, more: Vec<String> },
    /// A stranger's Python server that freezes on SIGUSR2, with more words for it.
    Stranger { server: PathBuf, more: Vec<String> },
}

/// A supervised engine and where to reach its parts.
#[derive(Debug)]
pub struct Stage {
    run: Child,
    /// Nobody else is given its ports while it runs.
    _ports: [TcpSocket; 3],
    log: PathBuf,
    pub engine_command: Vec<String>,
    /// `http://host:port` of the gate, the agent and the engine itself.
    pub gate: String,
    pub agent: String,
    pub engine: String,
    pub http: HttpClient,
}

impl Stage {
    /// Starts `truebeat run` around the engine. Logs and bundles go to `folder`.
    ///
    /// # Errors
    /// When the folder cannot be made, no port is free, or the program does not start.
    pub fn launch(kind: &EngineKind, folder: &Path) -> anyhow::Result<Self> {
        Self::launch_under(None, kind, folder)
    }

    /// The same under another program that has the agent's roles.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub fn launch_under(under: Option<&Path>, kind: &EngineKind, folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
        let ports = [reserve()?, reserve()?, reserve()?];
        let [gate, agent, engine] = [address(&ports[0])?, address(&ports[1])?, address(&ports[2])?];
        let program = std::env::current_exe().context("could not find this program's own path")?;
        let engine_command = engine_command(kind, &program, &engine);
        let log_path = folder.join("truebeat.log");
        let log = File::create(&log_path).context("could not make the log of truebeat run")?;
        let poison = if matches!(kind, EngineKind::Guarded { .. }) { "ignore" } else { "refuse" };
        let run = Command::new(under.unwrap_or(&program))
            .args(["run", "--listen", &gate, "--agent-listen", &agent, "--engine-url", &format!("http://{engine}")])
            .args(["--poison-requests", poison, "--bundle-dir"])
            .arg(folder.join("bundles"))
            .arg("--log")
            .arg(folder.join("engine.log"))
            .arg("--")
            .args(&engine_command)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("could not start truebeat run")?;
        let url = |address: &str| format!("http://{address}");
        Ok(Self {
            run,
            _ports: ports,
            log: log_path,
            engine_command,
            gate: url(&gate),
            agent: url(&agent),
            engine: url(&engine),
            http: http::client(),
        })
    }

    /// Waits until the agent says that the replica may serve.
    ///
    /// # Errors
    /// When `truebeat run` ends, or two minutes pass.
    pub async fn wait_ready(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < START_MAX {
            if let Some(status) = self.run.try_wait()? {
                let log = std::fs::read_to_string(&self.log).unwrap_or_default();
                bail!("truebeat run ended at once with {status}; the end of {}:\n{}", self.log.display(), tail(&log));
            }
            let answer = http::get(&self.http, &format!("{}/readyz", self.agent), CALL).await;
            if matches!(answer, Ok((200, _))) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bail!("the engine was not ready within {START_MAX:?}")
    }

    /// Sends SIGUSR2 to the engine alone. Returns its pid and the moment just before the signal.
    ///
    /// # Errors
    /// When there is no process with the engine's command line.
    pub fn hang_engine(&self) -> anyhow::Result<(i32, Timestamp)> {
        let pid = self.engine_pid()?;
        let injected = Timestamp::now();
        kill(Pid::from_raw(pid), Signal::SIGUSR2).with_context(|| format!("could not signal the engine, pid {pid}"))?;
        Ok((pid, injected))
    }

    /// The engine's process.
    ///
    /// # Errors
    /// When there is no process with the engine's command line.
    pub fn engine_pid(&self) -> anyhow::Result<i32> {
        find_process(&self.engine_command)
    }

    /// The agent's incidents, newest first.
    ///
    /// # Errors
    /// When the agent does not answer, or not with a list of episodes.
    pub async fn incidents(&self) -> anyhow::Result<Vec<Episode>> {
        let (_, list) = http::get_json(&self.http, &format!("{}/incidents", self.agent), CALL).await?;
        serde_json::from_value(list).context("the agent's /incidents is not a list of episodes")
    }

    /// The newest incident that began at or after `since`.
    ///
    /// # Errors
    /// As [`Stage::incidents`].
    pub async fn incident_since(&self, since: Timestamp) -> anyhow::Result<Option<Episode>> {
        let newest = self.incidents().await?.into_iter().next();
        Ok(newest.filter(|episode| moment(&episode.suspect_at).is_some_and(|at| at >= since)))
    }

    /// The name of the agent's verdict.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub async fn verdict(&self) -> anyhow::Result<serde_json::Value> {
        Ok(http::get_json(&self.http, &format!("{}/verdict", self.agent), CALL).await?.1)
    }

    /// [`Stage::stop`] after what was done on it; an error of that is told first, for it is mostly why the run does not end as it should.
    ///
    /// # Errors
    /// That of `done`, else as [`Stage::stop`].
    pub async fn stop_after<T>(&mut self, done: anyhow::Result<T>) -> anyhow::Result<T> {
        let stopped = self.stop().await;
        let done = done?;
        stopped.map(|()| done)
    }

    /// SIGTERM to `truebeat run`, and SIGKILL when that does not help.
    ///
    /// # Errors
    /// When it had to be killed.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let Some(pid) = self.run.id() else { return Ok(()) };
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).context("could not signal truebeat run")?;
        if tokio::time::timeout(STOP_MAX, self.run.wait()).await.is_err() {
            self.run.kill().await.context("could not kill truebeat run")?;
            bail!("it outlived SIGTERM by {STOP_MAX:?} and was killed");
        }
        Ok(())
    }
}

impl Drop for Stage {
    /// A scene that failed or was interrupted leaves nothing behind. What `stop` has ended already is not touched.
    fn drop(&mut self) {
        let Some(pid) = self.run.id() else { return };
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM);
        let begun = Instant::now();
        // No future can be awaited here, and the program is about to end: a short blocking wait harms nobody.
        while begun.elapsed() < STOP_MAX {
            if !matches!(self.run.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.run.start_kill();
    }
}

/// Does `work` until it ends or SIGINT or SIGTERM arrives: then the work is dropped, and with it every [`Stage`] ends its engine.
///
/// # Errors
/// Those of `work`; that it was interrupted; that signals cannot be taken.
pub async fn until_interrupted<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let mut interrupt = signal(SignalKind::interrupt()).context("could not take SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("could not take SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = interrupt.recv() => bail!("interrupted by SIGINT; what was started has been ended"),
        _ = terminate.recv() => bail!("interrupted by SIGTERM; what was started has been ended"),
    }
}

/// A time of an episode, where it has come.
pub fn moment(at: &Option<String>) -> Option<Timestamp> {
    at.as_deref()?.parse().ok()
}

fn engine_command(kind: &EngineKind, program: &Path, listen: &str) -> Vec<String> {
    match kind {
        EngineKind::Truebeat { model, fault } => our_engine(program, (model, fault.as_deref()), listen, &["--lie"]),
        EngineKind::Guarded { model, fault, more } => {
            let more: Vec<&str> = ["--guards", "on"].into_iter().chain(more.iter().map(String::as_str)).collect();
            our_engine(program, (model, fault.as_deref()), listen, &more)
        }
        EngineKind::Stranger { server, more } => {
            let port = listen.rsplit(':').next().unwrap_or_default().to_owned();
            let mut command = vec!["python3".into(), server.display().to_string(), "--port".into(), port];
            command.extend(more.iter().cloned());
            command
        }
    }
}

fn our_engine(program: &Path, (model, fault): (&Path, Option<&str>), listen: &str, more: &[&str]) -> Vec<String> {
    let (program, model) = (program.display().to_string(), model.display().to_string());
    let mut command = vec![program, "engine".into(), "--model".into(), model, "--listen".into(), listen.to_owned()];
    command.extend(["--served-model-name".into(), "demo".into()]);
    command.extend(more.iter().map(|word| (*word).to_owned()));
    command.extend(fault.iter().flat_map(|fault| ["--fault".to_owned(), format!("{fault}@sigusr2")]));
    command
}

/// The process with this command line: the engine that `truebeat run` started. The program's own word may differ: a launcher in
/// `PATH` may have become the real one.
fn find_process(command: &[String]) -> anyhow::Result<i32> {
    let arguments = command.get(1..).unwrap_or_default();
    let wanted: Vec<u8> = arguments.iter().flat_map(|word| [0].into_iter().chain(word.bytes())).chain([0]).collect();
    for entry in std::fs::read_dir("/proc").context("could not list /proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let program_len = line.len().saturating_sub(wanted.len());
        if line.ends_with(&wanted) && program_len > 0 && !line[..program_len].contains(&0) {
            return Ok(pid);
        }
    }
    bail!("no process runs {}", command.join(" "))
}

/// A free port of loopback, which nobody else on the machine is given, neither to listen nor for a connection, while this lives: a port
/// that was merely free a moment ago may be taken when the program listens. A program that sets `SO_REUSEADDR`, as servers do, may.
fn reserve() -> anyhow::Result<TcpSocket> {
    let socket = TcpSocket::new_v4().context("could not make a socket")?;
    socket.set_reuseaddr(true).context("could not set SO_REUSEADDR")?;
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).context("no free port on loopback")?;
    Ok(socket)
}

fn address(port: &TcpSocket) -> anyhow::Result<String> {
    Ok(port.local_addr().context("a socket without an address")?.to_string())
}

/// The last lines of a log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reserved_port_is_for_the_program_that_was_told_of_it() {
        let port = reserve().unwrap();
        let wanted = address(&port).unwrap();
        let others: Vec<TcpListener> = (0..500).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        assert!(others.iter().all(|other| other.local_addr().unwrap().to_string() != wanted));
        // and again after a restart
        for _ in 0..2 {
            TcpListener::bind(&wanted).unwrap();
        }
    }

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let log: String = (0..30).map(|line| format!("{line}\n")).collect();
        assert!(tail(&log).starts_with("10\n") && tail(&log).ends_with("\n29"));
        assert_eq!(tail("one"), "one");
    }
}
