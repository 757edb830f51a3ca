//! The pod of one replica (DESIGN §4.4), pure: the engine, and the agent as a native sidecar that starts before it and
//! outlives it. Both run as the same user without any capability, so that the agent may look at the engine and kill it.

use crds::{
    InferenceDeployment,
    agent::{AGENT_DIR, BUNDLE_DIR, EVIDENCE_DIR, Policy},
    fence::ANNOTATION_FENCE,
    inference_deployment::{EngineKind, EnvVar, ImagePullPolicy, ModelSource, RecoveryMode, Resources},
    maintenance::ANNOTATION_MAINTENANCE,
    poison::ANNOTATION_POISON,
    recovery_note::ANNOTATION_RECOVERY,
    rollout::Proof,
};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{AGENT_PORT, ENGINE_EXIT_SECONDS, child_name};

const PAGE_DIR: &str = "/run/truebeat";
/// Engine and agent see it here; a name that no overlay of before is likely to have.
const LOG_VOLUME: &str = "engine-log";
const LOG_DIR: &str = "/run/truebeat-log";
const LOG_FILE: &str = "/run/truebeat-log/engine.log";
const TOKEN_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const NOTES_DIR: &str = "/run/truebeat-notes";
const MODEL_DIR: &str = "/models";

/// The pod's spec.
pub fn spec(infd: &InferenceDeployment) -> Value {
    let mut spec = json!({
        "serviceAccountName": child_name(&infd.name_any(), "ServiceAccount"),
        // the token goes to the agent alone, by the projected volume below
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "shareProcessNamespace": true,
        "terminationGracePeriodSeconds": infd.spec.drain_seconds + ENGINE_EXIT_SECONDS,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    });
    // (what stands in `json!` is copied, and these are most of the object)
    spec["initContainers"] = Value::Array(vec![agent(infd)]);
    spec["containers"] = Value::Array(vec![engine(infd)]);
    spec["volumes"] = Value::Array(volumes(infd));
    spec
}

fn agent(infd: &InferenceDeployment) -> Value {
    let agent = &infd.spec.agent;
    let default = json!({"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}});
    let mut container = json!({
        "name": "agent",
        "image": agent.image,
        "args": agent_args(infd),
        "restartPolicy": "Always", // which makes it a native sidecar
        "env": agent_env(infd),
        "ports": [
            {"name": "gate", "containerPort": infd.spec.gate.port, "protocol": "TCP"},
            {"name": "agent", "containerPort": AGENT_PORT, "protocol": "TCP"},
        ],
        // As cheap as can be: until it passes the engine does not start, at every start of the sidecar (POD.md §10).
        "startupProbe": {"httpGet": {"path": "/livez", "port": AGENT_PORT}, "periodSeconds": 1, "failureThreshold": 120},
        // The supervisor looks after detector and gate; after it, nobody else does. A minute without an answer: it is out of traffic long
        // before, and what it had in flight is stuck. This ends the agent alone, never the engine.
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": AGENT_PORT},
            "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6, "terminationGracePeriodSeconds": 5,
        },
        "resources": agent.resources.as_ref().map_or(default, resources),
        "securityContext": security(),
    });
    container["volumeMounts"] = agent_mounts(agent.evidence.is_some());
    set_pull_policy(&mut container, agent.image_pull_policy);
    container
}

fn agent_mounts(evidence_is_kept: bool) -> Value {
    let mut mounts = json!([
        {"name": "page", "mountPath": PAGE_DIR, "readOnly": true},
        // not read-only: what was read of the log is taken out of it
        {"name": LOG_VOLUME, "mountPath": LOG_DIR},
        {"name": "agent", "mountPath": AGENT_DIR},
        {"name": "bundles", "mountPath": BUNDLE_DIR},
        {"name": "agent-tmp", "mountPath": "/tmp"},
        {"name": "token", "mountPath": TOKEN_DIR, "readOnly": true},
        {"name": "notes", "mountPath": NOTES_DIR, "readOnly": true},
    ]);
    if let (true, Some(list)) = (evidence_is_kept, mounts.as_array_mut()) {
        // a folder that no other pod can write, and all of them to be read: a pod that is gone tells nobody where its own is
        list.iter_mut()
            .filter(|mount| mount["name"] == "bundles")
            .for_each(|mount| mount["subPathExpr"] = json!("$(POD_NAME)"));
        list.push(json!({"name": "bundles", "mountPath": EVIDENCE_DIR, "readOnly": true}));
    }
    mounts
}

fn agent_args(infd: &InferenceDeployment) -> Vec<String> {
    let (spec, recovery) = (&infd.spec, &infd.spec.recovery);
    let mode = match recovery.mode {
        RecoveryMode::Observe => "Observe",
        RecoveryMode::Fence => "Fence",
        RecoveryMode::Recover => "Recover",
    };
    let flags = [
        ("--agent-listen", format!("0.0.0.0:{AGENT_PORT}")),
        ("--listen", format!("0.0.0.0:{}", spec.gate.port)),
        ("--engine-url", format!("http://127.0.0.1:{}", spec.engine.port)),
        ("--page-dir", PAGE_DIR.to_owned()),
        ("--agent-dir", AGENT_DIR.to_owned()),
        ("--bundle-dir", BUNDLE_DIR.to_owned()),
        ("--recovery-mode", mode.to_owned()),
        ("--unattended-after", recovery.unattended_after.clone()),
    ];
    let proof = (spec.rollout.proof == Proof::Tokens)
        .then(|| ("--prove-through", format!("http://127.0.0.1:{}", spec.gate.port)));
    let words = flags.into_iter().chain(proof).flat_map(|(flag, value)| [flag.to_owned(), value]);
    ["agent".to_owned(), "supervise".to_owned()].into_iter().chain(words).collect()
}

fn agent_env(infd: &InferenceDeployment) -> Vec<Value> {
    let value = |name: &str, value: &str| json!({"name": name, "value": value});
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}});
    let ours = [
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_UID", "metadata.uid"),
        field("NODE_NAME", "spec.nodeName"),
        value("TRUEBEAT_PAGE_DIR", PAGE_DIR),
        value("TRUEBEAT_NOTES_DIR", NOTES_DIR),
        // (by environment and not by flags: an agent of an earlier version does not end for it)
        value("TRUEBEAT_LOG_FILE", LOG_FILE),
        value("TRUEBEAT_TRIM_LOG", "true"),
        value("TRUEBEAT_UNATTENDED_WINDOW", &infd.spec.recovery.unattended_window),
    ];
    let (agent, gate) = (&infd.spec.agent, &infd.spec.gate);
    let policy = agent.policy.as_ref().map(policy_words).unwrap_or_default();
    let asked = [
        agent.log_filter.as_ref().map(|filter| value("TRUEBEAT_LOG", filter)),
        (!policy.is_empty()).then(|| value("TRUEBEAT_POLICY", &policy)),
        gate.in_flight_max.map(|most| value("TRUEBEAT_IN_FLIGHT_MAX", &most.to_string())),
        gate.client_idle_seconds.map(|seconds| value("TRUEBEAT_CLIENT_IDLE", &format!("{seconds}s"))),
    ];
    ours.into_iter().chain(asked.into_iter().flatten()).chain(agent.env.iter().map(variable)).collect()
}

/// As `truebeat run --policy` takes them. What cannot be read was refused before.
fn policy_words(policy: &Policy) -> String {
    let ms = |text: &str| humantime::parse_duration(text).ok().map(|duration| duration.as_millis().to_string());
    let durations = policy.durations().into_iter().filter_map(|(_, name, set)| Some((name, ms(set?)?)));
    let factor = policy.slow_factor.map(|factor| ("slow_factor", factor.to_string()));
    durations.chain(factor).map(|(name, number)| format!("{name}={number}")).collect::<Vec<_>>().join(",")
}

fn engine(infd: &InferenceDeployment) -> Value {
    let engine = &infd.spec.engine;
    let mut mounts = vec![
        json!({"name": "page", "mountPath": PAGE_DIR}),
        json!({"name": LOG_VOLUME, "mountPath": LOG_DIR}),
        json!({"name": "engine-tmp", "mountPath": "/tmp"}),
        // ranks talk through shared memory, and the runtime's own 64 MiB are not enough for them
        json!({"name": "shm", "mountPath": "/dev/shm"}),
    ];
    if source(infd).is_some_and(|source| source.file.is_none()) {
        mounts.push(json!({"name": "model", "mountPath": MODEL_DIR, "readOnly": true}));
    }
    let probe = |path: &str| json!({"path": path, "port": AGENT_PORT});
    let drain = format!("/drain?timeout_s={}", infd.spec.drain_seconds);
    let mut container = json!({
        "name": "engine",
        "image": engine.image,
        "env": engine_env(infd),
        // The fence: the kubelet asks the agent whether this engine may serve; off in 0.65 s median (POD.md §1).
        "readinessProbe": {"httpGet": probe("/readyz"), "periodSeconds": 1, "failureThreshold": 1},
        // The sidecar outlives the engine, so it can hold SIGTERM back until the requests are done (POD.md §9).
        "lifecycle": {"preStop": {"httpGet": probe(&drain)}},
        "securityContext": security(),
        "volumeMounts": mounts,
    });
    let args = engine_args(infd);
    for (key, words) in [("command", &engine.command), ("args", &args)] {
        if !words.is_empty() {
            container[key] = json!(words);
        }
    }
    if let Some(wanted) = &engine.resources {
        container["resources"] = resources(wanted);
    }
    set_pull_policy(&mut container, engine.image_pull_policy);
    container
}

fn engine_args(infd: &InferenceDeployment) -> Vec<String> {
    let engine = &infd.spec.engine;
    let mut args = Vec::new();
    if engine.kind == EngineKind::Truebeat {
        args.push("engine".to_owned());
        if let Some(path) = model_path(infd) {
            args.extend(["--model".to_owned(), path]);
        }
        args.extend(["--listen".to_owned(), format!("127.0.0.1:{}", engine.port)]);
    }
    args.extend(engine.args.iter().cloned());
    let split = engine.tensor_parallel.zip(ranks_flag(engine.kind));
    args.extend(split.into_iter().flat_map(|(ranks, flag)| [flag.to_owned(), ranks.to_string()]));
    args
}

/// How an engine is told over how many ranks each layer is split; nobody knows it of a custom one.
fn ranks_flag(kind: EngineKind) -> Option<&'static str> {
    match kind {
        EngineKind::Truebeat => Some("--tensor-parallel"),
        EngineKind::Vllm | EngineKind::SGLang => Some("--tensor-parallel-size"),
        EngineKind::Custom => None,
    }
}

/// Ours first, so that the user's values may refer to them; a `HOME` or `USER` of the user wins over ours.
fn engine_env(infd: &InferenceDeployment) -> Vec<Value> {
    let mut ours =
        vec![("TRUEBEAT_PAGE_DIR", PAGE_DIR.to_owned()), ("TRUEBEAT_ENGINE_PORT", infd.spec.engine.port.to_string())];
    // The agent cannot read the container's output. A volume of its own, so that what fills it is in the way of nothing else.
    ours.push(("TRUEBEAT_LOG_FILE", LOG_FILE.to_owned()));
    // Part of a stall's fingerprint: a container does not know of which image it is.
    ours.push(("TRUEBEAT_ENGINE_IMAGE", infd.spec.engine.image.clone()));
    ours.extend(model_path(infd).map(|path| ("TRUEBEAT_MODEL_PATH", path)));
    // The root is read-only; engines keep caches under their home.
    ours.push(("HOME", "/tmp".to_owned()));
    // PyTorch asks for the user's name when it is imported, and no image of an engine has a user 1000 in its /etc/passwd.
    ours.push(("USER", "truebeat".to_owned()));
    let theirs = &infd.spec.engine.env;
    ours.into_iter()
        .filter(|(name, _)| !theirs.iter().any(|variable| variable.name == *name))
        .map(|(name, value)| json!({"name": name, "value": value}))
        .chain(theirs.iter().map(variable))
        .collect()
}

fn variable(variable: &EnvVar) -> Value {
    let reference = variable.value_from.as_ref().and_then(|from| {
        let secret = from.secret_key_ref.as_ref().map(|key| ("secretKeyRef", key));
        secret.or(from.config_map_key_ref.as_ref().map(|key| ("configMapKeyRef", key)))
    });
    match (reference, &variable.value) {
        (Some((kind, key)), _) => {
            json!({"name": variable.name, "valueFrom": {kind: {"name": key.name, "key": key.key}}})
        }
        (None, Some(value)) => json!({"name": variable.name, "value": value}),
        (None, None) => json!({"name": variable.name}),
    }
}

fn volumes(infd: &InferenceDeployment) -> Vec<Value> {
    let memory = |name: &str, size: &str| json!({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}});
    let mut volumes = vec![
        memory("page", "16Mi"),
        memory(LOG_VOLUME, "16Mi"),
        memory("agent", "16Mi"),
        // no medium: bundles are on disk and count against the pod's ephemeral storage, never against its memory
        infd.spec.agent.evidence.as_ref().map_or_else(
            || json!({"name": "bundles", "emptyDir": {"sizeLimit": "4Gi"}}),
            |kept| json!({"name": "bundles", "persistentVolumeClaim": {"claimName": kept.claim_name}}),
        ),
        json!({"name": "agent-tmp", "emptyDir": {}}),
        json!({"name": "engine-tmp", "emptyDir": {}}),
        json!({"name": "shm", "emptyDir": {"medium": "Memory"}}),
        token(),
        notes(),
    ];
    let (pvc, oci) = source(infd).map_or((None, None), |source| (source.pvc.as_ref(), source.oci.as_ref()));
    if let Some(pvc) = pvc {
        volumes
            .push(json!({"name": "model", "persistentVolumeClaim": {"claimName": pvc.claim_name, "readOnly": true}}));
    }
    if let Some(oci) = oci {
        let mut image = json!({"reference": oci.reference});
        if let Some(policy) = oci.pull_policy {
            image["pullPolicy"] = json!(policy);
        }
        volumes.push(json!({"name": "model", "image": image}));
    }
    volumes
}

/// A token that is bound to the pod (the admission policy reads the pod's UID from it) and as short-lived as the API allows.
fn token() -> Value {
    json!({"name": "token", "projected": {"sources": [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
    ]}})
}

/// A person's fence, maintenance, what the gate must refuse (I7), and how far recovery goes, as files: the kubelet keeps them equal to the annotations, so the agent needs no
/// right to read its pod.
fn notes() -> Value {
    let note = |path: &str, annotation: &str| {
        let field = format!("metadata.annotations['{annotation}']");
        json!({"path": path, "fieldRef": {"apiVersion": "v1", "fieldPath": field}})
    };
    let items = [
        note("fence", ANNOTATION_FENCE),
        note("maintenance", ANNOTATION_MAINTENANCE),
        note("poison", ANNOTATION_POISON),
        note("recovery", ANNOTATION_RECOVERY),
    ];
    json!({"name": "notes", "downwardAPI": {"items": items}})
}

/// No right at all.
pub fn security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
    })
}

fn resources(wanted: &Resources) -> Value {
    let mut out = json!({});
    for (key, quantities) in [("requests", &wanted.requests), ("limits", &wanted.limits)] {
        if !quantities.is_empty() {
            out[key] = json!(quantities);
        }
    }
    out
}

fn set_pull_policy(container: &mut Value, policy: Option<ImagePullPolicy>) {
    if let Some(policy) = policy {
        container["imagePullPolicy"] = json!(policy);
    }
}

fn source(infd: &InferenceDeployment) -> Option<&ModelSource> {
    infd.spec.model.as_ref().map(|model| &model.source)
}

/// Where the engine's container sees the model.
fn model_path(infd: &InferenceDeployment) -> Option<String> {
    let source = source(infd)?;
    let mounted = source.pvc.as_ref().map(|pvc| &pvc.path).or(source.oci.as_ref().map(|oci| &oci.path));
    match (&source.file, mounted) {
        (Some(file), _) => Some(file.path.clone()),
        (None, Some(path)) if path.is_empty() => Some(MODEL_DIR.to_owned()),
        (None, Some(path)) => Some(format!("{MODEL_DIR}/{path}")),
        (None, None) => None,
    }
}

/// The kind as the API spells it.
pub fn kind_name(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Truebeat => "Truebeat",
        EngineKind::Vllm => "VLLM",
        EngineKind::SGLang => "SGLang",
        EngineKind::Custom => "Custom",
    }
}
