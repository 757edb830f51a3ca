//! The user's overlay over the pod template, pure: what may be laid over, what is refused and why, and the merge itself.
//!
//! The pod contract (DESIGN §4.4) hangs on fields that look harmless: a liveness probe would kill without the second key (I1), a second
//! container would be taken for the engine, the agent's token must not be mounted elsewhere. So the fields that may be laid over are
//! listed, and whatever is not is refused.

use crds::{GROUP, overlay::PodOverlay};
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Map, Value, json};

const POD_FIELDS: [&str; 17] = [
    "affinity",
    "containers",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "preemptionPolicy",
    "priorityClassName",
    "readinessGates",
    "resourceClaims",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
];
/// `resources` with `claims` alone: what is claimed above would else reach nobody.
const ENGINE_FIELDS: [&str; 6] = ["name", "envFrom", "resources", "volumeDevices", "volumeMounts", "workingDir"];
/// Fields that people will try, and where the same is to be had or why it is not.
const REASONS: [(&str, &str); 17] = [
    ("args", "set spec.engine.args"),
    ("automountServiceAccountToken", "the token is the agent's alone"),
    ("command", "set spec.engine.command"),
    ("env", "set spec.engine.env"),
    ("image", "set spec.engine.image"),
    ("imagePullPolicy", "set spec.engine.imagePullPolicy"),
    ("lifecycle", "the agent drains the engine by it"),
    ("livenessProbe", "it would kill the engine without evidence and without a grant"),
    ("ports", "clients come through the gate"),
    ("readinessProbe", "the agent takes the replica out of traffic by it"),
    ("resources", "set spec.engine.resources"),
    ("restartPolicy", "the agent counts on the kubelet's restarts"),
    ("securityContext", "engine and agent run as one user, without any right"),
    ("serviceAccountName", "the agent's right hangs on it"),
    ("shareProcessNamespace", "the agent watches the engine's processes"),
    ("startupProbe", "it would kill the engine without evidence and without a grant"),
    ("terminationGracePeriodSeconds", "set spec.drainSeconds"),
];
/// Those of the restricted Pod Security Standard: whoever may write this object may not thereby reach the node.
const VOLUME_TYPES: [&str; 9] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
];
/// What is laid over stands in the InferenceDeployment, the Deployment, a ReplicaSet for each revision and every pod, each time beside a book of who
/// owns which of its fields; of any of these etcd takes 1.5 MiB, and where one is refused for that nobody could say so here.
const SPEC_BYTES_MAX: usize = 512 * 1024;
/// Lists that merge by a key; the others are replaced.
const KEYS: [(&str, &str); 9] = [
    ("containers", "name"),
    ("hostAliases", "ip"),
    ("imagePullSecrets", "name"),
    ("initContainers", "name"),
    ("readinessGates", "conditionType"),
    ("resourceClaims", "name"),
    ("volumeDevices", "devicePath"),
    ("volumeMounts", "mountPath"),
    ("volumes", "name"),
];

/// Lays `overlay` over `template`. Only for an overlay without [`problems`].
pub fn merge(template: &mut Value, overlay: &PodOverlay, init_security: &Value) {
    for (part, words) in [("labels", &overlay.metadata.labels), ("annotations", &overlay.metadata.annotations)] {
        for (key, value) in words {
            template["metadata"][part][key] = json!(value);
        }
    }
    let mut spec = said(&overlay.spec);
    let init = spec.remove("initContainers");
    strategic(&mut template["spec"], &Value::Object(spec), "");
    // Before the agent: whatever else runs beside it, it would take for the engine.
    if let (Some(Value::Array(mut theirs)), Some(ours)) = (init, template["spec"]["initContainers"].as_array_mut()) {
        theirs.iter_mut().for_each(|container| container["securityContext"] = init_security.clone());
        ours.splice(0..0, theirs);
    }
}

/// The fields that say something: a template of somebody else's leaves an empty list as null, and that means "not said" and not that ours
/// is to go.
pub fn said(spec: &Map<String, Value>) -> Map<String, Value> {
    let spoken = spec.iter().filter(|(_, value)| !value.is_null());
    spoken.map(|(name, value)| (name.clone(), spoken_of(value))).collect()
}

fn spoken_of(value: &Value) -> Value {
    match value {
        Value::Object(fields) => Value::Object(said(fields)),
        Value::Array(items) => Value::Array(items.iter().map(spoken_of).collect()),
        other => other.clone(),
    }
}

fn strategic(base: &mut Value, patch: &Value, name: &str) {
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            patch.iter().for_each(|(name, value)| strategic(base.entry(name).or_insert(Value::Null), value, name));
        }
        (Value::Array(base), Value::Array(patch)) if key_of(name).is_some() => {
            let key = key_of(name).unwrap_or_default();
            for item in patch {
                match base.iter_mut().find(|other| other[key] == item[key]) {
                    Some(other) => strategic(other, item, ""),
                    None => base.push(item.clone()),
                }
            }
        }
        (base, patch) => *base = patch.clone(),
    }
}

fn key_of(list: &str) -> Option<&'static str> {
    KEYS.iter().find(|(name, _)| *name == list).map(|(_, key)| *key)
}

/// Does it claim devices for the pod (DRA)?
pub fn claims_devices(overlay: &PodOverlay) -> bool {
    items(&overlay.spec, "resourceClaims").next().is_some()
}

/// Everything in `overlay` that cannot be laid over `template`, in words for its author.
pub fn problems(overlay: &PodOverlay, template: &Value) -> Vec<String> {
    let mut problems = metadata_problems(overlay);
    let at = "spec.podOverlay.spec";
    let spec = said(&overlay.spec);
    if let Err(error) = typed(&spec) {
        problems.push(format!("{at}: {error}"));
        return problems; // the rest reads it by its shape
    }
    let bytes = serde_json::to_string(&overlay.spec).map_or(0, |text| text.len());
    if bytes > SPEC_BYTES_MAX {
        problems.push(format!("{at}: {bytes} bytes are too many, at most {SPEC_BYTES_MAX} can stand in every pod"));
    }
    problems.extend(spec.keys().filter_map(|field| refused(at, field, &POD_FIELDS)));
    for container in items(&spec, "containers") {
        problems.extend(engine_problems(container, template));
    }
    for container in items(&spec, "initContainers") {
        problems.extend(init_problems(container, template));
    }
    problems.extend(items(&spec, "volumes").filter_map(|volume| volume_problem(volume, template)));
    for gate in items(&spec, "readinessGates") {
        if gate["conditionType"].as_str().is_some_and(is_ours) {
            problems.push(format!("{at}.readinessGates: {} is the operator's", gate["conditionType"]));
        }
    }
    problems
}

fn metadata_problems(overlay: &PodOverlay) -> Vec<String> {
    let ours = |key: &&String| is_ours(key) || key.starts_with("app.kubernetes.io/") || *key == "pod-template-hash";
    let labels = overlay.metadata.labels.keys().filter(ours).map(|key| ("labels", key));
    let annotations = overlay.metadata.annotations.keys();
    let annotations = annotations.filter(|key| is_ours(key) || key.starts_with("controller.kubernetes.io/"));
    let all = labels.chain(annotations.map(|key| ("annotations", key)));
    all.map(|(part, key)| format!("spec.podOverlay.metadata.{part}: {key} is the operator's")).collect()
}

fn is_ours(key: &str) -> bool {
    key.starts_with("truebeat.io/") || key.starts_with(&format!("{GROUP}/"))
}

/// Reads the fields by the API's own type: a wrong type, and a field that it does not know, are both found.
fn typed(spec: &Map<String, Value>) -> Result<(), String> {
    let mut whole = spec.clone();
    whole.entry("containers").or_insert_with(|| json!([]));
    let whole = Value::Object(whole);
    let pod: PodSpec = serde_json::from_value(whole.clone()).map_err(|error| error.to_string())?;
    let kept = serde_json::to_value(pod).map_err(|error| error.to_string())?;
    lost(&whole, &kept, "").map_or(Ok(()), |path| Err(format!("{path} is no field of a pod's spec")))
}

/// The first field of `given` that `kept` has not.
fn lost(given: &Value, kept: &Value, path: &str) -> Option<String> {
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => given.iter().find_map(|(name, value)| {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            match kept.get(name) {
                Some(kept) => lost(value, kept, &path),
                None => (!value.is_null()).then_some(path),
            }
        }),
        (Value::Array(given), Value::Array(kept)) => {
            given.iter().zip(kept).enumerate().find_map(|(n, (given, kept))| lost(given, kept, &format!("{path}[{n}]")))
        }
        _ => None,
    }
}

fn refused(at: &str, field: &str, allowed: &[&str]) -> Option<String> {
    if allowed.contains(&field) {
        return None;
    }
    let reason = REASONS.iter().find(|(name, _)| *name == field).map(|(_, reason)| *reason);
    Some(match reason {
        Some(reason) => format!("{at}.{field} is the operator's: {reason}"),
        None => format!("{at}.{field} cannot be laid over; what can: {}", allowed.join(", ")),
    })
}

fn items<'a>(spec: &'a Map<String, Value>, list: &str) -> impl Iterator<Item = &'a Value> {
    spec.get(list).and_then(Value::as_array).into_iter().flatten()
}

fn engine_problems(container: &Value, template: &Value) -> Vec<String> {
    let at = "spec.podOverlay.spec.containers";
    match container["name"].as_str() {
        Some("engine") => {}
        Some("agent") => {
            return vec![format!("{at}: the container agent is the operator's; its fields are spec.agent")];
        }
        _ => {
            return vec![format!(
                "{at}: the agent takes every process beside it for the engine; only engine may be named"
            )];
        }
    }
    let fields = container.as_object().into_iter().flat_map(Map::keys);
    let mut problems: Vec<String> =
        fields.filter_map(|field| refused(&format!("{at}[engine]"), field, &ENGINE_FIELDS)).collect();
    let counted = container["resources"].as_object().into_iter().flat_map(Map::keys);
    problems.extend(counted.filter(|field| *field != "claims").map(|field| {
        format!("{at}[engine].resources.{field} is the operator's: set spec.engine.resources; `claims` alone is yours")
    }));
    let taken: Vec<&Value> =
        ours(template, "containers").flat_map(|c| c["volumeMounts"].as_array()).flatten().collect();
    for mount in container["volumeMounts"].as_array().into_iter().flatten() {
        let path = mount["mountPath"].as_str().unwrap_or_default().trim_end_matches('/');
        if taken.iter().any(|ours| ours["mountPath"].as_str().is_some_and(|ours| within(path, ours))) {
            problems.push(format!("{at}[engine].volumeMounts: {path} is where the operator mounts its own"));
        }
        problems.extend(foreign_volume(&format!("{at}[engine]"), mount, template));
    }
    problems
}

/// Is `path` this folder, or one in it?
fn within(path: &str, folder: &str) -> bool {
    path == folder || path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

fn init_problems(container: &Value, template: &Value) -> Vec<String> {
    let name = container["name"].as_str().unwrap_or_default();
    let at = format!("spec.podOverlay.spec.initContainers[{name}]");
    if name == "agent" || name == "engine" {
        return vec![format!("{at}: this name is the operator's")];
    }
    let mut problems = Vec::new();
    if !container["restartPolicy"].is_null() {
        problems.push(format!(
            "{at}.restartPolicy: it must end before the agent starts, which takes all that runs for the engine"
        ));
    }
    if !container["securityContext"].is_null() {
        problems.push(format!("{at}.securityContext is the operator's: it gets the engine's, without any right"));
    }
    let mounts = container["volumeMounts"].as_array();
    problems.extend(mounts.into_iter().flatten().filter_map(|mount| foreign_volume(&at, mount, template)));
    problems
}

/// A mount of one of our volumes: the agent's token, evidence and page are nobody else's.
fn foreign_volume(at: &str, mount: &Value, template: &Value) -> Option<String> {
    let taken = ours(template, "volumes").any(|volume| volume["name"] == mount["name"]);
    taken.then(|| format!("{at}.volumeMounts: the volume {} is the operator's", mount["name"]))
}

fn volume_problem(volume: &Value, template: &Value) -> Option<String> {
    let at = format!("spec.podOverlay.spec.volumes[{}]", volume["name"].as_str().unwrap_or_default());
    if ours(template, "volumes").any(|ours| ours["name"] == volume["name"]) {
        return Some(format!("{at}: this name is the operator's"));
    }
    let types = volume.as_object().into_iter().flat_map(Map::keys).filter(|field| *field != "name");
    if let Some(kind) = types.into_iter().find(|kind| !VOLUME_TYPES.contains(&kind.as_str())) {
        return Some(format!("{at}: {kind} is not allowed; allowed are {}", VOLUME_TYPES.join(", ")));
    }
    let sources = volume["projected"]["sources"].as_array().into_iter().flatten();
    sources.into_iter().any(|source| !source["serviceAccountToken"].is_null()).then(|| {
        format!("{at}: a serviceAccountToken would carry the agent's right; project it for another account elsewhere")
    })
}

fn ours<'a>(template: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    template["spec"][list].as_array().into_iter().flatten()
}

#[cfg(test)]
#[path = "overlay_tests.rs"]
mod tests;
