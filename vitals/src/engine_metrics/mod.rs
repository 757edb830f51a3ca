//! From a page of metrics to meanings. The names are data ([`tables`]); here is how series become numbers: ranks, copies, duplicates,
//! values that cannot be. An engine that lacks a series has `None`, never zero; so has one whose value makes no sense (G3).

mod meter;
pub mod tables;

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

pub use self::meter::Meter;
pub use self::tables::EngineKind;
use self::tables::{COMMON, ENGINES, EngineTable, Meaning, Series};
use crate::exposition::{Exposition, Sample};
use crate::observation::{MetricsObs, RankMetrics};

/// Above this an `f64` cannot count: an increment of one is lost, so that a live counter would look frozen.
const COUNT_MAX: f64 = 9_007_199_254_740_992.0;
/// Labels that tell copies of one scheduler's numbers apart: the largest counts, they are not added up.
const COPIES: [&str; 4] = ["tp_rank", "pp_rank", "moe_ep_rank", "ep_rank"];
/// Labels that name a data-parallel rank: each is a scheduler of its own.
const RANKS: [&str; 2] = ["engine", "dp_rank"];
/// Ranks that are told apart; more are added up all the same.
const RANKS_MAX: usize = 64;

/// Whose page it is, by the prefixes of its series.
pub fn detect_engine(page: &Exposition) -> Option<EngineKind> {
    let has = |table: &&EngineTable| {
        page.samples.iter().any(|sample| table.prefixes.iter().any(|prefix| sample.name.starts_with(prefix)))
    };
    ENGINES.iter().find(has).map(|table| table.kind)
}

/// Would [`map`] read a sample of this name? A scraper may leave all others unparsed.
pub fn is_known(name: &str) -> bool {
    lookup(name).next().is_some()
        || COMMON.iter().any(|(common, _)| *common == name)
        || name.ends_with(":engine_sleep_state")
}

/// Maps a page to meanings, knowing nothing of the page before: the digest changes whenever a series of progress does. A scraper,
/// which sees every page, uses [`Meter`], for which a counter that falls is no progress (G4).
pub fn map(page: &Exposition) -> MetricsObs {
    let readings = read(page, |rank| rank);
    let (mut digest, mut counters) = (Fnv(Fnv::START), Fnv(Fnv::START));
    let mut ranks: BTreeMap<u32, Fnv> = BTreeMap::new();
    for reading in readings.iter().filter(|reading| reading.series.meaning.proves_progress()) {
        digest.mix(reading.value);
        if reading.series.meaning.is_counter() {
            counters.mix(reading.value);
        }
        if let Some(rank) = reading.rank {
            ranks.entry(rank).or_insert(Fnv(Fnv::START)).mix(reading.value);
        }
    }
    let mut obs = meanings(page, &readings);
    (obs.progress_digest, obs.counters_digest) = (digest.0, counters.0);
    for rank in &mut obs.ranks {
        rank.progress_digest = ranks.get(&rank.rank).map_or(Fnv::START, |digest| digest.0);
    }
    obs
}

/// One number of one rank.
#[derive(Debug, Clone, Copy)]
struct Reading {
    series: &'static Series,
    /// Place in its table: the first present name of a meaning counts.
    place: usize,
    /// `None` where no label names one: it is of all, and no rank's progress.
    rank: Option<u32>,
    /// `NaN` where a sample of it made no sense.
    value: f64,
}

/// A series of a rank, in the order of the tables.
type Place = (usize, &'static str, Meaning, Option<u32>);

fn lookup(name: &str) -> impl Iterator<Item = (usize, &'static Series)> + '_ {
    ENGINES.iter().flat_map(move |table| {
        let bare = table.prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
        let all = table.series.iter().enumerate();
        all.filter(move |(_, series)| bare == Some(series.name))
    })
}

/// Every known series, one reading a rank: parts added up, copies not.
fn read(page: &Exposition, mut told_apart: impl FnMut(u32) -> u32) -> Vec<Reading> {
    let mut seen: HashSet<u64> = HashSet::new();
    // by series and rank: parts by the copy that they belong to
    let mut sums: BTreeMap<Place, (&'static Series, BTreeMap<u64, f64>)> = BTreeMap::new();
    let totals: HashSet<&str> = page
        .samples
        .iter()
        .filter(|sample| sample.label("priority") == Some("") && has_total(&sample.name))
        .map(|sample| sample.name.as_str())
        .collect();
    for sample in &page.samples {
        let shares = sample.label("priority").is_some_and(|priority| !priority.is_empty());
        // a series that comes twice counts once; shares of a total that is there as well do not count at all
        if (shares && totals.contains(sample.name.as_str())) || !seen.insert(identity(sample)) {
            continue;
        }
        let rank = rank_of(sample).map(&mut told_apart);
        for (place, series) in lookup(&sample.name).filter(|(_, series)| counts(series, sample)) {
            let value = if makes_sense(series.meaning, sample.value) { sample.value } else { f64::NAN };
            let (_, copies) =
                sums.entry((place, series.name, series.meaning, rank)).or_insert_with(|| (series, BTreeMap::new()));
            *copies.entry(copy_of(sample)).or_insert(0.0) += value;
        }
    }
    sums.into_iter()
        .map(|((place, _, _, rank), (series, copies))| Reading { series, place, rank, value: largest(copies.values()) })
        .collect()
}

/// Gauges by priority stand beside their total (`priority=""`); of what is counted, that is the part without a priority.
fn has_total(name: &str) -> bool {
    lookup(name).any(|(_, series)| !series.meaning.is_counter())
}

/// A request that its client gave up, for example, is counted by the front end alone and proves nothing about the engine.
fn counts(series: &Series, sample: &Sample) -> bool {
    let has = |label: &str, values: &[&str]| sample.label(label).is_some_and(|value| values.contains(&value));
    series.only.is_none_or(|(label, value)| has(label, &[value]))
        && !series.but.is_some_and(|(label, values)| has(label, values))
}

fn makes_sense(meaning: Meaning, value: f64) -> bool {
    match meaning {
        // a ratio; a little over one is rounding
        Meaning::KvUsage => (0.0..=1.001).contains(&value),
        _ => (0.0..=COUNT_MAX).contains(&value),
    }
}

fn largest<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    values.fold(f64::NEG_INFINITY, |max, value| if value.is_nan() || max.is_nan() { f64::NAN } else { max.max(*value) })
}

fn rank_of(sample: &Sample) -> Option<u32> {
    RANKS.iter().find_map(|label| sample.label(label)).map(|rank| rank.parse().unwrap_or(0))
}

fn copy_of(sample: &Sample) -> u64 {
    let mut hasher = DefaultHasher::new();
    COPIES.iter().for_each(|label| sample.label(label).hash(&mut hasher));
    hasher.finish()
}

fn identity(sample: &Sample) -> u64 {
    let mut labels: Vec<_> = sample.labels.iter().collect();
    labels.sort();
    let mut hasher = DefaultHasher::new();
    (&sample.name, labels).hash(&mut hasher);
    hasher.finish()
}

/// Everything but the digests.
fn meanings(page: &Exposition, readings: &[Reading]) -> MetricsObs {
    let of = |meaning| total(meaning, readings.iter());
    let first = |name: &str| {
        page.samples.iter().find(|s| s.name == name).map(|s| s.value).filter(|v| (0.0..=COUNT_MAX).contains(v))
    };
    let mut ranks: Vec<u32> = readings.iter().filter_map(|reading| reading.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let alone = ranks.len() < 2;
    let of_rank = |rank, meaning| total(meaning, readings.iter().filter(|reading| reading.rank == Some(rank)));
    let ranks = ranks.into_iter().filter(|_| !alone).take(RANKS_MAX).map(|rank| RankMetrics {
        rank,
        running: of_rank(rank, Meaning::Running),
        waiting: of_rank(rank, Meaning::Waiting),
        progress_digest: 0,
    });
    MetricsObs {
        running: of(Meaning::Running),
        waiting: of(Meaning::Waiting),
        generation_tokens: of(Meaning::GenerationTokens),
        prompt_tokens: of(Meaning::PromptTokens),
        iterations: of(Meaning::Iterations),
        requests_finished: of(Meaning::Finished),
        kv_usage: of(Meaning::KvUsage),
        sleeping: sleeping(page),
        open_fds: first("process_open_fds"),
        server_load: first("server_load").or_else(|| of(Meaning::Load)),
        process_start_seconds: first("process_start_time_seconds"),
        ranks: ranks.collect(),
        ..MetricsObs::default()
    }
}

/// Ranks added up (for the cache: the fullest), of the first name that the page has. One senseless value makes it unknown.
fn total<'a>(meaning: Meaning, readings: impl Iterator<Item = &'a Reading> + Clone) -> Option<f64> {
    let of = readings.filter(|reading| reading.series.meaning == meaning);
    let first = of.clone().min_by_key(|reading| reading.place).map(|reading| reading.series.name)?;
    let values = of.filter(|reading| reading.series.name == first).map(|reading| reading.value);
    let total = if meaning == Meaning::KvUsage { values.fold(0.0, pick_larger) } else { values.sum() };
    Some(total).filter(|total| makes_sense(meaning, *total))
}

fn pick_larger(max: f64, value: f64) -> f64 {
    if value.is_nan() || max.is_nan() { f64::NAN } else { max.max(value) }
}

/// `vllm:engine_sleep_state{sleep_state="awake"}` is set by the API server and correct even if the engine does not step. Data-parallel engines
/// have series of their own: only where all of them sleep does nobody have to deliver.
fn sleeping(page: &Exposition) -> Option<bool> {
    let states = || page.samples.iter().filter(|sample| sample.name.ends_with(":engine_sleep_state"));
    let asleep = |sample: &Sample| {
        let awake = sample.label("sleep_state") == Some("awake");
        (awake && sample.value == 0.0) || (!awake && sample.value == 1.0)
    };
    let sleeps = |engine: Option<&str>| states().any(|sample| sample.label("engine") == engine && asleep(sample));
    states().next()?;
    Some(states().all(|sample| sleeps(sample.label("engine"))))
}

#[derive(Debug, Clone, Copy)]
struct Fnv(u64);

impl Fnv {
    const START: u64 = 0xcbf2_9ce4_8422_2325;

    fn mix(&mut self, value: f64) {
        // -0 and 0 are one number
        for byte in (value + 0.0).to_bits().to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
