//! The engine as a child of `truebeat run`: started in a session of its own, its output kept, its end noticed, started again.
//!
//! The kubelet's part of the work, for one machine. Whether the engine is well is not asked here.

pub mod address;
mod capped_log;
mod disk;
mod engine_file;
mod remains;
pub mod run_dirs;
mod running;
mod tee;

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rustix::fs::fstat;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use self::capped_log::CappedLog;
use self::disk::Disk;
pub use self::engine_file::{EngineFile, Exit};
use self::running::Running;
use self::tee::{Log, Tee, tee};
use crate::kill::{KillNote, kill_tree, kill_tree_and_wait, send, send_to};
use crate::sources::{EngineProcess, process_tree, process_tree_members};
use crate::supervisor::keep::Pause;
use crate::supervisor::narrate::say;
use crate::supervisor::registry::Registry;

const LOG_BYTES_MAX: u64 = 64 << 20;
/// Left-over processes are asked to go before they are made to.
const REMAINS_WAIT: Duration = Duration::from_secs(2);
/// Between two looks at remains that even SIGKILL does not end.
const UNKILLABLE_LOOK: Duration = Duration::from_secs(5);
/// Between two looks at what is about to end.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The engine's last words are waited for at the end, unless whoever reads them, or its disk, does not take them.
const LAST_WORDS_WAIT: Duration = Duration::from_secs(2);
const KILLED_BY_US: u8 = 137;

/// What to run and where.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// The program and its arguments; never empty.
    pub command: Vec<OsString>,
    /// This program: its role `agent exec` makes the session and becomes the engine.
    pub exe: PathBuf,
    pub agent_dir: PathBuf,
    pub page_dir: PathBuf,
    pub log_path: PathBuf,
    /// Between SIGTERM and SIGKILL when `truebeat run` ends.
    pub grace: Duration,
    /// Tell a person of starts and ends, on stderr.
    pub narrate: bool,
}

/// Why an engine cannot even be tried.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("no command to run; write it after `--`, like: truebeat run -- vllm serve MODEL")]
    NoCommand,
    #[error("there is no program {0:?} here that may be executed; check its path, or PATH")]
    NoProgram(OsString),
    #[error("could not open the engine's log {path}: {source}; choose another with --log-file")]
    Log { path: PathBuf, source: std::io::Error },
    #[error("could not make the page directory {path}: {source}")]
    PageDir { path: PathBuf, source: std::io::Error },
}

/// Runs one engine after another.
#[derive(Debug)]
pub struct Launcher {
    config: LaunchConfig,
    log: Log,
    disk: Disk,
    /// Of the engine that runs, and of those before it that still speak.
    pipes: Mutex<Vec<Tee>>,
    /// The engine that was started last: nobody else knows of it before its file is written.
    newest: Mutex<Option<EngineProcess>>,
}

impl Launcher {
    /// Checks what can be checked before anything starts.
    ///
    /// # Errors
    /// No command, no such program, a log or page directory that cannot be made.
    pub fn new(config: LaunchConfig) -> Result<Self, LaunchError> {
        let program = config.command.first().ok_or(LaunchError::NoCommand)?;
        if !executable(program) {
            return Err(LaunchError::NoProgram(program.clone()));
        }
        std::fs::create_dir_all(&config.page_dir)
            .map_err(|source| LaunchError::PageDir { path: config.page_dir.clone(), source })?;
        let log = CappedLog::open(&config.log_path, LOG_BYTES_MAX)
            .and_then(Log::start)
            .map_err(|source| LaunchError::Log { path: config.log_path.clone(), source })?;
        Ok(Self { config, log, disk: Disk::default(), pipes: Mutex::default(), newest: Mutex::default() })
    }

    /// Keeps an engine running until `stop` says otherwise; then ends it. Returns the exit code of `truebeat run`.
    pub async fn run(&self, registry: &Registry, mut stop: watch::Receiver<bool>) -> u8 {
        let code = self.keep_running(registry, &mut stop).await;
        let begun = Instant::now();
        while !self.all_is_said() && begun.elapsed() < LAST_WORDS_WAIT {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        code
    }

    async fn keep_running(&self, registry: &Registry, stop: &mut watch::Receiver<bool>) -> u8 {
        let mut pause = Pause::new(Duration::from_secs(1), Duration::from_secs(30), Duration::from_secs(60));
        let (mut starts, mut last_exit) = (0, None);
        while !*stop.borrow() {
            starts += 1;
            let Some(started) = or_left(self.start(registry, starts, last_exit.clone()), stop).await else {
                return self.left_behind();
            };
            let wait = match started {
                Ok(mut running) => {
                    let status = tokio::select! {
                        status = running.noticed() => status,
                        _ = stop.wait_for(|stop| *stop) => return self.end(running, registry).await,
                    };
                    let Some(exit) = or_left(self.ended(&mut running, status, registry), stop).await else {
                        return self.left_behind();
                    };
                    last_exit = Some(exit);
                    let (dir, process) = (self.config.agent_dir.clone(), running.file.process());
                    let granted = self.disk.within(move || Ok(KillNote::grants(&dir, &process))).await.unwrap_or(false);
                    if granted { Duration::ZERO } else { pause.after(running.started.elapsed()) }
                }
                Err(error) => {
                    self.say(&format!("could not start the engine: {error}"));
                    pause.after(Duration::ZERO)
                }
            };
            if wait > Duration::ZERO {
                self.say(&format!("the engine starts again in {} s", wait.as_secs()));
            }
            let _ = tokio::time::timeout(wait, stop.wait_for(|stop| *stop)).await;
        }
        0
    }

    /// The last resort of a second signal: whatever runs is killed, nothing is awaited.
    pub fn end_now(&self, registry: &Registry) -> u8 {
        if let Some(process) = &*self.newest.lock().unwrap_or_else(PoisonError::into_inner) {
            kill_tree(process);
        }
        send_to(&registry.adopted(), Signal::SIGKILL);
        KILLED_BY_US
    }

    async fn start(&self, registry: &Registry, starts: u64, last_exit: Option<Exit>) -> std::io::Result<Running> {
        let nonce = random_nonce()?;
        let mut command = Command::new(&self.config.exe);
        command
            .args(["agent", "exec", "--supervisor", &std::process::id().to_string(), "--"])
            .args(&self.config.command)
            .env("TRUEBEAT_PAGE_DIR", &self.config.page_dir)
            .env("TRUEBEAT_NONCE", nonce.to_string())
            // all that it prints is in there already
            .env_remove("TRUEBEAT_LOG_FILE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = registry.spawn(&mut command)?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
        let process = EngineProcess::of(pid).unwrap_or(EngineProcess { pid, start_ticks: 0 });
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(process.clone());
        let words = self.config.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let (start_ticks, boot_id) = (process.start_ticks, crate::files::boot_id());
        let output = [child.stdout.as_ref().map(AsFd::as_fd), child.stderr.as_ref().map(AsFd::as_fd)];
        let output = output.into_iter().flatten().filter_map(|pipe| Some(fstat(pipe).ok()?.st_ino)).collect();
        let file = EngineFile { pid, start_ticks, boot_id, nonce, output, starts, command: words, last_exit };
        let written = match self.keep_output(&mut child) {
            Ok(()) => self.tell(&file).await,
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            self.give_up(child, &process, registry).await;
            return Err(error);
        }
        self.say(&format!("engine started, pid {pid}, start {starts}"));
        Ok(Running::new(child, file))
    }

    /// An engine that nobody can be told of must not run beside the next one (I5).
    async fn give_up(&self, mut child: Child, process: &EngineProcess, registry: &Registry) {
        kill_tree(process);
        let _ = child.start_kill();
        let _ = tokio::time::timeout(UNKILLABLE_LOOK, child.wait()).await;
        registry.forget(process.pid);
        self.clear_remains(process, registry).await;
    }

    /// Tells the detector.
    async fn tell(&self, file: &EngineFile) -> std::io::Result<()> {
        let (path, file) = (EngineFile::path(&self.config.agent_dir), file.clone());
        let place = path.display().to_string();
        let written = self.disk.within(move || crate::files::write_json(&path, &file)).await;
        let in_words = |error: std::io::Error| {
            let words =
                format!("could not write {place}: {error}; make room there, or choose another place by --agent-dir");
            std::io::Error::new(error.kind(), words)
        };
        written.map_err(in_words)
    }

    fn keep_output(&self, child: &mut Child) -> std::io::Result<()> {
        if let Some(out) = child.stdout.take() {
            self.keep(tee(out.into_owned_fd()?, Box::new(std::io::stdout()), &self.log)?);
        }
        if let Some(err) = child.stderr.take() {
            self.keep(tee(err.into_owned_fd()?, Box::new(std::io::stderr()), &self.log)?);
        }
        Ok(())
    }

    fn keep(&self, pipe: Tee) {
        let mut pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
        pipes.retain(|pipe| !pipe.is_done());
        pipes.push(pipe);
    }

    /// Has everything that engines said gone where it belongs?
    fn all_is_said(&self) -> bool {
        self.pipes.lock().unwrap_or_else(PoisonError::into_inner).iter().all(Tee::is_done) && self.log.is_empty()
    }

    /// The engine's root is gone: the rest of its tree follows before a successor may start (I5). Status 0 is no excuse: an
    /// engine that leaves unasked has failed.
    async fn ended(&self, running: &mut Running, status: Option<ExitStatus>, registry: &Registry) -> Exit {
        let process = running.file.process();
        let exit = Exit {
            pid: process.pid,
            code: status.and_then(|status| status.code()),
            signal: status.and_then(|status| status.signal()),
            at: crate::files::wall_clock(),
        };
        let how = status.map_or_else(|| "an unknown status".to_owned(), |status| status.to_string());
        self.say(&format!("the engine (pid {}) ended with {how}", process.pid));
        if status.is_some_and(|status| status.success()) && leaves_others(&process, registry) {
            self.say(
                "it left processes behind, which end with it; an engine that goes into the background cannot be supervised: keep it in \
                 the foreground",
            );
        }
        running.reap();
        registry.forget(process.pid);
        running.file.last_exit = Some(exit.clone());
        if let Err(error) = self.tell(&running.file).await {
            tracing::warn!(%error, "nobody can be told of the engine's end");
        }
        self.clear_remains(&process, registry).await;
        exit
    }

    /// SIGTERM to the root, then to what it leaves (a shell that ran the engine is gone at once), SIGKILL to whatever is left after the grace.
    async fn end(&self, mut running: Running, registry: &Registry) -> u8 {
        let process = running.file.process();
        self.say(&format!("ending the engine, pid {}; at most {} s", process.pid, self.config.grace.as_secs()));
        let told = Instant::now();
        send(&[process.pid], Signal::SIGTERM);
        let polite = tokio::time::timeout(self.config.grace, running.child.wait()).await.is_ok();
        if polite {
            send_to(&process_tree_members(&process), Signal::SIGTERM);
            send_to(&registry.adopted(), Signal::SIGTERM);
            let until = self.config.grace.max(told.elapsed() + REMAINS_WAIT);
            while leaves_others(&process, registry) && told.elapsed() < until {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        let gone = kill_tree_and_wait(&process, REMAINS_WAIT).await;
        self.clear_orphans(registry).await;
        match (polite, gone) {
            (true, true) => self.say("the engine has ended"),
            (false, true) => self.say("the engine did not end in time and was killed"),
            (_, false) => return self.left_behind(),
        }
        if polite { 0 } else { KILLED_BY_US }
    }

    fn left_behind(&self) -> u8 {
        self.say("processes of the engine outlive SIGKILL; they are left behind");
        KILLED_BY_US
    }

    fn say(&self, line: &str) {
        if self.config.narrate {
            say(line);
        }
    }
}

/// Does anything run on that came of it?
fn leaves_others(process: &EngineProcess, registry: &Registry) -> bool {
    !process_tree(process).is_empty() || !registry.adopted().is_empty()
}

/// What `work` comes to; `None` where it still goes on a moment after a stop was asked for: nobody who ends waits for what cannot be killed.
async fn or_left<T>(work: impl Future<Output = T>, stop: &mut watch::Receiver<bool>) -> Option<T> {
    let left = async {
        // whoever could ask has gone: nobody will
        if stop.wait_for(|stop| *stop).await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(REMAINS_WAIT).await;
    };
    tokio::select! {
        done = work => Some(done),
        () = left => None,
    }
}

/// Could this be started: a path to an executable file, or a name that PATH leads to?
fn executable(program: &OsString) -> bool {
    let may = |path: &Path| path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    if program.as_encoded_bytes().contains(&b'/') {
        return may(Path::new(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    !program.is_empty() && std::env::split_paths(&path).any(|folder| may(&folder.join(program)))
}

/// A number that an engine cannot guess; never 0, which means that nobody gave one.
fn random_nonce() -> std::io::Result<u64> {
    Ok(getrandom::u64()?.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn whoever_ends_waits_a_moment_and_not_for_ever() {
        let (stop, mut stopped) = watch::channel(false);
        let began = tokio::time::Instant::now();
        let after = |wait| async move {
            tokio::time::sleep(wait).await;
            7
        };
        assert_eq!(or_left(after(UNKILLABLE_LOOK * 9), &mut stopped).await, Some(7), "nobody ends");
        stop.send_replace(true);
        assert_eq!(or_left(after(REMAINS_WAIT / 2), &mut stopped).await, Some(7));
        let before = began.elapsed();
        assert_eq!(or_left(std::future::pending::<()>(), &mut stopped).await, None);
        assert!((REMAINS_WAIT..REMAINS_WAIT * 2).contains(&(began.elapsed() - before)));
        drop(stop);
    }
}
