//! A small deterministic model behind the real engine and server.
//!
//! The model keeps its tokens in the paged cache and computes each row from what it reads back there: a wrong block, a lost
//! chunk or a neighbour's write changes the output.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use engine::codec::{Chat, CodecError, TextCodec, TextStream, ToolFormat};
use engine::core::{CoreConfig, Loaded, Loader, start};
use engine::handle::EngineHandle;
use engine::metrics::Metrics;
use engine::model::{KvShape, LogitsWanted, Model, ModelError, ModelInfo, SeqInput, StepBatch, StepLogits, StepTerms};
use engine::server::{
    AppState,
    serve::{ServeError, serve},
};
use heartbeat::{Reader, Unknown, page::Page};
use serde_json::Value;
use tokio::{sync::oneshot, task::JoinHandle};

const VOCAB: usize = 256;
pub const EOS: u32 = 0;
/// A prompt with this token is refused by the model.
pub const POISON: u32 = 1;
/// A prompt with this token gives logits that are no numbers.
pub const NAN: u32 = 2;
/// The warm-up prompt has both; it begins so, and no test's prompt does.
const WARM_UP: [u32; 2] = [0, 1];

/// Knobs of a fake model that a test turns while it runs.
#[derive(Debug, Default)]
pub struct Knobs {
    pub step_ms: AtomicU64,
    /// The loader waits while this is set.
    pub hold_load: AtomicBool,
    /// The engine thread panics before its next step.
    pub panic: AtomicBool,
    /// Steps wait while this is set, and say that they do.
    pub hold_step: AtomicBool,
    pub holds: AtomicBool,
    /// Sequences of the largest step so far.
    pub step_seqs_max: AtomicU64,
}

pub struct FakeModel {
    info: ModelInfo,
    cache: Vec<u32>,
    block_size: usize,
    knobs: Arc<Knobs>,
}

impl FakeModel {
    pub fn new(knobs: Arc<Knobs>) -> Self {
        let info = ModelInfo {
            name: "fake".into(),
            arch: "fake".into(),
            vocab_size: VOCAB,
            seq_len_max: 2048,
            eos_token_ids: vec![EOS],
            ..ModelInfo::default()
        };
        Self { info, cache: Vec::new(), block_size: 1, knobs }
    }

    fn rows(&mut self, seq: &SeqInput) -> Vec<Vec<f32>> {
        let size = self.block_size;
        let place = |pos: usize| seq.block_table[pos / size] as usize * size + pos % size;
        for (i, token) in seq.tokens.iter().enumerate() {
            self.cache[place(seq.start_pos + i)] = *token;
        }
        let end = seq.start_pos + seq.tokens.len();
        let context: Vec<u32> = (0..end).map(|pos| self.cache[place(pos)]).collect();
        let first = match seq.logits {
            LogitsWanted::None => return Vec::new(),
            LogitsWanted::Last | LogitsWanted::Drawn(_) => end - 1,
            LogitsWanted::All => seq.start_pos,
        };
        (first..end).map(|pos| row(&context[..=pos])).collect()
    }
}

impl Model for FakeModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        (self.cache, self.block_size) = (vec![u32::MAX; shape.num_blocks * shape.block_size], shape.block_size);
        Ok(())
    }

    fn terms(&mut self, _: &StepTerms) {
        assert!(!self.knobs.panic.load(Ordering::Relaxed), "as the test wants it");
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        if batch.seqs.iter().any(|s| !s.tokens.starts_with(&WARM_UP) && s.tokens.contains(&POISON)) {
            return Err(ModelError::BadBatch("a poisoned token".into()));
        }
        while self.knobs.hold_step.load(Ordering::Relaxed) {
            self.knobs.holds.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.knobs.step_seqs_max.fetch_max(batch.seqs.len() as u64, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(self.knobs.step_ms.load(Ordering::Relaxed)));
        Ok(StepLogits::of(batch.seqs.iter().map(|s| self.rows(s)).collect()))
    }
}

fn hash(context: &[u32]) -> u64 {
    context.iter().fold(0xcbf2_9ce4_8422_2325, |h, t| (h ^ u64::from(*t)).wrapping_mul(0x100_0000_01b3).rotate_left(23))
}

/// Letters only, and now and then the end.
fn row(context: &[u32]) -> Vec<f32> {
    if !context.starts_with(&WARM_UP) && context.contains(&NAN) {
        return vec![f32::NAN; VOCAB];
    }
    let h = hash(context);
    let mut row = vec![-20.0; VOCAB];
    for (i, letter) in row[97..123].iter_mut().enumerate() {
        *letter = (hash(&[h as u32, (h >> 32) as u32, i as u32]) % 1000) as f32 / 250.0;
    }
    row[EOS as usize] = if h.is_multiple_of(64) { 9.0 } else { -20.0 };
    row
}

/// The page of an engine that lives: one that lost its core in the middle of a beat is waited for.
pub fn page_of(mut reader: Reader) -> Page {
    let begun = Instant::now();
    loop {
        match reader.read() {
            Err(Unknown::Torn { .. }) if begun.elapsed() < Duration::from_secs(60) => std::thread::yield_now(),
            page => return page.expect("a page"),
        }
    }
}

/// What greedy decoding must give, computed without cache, batch or scheduler. Stops at the end token unless told not to.
pub fn greedy(prompt: &str, count: usize, ignore_eos: bool) -> String {
    greedy_with(prompt, count, ignore_eos, |_, _| ())
}

/// The same, where `change` does something to each row after looking at the tokens before it.
pub fn greedy_with(prompt: &str, count: usize, ignore_eos: bool, change: impl Fn(&[u32], &mut [f32])) -> String {
    let mut context: Vec<u32> = prompt.bytes().map(u32::from).collect();
    let mut text = String::new();
    for _ in 0..count {
        let mut r = row(&context);
        change(&context, &mut r);
        let best = (0..VOCAB).rev().max_by(|a, b| r[*a].total_cmp(&r[*b])).unwrap() as u32;
        if best == EOS && !ignore_eos {
            break;
        }
        context.push(best);
        text.extend((best != EOS).then_some(best as u8 as char));
    }
    text
}

/// Bytes are tokens.
#[derive(Clone, Copy)]
struct ByteCodec {
    tools: ToolFormat,
    /// Marks of calls are special tokens, a byte each.
    marked: bool,
}

const MARKS: [(u32, ToolFormat, &str); 3] = [
    (3, ToolFormat::Mistral, "[TOOL_CALLS]"),
    (3, ToolFormat::Hermes, "<tool_call>"),
    (4, ToolFormat::Hermes, "</tool_call>"),
];

impl ByteCodec {
    fn special(self, id: u32) -> Option<&'static str> {
        let mark = || self.marks().find(|(mark, _)| *mark == id).map(|(_, text)| text);
        if id == EOS { Some("<end>") } else { mark() }
    }

    fn marks(self) -> impl Iterator<Item = (u32, &'static str)> {
        let its = move |(_, format, _): &(u32, ToolFormat, &str)| self.marked && *format == self.tools;
        MARKS.into_iter().filter(its).map(|(id, _, text)| (id, text))
    }
}

impl TextCodec for ByteCodec {
    fn encode(&self, text: &str, _special: bool) -> Result<Vec<u32>, CodecError> {
        if let Some((id, _)) = self.marks().find(|(_, mark)| *mark == text) {
            return Ok(vec![id]);
        }
        Ok(text.bytes().map(u32::from).collect())
    }

    fn text_bytes_max(&self, tokens: usize) -> Option<usize> {
        Some(tokens)
    }

    fn decode(&self, ids: &[u32]) -> Result<String, CodecError> {
        let bytes: Vec<u8> = ids.iter().filter(|id| self.special(**id).is_none()).map(|id| *id as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn is_special(&self, id: u32) -> bool {
        self.special(id).is_some()
    }

    fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.special(id).map_or_else(|| vec![id as u8], |text| text.as_bytes().to_vec())
    }

    fn stream(&self, special: bool) -> Box<dyn TextStream> {
        Box::new(ByteStream { codec: *self, special, pending: Vec::new() })
    }

    fn stream_after(&self, prompt: &[u32], special: bool) -> Box<dyn TextStream> {
        let mut stream = ByteStream { codec: *self, special, pending: Vec::new() };
        prompt.iter().for_each(|id| drop(stream.push(*id)));
        Box::new(stream)
    }

    fn tool_format(&self) -> Option<ToolFormat> {
        Some(self.tools)
    }

    fn chat_prompt(&self, chat: Chat<'_>) -> Result<String, CodecError> {
        let text = |m: &Value| format!("{}: {}\n", m["role"].as_str().unwrap(), m["content"].as_str().unwrap());
        let tools = chat.tools.map_or_else(String::new, |tools| format!("tools: {tools}\n"));
        let messages: String = chat.messages.as_array().unwrap().iter().map(text).collect();
        Ok(tools + &messages + if chat.opens_answer { "assistant:" } else { "" })
    }
}

struct ByteStream {
    codec: ByteCodec,
    special: bool,
    /// The beginning of a character.
    pending: Vec<u8>,
}

impl TextStream for ByteStream {
    fn push(&mut self, id: u32) -> Result<String, CodecError> {
        if let Some(text) = self.codec.special(id) {
            return Ok(if self.special { text.to_owned() } else { String::new() });
        }
        self.pending.push(id as u8);
        match std::str::from_utf8(&self.pending) {
            Err(error) if error.error_len().is_none() => Ok(String::new()),
            _ => Ok(String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()),
        }
    }

    fn finish(&mut self) -> Result<String, CodecError> {
        Ok(String::new())
    }
}

/// How a test wants its engine.
#[derive(Clone)]
pub struct Setup {
    pub core: CoreConfig,
    pub lie: bool,
    pub request_timeout: Duration,
    pub drain_timeout: Duration,
    pub client_patience: Duration,
    pub step_ms: u64,
    pub hold_load: bool,
}

impl Default for Setup {
    fn default() -> Self {
        let core = CoreConfig { num_seqs_max: 8, queue_max: 64, ..CoreConfig::default() };
        let (request_timeout, drain_timeout) = (Duration::from_secs(60), Duration::from_secs(60));
        let client_patience = request_timeout;
        Self { core, lie: false, request_timeout, drain_timeout, client_patience, step_ms: 0, hold_load: false }
    }
}

impl Setup {
    pub fn fault(text: &str) -> Self {
        let mut setup = Self::default();
        setup.core.faults = vec![text.parse().unwrap()];
        // the hang is what the test wants to see
        setup.core.guards = false;
        setup
    }
}

/// A served engine with a fake model.
pub struct TestEngine {
    pub addr: SocketAddr,
    pub handle: EngineHandle,
    pub knobs: Arc<Knobs>,
    pub sigusr2: Arc<AtomicBool>,
    shutdown: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<(), ServeError>>,
}

impl TestEngine {
    /// Starts an engine and waits until it is ready.
    pub async fn ready(setup: Setup) -> Self {
        let engine = Self::start(setup).await;
        wait_until("the engine is ready", || engine.handle.shared.ready.get().is_some()).await;
        engine
    }

    pub async fn start(setup: Setup) -> Self {
        Self::of(setup, fake_loader).await
    }

    /// One that loads what the test wants.
    pub async fn of(setup: Setup, loader: impl FnOnce(Arc<Knobs>) -> Loader) -> Self {
        let knobs = Arc::new(Knobs::default());
        knobs.step_ms.store(setup.step_ms, Ordering::Relaxed);
        knobs.hold_load.store(setup.hold_load, Ordering::Relaxed);
        let metrics = Arc::new(Metrics::new("fake").unwrap());
        let started = start(setup.core, metrics, loader(knobs.clone())).unwrap();
        let mut app = AppState::new(started.handle.clone(), "fake", setup.lie, setup.request_timeout);
        app.client_patience = setup.client_patience;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (shutdown, told) = oneshot::channel::<()>();
        let told = async { drop(told.await) };
        let served = tokio::spawn(serve(listener, app, started.ended, setup.drain_timeout, told));
        let (handle, sigusr2) = (started.handle, started.sigusr2);
        Self { addr, handle, knobs, sigusr2, shutdown: Some(shutdown), served }
    }

    /// What SIGTERM does.
    pub fn terminate(&mut self) {
        drop(self.shutdown.take());
    }

    pub async fn ended(self) -> Result<(), ServeError> {
        tokio::time::timeout(Duration::from_secs(60), self.served).await.expect("the service ends").unwrap()
    }
}

fn fake_loader(knobs: Arc<Knobs>) -> Loader {
    Box::new(move |progress| {
        progress(0, 100);
        while knobs.hold_load.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        progress(100, 100);
        Ok(loaded(Box::new(FakeModel::new(knobs)), None))
    })
}

/// What a loader of this codec brings.
pub fn loaded(model: Box<dyn Model>, draft: Option<Box<dyn Model>>) -> Loaded {
    Loaded { model, codec: Arc::new(ByteCodec { tools: ToolFormat::Hermes, marked: false }), draft }
}

/// An engine whose model calls tools like this, by special tokens where the format has marks.
pub async fn calling(tools: ToolFormat) -> TestEngine {
    let brings = move |model| Loaded { model, codec: Arc::new(ByteCodec { tools, marked: true }), draft: None };
    let loader = |knobs| -> Loader { Box::new(move |_| Ok(brings(Box::new(FakeModel::new(knobs))))) };
    let engine = TestEngine::of(Setup::default(), loader).await;
    wait_until("the engine is ready", || engine.handle.shared.ready.get().is_some()).await;
    engine
}

/// Waits until `predicate` holds, for a generous while.
pub async fn wait_until(what: &str, mut predicate: impl FnMut() -> bool) {
    let since = Instant::now();
    while !predicate() {
        assert!(since.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
