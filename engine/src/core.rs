//! The engine thread's life: load, warm up, then step until it is told to stop. It owns model, scheduler and KV cache; nothing
//! that it waits for is without a deadline (E1), and nobody outside waits for it (E4).

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, sync_channel},
    },
    time::{Duration, Instant},
};

use heartbeat::{Writer, page::Identity};
use thiserror::Error;
use tokio::sync::oneshot;

use crate::beat::{Heart, LOAD_LEASE};
use crate::codec::TextCodec;
use crate::device::QueuedModel;
use crate::fault::{FaultSpec, Faults, Place};
use crate::handle::{EngineHandle, Ready, Shared, Submission};
use crate::memory;
use crate::metrics::Metrics;
use crate::model::{KvShape, LoadProgress, Model, ModelError, ModelInfo};
use crate::panics::guarded;
use crate::ranks::LOAD_SILENCE_MAX;
use crate::scheduler::{Limits, plan::CHUNK_TOKENS_MIN};
use crate::speculation::{Speculation, SpeculationSpec};
use crate::start::Stage;
use crate::stuck::{Stuck, StuckKind};
use crate::waits::this_tid;
use facts::facts;
use room::{Room, Wanted};
use step::Core;
pub use step::shape_of;
use warm::Warmer;

mod ahead;
mod alone;
mod facts;
mod room;
mod sample;
mod step;
#[cfg(test)]
mod tests;
mod warm;

/// Requests that the loop takes in before a step: those that run do not wait for a whole burst of new ones.
const SUBMISSIONS_A_TURN: usize = 32;
/// And for so long, one at least: what a request costs here grows with its prompt, and between two beats nobody's token comes.
const SUBMITTING_MAX: Duration = Duration::from_millis(10);
/// The cache has room for so many tokens, however short the sequences are, where nobody says how large it is to be.
const TOKENS_USUAL_MIN: usize = 16_384;
/// Where there is not room for so many, no engine starts that was not told to.
const TOKENS_LEAST: usize = 512;
/// An idle loop turns, and beats, at least this often.
const IDLE_WAIT: Duration = Duration::from_millis(100);

/// What the engine thread is built from.
#[derive(Debug, Clone)]
pub struct CoreConfig {
    pub num_seqs_max: usize,
    pub step_tokens_max: usize,
    /// Requests that may wait beside those that run.
    pub queue_max: usize,
    pub block_size: usize,
    /// None: room for 4 sequences of the longest length, and at least 16384 tokens, or what fits into half of the free memory.
    pub num_blocks: Option<usize>,
    /// None: what the model says; more than that is refused.
    pub seq_len_max: Option<usize>,
    /// What requests leave out is sampled as the model's makers say.
    pub generation_defaults: bool,
    /// By how much prompts may lengthen a step in which somebody decodes.
    pub prefill_beside_decode: Duration,
    /// Keep and share the KV blocks of equal prefixes.
    pub prefix_cache: bool,
    /// Who guesses tokens ahead, and how many a step at most.
    pub speculation: Option<SpeculationSpec>,
    pub drafts_max: usize,
    /// Guess even where it does not pay.
    pub speculates_always: bool,
    /// Events that a request may have unread before it is cut.
    pub client_queue: usize,
    /// What a step waits for the masks of its grammars, all together: longer than nearly all of them take. A sequence whose mask is
    /// not there then runs the same step again.
    pub mask_wait: Duration,
    /// Where to publish the heartbeat page; None: nowhere.
    pub page_dir: Option<PathBuf>,
    pub nonce: u64,
    pub faults: Vec<FaultSpec>,
    /// Steps have deadlines (E1); without, this engine hangs as others do.
    pub guards: bool,
    /// Processes that share the model.
    pub ranks: u32,
    /// What the loader is at, for the page.
    pub stage: Stage,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            num_seqs_max: 64,
            step_tokens_max: 512,
            queue_max: 256,
            block_size: 16,
            num_blocks: None,
            seq_len_max: None,
            generation_defaults: true,
            prefill_beside_decode: Duration::from_millis(200),
            prefix_cache: true,
            speculation: None,
            drafts_max: 4,
            speculates_always: false,
            client_queue: 4096,
            mask_wait: Duration::from_millis(10),
            page_dir: None,
            nonce: 0,
            faults: Vec::new(),
            guards: true,
            ranks: 1,
            stage: Stage::default(),
        }
    }
}

impl CoreConfig {
    /// The longest sequence that is wanted of a model whose own longest is `model`.
    ///
    /// # Errors
    /// [`CoreError::SeqLen`]: the model cannot do it, and whoever counts on it should not find that out by a request.
    pub fn seq_len_of(&self, model: usize) -> Result<usize, CoreError> {
        let asked = self.seq_len_max.unwrap_or(model);
        if asked > model { Err(CoreError::SeqLen { asked, model }) } else { Ok(asked) }
    }
}

/// Why the engine thread ended.
#[derive(Debug, Error)]
pub enum CoreError {
    #[error("the heartbeat page in {dir:?} could not be made")]
    Page { dir: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("the model could not be loaded")]
    Load(#[source] LoadFailure),
    #[error("the KV cache could not be allocated")]
    Cache(#[source] ModelError),
    #[error("the warm-up step failed")]
    WarmUp(#[source] ModelError),
    #[error("the draft model has a vocabulary of {draft} tokens, the model one of {model}: they cannot work together")]
    DraftVocabulary { draft: usize, model: usize },
    #[error(
        "--max-model-len asks for sequences of {asked} tokens, and this model's longest has {model}: ask for {model} at most, or \
         leave it out"
    )]
    SeqLen { asked: usize, model: usize },
    #[error("this model has no MTP head that could guess: leave out --speculative mtp")]
    NoHead,
    #[error("a thread of the engine could not be started")]
    Spawn(#[source] std::io::Error),
    #[error("the engine gave up a wait")]
    Stuck(#[source] Stuck),
    #[error("the engine thread ended without being asked to")]
    Died,
}

impl CoreError {
    /// A wait that was given up ends the engine in one way, wherever in its life it was (E1); all else is `other`.
    fn of(other: fn(ModelError) -> Self) -> impl Fn(ModelError) -> Self {
        move |error| match error {
            ModelError::Stuck(stuck) => Self::Stuck(stuck),
            error => other(error),
        }
    }

    /// The same for what a loader says, which may be one of these already.
    fn of_loader(failure: LoadFailure) -> Self {
        let failure = match failure.downcast::<Self>() {
            Ok(own) => return *own,
            Err(failure) => failure,
        };
        failure.downcast().map_or_else(Self::Load, |stuck| Self::Stuck(*stuck))
    }
}

/// Whatever a loader's error is.
pub type LoadFailure = Box<dyn std::error::Error + Send + Sync>;

/// What a loader brings.
pub struct Loaded {
    pub model: Box<dyn Model>,
    pub codec: Arc<dyn TextCodec>,
    /// The model that guesses, where one is asked for.
    pub draft: Option<Box<dyn Model>>,
}

/// Loads a model, on the engine thread, reporting its progress (H5).
pub type Loader = Box<dyn FnOnce(LoadProgress<'_>) -> Result<Loaded, LoadFailure> + Send>;

/// A started engine.
pub struct Started {
    pub handle: EngineHandle,
    /// How the thread ended.
    pub ended: oneshot::Receiver<Result<(), CoreError>>,
    /// Set on SIGUSR2: fires the faults that wait for it.
    pub sigusr2: Arc<AtomicBool>,
}

/// Starts the engine thread; it is ready when `handle.shared.ready` is set.
///
/// # Errors
/// [`CoreError::Page`] and [`CoreError::Spawn`]; all else is told through [`Started::ended`].
pub fn start(config: CoreConfig, metrics: Arc<Metrics>, loader: Loader) -> Result<Started, CoreError> {
    let slots_max = config.num_seqs_max + config.queue_max;
    let shared = Arc::new(Shared::new(metrics, slots_max));
    let (inbox, outbox) = sync_channel(slots_max);
    let heart = Heart::new(open_page(&config)?, shared.board.clone());
    let faults = Faults::new(config.faults.clone());
    let sigusr2 = faults.signalled.clone();
    let handle = EngineHandle::new(shared.clone(), inbox, config.client_queue);
    let (tell, ended) = oneshot::channel();
    let boot = Boot { config, shared, heart, faults, inbox: outbox };
    let body = move || {
        boot.shared.loop_tid.store(this_tid(), Ordering::Relaxed);
        let result = boot.run(loader);
        // Nobody listens when the server went first; then nobody needs the answer.
        drop(tell.send(result));
    };
    std::thread::Builder::new().name("engine".into()).spawn(body).map_err(CoreError::Spawn)?;
    Ok(Started { handle, ended, sigusr2 })
}

fn open_page(config: &CoreConfig) -> Result<Option<Writer>, CoreError> {
    let Some(dir) = &config.page_dir else { return Ok(None) };
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| CoreError::Page { dir: dir.clone(), source };
    std::fs::create_dir_all(dir).map_err(|e| failed(e.into()))?;
    let identity = Identity::of_this_process(0, config.ranks.max(1), config.nonce).map_err(|e| failed(e.into()))?;
    Writer::create(dir, &identity).map(Some).map_err(|e| failed(e.into()))
}

/// What the thread starts with.
struct Boot {
    config: CoreConfig,
    shared: Arc<Shared>,
    heart: Heart,
    faults: Faults,
    inbox: Receiver<Submission>,
}

impl Boot {
    fn run(self, loader: Loader) -> Result<(), CoreError> {
        let (shared, mut core) = (self.shared.clone(), None);
        let ended = guarded(|| Ok(self.live(loader, &mut core))).unwrap_or_else(|text| {
            Err(CoreError::Stuck(Stuck { kind: StuckKind::Panic, text, waited: Duration::ZERO }))
        });
        if let Err(CoreError::Stuck(stuck)) = &ended {
            // told before the requests end with `core`: who is answered "shutdown" finds the reason in /health
            shared.give_up(stuck.clone());
        }
        ended
    }

    /// Starts, puts what the loop owns into `place`, and turns.
    fn live(mut self, loader: Loader, place: &mut Option<Core>) -> Result<(), CoreError> {
        let (heart, stage) = (&mut self.heart, &self.config.stage);
        // with other ranks it waits for whichever of them says something
        let within = if self.config.ranks > 1 { LOAD_SILENCE_MAX } else { LOAD_LEASE };
        let Loaded { model, codec, draft } =
            loader(&mut |done, total| stage.publish(heart, done, total, within)).map_err(CoreError::of_loader)?;
        let mut model = QueuedModel::new(model, self.faults.clone()).map_err(CoreError::Spawn)?;
        let draft = draft.map(|draft| model.beside(draft));
        if let Some(pulse) = model.pulse() {
            // the cell is empty: this thread alone fills it, once
            drop(self.shared.pulse.set(pulse));
        }
        let gives_signs = model.gives_signs();
        let limits = limits_of(&self.config, model.info(), room(&self.config, &model, draft.as_ref()))?;
        self.faults.strike(Place::Startup);
        let (guards, mut warmer) = (self.config.guards, Warmer::new(&self.config, &limits, &mut self.heart));
        warmer.prepare(&mut model)?;
        let guesser = warmer.guesser(draft, &mut model)?;
        self.shared.metrics.cache_config(&limits);
        let info = facts(model.info(), &*codec, self.config.generation_defaults);
        let ready = Ready { info, limits, codec, grammars: Arc::default() };
        let speculation = guesser.map(|guesser| Speculation::new(guesser, self.config.drafts_max));
        let speculation =
            if self.config.speculates_always { speculation.map(Speculation::always) } else { speculation };
        let core = Core::new(Box::new(model), limits, self.shared.clone(), self.heart, guards).speculating(speculation);
        let core = place.insert(core);
        (core.mask_wait, core.gives_signs) = (self.config.mask_wait, gives_signs);
        self.faults.ready();
        core.rest(&self.faults);
        tracing::info!(model = %ready.info.name, arch = %ready.info.arch, ?limits, "engine is ready");
        // the same
        drop(self.shared.ready.set(ready));
        turn(core, &self.inbox, &self.faults, &self.shared.stop).map_err(CoreError::Stuck)
    }
}

/// The loop: a step where there is one to take, else a short wait for work. Ends when told to, or when nobody can ask any more.
///
/// # Errors
/// A step that did not end in time.
fn turn(core: &mut Core, inbox: &Receiver<Submission>, faults: &Faults, stop: &AtomicBool) -> Result<(), Stuck> {
    use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
    while !stop.load(Ordering::Relaxed) {
        take_in(inbox.try_iter(), SUBMITTING_MAX, |new| core.submit(new));
        if core.step(faults)? {
            continue;
        }
        core.rest(faults);
        match inbox.recv_timeout(IDLE_WAIT) {
            Ok(new) => core.submit(new),
            Err(Timeout) => (),
            Err(Disconnected) => break,
        }
    }
    Ok(())
}

/// Takes in what is there, as much as a turn may.
fn take_in<T>(news: impl Iterator<Item = T>, within: Duration, mut submit: impl FnMut(T)) {
    let began = Instant::now();
    for new in news.take(SUBMISSIONS_A_TURN) {
        submit(new);
        if began.elapsed() >= within {
            break;
        }
    }
}

/// What a block of the cache takes of the machine's memory, if it lies there, and what is free of it.
fn room(config: &CoreConfig, model: &QueuedModel, draft: Option<&QueuedModel>) -> Option<Room> {
    let block = KvShape { num_blocks: 1, block_size: config.block_size.max(1) };
    let caches = [Some(model), draft].into_iter().flatten();
    let block_bytes = caches.filter_map(|model| model.kv_bytes(block)).reduce(u64::saturating_add)?;
    Some(Room { block_bytes, free_bytes: memory::free_bytes()? })
}

/// # Errors
/// [`CoreError::SeqLen`]; [`CoreError::Cache`]: the cache does not fit into `room`.
fn limits_of(config: &CoreConfig, info: &ModelInfo, room: Option<Room>) -> Result<Limits, CoreError> {
    let wanted = config.seq_len_of(info.seq_len_max)?;
    let block_size = config.block_size.max(1);
    let blocks = |tokens: usize| tokens.div_ceil(block_size).max(1);
    let usual = blocks((4 * wanted).max(TOKENS_USUAL_MIN));
    let asked = config.num_blocks.map(|blocks| blocks.max(1));
    let least = blocks(wanted.min(TOKENS_LEAST));
    let num_blocks = room::num_blocks(Wanted { asked, usual, least }, room).map_err(CoreError::Cache)?;
    if asked.is_none() && num_blocks < usual {
        tracing::warn!(num_blocks, usual, ?room, "the KV cache is what fits into half of the free memory");
    }
    // what the cache cannot hold is no length to promise: who asks for "the rest of the context" would be refused every time
    let seq_len_max = wanted.min(num_blocks.saturating_mul(block_size));
    if seq_len_max < wanted {
        tracing::warn!(
            num_blocks,
            block_size,
            wanted,
            seq_len_max,
            "the KV cache is shorter than the longest sequence"
        );
    }
    Ok(Limits {
        num_blocks,
        block_size,
        num_seqs_max: config.num_seqs_max.max(1),
        // Every running sequence must be able to decode in one step, and a prompt to move beside them.
        step_tokens_max: config.step_tokens_max.max(config.num_seqs_max.max(1) + CHUNK_TOKENS_MIN),
        waiting_max: config.num_seqs_max + config.queue_max,
        seq_len_max,
        prefill_beside_decode_ns: u64::try_from(config.prefill_beside_decode.as_nanos()).unwrap_or(u64::MAX),
        prefix_cache: config.prefix_cache,
    })
}
