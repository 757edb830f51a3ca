//! Keeps one child alive: started again in milliseconds, with a pause that grows while it dies at once.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::watch;

use super::board::{Board, Posted};
use super::registry::Registry;
use crate::ticker::Timer;
use crate::watch::leave::Drain;

/// A detector speaks every two or three seconds at least (`status`); one that is silent for so many looks in a row hangs.
const SILENT_LOOKS_MAX: u32 = 4;
const LOOK_EVERY: Duration = Duration::from_millis(2_500);
const KILLED_WAIT: Duration = Duration::from_secs(2);
/// So long a gate may leave its detector without an answer, which takes a fraction of a millisecond. What is in flight through one that is
/// merely slow would be lost with it.
const GATE_HANGS_MS_MAX: u64 = 20_000;

/// A growing pause before the next start. Pure.
#[derive(Debug, Clone)]
pub struct Pause {
    first: Duration,
    max: Duration,
    /// A run of this length makes the next pause the first again.
    healthy: Duration,
    next: Duration,
}

impl Pause {
    /// Doubles from `first` to `max`; a run longer than `healthy` resets it.
    pub fn new(first: Duration, max: Duration, healthy: Duration) -> Self {
        Self { first, max, healthy, next: first }
    }

    /// How long to wait after a run of `ran`.
    pub fn after(&mut self, ran: Duration) -> Duration {
        if ran >= self.healthy {
            self.next = self.first;
        }
        let pause = self.next;
        self.next = (self.next * 2).min(self.max);
        pause
    }
}

/// What a child is.
#[derive(Debug)]
pub struct Spec {
    /// Its name in logs and metrics.
    pub name: &'static str,
    pub program: PathBuf,
    pub args: Vec<std::ffi::OsString>,
    pub log_filter: String,
    pub stdin: Input,
}

/// What a child reads.
#[derive(Debug)]
pub enum Input {
    /// The listening socket: connections that come while the child is away wait in the kernel's queue instead of being refused.
    Listener(std::net::TcpListener),
    /// A pipe with the wanted drain, one JSON line a change; its end tells the child that its supervisor is gone, or lets it go. Stdout
    /// is a pipe with status lines.
    Talk,
}

/// Runs the child for ever; the caller drops the future to end it (the child is killed then). Of one that talks it returns when that was
/// dismissed and has left.
pub async fn keep(spec: Spec, registry: Arc<Registry>, board: Arc<Board>) {
    let mut pause = Pause::new(Duration::from_millis(10), Duration::from_secs(1), Duration::from_secs(10));
    loop {
        let started = Instant::now();
        match start(&spec, &registry) {
            Ok(child) => watch_over(child, &spec, &registry, &board).await,
            Err(error) => {
                tracing::error!(child = spec.name, program = %spec.program.display(), %error, "could not start a child")
            }
        }
        if matches!(spec.stdin, Input::Talk) && board.has_dismissed() {
            return;
        }
        board.count_restart(spec.name);
        tokio::time::sleep(pause.after(started.elapsed())).await;
    }
}

fn start(spec: &Spec, registry: &Registry) -> std::io::Result<Child> {
    let mut command = Command::new(&spec.program);
    command.args(&spec.args).kill_on_drop(true);
    // a heap for each thread is memory that nobody uses: these processes hardly allocate once they run
    command.env("MALLOC_ARENA_MAX", "1");
    command.env("TRUEBEAT_LOG", &spec.log_filter);
    // by it a start of an engine is known, also from within which we may have been started
    command.env_remove("TRUEBEAT_NONCE");
    // A Ctrl-C at the terminal is for the supervisor alone; it ends its children in its own order.
    command.process_group(0);
    match &spec.stdin {
        Input::Listener(listener) => {
            command.stdin(Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone()?))).stdout(Stdio::null());
        }
        Input::Talk => {
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
        }
    }
    registry.spawn(&mut command)
}

async fn watch_over(mut child: Child, spec: &Spec, registry: &Registry, board: &Arc<Board>) {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    tracing::info!(child = spec.name, pid, "started");
    let talk = child.stdin.take().zip(child.stdout.take());
    let talking = async {
        let Some((stdin, stdout)) = talk else { return hangs(board.statuses(), Instant::now()).await };
        let words = AtomicU64::new(0);
        let talk = async { tokio::join!(tell(stdin, board), listen(stdout, board, &words)) };
        tokio::select! {
            _ = talk => {}
            () = silence(&words, SILENT_LOOKS_MAX, LOOK_EVERY) => {}
        }
    };
    // Its words end with it, so nobody waits for them after it is gone.
    let ended = tokio::select! {
        status = child.wait() => Some(status),
        () = talking => None,
    };
    let status = match ended {
        Some(status) => status,
        None => end_silent(&mut child, spec).await,
    };
    if let Some(pid) = pid {
        registry.forget(pid);
    }
    match status {
        Ok(status) if board.has_dismissed() => tracing::info!(child = spec.name, pid, %status, "a child has left"),
        Ok(status) => tracing::warn!(child = spec.name, pid, %status, "a child ended; it is started again"),
        Err(error) => tracing::error!(child = spec.name, pid, %error, "could not await a child"),
    }
}

/// It lives and says nothing: it hangs. Readiness stays as it said last (I4), but nobody judges the engine until it is replaced.
async fn end_silent(child: &mut Child, spec: &Spec) -> std::io::Result<ExitStatus> {
    tracing::error!(child = spec.name, pid = child.id(), "a child hangs and is killed; readiness stays as it was");
    child.start_kill()?;
    // One that even SIGKILL does not end gets its successor all the same.
    let late = |_| std::io::Error::from(std::io::ErrorKind::TimedOut);
    tokio::time::timeout(KILLED_WAIT, child.wait()).await.map_err(late)?
}

/// Returns when `words` has not grown over so many looks. Looks are counted, not seconds: where we ourselves were stopped, the
/// child's words wait in the pipe.
async fn silence(words: &AtomicU64, looks_max: u32, every: Duration) {
    let (mut seen, mut silent) = (words.load(Ordering::Relaxed), 0);
    let mut timer = Timer::start();
    while silent < looks_max {
        timer.wait(every).await;
        let now = words.load(Ordering::Relaxed);
        silent = if now == seen { silent + 1 } else { 0 };
        seen = now;
    }
}

/// Returns when the detector says of the gate that began then that it hangs: of an earlier one it says nothing that counts.
async fn hangs(mut statuses: watch::Receiver<Option<Arc<Posted>>>, began: Instant) {
    let hung = |posted: &Posted| {
        // what is told of a silence goes on from gate to gate: so much of it, after as much time, is this one's
        let ran = posted.at.duration_since(began);
        posted.doc.gate_hangs_ms >= GATE_HANGS_MS_MAX && ran >= Duration::from_millis(GATE_HANGS_MS_MAX)
    };
    if statuses.wait_for(|status| status.as_ref().is_some_and(|posted| hung(posted))).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Writes the wanted drain now and at each change. The pipe stays open until the child is dismissed: its end means that the supervisor is gone.
async fn tell(stdin: ChildStdin, board: &Board) {
    tokio::select! {
        () = order(stdin, board.drains()) => {}
        () = board.dismissed() => {}
    }
    // nor is a child that goes one that hangs
    std::future::pending::<()>().await;
}

async fn order(mut stdin: ChildStdin, mut drains: watch::Receiver<Drain>) {
    loop {
        let wanted = *drains.borrow_and_update();
        let Ok(line) = serde_json::to_string(&wanted) else { break };
        if stdin.write_all(format!("{line}\n").as_bytes()).await.is_err() || drains.changed().await.is_err() {
            break;
        }
    }
    std::future::pending::<()>().await;
}

async fn listen(stdout: ChildStdout, board: &Board, words: &AtomicU64) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        words.fetch_add(u64::from(board.post_line(&line)), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::StatusDoc;

    #[tokio::test]
    async fn silence_is_many_looks_in_a_row_without_a_word() {
        let words = AtomicU64::new(0);
        let ms = Duration::from_millis(1);
        let talker = async {
            for _ in 0..50 {
                tokio::time::sleep(ms).await;
                words.fetch_add(1, Ordering::Relaxed);
            }
        };
        let (at_silence, ()) = tokio::join!(
            async {
                silence(&words, 20, ms * 5).await;
                words.load(Ordering::Relaxed)
            },
            talker
        );
        assert_eq!(at_silence, 50, "it talked to its end");
    }

    #[tokio::test]
    async fn a_gate_hangs_when_it_has_for_long_and_not_because_the_one_before_did() {
        let told = async |gate_hangs_ms, ran_ms| {
            let board = Board::default();
            board.post(StatusDoc { gate_hangs_ms, ..StatusDoc::default() });
            let began = Instant::now() - Duration::from_millis(ran_ms);
            tokio::time::timeout(Duration::ZERO, hangs(board.statuses(), began)).await.is_ok()
        };
        assert!(told(GATE_HANGS_MS_MAX, GATE_HANGS_MS_MAX + 500).await);
        assert!(!told(GATE_HANGS_MS_MAX - 1, GATE_HANGS_MS_MAX + 500).await);
        assert!(!told(GATE_HANGS_MS_MAX + 1_000, 5_000).await, "its forerunner did");
        assert!(told(2 * GATE_HANGS_MS_MAX, GATE_HANGS_MS_MAX + 500).await, "both do");
    }

    /// It is given the time for what it has to do then, which to be killed would cut short.
    #[tokio::test]
    async fn a_child_that_is_dismissed_ends_by_itself_and_is_not_started_again() {
        let dir = tempfile::tempdir().unwrap();
        let starts = dir.path().join("starts");
        let script =
            format!("echo start >> {0}; echo '{{}}'; cat > {0}.orders; sleep 0.2; echo end >> {0}", starts.display());
        let spec = Spec {
            name: "detector",
            program: "sh".into(),
            args: ["-c".into(), script.into()].into(),
            log_filter: String::new(),
            stdin: Input::Talk,
        };
        let board = Arc::new(Board::default());
        let ends = async {
            while !starts.exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            board.dismiss();
        };
        let kept = keep(spec, Arc::default(), Arc::clone(&board));
        tokio::time::timeout(Duration::from_secs(40), async { tokio::join!(kept, ends) }).await.expect("it is kept");
        assert_eq!(std::fs::read_to_string(&starts).unwrap(), "start\nend\n");
    }

    #[test]
    fn the_pause_doubles_to_its_bound_and_a_long_run_resets_it() {
        let ms = Duration::from_millis;
        let mut pause = Pause::new(ms(10), ms(1_000), ms(10_000));
        let pauses: Vec<_> = (0..9).map(|_| pause.after(ms(1)).as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1_000, 1_000]);
        assert_eq!(pause.after(ms(10_000)), ms(10));
        assert_eq!(pause.after(ms(1)), ms(20));
    }
}
