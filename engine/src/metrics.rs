//! What `/metrics` exports: vLLM's names for what vLLM has too, so that dashboards and autoscalers work unchanged, and
//! `truebeat:*` for what only we tell. `docs/engine-metrics.md` lists them all; a test holds the two together.

use std::sync::atomic::Ordering::Relaxed;

use heartbeat::monotonic_ns;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};

use crate::beat::BeatBoard;
use crate::handle::End;
use crate::memory;
use crate::programs::ProgramCounts;
use crate::scheduler::{Finish, Limits, Outcome, Scheduler, StepPlan};
use crate::speculation::SpeculationCounts;

/// Why a request was turned away at the door.
pub const REFUSALS: [&str; 8] =
    ["starting", "stalled", "draining", "queue_full", "invalid", "too_large", "slow", "no_renderer"];
/// Ends of accepted requests, as vLLM names them and beyond.
const ENDS: [&str; 8] = ["stop", "length", "abort", "cut", "error", "barred", "late", "shutdown"];

/// All series of one engine.
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge,
    cache_config: GaugeVec,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    preemptions: IntCounter,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    drafts: IntCounter,
    draft_tokens: IntCounter,
    accepted_tokens: IntCounter,
    accepted_at: IntCounterVec,
    speculation_on: Gauge,
    success: IntCounterVec,
    iteration_tokens: Histogram,
    steps: IntCounter,
    step_failures: IntCounter,
    ended: IntCounterVec,
    in_flight: Gauge,
    healthy: Gauge,
    step_age: Gauge,
    beat_age: Gauge,
    heap: Gauge,
    heap_readings: memory::Readings,
    /// The front end's own: these go on while the engine thread is frozen.
    pub first_token: Histogram,
    pub inter_token: Histogram,
    pub e2e: Histogram,
    pub request_prompt_tokens: Histogram,
    pub request_generation_tokens: Histogram,
    pub refused: IntCounterVec,
    pub deadlines_exceeded: IntCounter,
    pub grammar_compile: Histogram,
    programs: ProgramSeries,
    /// The engine thread's: steps of a sequence that ran again because its grammar was not ready.
    pub masks_late: IntCounter,
}

impl Metrics {
    /// Metrics labelled with the served model's name.
    ///
    /// # Errors
    /// When the label is not one that Prometheus allows.
    pub fn new(model_name: &str) -> Result<Self, prometheus::Error> {
        let r = &Maker::new(model_name);
        let metrics = Self {
            running: r.gauge("vllm:num_requests_running", "Requests in the running batch.")?,
            waiting: r.gauge("vllm:num_requests_waiting", "Requests in the queue.")?,
            kv_usage: r.gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 1 = all.")?,
            cache_config: r.gauges(
                "vllm:cache_config_info",
                "Shape of the KV cache.",
                &["block_size", "num_gpu_blocks"],
            )?,
            prompt_tokens: r.counter("vllm:prompt_tokens_total", "Prompt tokens run.")?,
            generation_tokens: r.counter("vllm:generation_tokens_total", "Tokens generated.")?,
            preemptions: r.counter("vllm:num_preemptions_total", "Sequences that lost their blocks to others.")?,
            prefix_queries: r.counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.")?,
            prefix_hits: r.counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.")?,
            drafts: r.counter("vllm:spec_decode_num_drafts_total", "Sequences of steps that verified guesses.")?,
            draft_tokens: r.counter("vllm:spec_decode_num_draft_tokens_total", "Guesses verified.")?,
            accepted_tokens: r.counter("vllm:spec_decode_num_accepted_tokens_total", "Guesses accepted.")?,
            accepted_at: r.counters(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "Guesses accepted, by place.",
                "position",
                &[],
            )?,
            speculation_on: r.gauge("truebeat:speculation_on", "1 while guesses are made, 0 while they do not pay.")?,
            success: r.counters("vllm:request_success_total", "Requests finished.", "finished_reason", &ENDS[..3])?,
            iteration_tokens: r.sizes("vllm:iteration_tokens_total", "Tokens run in a step.")?,
            steps: r.counter("truebeat:steps_total", "Steps completed.")?,
            step_failures: r.counter("truebeat:step_failures_total", "Steps in which a sequence failed.")?,
            ended: r.counters("truebeat:requests_ended_total", "Accepted requests by how they ended.", "end", &ENDS)?,
            in_flight: r.gauge("truebeat:requests_in_flight", "Requests in the engine, counted by the front end.")?,
            healthy: r.gauge("truebeat:healthy", "1 while /health, if it tells the truth, says 200.")?,
            step_age: r.gauge("truebeat:step_age_seconds", "Age of the step under way, 0 between steps.")?,
            beat_age: r.gauge("truebeat:beat_age_seconds", "Age of the last published beat.")?,
            heap: r.gauge("truebeat:heap_held_bytes", "Bytes that were asked of the allocator and not given back.")?,
            heap_readings: memory::Readings::default(),
            first_token: r.seconds("vllm:time_to_first_token_seconds", "From arrival to the first token.")?,
            inter_token: r.seconds("vllm:inter_token_latency_seconds", "Between two tokens of a request.")?,
            e2e: r.seconds("vllm:e2e_request_latency_seconds", "From arrival to the last token.")?,
            request_prompt_tokens: r.sizes("vllm:request_prompt_tokens", "Prompt tokens of a request.")?,
            request_generation_tokens: r.sizes("vllm:request_generation_tokens", "Output tokens of a request.")?,
            refused: r.counters("truebeat:requests_refused_total", "Requests turned away.", "reason", &REFUSALS)?,
            deadlines_exceeded: r.counter("truebeat:deadlines_exceeded_total", "Requests ended by their deadline.")?,
            grammar_compile: r.seconds("truebeat:grammar_compile_seconds", "To compile a request's grammar.")?,
            masks_late: r.counter("truebeat:grammar_masks_late_total", "Steps run again for a grammar's mask.")?,
            programs: ProgramSeries {
                replayed: r.counter("truebeat:steps_replayed_total", "Steps that ran by their program.")?,
                eager: r.counter("truebeat:steps_eager_total", "Steps that ran call by call.")?,
                graphs: r.counter("truebeat:steps_by_graph_total", "Steps that a device ran as one launch.")?,
                captured: r.counter("truebeat:programs_captured_total", "Step programs made.")?,
                evicted: r.counter("truebeat:programs_evicted_total", "Step programs dropped for others.")?,
                refused: r.counter("truebeat:programs_refused_total", "Programs of another shape than the step's.")?,
            },
            registry: r.registry.clone(),
        };
        Ok(metrics)
    }

    /// Whether the engine serves, as `/health` tells it; asked for before each [`Self::text`], so that it is true while the engine thread is
    /// frozen.
    pub fn health(&self, serves: bool) {
        self.healthy.set(f64::from(u8::from(serves)));
    }

    /// The exposition text, format 0.0.4. Ages are read from the board now: they are true while the engine thread is frozen.
    ///
    /// # Errors
    /// When a series cannot be written as text.
    pub fn text(&self, board: &BeatBoard, in_flight: usize) -> Result<String, prometheus::Error> {
        let (view, now) = (board.load(), monotonic_ns());
        let age = |from_ns: u64| now.saturating_sub(from_ns) as f64 / 1e9;
        self.in_flight.set(in_flight as f64);
        if let Some(held) = self.heap_readings.take(monotonic_ns, memory::held_bytes) {
            self.heap.set(held.map_or(f64::NAN, |bytes| bytes as f64));
        }
        if let Some(beat) = view.map(|v| v.beat) {
            self.beat_age.set(age(beat.published_ns));
            self.step_age.set(if beat.step_started_ns == 0 { 0.0 } else { age(beat.step_started_ns) });
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        String::from_utf8(text).map_err(|e| prometheus::Error::Msg(e.to_string()))
    }

    /// A step was completed, with these outcomes: what was run and thrown away is no progress.
    pub fn step(&self, plan: &StepPlan, outcomes: &[Outcome], scheduler: &Scheduler) {
        let generated: usize = outcomes.iter().map(|outcome| outcome.tokens.len()).sum();
        let failed = outcomes.iter().any(|outcome| outcome.finish == Some(Finish::Failed));
        self.steps.inc();
        self.step_failures.inc_by(u64::from(failed));
        self.preemptions.inc_by(plan.preempted.len() as u64);
        self.prompt_tokens.inc_by(if outcomes.is_empty() { 0 } else { plan.prefill_tokens as u64 });
        self.generation_tokens.inc_by(generated as u64);
        self.iteration_tokens.observe((plan.prefill_tokens + plan.decode_tokens) as f64);
        self.gauges(scheduler);
    }

    /// The engine thread's gauges; as in vLLM they stand still when it does.
    pub fn gauges(&self, scheduler: &Scheduler) {
        let owed = scheduler.owed();
        self.running.set(owed.running as f64);
        self.waiting.set(owed.waiting as f64);
        self.kv_usage.set(scheduler.kv_usage());
        let prefixes = scheduler.prefix_counts();
        rise(&self.prefix_queries, prefixes.queried_tokens);
        rise(&self.prefix_hits, prefixes.hit_tokens);
    }

    /// What became of guesses so far, and whether more are made.
    pub fn speculation(&self, counts: &SpeculationCounts, on: bool) {
        rise(&self.drafts, counts.drafts);
        rise(&self.draft_tokens, counts.draft_tokens);
        rise(&self.accepted_tokens, counts.accepted_tokens);
        for (position, count) in counts.accepted_at.iter().enumerate() {
            rise(&self.accepted_at.with_label_values(&[position.to_string()]), *count);
        }
        self.speculation_on.set(f64::from(u8::from(on)));
    }

    /// What became of steps and of step programs so far.
    pub fn programs(&self, counts: &ProgramCounts) {
        let ProgramCounts { replayed, eager, graphs, captured, evicted, refused, refused_elsewhere, .. } = counts;
        let series = &self.programs;
        let all = [&series.replayed, &series.eager, &series.graphs, &series.captured, &series.evicted];
        all.into_iter()
            .zip([replayed, eager, graphs, captured, evicted])
            .for_each(|(to, of)| rise(to, of.load(Relaxed)));
        rise(&series.refused, refused.load(Relaxed) + refused_elsewhere.load(Relaxed));
    }

    /// An accepted request ended.
    pub fn ended(&self, end: &End) {
        let name = match end {
            End::Stop => "stop",
            End::Length => "length",
            // nobody waits for either any more, and neither is a sign that the engine delivers: with none, every deadline passes
            End::Cancelled | End::Expired => "abort",
            End::Cut => "cut",
            End::Failed(_) => "error",
            End::Barred(_) => "barred",
            End::Late(_) => "late",
            End::Shutdown => "shutdown",
        };
        self.ended.with_label_values(&[name]).inc();
        if matches!(end, End::Stop | End::Length | End::Cancelled) {
            self.success.with_label_values(&[name]).inc();
        }
    }

    /// The cache has this shape.
    pub fn cache_config(&self, limits: &Limits) {
        let (size, blocks) = (limits.block_size.to_string(), limits.num_blocks.to_string());
        self.cache_config.with_label_values(&[&size, &blocks]).set(1.0);
    }

    /// Running, waiting, prompt tokens, generated tokens, KV usage: for the log's stats line.
    pub fn stats(&self) -> (f64, f64, u64, u64, f64) {
        let tokens = (self.prompt_tokens.get(), self.generation_tokens.get());
        (self.running.get(), self.waiting.get(), tokens.0, tokens.1, self.kv_usage.get())
    }
}

/// Steps by the way they ran, and their programs.
struct ProgramSeries {
    replayed: IntCounter,
    eager: IntCounter,
    graphs: IntCounter,
    captured: IntCounter,
    evicted: IntCounter,
    refused: IntCounter,
}

/// Brings a counter up to what was counted elsewhere.
fn rise(counter: &IntCounter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

/// Makes and registers series with the common labels.
struct Maker {
    registry: Registry,
    model_name: String,
}

impl Maker {
    fn new(model_name: &str) -> Self {
        Self { registry: Registry::new(), model_name: model_name.into() }
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("engine", "0").const_label("model_name", &self.model_name)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<Gauge, prometheus::Error> {
        let gauge = Gauge::with_opts(self.opts(name, help))?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
        let gauges = GaugeVec::new(self.opts(name, help), labels)?;
        self.registry.register(Box::new(gauges.clone()))?;
        Ok(gauges)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let counter = IntCounter::with_opts(self.opts(name, help))?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    /// Every value of the label is there from the start: a counter that appears with its first event loses that event.
    fn counters(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &[&str],
    ) -> Result<IntCounterVec, prometheus::Error> {
        let counters = IntCounterVec::new(self.opts(name, help), &[label])?;
        values.iter().for_each(|v| counters.with_label_values(&[v]).inc_by(0));
        self.registry.register(Box::new(counters.clone()))?;
        Ok(counters)
    }

    fn seconds(&self, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
        let bounds =
            [0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
        self.histogram(name, help, &bounds)
    }

    fn sizes(&self, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
        // up to the longest contexts that there are
        let bounds: Vec<f64> = (0..=20).map(|i| f64::from(1 << i)).collect();
        self.histogram(name, help, &bounds)
    }

    fn histogram(&self, name: &str, help: &str, bounds: &[f64]) -> Result<Histogram, prometheus::Error> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: bounds.to_vec() };
        let histogram = Histogram::with_opts(opts)?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
