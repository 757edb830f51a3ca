//! What keeps replicas from coming up, in words, pure. Nobody else tells it here: an image that cannot be had, a Secret that is missing, a cluster
//! without room, or a person who has paused the Deployment all look like a rollout that takes its time, for as long as its deadline is.
//!
//! The words change with what is so, and not with how often it was tried or how a kubelet puts it: they stand in a condition (P7).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};
use kube::ResourceExt;

use super::{
    observed::{Observed, PodView},
    plan::Plan,
    rollout::State,
    scaling,
};

/// The reasons for which a kubelet has no image for a container (kubernetes, pkg/kubelet/images/types.go). It says now one of them, now another.
const NO_IMAGE: [&str; 7] = [
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RegistryUnavailable",
    "SignatureValidationFailed",
];
/// What is repeated of an image's name, which may be longer than what tells of it.
const IMAGE_CHARS_MAX: usize = 200;
/// So many different things are told.
const TOLD_MAX: usize = 3;

/// Why one of the containers of a pod does not start; `None`: nobody says that it does not.
pub fn of(status: Option<&PodStatus>) -> Option<String> {
    let status = status?;
    let mut init = status.init_container_statuses.iter().flatten();
    let kept_back = init.find_map(|container| of_container(container).or_else(|| of_init(container)));
    kept_back.or_else(|| status.container_statuses.iter().flatten().find_map(of_container))
}

fn of_container(container: &ContainerStatus) -> Option<String> {
    let name = &container.name;
    match container.state.as_ref()?.waiting.as_ref()?.reason.as_deref()? {
        reason if NO_IMAGE.contains(&reason) => {
            let image: String = container.image.chars().take(IMAGE_CHARS_MAX).collect();
            Some(format!("its node cannot get the image {image} of container {name}"))
        }
        "CreateContainerConfigError" => {
            Some(format!("container {name} asks for a Secret, a ConfigMap or a key of one that is not there"))
        }
        "CreateContainerError" | "RunContainerError" => Some(format!("container {name} cannot be started")),
        _ => None,
    }
}

/// One that runs before the agent, and of which therefore no agent tells.
fn of_init(container: &ContainerStatus) -> Option<String> {
    let failed = container.name != "agent" && container.restart_count > 0 && !container.ready;
    failed.then(|| format!("init container {} ends with an error again and again", container.name))
}

/// What keeps these pods from being ready, as far as it is no stall; empty: nothing that anybody tells.
pub fn of_pods<'a>(pods: impl Iterator<Item = &'a PodView>) -> String {
    let mut told: BTreeMap<&str, (&str, usize)> = BTreeMap::new();
    for pod in pods.filter(|pod| !pod.leaving && !pod.ready && pod.open_episode().is_none()) {
        let no_place = pod.unschedulable_since.as_ref().map(|_| "the scheduler finds no node for it");
        let Some(why) = pod.hindered.as_deref().or(no_place) else { continue };
        let (first, count) = told.entry(why).or_insert((&pod.name, 0));
        (*first, *count) = (pod.name.as_str().min(*first), *count + 1);
    }
    let words = told.into_iter().take(TOLD_MAX).map(|(why, (pod, count))| {
        let others = if count > 1 { " and others" } else { "" };
        format!("{pod}{others}: {why}")
    });
    words.collect::<Vec<_>>().join("; ")
}

/// What keeps the Deployment from being as it is wanted, as the end of a sentence; empty: nothing that anybody tells.
pub fn ending(observed: &Observed, plan: &Plan) -> String {
    let why = why(observed, plan);
    if why.is_empty() { why } else { format!("; {why}") }
}

fn why(observed: &Observed, plan: &Plan) -> String {
    let name = observed.infd.name_any();
    let live = observed.children.get("Deployment");
    let held = matches!(plan.rollout.state, State::Held(_));
    if !held && live.is_some_and(|live| live["spec"]["paused"] == true) {
        return format!("somebody has paused the Deployment: `kubectl rollout resume deployment/{name}` lets it go on");
    }
    if let Some(there) = scaling::overwritten(observed) {
        return format!(
            "somebody else has set the Deployment to {there} replicas: an autoscaler's target, and that of `kubectl scale`, is the InferenceDeployment"
        );
    }
    let pods = of_pods(observed.pods.iter());
    if pods.is_empty() { pods } else { format!("{pods} (`kubectl describe pod` tells more)") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        build::build,
        plan::plan,
        testing::{healthy, infd, looked},
    };
    use serde_json::{Value, json};

    fn waits(name: &str, reason: &str) -> Value {
        json!({"name": name, "image": "engine:typo", "state": {"waiting": {"reason": reason}}})
    }

    fn said(status: Value) -> Option<String> {
        let status: PodStatus = serde_json::from_value(status).unwrap();
        of(Some(&status))
    }

    #[test]
    fn an_image_that_cannot_be_had_is_told_in_the_same_words_at_each_try() {
        let told = |reason| said(json!({"containerStatuses": [waits("engine", reason)]}));
        let words = "its node cannot get the image engine:typo of container engine";
        assert_eq!([told("ErrImagePull"), told("ImagePullBackOff")], [Some(words.into()), Some(words.into())]);
        let begins = ["ContainerCreating", "PodInitializing", "CrashLoopBackOff"].map(told);
        assert_eq!(begins, [None, None, None], "it begins, or its agent tells of it");
    }

    #[test]
    fn what_comes_before_the_engine_is_told_first() {
        let engine = waits("engine", "PodInitializing");
        let missing = waits("agent", "CreateContainerConfigError");
        let told = said(json!({"initContainerStatuses": [missing], "containerStatuses": [engine]})).unwrap();
        assert!(told.contains("container agent asks for a Secret"), "{told}");
        let fetch = |restarts: i32, ready: bool| {
            let state = json!({"name": "fetch", "restartCount": restarts, "ready": ready});
            said(json!({"initContainerStatuses": [state, {"name": "agent", "restartCount": 3}]}))
        };
        assert_eq!(fetch(2, false).as_deref(), Some("init container fetch ends with an error again and again"));
        assert_eq!((fetch(0, false), fetch(2, true)), (None, None), "it runs, or has done its work");
    }

    fn hindered(name: &str, why: &str) -> PodView {
        PodView { ready: false, progressing: None, hindered: Some(why.to_owned()), ..healthy(name) }
    }

    #[test]
    fn each_hindrance_is_told_once() {
        let since = Some("2026-01-01T00:00:00Z".to_owned());
        let nowhere = PodView { ready: false, unschedulable_since: since, ..healthy("d") };
        let leaves = PodView { leaving: true, ..hindered("0", "why") };
        let serves = PodView { ready: true, ..hindered("1", "why") };
        let pods = [nowhere, hindered("c", "why"), hindered("b", "why"), leaves, serves, healthy("e")];
        let words = "d: the scheduler finds no node for it; b and others: why";
        assert_eq!(of_pods(pods.iter()), words);
        assert_eq!(of_pods([healthy("a")].iter()), "");
    }

    #[test]
    fn whoever_paused_or_scaled_the_deployment_is_told_what_to_do() {
        let mut observed = looked(infd("chat"), vec![healthy("a"), healthy("b")]);
        let now = "2026-01-01T00:02:00Z".parse().unwrap();
        let first = plan(&observed, build(&observed.infd), None, now);
        observed.infd.status.get_or_insert_default().rollout = first.rollout.memory.clone();
        for child in first.applies {
            observed.children.insert(child.resource.kind, child.body);
        }
        let told = |observed: &Observed| why(observed, &plan(observed, build(&observed.infd), None, now));
        assert_eq!(told(&observed), "");
        observed.infd.spec.replicas = 3;
        assert_eq!(told(&observed), "", "a number that is not followed yet is nobody else's");
        let live = |observed: &mut Observed, field: &str, value: Value| {
            observed.children.get_mut("Deployment").unwrap()["spec"][field] = value;
        };
        live(&mut observed, "replicas", json!(5));
        assert!(
            told(&observed).starts_with("somebody else has set the Deployment to 5 replicas"),
            "{}",
            told(&observed)
        );
        live(&mut observed, "paused", json!(true));
        assert!(told(&observed).contains("kubectl rollout resume deployment/chat"), "{}", told(&observed));
    }
}
