//! The detector's process: the one driver that reads the clock. Each tick it asks the gate, gathers an observation, lets `vitals`
//! judge, and starts whatever follows in tasks of their own. A tick waits for nothing longer than a few tens of milliseconds.

mod act;
mod aside;
mod config;
mod doze;
mod ear;
mod follow;
mod hold;
pub(crate) mod kept;
mod killed;
pub(crate) mod latest;
pub mod leave;
mod lookout;
pub(crate) mod memory;
pub(crate) mod notes;
mod poison;
mod proof;
mod publish;
mod whom;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use crds::fence::Fence;
use crds::maintenance::Maintenance;
use tokio::sync::watch as channel;
use vitals::detector::Detector;
use vitals::observation::Observation;
use vitals::recovery::{Effect, Mode, Recovery, RecoveryInput, RecoveryOutput};
use vitals::verdict::Outcome;

use self::act::Acts;
use self::config::milliseconds;
pub use self::config::{WatchConfig, WatchError};
use self::ear::GateEar;
use self::follow::{Follow, process_key, started_ms};
use self::hold::{Hold, refusal, spared};
use self::latest::Latest;
use self::leave::{Drain, Standing, Trust};
use self::lookout::Lookout;
use self::memory::{Keeper, left_in, recalled};
use self::notes::Notes;
use self::poison::PoisonBook;
use self::proof::Proof;
use self::publish::Publisher;
use crate::gate::ledger::Control;
use crate::incidents::Moment;
use crate::metrics::Metrics;
use crate::report::Reporter;
use crate::sources::clock::monotonic_ms;
use crate::sources::pace::{Pace, PaceKeeper};
use crate::sources::{EngineProcess, Sources};
use crate::ticker::Ticker;

/// A tick that begins this much later than it should is a gap of ours, not the engine's silence (V5).
const GAP_MS_MIN: u64 = 150;
/// What refused clients are told to wait.
const RETRY_AFTER_S: u32 = 2;
/// So long a start waits for what lies on a disk, and an end for what is on its way there.
const DISK_WAIT_MAX: Duration = Duration::from_secs(1);

/// Watches until standard input ends, which means that the supervisor is gone.
///
/// # Errors
/// When it cannot start.
pub async fn run(config: WatchConfig) -> Result<(), WatchError> {
    let (orders, drain) = channel::channel(Drain::default());
    let mut alive = drain.clone();
    leave::listen(orders).map_err(WatchError::Thread)?;
    let mut watch = Watch::new(config, drain).await?;
    let written = watch.written();
    // a task of its own: waking what the runtime blocks on costs a system call more each time
    let mut ticking = tokio::spawn(async move { watch.tick_for_ever().await });
    loop {
        tokio::select! {
            // a detector that judges no more must not look alive: the supervisor starts another at once
            ended = &mut ticking => return ended.map_err(WatchError::Ticks),
            changed = alive.changed() => if changed.is_err() { break },
        }
    }
    tracing::info!("the supervisor is gone, or lets go; the detector leaves");
    ticking.abort();
    let _ = ticking.await;
    // whoever comes next shall know what this one knew
    futures::future::join_all(written.iter().map(|file| file.settled(DISK_WAIT_MAX))).await;
    Ok(())
}

struct Watch {
    config: WatchConfig,
    follow: Follow,
    engine: Option<EngineProcess>,
    sources: Sources,
    detector: Detector,
    outcome: Outcome,
    /// What was seen last; what a tick does not read anew stays in it.
    seen: Observation,
    pace: PaceKeeper,
    recovery: Recovery,
    gate: GateEar,
    control: Control,
    /// The detector's wish; the last replica that serves is spared (I3).
    fence_wanted: bool,
    /// What is in force of it.
    own_fence: bool,
    notes: Notes,
    /// A person's fence, in words; it is obeyed whatever the verdict.
    hand: Option<String>,
    poison: PoisonBook,
    acts: Acts,
    hold: Option<Hold>,
    /// Would the replica serve, by what its engine does alone?
    fit: bool,
    drain: channel::Receiver<Drain>,
    drain_ended: u64,
    trust: Trust,
    proof: Proof,
    /// Who we are, for ids of episodes: the pod, else the host.
    instance: String,
    ticked_ms: Option<u64>,
    ticker: Ticker,
    lookout: Lookout,
    due_in: Duration,
    keeper: Keeper,
    publisher: Publisher,
    metrics: Metrics,
}

impl Watch {
    async fn new(config: WatchConfig, drain: channel::Receiver<Drain>) -> Result<Self, WatchError> {
        let (dir, now_ms) = (&config.agent_dir, monotonic_ms());
        let mut notes = Notes::new(config.notes_dir.as_deref(), !config.standalone);
        let agent_dir = dir.clone();
        let recalled = recalled(DISK_WAIT_MAX, move || left_in(&agent_dir));
        let (left, said) = tokio::join!(recalled, notes.look_first(now_ms, DISK_WAIT_MAX));
        let hand = said.fence.as_ref().map(Fence::words);
        let (memory, told_last) = left.map_err(|source| WatchError::Directory { path: dir.clone(), source })?;
        let memory = if hand.is_none() { memory.heed(&told_last) } else { memory };
        let (follow, engine, killed) = whom::first(&config, &memory, now_ms).await;
        let same = memory.is_about(engine.as_ref());
        let mut sources = Sources::new(config.sources.clone());
        sources.set_engine(engine.clone());
        sources.set_nonce(follow.nonce());
        let detector = Detector::new(config.policy.clone(), started_ms(engine.as_ref(), now_ms));
        let recovery = Recovery::new(config.recovery_policy()).with_last_unattended(memory.last_unattended_ms);
        let own_fence = memory.fenced && same;
        let fenced = own_fence || hand.is_some();
        let reporter = config.pod.clone().map(|pod| Reporter::start(pod, dir, memory.last_serving));
        let reporter = reporter.transpose().map_err(WatchError::Thread)?;
        let stdout = |line: Vec<u8>| _ = io::stdout().write_all(&line).and_then(|()| io::stdout().flush());
        let stdout = Latest::start("status", stdout).map_err(WatchError::Thread)?;
        Ok(Self {
            detector: if same { memory.instruct(detector) } else { detector },
            outcome: Outcome::default(),
            seen: Observation::default(),
            pace: PaceKeeper::default(),
            recovery,
            gate: GateEar::new(dir),
            control: Control {
                fenced,
                retry_after_s: RETRY_AFTER_S,
                reason: if fenced { memory.words(hand.as_deref()) } else { String::new() },
                poison: told_last.poison, // until the book is looked at
                ..Control::default()
            },
            fence_wanted: own_fence,
            own_fence,
            notes,
            hand,
            poison: PoisonBook::new(config.refuse_poison_for, config.standalone),
            hold: same.then(|| Hold::new(memory.fence_is_held(), memory.fit, now_ms)),
            fit: same && memory.fit,
            drain,
            drain_ended: memory.drain_ended,
            trust: Trust::default(),
            proof: Proof::new(config.prove_through.clone(), same && memory.proven),
            instance: config.instance(),
            ticked_ms: None,
            ticker: Ticker::new().map_err(WatchError::Timer)?,
            lookout: Lookout::start(sources.shared_pages()).map_err(WatchError::Thread)?,
            due_in: Duration::from_millis(config.policy.tick_ms),
            acts: Acts::new(memory.incidents.clone(), killed),
            keeper: Keeper::start(dir, memory).map_err(WatchError::Thread)?,
            publisher: Publisher::new(stdout, reporter),
            metrics: Metrics::new()?,
            follow,
            engine,
            sources,
            config,
        })
    }

    async fn tick_for_ever(&mut self) {
        loop {
            let begun = Instant::now();
            self.tick().await;
            let took = begun.elapsed();
            self.metrics.tick_seconds.observe(took.as_secs_f64());
            self.rest(took).await;
        }
    }

    async fn tick(&mut self) {
        let now_ms = monotonic_ms();
        let gap_ms = self.gap(now_ms);
        self.notes.look(now_ms); // what this begins to read may be there when it is asked for
        self.follow_engine(now_ms);
        let order = Some(*self.drain.borrow_and_update()).filter(|drain| drain.id > self.drain_ended);
        let standing = self.standing(now_ms, order);
        let drain = standing.and_then(Standing::drain);
        self.control.leaving = drain.is_some();
        self.control.draining = drain.is_some_and(|drain| drain.shuts(now_ms));
        if self.gate.is_due(now_ms, &self.control) {
            self.ask_gate().await;
        }
        let obs = self.observe(now_ms, gap_ms).await;
        let mut outcome = std::mem::take(&mut self.outcome);
        self.detector.step_into(now_ms, &obs, &mut outcome);
        self.tell_of_remains(now_ms, &mut outcome);
        self.due_in = Duration::from_millis(outcome.check_again_in_ms.min(self.config.policy.tick_ms).max(10));
        self.hold.take_if(|hold| hold.is_over(now_ms, &obs, &outcome.verdict));
        self.acts.take_news(&self.metrics);
        self.heed(now_ms);
        let recovery = self.recovery.step(now_ms, &self.recovery_input(&outcome));
        self.set_fence(now_ms, &outcome, &recovery).await;
        self.book(now_ms, &obs, &outcome, &recovery);
        self.watch_poison(now_ms).await;
        let proven = self.proof.look(now_ms, &outcome.verdict, &obs, self.gate.own()).await;
        let waited_for = standing.and_then(|standing| standing.waited_for(order, self.control.draining));
        self.publish(now_ms, &obs, &outcome, (waited_for, proven)).await;
        (self.outcome, self.seen) = (outcome, obs);
    }

    /// What becomes of an order to drain. Where no API server can be asked, whoever reaches the port is the one who runs the engine.
    fn standing(&mut self, now_ms: u64, order: Option<Drain>) -> Option<Standing> {
        match self.publisher.reporter() {
            None => order.map(Standing::Obeyed),
            Some(_) if order.is_none() && !self.trust.is_leaving() => self.trust.standing(now_ms, None, None),
            Some(reporter) => self.trust.standing(now_ms, order, reporter.said()),
        }
    }

    /// How long we did not run beyond what a tick may take.
    fn gap(&mut self, now_ms: u64) -> u64 {
        let late_ms = self.late_ms(now_ms);
        self.ticked_ms = Some(now_ms);
        if late_ms < GAP_MS_MIN {
            return 0;
        }
        self.metrics.gap_seconds.inc_by(late_ms as f64 / 1000.0);
        late_ms
    }

    /// How much later than it was due the look at `now_ms` comes.
    fn late_ms(&self, now_ms: u64) -> u64 {
        let elapsed_ms = self.ticked_ms.map_or(0, |before| now_ms.saturating_sub(before));
        elapsed_ms.saturating_sub(milliseconds(self.due_in))
    }

    /// Tells the gate what it shall be, and takes its counters.
    async fn ask_gate(&mut self) {
        match self.gate.ask(&self.control).await {
            Some(reply) => self.acts.count_refused(reply),
            None => self.metrics.gate_silent_total.inc(),
        }
    }

    /// What is known now. A glance while all is well; see [`Pace`].
    async fn observe(&mut self, now_ms: u64, gap_ms: u64) -> Observation {
        let mut obs = std::mem::take(&mut self.seen);
        obs.gate.clone_from(&self.gate.seen);
        let (keeper, verdict, lives) = (&mut self.pace, &self.outcome.verdict, self.follow.engine_lives());
        let pace = |obs: &Observation| {
            let pages = obs.pages.value.as_deref().unwrap_or_default();
            let pace = keeper.pace(now_ms, verdict, pages, obs.gate.value.as_ref());
            match (lives, gap_ms) {
                (false, _) => Pace::Stare,
                (true, 0) => pace,
                // what the engine did meanwhile says whether the gap was ours alone
                (true, _) => pace.max(Pace::Look),
            }
        };
        self.sources.observe_into(now_ms, &mut obs, pace).await;
        obs.agent_gap_ms = gap_ms;
        obs.draining = self.control.draining;
        let declared = self.notes.look(now_ms).maintenance_at(jiff::Timestamp::now()).map(Maintenance::words);
        if declared.is_some() != obs.maintenance {
            tracing::warn!(declared, "maintenance begins or ends");
        }
        obs.maintenance = declared.is_some();
        self.metrics.maintenance.set(obs.maintenance.into());
        if let (Some(proc), Some(engine)) = (&mut obs.proc.value, &self.engine) {
            self.acts.killed.show(engine, now_ms, self.config.policy.unkillable_ms, proc);
        }
        obs
    }

    fn recovery_input<'a>(&self, outcome: &'a Outcome) -> RecoveryInput<'a> {
        let (heard, open) = (self.publisher.heard(), self.acts.incidents.open());
        let lives = self.acts.killed.is_left() || self.follow.engine_lives();
        RecoveryInput {
            outcome,
            evidence_done: open.is_some_and(|open| open.evidence_at.is_some()),
            granted: open.is_some_and(|open| heard.grant.as_deref() == Some(open.id.as_str())),
            operator_answered_ms: heard
                .queued
                .filter(|(id, _)| open.is_some_and(|open| open.id == *id))
                .map(|(_, at)| at),
            process: self.engine.as_ref().filter(|_| lives).map(process_key),
            spared: self.acts.killed.spared().map(process_key),
            leaves: self.control.leaving && (self.drain.borrow().ends || self.gate.owes_nothing()),
        }
    }

    /// Goes by what it was told last of how far recovery goes.
    fn heed(&mut self, now_ms: u64) {
        let policy = self.config.policy_told(self.notes.look(now_ms).told.as_ref());
        if policy.mode == Mode::Observe {
            // nor does the fence of a forerunner outlast the wish that nothing be fenced
            self.hold.take_if(|hold| hold.fences());
        }
        if self.recovery.set_policy(policy.clone()) {
            tracing::info!(?policy, "how far recovery goes");
        }
    }

    /// Obeys the fence at once: a tick later would be a tick of refused truth.
    async fn set_fence(&mut self, now_ms: u64, outcome: &Outcome, recovery: &RecoveryOutput) {
        let held = self.hold.as_ref().is_some_and(Hold::fences);
        let before = self.control.fenced;
        if recovery.effects.contains(&Effect::Fence) {
            self.fence_wanted = true;
        } else if recovery.effects.contains(&Effect::Unfence) && !held {
            self.fence_wanted = false;
        }
        let spared = spared(self.publisher.heard().last_serving, recovery.stage);
        self.own_fence = self.fence_wanted && (held || !spared);
        let hand = self.notes.look(now_ms).fence.as_ref().map(Fence::words);
        self.control.fenced = self.own_fence || hand.is_some();
        if self.control.fenced != before || self.hand != hand {
            let reason = || refusal(&outcome.verdict, hand.as_deref());
            self.control.reason = self.control.fenced.then(reason).unwrap_or_default();
            self.hand = hand;
            self.ask_gate().await;
        }
    }

    fn book(&mut self, now_ms: u64, obs: &Observation, outcome: &Outcome, recovery: &RecoveryOutput) {
        // the book is written in where an episode is open or begins; on any other tick nobody reads the clock on the wall
        let eventful = recovery.stage.is_some() || !recovery.effects.is_empty() || self.acts.incidents.open().is_some();
        let now = if eventful { crate::files::wall_clock() } else { String::new() };
        self.acts.begin_if_asked(now_ms, &now, recovery, (self.engine.as_ref(), &self.instance), &self.metrics);
        let shut = self.gate.reply.as_ref().is_some_and(|reply| reply.shut) && self.own_fence;
        let (refused, fenced) = (self.acts.take_refused(), self.own_fence);
        self.acts.incidents.tick(&Moment { now: &now, recovery, outcome, shut, fenced, refused });
        let uuids = obs.gpus.value.iter().flatten().map(|gpu| gpu.uuid.clone());
        self.acts.incidents.on_gpus(uuids);
        self.acts.incidents.on_xids(self.detector.xids());
        let in_flight = self.gate.reply.as_ref().map_or(0, |reply| reply.obs.in_flight);
        let scene = act::Scene {
            now_ms,
            outcome,
            observation: Some(obs),
            engine: self.engine.as_ref(),
            in_flight: in_flight.into(),
            config: &self.config,
            program: self.follow.program(),
            is_guess: self.follow.is_guess(),
        };
        self.acts.obey(recovery, &scene, &mut self.sources);
    }
}
