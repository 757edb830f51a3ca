//! The loop's turns, one by one.

use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::*;
use crate::beat::Clock;
use crate::grammar::tests::{Bytes, END, held, info};
use crate::grammar::{Constraint, GrammarSpec, Grammars, MASK_TIME_MAX_ALONE};
use crate::handle::{End, GenerateRequest, RequestStream, TokenEvent};
use crate::model::{KvShape, LogitsWanted, SeqInput, StepBatch, StepLogits};
use crate::sampling::{LogitRules, SamplingParams};

/// What the device draws in all of these tests; greedily it would be 0.
const DRAWN: Option<u32> = Some(2);

/// Likes all tokens alike, and counts its steps.
struct Plain {
    info: ModelInfo,
    steps: Arc<AtomicU64>,
}

impl Model for Plain {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn allocate_kv(&mut self, _: KvShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn draws(&self) -> bool {
        true
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let (count, drawn) = (batch.seqs.len(), |seq: &&SeqInput| matches!(seq.logits, LogitsWanted::Drawn(_)));
        let draws = batch.seqs.iter().filter(drawn).count();
        assert!(draws == 0 || draws == count, "a row here and there");
        if draws == count {
            return Ok(StepLogits { rows: vec![Vec::new(); count], drawn: vec![DRAWN; count] });
        }
        let rows = |seq: &SeqInput| if seq.logits == LogitsWanted::All { seq.tokens.len() } else { 1 };
        let likes = |seq| vec![vec![0.0; self.info.vocab_size]; rows(seq)];
        Ok(StepLogits::of(batch.seqs.iter().map(likes).collect()))
    }
}

/// A loop with one request, that follows a grammar.
struct One {
    core: Core,
    stream: RequestStream,
    steps: Arc<AtomicU64>,
    shared: Arc<Shared>,
    _beside: Vec<RequestStream>,
}

fn following(constraint: Constraint) -> One {
    asking(GenerateRequest { constraint: Some(constraint), ..GenerateRequest::default() })
}

fn asking(request: GenerateRequest) -> One {
    asking_beside(request, Vec::new())
}

fn asking_beside(request: GenerateRequest, beside: Vec<GenerateRequest>) -> One {
    asking_by(Box::new(heartbeat::monotonic_ns), request, beside)
}

fn asking_by(clock_ns: Clock, request: GenerateRequest, beside: Vec<GenerateRequest>) -> One {
    let (info, steps) = (info(Vec::new()), Arc::new(AtomicU64::new(0)));
    let shared = Arc::new(Shared::new(Arc::new(Metrics::new("m").unwrap()), 8));
    let limits = Limits { seq_len_max: 64, ..Limits::default() };
    let ready = Ready { info: info.clone(), limits, codec: Arc::new(Bytes), grammars: Arc::default() };
    drop(shared.ready.set(ready));
    let (inbox, outbox) = sync_channel(8);
    let handle = EngineHandle::new(shared.clone(), inbox, 64);
    let model = Plain { info, steps: steps.clone() };
    let heart = Heart::by(clock_ns, None, shared.board.clone());
    let mut core = Core::new(Box::new(model), limits, shared.clone(), heart, false);
    let mut ask = |request: GenerateRequest| {
        let prompt = if request.prompt.is_empty() { [1].into() } else { request.prompt.clone() };
        let request = GenerateRequest { prompt, max_new_tokens: 2, ..request };
        let stream = handle.submit(vec![request]).unwrap().remove(0);
        core.submit(outbox.try_recv().unwrap());
        stream
    };
    let beside: Vec<_> = beside.into_iter().map(&mut ask).collect();
    let stream = ask(request);
    One { core, stream, steps, shared, _beside: beside }
}

#[test]
fn a_prompt_moves_beside_as_many_decodes_as_there_may_be() {
    for (num_seqs_max, step_tokens_max, granted) in [(8, 512, 512), (512, 512, 528), (0, 1, 17)] {
        let config = CoreConfig { num_seqs_max, step_tokens_max, ..CoreConfig::default() };
        assert_eq!(limits_of(&config, &info(vec![END]), None).unwrap().step_tokens_max, granted);
    }
}

#[test]
fn a_cache_of_nobodys_choice_is_what_fits_and_no_longer_sequence_is_promised() {
    let long = ModelInfo { seq_len_max: 10_000, ..info(vec![END]) };
    let limits = |free_bytes| limits_of(&CoreConfig::default(), &long, Some(Room { block_bytes: 10, free_bytes }));
    let granted = [1 << 30, 16_000, 640].map(|free| limits(free).map(|l| (l.num_blocks, l.seq_len_max)).unwrap());
    assert_eq!(granted, [(2500, 10_000), (800, 10_000), (32, 512)]);
    assert!(matches!(limits(639), Err(CoreError::Cache(ModelError::OutOfMemory { needed_bytes: 320, .. }))));
}

#[test]
fn a_longer_sequence_than_the_models_is_refused_with_both_numbers() {
    let config = CoreConfig { seq_len_max: Some(9000), ..CoreConfig::default() };
    let limits = |seq_len_max| limits_of(&config, &ModelInfo { seq_len_max, ..info(vec![END]) }, None);
    assert_eq!(limits(9000).unwrap().seq_len_max, 9000);
    let told = limits(8192).unwrap_err();
    assert!(matches!(told, CoreError::SeqLen { asked: 9000, model: 8192 }));
    assert!(["--max-model-len", "9000", "8192"].iter().all(|word| told.to_string().contains(word)), "{told}");
    // a loader that finds it before says the same
    let of_loader = CoreError::of_loader(Box::new(told));
    assert!(matches!(of_loader, CoreError::SeqLen { .. }));
}

/// Steps that turn in vain look like a livelock from outside, and are none.
#[tokio::test]
async fn no_step_runs_while_everybody_waits_for_a_mask() {
    let (gate, faults) = (Arc::new(AtomicBool::new(false)), Faults::new(Vec::new()));
    let One { mut core, mut stream, steps, shared, .. } = following(held(&GrammarSpec::Regex("[ab]{9}".into()), &gate));
    for _ in 0..12 {
        assert!(core.step(&faults).unwrap());
    }
    assert_eq!(steps.load(Ordering::Relaxed), 2, "one that brings a token, and one that finds no mask");
    let beat = shared.board.load().unwrap().beat;
    assert_eq!((beat.steps_completed, beat.running, beat.step_started_ns), (2, 1, 0), "it is owed, and between steps");
    gate.store(true, Ordering::Relaxed);
    while core.step(&faults).unwrap() {}
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    assert!(matches!(stream.next().await, Ok(TokenEvent::Token { .. })));
    assert!(matches!(stream.next().await, Ok(TokenEvent::Token { .. })));
}

/// A row that nobody looks at does not come back from the device: who wants nothing but a token gets the one that was drawn there.
#[tokio::test]
async fn the_model_draws_for_whoever_needs_no_row() {
    let of = |logprobs| {
        let sampling = SamplingParams { temperature: 0.0, logprobs, ..SamplingParams::default() };
        GenerateRequest { sampling, ..Default::default() }
    };
    let beside_rows = || vec![of(Some(0)), of(None)];
    for (logprobs, beside, wanted) in
        [(None, vec![of(None)], 2), (Some(0), Vec::new(), 0), (None, beside_rows(), 0), (Some(0), beside_rows(), 0)]
    {
        let mut one = asking_beside(of(logprobs), beside);
        assert!(one.core.step(&Faults::new(Vec::new())).unwrap());
        match one.stream.next().await {
            Ok(TokenEvent::Token { id, logprob, .. }) => {
                assert_eq!((id, logprob.is_some()), (wanted, logprobs.is_some()))
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Nobody outside sees rows: a loop that samples many of them for longer than its lease would stand still for page, `/health` and guard.
#[tokio::test]
async fn each_row_that_is_sampled_begins_the_lease_anew() {
    let of = |prompt_logprobs| {
        let sampling = SamplingParams { logprobs: Some(2), ..SamplingParams::default() };
        GenerateRequest { sampling, prompt_logprobs, prompt: [1, 1, 1, 1].into(), ..Default::default() }
    };
    // whatever is asked about takes three quarters of the shortest lease
    let questions = AtomicU64::new(0);
    let clock = move || questions.fetch_add(300_000_000, Ordering::Relaxed);
    let mut one = asking_by(Box::new(clock), of(true), vec![of(false), of(false)]);
    assert!(one.core.step(&Faults::new(Vec::new())).unwrap());
    // the prompts' last rows, and those that one tells of; and the first work that is owed was a question, too
    let questions = 3 + 3 + 1;
    assert_eq!(one.shared.board.load().unwrap().beat.lease_ms, questions * 300 + 400);
}

/// A request that forbids itself every token is not the engine's fault, and no step failed.
#[tokio::test]
async fn who_allows_itself_no_token_ends_by_that_and_no_step_has_failed() {
    let rules = LogitRules { allowed: vec![9], min_tokens: 1, ..LogitRules::default() };
    let sampling = SamplingParams { rules: rules.into(), ..SamplingParams::default() };
    let mut one =
        asking(GenerateRequest { sampling, stop_token_ids: [9].into(), ignore_eos: true, ..Default::default() });
    assert!(one.core.step(&Faults::new(Vec::new())).unwrap());
    assert!(matches!(one.stream.next().await, Err(End::Barred(_))));
    let told = one.shared.metrics.text(&one.shared.board, 0).unwrap();
    let failures = told.lines().find(|line| line.starts_with("truebeat:step_failures_total{")).unwrap();
    assert!(failures.ends_with(" 0"), "{failures}");
    assert_eq!(one.core.scheduler.free_blocks(), Limits::default().num_blocks);
}

/// Where nobody else has a step, a mask has less time than beside others.
#[tokio::test]
async fn a_mask_that_everybody_waits_for_is_given_up_sooner() {
    let constraint =
        Grammars::default().compile(&GrammarSpec::Regex("[ab]{9}".into()), &Bytes, &info(vec![END])).unwrap();
    let long_ago = Instant::now().checked_sub(MASK_TIME_MAX_ALONE).unwrap();
    let mut one = following(constraint.computing(long_ago));
    let faults = Faults::new(Vec::new());
    for _ in 0..3 {
        one.core.step(&faults).unwrap();
    }
    assert!(one.stream.next().await.is_err(), "it has failed, alone");
    assert!(!one.core.step(&faults).unwrap(), "and nothing is left");
}

#[test]
fn a_turn_takes_in_few_that_are_slow_and_not_all_that_are_quick() {
    let taken = |within: Duration| {
        let mut taken = 0;
        take_in(0..100, within, |_| taken += 1);
        taken
    };
    assert_eq!((taken(Duration::ZERO), taken(Duration::MAX)), (1, SUBMISSIONS_A_TURN));
}
