//! Starts: what is done before the engine is ready, and a wait that is given up there, which ends it as any other does (E1, E4).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use engine::beat::Health;
use engine::cli::EngineError;
use engine::core::{CoreError, Loader};
use engine::guard;
use engine::model::{ALLOCATE_MAX, KvShape, Model, ModelError, ModelInfo, Pulse, StepBatch, StepLogits};
use engine::server::serve::ServeError;
use engine::stuck::{EXIT_STUCK, Stuck, StuckKind};
use heartbeat::page::Phase;
use serde_json::json;

use crate::client::post;
use crate::guards::{BARREN, TRIES, evidence};
use crate::support::{FakeModel, Knobs, Setup, TestEngine, loaded, wait_until};

/// The steps of a start that may be given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Load,
    Cache,
    WarmUp,
}

/// A model that gives up a part of its start.
struct GivesUp(FakeModel, Part);

impl Model for GivesUp {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        if self.1 == Part::Cache { Err(stuck().into()) } else { self.0.allocate_kv(shape) }
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        if self.1 == Part::WarmUp { Err(stuck().into()) } else { self.0.forward(batch) }
    }
}

fn stuck() -> Stuck {
    let kind = StuckKind::RankSilent { ranks: vec![1] };
    Stuck { kind, text: "rank 1 has not come".into(), waited: Duration::from_millis(7) }
}

fn gives_up(part: Part) -> impl FnOnce(Arc<Knobs>) -> Loader {
    move |knobs| {
        Box::new(move |_| match part {
            Part::Load => Err(stuck().into()),
            _ => Ok(loaded(Box::new(GivesUp(FakeModel::new(knobs), part)), None)),
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_given_up_in_any_part_of_the_start_has_its_reason_its_evidence_and_its_status() {
    for part in [Part::Load, Part::Cache, Part::WarmUp] {
        let engine = TestEngine::of(Setup::default(), gives_up(part)).await;
        let shared = engine.handle.shared.clone();
        let Err(ended) = engine.ended().await else { panic!("{part:?} cannot have gone well") };
        let ServeError::Core(CoreError::Stuck(told)) = &ended else { panic!("{part:?}: {ended}") };
        assert_eq!(*told, stuck());
        assert_eq!(*shared.given_up().await, stuck(), "whoever saves evidence hears of it");
        let dir = tempfile::tempdir().unwrap();
        guard::evidence(told, &shared, Some(dir.path()));
        assert_eq!(evidence(dir.path(), std::process::id())["kind"], "rank-silent", "{part:?}");
        assert_eq!(EngineError::from(ended).exit_code(), EXIT_STUCK, "{part:?}");
    }
}

/// A model whose cache, prompt and token of the start are its first three calls; each waits for as many to be open.
struct Gated {
    inner: FakeModel,
    calls: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
    layers: Pulse,
}

impl Gated {
    fn pass(&self) {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        while self.open.load(Ordering::Relaxed) < call {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Model for Gated {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn pulse(&self) -> Option<Pulse> {
        Some(self.layers.clone())
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        self.pass();
        self.inner.allocate_kv(shape)
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        self.pass();
        self.inner.forward(batch)
    }
}

/// What a test turns and sees of a [`Gated`] model.
#[derive(Default, Clone)]
struct Gate {
    calls: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
    layers: Pulse,
}

impl Gate {
    fn model(&self, knobs: Arc<Knobs>) -> Box<dyn Model> {
        let Self { calls, open, layers } = self.clone();
        Box::new(Gated { inner: FakeModel::new(knobs), calls, open, layers })
    }

    fn opens(&self, calls: usize) {
        self.open.store(calls, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loader_that_panics_is_no_silent_end() {
    let engine = TestEngine::of(Setup::default(), |_| Box::new(|_| panic!("a bad file"))).await;
    let ended = engine.ended().await;
    let Err(ServeError::Core(CoreError::Stuck(stuck))) = &ended else { panic!("{ended:?}") };
    assert!(stuck.kind == StuckKind::Panic && stuck.text.contains("a bad file"), "{stuck}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_and_first_steps_say_by_when_more_is_said_and_each_layer_counts() {
    let gate = Gate::default();
    let gated = gate.clone();
    let engine =
        TestEngine::of(Setup::default(), move |knobs| Box::new(move |_| Ok(loaded(gated.model(knobs), None)))).await;
    let shared = engine.handle.shared.clone();
    let beat = || shared.board.load().unwrap().beat;
    let asked = |calls: usize| gate.calls.load(Ordering::Relaxed) == calls;
    // nothing tells how far an allocation is: its lease is its deadline
    wait_until("it allocates", || asked(1)).await;
    let cache = beat();
    assert_eq!((cache.phase, shared.health()), (Phase::WarmUp, Health::Starting));
    assert!(u128::from(cache.lease_ms) >= ALLOCATE_MAX.as_millis(), "{cache:?}");
    gate.opens(1);
    wait_until("it takes the first step", || asked(2)).await;
    let first = beat();
    assert!(first.work_done > cache.work_done && first.lease_ms >= 60_000, "{first:?}");
    gate.layers.fetch_add(1, Ordering::Relaxed);
    wait_until("the layer is told", || beat().work_done > first.work_done).await;
    assert!(beat().lease_ms > first.lease_ms || beat().published_ns > first.published_ns, "the lease is a new one");
    gate.opens(3);
    wait_until("it is ready", || shared.ready.get().is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_is_warm_before_the_first_request_and_one_that_hangs_is_given_up_like_the_model() {
    let mut tries = 1;
    while let Some(barren) = draft_that_hangs().await {
        assert!(tries < TRIES, "{barren}");
        tries += 1;
    }
}

/// One such engine. Gives the reason where nothing was delivered for so long that this was it, which a busy machine can do.
async fn draft_that_hangs() -> Option<Stuck> {
    let gate = Gate::default();
    gate.opens(usize::MAX);
    let mut setup = Setup::default();
    setup.core.speculates_always = true;
    let draft = gate.clone();
    let engine = TestEngine::of(setup, move |knobs| {
        let draft = draft.model(knobs.clone());
        Box::new(move |_| Ok(loaded(Box::new(FakeModel::new(knobs)), Some(draft))))
    })
    .await;
    wait_until("it is ready", || engine.handle.shared.ready.get().is_some()).await;
    assert_eq!(gate.calls.load(Ordering::Relaxed), 3, "a cache, a prompt and a token after it");
    gate.opens(0);
    let body = json!({"prompt": "abc", "max_tokens": 500, "ignore_eos": true});
    let answer = post(engine.addr, "/v1/completions", &body).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (503, Some("shutdown")), "{}", answer.text);
    let ended = engine.ended().await;
    let Err(ServeError::Core(CoreError::Stuck(stuck))) = &ended else { panic!("{ended:?}") };
    let barren = stuck.kind == StuckKind::Loop && stuck.text.contains(BARREN);
    assert!(barren || stuck.kind == StuckKind::DeviceWait, "{stuck}");
    gate.opens(usize::MAX);
    barren.then(|| stuck.clone())
}
