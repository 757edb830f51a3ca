//! `cargo bench -p engine --bench speculation [-- NAME]`: the engine thread with and without `--speculative`, in pairs run in turn. `ngram` on text
//! that repeats itself (greedy output of random weights soon does) and on text that does not (temperature 1); `draft` and `mtp` with a draft
//! model, and a head, that are always right and that never are. Prints `name value unit goal`; the ratio of the two speeds is what carries
//! over to another machine. With NAME only lines whose name has it.
//!
//! Models are random and of the sizes that are given: what a step and a guess cost is real, what they say is not. `draft` and `mtp` have the
//! next token put into their logits (`Voiced`), so that their luck is known; the head is one block of the model's width with an output head of
//! its own, which reads what a real one reads.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]
#![allow(clippy::disallowed_methods, reason = "a bench may wait: who runs it has a deadline")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use engine::codec::HfCodec;
use engine::core::{CoreConfig, Loaded, start};
use engine::demo_model::{DemoArch, write_demo_model};
use engine::handle::{EngineHandle, GenerateRequest, TokenEvent};
use engine::metrics::Metrics;
use engine::model::{
    KvShape, LogitsWanted, Model, ModelError, ModelInfo, Pass, Pulse, RandomShape, StepBatch, StepLogits, StepTerms,
    random_model,
};
use engine::sampling::SamplingParams;
use engine::speculation::SpeculationSpec;
use engine::weights::WeightType;

const PAIRS: usize = 7;
const OUTPUT: usize = 400;
/// Small enough for a minute, large enough that a step is made of reading weights.
const SHAPE: RandomShape = RandomShape { layers: 6, vocab: 32_000, seq_len_max: 4096, ..RandomShape::QWEN3_0_6B };
/// Reads a fourteenth of what the model reads.
const DRAFT: RandomShape =
    RandomShape { hidden: 256, intermediate: 768, layers: 1, heads: 4, kv_heads: 2, head_dim: 64, ..SHAPE };
/// What one block and an output head are.
const HEAD: RandomShape = RandomShape { layers: 1, ..SHAPE };

/// Who guesses, and whether that is ever right.
#[derive(Clone, Copy)]
enum Luck {
    OfText,
    Right,
    Wrong,
}

fn main() {
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let dir = tempfile::tempdir().expect("a folder");
    write_demo_model(dir.path(), DemoArch::Llama, 0).expect("a tokenizer");
    let ngram = [
        ("repeating", 0.0, 1, 1.3),
        ("repeating_batch4", 0.0, 4, 0.98),
        ("random", 1.0, 1, 0.98),
        ("random_batch4", 1.0, 4, 0.98),
    ];
    measure(dir.path(), &wanted, (SpeculationSpec::Ngram, Luck::OfText), &ngram);
    let (draft, mtp) = (|| SpeculationSpec::Draft(dir.path().to_owned()), || SpeculationSpec::Mtp);
    let right = [("draft_right", 0.0, 1, 1.3), ("draft_right_batch4", 0.0, 4, 0.98)];
    measure(dir.path(), &wanted, (draft(), Luck::Right), &right);
    let wrong = [("draft_wrong", 0.0, 1, 0.98), ("draft_wrong_batch4", 0.0, 4, 0.98)];
    measure(dir.path(), &wanted, (draft(), Luck::Wrong), &wrong);
    let right = [("mtp_right", 0.0, 1, 1.3), ("mtp_right_batch4", 0.0, 4, 0.98)];
    measure(dir.path(), &wanted, (mtp(), Luck::Right), &right);
    let wrong = [("mtp_wrong", 0.0, 1, 0.98), ("mtp_wrong_batch4", 0.0, 4, 0.98)];
    measure(dir.path(), &wanted, (mtp(), Luck::Wrong), &wrong);
}

/// Each case (name, temperature, requests at once, goal), with who guesses turning itself off and not.
fn measure(dir: &Path, wanted: &str, who: (SpeculationSpec, Luck), cases: &[(&str, f32, usize, f64)]) {
    let cases: Vec<_> = cases.iter().filter(|(name, ..)| format!("speculation_{name}").contains(wanted)).collect();
    if cases.is_empty() {
        return;
    }
    let plain = engine(dir, (None, who.1), false);
    let guessing = engine(dir, (Some(who.0.clone()), who.1), false);
    let always = engine(dir, (Some(who.0), who.1), true);
    for (name, temperature, batch, goal) in cases {
        let (mut governed, mut forced) = (Vec::new(), Vec::new());
        for pair in 0..PAIRS as u64 {
            let speed = |handle: &EngineHandle| speed(handle, *temperature, *batch, pair);
            let base = speed(&plain);
            governed.push(speed(&guessing) / base);
            forced.push(speed(&always) / base);
        }
        print(&format!("speculation_{name}"), governed, &format!(">={goal}"));
        print(&format!("speculation_{name}_always"), forced, "-");
    }
    let accepted = always.shared.metrics.text(&always.shared.board, 0).expect("metrics");
    accepted.lines().filter(|line| line.starts_with("vllm:spec_decode_num")).for_each(|line| println!("# {line}"));
    for handle in [plain, guessing, always] {
        handle.shared.stop.store(true, Relaxed);
    }
}

/// Models whose next token is known: what is computed is the inner model's, what is said is a walk through the vocabulary.
struct Voiced {
    inner: Box<dyn Model>,
    head: Option<Box<dyn Model>>,
    /// What guesses are off by: nothing, where they are right.
    off: u32,
}

impl Voiced {
    fn of(shape: RandomShape, off: u32, head: bool) -> Box<dyn Model> {
        let head = head.then(|| random(HEAD));
        Box::new(Self { inner: random(shape), head, off })
    }
}

impl Model for Voiced {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        self.head.as_mut().map_or(Ok(()), |head| head.allocate_kv(shape))?;
        self.inner.allocate_kv(shape)
    }

    fn terms(&mut self, terms: &StepTerms) {
        self.inner.terms(terms);
    }

    fn pulse(&self) -> Option<Pulse> {
        self.inner.pulse()
    }

    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        let guesses = batch.pass == Pass::Head || self.head.is_none();
        let mut logits = match &mut self.head {
            Some(head) if batch.pass == Pass::Head => head.forward(&StepBatch::of(batch.seqs.clone()))?,
            _ => self.inner.forward(batch)?,
        };
        let off = if guesses { self.off } else { 0 };
        for (seq, rows) in batch.seqs.iter().zip(&mut logits.rows) {
            let read =
                if seq.logits == LogitsWanted::All { &seq.tokens[..] } else { &seq.tokens[seq.tokens.len() - 1..] };
            for (token, row) in read.iter().zip(rows) {
                row[((token * 31 + 7 + off) % 30_000) as usize] = 1e6;
            }
        }
        Ok(logits)
    }
}

fn random(shape: RandomShape) -> Box<dyn Model> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    random_model(shape, WeightType::Q8_0, WeightType::Q8_0, threads).expect("whole blocks")
}

fn print(name: &str, mut ratios: Vec<f64>, goal: &str) {
    ratios.sort_by(f64::total_cmp);
    let (least, median, most) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
    println!("{name} {median:.3} x {goal} # {least:.3} to {most:.3} in {PAIRS} pairs");
}

fn engine(dir: &Path, (speculation, luck): (Option<SpeculationSpec>, Luck), speculates_always: bool) -> EngineHandle {
    let codec = Arc::new(HfCodec::from_dir(dir).expect("a codec"));
    let (mtp, drafts) =
        (speculation == Some(SpeculationSpec::Mtp), matches!(speculation, Some(SpeculationSpec::Draft(_))));
    let load = Box::new(move |_: &mut dyn FnMut(u64, u64)| {
        let off = u32::from(matches!(luck, Luck::Wrong));
        let model = match luck {
            Luck::OfText => random(SHAPE),
            // the model is never off, its head is
            Luck::Right | Luck::Wrong => Voiced::of(SHAPE, if mtp { off } else { 0 }, mtp),
        };
        Ok(Loaded { model, codec, draft: drafts.then(|| Voiced::of(DRAFT, off, false)) })
    });
    let config = CoreConfig { speculation, speculates_always, prefix_cache: false, ..CoreConfig::default() };
    let handle = start(config, Arc::new(Metrics::new("m").expect("metrics")), load).expect("an engine").handle;
    while handle.shared.ready.get().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    handle
}

/// Tokens a second of `batch` requests together.
fn speed(handle: &EngineHandle, temperature: f32, batch: usize, seed: u64) -> f64 {
    let request = |n: u64| GenerateRequest {
        prompt: (0..32).map(|i| ((seed * 977 + n * 31 + i * 7) % 30_000) as u32).collect(),
        max_new_tokens: OUTPUT,
        ignore_eos: true,
        sampling: SamplingParams { temperature, seed: Some(seed + n), ..SamplingParams::default() },
        ..GenerateRequest::default()
    };
    let began = Instant::now();
    let streams = handle.submit((0..batch as u64).map(request).collect()).expect("room");
    let count = |mut stream: engine::handle::RequestStream| async move {
        let mut tokens = 0;
        while let Ok(event) = stream.next().await {
            tokens += usize::from(matches!(event, TokenEvent::Token { .. }));
        }
        tokens
    };
    let tokens: usize =
        futures::executor::block_on(futures::future::join_all(streams.into_iter().map(count))).into_iter().sum();
    assert_eq!(tokens, OUTPUT * batch, "somebody failed");
    tokens as f64 / began.elapsed().as_secs_f64()
}
