//! The loop's turns, one by one.

use std::sync::atomic::AtomicU64;

use super::*;
use crate::grammar::GrammarSpec;
use crate::grammar::tests::{Bytes, held, info};
use crate::handle::{GenerateRequest, TokenEvent};
use crate::model::{KvShape, StepBatch, StepLogits};

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

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(StepLogits { rows: batch.seqs.iter().map(|_| vec![vec![0.0; self.info.vocab_size]]).collect() })
    }
}

/// Steps that turn in vain look like a livelock from outside, and are none.
#[tokio::test]
async fn no_step_runs_while_everybody_waits_for_a_mask() {
    let (info, steps, faults) = (info(Vec::new()), Arc::new(AtomicU64::new(0)), Faults::new(Vec::new()));
    let shared = Arc::new(Shared::new(Arc::new(Metrics::new("m").unwrap()), 8));
    let limits = Limits { seq_len_max: 64, ..Limits::default() };
    let ready = Ready { info: info.clone(), limits, codec: Arc::new(Bytes), grammars: Arc::default() };
    drop(shared.ready.set(ready));
    let (inbox, outbox) = sync_channel(8);
    let handle = EngineHandle::new(shared.clone(), inbox, 64);
    let model = Plain { info, steps: steps.clone() };
    let heart = Heart::new(None, shared.board.clone());
    let mut core = Core::new(Box::new(model), limits, shared.clone(), heart, false);
    let gate = Arc::new(AtomicBool::new(false));
    let constraint = held(&GrammarSpec::Regex("[ab]{9}".into()), &gate);
    let request = GenerateRequest {
        prompt: [1].into(),
        max_new_tokens: 2,
        constraint: Some(constraint),
        ..GenerateRequest::default()
    };
    let mut stream = handle.submit(vec![request]).unwrap().remove(0);
    core.submit(outbox.try_recv().unwrap());
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
