//! `truebeat engine`: arguments, signals, and the wiring of engine thread and server. The only place that reads the environment.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::{Args, ValueEnum};
use thiserror::Error;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};

use crate::backend::cuda::open::DeviceChoice;
use crate::chat_template::sandbox;
use crate::core::{CoreConfig, CoreError, start};
use crate::fault::FaultSpec;
use crate::guard;
use crate::handle::Shared;
use crate::metrics::Metrics;
use crate::ranks::{Fleet, RANKS_MAX, RankOf, WorkerConfig, WorkerError, run_worker};
use crate::server::{
    AppState,
    serve::{ServeError, serve},
};
use crate::speculation::SpeculationSpec;
use crate::stack_dump;
use crate::stuck::EXIT_STUCK;
use device::device_choice;
pub use device::{Collectives, DeviceError, DeviceSpec};
pub use loaders::folder_loader;
use loaders::{loader, threads_of_rank};

mod device;
mod loaders;

/// How often the log has a line of statistics.
const STATS_EVERY: Duration = Duration::from_secs(10);
/// Evidence of a wait that was given up gets so long, beside the answers to the requests.
const EVIDENCE_MAX: Duration = Duration::from_millis(400);

/// Arguments of `truebeat engine`.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Folder of a Hugging Face model (config.json, *.safetensors, tokenizer.json), or a GGUF file
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Directory of the heartbeat page; without one no page is published
    #[arg(long, value_name = "DIR", env = "TRUEBEAT_PAGE_DIR")]
    pub page_dir: Option<PathBuf>,
    /// Number that the launcher gives this start, for the page's identity
    #[arg(long, value_name = "N", env = "TRUEBEAT_NONCE", default_value_t = 0)]
    pub nonce: u64,
    /// Name of the model in the API [default: the folder's name]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one())]
    pub max_num_seqs: u32,
    /// Longest sequence, prompt and output, in tokens; not above what the model says, and no more than the KV cache holds [default: what the
    /// model says]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one())]
    pub max_model_len: Option<u32>,
    /// Blocks of the KV cache [default: 4 of the longest sequences, at least 16384 tokens, or what fits into half of the free memory]
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    pub kv_blocks: Option<u32>,
    /// Tokens a block of the KV cache holds
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least_one())]
    pub block_size: u32,
    /// Requests that may wait beside those that run; more get 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_queue: u32,
    /// Prompt and output tokens that one step may run
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one())]
    pub max_step_tokens: u32,
    /// By how much the prompts of others may lengthen a step in which somebody's output is under way
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    pub prefill_slice: humantime::Duration,
    /// Compute every prompt anew instead of sharing the KV blocks of equal beginnings
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Guess tokens ahead and verify several a step: ngram (from the sequence itself), mtp (by the model's own MTP head) or draft=DIR (by
    /// a smaller model with the same vocabulary); the output stays the same
    #[arg(long, value_name = "ngram|mtp|draft=DIR")]
    pub speculative: Option<SpeculationSpec>,
    /// Tokens guessed a sequence and step, at most
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub speculative_tokens: u32,
    /// Guess even where it makes the engine slower, to measure that
    #[arg(long, requires = "speculative")]
    pub speculative_always: bool,
    /// A request that is not done by then is answered with an error
    #[arg(long, value_name = "TIME", default_value = "300s")]
    pub request_timeout: humantime::Duration,
    /// What accepted requests get after SIGTERM
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub drain_timeout: humantime::Duration,
    /// Whose sampling parameters hold where a request leaves them out: those of the model's generation_config.json, or of nobody
    #[arg(long, value_enum, default_value = "auto")]
    pub generation_config: GenerationConfig,
    /// Processes that share the model, each with a part of every weight
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX as i64))]
    pub tensor_parallel: u32,
    /// Run every step call by call; without, shapes of steps that come again run by programs made for them
    #[arg(long)]
    pub enforce_eager: bool,
    /// Keep weights as the processor wants them in this directory, so that the next start, and every rank, maps them instead of making
    /// them; without one each rank makes its own at each start
    #[arg(long, value_name = "DIR", env = "TRUEBEAT_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// What computes: the processor, or a CUDA device by its number (docs/cuda.md; needs a build with --features engine/cuda); of several ranks
    /// the first one's, followed by the others', or one for each
    #[arg(long, value_name = "cpu|cuda[:N[,N…]]", default_value = "cpu")]
    pub device: DeviceSpec,
    /// How values go from rank to rank where each has a device: by NCCL where all of them can, or through this machine's memory
    #[arg(long, value_enum, default_value = "auto")]
    pub collectives: Collectives,
    /// Folder of the device's kernels, as `make kernels` writes them [default: the program's own]
    #[arg(long, value_name = "DIR")]
    pub device_kernels: Option<PathBuf>,
    /// Memory of the device that the engine takes, in MiB, for weights, KV cache and steps [default: 90 % of what is free]
    #[arg(long, value_name = "MIB", value_parser = at_least_one())]
    pub device_memory_mib: Option<u32>,
    /// Break the engine on purpose (docs/faults.md lists how); of one rank (:1); after a time (@10s), steps (@200steps) or decoded
    /// tokens (@700tokens), at a decode step of so many requests (@15reqs), or on a signal (@sigusr2)
    #[arg(long, value_name = "KIND[:RANK][@AFTER]")]
    pub fault: Vec<FaultSpec>,
    /// Deadlines for every step: one that does not end is given up, its requests are answered, and the engine exits with
    /// status 85 [default: on; off with --fault, whose hang is to be seen]
    #[arg(long, value_enum)]
    pub guards: Option<Guards>,
    /// Makes this process a worker rank; for the engine's own use
    #[arg(long = "rank-of", hide = true)]
    pub rank_of: Option<RankOf>,
    /// Makes this process one that renders the chats of its parent; for the engine's own use
    #[arg(long, hide = true)]
    pub renders_chats: bool,
    /// Answer /health with 200 and accept requests whatever happens, as other engines do
    #[arg(long)]
    pub lie: bool,
}

/// Whether waits have deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Guards {
    On,
    Off,
}

/// Whose sampling parameters hold where a request leaves them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GenerationConfig {
    /// The model's, where it has some.
    Auto,
    /// Nobody's: the temperature is 1 and nothing else changes anything.
    None,
}

/// Why the engine did not start, or ended.
#[derive(Debug, Error)]
pub enum EngineError {
    #[error("cannot listen on {addr}; is another engine running there?")]
    Listen { addr: SocketAddr, source: std::io::Error },
    #[error("cannot handle signals")]
    Signals(#[source] std::io::Error),
    #[error("the model's name {name:?} cannot be a metrics label")]
    Metrics { name: String, source: prometheus::Error },
    #[error(transparent)]
    Core(#[from] CoreError),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("the thread of a worker rank ended without a word")]
    WorkerDied,
    #[error("a renderer of chats cannot go on")]
    Renderer(#[source] std::io::Error),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("--fault strikes rank {rank}, and with --tensor-parallel {ranks} there is none after rank {last}", last = ranks - 1)]
    NoRank { rank: usize, ranks: u32 },
}

impl EngineError {
    /// What the process exits with: [`EXIT_STUCK`] for a step that was given up, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Core(CoreError::Stuck(_)) | Self::Serve(ServeError::Core(CoreError::Stuck(_))) => EXIT_STUCK,
            Self::Worker(WorkerError::Stuck(_)) => EXIT_STUCK,
            _ => 1,
        }
    }
}

/// Runs the engine until SIGTERM or SIGINT and a drain.
///
/// # Errors
/// [`EngineError`]; the process should then exit with a failure.
pub async fn run(args: EngineArgs) -> Result<(), EngineError> {
    if args.renders_chats {
        return sandbox::serve().map_err(EngineError::Renderer);
    }
    let catch = |kind| signal(kind).map_err(EngineError::Signals);
    let (term, int) = (catch(SignalKind::terminate())?, catch(SignalKind::interrupt())?);
    let usr2 = catch(SignalKind::user_defined2())?;
    // Before anything is loaded: a start-up that hangs is to be explained too.
    if let Some(Err(error)) = args.page_dir.as_deref().map(stack_dump::start) {
        tracing::warn!(error = %error, "this engine will not tell its stacks");
    }
    let ranks = args.tensor_parallel;
    if let Some(rank) = args.fault.iter().map(FaultSpec::rank_min).find(|rank| *rank >= ranks as usize) {
        return Err(EngineError::NoRank { rank, ranks });
    }
    let device = device_choice(&args, args.rank_of.as_ref().map_or(0, |of| of.rank))?;
    if let Some(of) = args.rank_of.clone() {
        return worker(args, of, device, (term, int, usr2)).await;
    }
    let name = served_name(&args);
    let metrics = Metrics::new(&name).map_err(|source| EngineError::Metrics { name: name.clone(), source })?;
    let metrics = Arc::new(metrics);
    // Bound before the model is loaded: who asks meanwhile hears "starting" instead of a refused connection (S4).
    let listen = |source| EngineError::Listen { addr: args.listen, source };
    let listener = TcpListener::bind(args.listen).await.map_err(listen)?;
    tracing::info!(addr = %listener.local_addr().map_err(listen)?, model = %args.model.display(), lie = args.lie, "listening");
    let fleet = Fleet::default();
    let config = core_config(&args);
    let loader = loader(&args, device, &fleet, &config);
    let engine = start(config, metrics.clone(), loader)?;
    let shared = engine.handle.shared.clone();
    let app = AppState::new(engine.handle, &name, args.lie, args.request_timeout.into());
    let mut helpers = vec![tokio::spawn(log_stats(metrics)), tokio::spawn(watch_usr2(usr2, engine.sigusr2))];
    if guarded(&args) {
        helpers.push(tokio::spawn(guard::watch(shared.clone(), fleet.clone())));
    }
    let evidence = tokio::spawn(explain(shared.clone(), args.page_dir.clone(), fleet.clone()));
    let served = serve(listener, app, engine.ended, args.drain_timeout.into(), told_to_stop(term, int)).await;
    helpers.iter().for_each(tokio::task::JoinHandle::abort);
    let served = served.map_err(EngineError::from);
    if served.as_ref().is_err_and(|error| error.exit_code() == EXIT_STUCK) {
        let left = EVIDENCE_MAX.saturating_sub(shared.since_given_up().unwrap_or_default());
        drop(tokio::time::timeout(left, evidence).await);
    }
    fleet.end();
    if let Some(since) = shared.since_given_up() {
        tracing::error!(after_ms = since.as_millis(), "the engine ends, so long after its deadline passed");
    }
    served
}

/// Saves the evidence as soon as the engine gives up, and ends the other ranks: one that is stuck itself does not stop when it is asked
/// to, and what burns meanwhile only takes time from those who answer.
async fn explain(shared: Arc<Shared>, page_dir: Option<PathBuf>, fleet: Fleet) {
    let stuck = shared.given_up().await;
    let saving = tokio::task::spawn_blocking(move || guard::evidence(&stuck, &shared, page_dir.as_deref()));
    fleet.kill();
    drop(saving.await);
}

/// A worker rank: everything happens on a thread of its own, named as the first rank's. Signals that end an engine are the first rank's
/// business; it ends its workers when it has drained.
async fn worker(
    args: EngineArgs,
    of: RankOf,
    device: Option<DeviceChoice>,
    signals: (Signal, Signal, Signal),
) -> Result<(), EngineError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let body = move || {
        let config = WorkerConfig {
            of: &of,
            model: &args.model,
            page_dir: args.page_dir.as_deref(),
            nonce: args.nonce,
            faults: args.fault.clone(),
            threads: threads_of_rank(args.tensor_parallel),
            guards: guarded(&args),
            cache_dir: args.cache_dir.as_deref(),
            eager: args.enforce_eager,
            head: args.speculative == Some(SpeculationSpec::Mtp),
            device,
        };
        drop(tell.send(run_worker(&config)));
    };
    std::thread::Builder::new().name("engine".into()).spawn(body).map_err(CoreError::Spawn)?;
    let result = told.await.map_err(|_| EngineError::WorkerDied);
    drop(signals);
    Ok(result??)
}

fn guarded(args: &EngineArgs) -> bool {
    args.guards.map_or(args.fault.is_empty(), |guards| guards == Guards::On)
}

fn at_least_one() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

fn served_name(args: &EngineArgs) -> String {
    let folder = || {
        // `--model .` has no last component of its own.
        let path = args.model.canonicalize().unwrap_or_else(|_| args.model.clone());
        path.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
    };
    args.served_model_name.clone().unwrap_or_else(folder)
}

fn core_config(args: &EngineArgs) -> CoreConfig {
    CoreConfig {
        num_seqs_max: args.max_num_seqs as usize,
        step_tokens_max: args.max_step_tokens as usize,
        queue_max: args.max_queue as usize,
        block_size: args.block_size as usize,
        num_blocks: args.kv_blocks.map(|n| n as usize),
        seq_len_max: args.max_model_len.map(|n| n as usize),
        generation_defaults: args.generation_config == GenerationConfig::Auto,
        prefill_beside_decode: args.prefill_slice.into(),
        prefix_cache: !args.no_prefix_cache,
        speculation: args.speculative.clone(),
        drafts_max: args.speculative_tokens as usize,
        speculates_always: args.speculative_always,
        page_dir: args.page_dir.clone(),
        nonce: args.nonce,
        faults: args.fault.clone(),
        guards: guarded(args),
        ranks: args.tensor_parallel,
        ..CoreConfig::default()
    }
}

async fn told_to_stop(mut term: Signal, mut int: Signal) {
    tokio::select! {
        _ = term.recv() => (),
        _ = int.recv() => (),
    }
}

/// SIGUSR2 fires the faults that wait for it; without any it does nothing, rather than end the process.
async fn watch_usr2(mut usr2: Signal, flag: Arc<AtomicBool>) {
    while usr2.recv().await.is_some() {
        tracing::warn!("SIGUSR2: faults that wait for it fire at the next step");
        flag.store(true, Ordering::Relaxed);
    }
}

/// The line that people look for. After one of only zeros it is silent until something moves.
async fn log_stats(metrics: Arc<Metrics>) {
    let mut tick = tokio::time::interval(STATS_EVERY);
    let (mut before, mut quiet) = (metrics.stats(), true);
    tick.tick().await;
    loop {
        tick.tick().await;
        let now = metrics.stats();
        let rate = |new: u64, old: u64| (new - old) as f64 / STATS_EVERY.as_secs_f64();
        let (prompt, output) = (rate(now.2, before.2), rate(now.3, before.3));
        let silent = now.0 + now.1 + prompt + output == 0.0;
        if !(silent && quiet) {
            tracing::info!(
                "Avg prompt throughput: {prompt:.1} tokens/s, Avg generation throughput: {output:.1} tokens/s, \
                 Running: {} reqs, Waiting: {} reqs, KV cache usage: {:.1}%",
                now.0,
                now.1,
                now.4 * 100.0
            );
        }
        (before, quiet) = (now, silent);
    }
}
