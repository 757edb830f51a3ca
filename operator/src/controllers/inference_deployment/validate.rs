//! Stage 2, pure: what in a spec cannot be built, in words for its author.
//!
//! The CEL rules of the CRD refuse most of it at admission; this stage holds even where they were bypassed (an older
//! CRD, a restored backup), and finds what CEL cannot see. A problem never throws: it ends in `Stalled=True`.

use std::{collections::BTreeSet, time::Duration};

use crds::{
    InferenceDeployment, InferenceDeploymentSpec,
    agent::Agent,
    inference_deployment::{Engine, EngineKind, Resources},
};
use kube::ResourceExt;

use super::build::{AGENT_PORT, bare_template, overlay};

/// No duration of the policy may be longer.
pub const DURATION_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// Whoever is paged looks first.
const TRIAL_AFTER_MIN: Duration = Duration::from_secs(60);
/// No bound of the detector's may be longer.
const POLICY_MAX: Duration = Duration::from_secs(24 * 3600);
/// What the agent knows of its own pod.
const OWN_VARIABLES: [&str; 4] = ["POD_NAME", "POD_NAMESPACE", "POD_UID", "NODE_NAME"];

/// GPUs by the name that their device plugin gives them; of others nobody counts ranks.
const GPU: &str = "nvidia.com/gpu";
/// Our engine takes no more (`engine::ranks`).
const TRUEBEAT_RANKS_MAX: i32 = 16;

/// Everything wrong with the spec; empty: it can be built.
pub fn validate(infd: &InferenceDeployment) -> Vec<String> {
    let spec = &infd.spec;
    let mut problems = Vec::new();
    let name = infd.name_any();
    if name.len() > 48 || name.contains('.') || !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        problems.push(format!("metadata.name {name:?} cannot name a Service: at most 48 of [a-z0-9-], a letter first"));
    }
    let ports = [spec.engine.port, spec.gate.port, AGENT_PORT];
    if ports[0] == ports[1] || ports[0] == AGENT_PORT || ports[1] == AGENT_PORT {
        problems
            .push(format!("spec.engine.port, spec.gate.port and the agent's {AGENT_PORT} must differ, not {ports:?}"));
    }
    problems.extend(model_problem(spec));
    problems.extend(ranks_problem(&spec.engine));
    let (deadline, soak) = (spec.rollout.progress_deadline_seconds, spec.rollout.soak_seconds);
    if deadline <= soak {
        problems.push(format!("spec.rollout: progressDeadlineSeconds {deadline} must be more than soakSeconds {soak}"));
    }
    let recovery = &spec.recovery;
    for (field, text) in [
        ("unattendedAfter", &recovery.unattended_after),
        ("unattendedWindow", &recovery.unattended_window),
        ("stabilityWindow", &recovery.stability_window),
        ("restartBackoff", &recovery.restart_backoff),
        ("restartBackoffMax", &recovery.restart_backoff_max),
        ("trialAfter", &recovery.trial_after),
        ("avoidFor", &recovery.avoid_for),
        ("poisonFor", &recovery.poison_for),
        ("incidentTtl", &recovery.incident_ttl),
    ] {
        match humantime::parse_duration(text) {
            Ok(duration) if duration > DURATION_MAX => {
                problems.push(format!("spec.recovery.{field} {text:?} is more than 30 days"))
            }
            Ok(_) => {}
            Err(error) => {
                problems.push(format!("spec.recovery.{field} {text:?} is no duration such as \"5m\": {error}"))
            }
        }
    }
    let pause = |text: &str| humantime::parse_duration(text).unwrap_or_default();
    let (first, longest) = (&recovery.restart_backoff, &recovery.restart_backoff_max);
    if problems.is_empty() && pause(longest) < pause(first) {
        problems.push(format!("spec.recovery.restartBackoffMax {longest:?} must be at least restartBackoff {first:?}"));
    }
    if problems.is_empty() && (Duration::from_nanos(1)..TRIAL_AFTER_MIN).contains(&pause(&recovery.trial_after)) {
        problems.push(format!("spec.recovery.trialAfter {:?} must be at least 1m, or 0s", recovery.trial_after));
    }
    for (field, wanted) in [("engine", &spec.engine.resources), ("agent", &spec.agent.resources)] {
        problems.extend(wanted.iter().flat_map(|r| request_problems(field, r)));
    }
    problems.extend(agent_problems(&spec.agent));
    if let Some(overlay) = &spec.pod_overlay {
        problems.extend(overlay::problems(overlay, &bare_template(infd)));
    }
    problems
}

fn model_problem(spec: &InferenceDeploymentSpec) -> Option<String> {
    let Some(model) = &spec.model else {
        return (spec.engine.kind == EngineKind::Truebeat)
            .then(|| "spec.engine.kind Truebeat needs spec.model.source".to_owned());
    };
    let source = &model.source;
    let set = [source.file.is_some(), source.pvc.is_some(), source.oci.is_some()];
    if set.into_iter().filter(|set| *set).count() != 1 {
        return Some("spec.model.source needs exactly one of file, pvc and oci".to_owned());
    }
    let paths = [("pvc", source.pvc.as_ref().map(|pvc| &pvc.path)), ("oci", source.oci.as_ref().map(|oci| &oci.path))];
    let outside = |path: &str| path.starts_with('/') || path.split('/').any(|part| part == "..");
    let (kind, path) = paths.into_iter().find_map(|(kind, path)| Some((kind, path.filter(|path| outside(path))?)))?;
    Some(format!("spec.model.source.{kind}.path {path:?} must stay inside the volume"))
}

/// What the agent would not start with, or be told without an effect.
fn agent_problems(agent: &Agent) -> Vec<String> {
    let is_ours = |name: &str| name.starts_with("TRUEBEAT_") || OWN_VARIABLES.contains(&name);
    let ours = agent.env.iter().filter(|variable| is_ours(&variable.name));
    let mut problems: Vec<String> =
        ours.map(|variable| format!("spec.agent.env: {} is the operator's", variable.name)).collect();
    let Some(policy) = &agent.policy else { return problems };
    for (field, _, text) in policy.durations() {
        let at = format!("spec.agent.policy.{field}");
        match text.map(humantime::parse_duration) {
            Some(Ok(bound)) if bound.is_zero() || bound > POLICY_MAX => {
                problems.push(format!("{at}: more than nothing, and at most 24h"))
            }
            Some(Err(error)) => problems.push(format!("{at} is no duration such as \"5m\": {error}")),
            Some(Ok(_)) | None => {}
        }
    }
    let ms = |text: &str| humantime::parse_duration(text).ok().map(|duration| duration.as_millis());
    let inverted = policy.inverted(ms).into_iter();
    problems.extend(inverted.map(|(floor, cap)| format!("spec.agent.policy: {floor} is above {cap}")));
    problems
}

/// Ranks that nobody can be told of, that are told twice, or that have no GPU.
fn ranks_problem(engine: &Engine) -> Option<String> {
    let ranks = engine.tensor_parallel?;
    if engine.kind == EngineKind::Custom {
        return Some(
            "spec.engine.tensorParallel: how an engine of kind Custom is told is for spec.engine.args".to_owned(),
        );
    }
    if engine.kind == EngineKind::Truebeat && ranks > TRUEBEAT_RANKS_MAX {
        return Some(format!(
            "spec.engine.tensorParallel {ranks}: an engine of kind Truebeat is split over at most {TRUEBEAT_RANKS_MAX} ranks"
        ));
    }
    let flags = ["--tensor-parallel", "--tp-size", "--tp=", "-tp="];
    let told = |arg: &String| arg == "-tp" || arg == "--tp" || flags.iter().any(|flag| arg.starts_with(flag));
    if let Some(arg) = engine.args.iter().find(|arg| told(arg)) {
        return Some(format!("spec.engine.tensorParallel and {arg:?} in spec.engine.args say the same: say it once"));
    }
    let gpus = engine.resources.as_ref().and_then(|r| r.limits.get(GPU)).and_then(|gpus| gpus.parse::<i32>().ok());
    let short = gpus.filter(|gpus| *gpus < ranks)?;
    Some(format!("spec.engine.tensorParallel {ranks} needs a GPU for each rank, and the limit of {GPU} is {short}"))
}

/// Devices cannot be overcommitted: the API server refuses a pod whose request differs from its limit.
fn request_problems(field: &str, wanted: &Resources) -> Vec<String> {
    let devices = wanted.requests.iter().filter(|(name, _)| name.contains('/'));
    devices
        .filter(|(name, quantity)| wanted.limits.get(*name) != Some(quantity))
        .map(|(name, _)| {
            format!("spec.{field}.resources: request and limit of {name} must be equal; set the limit alone")
        })
        .collect()
}

/// Does a replica ask for devices (GPUs and the like, by resource names with a domain or by claims)?
pub fn asks_for_devices(spec: &InferenceDeploymentSpec) -> bool {
    !devices(spec).is_empty() || spec.pod_overlay.as_ref().is_some_and(overlay::claims_devices)
}

/// The devices that a replica asks for, by resource name.
pub fn devices(spec: &InferenceDeploymentSpec) -> Vec<String> {
    let wanted = spec.engine.resources.iter().flat_map(|r| r.requests.keys().chain(r.limits.keys()));
    let names: BTreeSet<&String> = wanted.filter(|name| name.contains('/')).collect();
    names.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{infd, infd_vllm};
    use crds::agent::Policy;
    use crds::inference_deployment::{EnvVar, ModelSource, OciSource};

    #[test]
    fn good_specs_have_no_problem() {
        assert_eq!(validate(&infd("chat")), Vec::<String>::new());
        assert_eq!(validate(&infd_vllm("llama")), Vec::<String>::new());
    }

    #[test]
    fn each_problem_names_its_field() {
        type Change = fn(&mut InferenceDeployment);
        let cases: [(&str, Change); 26] = [
            ("nativeFloor is above leaseCap", |o| {
                o.spec.agent.policy = Some(Policy { lease_cap: Some("299ms".into()), ..Policy::default() });
            }),
            ("policy.slowToken is no duration", |o| {
                o.spec.agent.policy = Some(Policy { slow_token: Some("soon".into()), ..Policy::default() });
            }),
            ("policy.patienceCap: more than nothing", |o| {
                o.spec.agent.policy = Some(Policy { patience_cap: Some("25h".into()), ..Policy::default() });
            }),
            ("POD_UID is the operator's", |o| {
                o.spec.agent.env = vec![EnvVar { name: "POD_UID".into(), value: None, value_from: None }];
            }),
            ("restartBackoff \"soon\"", |o| o.spec.recovery.restart_backoff = "soon".into()),
            ("restartBackoffMax \"999h\"", |o| o.spec.recovery.restart_backoff_max = "999h".into()),
            ("must be at least restartBackoff", |o| o.spec.recovery.restart_backoff_max = "9s".into()),
            ("must be more than soakSeconds", |o| o.spec.rollout.soak_seconds = 3600),
            ("stabilityWindow", |o| o.spec.recovery.stability_window = "soon".into()),
            ("trialAfter", |o| o.spec.recovery.trial_after = "later".into()),
            ("at least 1m", |o| o.spec.recovery.trial_after = "59s".into()),
            ("avoidFor", |o| o.spec.recovery.avoid_for = "for ever".into()),
            ("metadata.name", |o| o.metadata.name = Some("a.b".into())),
            ("must differ", |o| o.spec.gate.port = AGENT_PORT),
            ("needs spec.model.source", |o| o.spec.model = None),
            ("exactly one of", |o| o.spec.model.as_mut().unwrap().source.file = None),
            ("exactly one of", |o| o.spec.model.as_mut().unwrap().source.oci = Some(weights(""))),
            ("source.oci.path", |o| {
                o.spec.model.as_mut().unwrap().source =
                    ModelSource { oci: Some(weights("a/../b")), ..Default::default() };
            }),
            ("incidentTtl", |o| o.spec.recovery.incident_ttl = "for ever".into()),
            ("kind Custom", |o| (o.spec.engine.kind, o.spec.engine.tensor_parallel) = (EngineKind::Custom, Some(2))),
            ("at most 16 ranks", |o| o.spec.engine.tensor_parallel = Some(17)),
            ("say it once", |o| {
                o.spec.engine.args = vec!["--tensor-parallel=2".into()];
                o.spec.engine.tensor_parallel = Some(2);
            }),
            ("a GPU for each rank", |o| {
                let limits = [(GPU.to_owned(), "1".to_owned())].into();
                o.spec.engine.resources = Some(Resources { limits, requests: Default::default() });
                o.spec.engine.tensor_parallel = Some(2);
            }),
            ("unattendedAfter", |o| o.spec.recovery.unattended_after = "soon".into()),
            ("unattendedWindow", |o| o.spec.recovery.unattended_window = "99999999999h".into()),
            ("must be equal", |o| {
                let requests = [("nvidia.com/gpu".to_owned(), "1".to_owned())].into();
                o.spec.engine.resources = Some(Resources { requests, limits: Default::default() });
            }),
        ];
        for (word, change) in cases {
            let mut object = infd("chat");
            change(&mut object);
            let problems = validate(&object);
            assert!(problems.len() == 1 && problems[0].contains(word), "{word}: {problems:?}");
        }
    }

    fn weights(path: &str) -> OciSource {
        OciSource { reference: "weights:1".into(), pull_policy: None, path: path.into() }
    }

    #[test]
    fn ranks_that_fit_their_gpus_are_well() {
        let mut object = infd_vllm("llama");
        object.spec.engine.tensor_parallel = Some(1);
        assert_eq!(validate(&object), Vec::<String>::new());
        object.spec.engine.resources.as_mut().unwrap().limits.insert(GPU.to_owned(), "8".to_owned());
        object.spec.engine.tensor_parallel = Some(4);
        assert_eq!(validate(&object), Vec::<String>::new());
    }

    #[test]
    fn devices_are_seen() {
        assert!(!asks_for_devices(&infd("chat").spec));
        assert!(asks_for_devices(&infd_vllm("llama").spec));
    }
}
