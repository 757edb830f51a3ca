//! `cargo bench -p engine --bench speculation`: the engine thread with and without `--speculative ngram`, in pairs run in turn, on text that
//! repeats itself (greedy output of random weights soon does) and on text that does not (temperature 1). Prints `name value unit goal`;
//! the ratio of the two speeds is what carries over to another machine.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]

use std::sync::Arc;
use std::time::Instant;

use engine::codec::HfCodec;
use engine::core::{CoreConfig, Loaded, start};
use engine::demo_model::{DemoArch, write_demo_model};
use engine::handle::{EngineHandle, GenerateRequest, TokenEvent};
use engine::metrics::Metrics;
use engine::model::{RandomShape, random_model};
use engine::sampling::SamplingParams;
use engine::speculation::SpeculationSpec;
use engine::weights::WeightType;

const PAIRS: usize = 7;
const OUTPUT: usize = 400;
/// Small enough for a minute, large enough that a step is made of reading weights.
const SHAPE: RandomShape = RandomShape { layers: 6, vocab: 32_000, seq_len_max: 4096, ..RandomShape::QWEN3_0_6B };

fn main() {
    let dir = tempfile::tempdir().expect("a folder");
    write_demo_model(dir.path(), DemoArch::Llama, 0).expect("a tokenizer");
    let plain = engine(dir.path(), None, false);
    let guessing = engine(dir.path(), Some(SpeculationSpec::Ngram), false);
    let always = engine(dir.path(), Some(SpeculationSpec::Ngram), true);
    for (name, temperature, batch, goal) in [
        ("repeating", 0.0, 1, 1.3),
        ("repeating_batch4", 0.0, 4, 0.98),
        ("random", 1.0, 1, 0.98),
        ("random_batch4", 1.0, 4, 0.98),
    ] {
        let (mut governed, mut forced) = (Vec::new(), Vec::new());
        for pair in 0..PAIRS as u64 {
            let speed = |handle: &EngineHandle| speed(handle, temperature, batch, pair);
            let base = speed(&plain);
            governed.push(speed(&guessing) / base);
            forced.push(speed(&always) / base);
        }
        print(&format!("speculation_{name}"), governed, &format!(">={goal}"));
        print(&format!("speculation_{name}_always"), forced, "-");
    }
    let accepted = guessing.shared.metrics.text(&guessing.shared.board, 0).expect("metrics");
    accepted.lines().filter(|line| line.starts_with("vllm:spec_decode_num")).for_each(|line| println!("# {line}"));
}

fn print(name: &str, mut ratios: Vec<f64>, goal: &str) {
    ratios.sort_by(f64::total_cmp);
    let (least, median, most) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
    println!("{name} {median:.3} x {goal} # {least:.3} to {most:.3} in {PAIRS} pairs");
}

fn engine(dir: &std::path::Path, speculation: Option<SpeculationSpec>, speculates_always: bool) -> EngineHandle {
    let codec = Arc::new(HfCodec::from_dir(dir).expect("a codec"));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let load = Box::new(move |_: &mut dyn FnMut(u64, u64)| {
        let model = random_model(SHAPE, WeightType::Q8_0, WeightType::Q8_0, threads).expect("whole blocks");
        Ok(Loaded { model, codec, draft: None })
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
