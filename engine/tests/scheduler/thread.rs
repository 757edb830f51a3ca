//! EP2 to EP6 through the engine thread: queue, scheduler, model, sampler, guesses and heartbeat as they are in production.

use std::path::Path;
use std::sync::{Arc, atomic::Ordering};
use std::time::{Duration, Instant};

use engine::cli::folder_loader;
use engine::codec::HfCodec;
use engine::core::{CoreConfig, Loaded, start};
use engine::demo_model::{DemoArch, write_demo_model};
use engine::handle::{End, EngineHandle, GenerateRequest, RequestStream, TokenEvent};
use engine::metrics::Metrics;
use engine::model::{Model, StepBatch, StepLogits, load_model};
use engine::sampling::SamplingParams;
use engine::speculation::SpeculationSpec;

use crate::paged::{EOS, FIRST, NAN, PANICS, PagedModel, REFUSED, greedy};

pub type MakeModel = Box<dyn FnOnce() -> Box<dyn Model> + Send>;

/// An engine thread around a model, and one that guesses if there is one.
pub fn engine(config: CoreConfig, dir: &Path, model: MakeModel, draft: Option<MakeModel>) -> EngineHandle {
    let codec = Arc::new(HfCodec::from_dir(dir).unwrap());
    let load = Box::new(move |_: &mut dyn FnMut(u64, u64)| {
        Ok(Loaded { model: model(), codec, draft: draft.map(|draft| draft()) })
    });
    let handle = start(config, Arc::new(Metrics::new("m").unwrap()), load).unwrap().handle;
    until("the engine is ready", || handle.shared.ready.get().is_some());
    handle
}

pub fn paged() -> MakeModel {
    Box::new(|| Box::new(PagedModel::new(2048, true)))
}

pub fn folder(dir: &Path) -> MakeModel {
    let dir = dir.to_owned();
    Box::new(move || load_model(&dir, &mut |_, _| ()).unwrap())
}

pub fn demo(root: &Path, arch: DemoArch, seed: u64) -> std::path::PathBuf {
    let dir = root.join(format!("{arch:?}-{seed}"));
    write_demo_model(&dir, arch, seed).unwrap();
    dir
}

pub fn until(what: &str, predicate: impl Fn() -> bool) {
    let since = Instant::now();
    while !predicate() {
        assert!(since.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Everything that a stream says, and its end.
async fn whole(mut stream: RequestStream) -> (Vec<u32>, End) {
    let mut said = Vec::new();
    loop {
        match stream.next().await {
            Ok(TokenEvent::Token { id, .. }) => said.push(id),
            Ok(TokenEvent::Prompt(_)) => (),
            Err(end) => return (said, end),
        }
    }
}

/// The same request once more; none of these follows a grammar, which has one holder.
fn again(request: &GenerateRequest) -> GenerateRequest {
    GenerateRequest {
        prompt: request.prompt.clone(),
        stop_token_ids: request.stop_token_ids.clone(),
        sampling: request.sampling.clone(),
        constraint: None,
        ..*request
    }
}

/// All at once, or one after the other.
pub async fn outputs(handle: &EngineHandle, requests: &[GenerateRequest], together: bool) -> Vec<(Vec<u32>, End)> {
    if together {
        return futures::future::join_all(
            handle.submit(requests.iter().map(again).collect()).unwrap().into_iter().map(whole),
        )
        .await;
    }
    let mut all = Vec::new();
    for request in requests {
        all.push(whole(handle.submit(vec![again(request)]).unwrap().remove(0)).await);
    }
    all
}

pub fn metric(handle: &EngineHandle, name: &str) -> f64 {
    let text = handle.shared.metrics.text(&handle.shared.board, 0).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name) && line[name.len()..].starts_with('{'));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Prompts that begin alike and then do not, some greedy, some sampled with a seed; a repetition in each, to have something to guess.
pub fn requests(vocab: u32) -> Vec<GenerateRequest> {
    let word = |i: u32| 4 + (i * i * 31 + i * 7) % (vocab - 4);
    let request = |n: u32| {
        let mut prompt: Vec<u32> = (0..20 + 3 * (n % 3)).map(word).collect();
        prompt.extend((0..n % 7 + 1).map(|i| word(i + 50 * n)));
        prompt.extend(prompt.clone());
        let (temperature, seed) = if n % 3 == 2 { (0.8, Some(u64::from(n))) } else { (0.0, None) };
        let sampling = SamplingParams { temperature, seed, logprobs: Some(1), ..SamplingParams::default() };
        GenerateRequest {
            prompt: prompt.into(),
            max_new_tokens: 48,
            ignore_eos: true,
            sampling,
            ..GenerateRequest::default()
        }
    };
    (0..9).map(request).collect()
}

pub fn plain() -> CoreConfig {
    CoreConfig { num_seqs_max: 1, prefix_cache: false, ..CoreConfig::default() }
}

/// Room for three of nine, in blocks of four tokens, 13 tokens a step: chunks, preemptions and shared prefixes all the time.
pub fn crowded() -> CoreConfig {
    CoreConfig { num_seqs_max: 8, step_tokens_max: 13, block_size: 4, num_blocks: Some(90), ..CoreConfig::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn ep4_real_models_say_the_same_alone_in_a_crowd_and_with_guesses() {
    let root = tempfile::tempdir().unwrap();
    for arch in [DemoArch::Llama, DemoArch::Qwen3] {
        let (dir, other) = (demo(root.path(), arch, 1), demo(root.path(), arch, 2));
        let requests = requests(300);
        let expected = outputs(&engine(plain(), &dir, folder(&dir), None), &requests, false).await;
        assert!(expected.iter().all(|(said, end)| said.len() == 48 && *end == End::Length));

        let crowd = engine(crowded(), &dir, folder(&dir), None);
        assert_eq!(outputs(&crowd, &requests, true).await, expected, "{arch:?}: in a crowd");
        assert!(metric(&crowd, "vllm:num_preemptions_total") > 0.0);
        assert!(metric(&crowd, "vllm:prefix_cache_hits_total") > 0.0);
        assert_eq!(outputs(&crowd, &requests, true).await, expected, "{arch:?}: from the cache");

        let guesses = [(SpeculationSpec::Ngram, None), draft(&other), draft(&dir)];
        for (speculation, draft) in guesses {
            let name = format!("{arch:?}: {speculation:?}");
            let config =
                CoreConfig { speculation: Some(speculation), speculates_always: true, ..CoreConfig::default() };
            let guessing = engine(CoreConfig { num_seqs_max: 4, ..config.clone() }, &dir, folder(&dir), draft);
            assert_eq!(outputs(&guessing, &requests[..4], true).await, expected[..4], "{name}");
            assert_eq!(outputs(&guessing, &requests[4..], false).await, expected[4..], "{name}");
            assert!(metric(&guessing, "vllm:spec_decode_num_draft_tokens_total") > 0.0, "{name}");
        }
    }
}

fn draft(dir: &Path) -> (SpeculationSpec, Option<MakeModel>) {
    (SpeculationSpec::Draft(dir.to_owned()), Some(folder(dir)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_of_another_vocabulary_is_refused_and_one_that_fails_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let config = CoreConfig { speculates_always: true, ..CoreConfig::default() };
    let loader = |draft: MakeModel| -> engine::core::Loader {
        let codec = Arc::new(HfCodec::from_dir(&dir).unwrap());
        Box::new(move |_| Ok(Loaded { model: paged()(), codec, draft: Some(draft()) }))
    };
    let metrics = || Arc::new(Metrics::new("m").unwrap());
    let refused = start(config.clone(), metrics(), loader(folder(&dir))).unwrap().ended.await.unwrap();
    assert!(refused.unwrap_err().to_string().contains("vocabulary of"));

    // Its longest sequence is shorter than the prompt and what it says first panics: nobody notices.
    for (token, draft_len) in [(PANICS, 2048), (REFUSED, 2048), (FIRST, 8)] {
        let draft: MakeModel = Box::new(move || Box::new(Grumpy(PagedModel::new(draft_len, false), token)));
        let handle = start(config.clone(), metrics(), loader(draft)).unwrap().handle;
        until("the engine is ready", || handle.shared.ready.get().is_some());
        let request = &requests(60)[..1];
        assert_eq!(outputs(&handle, request, true).await[0].0, greedy(&request[0].prompt, 48, &[]));
        until("guessing is over", || token == FIRST || metric(&handle, "truebeat:speculation_on") == 0.0);
        assert_eq!(outputs(&handle, request, true).await[0].1, End::Length);
    }
}

/// A draft model that reads a bad token instead of what it is given.
struct Grumpy(PagedModel, u32);

impl Model for Grumpy {
    fn info(&self) -> &engine::model::ModelInfo {
        self.0.info()
    }

    fn allocate_kv(&mut self, shape: engine::model::KvShape) -> Result<(), engine::model::ModelError> {
        self.0.allocate_kv(shape)
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, engine::model::ModelError> {
        let mut batch = batch.clone();
        batch.seqs.iter_mut().for_each(|seq| seq.tokens.fill(self.1));
        self.0.forward(&batch)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_loader_of_the_command_line_brings_the_draft_model() {
    let root = tempfile::tempdir().unwrap();
    let (dir, other) = (demo(root.path(), DemoArch::Llama, 1), demo(root.path(), DemoArch::Llama, 2));
    let load = folder_loader(&dir, Some(SpeculationSpec::Draft(other)));
    let loaded = load(&mut |_, _| ()).unwrap();
    assert_eq!(loaded.draft.unwrap().info().vocab_size, loaded.model.info().vocab_size);
    assert!(folder_loader(&dir, Some(SpeculationSpec::Ngram))(&mut |_, _| ()).unwrap().draft.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_guesses_for_itself_is_right_every_time_even_when_it_samples() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let (speculation, draft) = draft(&dir);
    let config = CoreConfig { speculation: Some(speculation), speculates_always: true, ..CoreConfig::default() };
    let handle = engine(config, &dir, folder(&dir), draft);
    outputs(&handle, &requests(300), true).await;
    let guessed = metric(&handle, "vllm:spec_decode_num_draft_tokens_total");
    let accepted = metric(&handle, "vllm:spec_decode_num_accepted_tokens_total");
    assert!(guessed > 100.0 && accepted == guessed, "{accepted} of {guessed}");
    let by_place = metric(&handle, "vllm:spec_decode_num_accepted_tokens_per_pos_total");
    assert_eq!(by_place, accepted);
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_with_bonus_tokens_only_and_steps_with_guesses_follow_one_another_and_all_is_done() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let speculation = Some(SpeculationSpec::Ngram);
    let config = CoreConfig { speculation, speculates_always: true, num_seqs_max: 16, ..CoreConfig::default() };
    let handle = engine(config, &dir, paged(), None);
    // S1's load shape, a quarter of it: 128 requests, 16 at a time.
    let requests: Vec<GenerateRequest> = (0..128u32)
        .map(|n| GenerateRequest {
            prompt: (0..20).map(|i| FIRST + (n * 5 + i * 3) % 50).collect(),
            max_new_tokens: 30,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            ..GenerateRequest::default()
        })
        .collect();
    for (request, (said, _)) in requests.iter().zip(outputs(&handle, &requests, true).await) {
        assert_eq!(said, greedy(&request.prompt, 30, &[EOS]));
    }
    let (steps, drafts) =
        (metric(&handle, "truebeat:steps_total"), metric(&handle, "vllm:spec_decode_num_drafts_total"));
    let accepted = metric(&handle, "vllm:spec_decode_num_accepted_tokens_total");
    assert!(steps > 0.0 && drafts > 20.0 && accepted > 20.0, "{steps} steps, {drafts} drafts, {accepted} accepted");
}

#[tokio::test(flavor = "multi_thread")]
async fn ep5_a_poisoned_request_fails_alone_and_leaves_nothing_behind() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let handle = engine(CoreConfig { block_size: 4, ..CoreConfig::default() }, &dir, paged(), None);
    let common: Vec<u32> = (0..16).map(|i| FIRST + i).collect();
    for poison in [REFUSED, PANICS, NAN] {
        let request = |last: &[u32]| GenerateRequest {
            prompt: [&common[..], last].concat().into(),
            max_new_tokens: 40,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            ..GenerateRequest::default()
        };
        let all = [request(&[9]), request(&[10, poison, 11]), request(&[12, 12])];
        let ends = outputs(&handle, &all, true).await;
        assert!(matches!(&ends[1], (said, End::Failed(_)) if said.is_empty()), "{:?}", ends[1]);
        for i in [0, 2] {
            assert_eq!(ends[i].0, greedy(&all[i].prompt, 40, &[EOS]), "a neighbour of {poison}");
        }
        assert!(matches!(outputs(&handle, &all[1..2], false).await[0].1, End::Failed(_)), "and again");
    }
    until("all blocks are back", || metric(&handle, "vllm:kv_cache_usage_perc") == 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ep2_every_accepted_request_has_exactly_one_end_whoever_leaves() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let handle =
        engine(CoreConfig { block_size: 4, num_blocks: Some(60), ..CoreConfig::default() }, &dir, paged(), None);
    let request = |n: u32| {
        let prompt = (0..10 + n % 30).map(|i| FIRST + (n + i) % 50).collect();
        GenerateRequest { prompt, max_new_tokens: 60, ..GenerateRequest::default() }
    };
    let mut kept = Vec::new();
    for n in 0..200u32 {
        let mut stream = handle.submit(vec![request(n)]).unwrap().remove(0);
        match n % 4 {
            0 => drop(stream),
            1 => drop(stream.next().await),
            _ => kept.push(tokio::spawn(whole(stream))),
        }
        until("there is room", || handle.shared.in_flight() < 100);
    }
    for stream in kept {
        assert!(matches!(stream.await.unwrap().1, End::Stop | End::Length));
    }
    until("nobody is left", || handle.shared.in_flight() == 0);
    assert_eq!(metric(&handle, "truebeat:requests_ended_total"), 200.0);
    assert_eq!(handle.shared.board.load().unwrap().beat.requests_finished, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn ep6_the_heartbeat_counts_what_was_delivered_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let delivered = |handle: &EngineHandle| handle.shared.board.load().map(|view| view.beat);
    let handle =
        engine(CoreConfig { speculation: Some(SpeculationSpec::Ngram), ..CoreConfig::default() }, &dir, paged(), None);
    let said: usize = outputs(&handle, &requests(60), true).await.iter().map(|(said, _)| said.len()).sum();
    until("the last beat is out", || delivered(&handle).is_some_and(|beat| beat.tokens_delivered == said as u64));

    let livelock = CoreConfig { faults: vec!["livelock@3steps".parse().unwrap()], ..CoreConfig::default() };
    let handle = engine(livelock, &dir, paged(), None);
    let mut streams = handle.submit(requests(60)).unwrap();
    until("steps turn", || delivered(&handle).is_some_and(|beat| beat.steps_completed > 100));
    let before = delivered(&handle).unwrap();
    until("more steps turn", || {
        delivered(&handle).is_some_and(|beat| beat.steps_completed > before.steps_completed + 100)
    });
    let after = delivered(&handle).unwrap();
    assert_eq!(after.tokens_delivered, before.tokens_delivered, "steps are no progress");
    streams.clear();
    handle.shared.stop.store(true, Ordering::Relaxed);
}
