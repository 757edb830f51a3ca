//! One observation as one line of a trace, in our own form. Pure: the caller reads clocks and sources.
//!
//! Times of an observation are `CLOCK_MONOTONIC`; those of a trace begin at the earliest moment that its first sample names (as a rule
//! the engine's start), so that nothing lies before zero. Of `/metrics` only what changed is written, and the whole page now and
//! then.

use serde::Serialize;
use serde_json::{Map, Value, json};
use vitals::observation::{Ms, Observation, RasObs, Signal};

/// Changes of `/metrics` are written against the page before; a whole page comes after so many.
const DELTAS_MAX: u32 = 60;
/// GPUs are read once a second; an older reading is not repeated.
const GPU_AGE_MS_MAX: Ms = 2_000;

/// What a trace carries from line to line.
#[derive(Debug, Default)]
pub struct Lines {
    zero_ms: Option<Ms>,
    page: Vec<String>,
    asked_ms: Option<Ms>,
    deltas: u32,
    ras_ms: Option<Ms>,
}

impl Lines {
    /// The line of this sample. `scrape`: the newest text of `/metrics` and when it was asked for.
    pub fn line(&mut self, now_ms: Ms, obs: &Observation, scrape: Option<(Ms, String)>) -> Value {
        let zero_ms = *self.zero_ms.get_or_insert_with(|| earliest(now_ms, obs));
        let mut line = Map::new();
        line.insert("t".to_owned(), seconds(now_ms, zero_ms));
        if let Some(frontend) = &obs.frontend.value {
            // the latency of the answer is not kept by the probe
            let (answers, status) = (frontend.answers, frontend.status);
            line.insert("health".to_owned(), json!({"answers": answers, "status": status, "ms": null}));
        }
        self.metrics(&mut line, obs, scrape, zero_ms);
        let mut obs = obs.clone();
        rebase(&mut obs, zero_ms);
        put(&mut line, "proc", &obs.proc);
        put(&mut line, "gate", &obs.gate);
        put(&mut line, "beat", &obs.pages);
        if now_ms.saturating_sub(obs.gpus.at_ms) <= GPU_AGE_MS_MAX {
            put(&mut line, "gpu", &obs.gpus);
        }
        if !obs.log.is_empty() {
            line.insert("log".to_owned(), obs.log.into_iter().map(|hit| hit.line).collect());
        }
        self.ras(&mut line, &obs.ras, zero_ms);
        if !obs.xids.is_empty() {
            line.insert("xid".to_owned(), json!(obs.xids));
        }
        for (name, holds) in [("maintenance", obs.maintenance), ("draining", obs.draining)] {
            if holds {
                line.insert(name.to_owned(), true.into());
            }
        }
        if obs.agent_gap_ms > 0 {
            line.insert("agent_gap_ms".to_owned(), obs.agent_gap_ms.into());
        }
        Value::Object(line)
    }

    /// An answer of NCCL's RAS that is new, with the time at which it was asked for; `null` where there is nobody any more.
    fn ras(&mut self, line: &mut Map<String, Value>, ras: &Signal<RasObs>, zero_ms: Ms) {
        let asked_ms = ras.value.as_ref().map(|_| ras.at_ms);
        if std::mem::replace(&mut self.ras_ms, asked_ms) == asked_ms {
            return;
        }
        line.insert("ras".to_owned(), json!(ras.value));
        line.extend(asked_ms.map(|asked_ms| ("rt".to_owned(), seconds(asked_ms, zero_ms))));
    }

    /// A page that has been asked for since the last line: whole, or what changed in it.
    fn metrics(&mut self, line: &mut Map<String, Value>, obs: &Observation, scrape: Option<(Ms, String)>, zero_ms: Ms) {
        let Some((asked_ms, text)) = scrape.filter(|(asked_ms, _)| self.asked_ms != Some(*asked_ms)) else { return };
        self.asked_ms = Some(asked_ms);
        let page: Vec<String> = text.split('\n').map(str::to_owned).collect();
        let value = if page.len() == self.page.len() && self.deltas < DELTAS_MAX {
            self.deltas += 1;
            let changed = page.iter().zip(&self.page).enumerate().filter(|(_, (new, old))| new != old);
            json!({"delta": changed.map(|(i, (new, _))| json!([i, new])).collect::<Vec<_>>()})
        } else {
            self.deltas = 0;
            Value::String(text)
        };
        self.page = page;
        line.insert("metrics".to_owned(), value);
        line.insert("mt".to_owned(), seconds(asked_ms, zero_ms));
        if let Some(load) = obs.metrics.value.as_ref().and_then(|metrics| metrics.server_load) {
            line.insert("load".to_owned(), json!({"status": 200, "body": format!("{{\"server_load\":{load}}}")}));
        }
        if let Some(paused) = obs.metrics.value.as_ref().and_then(|metrics| metrics.paused) {
            line.insert("paused".to_owned(), paused.into());
        }
    }
}

fn seconds(at_ms: Ms, zero_ms: Ms) -> Value {
    json!(at_ms.saturating_sub(zero_ms) as f64 / 1000.0)
}

fn put<T: Serialize>(line: &mut Map<String, Value>, key: &str, signal: &Signal<T>) {
    if let Some(value) = signal.value.as_ref().and_then(|value| serde_json::to_value(value).ok()) {
        line.insert(key.to_owned(), value);
    }
}

/// Every moment that an observation names.
fn moments(obs: &mut Observation) -> Vec<&mut Ms> {
    let mut all = Vec::new();
    if let Some(proc) = &mut obs.proc.value {
        all.push(&mut proc.started_ms);
        all.extend(&mut proc.kill_sent_ms);
        all.extend(&mut proc.threads_at_ms);
        all.extend(proc.ended.as_mut().map(|ended| &mut ended.at_ms));
    }
    for page in obs.pages.value.iter_mut().flatten() {
        all.extend([&mut page.phase_entered_ms, &mut page.published_ms]);
        all.extend(&mut page.step_started_ms);
    }
    if let Some(gate) = &mut obs.gate.value {
        all.extend(&mut gate.oldest_in_flight_ms);
        all.extend(&mut gate.last_delivery_ms);
        all.extend(&mut gate.quietest_begun_ms);
    }
    for gpu in obs.gpus.value.iter_mut().flatten() {
        all.extend(&mut gpu.silent_since_ms);
    }
    all.extend(obs.xids.iter_mut().map(|xid| &mut xid.at_ms));
    all
}

fn earliest(now_ms: Ms, obs: &Observation) -> Ms {
    moments(&mut obs.clone()).into_iter().map(|moment| *moment).fold(now_ms, Ms::min)
}

fn rebase(obs: &mut Observation, zero_ms: Ms) {
    moments(obs).into_iter().for_each(|moment| *moment = moment.saturating_sub(zero_ms));
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::observation::{FrontendObs, GateObs, LogHit, MetricsObs, PageObs, PagePhase, ProcObs};
    use vitals::policy::Policy;
    use vitals::replay::replay;
    use vitals::replay::sample::Reader;

    const NOW: Ms = 5_000_000;

    fn obs() -> Observation {
        let page = PageObs {
            rank: 0,
            world_size: 1,
            engines: 1,
            steps_completed: 7,
            tokens_delivered: 9,
            requests_finished: 1,
            running: 2,
            waiting: 1,
            prompt_tokens_owed: 5,
            phase: PagePhase::Decode,
            phase_tokens: 2,
            phase_entered_ms: NOW - 900,
            lease_ms: 100,
            step_started_ms: Some(NOW - 20),
            work_done: 0,
            work_total: 0,
            published_ms: NOW - 1,
        };
        let (last_delivery_ms, quietest_begun_ms) = (Some(NOW - 30), Some(NOW - 50));
        let gate = GateObs { in_flight: 3, last_delivery_ms, quietest_begun_ms, ..GateObs::default() };
        let proc = ProcObs { alive: true, started_ms: NOW - 60_000, state: Some('R'), ..ProcObs::default() };
        let proc = ProcObs { threads_at_ms: Some(NOW - 400), ..proc };
        let frontend = FrontendObs {
            answers: true,
            status: Some(200),
            silent_since_ms: None,
            ever_answered: true,
            elsewhere: false,
        };
        Observation {
            proc: Signal::at(NOW, proc),
            pages: Signal::at(NOW, vec![page]),
            gate: Signal::at(NOW, gate),
            frontend: Signal::at(NOW, frontend),
            metrics: Signal::at(NOW, MetricsObs { server_load: Some(3.0), paused: Some(true), ..MetricsObs::default() }),
            log: vec![LogHit {
                signature: "shm".to_owned(),
                at_ms: NOW,
                line: "INFO 11-21 01:04:30 [shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds."
                    .to_owned(),
            }],
            ..Observation::default()
        }
    }

    #[test]
    fn a_front_end_that_answers_by_another_path_than_health_is_read_as_one() {
        let mut obs = obs();
        let elsewhere =
            FrontendObs { answers: true, status: None, silent_since_ms: None, ever_answered: true, elsewhere: false };
        obs.frontend = Signal::at(NOW, elsewhere);
        let line = Lines::default().line(NOW, &obs, None);
        assert_eq!(Reader::default().read(1, &line).unwrap().1.frontend.value, Some(elsewhere));
    }

    #[test]
    fn what_was_seen_is_what_a_replay_reads() {
        let mut lines = Lines::default();
        let text = "vllm:num_requests_running 2\nvllm:generation_tokens_total 9\n".to_owned();
        let first = lines.line(NOW, &obs(), Some((NOW - 40, text.clone())));
        assert_eq!(first["t"], 60.0, "zero is the engine's start");
        let mut reader = Reader::default();
        let (now_ms, read) = reader.read(1, &first).unwrap();
        assert_eq!(now_ms, 60_000);
        let mut wanted = obs();
        rebase(&mut wanted, NOW - 60_000);
        assert_eq!((&read.proc.value, &read.pages.value), (&wanted.proc.value, &wanted.pages.value));
        assert_eq!((&read.gate.value, &read.frontend.value), (&wanted.gate.value, &wanted.frontend.value));
        let (proc, gate) = (read.proc.value.unwrap(), read.gate.value.unwrap());
        assert_eq!((proc.threads_at_ms, gate.quietest_begun_ms), (Some(59_600), Some(59_950)), "on the trace's clock");
        assert_eq!(read.log.len(), 1);
        let metrics = read.metrics.value.unwrap();
        assert_eq!((metrics.running, metrics.generation_tokens), (Some(2.0), Some(9.0)));
        assert_eq!((metrics.server_load, metrics.paused, read.metrics.at_ms), (Some(3.0), Some(true), 59_960));
        let same = lines.line(NOW + 100, &obs(), Some((NOW - 40, text.clone())));
        assert!(same.get("metrics").is_none(), "one line a scrape");
        let later = lines.line(NOW + 1_000, &obs(), Some((NOW + 960, text.replace('9', "12"))));
        assert_eq!(later["metrics"], json!({"delta": [[1, "vllm:generation_tokens_total 12"]]}));
        let (_, read) = reader.read(3, &later).unwrap();
        assert_eq!(read.metrics.value.unwrap().generation_tokens, Some(12.0));
    }

    #[test]
    fn an_answer_of_nccls_ras_is_read_with_the_time_at_which_it_was_asked_for() {
        let (mut lines, mut reader) = (Lines::default(), Reader::default());
        let mut sample = |now_ms, asked: Option<Ms>| {
            let ras = RasObs { silent_ranks: vec![3], answered: true, ..RasObs::default() };
            let ras = asked.map_or_else(Signal::default, |asked_ms| Signal::at(asked_ms, ras));
            let line = lines.line(now_ms, &Observation { ras, ..obs() }, None);
            (line.get("ras").is_some(), reader.read(1, &line).unwrap().1.ras)
        };
        let told = sample(NOW, Some(NOW - 500));
        assert_eq!((told.0, told.1.at_ms, told.1.value.unwrap().silent_ranks), (true, 59_500, vec![3]));
        let same = sample(NOW + 100, Some(NOW - 500));
        assert_eq!((same.0, same.1.at_ms, same.1.value.is_some()), (false, 59_500, true));
        assert_eq!(sample(NOW + 200, None).1.value, None);
    }

    /// A minute of an engine that holds its step and hears nothing, recorded and replayed: what was said of it.
    fn replayed(beside: impl Fn(&mut Observation)) -> Vec<String> {
        let mut lines = Lines::default();
        let text = (0..600).map(|at| {
            let mut obs = obs();
            // it sleeps: one that runs without CPU time would be waiting for a core
            obs.proc.value.as_mut().unwrap().state = Some('S');
            (obs.metrics, obs.log) = (Signal::default(), Vec::new());
            beside(&mut obs);
            lines.line(NOW + at * 100, &obs, None).to_string()
        });
        let text: Vec<String> = text.collect();
        let timeline = replay("held", text.iter().map(String::as_str), &Policy::default()).unwrap();
        timeline.timeline.into_iter().map(|change| change.class.unwrap_or(change.verdict)).collect()
    }

    #[test]
    fn what_is_known_beside_the_sources_is_replayed() {
        let held = replayed(|_| ());
        assert!(held.contains(&"StepStalled".to_owned()), "{held:?}");
        let maintained = replayed(|obs| obs.maintenance = true);
        assert_eq!(maintained, ["Progressing"]);
        let killed = replayed(|obs| obs.proc.value.as_mut().unwrap().kill_sent_ms = Some(NOW));
        assert!(killed.contains(&"Unkillable".to_owned()), "{killed:?}");
        let drained = replayed(|obs| obs.draining = true);
        assert!(drained.contains(&"Draining".to_owned()) && !held.contains(&"Draining".to_owned()), "{drained:?}");
    }

    #[test]
    fn sources_that_said_nothing_leave_no_field() {
        let line = Lines::default().line(NOW, &Observation::default(), None);
        assert_eq!(line, json!({"t": 0.0}));
    }
}
