//! What the stepping thread does while work is owed and nothing comes: it runs, or would if it were given a core, it sleeps on a
//! timer, or it does nothing. A thread is told by what it wants: on a loaded machine one that spins may get a tenth of a core.

use crate::observation::{Ms, ProcObs, ThreadObs};

const CPU_WINDOW_MS: Ms = 5_000;
/// Spans over which a CPU share means something: for "it burns", and for "it does nothing".
const CPU_SPAN_MS_MIN: Ms = 150;
const CPU_QUIET_SPAN_MS_MIN: Ms = 2_000;
/// So many looks say what a thread does at nearly every one.
const LOOKS_MIN: u64 = 3;
/// One that is not found running at so many looks on end does not spin, whatever it did before.
const OTHER_LOOKS_MAX: u64 = 10;
/// A thread that spins wants a core all the time (what is missing is the reader's own doing), and gets more of one than a thread that wakes
/// up now and then and stands in line for it.
const WANTED_PERMILLE_MIN: u64 = 800;
const GOT_PERMILLE_MIN: u64 = 20;

/// What was seen of it since the last delivery.
#[derive(Debug, Clone, Default)]
pub struct Running {
    /// When this account began, by the caller's clock.
    since_ms: Ms,
    /// Process readings (time, CPU time): the start of the window before, of this window, and the last one.
    cpu_window: [Option<(Ms, u64)>; 2],
    cpu_last: (Ms, u64),
    /// Looks at the stepping thread, those that found it running, and those that found it asleep on a timer.
    looks: u64,
    running_looks: u64,
    timer_looks: u64,
    /// Looks since it was last found running.
    other_looks: u64,
    /// The stepping process is stopped: whatever burns CPU is not the step.
    stopped: bool,
    /// One of its threads was found running, and had run or stood in line for a core nearly all the time.
    spins: bool,
}

impl Running {
    /// A new account: something was delivered just now, or nothing was owed.
    pub fn since(now_ms: Ms) -> Self {
        Self { since_ms: now_ms, ..Self::default() }
    }

    /// Takes one look in, `at_ms` by the caller's clock.
    pub fn look(&mut self, at_ms: Ms, proc: &ProcObs) {
        self.looks += 1;
        self.stopped = proc.state == Some('T');
        self.timer_looks += u64::from(proc.wchan.as_deref().is_some_and(|wchan| wchan.contains("nanosleep")));
        self.running_looks += u64::from(proc.state == Some('R'));
        self.other_looks = if proc.state == Some('R') { 0 } else { self.other_looks + 1 };
        // threads are looked at less often: what they did before the silence began says nothing about it
        self.spins = proc.threads_at_ms.is_some_and(|at| at > self.since_ms) && proc.threads.iter().any(spins);
        self.roll_cpu(at_ms, proc.cpu_ms);
    }

    /// Its CPU time is no measure before the next look.
    pub fn pause(&mut self) {
        self.cpu_window = [None, None];
    }

    /// Mostly running since the last delivery: by what its threads want, by its state, or by CPU time that is not merely a scheduler's
    /// crumbs.
    pub fn burning(&self) -> bool {
        if self.stopped {
            return false;
        }
        // one that burned for what it still had to do, and then slept, does not wait for a device
        let running = self.looks > 0 && self.running_looks * 2 > self.looks && self.other_looks < OTHER_LOOKS_MAX;
        match self.cpu_share(CPU_SPAN_MS_MIN) {
            Some(share) => self.wants_a_core() || share >= 600 || (running && share >= 200),
            None => self.spins || running,
        }
    }

    /// Does it want a core all the time, whatever it gets?
    fn wants_a_core(&self) -> bool {
        self.spins || (self.looks >= LOOKS_MIN && self.running_looks * 10 >= self.looks * 9)
    }

    /// Found running at all looks but one in twenty.
    pub fn always_runs(&self) -> bool {
        self.running_looks * 20 >= self.looks * 19
    }

    /// The whole tree uses hardly any CPU, and not because it is given none.
    pub fn quiet(&self) -> bool {
        !self.wants_a_core() && self.quiet_share().is_some_and(|share| share < 50)
    }

    /// It is known to use CPU for something.
    pub fn moves(&self) -> bool {
        self.quiet_share().is_some() && !self.quiet() && !self.stopped
    }

    /// Asleep on a timer at most looks, the tree quiet.
    pub fn on_a_timer(&self) -> bool {
        self.quiet() && self.timer_looks * 2 > self.looks
    }

    fn quiet_share(&self) -> Option<u64> {
        self.cpu_share(CPU_QUIET_SPAN_MS_MIN)
    }

    /// Windows of five seconds: what the engine did in its last working moment is forgotten within two of them.
    fn roll_cpu(&mut self, at_ms: Ms, cpu_ms: u64) {
        self.cpu_last = (at_ms, cpu_ms);
        let [_, current] = self.cpu_window;
        match current {
            None => self.cpu_window = [None, Some(self.cpu_last)],
            Some((began_ms, _)) if at_ms.saturating_sub(began_ms) >= CPU_WINDOW_MS => {
                self.cpu_window = [current, Some(self.cpu_last)]
            }
            Some(_) => {}
        }
    }

    /// CPU share of the tree in permille of one core, over at least `span_ms_min`.
    fn cpu_share(&self, span_ms_min: Ms) -> Option<u64> {
        let [before, current] = self.cpu_window;
        let (began_ms, began_cpu) = before.or(current)?;
        let span = self.cpu_last.0.saturating_sub(began_ms);
        (span >= span_ms_min).then(|| self.cpu_last.1.saturating_sub(began_cpu).saturating_mul(1000) / span.max(1))
    }
}

/// Has this thread run, or stood in line for a core, nearly all the time since the look before, and does it still? A kernel that does not
/// say how long threads stand in line leaves what it got.
fn spins(thread: &ThreadObs) -> bool {
    if thread.state != 'R' || thread.span_ms == 0 {
        return false;
    }
    let permille = |ms: u64| ms.saturating_mul(1000) / thread.span_ms;
    let got = permille(thread.burned_ms);
    match thread.runnable_ms {
        Some(waited) => got >= GOT_PERMILLE_MIN && got.saturating_add(permille(waited)) >= WANTED_PERMILLE_MIN,
        None => got >= 200,
    }
}
