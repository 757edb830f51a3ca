//! The ranks' collectives: all-reduce, all-gather, and the agreement before a step. A rank stores its values, says so, and waits until
//! all others have said so too; two slots of data a rank suffice, because nobody begins a collective before all have ended the last.
//!
//! An error is sticky, as a device's is: the first wait that fails marks the team, and every collective after it returns at once with
//! whatever is there. Who launched the step asks [`Team::fault`] at its end.
//!
//! A rank that cannot compute its part of a step ([`Team::spoil`]) is no such error: nobody waits for it any more, the step is nobody's,
//! and the ranks come together again at the agreement on the next one (EP5).

use std::fs::File;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::layout::{CHUNK_WORDS, HELPERS_MAX, Layout, Word};
use super::witness::{PEER_LOOK, Witness};
use crate::model::{Pulse, StepTerms};
use crate::stuck::{Stuck, StuckKind};
use crate::waits::{Patience, Tids, this_tid};

/// What a wait of unknown length (`allowed` of 0) means in `allowed_ms`.
const FOR_EVER: u64 = 0;
/// Collectives that one step may have; their numbers begin anew, after the agreed step's own, with each of them.
const STEP_COLLECTIVES: u64 = 1 << 24;

/// One rank's end of the team.
#[derive(Debug)]
pub struct Team {
    layout: Layout,
    rank: usize,
    /// Collectives that this rank has begun: the agreed step's number, and how many since.
    collectives: AtomicU64,
    /// The step under way was spoiled: its collectives return at once.
    skips: AtomicBool,
    allowed_ms: AtomicU64,
    /// What is waited for is a step that is no part of the start: ranks that sleep in it hang.
    in_step: AtomicBool,
    /// Nanoseconds that no wait counted, because who was missing wanted the processor: whoever waits for this rank forgives them too.
    forgiven: Pulse,
    /// Threads that compute beside the one that takes part.
    helpers: OnceLock<Tids>,
    fault: OnceLock<Stuck>,
}

impl Team {
    /// A team of `world`, seen by its first rank, and the file that the other ranks join with.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(world: usize) -> std::io::Result<(Self, File)> {
        Self::sized(world, 0)
    }

    /// The same, with room for plans of `plan_bytes`.
    pub(super) fn sized(world: usize, plan_bytes: usize) -> std::io::Result<(Self, File)> {
        let (layout, file) = Layout::create(world, plan_bytes)?;
        Ok((Self::of(layout, 0), file))
    }

    /// A team, seen by `rank`.
    ///
    /// # Errors
    /// When `file` is not the memory of a team of `world`.
    pub fn join(file: &File, rank: usize, world: usize) -> std::io::Result<Self> {
        Ok(Self::of(Layout::join(file, world)?, rank))
    }

    fn of(layout: Layout, rank: usize) -> Self {
        layout.of(rank, Word::Pid).store(u64::from(std::process::id()), Ordering::Release);
        Self {
            layout,
            rank,
            collectives: AtomicU64::new(0),
            skips: AtomicBool::new(false),
            allowed_ms: AtomicU64::new(FOR_EVER),
            in_step: AtomicBool::new(false),
            forgiven: Pulse::default(),
            helpers: OnceLock::new(),
            fault: OnceLock::new(),
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn world(&self) -> usize {
        self.layout.world()
    }

    pub(super) fn others(&self) -> Vec<usize> {
        (0..self.world()).filter(|rank| *rank != self.rank).collect()
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How long a wait for other ranks may take from now on; `None`: for ever, which also skips the agreement before a step.
    pub fn allow(&self, allowed: Option<Duration>) {
        let ms = allowed.map_or(FOR_EVER, |a| u64::try_from(a.as_millis()).unwrap_or(u64::MAX).max(1));
        self.allowed_ms.store(ms, Ordering::Relaxed);
        self.in_step.store(false, Ordering::Relaxed);
    }

    /// The same for the waits of a step on these terms.
    pub(super) fn allow_step(&self, terms: &StepTerms) {
        self.allow(terms.allowed);
        self.in_step.store(!terms.warms, Ordering::Relaxed);
    }

    pub(super) fn is_in_step(&self) -> bool {
        self.in_step.load(Ordering::Relaxed)
    }

    pub(super) fn allowed(&self) -> Option<Duration> {
        Some(self.allowed_ms.load(Ordering::Relaxed)).filter(|ms| *ms != FOR_EVER).map(Duration::from_millis)
    }

    pub(super) fn forgiven(&self) -> Pulse {
        self.forgiven.clone()
    }

    /// Why this team is done for, if it is.
    pub fn fault(&self) -> Option<Stuck> {
        self.fault.get().cloned()
    }

    /// Marks this rank as failed, for itself and for all who wait for it. The first reason stays.
    pub fn fail(&self, stuck: Stuck) -> Stuck {
        #[allow(clippy::disallowed_methods, reason = "what is stored is there already")]
        let first = self.fault.get_or_init(|| stuck).clone();
        self.layout.write_failure(self.rank, &first.text, Some(&first.kind));
        first
    }

    /// Sums `values` over all ranks, in the order of their numbers, into every rank's `values`.
    pub fn all_reduce(&self, values: &mut [f32]) {
        let mine = values.to_vec();
        values.fill(0.0);
        self.exchange(&mine, mine.len(), "all-reduce", |_, at, theirs| {
            for (sum, word) in values[at].iter_mut().zip(theirs) {
                *sum += f32::from_bits(word.load(Ordering::Relaxed));
            }
        });
    }

    /// Puts `rows` rows of all ranks side by side; `widths` are the ranks' columns. Each rank brings and takes the same number of
    /// rows.
    pub fn all_gather(&self, mine: &[f32], widths: &[usize]) -> Vec<f32> {
        let rows = mine.len() / widths[self.rank].max(1);
        let (total, mut starts) = (widths.iter().sum::<usize>(), Vec::with_capacity(widths.len()));
        widths.iter().fold(0, |at, width| {
            starts.push(at);
            at + width
        });
        let mut all = vec![0.0; rows * total];
        // every rank brings as much as the widest, so that all have the same number of chunks
        let widest = widths.iter().copied().max().unwrap_or(0);
        let mut brought = mine.to_vec();
        brought.resize(rows * widest, 0.0);
        self.exchange(&brought, rows * widest, "all-gather", |rank, at, theirs| {
            let (width, start) = (widths[rank], starts[rank]);
            for (at, word) in at.zip(theirs).filter(|(at, _)| *at < rows * width) {
                all[at / width * total + start + at % width] = f32::from_bits(word.load(Ordering::Relaxed));
            }
        });
        all
    }

    /// The calling thread is the one that takes part in collectives from now on.
    pub(super) fn this_thread_takes_part(&self) {
        self.layout.of(self.rank, Word::Tid).store(this_tid(), Ordering::Relaxed);
        let helpers = self.helpers.get().into_iter().flat_map(|tids| tids.iter());
        for (place, tid) in self.layout.helpers(self.rank).iter().zip(helpers) {
            place.store(tid.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// These threads compute parts of this rank's steps: whoever waits for the rank waits for them, too. Gives how many of them the others
    /// cannot be told of.
    pub(super) fn helped_by(&self, helpers: Tids) -> usize {
        let untold = helpers.len().saturating_sub(HELPERS_MAX);
        // told once, by whoever computes
        drop(self.helpers.set(helpers));
        untold
    }

    /// The threads that whoever waits for these ranks waits for, as `/proc` knows them; 0: not known.
    pub(super) fn threads_of(&self, ranks: &[usize]) -> Vec<u64> {
        let of = |rank: &usize| [self.layout.of(*rank, Word::Tid)].into_iter().chain(self.layout.helpers(*rank));
        ranks.iter().flat_map(of).map(|tid| tid.load(Ordering::Relaxed)).collect()
    }

    /// Steps that this rank refused a program of another shape for (S1).
    pub(super) fn refused(&self, steps: u64) {
        self.layout.of(self.rank, Word::Refused).store(steps, Ordering::Relaxed);
    }

    /// The same, of all other ranks.
    pub(super) fn refused_elsewhere(&self) -> u64 {
        self.others().into_iter().map(|rank| self.layout.of(rank, Word::Refused).load(Ordering::Relaxed)).sum()
    }

    /// This rank cannot compute its part of the step that was agreed on last: the others need not wait for it (EP5).
    pub(super) fn spoil(&self, why: &str) {
        self.layout.write_spoiled(self.rank, self.step(), why);
    }

    /// Who could not compute his part of the step that was agreed on last, and why.
    pub(super) fn spoiled(&self) -> Option<(usize, String)> {
        (0..self.world()).find_map(|rank| Some((rank, self.layout.spoiled(rank, self.step())?)))
    }

    /// The step that was agreed on last; 0: none was.
    fn step(&self) -> u64 {
        self.collectives.load(Ordering::Relaxed) / STEP_COLLECTIVES
    }

    /// Says that this rank is about to launch `hash` as `step`, and waits until all ranks say the same (E3).
    ///
    /// # Errors
    /// Who is silent; or who would launch another step, with both hashes.
    pub fn agree(&self, step: u64, hash: u64) -> Result<(), Stuck> {
        let word = if step.is_multiple_of(2) { Word::HashEven } else { Word::HashOdd };
        self.layout.of(self.rank, word).store(hash, Ordering::Relaxed);
        self.layout.of(self.rank, Word::Agreed).store(step, Ordering::Release);
        let said = |rank| self.layout.of(rank, Word::Agreed).load(Ordering::Acquire) >= step;
        self.wait(&said, &|| format!("the agreement on step {step}"))?;
        let other = (0..self.world()).find_map(|rank| {
            let theirs = self.layout.of(rank, word).load(Ordering::Relaxed);
            (theirs != hash).then_some((rank, theirs))
        });
        let Some((rank, theirs)) = other else {
            // nobody is in a collective now: who left the last step early counts as the others do
            self.collectives.store(step * STEP_COLLECTIVES, Ordering::Relaxed);
            self.skips.store(false, Ordering::Relaxed);
            return Ok(());
        };
        let text = format!(
            "rank {rank} is about to launch plan {theirs:016x} as step {step}, rank {} plan {hash:016x}: nothing was launched (E3)",
            self.rank
        );
        Err(self.fail(Stuck { kind: StuckKind::PlanMismatch, text, waited: Duration::ZERO }))
    }

    /// Brings `mine` and hands each rank's values to `take`, chunk after chunk, rank after rank.
    pub(super) fn exchange(
        &self,
        mine: &[f32],
        expected: usize,
        what: &str,
        mut take: impl FnMut(usize, Range<usize>, &[AtomicU32]),
    ) {
        for start in (0..expected).step_by(CHUNK_WORDS) {
            let end = expected.min(start + CHUNK_WORDS);
            if self.fault.get().is_some() || self.skips.load(Ordering::Relaxed) {
                return;
            }
            let collective = self.next_collective();
            self.bring(collective, &mine[start..end]);
            if !self.all_there(collective, end - start, what) {
                return;
            }
            for rank in 0..self.world() {
                take(rank, start..end, &self.layout.data(rank, collective)[..end - start]);
            }
        }
    }

    pub(super) fn next_collective(&self) -> u64 {
        self.collectives.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A collective by its place in the step.
    pub(super) fn name(&self, collective: u64) -> String {
        format!("collective {} of the step", collective % STEP_COLLECTIVES)
    }

    fn bring(&self, collective: u64, values: &[f32]) {
        for (word, value) in self.layout.data(self.rank, collective).iter().zip(values) {
            word.store(value.to_bits(), Ordering::Relaxed);
        }
        self.len_of(self.rank, collective).store(values.len() as u64, Ordering::Relaxed);
        self.layout.of(self.rank, Word::Arrived).store(collective, Ordering::Release);
    }

    fn len_of(&self, rank: usize, collective: u64) -> &AtomicU64 {
        self.layout.of(rank, if collective.is_multiple_of(2) { Word::LenEven } else { Word::LenOdd })
    }

    /// Waits until every rank has brought its values. With deadlines a rank that brings another number of them is an error at once;
    /// without, who expects more waits for bytes that never come, as recorded collectives do (S1). False: there is an error, or a rank
    /// that will not come.
    fn all_there(&self, collective: u64, expected: usize, what: &str) -> bool {
        let brought = |rank| self.len_of(rank, collective).load(Ordering::Relaxed);
        let arrived = |rank| self.layout.of(rank, Word::Arrived).load(Ordering::Acquire) >= collective;
        let guarded = self.allowed().is_some();
        let spoiled = |rank| self.layout.spoiled(rank, self.step()).is_some();
        let there = |rank| arrived(rank) && (guarded || brought(rank) >= expected as u64);
        let number = collective % STEP_COLLECTIVES;
        if self.wait(&|rank| there(rank) || spoiled(rank), &|| format!("{what} {number}")).is_err() {
            return false;
        }
        if (0..self.world()).any(|rank| !there(rank)) {
            self.skips.store(true, Ordering::Relaxed);
            return false;
        }
        let Some(rank) = (0..self.world()).find(|rank| guarded && brought(*rank) != expected as u64) else {
            return true;
        };
        let (brought, mine) = (brought(rank), self.rank);
        let text = format!("rank {rank} brings {brought} values to {what} {number}, rank {mine} expects {expected}");
        self.fail(Stuck { kind: StuckKind::PlanMismatch, text, waited: Duration::ZERO });
        false
    }

    /// Waits until `there` holds for every rank.
    pub(super) fn wait(&self, there: &dyn Fn(usize) -> bool, what: &dyn Fn() -> String) -> Result<(), Stuck> {
        let allowed = self.allowed();
        let mut patience = if allowed.is_some() { Patience::new(allowed) } else { Patience::spinning(None) };
        let (mut next_look, mut witness) = (PEER_LOOK, Witness::default());
        loop {
            let missing: Vec<usize> = (0..self.world()).filter(|rank| !there(*rank)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            self.look_for_words(&missing, &patience)?;
            if !patience.turn() {
                return Err(self.silent(missing, "has not come", &what(), &patience));
            }
            if allowed.is_some() && patience.counted() >= next_look {
                next_look += PEER_LOOK;
                self.look_at((&missing, &missing), &mut witness, &what, &mut patience)?;
            }
        }
    }

    /// One of the `missing` may have said why it gives up; whom it blames is blamed.
    pub(super) fn look_for_words(&self, missing: &[usize], patience: &Patience) -> Result<(), Stuck> {
        let told = missing.iter().find_map(|rank| Some((*rank, self.layout.failure(*rank)?)));
        let Some((rank, (words, blamed))) = told else { return Ok(()) };
        let kind = blamed.unwrap_or_else(|| StuckKind::RankSilent { ranks: vec![rank] });
        Err(self.give_up(kind, format!("rank {rank} gave up: {words}"), patience))
    }

    pub(super) fn silent(&self, ranks: Vec<usize>, how: &str, what: &str, patience: &Patience) -> Stuck {
        let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        let waited_ms = patience.waited().as_millis();
        let text = format!("rank {} {how} to {what}; rank {} waited {waited_ms} ms", names.join(", "), self.rank);
        self.give_up(StuckKind::RankSilent { ranks }, text, patience)
    }

    pub(super) fn give_up(&self, kind: StuckKind, text: String, patience: &Patience) -> Stuck {
        self.fail(Stuck { kind, text, waited: patience.waited() })
    }
}

#[cfg(test)]
#[path = "team_tests.rs"]
mod tests;
