//! One line of a trace to one [`Observation`]. Touches nothing but the values it is given.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ReplayError;
use crate::observation::{
    FrontendObs, GateObs, LogHit, MetricsObs, Ms, Observation, PageObs, PagePhase, ProcObs, RasObs, Signal,
};
use crate::{engine_metrics, exposition, log_signs};

/// What a trace carries from line to line.
#[derive(Debug, Default)]
pub struct Reader {
    metrics_lines: Vec<String>,
    metrics: Signal<MetricsObs>,
    ras: Signal<RasObs>,
    frontend_silent_ms: Option<Ms>,
    frontend_answered: bool,
    /// Start time (ticks) of each role that was seen alive.
    roles: BTreeMap<String, u64>,
    started_ms: Ms,
    /// Of the process in the sample before.
    proc_started_ms: Option<Ms>,
}

impl Reader {
    /// Reads one sample: the moment at which it was complete, and what it says.
    ///
    /// # Errors
    /// No time, or a metrics delta that does not fit its page.
    pub fn read(&mut self, line: usize, value: &Value) -> Result<(Ms, Observation), ReplayError> {
        let began = value.get("t").and_then(Value::as_f64).ok_or(ReplayError::NoTime { line })?;
        let now_ms = ms(completed(value, began));
        self.read_metrics(line, value, now_ms)?;
        self.read_ras(value, now_ms);
        let mut obs = Observation {
            gate: own(value, "gate", now_ms).unwrap_or_else(|| client(value, now_ms)),
            pages: own(value, "beat", now_ms).unwrap_or_else(|| page(value, now_ms)),
            gpus: own(value, "gpu", now_ms).unwrap_or_default(),
            xids: value.get("xid").and_then(|xids| Deserialize::deserialize(xids).ok()).unwrap_or_default(),
            metrics: self.metrics.clone(),
            ras: self.ras.clone(),
            maintenance: value.get("maintenance").and_then(Value::as_bool).unwrap_or(false),
            draining: value.get("draining").and_then(Value::as_bool).unwrap_or(false),
            agent_gap_ms: value.get("agent_gap_ms").and_then(Value::as_u64).unwrap_or(0),
            ..Observation::default()
        };
        obs.proc = own(value, "proc", now_ms).unwrap_or_else(|| self.processes(value, ms(began)));
        let started_ms = obs.proc.value.as_ref().filter(|proc| proc.alive).map(|proc| proc.started_ms);
        if let Some(now) = started_ms
            && self.proc_started_ms.replace(now).is_some_and(|before| before != now)
        {
            // another process: its front end has answered nobody yet
            (self.frontend_answered, self.frontend_silent_ms) = (false, None);
        }
        obs.frontend = self.frontend(value, now_ms);
        obs.log = log_hits(value, now_ms);
        Ok((now_ms, obs))
    }

    /// Full text or delta against the last text; a failed scrape leaves the last one, which ages.
    fn read_metrics(&mut self, line: usize, value: &Value, now_ms: Ms) -> Result<(), ReplayError> {
        let load = value
            .pointer("/load/body")
            .and_then(Value::as_str)
            .and_then(|body| serde_json::from_str::<Value>(body).ok());
        let load = load.and_then(|body| body.get("server_load").and_then(Value::as_f64));
        let metrics = value.get("metrics").unwrap_or(&Value::Null);
        if let Some(text) = metrics.as_str().or_else(|| metrics.get("full").and_then(Value::as_str)) {
            self.metrics_lines = text.split('\n').map(str::to_owned).collect();
        } else if let Some(changes) = metrics.get("delta").and_then(Value::as_array) {
            let lines = self.metrics_lines.len();
            for change in changes {
                let index =
                    change.get(0).and_then(Value::as_u64).and_then(|i| usize::try_from(i).ok()).unwrap_or(usize::MAX);
                let slot = self.metrics_lines.get_mut(index).ok_or(ReplayError::Delta { line, index, lines })?;
                change.get(1).and_then(Value::as_str).unwrap_or("").clone_into(slot);
            }
        } else {
            return Ok(());
        }
        let unchanged = metrics.get("delta").and_then(Value::as_array).is_some_and(Vec::is_empty);
        let mut obs = match self.metrics.value.take().filter(|_| unchanged) {
            Some(same) => same,
            None => {
                let page = exposition::parse(&self.metrics_lines.join("\n"), exposition::Limits::default());
                engine_metrics::map(&page)
            }
        };
        obs.server_load = load.or(obs.server_load);
        obs.paused = value.get("paused").and_then(Value::as_bool);
        self.metrics = Signal::at(value.get("mt").and_then(Value::as_f64).map_or(now_ms, ms), obs);
        Ok(())
    }

    /// An answer holds until the next one, and ages.
    fn read_ras(&mut self, value: &Value, now_ms: Ms) {
        if value.get("ras").is_some() {
            let at_ms = value.get("rt").and_then(Value::as_f64).map_or(now_ms, ms);
            self.ras = own(value, "ras", at_ms).unwrap_or_default();
        }
    }

    /// Processes by role. The one that steps is a worker while the core waits for it, else the core.
    fn processes(&mut self, value: &Value, at_ms: Ms) -> Signal<ProcObs> {
        let Some(roles) = value.get("proc").and_then(Value::as_object) else { return Signal::default() };
        let mut obs = ProcObs { alive: true, ..ProcObs::default() };
        for (role, facts) in roles {
            let number = |key: &str| facts.get(key).and_then(Value::as_u64).unwrap_or(0);
            let start = number("starttime");
            if facts.is_null() {
                obs.alive &= !self.roles.contains_key(role);
            } else if self.roles.insert(role.clone(), start) != Some(start) && role == "api" {
                self.started_ms = at_ms;
            }
            obs.cpu_ms = obs.cpu_ms.saturating_add((number("utime") + number("stime")).saturating_mul(10));
            let name = facts.get("state").and_then(Value::as_str);
            obs.alive &= name != Some("Z");
            obs.stopped += u32::from(name == Some("T"));
        }
        if self.roles.is_empty() {
            return Signal::default();
        }
        let text = |role: &str, key: &str| roles.get(role).and_then(|facts| facts.get(key)).and_then(Value::as_str);
        let workers = roles.keys().filter(|role| role.starts_with("worker"));
        let stopped = workers.clone().map(String::as_str).chain(["core"]).find(|role| text(role, "state") == Some("T"));
        let core_waits = text("core", "wchan").is_some_and(|wchan| wchan.starts_with("poll_schedule"));
        let worker = workers.map(String::as_str).next().filter(|_| core_waits);
        let stepping = stopped.or(worker).unwrap_or(if roles.contains_key("core") { "core" } else { "api" });
        obs.state = text(stepping, "state").and_then(|state| state.chars().next());
        obs.wchan = text(stepping, "wchan").map(str::to_owned);
        obs.started_ms = self.started_ms;
        Signal::at(at_ms, obs)
    }

    fn frontend(&mut self, value: &Value, now_ms: Ms) -> Signal<FrontendObs> {
        let Some(health) = value.get("health").filter(|h| h.is_object()) else { return Signal::default() };
        let status = health.get("status").and_then(Value::as_u64).and_then(|status| u16::try_from(status).ok());
        let answers = health.get("answers").and_then(Value::as_bool).unwrap_or(status.is_some());
        self.frontend_answered |= answers;
        self.frontend_silent_ms = if answers { None } else { self.frontend_silent_ms.or(Some(now_ms)) };
        Signal::at(
            now_ms,
            FrontendObs {
                answers,
                status,
                silent_since_ms: self.frontend_silent_ms,
                ever_answered: self.frontend_answered,
                elsewhere: false,
            },
        )
    }
}

/// A field in our own form; `None` where the trace has another.
fn own<T: DeserializeOwned>(value: &Value, key: &str, now_ms: Ms) -> Option<Signal<T>> {
    let field = value.get(key).filter(|field| !field.is_null())?;
    serde_json::from_value(field.clone()).ok().map(|read| Signal::at(now_ms, read))
}

/// What the load generator counted is what a gate in front of the engine would have counted.
fn client(value: &Value, now_ms: Ms) -> Signal<GateObs> {
    let Some(client) = value.get("client").filter(|c| c.is_object()) else { return Signal::default() };
    let number = |key: &str| client.get(key).and_then(Value::as_u64).unwrap_or(0);
    let small = |key: &str| u32::try_from(number(key)).unwrap_or(u32::MAX);
    let since_last = client.get("since_last_token").and_then(Value::as_f64);
    let gate = GateObs {
        in_flight: small("inflight"),
        awaiting_first_byte: small("no_first_token"),
        prompt_tokens_owed: number("prompt_tokens_waiting"),
        chunks_delivered: number("tokens"),
        bytes_delivered: number("tokens"),
        requests_done: number("done"),
        last_delivery_ms: since_last.map(|seconds| now_ms.saturating_sub(ms(seconds))),
        ..GateObs::default()
    };
    Signal::at(now_ms, gate)
}

/// The prototype's page, as far as it maps: it has steps and the step under way, but neither leases nor a count of tokens, so that
/// a completed step stands for a delivery and no lease is declared (a witness then, not a native page).
fn page(value: &Value, now_ms: Ms) -> Signal<Vec<PageObs>> {
    let Some(core) = value.pointer("/hb/core").filter(|core| core.is_object()) else { return Signal::default() };
    let number = |facts: &Value, key: &str| facts.get(key).and_then(Value::as_u64).unwrap_or(0);
    let small = |facts: &Value, key: &str| u32::try_from(number(facts, key)).unwrap_or(u32::MAX);
    let in_step = number(core, "phase") == 2;
    let age = core.get("age_start_ms").and_then(Value::as_f64).unwrap_or(0.0);
    let started_ms = now_ms.saturating_sub(ms(age / 1000.0));
    let (running, waiting) = (small(core, "run"), small(core, "wait"));
    // a worker's `run` is the number of tokens scheduled in the step under way
    let worker = value.pointer("/hb/worker0").filter(|worker| number(worker, "phase") == 2);
    let step_tokens = worker.map_or(0, |worker| small(worker, "run"));
    let phase = match (in_step, step_tokens > running.saturating_add(waiting)) {
        (true, true) => PagePhase::Prefill,
        (true, false) => PagePhase::Decode,
        (false, _) => PagePhase::Idle,
    };
    let done = number(core, "done");
    let page = PageObs {
        rank: 0,
        world_size: 1,
        engines: 1,
        steps_completed: done,
        tokens_delivered: done,
        requests_finished: 0,
        running,
        waiting,
        prompt_tokens_owed: 0,
        phase,
        phase_tokens: step_tokens,
        phase_entered_ms: started_ms,
        lease_ms: 0,
        step_started_ms: in_step.then_some(started_ms),
        work_done: 0,
        work_total: 0,
        published_ms: now_ms,
    };
    Signal::at(now_ms, vec![page])
}

fn log_hits(value: &Value, now_ms: Ms) -> Vec<LogHit> {
    let lines = value.get("log").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    lines
        .iter()
        .filter_map(Value::as_str)
        .filter_map(|line| log_signs::scan(line).map(|sign| (sign, line)))
        .map(|(sign, line)| LogHit {
            signature: sign.name.to_owned(),
            at_ms: now_ms,
            line: line.chars().take(300).collect(),
        })
        .collect()
}

/// A sample's counts are taken after its probes: the moment when the last of them had answered or given up.
fn completed(value: &Value, began: f64) -> f64 {
    let took = |key: &str| value.pointer(key).and_then(Value::as_f64).unwrap_or(0.0).max(0.0) / 1000.0;
    let asked = value.get("mt").and_then(Value::as_f64).unwrap_or(began + took("/health/ms") + took("/load/ms"));
    began.max(asked + took("/metrics/ms"))
}

fn ms(seconds: f64) -> Ms {
    if seconds.is_finite() && seconds > 0.0 { (seconds * 1000.0).round().min(1e15) as Ms } else { 0 }
}
