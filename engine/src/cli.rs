//! `truebeat engine`: arguments, signals, and the wiring of engine thread and server. The only place that reads the environment.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::Args;
use thiserror::Error;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};

use crate::codec::HfCodec;
use crate::core::{CoreConfig, CoreError, Loaded, Loader, start};
use crate::fault::FaultSpec;
use crate::metrics::Metrics;
use crate::model::load_model;
use crate::server::{
    AppState,
    serve::{ServeError, serve},
};
use crate::speculation::SpeculationSpec;
use crate::stack_dump;

/// How often the log has a line of statistics.
const STATS_EVERY: Duration = Duration::from_secs(10);

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
    /// Longest sequence, prompt and output, in tokens [default: what the model says]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one())]
    pub max_model_len: Option<u32>,
    /// Blocks of the KV cache [default: 4 of the longest sequences, at least 16384 tokens]
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
    /// Guess tokens ahead and verify several a step: ngram (from the sequence itself) or draft=DIR (by a smaller model with the
    /// same vocabulary); the output stays the same
    #[arg(long, value_name = "ngram|draft=DIR")]
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
    /// Break the engine on purpose: step-stall, device-wait, startup-stall, livelock, crash; after a time (10s), steps
    /// (200steps), or on a signal (sigusr2)
    #[arg(long, value_name = "KIND[@AFTER]")]
    pub fault: Vec<FaultSpec>,
    /// Answer /health with 200 and accept requests whatever happens, as other engines do
    #[arg(long)]
    pub lie: bool,
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
}

/// Runs the engine until SIGTERM or SIGINT and a drain.
///
/// # Errors
/// [`EngineError`]; the process should then exit with a failure.
pub async fn run(args: EngineArgs) -> Result<(), EngineError> {
    let catch = |kind| signal(kind).map_err(EngineError::Signals);
    let (term, int) = (catch(SignalKind::terminate())?, catch(SignalKind::interrupt())?);
    let usr2 = catch(SignalKind::user_defined2())?;
    // Before anything is loaded: a start-up that hangs is to be explained too.
    if let Some(Err(error)) = args.page_dir.as_deref().map(stack_dump::start) {
        tracing::warn!(error = %error, "this engine will not tell its stacks");
    }
    let name = served_name(&args);
    let metrics = Metrics::new(&name).map_err(|source| EngineError::Metrics { name: name.clone(), source })?;
    let metrics = Arc::new(metrics);
    // Bound before the model is loaded: who asks meanwhile hears "starting" instead of a refused connection (S4).
    let listen = |source| EngineError::Listen { addr: args.listen, source };
    let listener = TcpListener::bind(args.listen).await.map_err(listen)?;
    tracing::info!(addr = %listener.local_addr().map_err(listen)?, model = %args.model.display(), lie = args.lie, "listening");
    let engine = start(core_config(&args), metrics.clone(), folder_loader(&args.model, args.speculative.clone()))?;
    let app = AppState::new(engine.handle, &name, args.lie, args.request_timeout.into());
    let helpers = [tokio::spawn(log_stats(metrics)), tokio::spawn(watch_usr2(usr2, engine.sigusr2))];
    let served = serve(listener, app, engine.ended, args.drain_timeout.into(), told_to_stop(term, int)).await;
    helpers.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(served?)
}

/// A loader for a Hugging Face folder, and for that of a draft model.
pub fn folder_loader(dir: &Path, speculation: Option<SpeculationSpec>) -> Loader {
    let dir = dir.to_owned();
    Box::new(move |progress| {
        let codec = Arc::new(HfCodec::from_dir(&dir)?);
        let model = load_model(&dir, progress)?;
        let draft = match speculation {
            Some(SpeculationSpec::Draft(dir)) => Some(load_model(&dir, progress)?),
            _ => None,
        };
        Ok(Loaded { model, codec, draft })
    })
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
        prefill_beside_decode: args.prefill_slice.into(),
        prefix_cache: !args.no_prefix_cache,
        speculation: args.speculative.clone(),
        drafts_max: args.speculative_tokens as usize,
        speculates_always: args.speculative_always,
        page_dir: args.page_dir.clone(),
        nonce: args.nonce,
        faults: args.fault.clone(),
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
