//! Sums over histories, and the table that ends a run. Pure formatting.

use std::fmt::Write;

use super::check::{Failure, Verdicts};
use super::fences::Fences;
use super::kinds::{KINDS, Kind, Truth};
use super::profile::HOUR;

/// What a simulation of this kind leaves out, in words, printed under every table.
pub const NOT_MODELLED: &str = "\
Not modelled: real clocks that step or drift; torn or corrupt pages and malformed expositions (they have tests of their own); the gate's and
the agent's own defects; several replicas and the operator's budget; speculative decoding, multi-modal and embedding requests; disaggregated
prefill and decode; data-parallel engines that wait for one another in each step; GPU resets, Xids of the engine's own GPU and ranks of its own that NCCL RAS
names; page cache and swap beyond a pace; compilers inside the engine's own process; log lines quoted in prompts; tools that a front end calls
where the engine writes its gauges late or counts no ends, and their next generation where its prefix has left the cache. Steady stretches are
looked at once a second with work and once in ten seconds without, everything else each 100 ms; steps of one batch share one length.";

/// The sums of one kind.
#[derive(Debug, Clone, Default)]
pub struct Sums {
    pub histories: u64,
    pub failed: u64,
    pub blind: u64,
    pub unowed: u64,
    pub caught: u64,
    pub class_right: u64,
    pub benign_us: u64,
    pub busy_us: u64,
    pub fences: Fences,
    pub false_evictions: u64,
    pub ticks: u64,
    /// Fences of hangs whose deadline was the engine's own rhythm: when, and what was learned.
    pub rhythm_fence_ms: Vec<u64>,
    pub rhythm_ms: Vec<u64>,
    pub fence_ms: Vec<u64>,
    pub confirm_ms: Vec<u64>,
}

/// All kinds; a failing history is kept for its replay line.
#[derive(Debug, Clone)]
pub struct Table {
    pub kinds: Vec<Sums>,
    pub failures: Vec<Verdicts>,
}

impl Default for Table {
    fn default() -> Self {
        Self { kinds: vec![Sums::default(); KINDS.len()], failures: Vec::new() }
    }
}

/// Failing histories kept for printing.
const FAILURES_KEPT: usize = 200;

impl Table {
    /// Takes one history in.
    pub fn add(&mut self, verdicts: Verdicts) {
        let index = KINDS.iter().position(|kind| kind.name == verdicts.kind.name).unwrap_or(0);
        let Some(sums) = self.kinds.get_mut(index) else { return };
        sums.histories += 1;
        sums.blind += u64::from(verdicts.blind);
        sums.unowed += u64::from(verdicts.kind.truth != Truth::Benign && verdicts.unowed && !verdicts.blind);
        sums.benign_us += verdicts.benign_us;
        sums.busy_us += verdicts.busy_us;
        sums.fences.add(&verdicts.fences);
        sums.false_evictions += verdicts.false_evictions;
        sums.ticks += verdicts.ticks;
        let judged = !verdicts.blind;
        if judged && verdicts.confirm_ms.is_some() {
            sums.caught += 1;
            sums.class_right += u64::from(verdicts.class_right);
        }
        if let Some(deadline) = verdicts.deadline.filter(|deadline| judged && deadline.learned) {
            sums.rhythm_fence_ms.extend(verdicts.fence_ms);
            sums.rhythm_ms.push(deadline.ms);
        }
        sums.fence_ms.extend(verdicts.fence_ms.filter(|_| judged));
        sums.confirm_ms.extend(verdicts.confirm_ms.filter(|_| judged));
        if !verdicts.failures.is_empty() {
            sums.failed += 1;
            if self.failures.len() < FAILURES_KEPT {
                self.failures.push(verdicts);
            }
        }
    }

    /// Adds another run's sums.
    pub fn merge(&mut self, other: Self) {
        for (sums, more) in self.kinds.iter_mut().zip(other.kinds) {
            sums.merge(more);
        }
        self.failures.extend(other.failures);
    }

    /// Of all kinds together.
    pub fn total(&self) -> Sums {
        let mut total = Sums::default();
        for sums in &self.kinds {
            total.merge(sums.clone());
        }
        total
    }

    /// Both tables, the bounds, and what is not modelled. The count of tests is the caller's last line.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{:<13} {:>6} {:>6} {:>6} {:>6} {:>6} | to the fence, s: {:>7} {:>7} {:>7} | to confirmation: {:>7} {:>7} {:>7} | failed",
            "hangs", "hist.", "caught", "class", "blind", "unowed", "p50", "p99", "max", "p50", "p99", "max"
        );
        for (kind, sums) in self.rows(|truth| truth != Truth::Benign) {
            let _ = writeln!(
                out,
                "{:<13} {:>6} {:>6} {:>6} {:>6} {:>6} | {:>16} {} | {:>16} {} | {:>6}",
                kind.name,
                sums.histories,
                sums.caught,
                if kind.truth == Truth::Hang { sums.class_right.to_string() } else { "-".to_owned() },
                sums.blind,
                sums.unowed,
                "",
                figures(&sums.fence_ms),
                "",
                figures(&sums.confirm_ms),
                sums.failed,
            );
        }
        self.render_rhythms(&mut out);
        let _ = writeln!(
            out,
            "\n{:<13} {:>6} {:>12} {:>12} {:>15} {:>12} {:>6} {:>10} {:>6} {:>6} {:>7}",
            "benign",
            "hist.",
            "engine-hours",
            "with work",
            "false evictions",
            "false fences",
            "blinks",
            "slow steps",
            "env",
            "waits",
            "failed"
        );
        for (kind, sums) in self.rows(|_| true).filter(|(_, sums)| sums.benign_us > 0) {
            let _ = writeln!(out, "{}", benign_row(kind.name, sums));
        }
        let total = self.total();
        let _ = writeln!(out, "{}", benign_row("all", &total));
        let _ = writeln!(out, "{}\n{NOT_MODELLED}", bounds(&total));
        out
    }

    /// Goal 1c: who was fenced by its own rhythm, how soon, and what that rhythm allowed.
    fn render_rhythms(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "\n{:<13} {:>6} {:>7} {:>6} | to the fence, s: {:>7} {:>7} {:>7} | learned bound: {:>7} {:>7} {:>7}",
            "by rhythm", "hist.", "learned", "<= 5 s", "p50", "p99", "max", "p50", "p99", "max"
        );
        for (kind, sums) in self.rows(|truth| truth != Truth::Benign).filter(|(_, sums)| !sums.rhythm_ms.is_empty()) {
            let _ = writeln!(
                out,
                "{:<13} {:>6} {:>7} {:>6} | {:>16} {} | {:>14} {}",
                kind.name,
                sums.histories,
                sums.rhythm_ms.len(),
                sums.rhythm_fence_ms.iter().filter(|ms| **ms <= 5_000).count(),
                "",
                figures(&sums.rhythm_fence_ms),
                "",
                figures(&sums.rhythm_ms),
            );
        }
    }

    fn rows(&self, wanted: impl Fn(Truth) -> bool) -> impl Iterator<Item = (&'static Kind, &Sums)> {
        KINDS.iter().zip(&self.kinds).filter(move |(kind, sums)| wanted(kind.truth) && sums.histories > 0)
    }
}

impl Sums {
    fn merge(&mut self, more: Self) {
        self.histories += more.histories;
        self.failed += more.failed;
        self.blind += more.blind;
        self.unowed += more.unowed;
        self.caught += more.caught;
        self.class_right += more.class_right;
        self.benign_us += more.benign_us;
        self.busy_us += more.busy_us;
        self.fences.add(&more.fences);
        self.false_evictions += more.false_evictions;
        self.ticks += more.ticks;
        self.rhythm_fence_ms.extend(more.rhythm_fence_ms);
        self.rhythm_ms.extend(more.rhythm_ms);
        self.fence_ms.extend(more.fence_ms);
        self.confirm_ms.extend(more.confirm_ms);
    }

    /// Hours in which the truth was benign.
    pub fn benign_hours(&self) -> f64 {
        self.benign_us as f64 / HOUR as f64
    }
}

fn benign_row(name: &str, sums: &Sums) -> String {
    format!(
        "{:<13} {:>6} {:>12.1} {:>12.1} {:>15} {:>12} {:>6} {:>10} {:>6} {:>6} {:>7}",
        name,
        sums.histories,
        sums.benign_hours(),
        sums.busy_us as f64 / HOUR as f64,
        sums.false_evictions,
        sums.fences.wrong,
        sums.fences.blinks,
        sums.fences.slow,
        sums.fences.env,
        sums.fences.waits,
        sums.failed
    )
}

/// Rates with their denominators; the rule of three where nothing was seen.
fn bounds(total: &Sums) -> String {
    let hours = total.benign_hours().max(1e-9);
    let rate = |count: u64, what: &str| {
        if count == 0 {
            format!(
                "no {what} in {hours:.0} engine-hours: at 95 % fewer than {:.2e} an hour (rule of three)",
                3.0 / hours
            )
        } else {
            format!("{count} {what}s in {hours:.0} engine-hours: {:.2e} an hour", count as f64 / hours)
        }
    };
    format!("{}\n{}", rate(total.fences.wrong, "false fence"), rate(total.false_evictions, "false eviction"))
}

/// p50, p99 and maximum in seconds.
fn figures(ms: &[u64]) -> String {
    let mut sorted = ms.to_vec();
    sorted.sort_unstable();
    let at = |permille: usize| {
        let index = (sorted.len() * permille).div_ceil(1_000).max(1) - 1;
        sorted
            .get(index.min(sorted.len().saturating_sub(1)))
            .map_or("-".to_owned(), |ms| format!("{:.2}", *ms as f64 / 1e3))
    };
    format!("{:>7} {:>7} {:>7}", at(500), at(990), at(1_000))
}

/// One line a failure: what, when, and the command that replays it.
pub fn replay_line(verdicts: &Verdicts) -> String {
    let what: Vec<String> = verdicts
        .failures
        .iter()
        .take(3)
        .map(|(at, failure): &(u64, Failure)| format!("{} at {:.1} s", failure.name(), *at as f64 / 1e6))
        .collect();
    format!(
        "FAILED {} ({}): {}; replay: sim-detector --kind {} --replay {:#018x}\n       {}",
        verdicts.kind.name,
        verdicts.engine,
        what.join(", "),
        verdicts.kind.name,
        verdicts.seed,
        verdicts.scene
    )
}
