//! The host's logic against a device that gives no sign: a stuck event ends the step with evidence within its time, later steps say so at
//! once (E1); graphs are made off the hot path and replayed for equal launches alone (E2).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::backend::cuda::CudaBackend;
use engine::device::QueuedModel;
use engine::fault::Faults;
use engine::model::{LoadOptions, LogitsWanted, Model, ModelError, SeqInput, StepBatch, StepTerms};
use engine::stuck::StuckKind;

use crate::models;
use crate::ops::EXACT;
use crate::stuck_driver::{Knobs, StuckDriver};

const ALLOWED: Duration = Duration::from_millis(200);
/// The end of such a step on a machine with much else to do; E1's second is `make test-gpu`'s to hold.
const END_MAX: Duration = Duration::from_secs(10);

fn backend() -> (Arc<Knobs>, CudaBackend<StuckDriver>) {
    let knobs = Arc::new(Knobs::default());
    let backend = CudaBackend::new(StuckDriver(knobs.clone()), 64 << 20, EXACT).unwrap();
    (knobs, backend)
}

/// A model whose own wait alone decides: behind the engine's queue there is a second, longer one, which ends first where the machine kept
/// just the device's thread from running.
fn model() -> (Arc<Knobs>, Box<dyn Model>) {
    let (knobs, backend) = backend();
    let mut model = models::load(backend, "qwen3-tied-bf16", false);
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    (knobs, model)
}

fn decode(pos: usize) -> StepBatch {
    StepBatch::of(vec![SeqInput {
        tokens: vec![1],
        start_pos: pos,
        block_table: (0..8).collect(),
        logits: LogitsWanted::Last,
    }])
}

#[track_caller]
fn stuck_text(result: Result<engine::model::StepLogits, ModelError>) -> String {
    match result {
        Err(ModelError::Stuck(stuck)) => {
            assert_eq!(stuck.kind, StuckKind::DeviceWait);
            stuck.text
        }
        other => panic!("not stuck: {other:?}"),
    }
}

#[test]
fn a_stuck_event_ends_the_step_in_time_and_every_later_one_at_once() {
    let (knobs, mut model) = model();
    assert_eq!(model.forward(&decode(0)).unwrap().rows.len(), 1);
    knobs.stuck.store(true, Relaxed);
    let since = Instant::now();
    let text = stuck_text(model.forward(&decode(1)));
    assert!((ALLOWED..END_MAX).contains(&since.elapsed()), "{:?}", since.elapsed());
    assert!(text.contains("event did not come") && text.contains("the last launch was mma_few_8"), "{text}");
    knobs.stuck.store(false, Relaxed);
    let since = Instant::now();
    stuck_text(model.forward(&decode(2)));
    assert!(since.elapsed() < ALLOWED, "a device that was given up is not asked again");
}

#[test]
fn the_fault_of_s2_hangs_the_device_itself() {
    let (knobs, backend) = backend();
    let faults = Faults::new(vec!["device-wait@1steps".parse().unwrap()]);
    let mut model = QueuedModel::new(models::load(backend, "qwen3-tied-bf16", false), faults.clone()).unwrap();
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    model.forward(&decode(0)).unwrap();
    faults.arm(1);
    let text = stuck_text(model.forward(&decode(1)));
    // its own deadline passed, not that of the queue above it, which would name no launch
    assert!(text.contains("event did not come") && text.contains("the last launch was"), "{text}");
    assert_eq!(knobs.spins.load(Relaxed), 1);
}

#[test]
fn a_prompt_whose_logits_nobody_wants_is_waited_for_too() {
    let (knobs, mut model) = model();
    knobs.stuck.store(true, Relaxed);
    let seqs = vec![models::part(&[1, 2, 3], 0, LogitsWanted::None)];
    stuck_text(model.forward(&StepBatch::of(seqs)));
}

#[test]
fn a_layer_counts_when_the_device_is_done_with_it() {
    let (knobs, backend) = backend();
    let mut model = models::load(backend, "qwen3-tied-bf16", true);
    let pulse = model.pulse().unwrap();
    model.forward(&decode(0)).unwrap();
    let layers = pulse.load(Relaxed);
    assert!(layers >= 2);
    // each event takes its looks, one after another
    knobs.looks.store(20, Relaxed);
    model.forward(&decode(1)).unwrap();
    assert_eq!(pulse.load(Relaxed), 2 * layers);
    knobs.stuck.store(true, Relaxed);
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    let text = stuck_text(model.forward(&decode(2)));
    assert!(text.contains("0 layers of the step were done") && pulse.load(Relaxed) == 2 * layers, "{text}");
}

#[test]
fn a_device_that_fails_is_given_up_by_name() {
    let (knobs, mut model) = model();
    knobs.broken.store(true, Relaxed);
    let text = stuck_text(model.forward(&decode(0)));
    assert!(text.contains("cuMemcpyHtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS"), "{text}");
    knobs.broken.store(false, Relaxed);
    assert!(stuck_text(model.forward(&decode(0))).contains("ILLEGAL_ADDRESS"), "for good");
}

#[test]
fn without_a_device_loading_says_why() {
    let knobs = Arc::new(Knobs::default());
    knobs.broken.store(true, Relaxed);
    let error = CudaBackend::new(StuckDriver(knobs.clone()), 64 << 20, EXACT).err().unwrap();
    assert!(error.to_string().contains("cuMemAlloc"), "{error}");
    knobs.broken.store(false, Relaxed);
    let small = CudaBackend::new(StuckDriver(knobs), 4096, EXACT).unwrap();
    let error = engine::model::load_model_on(small, &models::folder("llama"), &LoadOptions::default(), &mut |_, _| {})
        .err()
        .unwrap();
    assert!(error.to_string().contains("the device's budget of 4096 bytes"), "{error}");
}

#[test]
fn a_repeated_step_becomes_one_launch_and_another_shape_runs_at_once() {
    let (knobs, mut model) = model();
    let since = Instant::now();
    let mut pos = 0;
    while knobs.replays.load(Relaxed) < 5 {
        assert!(since.elapsed() < Duration::from_secs(60), "never replayed; {} graphs", knobs.graphs.load(Relaxed));
        // all within one split of attention: launches of one kind
        model.forward(&decode(pos % 60)).unwrap();
        pos += 1;
    }
    let (launches, replays) = (knobs.launches.load(Relaxed), knobs.replays.load(Relaxed));
    model.forward(&decode(50)).unwrap();
    assert_eq!(
        (knobs.launches.load(Relaxed), knobs.replays.load(Relaxed)),
        (launches, replays + 1),
        "one launch, no other"
    );
    let seqs = vec![models::part(&[1, 2, 3], 60, LogitsWanted::Last)];
    model.forward(&StepBatch::of(seqs)).unwrap();
    assert_eq!(knobs.replays.load(Relaxed), replays + 1, "another shape is not padded onto it");
    assert!(knobs.launches.load(Relaxed) > launches);
    let before = knobs.replays.load(Relaxed);
    knobs.stuck.store(true, Relaxed);
    let text = stuck_text(model.forward(&decode(51)));
    assert!(text.contains("the last launch was a graph"), "{text}");
    assert_eq!(knobs.replays.load(Relaxed), before + 1);
}
