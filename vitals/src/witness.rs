//! V4: witnesses. They move the confirm time of a suspicion; none of them makes a stall by itself.

use crate::crawl;
use crate::examine::{Basis, Complaint, View, reason};
use crate::excuse::Tick;
use crate::log_signs::{self, Meaning, Signature};
use crate::observation::{GpuObs, Ms, Observation};
use crate::owed::OwedSource;
use crate::policy::Policy;
use crate::running::Running;
use crate::signs::Sight;
use crate::verdict::Reason;
use crate::xid::{self, Xid};

const NVML_SILENT_MS_MIN: Ms = 5_000;
/// So long must a thread be watched before its habits are known; what was seen before so much more fades.
const HABIT_MS_MIN: Ms = 2_000;
const HABIT_MS_MAX: Ms = 600_000;
/// A GPU below this, in percent, works for nothing.
const GPU_IDLE_UTIL: u32 = 10;
/// One look stands for no more than this.
const LOOK_MS_MAX: Ms = 1_500;

/// How much a suspicion is worth; the confirm time follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Strength {
    /// The stepping thread sleeps on a timer and the tree is quiet, or the work may not have reached the engine at all: it may well
    /// end by itself.
    Timer,
    /// The gate's silence and flat counters, while the engine burns CPU.
    Weak,
    /// One witness more.
    Moderate,
    /// Independent witnesses agree.
    Strong,
}

impl Strength {
    pub fn confirm_ms(self, policy: &Policy) -> Ms {
        match self {
            Self::Timer => policy.confirm_timer_ms,
            Self::Weak => policy.confirm_weak_ms,
            Self::Moderate => policy.confirm_moderate_ms,
            Self::Strong => policy.confirm_strong_ms,
        }
    }
}

/// What the engine's own page says to a complaint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSays {
    Nothing,
    /// It owes work and is in no step: no lease rules that.
    NoStep,
    /// The lease that it declared has run out.
    LeaseExpired,
}

impl PageSays {
    pub fn lease(expired: bool) -> Self {
        if expired { Self::LeaseExpired } else { Self::Nothing }
    }
}

/// What a complaint weighs.
pub struct Weight {
    pub strength: Strength,
    pub reasons: Vec<Reason>,
    /// Whatever the strength, a shorter silence than this is confirmed by nothing: an engine that crawls looks the same.
    pub silence_ms_min: Ms,
    /// A witness saw what crawling does not do: a thread stopped, a tree without CPU time, a rank that is missing.
    pub decisive: bool,
}

impl Weight {
    fn add(&mut self, at_least: Strength, source: &str, text: String) {
        self.strength = self.strength.max(at_least);
        self.reasons.push(reason(source, text));
    }

    /// The same of a witness that excludes an engine that crawls.
    fn decide(&mut self, at_least: Strength, source: &str, text: String) {
        self.decisive = true;
        self.add(at_least, source, text);
    }

    /// A Xid is always named. One of an application weighs nothing: on a shared GPU it may be somebody else's.
    fn hear(&mut self, xid: &Xid) {
        match xid.remedy {
            Some(remedy) if xid.accuses() && remedy.outlasts_a_restart() => {
                self.decide(Strength::Moderate, "gpu", xid.words());
            }
            Some(_) if xid.accuses() => self.add(Strength::Moderate, "gpu", xid.words()),
            _ => self.reasons.push(reason("gpu", xid.words())),
        }
    }

    /// Leaves time to an engine that may be crawling: a step of the usual work, a hundred times slower, while somebody works for it.
    fn may_crawl(&mut self, view: &View<'_>, complaint: &Complaint, gpu_works: bool) {
        if complaint.allowed.basis == Basis::Idle && self.strength < Strength::Strong {
            // a fence is soon undone; nothing was learned of this engine that would bear a kill
            self.silence_ms_min = view.policy.patience_cap_ms;
            return;
        }
        if self.decisive {
            return;
        }
        let Some((least_ms, what)) = crawl::silence_min(view, complaint, gpu_works) else { return };
        if least_ms > complaint.silence_ms {
            self.reasons.push(reason("policy", format!("{what}: no proof before {least_ms} ms")));
        }
        self.silence_ms_min = least_ms;
    }
}

fn page_speaks(view: &View<'_>, complaint: &Complaint, weight: &mut Weight) {
    let by_gate = view.sight.owed.is_some_and(|owed| owed.source == OwedSource::Gate);
    let gate_silent = by_gate && !view.others_go_on(complaint.engine);
    match complaint.page_says {
        PageSays::LeaseExpired if view.sight.native().is_some() => {
            let agrees = match complaint.engine {
                _ if gate_silent => "the gate owes the same work and hears nothing",
                None => "no other path delivers",
                Some(_) => "no other path delivers for it",
            };
            weight.add(Strength::Strong, "page", format!("the engine's own lease has run out, and {agrees}"));
        }
        PageSays::NoStep => {
            weight.add(Strength::Moderate, "page", "the engine's own page shows work and no step".to_owned());
        }
        _ => {}
    }
}

/// What has been gathered since the last delivery.
#[derive(Debug, Clone, Default)]
pub struct Witnesses {
    running: Running,
    /// How long the stepping thread was watched while nothing was owed, and how much of that it was running.
    idle_ms: [Ms; 2],
    /// The log signature that accuses: the first, for the rest are mostly its echoes, unless a later one says that the core is dead.
    log: Option<&'static Signature>,
    /// Busy power of this replica while it delivered, in watts (slow average).
    busy_watts: Option<f64>,
    /// GPU readings that were busy and cold, that were busy and as warm as in health, that were not idle, and all readings.
    cold_looks: u64,
    warm_looks: u64,
    busy_looks: u64,
    gpu_looks: u64,
    /// Counted time at which CPU, GPU or disk were last seen to work for anything, or it was not known.
    worked_at: Ms,
    /// For how long NVML has been silent about any of the GPUs, where that is longer than a busy driver is.
    nvml_silent_ms: Option<Ms>,
}

impl Witnesses {
    /// Takes one tick in. A delivery (`delivered`: of the data-parallel engine that is accused, where one is) wipes what was gathered.
    pub fn look(&mut self, tick: &Tick, obs: &Observation, sight: &Sight<'_>, delivered: bool, policy: &Policy) {
        let gpus = obs.gpus.fresh(tick.now_ms, policy.metrics_fresh_ms).map_or(&[][..], Vec::as_slice);
        if delivered || sight.owed.is_none() {
            let (busy_watts, mut idle_ms) = (self.busy_watts, self.idle_ms);
            if let Some(proc) = sight.proc.filter(|_| sight.owed.is_none() && tick.excuse.is_none()) {
                let look = tick.elapsed_ms.min(LOOK_MS_MAX);
                idle_ms = if idle_ms[0] >= HABIT_MS_MAX { idle_ms.map(|ms| ms / 2) } else { idle_ms };
                idle_ms = [idle_ms[0] + look, idle_ms[1] + if proc.state == Some('R') { look } else { 0 }];
            }
            let running = Running::since(tick.now_ms);
            *self = Self { running, busy_watts, idle_ms, worked_at: tick.counted_ms, ..Self::default() };
            if delivered {
                self.learn_power(gpus);
            }
        } else {
            if let Some(proc) = sight.proc {
                // who is frozen, or compiles, or is held, shows by its CPU time nothing of the step
                if tick.excuse.is_some() {
                    self.running.pause();
                } else {
                    self.running.look(obs.proc.at_ms, proc);
                }
            }
            let silent = gpus.iter().filter_map(|gpu| gpu.silent_since_ms).min();
            self.nvml_silent_ms =
                silent.map(|at| tick.now_ms.saturating_sub(at)).filter(|ms| *ms >= NVML_SILENT_MS_MIN);
            for gpu in gpus {
                self.gpu_looks += 1;
                self.cold_looks += u64::from(self.busy_and_cold(gpu));
                self.warm_looks += u64::from(self.busy_and_warm(gpu));
                self.busy_looks += u64::from(gpu.util >= GPU_IDLE_UTIL);
            }
            if self.anything_works(sight, gpus) {
                self.worked_at = tick.counted_ms;
            }
        }
        // a Xid that can be read is weighed by its code
        for hit in obs.log.iter().filter(|hit| xid::parse(&hit.line).is_none()) {
            if let Some(sign) =
                log_signs::by_name(&hit.signature).filter(|s| !matches!(s.meaning, Meaning::Paused | Meaning::Resumed))
            {
                let graver = |old: &Signature| old.meaning != Meaning::Fatal && sign.meaning == Meaning::Fatal;
                if self.log.is_none_or(graver) {
                    self.log = Some(sign);
                }
            }
        }
    }

    /// Does the tree use CPU, read, or wait for its disk, or is a GPU busy? What cannot be seen may well work.
    fn anything_works(&self, sight: &Sight<'_>, gpus: &[GpuObs]) -> bool {
        let asleep = sight.proc.is_some_and(|p| !matches!(p.state, None | Some('R' | 'D')) && p.compilers == 0);
        !asleep || !self.running.quiet() || sight.startup_moved || gpus.iter().any(|gpu| gpu.util >= GPU_IDLE_UTIL)
    }

    /// For how long nothing at all has been seen to work for what is owed.
    pub fn idle_ms(&self, tick: &Tick) -> Ms {
        tick.since(self.worked_at)
    }

    /// Has the engine's own queue grown since the last delivery? Then its scheduler knows of the work, whatever the front end does.
    fn queued(view: &View<'_>) -> bool {
        view.signs.metrics_queued_at > view.signs.gate_delivered_at.max(view.signs.owed_since)
    }

    /// Does anything but the gate show that the engine itself holds the work: a step under way, running requests, or a stepping thread
    /// that sleeps while nothing is owed and has not slept since?
    fn taken_in(&self, view: &View<'_>) -> bool {
        view.sight.pages.iter().any(|page| page.step_started_ms.is_some() || page.running > 0)
            || view.sight.metrics.and_then(|m| m.running).is_some_and(|running| running >= 1.0)
            || self.steps_by_its_cpu()
    }

    /// Which of the tree's processes steps, and that it sleeps when idle, is known from /proc alone: a front end that fetches something
    /// for a client does not keep that thread on the CPU. An engine that spins when idle as well shows nothing by spinning.
    pub fn steps_by_its_cpu(&self) -> bool {
        let [watched, running] = self.idle_ms;
        let sleeps_idle = watched >= HABIT_MS_MIN && running * 10 <= watched;
        sleeps_idle && self.running.always_runs() && self.running.burning()
    }

    /// Since the last delivery: does the step run, or would it if it were given a core?
    pub fn burning(&self) -> bool {
        self.running.burning()
    }

    /// Weighs a complaint and names the witnesses.
    pub fn weigh(&self, view: &View<'_>, complaint: &Complaint, relapse: bool) -> Weight {
        let mut weight = Weight { strength: Strength::Weak, reasons: Vec::new(), silence_ms_min: 0, decisive: false };
        page_speaks(view, complaint, &mut weight);
        if complaint.died {
            weight.decide(Strength::Strong, "proc", "what has ended delivers nothing more".to_owned());
        }
        self.bystanders_speak(view, &mut weight);
        let second_source = view.sight.metrics.is_some() || view.sight.page.is_some() || view.sight.frontend_silent(1);
        // before a first byte a tree without CPU time may wait for what a client made its front end fetch; between two generations for a tool
        let rests = view.rests();
        let at_the_door = complaint.reason.source == "gate" && (view.nothing_begun() || rests) && !self.taken_in(view);
        // who crawls works for it; a tree that waits for its disk may be swapping, and one that reads loads what its step needs
        let by_disk = view.sight.proc.is_some_and(|p| p.state == Some('D')) || view.signs.loads(view.tick);
        let quiet = self.running.quiet() && !view.others_go_on(complaint.engine);
        weight.decisive |= quiet && !by_disk && !rests && !self.gpu_is_busy();
        if quiet && second_source && !at_the_door {
            weight.add(
                Strength::Moderate,
                "proc",
                "the whole process tree uses hardly any CPU although work is owed".to_owned(),
            );
        }
        if view.sight.frontend_silent(view.policy.admission_ms) {
            weight.add(Strength::Moderate, "frontend", "the front end does not answer either".to_owned());
        }
        if let Some((waiting, ms)) = view.signs.backlog.stands(view.tick) {
            let text = format!(
                "{waiting} connections wait to be accepted, and for {ms} ms no fewer: the front end takes nothing in"
            );
            weight.add(Strength::Moderate, "proc", text);
        }
        if relapse {
            weight.add(Strength::Moderate, "policy", "it was let out on trial a short while ago".to_owned());
        }
        if complaint.allowed.basis == Basis::Patience && !self.running.moves() {
            weight.add(Strength::Strong, "policy", "it was silent for as long as every rival waits".to_owned());
        }
        if weight.strength < Strength::Strong
            && view.sight.proc.is_some()
            && self.running.on_a_timer()
            && complaint.allowed.basis != Basis::Declared
        {
            weight.strength = Strength::Timer;
            weight
                .reasons
                .push(reason("proc", "the stepping thread sleeps on a timer, which may end by itself".to_owned()));
        } else if weight.strength == Strength::Weak
            && at_the_door
            && !Self::queued(view)
            && complaint.allowed.basis != Basis::Patience
        {
            weight.strength = Strength::Timer;
            let text = "no request in flight has begun to answer, and nothing shows that the engine took one in";
            weight.reasons.push(reason("gate", text.to_owned()));
        }
        weight.may_crawl(view, complaint, self.gpu_works());
        weight
    }

    /// Log, process states, GPUs and NCCL RAS: each knows nothing of the work that is owed.
    fn bystanders_speak(&self, view: &View<'_>, weight: &mut Weight) {
        if let Some(sign) = self.log {
            let text = format!("the log shows {}", sign.told());
            match sign.meaning {
                Meaning::Fatal => weight.decide(Strength::Strong, "log", text),
                _ => weight.add(Strength::Moderate, "log", text),
            }
        }
        if let Some(state) = view.sight.proc.and_then(|p| p.state).filter(|s| matches!(s, 'T' | 'D' | 'Z')) {
            let text = format!("the stepping process is in state {state}");
            match state {
                'D' => weight.add(Strength::Moderate, "proc", text),
                _ => weight.decide(Strength::Moderate, "proc", text),
            }
        }
        if let Some(proc) = view.sight.proc.filter(|p| p.stopped > 0 && !matches!(p.state, Some('T'))) {
            weight.decide(
                Strength::Moderate,
                "proc",
                format!("{} processes of the engine's tree are stopped (state T)", proc.stopped),
            );
        }
        if self.gpu_looks > 0 && self.cold_looks * 10 >= self.gpu_looks * 9 {
            weight.decide(
                Strength::Moderate,
                "gpu",
                "the GPU is busy and cold against its own busy baseline".to_owned(),
            );
        }
        if let Some(ras) = view.sight.ras.filter(|ras| !ras.silent_ranks.is_empty()) {
            weight.decide(
                Strength::Moderate,
                "ras",
                format!("NCCL RAS names silent ranks {:?}: {}", ras.silent_ranks, ras.text),
            );
        } else if let Some(ras) = view.sight.ras.filter(|ras| ras.silent_elsewhere) {
            weight.add(Strength::Moderate, "ras", format!("NCCL RAS names a silent rank: {}", ras.text));
        }
        view.xids.iter().for_each(|xid| weight.hear(xid));
        if let Some(ms) = self.nvml_silent_ms {
            weight.add(
                Strength::Moderate,
                "gpu",
                format!("NVML has not answered for {ms} ms, which a hung driver does not either"),
            );
        }
    }

    fn learn_power(&mut self, gpus: &[GpuObs]) {
        let busy = gpus
            .iter()
            .filter(|gpu| gpu.util >= 50)
            .filter_map(|gpu| gpu.power_watts.filter(|watts| watts.is_finite()))
            .fold(None, |max: Option<f64>, w| Some(max.map_or(w, |m| m.max(w))));
        if let Some(watts) = busy {
            self.busy_watts = Some(self.busy_watts.map_or(watts, |old| old * 0.95 + watts * 0.05));
        }
    }

    /// Did the GPU do at nearly all looks since the last delivery what it does while it delivers? Then it computes, however long.
    fn gpu_works(&self) -> bool {
        self.gpu_looks > 0 && self.warm_looks * 10 >= self.gpu_looks * 9
    }

    /// Did the GPU do anything at most looks since the last delivery? Then a quiet processor proves nothing.
    fn gpu_is_busy(&self) -> bool {
        self.busy_looks * 2 > self.gpu_looks
    }

    /// Busy, moving memory, and no colder than while it delivered. Of a card that does not tell its power the traffic alone speaks: no kernel
    /// that hangs was seen to have any.
    fn busy_and_warm(&self, gpu: &GpuObs) -> bool {
        let as_warm = |watts: f64| self.busy_watts.is_some_and(|baseline| watts >= baseline * 0.7);
        gpu.util >= 50 && gpu.memory_util > 10 && gpu.power_watts.is_none_or(as_warm)
    }

    /// Utilisation near 100 % with hardly any memory traffic and much less power than while it worked (S2; measured: tests/gpu). A power that
    /// the card does not tell is not less than any (D7).
    fn busy_and_cold(&self, gpu: &GpuObs) -> bool {
        let baseline = self.busy_watts.or(gpu.power_limit_watts.map(|limit| limit * 0.5));
        let is_cold = gpu.power_watts.zip(baseline).is_some_and(|(watts, baseline)| watts < baseline * 0.7);
        gpu.util >= 90 && gpu.memory_util <= 10 && is_cold
    }
}

#[cfg(test)]
#[path = "witness_tests.rs"]
mod tests;
