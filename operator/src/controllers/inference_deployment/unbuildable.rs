//! What goes on under a spec whose overlay cannot be laid over, pure: everything but the pods' template, which stays as it stands. An autoscaler's
//! wish, or a Service that somebody deleted, must not wait until the author of a volume mount is awake.

use jiff::Timestamp;

use super::{
    build::{build, revision},
    observed::Observed,
    plan::{Plan, sort_in},
    rollout::{RESTARTED, template_of},
    scaling,
    validate::validate,
};

/// The plan with the children that the rest of the spec asks for, where that can be built and replicas stand.
pub fn go_on(mut plan: Plan, observed: &Observed, now: Timestamp) -> Plan {
    let mut spared = observed.infd.clone();
    let Some(live) = observed.children.get("Deployment") else { return plan };
    if spared.spec.pod_overlay.take().is_none() || !validate(&spared).is_empty() {
        return plan;
    }
    let standing = &live["spec"]["template"];
    let Some(mut template) = template_of(observed, revision::of(standing)) else { return plan };
    if let Some(at) = standing["metadata"]["annotations"][RESTARTED].as_str() {
        template["metadata"]["annotations"][RESTARTED] = at.into(); // whosever it is, without it all would be replaced
    }
    let mut children = build(&spared);
    for child in children.iter_mut().filter(|child| child.resource.kind == "Deployment") {
        child.body["spec"]["template"].clone_from(&template);
        if live["spec"]["paused"] == true {
            child.body["spec"]["paused"] = true.into(); // a revision that has failed is held so
        }
    }
    plan.scaling_held = scaling::steer(observed, &mut children, now);
    for child in children {
        sort_in(&mut plan, observed, child);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        plan::plan,
        testing::{healthy, infd, looked},
    };
    use serde_json::{Value, json};

    fn now() -> Timestamp {
        "2026-01-01T00:02:00Z".parse().unwrap()
    }

    /// A Deployment that stands, as the server holds it, and a spec that says `overlay` since.
    fn world(overlay: Value) -> Observed {
        let mut observed = looked(infd("chat"), vec![healthy("a"), healthy("b")]);
        for child in plan(&observed, build(&observed.infd), None, now()).applies {
            let mut live = child.body;
            live["metadata"]["uid"] = json!(format!("uid-{}", child.resource.kind));
            if child.resource.kind == "Deployment" {
                live["spec"]["template"]["spec"]["schedulerName"] = json!("default-scheduler"); // by the server
            }
            observed.children.insert(child.resource.kind, live);
        }
        observed.infd.spec.pod_overlay = serde_json::from_value(overlay).unwrap();
        observed
    }

    fn applied(observed: &Observed) -> Vec<(String, Value)> {
        assert!(!validate(&observed.infd).is_empty(), "it is invalid");
        let plan = go_on(plan(observed, Vec::new(), None, now()), observed, now());
        plan.applies.into_iter().map(|child| (child.resource.kind, child.body)).collect()
    }

    #[test]
    fn an_autoscaler_and_the_service_do_not_wait_for_the_overlays_author() {
        let mut observed = world(json!({"spec": {"hostNetwork": true}}));
        observed.infd.spec.replicas = 5;
        observed.children.remove("Service");
        let applied = applied(&observed);
        let kinds: Vec<&str> = applied.iter().map(|(kind, _)| kind.as_str()).collect();
        assert_eq!(kinds, ["Service", "Deployment"]);
        let body = &applied[1].1;
        assert_eq!(body["spec"]["replicas"], 5);
        assert_eq!(body["spec"]["template"], observed.children["Deployment"]["spec"]["template"], "nobody rolls out");
        // and once that is written nothing is left to do (P7)
        for (kind, body) in applied {
            observed.children.insert(kind, body);
        }
        assert!(self::applied(&observed).is_empty());
    }

    #[test]
    fn what_is_held_stays_so_and_a_spec_that_is_wrong_elsewhere_is_built_by_nobody() {
        let mut observed = world(json!({"spec": {"hostNetwork": true}}));
        let restarted = "2026-01-01T00:00:00Z";
        let live = observed.children.get_mut("Deployment").unwrap();
        live["spec"]["template"]["metadata"]["annotations"][RESTARTED] = json!(restarted);
        live["spec"]["paused"] = json!(true);
        observed.infd.spec.replicas = 5;
        assert_eq!(applied(&observed).pop().map(|(_, body)| body["spec"]["paused"].clone()), Some(json!(true)));
        let template = applied(&observed).pop().unwrap().1["spec"]["template"].clone();
        assert_eq!(template["metadata"]["annotations"][RESTARTED], restarted);
        observed.infd.spec.gate.port = observed.infd.spec.engine.port;
        assert!(applied(&observed).is_empty());
        let mut new = world(json!({"spec": {"hostNetwork": true}}));
        new.children.clear();
        assert!(applied(&new).is_empty(), "there is no template that could stay");
    }
}
