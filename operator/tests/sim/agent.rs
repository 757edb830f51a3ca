//! An engine and the agent beside it, in small: what a pod of the contract says and does (DESIGN §4.4). The stages and
//! times follow `vitals/src/recovery.rs`; the two sides of the contract are the condition and the annotations.

mod words;

use crds::{
    episode::{CLASS_UNKILLABLE, REPEATED_EVERY},
    recovery_note::{ANNOTATION_RECOVERY, RecoveryNote},
};
use serde_json::{Value, json};

use super::{
    broken::Fault,
    kube::{
        object::Object,
        store::{Store, wall},
    },
    log::Log,
    world::target,
};

const SUSPECT_MS: u64 = 1_000;
const CONFIRM_MS: u64 = 3_000;
const EVIDENCE_MS: u64 = 1_000;
const ASK_EVERY_MS: u64 = 1_000;
const REPEAT_EVERY_MS: u64 = REPEATED_EVERY.as_millis() as u64;
const QUEUED_MAX_MS: i64 = 60_000;
/// A process that outlives SIGKILL by this is called unkillable.
const UNKILLABLE_MS: u64 = 10_000;
/// How long an engine on a sick node serves before it freezes again.
const SICK_AFTER_MS: u64 = 8_000;

/// What is true around a pod at one tick.
#[derive(Debug, Clone, Copy)]
pub struct Around {
    pub now_ms: u64,
    /// Can it talk to the API server?
    pub reachable: bool,
    /// Is its node one on which engines freeze?
    pub sick: bool,
    /// Does its node's GPU serve nobody any more?
    pub gpu_lost: bool,
}

/// What is true of the engine.
#[derive(Debug, Clone, PartialEq)]
pub enum Engine {
    Starting {
        until_ms: u64,
    },
    Serving {
        since_ms: u64,
    },
    Frozen {
        since_ms: u64,
        heals_ms: Option<u64>,
    },
    /// The kubelet starts it again then.
    Dead {
        restart_ms: u64,
    },
    Gone,
}

#[derive(Debug, Clone, Default)]
struct Episode {
    id: String,
    class: &'static str,
    stage: &'static str,
    suspect_ms: u64,
    confirmed_ms: Option<u64>,
    granted_ms: Option<u64>,
    granted_by: Option<&'static str>,
    killed_ms: Option<u64>,
    /// When the process that was killed is gone.
    dead_ms: u64,
    serving_ms: Option<u64>,
    /// The request that froze the engine, if one did.
    in_flight: Option<&'static str>,
    pub fault: Option<Fault>,
}

/// What makes a difference to the conditions.
type Brief = (std::mem::Discriminant<Engine>, Option<(u64, &'static str, &'static str)>, bool);

/// The agent, its engine, and what it has said last.
#[derive(Debug)]
pub struct Agent {
    pub engine: Engine,
    /// The request that freezes it, if one does.
    asked: Option<&'static str>,
    /// What its driver has said of its GPU.
    pub fault: Option<Fault>,
    mode: String,
    unattended_ms: u64,
    episode: Option<Episode>,
    episodes: u64,
    kills: u32,
    /// How often the kubelet has started its engine again.
    pub restarts: u32,
    fenced: bool,
    /// What it said last, in brief, and when.
    said: Option<(Brief, u64)>,
    self_granted_ms: Option<u64>,
    queued_ms: Option<u64>,
    /// The operator says that this is the last replica that serves.
    last_serving: bool,
    /// How long its engine's process takes to die.
    pub exit_ms: u64,
    /// By how much its node's clock is ahead.
    pub clock_ms: i64,
}

impl Agent {
    /// As the pod's own arguments configure it.
    pub fn new(pod: &Object, ready_at_ms: u64) -> Self {
        let args: Vec<&str> = pod["spec"]["initContainers"][0]["args"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let flag = |name: &str| args.iter().position(|arg| *arg == name).and_then(|at| args.get(at + 1)).copied();
        let unattended = flag("--unattended-after").and_then(|text| humantime::parse_duration(text).ok());
        Agent {
            engine: Engine::Starting { until_ms: ready_at_ms },
            asked: None,
            fault: None,
            mode: flag("--recovery-mode").unwrap_or("Recover").to_owned(),
            unattended_ms: unattended.map_or(300_000, |d| d.as_millis() as u64),
            episode: None,
            episodes: 0,
            kills: 0,
            restarts: 0,
            fenced: false,
            said: None,
            self_granted_ms: None,
            queued_ms: None,
            last_serving: false,
            exit_ms: 1_500,
            clock_ms: 0,
        }
    }

    /// What the kubelet shows it of the pod's annotations.
    pub fn heed(&mut self, pod: &Object) {
        let text = pod["metadata"]["annotations"][ANNOTATION_RECOVERY].as_str().unwrap_or_default();
        let Some(note) = RecoveryNote::read(text) else { return };
        self.mode = format!("{:?}", note.mode);
        if let Ok(after) = humantime::parse_duration(&note.unattended_after) {
            self.unattended_ms = after.as_millis() as u64;
        }
    }

    /// Does it pass its readiness probe?
    pub fn serves(&self) -> bool {
        !self.fenced && matches!(self.engine, Engine::Serving { .. } | Engine::Frozen { .. })
    }

    /// Really delivers tokens and has nothing open.
    pub fn healthy(&self) -> bool {
        matches!(self.engine, Engine::Serving { .. }) && !self.fenced && !self.open()
    }

    pub fn open(&self) -> bool {
        self.episode.as_ref().is_some_and(|e| !matches!(e.stage, "Recovered" | "Cleared"))
    }

    /// Under the operator's key: it has been killed by it, or may be at any moment (P15).
    pub fn restarting_by_grant(&self, grant: Option<&str>) -> bool {
        let Some(episode) = self.episode.as_ref().filter(|_| self.open()) else { return false };
        match episode.stage {
            "Stalled" => grant == Some(&episode.id),
            _ => episode.granted_by == Some("operator"),
        }
    }

    pub fn freeze(&mut self, now_ms: u64, heals_ms: Option<u64>) {
        if matches!(self.engine, Engine::Serving { .. }) {
            self.engine = Engine::Frozen { since_ms: now_ms, heals_ms };
        }
    }

    /// Freezes at a request.
    pub fn freeze_by(&mut self, now_ms: u64, request: &'static str) {
        if matches!(self.engine, Engine::Serving { .. }) {
            self.asked = Some(request);
            self.freeze(now_ms, None);
        }
    }

    /// Its GPU breaks under it.
    pub fn gpu_fault(&mut self, now_ms: u64, fault: Fault, dies: bool) {
        self.fault = Some(fault);
        if dies { self.crash(now_ms) } else { self.freeze(now_ms, None) }
    }

    pub fn crash(&mut self, now_ms: u64) {
        if !matches!(self.engine, Engine::Gone | Engine::Dead { .. }) {
            self.engine = Engine::Dead { restart_ms: now_ms + 1_000 };
            if !self.open() {
                self.begin(&format!("crash-{now_ms}"), "Dead", "Restarting", now_ms);
            }
        }
    }

    fn begin(&mut self, id: &str, class: &'static str, stage: &'static str, now_ms: u64) {
        self.episodes += 1;
        let id = id.to_owned();
        let (in_flight, fault) = (self.asked.take(), self.fault);
        self.episode = Some(Episode { id, class, stage, suspect_ms: now_ms, in_flight, fault, ..Episode::default() });
    }

    /// When the next look can find anything new: at once while anything is going on.
    pub fn due_ms(&self, now_ms: u64, sick: bool) -> u64 {
        let Engine::Serving { since_ms } = self.engine else {
            return if self.engine == Engine::Gone { u64::MAX } else { now_ms };
        };
        match self.said {
            Some((said, at_ms)) if said == self.brief() && !self.open() => {
                let again_ms = at_ms + REPEAT_EVERY_MS;
                if sick { again_ms.min(since_ms + SICK_AFTER_MS) } else { again_ms }
            }
            _ => now_ms,
        }
    }

    /// One look, one decision, and what follows from it.
    pub fn tick(
        &mut self,
        store: &mut Store,
        log: &mut Log,
        (namespace, name, uid): (&str, &str, &str),
        around: Around,
    ) {
        let Around { now_ms, reachable, .. } = around;
        if self.engine == Engine::Gone {
            return;
        }
        self.engine_step(around);
        let before = self.episode.as_ref().map(|e| e.stage);
        let alone = self.self_granted_ms;
        self.judge(uid, now_ms);
        if self.self_granted_ms != alone {
            log.line(now_ms, format_args!("agent of {name} grants itself"));
        }
        let after = self.episode.as_ref().map(|e| e.stage);
        if before != after {
            log.line(now_ms, format_args!("agent of {name}: {}", after.unwrap_or("None")));
        }
        let due = self.said.as_ref().is_none_or(|(said, at_ms)| {
            let waits = self.episode.as_ref().is_some_and(|e| e.stage == "Stalled");
            *said != self.brief() || now_ms >= at_ms + if waits { ASK_EVERY_MS } else { REPEAT_EVERY_MS }
        });
        if due && reachable {
            self.declare(store, (namespace, name, uid), now_ms);
        }
    }

    fn engine_step(&mut self, Around { now_ms, sick, gpu_lost, .. }: Around) {
        match self.engine.clone() {
            Engine::Starting { until_ms } if gpu_lost && now_ms >= until_ms => {
                self.crash(now_ms);
                self.engine = Engine::Dead { restart_ms: now_ms + 10_600 };
            }
            Engine::Starting { until_ms } if now_ms >= until_ms => {
                self.engine = Engine::Serving { since_ms: now_ms };
                self.fenced = false;
                if let Some(episode) = self.episode.as_mut().filter(|e| !matches!(e.stage, "Recovered" | "Cleared")) {
                    episode.stage = "Recovered";
                    episode.serving_ms = Some(now_ms);
                }
            }
            Engine::Serving { since_ms } if sick && now_ms >= since_ms + SICK_AFTER_MS => self.freeze(now_ms, None),
            Engine::Frozen { heals_ms: Some(at), .. } if now_ms >= at => {
                self.engine = Engine::Serving { since_ms: now_ms };
                self.fenced = false;
                if let Some(episode) =
                    self.episode.as_mut().filter(|e| matches!(e.stage, "Suspect" | "Stalled" | "Granted"))
                {
                    episode.stage = "Cleared";
                }
            }
            Engine::Dead { restart_ms } => {
                self.after_kill(now_ms);
                if now_ms >= restart_ms {
                    self.restarts += 1;
                    self.engine = Engine::Starting { until_ms: now_ms + 4_000 };
                }
            }
            _ => {}
        }
    }

    /// What was killed is gone, at once or late.
    fn after_kill(&mut self, now_ms: u64) {
        let Some(episode) = self.episode.as_mut().filter(|e| e.stage == "Killed") else { return };
        if now_ms >= episode.dead_ms {
            episode.stage = "Restarting";
        } else if episode.killed_ms.is_some_and(|at| now_ms > at + UNKILLABLE_MS) {
            episode.class = CLASS_UNKILLABLE;
        }
    }

    fn judge(&mut self, uid: &str, now_ms: u64) {
        let Engine::Frozen { since_ms, .. } = self.engine else { return };
        if !self.open() {
            if now_ms >= since_ms + SUSPECT_MS {
                self.begin(&format!("{uid}-{}", self.episodes + 1), "StepStalled", "Suspect", now_ms);
                self.fenced = self.mode != "Observe" && !self.last_serving;
            }
            return;
        }
        let Some(episode) = &mut self.episode else { return };
        // the last one that serves is spared until its restart is granted (I3)
        self.fenced = self.mode != "Observe" && (!self.last_serving || !matches!(episode.stage, "Suspect" | "Stalled"));
        match episode.stage {
            "Suspect" if now_ms >= since_ms + CONFIRM_MS => {
                episode.stage = "Stalled";
                episode.confirmed_ms = Some(now_ms);
            }
            "Stalled" if self.mode == "Recover" => {
                let quiet_since = self.queued_ms.max(episode.confirmed_ms).unwrap_or(now_ms);
                let alone = now_ms >= quiet_since + self.unattended_ms;
                let fresh = self.self_granted_ms.is_none_or(|at| now_ms >= at + 3_600_000);
                if alone && fresh {
                    self.self_granted_ms = Some(now_ms);
                    (episode.stage, episode.granted_by, episode.granted_ms) = ("Granted", Some("self"), Some(now_ms));
                }
            }
            "Granted" if episode.granted_ms.is_some_and(|at| now_ms >= at + EVIDENCE_MS) => {
                self.kills += 1;
                let back_off = [1_000, 10_600, 21_700, 43_000][(self.kills as usize - 1).min(3)];
                (episode.stage, episode.killed_ms) = ("Killed", Some(now_ms));
                episode.dead_ms = now_ms + self.exit_ms.saturating_sub(1_500);
                self.engine = Engine::Dead { restart_ms: episode.dead_ms + back_off };
            }
            _ => {}
        }
    }

    /// Server-side apply of the two conditions; the answer carries the operator's notes.
    fn declare(&mut self, store: &mut Store, (namespace, name, uid): (&str, &str, &str), now_ms: u64) {
        let words = self.words();
        let mut at = target("pods", namespace, name, "truebeat-agent").status();
        at.force = true;
        let mut body = json!({"metadata": {"name": name, "uid": uid}});
        body["status"]["conditions"] = words;
        let Ok((_, pod)) = store.apply(&at, body) else { return };
        self.said = Some((self.brief(), now_ms));
        let notes = &pod["metadata"]["annotations"];
        let note = |key: &str| notes[key].as_str().unwrap_or_default();
        self.last_serving = !note(super::story::LAST_SERVING).is_empty();
        let Some(episode) = self.episode.as_mut().filter(|e| e.stage == "Stalled") else { return };
        if let Some((id, time)) = note("truebeat.io/restart-queued").rsplit_once('@')
            && id == episode.id
            && let Ok(time) = time.parse::<jiff::Timestamp>()
            && (wall(now_ms).as_millisecond() - time.as_millisecond()).abs() < QUEUED_MAX_MS
        {
            self.queued_ms = Some(now_ms);
        }
        if note("truebeat.io/restart-grant") == episode.id && self.mode == "Recover" {
            (episode.stage, episode.granted_by, episode.granted_ms) = ("Granted", Some("operator"), Some(now_ms));
        }
    }

    fn brief(&self) -> Brief {
        let stage = self.episode.as_ref().map(|e| (self.episodes, e.stage, e.class));
        (std::mem::discriminant(&self.engine), stage, self.fenced)
    }
}
