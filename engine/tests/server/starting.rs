//! Starts that go wrong: a wait that is given up before the engine is ready ends it as any other does (E1, E4).

use std::sync::Arc;
use std::time::Duration;

use engine::cli::EngineError;
use engine::core::{CoreError, Loader};
use engine::guard;
use engine::model::{KvShape, Model, ModelError, ModelInfo, StepBatch, StepLogits};
use engine::server::serve::ServeError;
use engine::stuck::{EXIT_STUCK, Stuck, StuckKind};
use crate::guards::evidence;
use crate::support::{FakeModel, Knobs, Setup, TestEngine, loaded};

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
