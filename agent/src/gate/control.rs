//! The line between detector and gate: a Unix socket, one JSON line each way a tick. Level-triggered, so that a restart of either
//! end is healed by the next exchange. The last will of the detector is kept in a file: a gate that starts anew stays shut.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};

use super::ledger::{Control, GateReply, Ledger};
use crate::sources::clock::monotonic_ms;

/// An exchange takes well under a millisecond; a gate that needs longer than this is not waited for.
const EXCHANGE_MAX: Duration = Duration::from_millis(50);
/// How long the gate waits for a detector's next line before it drops the connection (not the fence).
const SILENCE_MAX: Duration = Duration::from_secs(10);
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Asks for the counters and wants nothing: for whoever is not the detector.
const LOOK: &str = r#"{"look":true}"#;

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
    loop {
        let line = match tokio::time::timeout(SILENCE_MAX, read_line(&mut read)).await {
            Ok(Ok(Some(line))) => line,
            _ => return,
        };
        match serde_json::from_str::<Control>(&line) {
            _ if line.trim_end() == LOOK => {}
            Ok(control) => {
                if ledger.set_control(control.clone()) {
                    remember(&memory, &control);
                }
            }
            Err(error) => tracing::warn!(%error, "the gate got a control line that it cannot read"),
        }
        let Ok(mut reply) = serde_json::to_vec(&ledger.reply(monotonic_ms())) else { return };
        reply.push(b'\n');
        if write.write_all(&reply).await.is_err() {
            return;
        }
    }
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

/// The detector's end. Reconnects by itself.
#[derive(Debug)]
pub struct GateClient {
    path: PathBuf,
    stream: Option<(BufReader<OwnedReadHalf>, OwnedWriteHalf)>,
}

impl GateClient {
    /// Connects with the first exchange.
    pub fn new(path: PathBuf) -> Self {
        Self { path, stream: None }
    }

    /// Tells the gate what is wanted and takes its counters. Bounded by 50 ms.
    ///
    /// # Errors
    /// When the gate is away or does not answer in time; the next call tries anew.
    pub async fn exchange(&mut self, control: &Control) -> io::Result<GateReply> {
        let answer = tokio::time::timeout(EXCHANGE_MAX, self.try_exchange(control)).await;
        let answer = answer.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
        if answer.is_err() {
            // A late reply on this stream would be taken for the answer to a later question.
            self.stream = None;
        }
        answer
    }

    /// Takes the gate's counters and tells it nothing: its fence stays as the detector wants it. Bounded by 50 ms.
    ///
    /// # Errors
    /// As [`GateClient::exchange`].
    pub async fn look(&mut self) -> io::Result<GateReply> {
        let answer = tokio::time::timeout(EXCHANGE_MAX, self.ask(LOOK.as_bytes().to_vec())).await;
        let answer = answer.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
        if answer.is_err() {
            self.stream = None;
        }
        answer
    }

    async fn try_exchange(&mut self, control: &Control) -> io::Result<GateReply> {
        self.ask(serde_json::to_vec(control)?).await
    }

    async fn ask(&mut self, mut line: Vec<u8>) -> io::Result<GateReply> {
        let (read, write) = match &mut self.stream {
            Some(stream) => stream,
            none => {
                let (read, write) = UnixStream::connect(&self.path).await?.into_split();
                none.insert((BufReader::new(read), write))
            }
        };
        line.push(b'\n');
        write.write_all(&line).await?;
        let reply = read_line(read).await?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        Ok(serde_json::from_str(&reply)?)
    }
}

async fn read_line(read: &mut BufReader<OwnedReadHalf>) -> io::Result<Option<String>> {
    use tokio::io::AsyncReadExt;
    let mut line = String::new();
    let n = read.take(LINE_BYTES_MAX).read_line(&mut line).await?;
    Ok((n > 0 && line.ends_with('\n')).then_some(line))
}
