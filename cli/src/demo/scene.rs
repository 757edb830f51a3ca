//! One scenario of the demo: put the engine on the stage, stream, hang it by a signal, watch from outside, judge what was seen.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use crds::episode::Episode;
use jiff::Timestamp;

use super::Scenario;
use super::report::ScenarioReport;
use crate::args::DemoArgs;
use crate::clients::Clients;
use crate::http;
use crate::stage::{CALL, EngineKind, Stage, moment};

const WARM_UP: Duration = Duration::from_secs(8);
/// A stranger's engine with nothing but silence to show may take a while to be condemned (V6).
const RECOVERY_MAX: Duration = Duration::from_secs(420);
/// Clients that arrive while the engine hangs: they are told at once to come back, and are served when it is back.
const NEWCOMERS: u16 = 2;
const NEWCOMERS_AFTER: Duration = Duration::from_millis(1500);
const AFTER_RECOVERY: Duration = Duration::from_secs(3);

/// One scenario's place and parts.
#[derive(Debug)]
pub struct Scene<'a> {
    pub args: &'a DemoArgs,
    pub out: &'a Path,
    pub scenario: &'a Scenario,
}

impl Scene<'_> {
    /// Plays the scenario to its end; whatever goes wrong after the start is a problem in the report.
    ///
    /// # Errors
    /// When the scene cannot even be set up (no port, no program, the engine never becomes ready).
    pub async fn play(&self) -> anyhow::Result<ScenarioReport> {
        let folder: PathBuf = self.out.join(self.scenario.name);
        let mut stage = Stage::launch(&self.scenario.engine, &folder)?;
        let mut facts = self.blank_report(&stage);
        let played = self.play_on(&mut stage, &mut facts).await;
        let stopped = stage.stop().await;
        played.with_context(|| format!("scenario {}: see {}", self.scenario.name, folder.display()))?;
        if let Err(error) = stopped {
            facts.problems.push(format!("truebeat run did not end cleanly: {error:#}"));
        }
        Ok(facts)
    }

    async fn play_on(&self, stage: &mut Stage, facts: &mut ScenarioReport) -> anyhow::Result<()> {
        stage.wait_ready().await?;
        let clients = Clients::start(&stage.gate, self.args.clients);
        if self.scenario.classes.is_empty() {
            self.watch_health(stage, facts).await?;
        } else {
            tokio::time::sleep(WARM_UP).await;
            self.hang_and_recover(stage, &clients, facts).await?;
            tokio::time::sleep(AFTER_RECOVERY).await;
        }
        facts.requests = clients.stop(Duration::from_secs(20)).await.plus(facts.newcomers);
        self.judge(facts);
        Ok(())
    }

    fn blank_report(&self, stage: &Stage) -> ScenarioReport {
        let fault = match &self.scenario.engine {
            EngineKind::Truebeat { fault, .. } | EngineKind::Guarded { fault, .. } => fault.clone(),
            EngineKind::Stranger { .. } => Some("its engine thread stops on SIGUSR2".to_owned()),
        };
        ScenarioReport {
            name: self.scenario.name.to_owned(),
            story: self.scenario.story.to_owned(),
            engine: stage.engine_command.join(" "),
            fault,
            ..ScenarioReport::default()
        }
    }

    /// No fault: the engine runs under load and the agent must not raise a finger.
    async fn watch_health(&self, stage: &Stage, facts: &mut ScenarioReport) -> anyhow::Result<()> {
        let begun = Instant::now();
        facts.moment(0.0, format!("{} clients stream; no fault", self.args.clients));
        let mut alarmed = false;
        while begun.elapsed() < Duration::from_secs(self.args.healthy_seconds) {
            let verdict = stage.verdict().await?;
            let alarm = matches!(verdict["verdict"].as_str(), Some("Suspect" | "Stalled" | "Dead"));
            if alarm && !alarmed {
                facts.alarms += 1;
                facts.moment(ms(begun.elapsed()), format!("ALARM: {verdict}"));
            }
            alarmed = alarm;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        facts.observed_s = begun.elapsed().as_secs_f64();
        let incidents = stage.incidents().await?;
        facts.alarms = facts.alarms.max(incidents.len() as u64);
        facts.moment(ms(begun.elapsed()), format!("{} alarms", facts.alarms));
        Ok(())
    }

    async fn hang_and_recover(
        &self,
        stage: &Stage,
        clients: &Clients,
        facts: &mut ScenarioReport,
    ) -> anyhow::Result<()> {
        let before = clients.requests();
        anyhow::ensure!(before.tokens > 0, "no client got a token in {WARM_UP:?}");
        let (engine, injected) = stage.hang_engine()?;
        facts.moment(0.0, format!("the engine (pid {engine}) hangs; {} tokens streamed so far", before.tokens));
        tokio::time::sleep(NEWCOMERS_AFTER).await;
        let newcomers = Clients::start(&stage.gate, NEWCOMERS);
        let (episode, health) = follow(stage, injected).await?;
        facts.newcomers = newcomers.stop(Duration::from_secs(20)).await;
        self.fill(facts, &episode, injected, &health);
        Ok(())
    }

    fn fill(&self, facts: &mut ScenarioReport, episode: &Episode, injected: Timestamp, health: &BTreeMap<u16, u64>) {
        let after = |at: &Option<String>| Some(moment(at)?.duration_since(injected).as_secs_f64() * 1000.0);
        facts.engine_health_while_frozen = health.iter().map(|(status, count)| (*status, *count)).collect();
        facts.class = Some(episode.class.clone());
        facts.verdict = Some("Stalled".to_owned());
        facts.reasons = episode.reasons.clone();
        facts.bundle = episode.bundle.clone();
        facts.fenced_after_ms = after(&episode.fenced_at);
        facts.evidence_after_ms = after(&episode.evidence_at);
        facts.killed_after_ms = after(&episode.killed_at);
        facts.serving_after_ms = after(&episode.serving_at);
        let health = facts.engine_health_while_frozen.iter().map(|(status, count)| format!("{status} ×{count}"));
        let health = health.collect::<Vec<_>>().join(", ");
        let moments = [
            (
                after(&episode.suspect_at),
                format!("verdict Suspect ({}); the engine's own /health meanwhile: {health}", episode.class),
            ),
            (after(&episode.fenced_at), "fenced: new requests get 503 + Retry-After at once".to_owned()),
            (after(&episode.confirmed_at), format!("verdict Stalled ({})", episode.class)),
            (after(&episode.evidence_at), "evidence saved".to_owned()),
            (after(&episode.killed_at), "the engine's process tree is killed and started anew".to_owned()),
            (after(&episode.serving_at), "serving again; the fence is lifted".to_owned()),
        ];
        for (at, what) in moments {
            if let Some(at) = at {
                facts.moment(at, what);
            }
        }
    }

    /// The demo checks itself: a story that did not happen is not told as if it had.
    fn judge(&self, facts: &mut ScenarioReport) {
        let mut problems = Vec::new();
        if facts.requests.completed == 0 {
            problems.push("no request completed".to_owned());
        }
        if self.scenario.classes.is_empty() {
            if facts.alarms > 0 {
                problems.push(format!("{} alarms on a healthy engine", facts.alarms));
            }
        } else {
            let class = facts.class.clone().unwrap_or_default();
            if !self.scenario.classes.contains(&class.as_str()) {
                problems.push(format!("class {class:?}, expected one of {:?}", self.scenario.classes));
            }
            if facts.engine_health_while_frozen.iter().any(|(status, _)| *status != 200)
                || facts.engine_health_while_frozen.is_empty()
            {
                problems.push(format!("/health did not lie as intended: {:?}", facts.engine_health_while_frozen));
            }
            for (what, value) in [
                ("fenced", facts.fenced_after_ms),
                ("evidence", facts.evidence_after_ms),
                ("killed", facts.killed_after_ms),
                ("serving", facts.serving_after_ms),
            ] {
                if value.is_none() {
                    problems.push(format!("the incident has no time for {what}"));
                }
            }
            if facts.bundle.as_deref().is_none_or(|bundle| !Path::new(bundle).exists()) {
                problems.push("there is no evidence bundle".to_owned());
            }
        }
        facts.problems.extend(problems);
    }
}

/// Polls agent and engine until the episode that began after `injected` is closed. Returns it with the /health statuses that the
/// engine gave until it was killed.
async fn follow(stage: &Stage, injected: Timestamp) -> anyhow::Result<(Episode, BTreeMap<u16, u64>)> {
    let begun = Instant::now();
    let mut health = BTreeMap::new();
    while begun.elapsed() < RECOVERY_MAX {
        match stage.incident_since(injected).await? {
            Some(episode) if episode.closed() && episode.stage == "Recovered" => return Ok((episode, health)),
            Some(episode) if episode.killed_at.is_some() => {}
            _ => {
                // no answer at all is the moment of the kill, which the incident tells a poll later
                if let Ok((status, _)) = http::get(&stage.http, &format!("{}/health", stage.engine), CALL).await {
                    *health.entry(status).or_insert(0) += 1;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("the engine was not recovered within {RECOVERY_MAX:?}")
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
