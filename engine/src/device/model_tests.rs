//! How long a step may take whose waits were the longer because a rank, or a thread that computes a part of it, did not get the processor.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use super::*;

const ALLOWED: Duration = Duration::from_millis(400);

/// A model whose step takes a while and whose waits forgive that part of it.
struct Late {
    info: ModelInfo,
    forgiven: Pulse,
    takes: Duration,
    part: f64,
    helpers: Vec<u64>,
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

    fn threads(&self) -> Threads {
        let helpers = self.helpers.clone();
        Arc::new(move || helpers.clone())
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
    seen(takes, part, Vec::new(), |_| None).0
}

/// The same of a model with such helpers, where `/proc` says what `held_up` says; and how much of its time the step said that it was held up.
fn seen(
    takes: Duration,
    part: f64,
    helpers: Vec<u64>,
    held_up: impl Fn(u64) -> Option<Duration> + Send + Sync + 'static,
) -> (Result<StepLogits, ModelError>, Duration) {
    let began = std::time::Instant::now();
    let turns = move |tid| {
        let held_up = held_up(tid)?;
        // who is not held up runs all the time
        Some(Turns { ran: began.elapsed().saturating_sub(held_up), held_up, wants: true })
    };
    told(Late { info: info(), forgiven: Pulse::default(), takes, part, helpers }, turns)
}

fn info() -> ModelInfo {
    let (name, arch) = ("late".to_owned(), "llama".to_owned());
    ModelInfo { name, arch, vocab_size: 10, seq_len_max: 16, ..ModelInfo::default() }
}

/// A step of this model, of whose threads that is known; and how much of its time the step said that it was held up.
fn told(
    late: Late,
    turns: impl Fn(u64) -> Option<Turns> + Send + Sync + 'static,
) -> (Result<StepLogits, ModelError>, Duration) {
    let mut model = QueuedModel::new(Box::new(late), Faults::default()).unwrap();
    model.turns = Arc::new(turns);
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    let mut told = Duration::ZERO;
    let result = model.step(&StepBatch::default(), &mut |sign| match sign {
        Sign::HeldUp(time) => told += time,
        Sign::Layer => (),
    });
    (result, told)
}

/// What `/proc` says of a thread that gets the processor for a part of the time alone, from now on.
fn in_line(who: u64, part: f64) -> impl Fn(u64) -> Option<Duration> + Send + Sync + 'static {
    let began = std::time::Instant::now();
    move |tid| Some(if tid == who { began.elapsed().mul_f64(part) } else { Duration::ZERO })
}

/// The device's thread has then nothing to do, and the processor that it may have.
#[test]
fn a_helper_that_does_not_get_the_processor_is_forgiven_and_told_of() {
    const HELPER: u64 = 77;
    let takes = (ALLOWED + AFTER_THEIRS).mul_f64(1.3);
    let (step, told) = seen(takes, 0.0, vec![76, HELPER], in_line(HELPER, 0.9));
    assert!(step.is_ok(), "{step:?}");
    // about half of the time, on a machine that runs this thread
    assert!(told > takes / 10, "{told:?}");
    let (none, told) = seen(Duration::from_secs(4), 0.0, vec![76], in_line(HELPER, 0.9));
    assert!(
        matches!(none, Err(ModelError::Stuck(_))) && told == Duration::ZERO,
        "nobody waits for that thread: {none:?}"
    );
}

/// Of a rank that is late hears whoever waits for it in a collective, and whoever looks at its thread.
#[test]
fn a_ranks_wait_in_line_that_is_seen_from_two_sides_counts_once() {
    const RANK: u64 = 77;
    const LATE: Duration = Duration::from_millis(10);
    let (forgiven, looks) = (Pulse::default(), Arc::new(std::sync::atomic::AtomicU32::new(0)));
    let late = Late { info: info(), forgiven: forgiven.clone(), takes: ALLOWED, part: 0.0, helpers: vec![RANK] };
    let seen = looks.clone();
    let (step, told) = told(late, move |tid| {
        let held_up = LATE * if tid == RANK { seen.fetch_add(1, Relaxed) + 1 } else { 0 };
        if tid == RANK {
            forgiven.store(held_up.as_nanos() as u64, Relaxed);
        }
        // who is not known to run is in no line
        Some(Turns { ran: Duration::ZERO, held_up, wants: false })
    });
    assert!(step.is_ok(), "{step:?}");
    let looks = looks.load(Relaxed);
    assert!(looks > 1 && told == LATE * (looks - 1), "{looks} looks: {told:?}");
}

#[test]
fn a_helper_in_line_for_ever_ends_the_step_all_the_same() {
    let began = std::time::Instant::now();
    let (step, told) = seen(Duration::from_secs(4), 0.0, vec![77], in_line(77, 50.0));
    assert!(matches!(step, Err(ModelError::Stuck(_))), "{step:?}");
    assert!(told <= began.elapsed() / 2, "{told:?}");
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
