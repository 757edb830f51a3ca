//! The operator's own metrics, Prometheus text format 0.0.4. Names are the product's prefix and base units.

use crds::{
    InferenceDeployment,
    engine_incident::{OUTCOMES, STEPS},
};
use kube::ResourceExt;
use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder, core::Collector,
};

/// A small model is back within seconds, and a large one is half an hour on its way.
const STALL_BUCKETS: [f64; 9] = [5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 7_200.0];

/// Seconds of one step of a repair.
const STEP_BUCKETS: [f64; 7] = [1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0, 7_200.0];

/// Handles of every metric.
pub struct Metrics {
    registry: Registry,
    /// Requests to the API server by verb and outcome (`ok`, `error`, `deadline`, `not_leader`).
    pub api_calls: IntCounterVec,
    /// Passes over one InferenceDeployment by result (`ok`, `overtaken` by another writer, `error`, `panic`).
    pub reconciles: IntCounterVec,
    /// How long a pass took.
    pub reconcile_seconds: Histogram,
    /// Restarts granted by this process.
    pub grants: IntCounter,
    /// Restart grants in force, by InferenceDeployment.
    pub grants_held: IntGaugeVec,
    /// 1 while restarts are wanted and held because of a common cause, by InferenceDeployment.
    pub restarts_held: IntGaugeVec,
    /// Restarts on trial that were in vain, under the hold that stands, by InferenceDeployment.
    pub trials_failed: IntGaugeVec,
    /// 1 while the revision of the spec has failed, rolled back or not, by InferenceDeployment.
    pub rollout_failed: IntGaugeVec,
    /// Replicas that a person keeps out of traffic, and no episode, by InferenceDeployment.
    pub fenced_by_person: IntGaugeVec,
    /// Objects that fail the cross-check of label and owner, by the InferenceDeployment whose name they bear.
    pub objects_doubted: IntGaugeVec,
    /// Replicas whose engine is stalled and answers 200 to `/health` all the same, by InferenceDeployment.
    pub health_lies: IntGaugeVec,
    /// Replicas that the spec asks for, by InferenceDeployment.
    pub replicas_wanted: IntGaugeVec,
    /// Replicas that take requests, by the kubelet's word, by InferenceDeployment.
    pub replicas_ready: IntGaugeVec,
    /// From suspicion to the end of confirmed stalls whose record this process closed, by InferenceDeployment and outcome.
    stall_seconds: HistogramVec,
    /// What each step of them lasted, from the one before, by InferenceDeployment and step.
    step_seconds: HistogramVec,
    /// 1 while this process leads.
    pub leader: IntGauge,
    /// 1 while the watch of a kind is in step with the API server.
    pub watch_up: IntGaugeVec,
}

impl Metrics {
    /// All metrics at zero, in a registry of their own.
    pub fn new() -> Result<Self, prometheus::Error> {
        let metrics = Metrics {
            registry: Registry::new(),
            api_calls: IntCounterVec::new(
                Opts::new("truebeat_operator_api_calls_total", "Requests to the API server."),
                &["verb", "outcome"],
            )?,
            reconciles: IntCounterVec::new(
                Opts::new("truebeat_operator_reconciles_total", "Passes over one InferenceDeployment."),
                &["result"],
            )?,
            reconcile_seconds: Histogram::with_opts(
                HistogramOpts::new("truebeat_operator_reconcile_seconds", "Duration of a pass.")
                    .buckets(vec![0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]),
            )?,
            grants: IntCounter::new("truebeat_operator_restart_grants_total", "Restarts granted by this process.")?,
            grants_held: of_deployment("truebeat_operator_restart_grants_held", "Restart grants in force.")?,
            restarts_held: of_deployment(
                "truebeat_operator_restarts_held",
                "1 while restarts are held because of a common cause.",
            )?,
            trials_failed: of_deployment(
                "truebeat_operator_hold_trials_failed",
                "Restarts on trial that were in vain under the hold that stands.",
            )?,
            rollout_failed: of_deployment(
                "truebeat_operator_rollout_failed",
                "1 while the revision of the spec has failed.",
            )?,
            fenced_by_person: of_deployment(
                "truebeat_operator_fenced_by_person",
                "Replicas that a person keeps out of traffic.",
            )?,
            objects_doubted: of_deployment(
                "truebeat_operator_objects_doubted",
                "Objects whose label and owner do not agree.",
            )?,
            health_lies: of_deployment(
                "truebeat_operator_health_lies",
                "Replicas whose engine is stalled and answers 200 to /health.",
            )?,
            replicas_wanted: of_deployment("truebeat_operator_replicas_wanted", "Replicas that the spec asks for.")?,
            replicas_ready: of_deployment("truebeat_operator_replicas_ready", "Replicas that take requests.")?,
            stall_seconds: stall_seconds()?,
            step_seconds: step_seconds()?,
            leader: IntGauge::new("truebeat_operator_leader", "1 while this process leads.")?,
            watch_up: IntGaugeVec::new(
                Opts::new("truebeat_operator_watch_up", "1 while the watch is in step with the API server."),
                &["kind"],
            )?,
        };
        for gauge in metrics.of_deployments() {
            metrics.registry.register(Box::new(gauge.clone()))?;
        }
        for collector in metrics.others() {
            metrics.registry.register(collector)?;
        }
        Ok(metrics)
    }

    fn others(&self) -> [Box<dyn Collector>; 8] {
        [
            Box::new(self.api_calls.clone()),
            Box::new(self.reconciles.clone()),
            Box::new(self.reconcile_seconds.clone()),
            Box::new(self.grants.clone()),
            Box::new(self.stall_seconds.clone()),
            Box::new(self.step_seconds.clone()),
            Box::new(self.leader.clone()),
            Box::new(self.watch_up.clone()),
        ]
    }

    /// Those that speak of one InferenceDeployment each.
    fn of_deployments(&self) -> [&IntGaugeVec; 9] {
        [
            &self.grants_held,
            &self.restarts_held,
            &self.trials_failed,
            &self.rollout_failed,
            &self.fenced_by_person,
            &self.objects_doubted,
            &self.health_lies,
            &self.replicas_wanted,
            &self.replicas_ready,
        ]
    }

    /// The record of a confirmed stall is closed; `steps`: what each of [`STEPS`] that it took lasted.
    pub fn stall_closed(&self, infd: &InferenceDeployment, (outcome, seconds): (&str, f64), steps: &[(&str, f64)]) {
        let (namespace, name) = (infd.namespace().unwrap_or_default(), infd.name_any());
        self.stall_seconds.with_label_values(&[namespace.as_str(), &name, outcome]).observe(seconds);
        for (step, seconds) in steps {
            self.step_seconds.with_label_values(&[namespace.as_str(), &name, step]).observe(*seconds);
        }
    }

    /// A series that appears with its first stall hides that one from whoever asks for its increase.
    pub fn repaired_from_zero(&self, namespace: &str, deployment: &str) {
        self.stall_seconds.with_label_values(&[namespace, deployment, OUTCOMES[0]]);
        for step in STEPS {
            self.step_seconds.with_label_values(&[namespace, deployment, step]);
        }
    }

    /// There is no such InferenceDeployment any more.
    pub fn forget(&self, namespace: &str, deployment: &str) {
        for gauge in self.of_deployments() {
            let _ = gauge.remove_label_values(&[namespace, deployment]); // it was never told of
        }
        for outcome in OUTCOMES {
            let _ = self.stall_seconds.remove_label_values(&[namespace, deployment, outcome]); // nor had all of them
        }
        for step in STEPS {
            let _ = self.step_seconds.remove_label_values(&[namespace, deployment, step]);
        }
    }

    /// This process leads no more: what it knew of the deployments is its successor's to say, and would page for ever.
    pub fn stops_leading(&self) {
        self.leader.set(0);
        for gauge in self.of_deployments() {
            gauge.reset();
        }
        self.stall_seconds.reset();
        self.step_seconds.reset();
    }

    /// The exposition text.
    pub fn text(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

fn stall_seconds() -> Result<HistogramVec, prometheus::Error> {
    let help = "From suspicion to the end of confirmed stalls, by outcome.";
    of_stalls("truebeat_operator_stall_seconds", help, &STALL_BUCKETS, "outcome")
}

fn step_seconds() -> Result<HistogramVec, prometheus::Error> {
    let help = "What each step of a confirmed stall's repair lasted, from the one before.";
    of_stalls("truebeat_operator_stall_step_seconds", help, &STEP_BUCKETS, "step")
}

fn of_stalls(name: &str, help: &str, buckets: &[f64], label: &str) -> Result<HistogramVec, prometheus::Error> {
    let options = HistogramOpts::new(name, help).buckets(buckets.into());
    HistogramVec::new(options, &["namespace", "deployment", label])
}

fn of_deployment(name: &str, help: &str) -> Result<IntGaugeVec, prometheus::Error> {
    IntGaugeVec::new(Opts::new(name, help), &["namespace", "deployment"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stops_leading_says_nothing_of_deployments_any_more() {
        let metrics = Metrics::new().unwrap();
        metrics.leader.set(1);
        for (gauge, name) in metrics.of_deployments().into_iter().flat_map(|gauge| [(gauge, "b"), (gauge, "c")]) {
            gauge.with_label_values(&["a", name]).set(1);
        }
        let text = || String::from_utf8(metrics.text().unwrap()).unwrap();
        assert_eq!(text().matches("deployment=\"b\"").count(), metrics.of_deployments().len());
        metrics.repaired_from_zero("a", "b");
        metrics.forget("a", "b");
        assert!(!text().contains("deployment=\"b\"") && text().contains("deployment=\"c\""), "{}", text());
        metrics.stops_leading();
        assert!(!text().contains("deployment=") && text().contains("truebeat_operator_leader 0"), "{}", text());
    }
}
