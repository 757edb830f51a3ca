//! The agent's own metrics, in Prometheus text format 0.0.4. Names begin with `truebeat_`; base units; made anew for each status,
//! so that what is written is what the detector knew at that moment.

use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};
use vitals::verdict::{StallClass, Verdict};

use crate::gate::ledger::GateReply;
use crate::text::lossy;

const VERDICTS: [&str; 10] =
    ["Starting", "Idle", "Progressing", "Suspect", "Stalled", "Slow", "Sleeping", "Draining", "Dead", "Unknown"];
/// A tick means to take a few milliseconds; its period is 100.
const TICK_BUCKETS: [f64; 8] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5];

/// What the detector counts.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    verdict: GaugeVec,
    fenced: IntGauge,
    ready: IntGauge,
    pub maintenance: IntGauge,
    pub processes_left: IntGauge,
    in_flight: IntGauge,
    prompt_tokens_owed: IntGauge,
    gate_requests: GaugeVec,
    pub gate_silent_total: IntCounter,
    pub episodes: IntCounterVec,
    pub kills: IntCounter,
    pub tick_seconds: Histogram,
    pub gap_seconds: prometheus::Counter,
    pub report_failures: IntGauge,
    pub log_lines_dropped: IntGauge,
    pub poison_requests: IntGauge,
}

impl Metrics {
    /// All at zero.
    ///
    /// # Errors
    /// Never in practice: a name that is no metric name, or one used twice.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let metrics = Self {
            verdict: GaugeVec::new(
                Opts::new("truebeat_verdict", "1 for the verdict of now, 0 for the others."),
                &["verdict"],
            )?,
            fenced: IntGauge::new("truebeat_fenced", "1 while new requests are refused.")?,
            ready: IntGauge::new("truebeat_ready", "1 while this replica may serve.")?,
            maintenance: IntGauge::new(
                "truebeat_maintenance",
                "1 while maintenance is declared: no silence counts against the engine.",
            )?,
            processes_left: IntGauge::new(
                "truebeat_engine_processes_left",
                "Processes of an engine that has ended which are still there.",
            )?,
            in_flight: IntGauge::new("truebeat_gate_in_flight", "Requests forwarded to the engine and not ended.")?,
            prompt_tokens_owed: IntGauge::new(
                "truebeat_gate_prompt_tokens_owed",
                "Rough prompt tokens of requests that await their first byte.",
            )?,
            gate_requests: GaugeVec::new(
                Opts::new("truebeat_gate_requests", "Requests ended since the gate started, by how they ended."),
                &["end"],
            )?,
            gate_silent_total: IntCounter::new(
                "truebeat_gate_silent_total",
                "Ticks in which the gate was asked and did not answer.",
            )?,
            episodes: IntCounterVec::new(
                Opts::new("truebeat_episodes_total", "Episodes opened, by the stall class of their first verdict."),
                &["class"],
            )?,
            kills: IntCounter::new("truebeat_kills_total", "Engine process trees killed.")?,
            tick_seconds: Histogram::with_opts(
                HistogramOpts::new("truebeat_tick_seconds", "Time that one tick of the detector took.")
                    .buckets(TICK_BUCKETS.into()),
            )?,
            gap_seconds: prometheus::Counter::new(
                "truebeat_agent_gap_seconds_total",
                "Time in which the detector itself did not run; it is discarded (V5).",
            )?,
            report_failures: IntGauge::new("truebeat_report_failures", "Declarations that the API did not take.")?,
            log_lines_dropped: IntGauge::new(
                "truebeat_log_lines_dropped",
                "Lines of the detector's own log that were dropped because nobody read them.",
            )?,
            poison_requests: IntGauge::new(
                "truebeat_poison_requests",
                "Fingerprints of requests that are refused because they were in flight at two stalls (I7).",
            )?,
            registry,
        };
        metrics.register()?;
        // a counter that appears with its first episode hides that one from whoever asks for its increase
        for class in StallClass::NAMES.into_iter().chain(["Dead"]) {
            metrics.episodes.with_label_values(&[class]);
        }
        Ok(metrics)
    }

    fn register(&self) -> Result<(), prometheus::Error> {
        let all: [Box<dyn prometheus::core::Collector>; 17] = [
            Box::new(self.verdict.clone()),
            Box::new(self.fenced.clone()),
            Box::new(self.ready.clone()),
            Box::new(self.maintenance.clone()),
            Box::new(self.processes_left.clone()),
            Box::new(self.in_flight.clone()),
            Box::new(self.prompt_tokens_owed.clone()),
            Box::new(self.gate_requests.clone()),
            Box::new(self.gate_silent_total.clone()),
            Box::new(self.episodes.clone()),
            Box::new(self.kills.clone()),
            Box::new(self.tick_seconds.clone()),
            Box::new(self.gap_seconds.clone()),
            Box::new(self.report_failures.clone()),
            Box::new(self.log_lines_dropped.clone()),
            Box::new(self.poison_requests.clone()),
            Box::new(IntGauge::new("truebeat_up", "1: the detector runs.").inspect(|up| up.set(1))?),
        ];
        all.into_iter().try_for_each(|collector| self.registry.register(collector))
    }

    /// The verdict of this tick and what follows from it.
    pub fn set_verdict(&self, verdict: &Verdict, fenced: bool, ready: bool) {
        for name in VERDICTS {
            self.verdict.with_label_values(&[name]).set(f64::from(u8::from(name == verdict.name())));
        }
        self.fenced.set(fenced.into());
        self.ready.set(ready.into());
    }

    /// What the gate said last.
    pub fn set_gate(&self, reply: &GateReply) {
        self.in_flight.set(reply.obs.in_flight.into());
        self.prompt_tokens_owed.set(i64::try_from(reply.obs.prompt_tokens_owed).unwrap_or(i64::MAX));
        let ends = [
            ("completed", reply.requests_completed),
            ("failed", reply.requests_failed),
            ("declined", reply.requests_declined),
            ("refused", reply.requests_refused),
            ("abandoned", reply.obs.requests_abandoned),
            ("poisonous", reply.requests_poisonous),
            ("crowded", reply.requests_crowded),
        ];
        for (end, n) in ends {
            self.gate_requests.with_label_values(&[end]).set(n as f64);
        }
    }

    /// The text that `/metrics` serves.
    pub fn text(&self) -> String {
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::warn!(%error, "the metrics could not be written");
        }
        lossy(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_verdict_is_one() {
        let metrics = Metrics::new().unwrap();
        metrics.set_verdict(&Verdict::Progressing, false, true);
        metrics.set_verdict(&Verdict::Dead, true, false);
        metrics.set_gate(&GateReply { requests_refused: 3, ..GateReply::default() });
        let text = metrics.text();
        let ones: Vec<_> =
            text.lines().filter(|line| line.starts_with("truebeat_verdict{") && line.ends_with(" 1")).collect();
        assert_eq!(ones, ["truebeat_verdict{verdict=\"Dead\"} 1"]);
        assert!(text.contains("truebeat_gate_requests{end=\"refused\"} 3"), "{text}");
    }

    #[test]
    fn the_first_episode_of_a_class_is_an_increase() {
        let metrics = Metrics::new().unwrap();
        let counted = |class: &str| {
            let name = format!("truebeat_episodes_total{{class=\"{class}\"}} ");
            let text = metrics.text();
            text.lines().find_map(|line| line.strip_prefix(&name)).map(str::to_owned)
        };
        assert_eq!((counted("Livelock").as_deref(), counted("Dead").as_deref()), (Some("0"), Some("0")));
        metrics.episodes.with_label_values(&[StallClass::Livelock.name()]).inc();
        assert_eq!(counted("Livelock").as_deref(), Some("1"));
    }
}
