//! The faults of one process: which are due, and what each of them does. The engine thread decides when (it knows steps and time); what
//! is due is armed, and strikes where its kind says, on whatever thread or rank that is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use heartbeat::monotonic_ns;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{FaultAfter, FaultKind, FaultSpec, Place};
use crate::beat::StepShape;

/// The faults of one process; clones share what is armed.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    specs: Vec<FaultSpec>,
    rank: usize,
    /// Set by the SIGUSR2 handler.
    pub signalled: Arc<AtomicBool>,
    /// A bit for each of `specs` that is due.
    armed: Arc<AtomicU64>,
    /// Decoded by the steps before this one.
    tokens: Arc<AtomicU64>,
    ready_ns: u64,
}

impl Faults {
    /// The faults of the first rank.
    pub fn new(specs: Vec<FaultSpec>) -> Self {
        Self::of_rank(specs, 0)
    }

    /// The faults of a rank.
    pub fn of_rank(specs: Vec<FaultSpec>, rank: usize) -> Self {
        Self { specs, rank, ..Self::default() }
    }

    /// The engine is ready: times count from here.
    pub fn ready(&mut self) {
        self.ready_ns = monotonic_ns();
    }

    /// What is armed, as other ranks are told.
    pub fn armed_bits(&self) -> u64 {
        self.armed.load(Ordering::Relaxed)
    }

    /// Arms what the first rank armed.
    pub fn arm(&self, bits: u64) {
        self.armed.fetch_or(bits, Ordering::Relaxed);
    }

    /// A step begins: arms what is due and does what strikes here. True: "discard this step's results".
    pub fn at_step(&self, steps_done: u64, shape: &StepShape) -> bool {
        self.arm_due(steps_done, Some(shape));
        self.tokens.fetch_add(shape.decode_tokens as u64, Ordering::Relaxed);
        self.strike(Place::Step)
    }

    /// Nothing to run: what strikes a whole process does so here too.
    pub fn at_rest(&self, steps_done: u64) {
        self.arm_due(steps_done, None);
        self.here(|kind| kind.of_process()).for_each(do_it);
    }

    /// Does what is armed, or due from the beginning, and strikes at `place` of this rank. Returns only where nothing is, or for a
    /// livelock: true.
    pub fn strike(&self, place: Place) -> bool {
        let process = |kind: FaultKind| kind.of_process() && place == Place::Step;
        let mut livelock = false;
        for kind in self.here(|kind| kind.place() == place || process(kind)) {
            livelock |= kind == FaultKind::Livelock;
            do_it(kind);
        }
        livelock
    }

    /// Is something armed that strikes at `place` of this rank? For places where the fault is a way of computing.
    pub fn armed(&self, place: Place) -> bool {
        self.here(|kind| kind.place() == place).next().is_some()
    }

    /// Is this very fault armed for this rank?
    pub fn has(&self, kind: FaultKind) -> bool {
        self.here(|armed| armed == kind).next().is_some()
    }

    /// Kinds that are armed for this rank and wanted.
    fn here(&self, wanted: impl Fn(FaultKind) -> bool) -> impl Iterator<Item = FaultKind> {
        let armed = self.armed_bits();
        let early = |kind: FaultKind| matches!(kind.place(), Place::Startup | Place::Compile);
        let is_armed = move |bit: usize, kind| early(kind) || armed >> bit.min(63) & 1 == 1;
        let of_rank = move |spec: &FaultSpec| match spec.rank {
            Some(rank) => rank == self.rank,
            // whichever owns it
            None if spec.kind == FaultKind::CompileKill => true,
            None => (self.rank > 0) == spec.kind.of_workers(),
        };
        let numbered = self.specs.iter().enumerate();
        let mine = numbered.filter(move |(bit, spec)| is_armed(*bit, spec.kind) && of_rank(spec));
        mine.map(|(_, spec)| spec.kind).filter(move |kind| wanted(*kind))
    }

    fn arm_due(&self, steps_done: u64, shape: Option<&StepShape>) {
        if self.specs.is_empty() {
            return;
        }
        let now = monotonic_ns();
        for (bit, spec) in self.specs.iter().enumerate() {
            let mask = 1 << bit.min(63);
            if self.armed_bits() & mask == 0 && self.due(spec, steps_done, shape, now) {
                tracing::warn!(fault = ?spec.kind, steps_done, "injected fault is due");
                self.arm(mask);
            }
        }
    }

    fn due(&self, spec: &FaultSpec, steps_done: u64, shape: Option<&StepShape>, now: u64) -> bool {
        match spec.after {
            FaultAfter::AtOnce => true,
            FaultAfter::Ready(d) => {
                now.saturating_sub(self.ready_ns) >= u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
            }
            FaultAfter::Steps(n) => steps_done >= n,
            FaultAfter::Tokens(n) => self.tokens.load(Ordering::Relaxed) >= n,
            FaultAfter::Requests(n) => {
                shape.is_some_and(|s| s.requests == n && s.decode_tokens == n && s.prefill_tokens == 0)
            }
            FaultAfter::SigUsr2 => self.signalled.load(Ordering::Relaxed),
        }
    }
}

fn do_it(kind: FaultKind) {
    match kind {
        FaultKind::StepStall | FaultKind::StartupStall | FaultKind::RankHang | FaultKind::Sleep => sleep_for_ever(),
        FaultKind::LockHeld => want_a_lock_for_ever(),
        FaultKind::Exception => std::panic::resume_unwind(Box::new("an injected exception")),
        FaultKind::Crash => std::process::abort(),
        FaultKind::Segfault => die_of(Signal::SIGSEGV),
        FaultKind::CompileKill => die_of(Signal::SIGKILL),
        FaultKind::Sigstop => {
            let _ = kill(Pid::this(), Signal::SIGSTOP);
        }
        // these are ways of computing: whoever computes asks for them
        FaultKind::Livelock | FaultKind::DeviceWait | FaultKind::PaddedGraph | FaultKind::PlanDrift => (),
    }
}

/// Spins, as who waits for a device that never says that it is done.
pub fn burn_for_ever() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

fn sleep_for_ever() -> ! {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

/// The runtime's handler of SIGSEGV returns once for a signal that no address caused; the second one finds the default action.
fn die_of(signal: Signal) -> ! {
    loop {
        let _ = kill(Pid::this(), signal);
        thread::sleep(Duration::from_millis(1));
    }
}

/// One thread takes a lock and keeps it, this one waits for it as engines of the field do.
fn want_a_lock_for_ever() {
    let lock = Arc::new(Mutex::new(()));
    let (holder, held) = (lock.clone(), Arc::new(AtomicBool::new(false)));
    let taken = held.clone();
    thread::spawn(move || {
        let _kept = holder.try_lock();
        taken.store(true, Ordering::Release);
        sleep_for_ever()
    });
    while !held.load(Ordering::Acquire) {
        thread::yield_now();
    }
    #[allow(clippy::disallowed_methods, reason = "this very wait is the fault")]
    drop(lock.lock());
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: StepShape = StepShape { requests: 1, prefill_tokens: 0, decode_tokens: 1, prefill_units: 0 };

    #[test]
    fn a_fault_fires_at_its_place_and_moment_only() {
        let faults = Faults::new(vec!["livelock@3steps".parse().unwrap()]);
        assert!(!faults.at_step(2, &ONE));
        faults.at_rest(9);
        assert!(faults.at_step(3, &ONE));
        let armed = Faults::new(vec!["livelock@sigusr2".parse().unwrap()]);
        assert!(!armed.at_step(9, &ONE));
        armed.signalled.store(true, Ordering::Relaxed);
        assert!(armed.at_step(9, &ONE));
    }

    #[test]
    fn a_fault_after_tokens_does_not_ask_in_how_many_steps() {
        for (rows, steps) in [(1, 12), (4, 3)] {
            let faults = Faults::new(vec!["livelock@12tokens".parse().unwrap()]);
            let shape = StepShape { requests: rows, decode_tokens: rows, ..StepShape::default() };
            let prefill = StepShape { requests: 1, prefill_tokens: 64, ..StepShape::default() };
            assert!((0..steps).all(|done| !faults.at_step(done, &shape)), "{rows} at a time");
            assert!(faults.at_step(steps, &prefill), "{rows} at a time");
        }
    }

    #[test]
    fn a_step_of_so_many_requests_is_meant_exactly_and_without_prefill() {
        let faults = Faults::new(vec!["device-wait@15reqs".parse().unwrap()]);
        let decode = |n| StepShape { requests: n, decode_tokens: n, ..StepShape::default() };
        for shape in [decode(14), decode(16), StepShape { prefill_tokens: 1, ..decode(15) }] {
            faults.at_step(1, &shape);
            assert!(!faults.armed(Place::Event), "{shape:?}");
        }
        faults.at_step(1, &decode(15));
        faults.at_step(1, &decode(14));
        assert!(faults.armed(Place::Event), "armed for good");
    }

    #[test]
    fn workers_learn_what_is_armed_and_only_the_rank_that_is_meant_is_struck() {
        let specs: Vec<FaultSpec> = ["padded-graph@2steps", "sigstop:2@9steps"].map(|s| s.parse().unwrap()).to_vec();
        let leader = Faults::new(specs.clone());
        leader.at_step(2, &ONE);
        assert!(!leader.armed(Place::Program), "a fault of workers");
        for rank in [1, 2] {
            let worker = Faults::of_rank(specs.clone(), rank);
            assert!(!worker.armed(Place::Program));
            worker.arm(leader.armed_bits());
            assert!(worker.armed(Place::Program) && !worker.has(FaultKind::Sigstop));
            worker.arm(u64::MAX);
            assert_eq!(worker.has(FaultKind::Sigstop), rank == 2);
        }
    }
}
