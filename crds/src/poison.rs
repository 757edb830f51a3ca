//! Poison requests (I7): a request that was in flight at two stalls is refused, before it stalls a third replica. What agents report of a
//! stall, what the operator hands to the gates, and the rule between them. Pure; times are milliseconds after 1970.
//!
//! The rule errs on the side of serving. A request that was lately answered is innocent: probes and popular prompts are in flight at
//! every stall, and at both when two replicas stall at once. What one replica reports condemns for that replica alone: whoever owns one
//! pod must not be able to have somebody's requests refused everywhere. And where very many are equally suspect, none of them is
//! refused: it is not them.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Pod annotation, written by the operator alone: what this pod's gate refuses, as JSON ([`write`], [`read`]).
pub const ANNOTATION_POISON: &str = "truebeat.io/poison";
/// Requests of one stall that are told.
pub const IN_FLIGHT_MAX: usize = 128;
/// Requests that one gate refuses.
pub const REFUSED_MAX: usize = 32;
const TEXT_BYTES_MAX: usize = 16 << 10;
const STALLS_MIN: usize = 2;
/// How far a replica's clock may run ahead of the operator's.
pub const AHEAD_MS_MAX: i64 = 300_000;

/// A request that was in flight when a stall began.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct InFlight {
    /// Fingerprint of the request, 16 hex digits: model, prompt and parameters, hashed; nothing of them can be read from it.
    #[schemars(length(max = 16))]
    pub request: String,
    /// When this replica last answered such a request whole, RFC 3339. Absent: never, as far as it remembers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub completed_at: Option<String>,
}

/// One stall, as the rule sees it.
#[derive(Debug, Clone)]
pub struct Stall<'a> {
    /// Whose: the pod's UID, as the API server knows it.
    pub replica: &'a str,
    pub at_ms: i64,
    pub in_flight: &'a [InFlight],
}

/// A request that a gate refuses.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    pub request: String,
    /// A gate that has seen such a request succeed since then does not refuse it.
    pub since_ms: i64,
    pub until_ms: i64,
    /// How many stalls count.
    pub stalls: usize,
}

impl Refused {
    /// In words, for people.
    pub fn words(&self) -> String {
        let until = jiff::Timestamp::from_millisecond(self.until_ms).map(|at| format!("{at:.0}")).unwrap_or_default();
        format!("such requests as {} get 422 until {until}: in flight at {} stalls", self.request, self.stalls)
    }
}

/// Is it a fingerprint as agents write them?
pub fn is_fingerprint(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// What the gate of `replica` must refuse, for `keep_ms` after the last stall.
pub fn refused(stalls: &[Stall<'_>], replica: &str, keep_ms: i64, now_ms: i64) -> Vec<Refused> {
    let mut all = Refusals::of(stalls, keep_ms, now_ms);
    all.own.remove(replica).unwrap_or(all.others)
}

/// What all gates must refuse. In one go, for every stall may tell of a hundred requests, and of a deployment that stalls as a whole there are
/// hundreds of stalls.
///
/// The more stalls, the surer: requests are condemned by their number of stalls, the highest first, as long as all with an equal number
/// find room. By fingerprint, so that equal stalls give equal text.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// The gates of replicas that were stalled twice by something that has stalled nobody else.
    pub own: BTreeMap<String, Vec<Refused>>,
    pub others: Vec<Refused>,
}

impl Refusals {
    pub fn of(stalls: &[Stall<'_>], keep_ms: i64, now_ms: i64) -> Self {
        let (mut shared, mut own): (Vec<Refused>, BTreeMap<&str, Vec<Refused>>) = Default::default();
        for (request, record) in records(stalls, now_ms) {
            let innocent = |one: &Refused| record.answered_ms.is_some_and(|answered_ms| answered_ms >= one.since_ms);
            let condemned = condemn(request, record.stalls, keep_ms);
            match condemned.filter(|(one, _)| now_ms < one.until_ms && !innocent(one)) {
                Some((one, None)) => shared.push(one),
                Some((one, Some(replica))) => own.entry(replica).or_default().push(one),
                None => {}
            }
        }
        // what comes after these finds no room, whatever comes between
        shared.sort_by_key(|one| std::cmp::Reverse(one.stalls));
        shared.truncate(REFUSED_MAX + 1);
        let with = |own: Vec<Refused>| surest(shared.iter().cloned().chain(own));
        let own = own.into_iter().map(|(replica, own)| (replica.to_owned(), with(own))).collect();
        Self { own, others: surest(shared.iter().cloned()) }
    }
}

/// Those that find room.
fn surest(condemned: impl Iterator<Item = Refused>) -> Vec<Refused> {
    let mut by_count: BTreeMap<usize, Vec<Refused>> = BTreeMap::new();
    condemned.for_each(|one| by_count.entry(one.stalls).or_default().push(one));
    let mut all = Vec::new();
    for (_, equal) in by_count.into_iter().rev() {
        if all.len() + equal.len() > REFUSED_MAX {
            break;
        }
        all.extend(equal);
    }
    all.sort_by(|a: &Refused, b: &Refused| a.request.cmp(&b.request));
    all
}

/// What is known of one fingerprint.
#[derive(Debug, Default)]
struct Record<'a> {
    stalls: BTreeSet<(i64, &'a str)>,
    answered_ms: Option<i64>,
}

fn records<'a>(stalls: &[Stall<'a>], now_ms: i64) -> BTreeMap<&'a str, Record<'a>> {
    let mut records: BTreeMap<&str, Record<'a>> = BTreeMap::new();
    // what is told of a far future is nothing to count with: a clock that runs ahead would have requests refused for as much longer
    for stall in stalls.iter().filter(|stall| stall.at_ms.saturating_sub(now_ms) <= AHEAD_MS_MAX) {
        let at_ms = stall.at_ms;
        for one in stall.in_flight.iter().take(IN_FLIGHT_MAX).filter(|one| is_fingerprint(&one.request)) {
            let record = records.entry(one.request.as_str()).or_default();
            record.answered_ms = record.answered_ms.max(one.completed_at.as_deref().and_then(milliseconds));
            record.stalls.insert((at_ms, stall.replica));
        }
    }
    records
}

/// By two replicas for everybody (`None`); by one replica twice for that one. Stalls count that are no further from the last one than `keep_ms`.
fn condemn<'a>(
    request: &str,
    mut stalls: BTreeSet<(i64, &'a str)>,
    keep_ms: i64,
) -> Option<(Refused, Option<&'a str>)> {
    let (last_ms, _) = stalls.last().copied()?;
    let (since_ms, until_ms) = (last_ms.saturating_sub(keep_ms), last_ms.saturating_add(keep_ms));
    stalls.retain(|(at_ms, _)| *at_ms > since_ms);
    let (_, first) = stalls.first().copied()?;
    let alone = stalls.iter().all(|(_, of)| *of == first);
    let count = stalls.len();
    let one = || Refused { request: request.to_owned(), since_ms, until_ms, stalls: count };
    (count >= STALLS_MIN).then(|| (one(), alone.then_some(first)))
}

/// RFC 3339 as milliseconds after 1970; nothing where it is no time.
pub fn milliseconds(at: &str) -> Option<i64> {
    at.parse::<jiff::Timestamp>().ok().map(|at| at.as_millisecond())
}

/// The annotation's text; nothing where nothing is refused.
pub fn write(refused: &[Refused]) -> Option<String> {
    (!refused.is_empty()).then(|| serde_json::to_string(refused).ok()).flatten()
}

/// What the annotation says. A text that cannot be read refuses nothing.
pub fn read(text: &str) -> Vec<Refused> {
    let short = (text.len() <= TEXT_BYTES_MAX).then_some(text);
    let read: Vec<Refused> = short.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    read.into_iter().filter(|one| is_fingerprint(&one.request)).take(REFUSED_MAX).collect()
}

#[cfg(test)]
#[path = "poison_tests.rs"]
mod tests;
