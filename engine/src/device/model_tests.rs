//! How long a step may take whose waits for other ranks were the longer because a rank did not get the processor.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use super::*;

const ALLOWED: Duration = Duration::from_millis(400);

/// A model whose step takes a while and whose waits forgive that part of it.
struct Late {
    info: ModelInfo,
    forgiven: Pulse,
    takes: Duration,
    part: f64,
}

impl Model for Late {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn has_ranks(&self) -> bool {
        true
    }

    fn forgiven(&self) -> Option<Pulse> {
        Some(self.forgiven.clone())
    }

    fn allocate_kv(&mut self, _shape: KvShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(&mut self, _batch: &StepBatch) -> Result<StepLogits, ModelError> {
        let began = std::time::Instant::now();
        let mut last = Duration::ZERO;
        while last < self.takes {
            std::thread::sleep(Duration::from_millis(10));
            let passed = std::mem::replace(&mut last, began.elapsed());
            let forgiven = last.saturating_sub(passed).mul_f64(self.part);
            self.forgiven.fetch_add(forgiven.as_nanos() as u64, Relaxed);
        }
        Ok(StepLogits::default())
    }
}

fn step(takes: Duration, part: f64) -> Result<StepLogits, ModelError> {
    let (name, arch) = ("late".to_owned(), "llama".to_owned());
    let info = ModelInfo { name, arch, vocab_size: 10, seq_len_max: 16, eos_token_ids: vec![], bos_token_id: None };
    let late = Late { info, forgiven: Pulse::default(), takes, part };
    let mut model = QueuedModel::new(Box::new(late), Faults::default()).unwrap();
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    model.step(&StepBatch::default(), &mut || ())
}

#[test]
fn what_a_wait_for_a_rank_forgives_the_device_is_forgiven() {
    // past what the step has without it, and well within twice that: a busy machine is late
    let takes = (ALLOWED + AFTER_THEIRS).mul_f64(1.3);
    assert!(step(takes, 0.5).is_ok());
}

#[test]
fn a_device_that_hangs_is_given_up_whatever_is_forgiven() {
    for part in [0.0, 0.5, 1.0, 50.0] {
        let Err(ModelError::Stuck(stuck)) = step(Duration::from_secs(4), part) else { panic!("{part}: it ended well") };
        assert_eq!(stuck.kind, StuckKind::DeviceWait);
    }
}
