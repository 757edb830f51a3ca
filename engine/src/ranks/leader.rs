//! The first rank's model: broadcasts each step before it takes part in it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Team;
use super::layout::Word;
use super::plan::{Order, hash};
use crate::model::{ALLOCATE_MAX, KvShape, Model, ModelError, ModelInfo, Pulse, StepBatch, StepLogits, StepTerms};
use crate::panics::guarded;
use crate::programs::ProgramCounts;
use crate::stuck::Stuck;
use crate::waits::{Patience, Threads};

/// This rank's share of a model, and the other ranks through it.
pub struct LeaderModel {
    model: Box<dyn Model>,
    team: Arc<Team>,
    terms: StepTerms,
    step: u64,
}

impl LeaderModel {
    /// `model` is this rank's share; the others have loaded theirs.
    pub fn new(model: Box<dyn Model>, team: Arc<Team>) -> Self {
        Self { model, team, terms: StepTerms::default(), step: 0 }
    }

    fn broadcast(&mut self, order: &Order) -> Result<(), ModelError> {
        let bytes = order.encode();
        // a plan that does not fit is no step: its slot still holds another's
        if !self.team.layout().write_plan(self.step + 1, &bytes) {
            return Err(ModelError::Device(format!(
                "a plan of {} bytes is too long for the ranks' memory",
                bytes.len()
            )));
        }
        self.step += 1;
        self.team.layout().step().store(self.step, Ordering::Release);
        Ok(())
    }
}

impl Model for LeaderModel {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn pulse(&self) -> Option<Pulse> {
        self.model.pulse()
    }

    fn has_head(&self) -> bool {
        self.model.has_head()
    }

    fn has_ranks(&self) -> bool {
        true
    }

    fn forgiven(&self) -> Option<Pulse> {
        Some(self.team.forgiven())
    }

    fn threads(&self) -> Threads {
        let (mine, team, others) = (self.model.threads(), self.team.clone(), self.team.others());
        Arc::new(move || [mine(), team.threads_of(&others)].concat())
    }

    fn waits(&self) -> bool {
        self.model.waits()
    }

    fn hang(&mut self) -> bool {
        self.model.hang()
    }

    fn programs(&self) -> Option<Arc<ProgramCounts>> {
        self.model.programs()
    }

    fn terms(&mut self, terms: &StepTerms) {
        self.terms = terms.clone();
        self.model.terms(terms);
    }

    fn kv_bytes(&self, shape: KvShape) -> Option<u64> {
        // every rank has as much
        Some(self.model.kv_bytes(shape)?.saturating_mul(self.team.world() as u64))
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        let began = Instant::now();
        self.broadcast(&Order::Allocate(shape))?;
        let mine = self.model.allocate_kv(shape);
        // the others began when this one did
        self.team.allow(Some(ALLOCATE_MAX.saturating_sub(began.elapsed())));
        let step = self.step;
        self.team.agree(step, 0).map_err(ModelError::Stuck)?;
        mine
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        let terms = self.terms.clone();
        self.team.allow_step(&terms);
        self.broadcast(&Order::Step { terms, batch: batch.clone() })?;
        let logits = launch(&self.team, (self.step, hash(batch)), || self.model.forward(batch));
        if let Some(counts) = self.model.programs() {
            counts.refused_elsewhere.store(self.team.refused_elsewhere(), Ordering::Relaxed);
        }
        logits
    }
}

impl Drop for LeaderModel {
    /// Ranks that wait for a step end by themselves.
    fn drop(&mut self) {
        self.team.layout().stop().store(1, Ordering::Release);
    }
}

/// Agrees with the other ranks on a step and runs this rank's part of it; a part that panics spoils the step for all ranks, and the next
/// may go well (EP5). With waits for ever there is no agreement either, and nobody hears of a panic.
pub(super) fn launch(
    team: &Team,
    (step, hash): (u64, u64),
    compute: impl FnOnce() -> Result<StepLogits, ModelError>,
) -> Result<StepLogits, ModelError> {
    team.this_thread_takes_part();
    if team.allowed().is_none() {
        let logits = compute();
        return team.fault().map_or(logits, |stuck| Err(stuck.into()));
    }
    team.agree(step, hash)?;
    let logits = guarded(|| Ok(compute())).unwrap_or_else(|panic| {
        team.spoil(&panic);
        Err(ModelError::Device(panic))
    });
    match (team.fault(), logits, team.spoiled()) {
        (Some(stuck), ..) => Err(stuck.into()),
        (None, Err(ModelError::Stuck(stuck)), _) => Err(stuck.into()),
        (None, _, Some((rank, why))) => {
            Err(ModelError::Device(format!("rank {rank} could not compute its part: {why}")))
        }
        (None, logits, None) => logits,
    }
}

impl Team {
    /// Waits until all ranks have loaded their shares. `progress` hears bytes done and in all, of all ranks, whenever they move; `tend`
    /// looks after the processes.
    ///
    /// # Errors
    /// A rank that gave up, or what `tend` says; or ranks of which none moved for `allowed`.
    pub fn wait_loaded(
        &self,
        allowed: Option<Duration>,
        progress: &mut dyn FnMut(u64, u64),
        tend: &dyn Fn() -> Result<(), Stuck>,
    ) -> Result<(), Stuck> {
        let sum = |word: fn() -> Word| -> u64 {
            (0..self.world()).map(|rank| self.layout().of(rank, word()).load(Ordering::Relaxed)).sum()
        };
        let mut patience = Patience::new(allowed);
        let (mut told, mut stopped_at) = ((u64::MAX, 0), None);
        loop {
            let now = (sum(|| Word::Done), sum(|| Word::Total));
            if now != told {
                told = now;
                patience.renew();
                progress(now.0, now.1.max(now.0));
            }
            let loading: Vec<usize> = (0..self.world()).filter(|rank| !self.is_loaded(*rank)).collect();
            if loading.is_empty() {
                return Ok(());
            }
            self.look_for_words(&loading, &patience)?;
            tend()?;
            if allowed.is_some() {
                self.look_at_loading(&loading, &mut stopped_at, &patience)?;
            }
            if !patience.turn() {
                return Err(self.silent(loading, "has not come", "the end of loading", &patience));
            }
        }
    }

    /// Whether a rank is ready for steps.
    pub(super) fn is_loaded(&self, rank: usize) -> bool {
        self.layout().of(rank, Word::Ready).load(Ordering::Acquire) == 1
    }

    /// A rank that is to be started again has done nothing yet.
    pub(super) fn forget(&self, rank: usize) {
        for word in [Word::Pid, Word::Done, Word::Total] {
            self.layout().of(rank, word).store(0, Ordering::Release);
        }
    }

    /// This rank has read so much of its share.
    pub fn loading(&self, done: u64, total: u64) {
        self.layout().of(self.rank(), Word::Total).store(total, Ordering::Relaxed);
        self.layout().of(self.rank(), Word::Done).store(done, Ordering::Relaxed);
    }

    /// This rank is ready for steps.
    pub fn loaded(&self) {
        self.layout().of(self.rank(), Word::Ready).store(1, Ordering::Release);
    }
}
