//! The line between detector and gate: a Unix socket, JSON lines. The detector says what it wants and takes all counters in the same
//! exchange; level-triggered, so that a restart of either end is healed by the next one. A gate that owed nothing says by itself when
//! work comes, so that an idle one need not be asked ten times a second.
//!
//! The last will of the detector is kept in a file: a gate that starts anew stays shut.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use heartbeat::counts::COUNTS;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedReadHalf;
use tokio::net::{UnixListener, UnixStream};

use super::ledger::{Control, GateReply, Ledger};
use super::line::Line;
use super::suspects::Suspect;
use crate::sources::clock::monotonic_ms;

/// An exchange takes well under a millisecond; a gate that needs longer than this is not waited for.
const EXCHANGE_MAX: Duration = Duration::from_millis(50);
/// How long the gate waits for a detector's next line before it drops the connection (not the fence).
const SILENCE_MAX: Duration = Duration::from_secs(10);
pub(super) const LINE_BYTES_MAX: usize = 64 << 10;
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
}

/// The gate's end: serves every detector that connects, for ever.
pub async fn serve(listener: UnixListener, ledger: Arc<Ledger>, memory: PathBuf) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve_one(stream, Arc::clone(&ledger), memory.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "the gate's control socket did not accept");
                tokio::time::sleep(EXCHANGE_MAX).await;
            }
        }
    }
}

async fn serve_one(stream: UnixStream, ledger: Arc<Ledger>, memory: PathBuf) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut beginnings = ledger.beginnings();
    let (mut line, mut told, mut heard) = (Vec::new(), Vec::new(), 0);
    // once an answer at most: whoever hears that work came asks what it is
    let mut shall_tell = false;
    loop {
        let asked = tokio::select! {
            asked = tokio::time::timeout(SILENCE_MAX, read_line(&mut read, &mut line)) => match asked {
                Ok(Ok(true)) => true,
                _ => return,
            },
            _ = beginnings.changed(), if shall_tell => false,
        };
        let now_ms = monotonic_ms();
        let mut suspects = None;
        if asked {
            heard += 1;
            suspects = (line.trim_ascii_end() == SUSPECTS).then(|| ledger.suspects(now_ms));
            obey(&line, &ledger, &memory);
            line.clear();
        }
        beginnings.mark_unchanged();
        let reply = ledger.reply(now_ms);
        shall_tell = asked && reply.obs.in_flight == 0;
        let counts = if heard == 1 { ledger.counts_path() } else { None };
        told.clear();
        if serde_json::to_writer(&mut told, &Told { heard, at_ms: now_ms, reply, suspects, counts }).is_err() {
            return;
        }
        told.push(b'\n');
        if write.write_all(&told).await.is_err() {
            return;
        }
    }
}

fn obey(line: &[u8], ledger: &Ledger, memory: &Path) {
    if [LOOK, SUSPECTS].contains(&line.trim_ascii_end()) {
        return;
    }
    match serde_json::from_slice::<Control>(line) {
        Ok(control) => {
            if ledger.set_control(control.clone()) {
                remember(memory, &control);
            }
        }
        Err(error) => tracing::warn!(%error, "the gate got a control line that it cannot read"),
    }
}

/// Where a gate with this directory is spoken to.
pub fn socket_in(agent_dir: &Path) -> PathBuf {
    agent_dir.join("gate.sock")
}

/// Where a gate with this socket keeps what it was told last.
pub fn kept_beside(socket: &Path) -> PathBuf {
    socket.with_extension("state")
}

/// What the last detector wanted of the last gate; open where nobody said anything.
pub fn recall(memory: &Path) -> Control {
    std::fs::read(memory).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

fn remember(memory: &Path, control: &Control) {
    if let Err(error) = crate::files::write_json(memory, control) {
        tracing::warn!(%error, "the gate cannot remember its state; a restart will open it until the detector's next word");
    }
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

/// Reads on in a line; true when it is whole, false at the end of the stream and where it has no end.
async fn read_line(read: &mut BufReader<OwnedReadHalf>, line: &mut Vec<u8>) -> io::Result<bool> {
    let room = LINE_BYTES_MAX.saturating_sub(line.len()) as u64;
    read.take(room).read_until(b'\n', line).await?;
    Ok(line.ends_with(b"\n"))
}
