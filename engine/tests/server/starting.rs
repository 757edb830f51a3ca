//! Starts: what is done before the engine is ready, and a wait that is given up there, which ends it as any other does (E1, E4).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use engine::cli::EngineError;
use engine::core::{CoreError, Loader};
use engine::guard;
use engine::model::{KvShape, Model, ModelError, ModelInfo, StepBatch, StepLogits};
use engine::server::serve::ServeError;
use engine::stuck::{EXIT_STUCK, Stuck, StuckKind};
use serde_json::json;

use crate::client::post;
use crate::guards::evidence;
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

/// A draft model that counts its steps, and holds them where it is told to.
struct Held {
    inner: FakeModel,
    steps: Arc<AtomicUsize>,
    hold: Arc<AtomicBool>,
}

impl Model for Held {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        self.inner.allocate_kv(shape)
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        while self.hold.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner.forward(batch)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_is_warm_before_the_first_request_and_one_that_hangs_is_given_up_like_the_model() {
    let (steps, hold) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut setup = Setup::default();
    setup.core.speculates_always = true;
    let (counted, held) = (steps.clone(), hold.clone());
    let engine = TestEngine::of(setup, move |knobs| {
        let draft = Held { inner: FakeModel::new(knobs.clone()), steps: counted, hold: held };
        Box::new(move |_| Ok(loaded(Box::new(FakeModel::new(knobs)), Some(Box::new(draft)))))
    })
    .await;
    wait_until("it is ready", || engine.handle.shared.ready.get().is_some()).await;
    assert_eq!(steps.load(Ordering::Relaxed), 2, "a prompt and a token after it");
    hold.store(true, Ordering::Relaxed);
    let body = json!({"prompt": "abc", "max_tokens": 500, "ignore_eos": true});
    let answer = post(engine.addr, "/v1/completions", &body).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (503, Some("shutdown")), "{}", answer.text);
    let ended = engine.ended().await;
    let Err(ServeError::Core(CoreError::Stuck(stuck))) = &ended else { panic!("{ended:?}") };
    assert_eq!(stuck.kind, StuckKind::DeviceWait, "{stuck}");
    hold.store(false, Ordering::Relaxed);
}
