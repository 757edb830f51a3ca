//! What an agent says of itself and its engine, in the conditions of its pod, by the clock of its node.

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::{Agent, Engine};
use crate::kube::store::wall;

impl Agent {
    pub(super) fn words(&self) -> Value {
        let progressing = match self.engine {
            Engine::Serving { .. } => "True",
            Engine::Frozen { .. } if self.open() => "False",
            Engine::Frozen { .. } => "True",
            Engine::Dead { .. } => "False",
            _ => "Unknown",
        };
        let time = |ms: u64| (wall(ms) + SignedDuration::from_millis(self.clock_ms)).to_string();
        let text = self.episode.as_ref().map(|e| {
            let mut value = json!({"id": e.id, "class": e.class, "stage": e.stage, "reasons": ["no token"], "suspectAt": time(e.suspect_ms)});
            let times = [("confirmedAt", e.confirmed_ms), ("grantedAt", e.granted_ms), ("killedAt", e.killed_ms), ("servingAt", e.serving_ms)];
            times.iter().for_each(|(key, at)| if let Some(at) = at { value[*key] = json!(time(*at)) });
            if self.fenced || matches!(e.stage, "Granted" | "Killed" | "Restarting") {
                value["fencedAt"] = json!(time(e.suspect_ms));
            }
            e.granted_by.iter().for_each(|who| value["grantedBy"] = json!(who));
            e.fault.iter().for_each(|f| value["xids"] = json!([{"code": f.code, "gpu": "GPU-1", "remedy": f.remedy}]));
            e.in_flight.iter().for_each(|request| value["inFlight"] = json!([{"request": request}]));
            value.to_string()
        });
        let stage = self.episode.as_ref().map_or("None", |e| e.stage);
        let open = if self.open() { "True" } else { "False" };
        let since = time(self.episode.as_ref().map_or(0, |e| e.serving_ms.unwrap_or(e.suspect_ms)));
        // an engine that hangs answers its probes all the same
        let lies =
            if progressing == "False" && matches!(self.engine, Engine::Frozen { .. }) { "True" } else { "False" };
        json!([
            {"type": "truebeat.io/health-lie", "status": lies, "reason": "", "message": ""},
            {"type": "truebeat.io/progressing", "status": progressing, "reason": stage, "message": ""},
            {"type": "truebeat.io/episode", "status": open, "reason": stage, "message": text.unwrap_or_default(), "lastTransitionTime": since},
        ])
    }
}
