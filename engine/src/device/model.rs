//! A model behind the device queue: the step loop hands a batch over and asks the event until the step's time is up. The model goes
//! with the job and comes back with its result; one whose step never ends is lost, and every later step says so at once.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::{DeviceQueue, Event};
use crate::fault::{Faults, Place};
use crate::model::{
    ALLOCATE_MAX, KvShape, Model, ModelError, ModelInfo, Pulse, Sign, StepBatch, StepLogits, StepTerms, Tell,
};
use crate::programs::ProgramCounts;
use crate::stuck::{Stuck, StuckKind};
use crate::waits::{Pardon, Patience, RunQueues, Threads, Turns, TurnsOf};

/// The deadline of a collective passes first, because it can name the rank, and so does a device's own: it knows what it launched.
const AFTER_THEIRS: Duration = Duration::from_millis(150);
/// How often a wait asks whether a thread that it waits for was kept from running, from when on.
const LOOK: Duration = Duration::from_millis(50);

/// The model that the step loop has.
pub struct QueuedModel {
    queue: DeviceQueue,
    /// With the device while a step is under way; never back from one that was given up.
    model: Option<Box<dyn Model>>,
    info: ModelInfo,
    /// Counts the layers that the device has done.
    layers: Option<Pulse>,
    programs: Option<Arc<ProgramCounts>>,
    /// What its waits for other ranks forgave them, in nanoseconds.
    forgiven: Option<Pulse>,
    /// Whom it waits for beside the device's own thread.
    threads: Threads,
    /// What is known of a thread's time in line for a core.
    turns: TurnsOf,
    has_head: bool,
    draws: bool,
    /// Counts this thread's own looks: it is not stuck while it waits for the device.
    looks: Pulse,
    allowed: Option<Duration>,
    /// What a wait gets beyond that.
    margin: Duration,
    faults: Faults,
}

impl QueuedModel {
    /// Puts `model` behind a queue of its own. `faults` strike on the device's thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(model: Box<dyn Model>, faults: Faults) -> std::io::Result<Self> {
        Ok(Self::on(DeviceQueue::start()?, Pulse::default(), model, faults))
    }

    /// Another model on the same device: behind the same queue, its waits counted by the same looks.
    pub fn beside(&self, model: Box<dyn Model>) -> Self {
        Self::on(self.queue.clone(), self.looks.clone(), model, self.faults.clone())
    }

    fn on(queue: DeviceQueue, looks: Pulse, model: Box<dyn Model>, faults: Faults) -> Self {
        let (info, layers, programs) = (model.info().clone(), model.pulse(), model.programs());
        let (has_head, draws, forgiven) = (model.has_head(), model.draws(), model.forgiven());
        let margin = if model.has_ranks() || model.waits() { AFTER_THEIRS } else { Duration::ZERO };
        let (threads, turns): (_, TurnsOf) = (model.threads(), Arc::new(Turns::of));
        let (model, allowed) = (Some(model), None);
        Self {
            queue,
            model,
            info,
            layers,
            programs,
            forgiven,
            threads,
            turns,
            has_head,
            draws,
            looks,
            allowed,
            margin,
            faults,
        }
    }

    /// Does a step show that it goes on before it ends?
    pub fn gives_signs(&self) -> bool {
        self.layers.is_some()
    }

    /// As [`Model::allocate_kv`]; `tell` hears of each sign of life.
    ///
    /// # Errors
    /// As there.
    pub fn allocate(&mut self, shape: KvShape, tell: Tell<'_>) -> Result<(), ModelError> {
        self.run(Some(ALLOCATE_MAX + self.margin), tell, move |model| model.allocate_kv(shape))?
    }

    /// As [`Model::forward_telling`].
    ///
    /// # Errors
    /// As there.
    pub fn step(&mut self, batch: &StepBatch, tell: Tell<'_>) -> Result<StepLogits, ModelError> {
        // a device of its own hangs in earnest; the processor's ends, and its event never says so
        if self.faults.armed(Place::Event) && !self.model.as_mut().is_some_and(|model| model.hang()) {
            self.queue.stick();
        }
        let (batch, allowed) = (batch.clone(), self.allowed.map(|allowed| allowed + self.margin));
        self.run(allowed, tell, move |model| model.forward(&batch))?
    }

    /// Runs `job` on the device and waits for its event until `allowed` has passed without a sign of life.
    fn run<T: Send + 'static>(
        &mut self,
        allowed: Option<Duration>,
        tell: Tell<'_>,
        job: impl FnOnce(&mut dyn Model) -> T + Send + 'static,
    ) -> Result<T, ModelError> {
        let Some(mut model) = self.model.take() else { return Err(lost()) };
        let faults = self.faults.clone();
        let event = self.queue.submit(move || {
            // an injected exception takes the model along, as one that leaves the device's context broken
            faults.strike(Place::Device);
            // the model comes back from a job that panics itself, and the next may go well (EP5)
            let result = catch_unwind(AssertUnwindSafe(|| job(model.as_mut())));
            (model, result)
        });
        let event = event.map_err(|error| ModelError::Device(error.to_string()))?;
        let (model, result) = self.wait(&event, allowed, tell)?;
        self.model = Some(model);
        // a panic goes on in the caller, as from a call without a queue
        result.or_else(|panic| resume_unwind(panic))
    }

    fn wait<T>(&self, event: &Event<T>, allowed: Option<Duration>, tell: Tell<'_>) -> Result<T, ModelError> {
        let beats = || read(self.layers.as_ref());
        if allowed.is_none() {
            event.spin_for_ever();
        }
        let mut patience = Patience::new(allowed);
        let (mut seen, mut line) = (beats(), Line { forgiven: read(self.forgiven.as_ref()), ..Line::default() });
        loop {
            match event.query() {
                Some(Ok(result)) => return Ok(result),
                Some(Err(_panic)) => {
                    let text = "the device's thread panicked; its message is in the log above";
                    return Err(ModelError::Device(text.to_owned()));
                }
                None => (),
            }
            if !patience.turn() {
                return Err(ModelError::Stuck(given_up(&patience)));
            }
            self.looks.fetch_add(1, Relaxed);
            // a layer that was done is life: long steps are not stuck ones
            let now = beats();
            if now != seen {
                seen = now;
                line.ours = Pardon::default();
                patience.renew();
                tell(Sign::Layer);
            }
            self.look_at_line(&mut line, &mut patience, tell);
        }
    }

    /// A thread that wants the processor and does not get it is late, not stuck, and so is one that waits for a helper or a rank which does
    /// not get it: that wait is the longer for it.
    fn look_at_line(&self, line: &mut Line, patience: &mut Patience, tell: Tell<'_>) {
        let (waited, looked) = (patience.waited(), patience.looked());
        if waited < line.waited + LOOK {
            return;
        }
        let forgiven = read(self.forgiven.as_ref());
        let theirs = Duration::from_nanos(forgiven.saturating_sub(line.forgiven));
        let tids = [vec![self.queue.tid()], (self.threads)()].concat();
        let passed = waited.saturating_sub(line.waited);
        // ranks' threads are among both: a step is as late as its unluckiest thread, and no later
        let held_up = line.run_queues.held_up(&tids, passed, self.turns.as_ref()).max(theirs);
        // whoever looks at the page counts pauses of this thread too, and the step with all its layers
        let told = line.told.of(held_up, passed);
        patience.forgive(line.ours.of(held_up, looked.saturating_sub(line.looked)));
        (line.waited, line.looked, line.forgiven) = (waited, looked, forgiven);
        if told > Duration::ZERO {
            tell(Sign::HeldUp(told));
        }
    }
}

/// What a wait has seen of threads in line for a core, as of its last look.
#[derive(Default)]
struct Line {
    run_queues: RunQueues,
    waited: Duration,
    looked: Duration,
    /// What waits for other ranks forgave by then.
    forgiven: u64,
    /// What this wait forgives, since the last sign of life.
    ours: Pardon,
    /// What is told to whoever goes by the step's lease, since its beginning.
    told: Pardon,
}

fn read(pulse: Option<&Pulse>) -> u64 {
    pulse.map_or(0, |pulse| pulse.load(Relaxed))
}

impl Model for QueuedModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn pulse(&self) -> Option<Pulse> {
        Some(self.looks.clone())
    }

    fn programs(&self) -> Option<Arc<ProgramCounts>> {
        self.programs.clone()
    }

    fn has_head(&self) -> bool {
        self.has_head
    }

    fn draws(&self) -> bool {
        self.draws
    }

    fn terms(&mut self, terms: &StepTerms) {
        self.allowed = terms.allowed;
        if let Some(model) = &mut self.model {
            model.terms(terms);
        }
    }

    fn kv_bytes(&self, shape: KvShape) -> Option<u64> {
        self.model.as_ref()?.kv_bytes(shape)
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        self.allocate(shape, &mut |_| ())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        self.step(batch, &mut |_| ())
    }

    fn forward_telling(&mut self, batch: &StepBatch, tell: Tell<'_>) -> Result<StepLogits, ModelError> {
        self.step(batch, tell)
    }
}

fn given_up(patience: &Patience) -> Stuck {
    let waited = patience.waited();
    let text = format!("the device's event did not come for {} ms (E1)", waited.as_millis());
    Stuck { kind: StuckKind::DeviceWait, text, waited }
}

fn lost() -> ModelError {
    let text = "the device was given up: a step on it never ended".to_owned();
    ModelError::Stuck(Stuck { kind: StuckKind::DeviceWait, text, waited: Duration::ZERO })
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
