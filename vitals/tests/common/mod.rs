//! A made-up engine with a page, a gate and a process, ticked in virtual time.
#![allow(dead_code, reason = "each test crate uses its own part")]

use vitals::detector::{Detector, Policy};
use vitals::observation::{
    FrontendObs, GateObs, GpuObs, LogHit, MetricsObs, Ms, Observation, PageObs, PagePhase, ProcObs, RasObs, Signal,
    XidObs,
};
use vitals::verdict::{Action, Outcome, Verdict};

#[derive(Debug, Clone)]
pub struct Sim {
    pub now: Ms,
    pub page: Option<PageObs>,
    pub peers: Vec<PageObs>,
    pub gate: Option<GateObs>,
    pub metrics: Option<MetricsObs>,
    /// When that page was read, where it is not read at each tick.
    pub scraped_at: Option<Ms>,
    pub proc: Option<ProcObs>,
    pub frontend: Option<FrontendObs>,
    pub maintenance: bool,
    pub draining: bool,
    pub gap: Ms,
    pub gpus: Vec<GpuObs>,
    pub ras: Option<RasObs>,
    pub log: Vec<LogHit>,
    pub xids: Vec<XidObs>,
    /// CPU share of the tree, permille.
    pub cpu: u64,
    pub detector: Detector,
    pub last: Option<Outcome>,
}

/// A small generator: the same history at each run.
#[derive(Debug, Clone)]
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below.max(1)
    }
}

pub const T0: Ms = 1_000_000;

impl Sim {
    /// A native engine in its load phase, process started at [`T0`].
    pub fn native() -> Self {
        let page = PageObs {
            rank: 0,
            world_size: 1,
            engines: 1,
            steps_completed: 0,
            tokens_delivered: 0,
            requests_finished: 0,
            running: 0,
            waiting: 0,
            prompt_tokens_owed: 0,
            phase: PagePhase::Load,
            phase_tokens: 0,
            phase_entered_ms: T0,
            lease_ms: 30_000,
            step_started_ms: None,
            work_done: 0,
            work_total: 100,
            published_ms: T0,
        };
        let mut sim = Self::foreign();
        sim.page = Some(page);
        sim.metrics = None;
        sim
    }

    /// A foreign engine behind a gate, front end not up yet.
    pub fn foreign() -> Self {
        Self {
            now: T0,
            page: None,
            peers: Vec::new(),
            gate: Some(GateObs { epoch: 1, ..GateObs::default() }),
            metrics: Some(MetricsObs {
                running: Some(0.0),
                waiting: Some(0.0),
                generation_tokens: Some(0.0),
                progress_digest: 1,
                ..MetricsObs::default()
            }),
            scraped_at: None,
            proc: Some(ProcObs {
                alive: true,
                started_ms: T0,
                state: Some('S'),
                wchan: Some("futex_do_wait".into()),
                ..ProcObs::default()
            }),
            frontend: Some(FrontendObs {
                answers: false,
                status: None,
                silent_since_ms: Some(T0),
                ever_answered: false,
                elsewhere: false,
            }),
            maintenance: false,
            draining: false,
            gap: 0,
            gpus: Vec::new(),
            ras: None,
            log: Vec::new(),
            xids: Vec::new(),
            cpu: 800,
            detector: Detector::new(Policy::default(), T0),
            last: None,
        }
    }

    /// Serving and idle.
    pub fn up(mut self) -> Self {
        self.frontend = Some(FrontendObs {
            answers: true,
            status: Some(200),
            silent_since_ms: None,
            ever_answered: true,
            elsewhere: false,
        });
        if let Some(page) = &mut self.page {
            page.phase = PagePhase::Idle;
            page.phase_entered_ms = self.now;
            page.lease_ms = 0;
        }
        self.tick(100);
        self
    }

    /// Serving four streams for this long, 20 steps a second and stream.
    pub fn busy(mut self, ms: Ms) -> Self {
        self.admit(4, 200);
        self.decode(ms);
        self
    }

    /// A stranger that streams, and so long ago showed what a prompt of 10 000 tokens takes: five seconds.
    pub fn knows_long_prompts(ago_ms: Ms) -> Self {
        let mut sim = Self::foreign().up().busy(20_000);
        for _ in 0..4 {
            sim.admit(1, 10_000);
            sim.silence(5_000);
            sim.decode(2_000);
        }
        sim.decode(ago_ms);
        sim
    }

    /// This many short requests, one at a time.
    pub fn served(mut self, requests: u32) -> Self {
        for _ in 0..requests {
            self.admit(1, 10);
            self.tick(100);
            let at = self.now;
            self.deliver(1, at);
            self.tick(100);
            self.depart();
        }
        self
    }

    /// All clients leave, and the gauges show it.
    pub fn depart(&mut self) {
        self.leave();
        if let Some(metrics) = &mut self.metrics {
            metrics.running = Some(0.0);
        }
        self.tick(100);
    }

    /// Requests arrive at the gate (and in the page's queue).
    pub fn admit(&mut self, requests: u32, prompt: u64) {
        let now = self.now;
        if let Some(gate) = &mut self.gate {
            gate.in_flight += requests;
            gate.awaiting_first_byte += requests;
            gate.prompt_tokens_owed += prompt;
            gate.oldest_in_flight_ms.get_or_insert(now);
        }
        if let Some(page) = &mut self.page {
            page.running += requests;
            page.phase = PagePhase::Decode;
            page.phase_entered_ms = now;
            page.phase_tokens = requests;
            page.lease_ms = 2_000;
            page.step_started_ms = Some(now);
        }
    }

    /// Healthy decode in ticks of 100 ms.
    pub fn decode(&mut self, ms: Ms) -> Vec<Outcome> {
        (0..ms / 100).map(|_| self.deliver_for(100)).collect()
    }

    /// One healthy tick.
    pub fn deliver_for(&mut self, ms: Ms) -> Outcome {
        let at = self.now + ms;
        let steps = (ms / 50).max(1);
        if let Some(page) = &mut self.page {
            page.steps_completed += steps;
            page.tokens_delivered += steps * u64::from(page.running);
            page.step_started_ms = Some(at.saturating_sub(10));
            page.published_ms = at;
        }
        self.deliver(steps * 4, at);
        self.tick(ms)
    }

    /// Chunks pass the gate, counters move.
    pub fn deliver(&mut self, chunks: u64, at: Ms) {
        if let Some(gate) = &mut self.gate {
            gate.chunks_delivered += chunks;
            gate.bytes_delivered += chunks * 20;
            gate.last_delivery_ms = Some(at);
            gate.awaiting_first_byte = 0;
            gate.prompt_tokens_owed = 0;
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.generation_tokens = metrics.generation_tokens.map(|t| t + chunks as f64);
            metrics.running = Some(4.0);
            metrics.progress_digest += 1;
        }
    }

    /// All clients are gone.
    pub fn leave(&mut self) {
        if let Some(gate) = &mut self.gate {
            *gate = GateObs {
                epoch: gate.epoch,
                chunks_delivered: gate.chunks_delivered,
                bytes_delivered: gate.bytes_delivered,
                last_delivery_ms: gate.last_delivery_ms,
                ..GateObs::default()
            };
        }
    }

    /// The page's loop is idle again.
    pub fn idle(&mut self) {
        let now = self.now;
        if let Some(page) = &mut self.page {
            page.steps_completed += 1;
            page.running = 0;
            page.waiting = 0;
            page.prompt_tokens_owed = 0;
            page.step_started_ms = None;
            page.phase = PagePhase::Idle;
            page.lease_ms = 0;
            page.published_ms = now;
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.running = Some(0.0);
        }
    }

    pub fn process(&mut self) -> &mut ProcObs {
        self.proc.get_or_insert_default()
    }

    pub fn observation(&self) -> Observation {
        let pages: Vec<PageObs> = self.page.iter().cloned().chain(self.peers.iter().cloned()).collect();
        Observation {
            proc: self.proc.clone().map(|p| Signal::at(self.now, p)).unwrap_or_default(),
            pages: if pages.is_empty() { Signal::default() } else { Signal::at(self.now, pages) },
            gate: self.gate.clone().map(|g| Signal::at(self.now, g)).unwrap_or_default(),
            metrics: self
                .metrics
                .clone()
                .map(|m| Signal::at(self.scraped_at.unwrap_or(self.now), m))
                .unwrap_or_default(),
            frontend: self.frontend.map(|f| Signal::at(self.now, f)).unwrap_or_default(),
            gpus: if self.gpus.is_empty() { Signal::default() } else { Signal::at(self.now, self.gpus.clone()) },
            ras: self.ras.clone().map(|r| Signal::at(self.now, r)).unwrap_or_default(),
            log: self.log.clone(),
            xids: self.xids.clone(),
            maintenance: self.maintenance,
            draining: self.draining,
            agent_gap_ms: self.gap,
        }
    }

    /// Time passes and nothing else does.
    pub fn tick(&mut self, ms: Ms) -> Outcome {
        self.now += ms;
        let cpu = ms * self.cpu / 1000;
        if let Some(proc) = &mut self.proc {
            proc.cpu_ms += cpu;
        }
        let obs = self.observation();
        let outcome = self.detector.step(self.now, &obs);
        self.last = Some(outcome.clone());
        outcome
    }

    /// Silence in ticks of 100 ms; the last outcome.
    pub fn silence(&mut self, ms: Ms) -> Outcome {
        let mut last = self.tick(0);
        for _ in 0..ms / 100 {
            last = self.tick(100);
        }
        last
    }

    /// Silence until the verdict is this, at most `ms`; how long it took.
    pub fn silence_until(&mut self, ms: Ms, done: impl Fn(&Verdict) -> bool) -> Option<Ms> {
        let began = self.now;
        while self.now - began < ms {
            if done(&self.tick(100).verdict) {
                return Some(self.now - began);
            }
        }
        None
    }
}

/// `Suspect(StepStalled) F` and the like.
pub fn cell(outcome: &Outcome) -> String {
    let class = outcome.verdict.class().map(|class| format!("({})", class.name())).unwrap_or_default();
    let actions: String = outcome
        .actions
        .iter()
        .map(|action| match action {
            Action::Fence => 'F',
            Action::Unfence => 'U',
            Action::CaptureEvidence => 'E',
            Action::WantRestart => 'R',
            Action::EscalateToNode => 'N',
        })
        .collect();
    format!("{}{class} {actions}", outcome.verdict.name())
}

pub fn suspect(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Suspect(_))
}

pub fn stalled(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Stalled(_))
}
