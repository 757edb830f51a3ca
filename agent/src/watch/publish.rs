//! What the detector says to others: status lines to the supervisor, the declaration to the reporter. On change, and now and then; in
//! between a sign of life, so that a healthy second costs a few bytes.

use std::time::Duration;

use crds::episode::Episode;
use crds::poison::Refused;
use crds::xid::Xid;
use vitals::observation::{Observation, PagePhase};
use vitals::recovery::Mode;
use vitals::verdict::{Outcome, Verdict};

use super::Watch;
use super::latest::{Latest, Written};
use super::memory::Known;
use crate::gate::ledger::GateReply;
use crate::metrics::Metrics;
use crate::report::{Declaration, Heard, Reporter};
use crate::status::{ALIVE, Aside, StatusDoc, VerdictDoc, fitness, readiness, ready_reason};

/// Something is said this often at least; while all is calm, half as often.
const ALIVE_MS: u64 = 1_000;
const ALIVE_CALM_MS: u64 = 2_000;
/// Without news a whole status, with its figures, is repeated after this while all is calm; else with every sign of life.
const WHOLE_MS: u64 = 5_000;

/// Whether a well engine has work is declared this often at most. (The answer tells what the operator wants: it is not to come too seldom.)
const BREATH_MS: u64 = 10_000;
/// So long a tick may wait for the memory to be written.
const MEMORY_WAIT_MAX: Duration = Duration::from_millis(100);

/// One tick's news.
#[derive(Debug)]
pub struct News<'a> {
    pub now_ms: u64,
    pub outcome: &'a Outcome,
    pub ready: bool,
    pub fenced: bool,
    pub phase: Option<PagePhase>,
    pub incidents: &'a [Episode],
    /// Why the replica is kept out of traffic although the engine may be well.
    pub aside: Aside,
    /// Up to which order to drain the requests in flight are all that is waited for.
    pub draining: Option<u64>,
    /// The gate refuses what is new because the replica leaves, and sends its clients' connections away.
    pub shut: bool,
    /// The order to drain about which the API server is to be asked.
    pub question: Option<u64>,
    /// Nobody is fenced here.
    pub unfenced: bool,
    /// Processes that the engine left are waited for in vain.
    pub left: bool,
    /// A person's fence, in words.
    pub by_hand: Option<&'a str>,
    /// Requests that the gate refuses (I7).
    pub poison: &'a [Refused],
    /// The gate's last answer, unless it is silent.
    pub gate: Option<&'a GateReply>,
    /// For how long it has been there and has not answered.
    pub gate_hangs_ms: u64,
}

impl Watch {
    /// Remembers what this tick decided, and says it.
    pub(super) async fn publish(
        &mut self,
        now_ms: u64,
        obs: &Observation,
        outcome: &Outcome,
        (waited_for, proven): (Option<u64>, bool),
    ) {
        let fenced = self.control.fenced;
        let aside = Aside::of(self.control.leaving, proven);
        let held = self.hold.as_ref().and_then(|hold| hold.fit(&outcome.verdict));
        self.fit = held.unwrap_or_else(|| fitness(&outcome.verdict, self.fit));
        let ready = readiness(self.fit, fenced, aside);
        self.remember(now_ms, proven);
        if ready && !self.publisher.said_ready() {
            // a successor that knew less would take the word back
            self.keeper.settled(MEMORY_WAIT_MAX).await;
        }
        let news = News {
            now_ms,
            outcome,
            ready,
            fenced,
            phase: obs.pages.value.as_ref().and_then(|pages| pages.first()).map(|page| page.phase),
            incidents: self.acts.incidents.list(),
            aside,
            draining: waited_for,
            shut: self.control.draining,
            question: self.trust.question(),
            unfenced: self.recovery.mode() == Mode::Observe,
            left: self.acts.killed.is_in_vain(now_ms),
            by_hand: self.hand.as_deref(),
            poison: self.poison.list(),
            gate: self.gate.reply.as_ref(),
            gate_hangs_ms: self.gate.hangs_ms,
        };
        self.publisher.publish(&news, &self.metrics);
    }

    fn remember(&mut self, now_ms: u64, proven: bool) {
        let known = Known {
            engine: self.engine.as_ref().map(|engine| (engine.pid, engine.start_ticks)),
            container: self.engine.as_ref().and_then(|engine| self.follow.container_of(engine)),
            fit: self.fit,
            proven,
            fenced: self.own_fence,
            refusal: &self.control.reason,
            incidents: &self.acts.incidents,
            left: self.acts.killed.kept(),
            last_serving: self.publisher.heard().last_serving,
            last_unattended_ms: self.recovery.last_unattended_ms(),
            paused_ms: self.detector.paused_at(),
            drain_ended: self.drain_ended,
        };
        self.keeper.keep(now_ms, &known, || self.detector.learned());
    }

    /// How far the writing is of what a successor shall know.
    pub(super) fn written(&self) -> Vec<Written> {
        let reporter = self.publisher.reporter().map(Reporter::written);
        [Some(self.keeper.written()), reporter].into_iter().flatten().cloned().collect()
    }
}

/// Remembers what was said.
#[derive(Debug)]
pub struct Publisher {
    stdout: Latest,
    reporter: Option<Reporter>,
    /// When anything was said last, and when a whole status.
    alive_ms: u64,
    whole_ms: u64,
    said: Option<Substance>,
    /// What was declared, and when.
    declared: Option<(Declaration, u64)>,
}

impl Publisher {
    /// `reporter` is `None` outside Kubernetes.
    pub fn new(stdout: Latest, reporter: Option<Reporter>) -> Self {
        Self { stdout, reporter, alive_ms: 0, whole_ms: 0, said: None, declared: None }
    }

    /// Who talks to the API server; nobody outside Kubernetes.
    pub fn reporter(&self) -> Option<&Reporter> {
        self.reporter.as_ref()
    }

    /// What the API said last; nothing outside Kubernetes.
    pub fn heard(&self) -> Heard {
        self.reporter.as_ref().map(Reporter::heard).unwrap_or_default()
    }

    /// Was the replica ready at the last word?
    pub fn said_ready(&self) -> bool {
        self.said.as_ref().is_some_and(|said| said.ready)
    }

    /// Says what is new.
    pub fn publish(&mut self, news: &News<'_>, metrics: &Metrics) {
        self.declare(news);
        let same = self.said.as_ref().is_some_and(|said| said.is_of(news));
        let since = |at_ms: u64| news.now_ms.saturating_sub(at_ms);
        let calm = is_steady(&news.outcome.verdict) && news.draining.is_none();
        if same && since(self.alive_ms) < if calm { ALIVE_CALM_MS } else { ALIVE_MS } {
            return;
        }
        self.alive_ms = news.now_ms;
        if same && calm && since(self.whole_ms) < WHOLE_MS {
            return self.stdout.put(format!("{ALIVE}\n").into_bytes());
        }
        if let Ok(mut line) = serde_json::to_vec(&self.whole(news, metrics)) {
            line.push(b'\n');
            self.stdout.put(line);
            self.whole_ms = news.now_ms;
            self.said = Some(Substance::of(news));
        }
    }

    fn whole(&self, news: &News<'_>, metrics: &Metrics) -> StatusDoc {
        if let Some(reporter) = &self.reporter {
            metrics.report_failures.set(i64::try_from(reporter.heard().failures).unwrap_or(i64::MAX));
        }
        metrics.log_lines_dropped.set(i64::try_from(role::stderr::dropped_lines()).unwrap_or(i64::MAX));
        metrics.set_verdict(&news.outcome.verdict, news.fenced, news.ready);
        metrics.poison_requests.set(i64::try_from(news.poison.len()).unwrap_or(i64::MAX));
        if let Some(reply) = news.gate {
            metrics.set_gate(reply);
        }
        let phase = news.phase.map(|phase| format!("{phase:?}"));
        StatusDoc {
            ready: news.ready,
            reason: ready_reason(news.outcome, news.aside, news.by_hand),
            verdict: VerdictDoc {
                poison: news.poison.to_vec(),
                ..VerdictDoc::of(news.outcome, news.fenced, phase, news.now_ms)
            },
            incidents: news.incidents.to_vec(),
            metrics: metrics.text(),
            draining: news.draining,
            in_flight: unfinished(news),
            gate_hangs_ms: news.gate_hangs_ms,
        }
    }

    /// Numbers in reasons grow with every tick: only a change of substance is declared, with the words of that moment.
    fn declare(&mut self, news: &News<'_>) {
        let Some(reporter) = &self.reporter else { return };
        let reason = ready_reason(news.outcome, news.aside, news.by_hand);
        let declaration = Declaration {
            progressing: progressing(&news.outcome.verdict, news.aside).to_owned(),
            reason: reason.reason,
            message: reason.message,
            health_lies: news.outcome.health_lies,
            episode: news.incidents.first().cloned(),
            unfenced: news.unfenced,
            left: news.left,
            drain: news.question,
        };
        if is_due(self.declared.as_ref(), &declaration, news.now_ms) {
            reporter.declare(declaration.clone());
            self.declared = Some((declaration, news.now_ms));
        }
    }
}

/// Of a status, what a probe or a person would notice.
#[derive(Debug)]
struct Substance {
    verdict: Verdict,
    ready: bool,
    fenced: bool,
    phase: Option<PagePhase>,
    aside: Aside,
    by_hand: bool,
    poison: Vec<Refused>,
    draining: Option<u64>,
    empty: bool,
    /// Of the newest episode, for only that can change.
    episode: Option<([String; 3], [bool; 8], Vec<Xid>)>,
}

impl Substance {
    fn of(news: &News<'_>) -> Self {
        Self {
            verdict: news.outcome.verdict.clone(),
            ready: news.ready,
            fenced: news.fenced,
            phase: news.phase,
            aside: news.aside,
            by_hand: news.by_hand.is_some(),
            poison: news.poison.to_vec(),
            draining: news.draining,
            empty: is_empty(news),
            episode: mark(news.incidents.first())
                .map(|(names, known, xids)| (names.map(str::to_owned), known, xids.to_vec())),
        }
    }

    fn is_of(&self, news: &News<'_>) -> bool {
        let names = |verdict: &Verdict| (verdict.name(), verdict.class().map(|class| class.name()));
        let said = self.episode.as_ref();
        let episode = said.map(|(names, known, xids)| (names.each_ref().map(String::as_str), *known, xids.as_slice()));
        names(&self.verdict) == names(&news.outcome.verdict)
            && (self.ready, self.fenced, self.draining) == (news.ready, news.fenced, news.draining)
            && (is_steady(&self.verdict) || self.phase == news.phase)
            && (self.aside, self.by_hand) == (news.aside, news.by_hand.is_some())
            && self.poison == news.poison
            && (news.draining.is_none() || self.empty == is_empty(news))
            && episode == mark(news.incidents.first())
    }
}

/// While all is well the phase changes from step to step, and is no news.
fn is_steady(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Idle | Verdict::Progressing)
}

/// Requests that are not over. What was answered whole may not be sent yet: who leaves waits until its clients have gone. Those of a replica
/// that stays keep their connections, however long they ask for nothing.
fn unfinished(news: &News<'_>) -> Option<u32> {
    let reply = news.gate?;
    let unsent = if news.shut { reply.connections } else { 0 };
    Some(reply.obs.in_flight.saturating_add(reply.passing).max(unsent))
}

fn is_empty(news: &News<'_>) -> bool {
    unfinished(news) == Some(0)
}

/// Id, stage and class, what is known, and the Xids. The class alone says that an engine outlives its kill.
type Mark<'a> = Option<([&'a str; 3], [bool; 8], &'a [Xid])>;

fn mark(episode: Option<&Episode>) -> Mark<'_> {
    episode.map(|e| {
        let times = [&e.fenced_at, &e.confirmed_at, &e.evidence_at, &e.granted_at, &e.killed_at, &e.serving_at];
        let [fenced, confirmed, evidence, granted, killed, serving] = times.map(Option::is_some);
        // a slow disk takes the bundle after all else
        let (bundle, suspects) = (e.bundle.is_some(), !e.in_flight.is_empty());
        let known = [fenced, confirmed, evidence, bundle, granted, killed, serving, suspects];
        ([e.id.as_str(), e.stage.as_str(), e.class.as_str()], known, e.xids.as_slice())
    })
}

/// Is it to be declared? Whether a well engine has work changes with every request of a small load, and each write wakes whoever watches pods.
fn is_due(declared: Option<&(Declaration, u64)>, now: &Declaration, now_ms: u64) -> bool {
    let Some((declared, at_ms)) = declared else { return true };
    let breathes = is_well(declared) && is_well(now) && declared.reason != now.reason;
    substance(declared) != substance(now) || breathes && now_ms.saturating_sub(*at_ms) >= BREATH_MS
}

/// It makes progress, and nothing else is said of it.
fn is_well(declaration: &Declaration) -> bool {
    let calm = [Verdict::Idle.name(), Verdict::Progressing.name()].contains(&declaration.reason.as_str());
    declaration.progressing == "True" && calm
}

fn substance(declaration: &Declaration) -> (&str, &str, [bool; 3], Mark<'_>, Option<u64>) {
    let Declaration { progressing, reason, health_lies, episode, unfenced, left, drain, .. } = declaration;
    let reason = if is_well(declaration) { "" } else { reason };
    (progressing, reason, [*health_lies, *unfenced, *left], mark(episode.as_ref()), *drain)
}

/// The condition's status: `True` progresses, `False` does not, `Unknown` cannot tell or is not meant to.
fn progressing(verdict: &Verdict, aside: Aside) -> &'static str {
    match verdict {
        Verdict::Idle | Verdict::Progressing | Verdict::Slow if aside == Aside::Unproven => "Unknown",
        Verdict::Idle | Verdict::Progressing | Verdict::Slow => "True",
        Verdict::Suspect(_) | Verdict::Stalled(_) | Verdict::Dead => "False",
        Verdict::Starting | Verdict::Sleeping | Verdict::Draining | Verdict::Unknown => "Unknown",
    }
}

#[cfg(test)]
#[path = "publish_tests.rs"]
mod tests;
