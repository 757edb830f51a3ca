//! A worker rank's life: load a share, then run whatever step the first rank broadcasts, until told to stop or until the first rank is
//! gone. It publishes a page of its own, on which the first rank's counts stand as of the last step (H1, H3).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use heartbeat::Writer;
use heartbeat::page::{Identity, StepOutcome};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};
use thiserror::Error;

use super::fleet::RankOf;
use super::heart::RankHeart;
use super::leader::launch;
use super::plan::{Order, hash};
use super::{RANKS_MAX, Team};
use crate::backend::cuda::open::DeviceChoice;
use crate::beat::{Heart, LOAD_LEASE, Tally};
use crate::fault::{FaultKind, FaultSpec, Faults, Place, burn_for_ever};
use crate::model::{
    ALLOCATE_MAX, LoadError, LoadOptions, Model, ModelError, Pass, StepBatch, StepLogits, StepTerms, load_model_with,
};
use crate::start::{CacheOptions, Stage};
use crate::stuck::Stuck;
use crate::waits::Patience;

/// A rank that waits for a step beats this often.
const REST: Duration = Duration::from_millis(100);
/// A rank says nothing within a step, and of the first ones nobody knows how long they take.
const WARM_UP_MAX: Duration = Duration::from_secs(300);

/// Why a worker rank ended.
#[derive(Debug, Error)]
pub enum WorkerError {
    #[error("rank {rank}: the ranks' memory cannot be joined; a rank is started by its first rank alone")]
    Join { rank: usize, source: std::io::Error },
    #[error("rank {rank}: the first rank is gone")]
    Orphan { rank: usize },
    #[error("rank {rank}: its page cannot be made")]
    Page { rank: usize, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("rank {rank}: the thread beside its heart cannot be started")]
    Thread { rank: usize, source: std::io::Error },
    #[error("rank {rank}: its share of the model cannot be loaded")]
    Load { rank: usize, source: LoadError },
    #[error("rank {rank}: the KV cache could not be allocated")]
    Cache { rank: usize, source: ModelError },
    #[error("rank {rank}: a plan could not be read")]
    Plan { rank: usize },
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// What a worker needs to know besides the first rank's memory.
#[derive(Debug)]
pub struct WorkerConfig<'a> {
    pub of: &'a RankOf,
    pub model: &'a Path,
    pub page_dir: Option<&'a Path>,
    pub nonce: u64,
    pub faults: Vec<FaultSpec>,
    pub threads: usize,
    pub guards: bool,
    /// Where prepared weights are kept.
    pub cache_dir: Option<&'a Path>,
    /// Every step runs call by call.
    pub eager: bool,
    /// The model's MTP head guesses, on all ranks.
    pub head: bool,
    /// What computes this rank's share; `None`: the processor.
    pub device: Option<DeviceChoice>,
}

/// Runs a worker rank to its end; `Ok`: it was told to stop.
///
/// # Errors
/// [`WorkerError`]; the other ranks have been told by then.
pub fn run_worker(config: &WorkerConfig<'_>) -> Result<(), WorkerError> {
    let RankOf { rank, world, leader, .. } = *config.of;
    // the kernel ends this process with its parent, also where it is stopped or stuck
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(|errno| WorkerError::Join { rank, source: errno.into() })?;
    if getppid() != Pid::from_raw(leader) {
        return Err(WorkerError::Orphan { rank });
    }
    let team = config.of.join().map_err(|source| WorkerError::Join { rank, source })?;
    let team = Arc::new(team);
    let heart = RankHeart::new(Heart::new(page(config, rank, world)?, Arc::default()));
    heart.look_after(team.clone()).map_err(|source| WorkerError::Thread { rank, source })?;
    let faults = Faults::of_rank(config.faults.clone(), rank);
    let worker = Worker { team: team.clone(), heart, faults, tally: Tally::default(), parent: leader };
    worker.run(config).inspect_err(|error| {
        let kind = match error {
            WorkerError::Stuck(stuck) => Some(&stuck.kind),
            _ => None,
        };
        team.layout().write_failure(rank, &error.to_string(), kind);
    })
}

fn page(config: &WorkerConfig<'_>, rank: usize, world: usize) -> Result<Option<Writer>, WorkerError> {
    let Some(dir) = config.page_dir else { return Ok(None) };
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| WorkerError::Page { rank, source };
    let number = |n: usize| u32::try_from(n.min(RANKS_MAX)).unwrap_or(0);
    let identity =
        Identity::of_this_process(number(rank), number(world), config.nonce).map_err(|e| failed(e.into()))?;
    Writer::create(dir, &identity).map(Some).map_err(|e| failed(e.into()))
}

struct Worker {
    team: Arc<Team>,
    heart: RankHeart,
    faults: Faults,
    tally: Tally,
    parent: i32,
}

impl Worker {
    fn run(mut self, config: &WorkerConfig<'_>) -> Result<(), WorkerError> {
        let rank = self.team.rank();
        self.faults.strike(Place::Startup);
        let stage = Stage::default();
        let cache = config.cache_dir.map(|dir| CacheOptions {
            dir: dir.to_owned(),
            stage: stage.clone(),
            faults: self.faults.clone(),
            guards: config.guards,
            fleet: None,
        });
        let (threads, team) = (Some(config.threads), Some(self.team.clone()));
        let (eager, head, faults) = (config.eager, config.head, self.faults.clone());
        let device = config.device.clone();
        let options = LoadOptions { threads, team, cache, eager, head, faults, device, ..LoadOptions::default() };
        let mut progress = |done, total| {
            // who has the heart and stands still is found out by the first step
            drop(self.heart.with(|heart| stage.publish(heart, done, total, LOAD_LEASE)));
            self.team.loading(done, total);
        };
        let mut model = load_model_with(config.model, &options, &mut progress)
            .map_err(|source| WorkerError::Load { rank, source })?;
        self.team.loaded();
        self.serve(model.as_mut())
    }

    /// Takes part in step after step, until told to stop.
    fn serve(&mut self, model: &mut dyn Model) -> Result<(), WorkerError> {
        let mut step = 0;
        while let Some(order) = self.next(step + 1)? {
            step += 1;
            self.obey(model, step, order)?;
        }
        Ok(())
    }

    fn obey(&mut self, model: &mut dyn Model, step: u64, order: Order) -> Result<(), WorkerError> {
        match order {
            Order::Allocate(shape) => {
                let rank = self.team.rank();
                self.heart.with(|heart| heart.warming_up(0, ALLOCATE_MAX))?;
                model.allocate_kv(shape).map_err(|source| WorkerError::Cache { rank, source })?;
                self.heart.with(|heart| heart.warming_up(1, ALLOCATE_MAX))?;
                self.team.allow(Some(ALLOCATE_MAX));
                Ok(self.team.agree(step, 0)?)
            }
            Order::Step { terms, batch } => self.step(model, step, &terms, batch),
        }
    }

    /// Waits for an order as long as there is a first rank; `None`: there will be none.
    fn next(&mut self, step: u64) -> Result<Option<Order>, WorkerError> {
        let rank = self.team.rank();
        let mut patience = Patience::dozing(None);
        let mut beaten = Instant::now();
        self.heart.with(|heart| heart.resting(&self.tally, false))?;
        while self.team.layout().step().load(Ordering::Acquire) < step {
            if self.team.layout().stop().load(Ordering::Acquire) != 0 {
                return Ok(None);
            }
            patience.turn();
            if beaten.elapsed() >= REST {
                beaten = Instant::now();
                self.heart.with(|heart| heart.resting(&self.tally, false))?;
                if getppid() != Pid::from_raw(self.parent) {
                    return Err(WorkerError::Orphan { rank });
                }
            }
        }
        let order = Order::decode(&self.team.layout().read_plan(step));
        order.map(Some).ok_or(WorkerError::Plan { rank })
    }

    fn step(
        &mut self,
        model: &mut dyn Model,
        step: u64,
        terms: &StepTerms,
        mut batch: StepBatch,
    ) -> Result<(), WorkerError> {
        self.tally = terms.tally;
        self.faults.arm(terms.armed);
        self.team.allow_step(terms);
        self.faults.strike(Place::Rank);
        if self.faults.has(FaultKind::PlanDrift) {
            drop(batch.seqs.pop());
        }
        model.terms(terms);
        let (began, pass) = (Instant::now(), batch.pass);
        if terms.warms {
            self.heart.with(|heart| heart.warming_up(step, WARM_UP_MAX))?;
        } else {
            // as on the first rank: who waits for ever forgives nobody
            let forgives = if terms.allowed.is_some() { step } else { 0 };
            self.heart.in_step(forgives, |heart| heart.step_begins(&terms.shape, &self.tally))?;
        }
        let result = launch(&self.team, (step, hash(&batch)), || self.compute(model, &batch));
        let program = model.programs();
        if let Some(counts) = &program {
            self.team.refused(counts.refused.load(Ordering::Relaxed));
        }
        self.heart.in_step(0, |heart| {
            program.iter().for_each(|counts| heart.ran_by(counts.last_key.load(Ordering::Relaxed)));
            if terms.warms {
                heart.warmed_up(&terms.shape, began.elapsed());
            } else if pass == Pass::Model {
                // a guess is a part of the first rank's step: who counted it would be ahead of the others
                heart.follow(terms.steps_completed);
                heart.step_ends(&terms.shape, &self.tally, outcome_of(&result));
            }
        })?;
        match result {
            Err(ModelError::Stuck(stuck)) => Err(stuck.into()),
            // a batch that is refused is refused by every rank alike, and the first one answers for it
            _ => Ok(()),
        }
    }

    /// This rank's part. A worker computes on this thread, or has a device that hangs in earnest.
    fn compute(&self, model: &mut dyn Model, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        if self.faults.armed(Place::Event) && !model.hang() {
            burn_for_ever();
        }
        self.faults.strike(Place::Device);
        model.forward(batch)
    }
}

fn outcome_of<T>(result: &Result<T, ModelError>) -> StepOutcome {
    match result {
        Ok(_) => StepOutcome::Ok,
        Err(ModelError::Stuck(_)) => StepOutcome::DeadlineExceeded,
        Err(_) => StepOutcome::Failed,
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "padded_tests.rs"]
mod padded_tests;
