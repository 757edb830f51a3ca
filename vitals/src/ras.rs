//! What NCCL's RAS service (2.24 and later, port 28028) answers to `VERBOSE STATUS`: the JSON of 2.28.7 and later, and the text of all.
//!
//! Two kinds of ranks are silent: those that the service itself could not reach, and those that stand behind the others in their
//! collective operations *and stay there*. Being behind in one answer is normal: healthy ranks outpace the query.
//!
//! Each communicator numbers its ranks anew. Only one of all the job's ranks, the world, has the numbers that pages and people know: what is
//! silent in another is told in words and names no rank.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use crate::observation::RasObs;

/// Characters of the sentence for people.
const TEXT_CHARS_MAX: usize = 300;
/// Ranks, communicators and kinds of operations that are kept of one answer; what is beyond is left out.
const RANKS_MAX: usize = 4_096;
const COMMUNICATORS_MAX: usize = 512;

/// Why an answer was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RasError {
    #[error("the answer is empty")]
    Empty,
    #[error("the answer is JSON of another shape: {0}")]
    Json(String),
    #[error("the answer is no RAS status; it begins {0:?}")]
    NoStatus(String),
}

/// One answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    pub communicators: Vec<Communicator>,
    /// GPUs of the whole job; 0 where that is not told.
    pub gpus: u32,
    /// Processes that the service lost altogether, in its words; their ranks may be unknown.
    pub lost: Vec<String>,
}

/// One communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Communicator {
    pub hash: String,
    /// How many ranks it has; 0 where that is not told.
    pub size: u32,
    /// Ranks that did not answer the service.
    pub missing: BTreeSet<u32>,
    /// Operations launched, by kind: the furthest that any rank has come, and the ranks that are told apart.
    pub furthest: BTreeMap<String, u64>,
    pub launched: BTreeMap<(String, u32), u64>,
}

/// Reads an answer of either form.
///
/// # Errors
/// When it is neither.
pub fn parse(answer: &str) -> Result<Report, RasError> {
    let answer = answer.trim();
    match answer.chars().next() {
        None => Err(RasError::Empty),
        Some('{') => json(answer),
        Some(_) => text(answer),
    }
}

/// Follows the answers of one job.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    last: Option<Report>,
}

impl Tracker {
    /// What an answer says in the light of the one before.
    pub fn take(&mut self, report: Report) -> RasObs {
        let world = report.world();
        let missing = report.communicators.iter().flat_map(|c| c.missing.iter().map(move |rank| (c, *rank, None)));
        let stuck = self.stuck(&report).into_iter().map(|(c, rank, kind)| (c, rank, Some(kind)));
        let (mut silent, mut elsewhere) = (BTreeSet::new(), None);
        let mut text = report.lost.first().cloned();
        for (communicator, rank, kind) in missing.chain(stuck) {
            let Communicator { hash, size, .. } = communicator;
            let words = || match kind {
                Some(kind) => format!("rank {rank} stays behind in {kind} of communicator {hash}"),
                None => format!("RAS has no answer from rank {rank} of communicator {hash}"),
            };
            if world == Some(*size) {
                text = text.or_else(|| Some(words()));
                silent.insert(rank);
            } else {
                elsewhere =
                    elsewhere.or_else(|| Some(format!("{}, which has {size} ranks and numbers of its own", words())));
            }
        }
        let (silent_elsewhere, text) = (elsewhere.is_some(), text.or(elsewhere).unwrap_or_default());
        self.last = Some(report);
        RasObs {
            silent_ranks: silent.into_iter().take(RANKS_MAX).collect(),
            silent_elsewhere,
            answered: true,
            text: text.chars().take(TEXT_CHARS_MAX).collect(),
        }
    }

    /// Behind the furthest rank, and neither it nor the furthest has moved since the last answer.
    fn stuck<'a>(&self, report: &'a Report) -> Vec<(&'a Communicator, u32, &'a str)> {
        let mut found = Vec::new();
        for now in &report.communicators {
            let before = self.last.iter().flat_map(|last| &last.communicators).find(|before| before.hash == now.hash);
            let Some(before) = before else { continue };
            for ((kind, rank), launched) in &now.launched {
                let furthest = now.furthest.get(kind).copied().unwrap_or(0);
                let stands = before.launched.get(&(kind.clone(), *rank)) == Some(launched)
                    && before.furthest.get(kind) == Some(&furthest);
                if *launched < furthest && stands {
                    found.push((now, *rank, kind.as_str()));
                }
            }
        }
        found
    }
}

impl Report {
    /// How large the communicator of all ranks is. `None`: there is none, for the largest leaves GPUs of the job out.
    fn world(&self) -> Option<u32> {
        let largest = self.communicators.iter().map(|communicator| communicator.size).max()?;
        (largest == 0 || largest >= self.gpus).then_some(largest)
    }
}

#[derive(Debug, Deserialize)]
struct JsonReport {
    communicators: Vec<JsonCommunicator>,
}

#[derive(Debug, Deserialize)]
struct JsonCommunicator {
    hash: String,
    #[serde(default)]
    size: u32,
    #[serde(default)]
    ranks: Vec<JsonRank>,
    #[serde(default)]
    missing_ranks: Vec<JsonMissing>,
}

#[derive(Debug, Deserialize)]
struct JsonRank {
    rank: u32,
    #[serde(flatten)]
    place: JsonPlace,
    #[serde(default)]
    collective_counts: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
struct JsonMissing {
    rank: u32,
    #[serde(flatten)]
    place: JsonPlace,
    #[serde(default)]
    status: JsonMissingStatus,
}

/// Which GPU of which process a rank is; only compared, so whatever stands there will do.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct JsonPlace {
    host: Value,
    pid: Value,
    cuda_dev: Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct JsonMissingStatus {
    unresponsive: bool,
    considered_dead: bool,
}

fn json(answer: &str) -> Result<Report, RasError> {
    let told: JsonReport = serde_json::from_str(answer).map_err(|error| RasError::Json(error.to_string()))?;
    let mut gpus = BTreeSet::new();
    let communicators = told.communicators.into_iter().take(COMMUNICATORS_MAX).map(|told| {
        let places = told.ranks.iter().map(|rank| &rank.place).chain(told.missing_ranks.iter().map(|rank| &rank.place));
        for JsonPlace { host, pid, cuda_dev } in places.filter(|place| !place.pid.is_null()).take(RANKS_MAX) {
            gpus.insert(format!("{host} {pid} {cuda_dev}"));
        }
        // a rank that answers but is no member (yet, or any more) is missing without being silent
        let silent = |missing: &&JsonMissing| missing.status.unresponsive || missing.status.considered_dead;
        let mut communicator = Communicator {
            hash: told.hash,
            size: told.size,
            missing: told.missing_ranks.iter().filter(silent).map(|missing| missing.rank).collect(),
            ..Communicator::default()
        };
        for rank in told.ranks.into_iter().take(RANKS_MAX) {
            for (kind, launched) in rank.collective_counts {
                communicator.launched(&kind, Some(rank.rank), launched);
            }
        }
        communicator
    });
    let communicators = communicators.collect();
    let gpus = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    Ok(Report { communicators, gpus, lost: Vec::new() })
}

impl Communicator {
    fn launched(&mut self, kind: &str, rank: Option<u32>, launched: u64) {
        let furthest = self.furthest.entry(kind.to_owned()).or_insert(0);
        *furthest = launched.max(*furthest);
        if let Some(rank) = rank.filter(|_| self.launched.len() < RANKS_MAX * 8) {
            self.launched.insert((kind.to_owned(), rank), launched);
        }
    }
}

/// Which part of the text a line stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Elsewhere,
    /// Processes that were lost: `INCOMPLETE` and `DEAD` of the job.
    Lost,
    /// `#0-0 (hash) INCOMPLETE`.
    Missing,
    /// `#0-0 (hash) MISMATCH`, in a group of ranks that have launched this many operations of this kind.
    Counts {
        kind: String,
        group: Option<u64>,
    },
}

fn text(answer: &str) -> Result<Report, RasError> {
    // every status has this, whatever else it says
    if !answer.contains("NCCL version ") && !answer.contains("Communicators...") && !answer.contains("Job summary") {
        return Err(RasError::NoStatus(answer.chars().take(60).collect()));
    }
    let mut report = Report::default();
    let mut part = Part::Elsewhere;
    let mut sizes = BTreeMap::new();
    for line in answer.lines() {
        let line = line.trim();
        if report.communicators.is_empty() {
            table(line, &mut report.gpus, &mut sizes);
        }
        if let Some(next) = head(line, &sizes, &mut report) {
            part = next;
        } else if line.is_empty() {
            continue;
        } else {
            part = body(line, part, &mut report);
        }
    }
    Ok(report)
}

/// Rows of numbers in the two tables before the parts: GPUs of the job are the last of five columns, ranks per communicator the fifth of
/// six, behind the number of a group and before words.
fn table(line: &str, gpus: &mut u32, sizes: &mut BTreeMap<u32, u32>) {
    let numeric = |field: &&str| field.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    let fields: Vec<&str> = line.split_whitespace().take_while(numeric).collect();
    let at = |column: usize| fields.get(column).and_then(|field| first_number::<u32>(field));
    match fields.len() {
        5 => *gpus = at(4).unwrap_or(0),
        6 if sizes.len() < COMMUNICATORS_MAX => sizes.extend(at(0).zip(at(4))),
        _ => {}
    }
}

/// A line that begins a part.
fn head(line: &str, sizes: &BTreeMap<u32, u32>, report: &mut Report) -> Option<Part> {
    if matches!(line, "INCOMPLETE" | "DEAD") {
        return Some(Part::Lost);
    }
    if matches!(line, "TIMEOUT" | "Errors" | "Warnings" | "ERROR") {
        return Some(Part::Elsewhere);
    }
    let (number, rest) = line.strip_prefix('#')?.split_once(" (")?;
    let (hash, what) = rest.split_once(") ")?;
    let size = first_number(number).and_then(|group: u32| sizes.get(&group)).copied().unwrap_or(0);
    if report.communicators.len() >= COMMUNICATORS_MAX {
        return Some(Part::Elsewhere);
    }
    // errors and warnings on one communicator come in different places
    if report.communicators.last().is_none_or(|last| last.hash != hash) {
        let known = report.communicators.iter().position(|known| known.hash == hash);
        let entry = known.map_or_else(
            || Communicator { hash: hash.to_owned(), size, ..Communicator::default() },
            |at| report.communicators.remove(at),
        );
        report.communicators.push(entry);
    }
    match what {
        "INCOMPLETE" => Some(Part::Missing),
        "MISMATCH" => Some(Part::Counts { kind: String::new(), group: None }),
        _ => Some(Part::Elsewhere),
    }
}

fn body(line: &str, part: Part, report: &mut Report) -> Part {
    let Some(communicator) = report.communicators.last_mut() else {
        return lost(line, part, &mut report.lost);
    };
    match part {
        Part::Lost | Part::Elsewhere => lost(line, part, &mut report.lost),
        Part::Missing => {
            communicator.missing.extend(missing(line).into_iter().take(RANKS_MAX));
            Part::Missing
        }
        Part::Counts { kind, group } => counts(line, kind, group, communicator),
    }
}

fn lost(line: &str, part: Part, lost: &mut Vec<String>) -> Part {
    if part == Part::Lost && line.starts_with("Process ") && lost.len() < RANKS_MAX {
        lost.push(format!("RAS lost a process: {line}"));
    }
    part
}

/// `Rank 21 -- GPU 5 managed by …` of today, `The missing ranks: 5-7,21` of before 2.26.
fn missing(line: &str) -> Vec<u32> {
    if let Some(rank) = line.strip_prefix("Rank ") {
        return first_number(rank).into_iter().collect();
    }
    let Some((_, list)) = line.strip_prefix("The missing rank").and_then(|rest| rest.split_once(':')) else {
        return Vec::new();
    };
    let mut ranks = Vec::new();
    for item in list.split(',') {
        let mut ends = item.splitn(2, '-').map(|end| end.trim().parse::<u32>().ok());
        match (ends.next().flatten(), ends.next()) {
            (Some(from), Some(Some(to))) => ranks.extend((from..=to).take(RANKS_MAX)),
            (Some(rank), _) => ranks.push(rank),
            (None, _) => {}
        }
    }
    ranks
}

/// Lines of `Communicator ranks have different AllReduce operation counts`.
fn counts(line: &str, kind: String, group: Option<u64>, communicator: &mut Communicator) -> Part {
    if let Some(rest) = line.strip_prefix("Communicator ranks have different ") {
        let kind = rest.strip_suffix(" operation counts").unwrap_or("").to_owned();
        return Part::Counts { kind, group: None };
    }
    // a difference of status is no count
    let told = if kind.is_empty() { None } else { operation(line) };
    if let Some(rank) = line.strip_prefix("Rank ").and_then(first_number) {
        if let Some(launched) = told.or(group) {
            communicator.launched(&kind, Some(rank), launched);
        }
        return Part::Counts { kind, group };
    }
    if let Some(launched) = told {
        communicator.launched(&kind, None, launched);
        return Part::Counts { kind, group: Some(launched) };
    }
    Part::Counts { kind, group }
}

fn operation(line: &str) -> Option<u64> {
    if line.contains("not launched any operations") {
        return Some(0);
    }
    line.split_once("launched up to operation ").and_then(|(_, rest)| first_number(rest))
}

fn first_number<T: std::str::FromStr>(text: &str) -> Option<T> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).map_or(text, |end| text.get(..end).unwrap_or(""));
    digits.parse().ok()
}
