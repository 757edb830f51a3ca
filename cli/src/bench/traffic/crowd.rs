//! A crowd of clients, each with one request after the other, and what they counted.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::task::JoinSet;

use super::ask::{self, Ask};
use super::outcome::{Answer, Outcome, send};
use crate::http::{HttpClient, client};

/// Every so many turns a client asks for all at once.
const BURST_EVERY: u64 = 40;
const BURST: u64 = 4;

/// What a client waits that was told to come back later: the least that is ever said.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What clients saw.
#[derive(Debug, Default)]
pub struct Counts {
    ends: BTreeMap<Outcome, u64>,
    /// Answers, and beginnings of answers, that were compared with their reference.
    pub compared: u64,
    /// Tokens that clients heard at least, and that they asked for at most.
    pub tokens_heard: u64,
    pub tokens_asked: u64,
    /// Requests that can only fail.
    pub poisoned: u64,
    /// Requests without exactly one true end.
    pub lies: Vec<String>,
    /// Answers with other bytes than their reference.
    pub differ: Vec<String>,
}

impl Counts {
    fn take(&mut self, ask: &Ask, answer: Answer, references: &[String]) {
        if let Some(reference) = ask.reference.and_then(|index| references.get(index)) {
            let whole = answer.outcome == Outcome::Completed;
            let same = if whole { answer.text == *reference } else { reference.starts_with(&answer.text) };
            self.compared += u64::from(!answer.text.is_empty());
            if !same {
                self.differ.push(format!("{:?} instead of {reference:?}", answer.text));
            }
        }
        let whole = answer.outcome == Outcome::Completed && ask.exact;
        self.tokens_heard += if whole { ask.tokens_max } else { answer.tokens };
        self.tokens_asked += ask.tokens_max;
        self.poisoned += u64::from(ask.poisoned);
        match answer.outcome {
            Outcome::False(why) => {
                self.lies.push(format!("{why}; asked {}", ask.body.chars().take(200).collect::<String>()))
            }
            Outcome::Completed if ask.wrong => self.lies.push(format!("answered, though it is wrong: {}", ask.body)),
            outcome => self.end(outcome),
        }
    }

    /// One more ended so.
    pub fn end(&mut self, outcome: Outcome) {
        *self.ends.entry(outcome).or_default() += 1;
    }

    /// Takes in what others saw.
    pub fn add(&mut self, other: Self) {
        other.ends.into_iter().for_each(|(outcome, count)| *self.ends.entry(outcome).or_default() += count);
        self.compared += other.compared;
        self.tokens_heard += other.tokens_heard;
        self.tokens_asked += other.tokens_asked;
        self.poisoned += other.poisoned;
        self.lies.extend(other.lies);
        self.differ.extend(other.differ);
    }

    pub fn of(&self, outcome: &Outcome) -> u64 {
        self.ends.get(outcome).copied().unwrap_or(0)
    }

    pub fn posted(&self) -> u64 {
        self.ends.values().sum::<u64>() + self.lies.len() as u64
    }

    /// Did every end come that comes where nothing is wrong?
    pub fn all_kinds(&self) -> bool {
        let kinds = [Outcome::Completed, Outcome::Left, Outcome::TimedOut, Outcome::ToldWrong, Outcome::Failed];
        kinds.iter().all(|end| self.of(end) > 0)
    }

    /// Each end's name and number.
    pub fn lines(&self) -> [(&'static str, u64); 8] {
        [
            ("completed", Outcome::Completed),
            ("left", Outcome::Left),
            ("refused", Outcome::Refused),
            ("timed_out", Outcome::TimedOut),
            ("told_wrong", Outcome::ToldWrong),
            ("suspected", Outcome::Suspected),
            ("broken", Outcome::Broken),
            ("poisoned_failed", Outcome::Failed),
        ]
        .map(|(name, outcome)| (name, self.of(&outcome)))
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().iter().try_for_each(|(name, count)| write!(f, "{count} {name}, "))?;
        write!(f, "{} without a true end, {} with other bytes", self.lies.len(), self.differ.len())
    }
}

/// A running crowd.
#[derive(Debug)]
pub struct Crowd {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<Counts>,
}

impl Crowd {
    /// Starts `clients` clients against the gate.
    pub fn start(gate: &str, clients: u64, seed: u64, references: &[String]) -> Self {
        let (stop, references, mut tasks) =
            (Arc::new(AtomicBool::new(false)), Arc::new(references.to_vec()), JoinSet::new());
        for number in 0..clients {
            let one =
                Client { http: client(), gate: gate.to_owned(), seed, number, references: Arc::clone(&references) };
            tasks.spawn(one.run(Arc::clone(&stop)));
        }
        Self { stop, tasks }
    }

    /// Lets everybody come to the end of the request it is in; whoever does not within `grace` was forgotten, and counts so.
    pub async fn stop(mut self, grace: Duration) -> Counts {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Counts::default();
        let join = async {
            while let Some(counts) = self.tasks.join_next().await {
                all.add(counts.unwrap_or_default());
            }
        };
        if tokio::time::timeout(grace, join).await.is_err() {
            all.lies.push(format!("{} clients wait still", self.tasks.len()));
            self.tasks.abort_all();
        }
        all
    }
}

struct Client {
    http: HttpClient,
    gate: String,
    seed: u64,
    number: u64,
    references: Arc<Vec<String>>,
}

impl Client {
    async fn run(self, stop: Arc<AtomicBool>) -> Counts {
        let (mut counts, mut turn) = (Counts::default(), 0);
        while !stop.load(Ordering::Relaxed) {
            let burst = if (turn + self.number).is_multiple_of(BURST_EVERY) { BURST } else { 1 };
            let asks: Vec<Ask> = (turn..turn + burst).map(|turn| ask::next(self.seed, self.number, turn)).collect();
            turn += burst;
            let answers = futures::future::join_all(asks.iter().map(|ask| send(&self.http, &self.gate, ask))).await;
            let refused = answers.iter().any(|answer| answer.outcome == Outcome::Refused);
            asks.iter().zip(answers).for_each(|(ask, answer)| counts.take(ask, answer, &self.references));
            let think = Duration::from_millis(ask::think_ms(self.seed, self.number, turn));
            tokio::time::sleep(if refused { RETRY_AFTER } else { think }).await;
        }
        counts
    }
}

/// Asks every reference alone, whole; returns what was said.
///
/// # Errors
/// When one is not answered.
pub async fn ask_references(http: &HttpClient, gate: &str) -> anyhow::Result<Vec<String>> {
    let mut said = Vec::new();
    for index in 0..ask::REFERENCES {
        let answer = send(http, gate, &ask::reference(index, false)).await;
        if answer.outcome != Outcome::Completed {
            bail!("reference {index}, asked alone: {:?}", answer.outcome);
        }
        said.push(answer.text);
    }
    let first = said.first().context("there are no references")?;
    if said.iter().all(|text| text == first) {
        bail!("all references say the same: nothing could be seen by them");
    }
    Ok(said)
}
