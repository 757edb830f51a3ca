//! The line between detector and gate: a Unix socket, JSON lines. The detector says what it wants and takes all counters in the same
//! exchange; level-triggered, so that a restart of either end is healed by the next one. A gate that owed nothing says by itself when
//! work comes, so that an idle one need not be asked ten times a second.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use heartbeat::counts::COUNTS;
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};

use super::ledger::{Control, GateReply, Ledger};
use super::line::Line;
use super::line_socket::LineSocket;
use super::memory::Memory;
use super::suspects::Suspect;
use crate::sources::clock::monotonic_ms;

/// An exchange takes well under a millisecond; a gate that needs longer than this is not waited for.
const EXCHANGE_MAX: Duration = Duration::from_millis(50);
/// How long the gate waits for a detector's next line before it drops the connection (not the fence).
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Asks for the counters and wants nothing: for whoever is not the detector.
const LOOK: &[u8] = b"{\"look\":true}";
/// The same, and asks who could have stalled the engine.
const SUSPECTS: &[u8] = b"{\"suspects\":true}";

/// What the gate says: its counters as of a moment, and how many lines of this connection it had heard by then.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Told {
    pub(super) heard: u64,
    at_ms: u64,
    reply: GateReply,
    /// Only where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    suspects: Option<Vec<Suspect>>,
    /// In the first answer of a connection: where the counters that move with each chunk can be read without asking.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) counts: Option<PathBuf>,
    /// In the same: by what the gate knows the agent's own question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) own: Option<String>,
}

/// The gate's end: serves every detector that connects, for ever.
pub async fn serve(listener: UnixListener, ledger: Arc<Ledger>, memory: PathBuf) {
    let memory = Arc::new(Memory::at(memory));
    let mut told = false;
    let spare = Arc::<Spare>::default();
    spare.keep();
    loop {
        let accepted = match listener.accept().await {
            // a socket where nobody is says the same
            Err(_) if spare.let_go() => listener.accept().now_or_never(),
            accepted => Some(accepted),
        };
        match accepted {
            Some(Ok((stream, _))) => {
                told = false;
                let (ledger, memory, spare) = (Arc::clone(&ledger), Arc::clone(&memory), Arc::clone(&spare));
                tokio::spawn(async move {
                    serve_one(stream, ledger, memory).await;
                    spare.keep();
                });
            }
            Some(Err(error)) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%error, "the gate's control socket does not accept");
                }
                tokio::time::sleep(EXCHANGE_MAX).await;
                spare.keep();
            }
            None => spare.keep(),
        }
    }
}

/// A descriptor for a detector that comes when clients have taken all the others. A gate that it cannot speak to would be one that hangs, and
/// would be replaced with all that goes through it. (A gate is one thread: between two looks at a socket nobody else takes what was let go.)
#[derive(Debug, Default)]
struct Spare(Mutex<Option<File>>);

impl Spare {
    /// Holds one, if there is one to have.
    fn keep(&self) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_none() {
            *kept = File::open("/dev/null").ok();
        }
    }

    /// False where none was held.
    fn let_go(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }
}

async fn serve_one(stream: UnixStream, ledger: Arc<Ledger>, memory: Arc<Memory>) {
    let Ok(mut socket) = LineSocket::on(stream) else { return };
    let mut beginnings = ledger.beginnings();
    let (mut line, mut told, mut heard) = (Vec::new(), Vec::new(), 0);
    // once an answer at most: whoever hears that work came asks what it is
    let mut shall_tell = false;
    loop {
        // one thread serves them all: whoever says a thousand lines at once takes turns with those who are served
        tokio::task::consume_budget().await;
        let asked = tokio::select! {
            asked = tokio::time::timeout(SILENCE_MAX, socket.hear(&mut line)) => match asked {
                Ok(Ok(())) => true,
                _ => return,
            },
            _ = beginnings.changed(), if shall_tell => false,
        };
        let now_ms = monotonic_ms();
        let mut suspects = None;
        if asked {
            heard += 1;
            suspects = (line == SUSPECTS).then(|| ledger.suspects(now_ms));
            obey(&line, &ledger, &memory).await;
        }
        beginnings.mark_unchanged();
        let reply = ledger.reply(now_ms);
        shall_tell = asked && reply.obs.in_flight == 0;
        let counts = if heard == 1 { ledger.counts_path() } else { None };
        let own = ledger.own.clone().filter(|_| heard == 1);
        told.clear();
        if serde_json::to_writer(&mut told, &Told { heard, at_ms: now_ms, reply, suspects, counts, own }).is_err() {
            return;
        }
        told.push(b'\n');
        // a detector that leaves that much unread asks anew, by another connection
        if socket.say(&told).is_err() {
            return;
        }
    }
}

async fn obey(line: &[u8], ledger: &Ledger, memory: &Memory) {
    if [LOOK, SUSPECTS].contains(&line) {
        return;
    }
    match serde_json::from_slice::<Control>(line) {
        Ok(control) => {
            // kept before anybody is refused for it: who knew why may die in the same moment
            memory.keep(&control).await;
            ledger.set_control(control);
        }
        Err(error) => tracing::warn!(%error, "the gate got a control line that it cannot read"),
    }
}

/// Where a gate with this directory is spoken to: in a folder in which the gate alone writes.
pub fn socket_in(agent_dir: &Path) -> PathBuf {
    agent_dir.join("gate/gate.sock")
}

impl Told {
    fn heard(self) -> Heard {
        Heard { at_ms: self.at_ms, reply: self.reply }
    }
}

/// A reply, and when it was true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    pub at_ms: u64,
    pub reply: GateReply,
}

/// The detector's end. Reconnects by itself.
#[derive(Debug)]
pub struct GateClient {
    path: PathBuf,
    line: Option<Line>,
    /// What was to be said, kept for its memory.
    words: Vec<u8>,
}

impl GateClient {
    /// Connects with the first exchange.
    pub fn new(path: PathBuf) -> Self {
        Self { path, line: None, words: Vec::new() }
    }

    /// Tells the gate what is wanted and takes its counters. Bounded by 50 ms.
    ///
    /// # Errors
    /// When the gate is away or does not answer in time; the next call tries anew.
    pub async fn exchange(&mut self, control: &Control) -> io::Result<Heard> {
        self.words.clear();
        serde_json::to_writer(&mut self.words, control)?;
        self.ask().await.map(|told| told.heard())
    }

    /// Takes the gate's counters and tells it nothing: its fence stays as the detector wants it. Bounded by 50 ms.
    ///
    /// # Errors
    /// As [`GateClient::exchange`].
    pub async fn look(&mut self) -> io::Result<Heard> {
        self.words.clear();
        self.words.extend_from_slice(LOOK);
        self.ask().await.map(|told| told.heard())
    }

    /// Who could have stalled the engine, as of now. Bounded by 50 ms.
    ///
    /// # Errors
    /// As [`GateClient::exchange`].
    pub async fn suspects(&mut self) -> io::Result<Vec<Suspect>> {
        self.words.clear();
        self.words.extend_from_slice(SUSPECTS);
        Ok(self.ask().await?.suspects.unwrap_or_default())
    }

    /// The counters as the gate has them now, read and not asked for; `None` where it does not let itself be read. They are no sign of
    /// life: those of a gate that hangs stand still.
    pub fn counts(&self) -> Option<[u64; COUNTS]> {
        self.line.as_ref()?.counts.as_ref()?.read()
    }

    /// The word by which the gate knows the agent's own question; `None` where it is away.
    pub fn own(&self) -> Option<&str> {
        self.line.as_ref()?.own.as_deref()
    }

    /// Has the gate said by itself that work came, since it was asked last? Then it wants to be asked. Never waits.
    pub fn calls(&mut self) -> bool {
        let Some(line) = &mut self.line else { return false };
        match line.hear_now() {
            Ok(told) => told.is_some(),
            Err(_) => {
                self.line = None;
                true
            }
        }
    }

    /// Returns when the gate says by itself that work came, or is gone. A wait that is given up loses nothing.
    pub async fn called(&mut self) {
        let Some(line) = &mut self.line else { return std::future::pending().await };
        if line.hear().await.is_err() {
            self.line = None;
        }
    }

    async fn ask(&mut self) -> io::Result<Told> {
        let answer = tokio::time::timeout(EXCHANGE_MAX, self.try_ask()).await;
        let answer = answer.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
        if answer.is_err() {
            self.line = None;
        }
        answer
    }

    async fn try_ask(&mut self) -> io::Result<Told> {
        self.words.push(b'\n');
        let line = match &mut self.line {
            Some(line) => line,
            none => none.insert(Line::connect(&self.path).await?),
        };
        line.ask(&self.words).await
    }
}

/// Does whoever listens there answer at all, if it is waited for? A gate that gets next to nothing of the processor answers late.
pub async fn answers(path: &Path, wait: Duration) -> bool {
    let look = async { Line::connect(path).await?.ask(&[LOOK, b"\n"].concat()).await };
    tokio::time::timeout(wait, look).await.is_ok_and(|told| told.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::memory::{kept_beside, recall};
    use nix::sys::stat::Mode;
    use std::os::unix::fs::OpenOptionsExt;

    const SOON: Duration = Duration::from_secs(20);

    async fn until_shut(client: &mut GateClient, shut: &Control) {
        while !client.exchange(shut).await.is_ok_and(|heard| heard.reply.shut) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// In a thread of its own, as it has a process of its own: a gate that is held by its disk does not hold the test.
    fn start_gate(path: PathBuf, ledger: Arc<Ledger>) {
        let memory = kept_beside(&path);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { serve(UnixListener::bind(path).unwrap(), ledger, memory).await });
        });
    }

    #[tokio::test]
    async fn d10_a_disk_that_hangs_holds_neither_gate_nor_fence_and_is_written_when_it_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate.sock");
        let memory = kept_beside(&path);
        // whoever opens it to write waits until somebody reads
        let hangs = memory.with_extension("tmp");
        nix::unistd::mkfifo(&hangs, Mode::S_IRWXU).unwrap();
        let ledger = Arc::new(Ledger::new(1, Control::default()));
        start_gate(path.clone(), Arc::clone(&ledger));
        let mut client = GateClient::new(path);
        let shut = Control { fenced: true, reason: "no progress".to_owned(), ..Control::default() };
        let told = tokio::time::timeout(SOON, until_shut(&mut client, &shut)).await;
        let refused = ledger.admit().is_err();
        // lets the writer go
        let reader = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&hangs).unwrap();
        told.expect("the gate waits for its disk");
        assert!(refused);
        let other = Control { reason: "still none".to_owned(), ..shut };
        let kept = async {
            // the pipe itself is renamed first, and to read it would be to wait
            while !memory.is_file() || recall(&memory) != other {
                let _ = client.exchange(&other).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, kept).await.expect("it is never written again");
        drop(reader);
    }
}
