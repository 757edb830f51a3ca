//! A client of NCCL's RAS service: asks the engine's own communication threads which ranks do not answer (S1, S3).
//!
//! The service listens on localhost:28028 in the engine's network namespace (NCCL 2.24 and later, on by default; `NCCL_RAS_ADDR`). One
//! connection every few seconds, one deadline over all of it, a cap on the answer. Nobody there is the usual case and no news.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;
use vitals::observation::{RasObs, Signal};
use vitals::ras::{RasError, Tracker, parse};

use super::clock::monotonic_ms;
use super::renew;

/// Where the service listens unless `NCCL_RAS_ADDR` says otherwise.
const DEFAULT_ADDRESS: &str = "localhost:28028";

/// NCCL's own variable, so that engine and agent need not be told twice.
pub fn address() -> String {
    std::env::var("NCCL_RAS_ADDR").unwrap_or_else(|_| DEFAULT_ADDRESS.to_owned())
}
/// How long NCCL itself may wait for a rank that is silent.
const RANK_TIMEOUT: &str = "TIMEOUT 2\n";
/// A status takes [`RANK_TIMEOUT`] where a rank is silent, and up to five seconds more where the service's network heals.
const DEADLINE: Duration = Duration::from_secs(8);
/// What an answer said holds until the next one (`ras_fresh_ms` is more than two deadlines and this).
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Between looks for a service where none is.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// A reply of the handshake, and a whole status: 600 bytes a rank and communicator.
const LINE_BYTES_MAX: usize = 1_024;
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// What is kept of an answer for the evidence: a hundred ranks.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// Why there is no status.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("nobody listens at {address}")]
    Nobody { address: String },
    #[error("could not talk to {address}: {source}")]
    Talk { address: String, source: std::io::Error },
    #[error("{address} is no NCCL RAS service: to {said:?} it answered {answered:?}")]
    Stranger { address: String, said: &'static str, answered: String },
    #[error("{address} did not answer in full within {deadline_ms} ms")]
    Deadline { address: String, deadline_ms: u128 },
    #[error("{address} sent more than {bytes_max} bytes")]
    TooLarge { address: String, bytes_max: usize },
    #[error("{address}: {source}")]
    Answer { address: String, source: RasError },
}

/// One question and its whole answer, in JSON where the service can (2.28.7 and later), else as text.
///
/// # Errors
/// When there is no service, or it does not keep to its protocol, the deadline or the cap.
pub async fn ask(address: &str, deadline: Duration) -> Result<String, AskError> {
    let talk = Talk { address };
    tokio::time::timeout(deadline, talk.status())
        .await
        .unwrap_or_else(|_| Err(AskError::Deadline { address: address.to_owned(), deadline_ms: deadline.as_millis() }))
}

/// What a service answered, word for word as far as it is kept, and when it was asked (ms of `CLOCK_MONOTONIC`).
pub type Answer = (u64, String);

/// Asks once, for the evidence; `None` where there is no such service.
///
/// # Errors
/// When there is one, and it does not answer in full within the deadline.
pub async fn ask_once(address: &str, deadline: Duration) -> Result<Option<Answer>, AskError> {
    let asked_ms = monotonic_ms();
    match ask(address, deadline).await {
        Ok(answer) => Ok(Some((asked_ms, kept(&answer)))),
        Err(AskError::Nobody { .. } | AskError::Stranger { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn kept(answer: &str) -> String {
    if answer.len() <= KEPT_BYTES_MAX {
        return answer.to_owned();
    }
    let beginning = &answer[..answer.floor_char_boundary(KEPT_BYTES_MAX)];
    format!("{beginning}\n[cut: the answer has {} bytes]\n", answer.len())
}

/// The source; its task ends when it is dropped.
#[derive(Debug)]
pub struct RasSource {
    state: Shared,
    _task: AbortOnDropHandle<()>,
}

type Shared = Arc<Mutex<RasState>>;

#[derive(Debug, Default)]
struct RasState {
    told: Signal<RasObs>,
    /// The last one, also after the service has ceased to answer.
    answer: Option<Answer>,
}

impl RasSource {
    /// Starts asking. Needs a tokio runtime.
    pub fn spawn(address: &str) -> Self {
        let state = Shared::default();
        let task = AbortOnDropHandle::new(tokio::spawn(ask_forever(address.to_owned(), Arc::clone(&state))));
        Self { state, _task: task }
    }

    /// The same as [`Self::latest`] into what was seen before; copies only what is new.
    pub fn renew(&self, seen: &mut Signal<RasObs>) {
        renew(&self.state.lock().unwrap_or_else(PoisonError::into_inner).told, seen);
    }

    /// What the newest answer says, with the moment it was asked for; nothing where nobody listens.
    pub fn latest(&self) -> Signal<RasObs> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).told.clone()
    }

    /// The last answer as it came, for the evidence.
    pub fn answer(&self) -> Option<Answer> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).answer.clone()
    }
}

async fn ask_forever(address: String, state: Shared) {
    let mut tracker = Tracker::default();
    loop {
        let asked_ms = monotonic_ms();
        let answer = ask(&address, DEADLINE).await;
        let words = answer.as_ref().ok().map(|answer| (asked_ms, kept(answer)));
        let told = answer
            .and_then(|answer| parse(&answer).map_err(|source| AskError::Answer { address: address.clone(), source }));
        let (signal, pause) = match told {
            Ok(report) => (Signal::at(asked_ms, tracker.take(report)), ASK_EVERY),
            Err(AskError::Nobody { .. }) => (Signal::default(), LOOK_EVERY),
            Err(error) => {
                let text = error.to_string().chars().take(300).collect();
                (Signal::at(asked_ms, RasObs { text, ..RasObs::default() }), LOOK_EVERY)
            }
        };
        take(&state, signal, words);
        tokio::time::sleep(pause).await;
    }
}

fn take(state: &Shared, told: Signal<RasObs>, answer: Option<Answer>) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.told = told;
    if answer.is_some() {
        state.answer = answer;
    }
}

/// One conversation.
struct Talk<'a> {
    address: &'a str,
}

impl Talk<'_> {
    async fn status(&self) -> Result<String, AskError> {
        let mut stream = TcpStream::connect(self.address).await.map_err(|source| match source.kind() {
            std::io::ErrorKind::ConnectionRefused => AskError::Nobody { address: self.address.to_owned() },
            _ => self.talk(source),
        })?;
        self.exchange(&mut stream, "CLIENT PROTOCOL 2\n", "server protocol ").await?;
        self.exchange(&mut stream, RANK_TIMEOUT, "ok").await?;
        // releases before 2.28.7 know no formats; they answer `ERROR: Unknown command …` and go on
        match self.exchange(&mut stream, "SET FORMAT json\n", "ok").await {
            Ok(()) => {}
            Err(AskError::Stranger { answered, .. }) if answered.to_ascii_lowercase().starts_with("error") => {}
            Err(error) => return Err(error),
        }
        stream.write_all(b"VERBOSE STATUS\n").await.map_err(|source| self.talk(source))?;
        self.rest(&mut stream).await
    }

    /// Says a line and wants one back that begins so, in any case of letters.
    async fn exchange(&self, stream: &mut TcpStream, said: &'static str, wanted: &str) -> Result<(), AskError> {
        stream.write_all(said.as_bytes()).await.map_err(|source| self.talk(source))?;
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') && line.len() < LINE_BYTES_MAX {
            // byte by byte: what follows the line belongs to the next reply
            let byte = stream.read_u8().await.map_err(|source| self.talk(source))?;
            line.push(byte);
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if line.to_ascii_lowercase().starts_with(wanted) {
            return Ok(());
        }
        let answered = line.chars().take(80).collect();
        Err(AskError::Stranger { address: self.address.to_owned(), said: said.trim_end(), answered })
    }

    /// Everything up to the end of the connection, which is how a status ends.
    async fn rest(&self, stream: &mut TcpStream) -> Result<String, AskError> {
        let mut answer = Vec::new();
        let mut limited = stream.take(ANSWER_BYTES_MAX as u64 + 1);
        limited.read_to_end(&mut answer).await.map_err(|source| self.talk(source))?;
        if answer.len() > ANSWER_BYTES_MAX {
            return Err(AskError::TooLarge { address: self.address.to_owned(), bytes_max: ANSWER_BYTES_MAX });
        }
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    fn talk(&self, source: std::io::Error) -> AskError {
        AskError::Talk { address: self.address.to_owned(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_answer_the_beginning_is_kept_and_how_long_it_was() {
        assert_eq!(kept("ranks: 2\n"), "ranks: 2\n");
        let answer = "ü".repeat(KEPT_BYTES_MAX);
        let kept = kept(&answer);
        assert!(kept.len() < KEPT_BYTES_MAX + 64, "{}", kept.len());
        assert!(kept.ends_with("ü\n[cut: the answer has 131072 bytes]\n"), "{}", &kept[KEPT_BYTES_MAX - 8..]);
    }
}
