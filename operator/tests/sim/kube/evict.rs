//! Eviction (`policy/v1`): a delete that asks the pod's disruption budget first, as the API server does it.

use std::sync::Arc;

use serde_json::json;

use super::{
    Refusal, kinds,
    object::Object,
    store::{Key, Store},
    verbs::Target,
};

/// More unconfirmed evictions than this no budget takes.
const DISRUPTED_MAX: usize = 2_000;
const VIOLATES: &str = "Cannot evict pod as it would violate the pod's disruption budget.";

impl Store {
    /// POST pods/NAME/eviction.
    pub fn evict(&mut self, target: &Target, body: &Object) -> Result<(u16, Arc<Object>), Refusal> {
        if body["metadata"]["name"] != target.name.as_str() {
            return Err(Refusal::new(400, "BadRequest", "name in URL does not match name in Eviction object"));
        }
        let at = Target { subresource: String::new(), ..target.clone() };
        let (_, pod) = self.read(&at)?;
        let options = &body["deleteOptions"];
        let meant = options["preconditions"]["uid"].as_str().is_none_or(|uid| pod["metadata"]["uid"] == uid);
        if !goes_anyway(&pod) {
            let budgets: Vec<Key> = self.budgets_of(&pod);
            match budgets.as_slice() {
                [] => {}
                [budget] => self.spend(budget, &pod, meant)?,
                _ => {
                    let what = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
                    return Err(Refusal::new(500, "", what));
                }
            }
        }
        // (the budget is spent all the same)
        if meant {
            self.mark(&at, &pod)?;
        }
        self.delete(&at, options)?;
        let done = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
        Ok((201, Arc::new(done.into())))
    }

    /// The budgets whose selector takes this pod.
    fn budgets_of(&self, pod: &Object) -> Vec<Key> {
        let here = |key: &Key| pod["metadata"]["namespace"] == key.1.as_str();
        let budgets = self.of("poddisruptionbudgets").filter(|(key, entry)| here(key) && covers(&entry.value, pod));
        budgets.map(|(key, _)| key.clone()).collect()
    }

    /// Takes one of the disruptions that the budget allows, if this pod needs one. One that needs none is deleted at once; where it is
    /// not the one that was `meant`, that fails, again and again, until the server says that it is too busy.
    fn spend(&mut self, key: &Key, pod: &Object, meant: bool) -> Result<(), Refusal> {
        let Some(budget) = self.get(key).map(|entry| entry.value.clone()) else { return Ok(()) };
        let status = &budget["status"];
        let count = |field: &str| status[field].as_i64().unwrap_or(0);
        let (healthy, desired, allowed) =
            (count("currentHealthy"), count("desiredHealthy"), count("disruptionsAllowed"));
        let always = budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow";
        let name = &key.2;
        let busy = || violates(format!("The disruption budget {name} is still being processed by the server."));
        if !is_ready(pod) && (always || (healthy >= desired && desired > 0)) {
            return if meant { Ok(()) } else { Err(busy()) }; // it does not count, so it costs nothing
        }
        if count("observedGeneration") < budget["metadata"]["generation"].as_i64().unwrap_or(0) {
            return Err(busy());
        }
        let crowded = status["disruptedPods"].as_object().is_some_and(|pods| pods.len() > DISRUPTED_MAX);
        if allowed < 0 || crowded {
            let why = if allowed < 0 { "pdb disruptions allowed is negative" } else { "DisruptedPods map too big" };
            let what = format!("poddisruptionbudget.policy \"{name}\" is forbidden: {why}");
            return Err(Refusal::new(403, "Forbidden", what));
        }
        if allowed == 0 {
            return Err(violates(if healthy <= desired {
                format!("The disruption budget {name} needs {desired} healthy pods and has {healthy} currently")
            } else {
                format!("The disruption budget {name} does not allow evicting pods currently")
            }));
        }
        let pod = pod["metadata"]["name"].as_str().unwrap_or_default();
        let spent = json!({"status": {"disruptionsAllowed": allowed - 1, "disruptedPods": {pod: self.now()}}});
        let at = Target::new(kinds::of(key.0), &key.1, name, "kube-apiserver").status();
        self.merge(&at, &spent).map(drop)
    }

    /// The condition by which controllers tell an eviction from a failure.
    fn mark(&mut self, at: &Target, pod: &Object) -> Result<(), Refusal> {
        let mut conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.retain(|condition| condition["type"] != "DisruptionTarget");
        conditions.push(json!({
            "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting", "lastTransitionTime": self.now(),
        }));
        self.merge(&at.clone().status(), json!({"status": {"conditions": conditions}})).map(drop)
    }
}

/// A pod that has not begun, has ended, or is on its way out disrupts nobody.
fn goes_anyway(pod: &Object) -> bool {
    let phase = pod["status"]["phase"].as_str().unwrap_or("Pending"); // which the real server writes itself
    let over = matches!(phase, "Pending" | "Succeeded" | "Failed");
    over || !pod["metadata"]["deletionTimestamp"].is_null()
}

/// Does the budget's selector take this pod? (Labels alone; expressions are not known here.)
pub fn covers(budget: &Object, pod: &Object) -> bool {
    let selector = &budget["spec"]["selector"];
    let mut wanted = selector["matchLabels"].as_object().into_iter().flatten();
    selector.is_object() && wanted.all(|(key, value)| pod["metadata"]["labels"][key] == *value)
}

fn is_ready(pod: &Object) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn violates(cause: String) -> Refusal {
    let details = json!({"causes": [{"reason": "DisruptionBudget", "message": cause}]});
    Refusal { details, ..Refusal::new(429, "TooManyRequests", VIOLATES) }
}
