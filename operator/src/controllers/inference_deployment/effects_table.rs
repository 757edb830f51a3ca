//! The table of P11 ([`super::effects`]): each field of the spec, a change of it, and where that is seen.

use serde_json::{Value, json};

/// Where a change is seen.
pub enum Seen {
    /// This text is in the children only with it.
    Children(&'static str),
    /// This text is in the plan for a troubled world only with it.
    Plan(&'static str),
    /// This text is in that plan only without it.
    PlanLoses(&'static str),
}
use Seen::{Children, Plan, PlanLoses};

fn oci() -> Value {
    let oci = json!({"reference": "that:1", "pullPolicy": "Always", "path": "that/path"});
    json!({"model": {"source": {"file": null, "oci": oci}}})
}

/// Path, what is changed in the spec (a merge patch), and where it shows.
pub fn table() -> Vec<(&'static str, Value, Seen)> {
    let engine = |value: Value| json!({"engine": value});
    let agent = |value: Value| json!({"agent": value});
    let bound = |path: &'static str, value: &str, seen: Seen| {
        let field = path.rsplit('.').next().unwrap_or(path);
        (path, json!({"agent": {"policy": {field: value}}}), seen)
    };
    let env = |value: Value| json!({"engine": {"env": [value]}});
    let variable = |source: &str| json!({"name": "A", "valueFrom": {source: {"name": "that-name", "key": "that-key"}}});
    let from = |source: &str| env(variable(source));
    let agent_from = |source: &str| agent(json!({"env": [variable(source)]}));
    let pvc = json!({"model": {"source": {"file": null, "pvc": {"claimName": "that-claim", "path": "that/path"}}}});
    let recovery = |value: Value| json!({"recovery": value});
    let rollout = |value: Value| json!({"rollout": value});
    let overlay = |value: Value| json!({"podOverlay": value});
    vec![
        ("replicas", json!({"replicas": 7}), Children("\"replicas\":7")),
        ("model.source.file.path", json!({"model": {"source": {"file": {"path": "/that"}}}}), Children("\"/that\"")),
        ("model.source.pvc.claimName", pvc.clone(), Children("\"claimName\":\"that-claim\"")),
        ("model.source.pvc.path", pvc, Children("/models/that/path")),
        (
            "model.source.oci.reference",
            oci(),
            Children("\"image\":{\"pullPolicy\":\"Always\",\"reference\":\"that:1\"}"),
        ),
        ("model.source.oci.pullPolicy", oci(), Children("\"image\":{\"pullPolicy\":\"Always\"")),
        ("model.source.oci.path", oci(), Children("/models/that/path")),
        ("engine.tensorParallel", engine(json!({"tensorParallel": 7})), Children("\"--tensor-parallel\",\"7\"")),
        (
            "engine.kind",
            engine(json!({"kind": "SGLang"})),
            Children("\"inference.truebeat.io/engine-kind\":\"SGLang\""),
        ),
        ("engine.image", engine(json!({"image": "that:1"})), Children("that:1")),
        (
            "engine.imagePullPolicy",
            engine(json!({"imagePullPolicy": "Always"})),
            Children("\"imagePullPolicy\":\"Always\""),
        ),
        ("engine.command[]", engine(json!({"command": ["that-program"]})), Children("that-program")),
        ("engine.args[]", engine(json!({"args": ["--that"]})), Children("\"--that\"")),
        ("engine.env[].name", env(json!({"name": "THAT"})), Children("\"THAT\"")),
        ("engine.env[].value", env(json!({"name": "A", "value": "that"})), Children("\"that\"")),
        (
            "engine.env[].valueFrom.secretKeyRef.name",
            from("secretKeyRef"),
            Children("\"secretKeyRef\":{\"key\":\"that-key\",\"name\":\"that-name\"}"),
        ),
        ("engine.env[].valueFrom.secretKeyRef.key", from("secretKeyRef"), Children("that-key")),
        ("engine.env[].valueFrom.configMapKeyRef.name", from("configMapKeyRef"), Children("that-name")),
        (
            "engine.env[].valueFrom.configMapKeyRef.key",
            from("configMapKeyRef"),
            Children("\"configMapKeyRef\":{\"key\":\"that-key\",\"name\":\"that-name\"}"),
        ),
        (
            "engine.resources.requests{}",
            engine(json!({"resources": {"requests": {"cpu": "77m"}}})),
            Children("\"requests\":{\"cpu\":\"77m\"}"),
        ),
        (
            "engine.resources.limits{}",
            engine(json!({"resources": {"limits": {"cpu": "77m"}}})),
            Children("\"limits\":{\"cpu\":\"77m\"}"),
        ),
        ("engine.port", engine(json!({"port": 8777})), Children("http://127.0.0.1:8777")),
        ("agent.image", agent(json!({"image": "that:1"})), Children("that:1")),
        (
            "agent.imagePullPolicy",
            agent(json!({"imagePullPolicy": "Always"})),
            Children("\"imagePullPolicy\":\"Always\""),
        ),
        (
            "agent.resources.requests{}",
            agent(json!({"resources": {"requests": {"cpu": "77m"}}})),
            Children("\"requests\":{\"cpu\":\"77m\"}"),
        ),
        (
            "agent.resources.limits{}",
            agent(json!({"resources": {"limits": {"cpu": "77m"}}})),
            Children("\"limits\":{\"cpu\":\"77m\"}"),
        ),
        ("agent.env[].name", agent(json!({"env": [{"name": "THAT"}]})), Children("\"THAT\"")),
        ("agent.env[].value", agent(json!({"env": [{"name": "A", "value": "that"}]})), Children("\"that\"")),
        (
            "agent.env[].valueFrom.secretKeyRef.name",
            agent_from("secretKeyRef"),
            Children("\"secretKeyRef\":{\"key\":\"that-key\",\"name\":\"that-name\"}"),
        ),
        ("agent.env[].valueFrom.secretKeyRef.key", agent_from("secretKeyRef"), Children("that-key")),
        ("agent.env[].valueFrom.configMapKeyRef.name", agent_from("configMapKeyRef"), Children("that-name")),
        (
            "agent.env[].valueFrom.configMapKeyRef.key",
            agent_from("configMapKeyRef"),
            Children("\"configMapKeyRef\":{\"key\":\"that-key\",\"name\":\"that-name\"}"),
        ),
        (
            "agent.logFilter",
            agent(json!({"logFilter": "that=debug"})),
            Children("\"TRUEBEAT_LOG\",\"value\":\"that=debug\""),
        ),
        bound("agent.policy.decodeStarved", "77ms", Children("decode_starved_ms=77\"")),
        bound("agent.policy.foreignFloor", "77ms", Children("foreign_floor_ms=77\"")),
        bound("agent.policy.idlePatience", "77s", Children("idle_patience_ms=77000\"")),
        bound("agent.policy.leaseCap", "7m", Children("lease_cap_ms=420000\"")),
        bound("agent.policy.nativeFloor", "77ms", Children("native_floor_ms=77\"")),
        bound("agent.policy.patienceCap", "7m", Children("patience_cap_ms=420000\"")),
        bound("agent.policy.slowToken", "7s", Children("slow_token_ms_min=7000\"")),
        bound("agent.policy.startupLeaseCap", "1h1m", Children("startup_lease_cap_ms=3660000\"")),
        bound("agent.policy.startupSilence", "7m", Children("startup_silence_ms=420000\"")),
        ("agent.policy.slowFactor", agent(json!({"policy": {"slowFactor": 7}})), Children("slow_factor=7\"")),
        (
            "agent.evidence.claimName",
            agent(json!({"evidence": {"claimName": "that-claim"}})),
            Children("\"name\":\"bundles\",\"persistentVolumeClaim\":{\"claimName\":\"that-claim\"}"),
        ),
        ("recovery.mode", recovery(json!({"mode": "Observe"})), Plan("\\\"mode\\\":\\\"Observe\\\"")),
        ("recovery.maxUnavailable", recovery(json!({"maxUnavailable": 2})), Plan("Grant { episode: \"e-b\"")),
        (
            "recovery.lastReplica",
            recovery(json!({"lastReplica": "Fence"})),
            PlanLoses("\"truebeat.io/last-serving\": Some"),
        ),
        ("recovery.holdPercent", recovery(json!({"holdPercent": 50})), Plan("3 of 5 replicas stall at once")),
        (
            "recovery.trialAfter",
            recovery(json!({"holdPercent": 50, "trialAfter": "77m"})),
            Plan("one is tried when they have been held for 1h 17m"),
        ),
        (
            "recovery.restartsBeforeReplace",
            recovery(json!({"restartsBeforeReplace": 1})),
            Plan("pod_uid: \"uid-a\", action: Replace"),
        ),
        ("recovery.restartBackoff", recovery(json!({"restartBackoff": "61s"})), Plan("Grant { episode: \"e-b\"")),
        (
            "recovery.restartBackoffMax",
            recovery(json!({"stabilityWindow": "1h", "restartBackoff": "50s", "restartBackoffMax": "50s"})),
            Plan("pod_uid: \"uid-a\", action: Replace"),
        ),
        (
            "recovery.stabilityWindow",
            recovery(json!({"stabilityWindow": "1h"})),
            Plan("pod_uid: \"uid-a\", action: Replace"),
        ),
        (
            "recovery.unattendedAfter",
            recovery(json!({"unattendedAfter": "77m"})),
            Plan("\\\"unattendedAfter\\\":\\\"77m\\\""),
        ),
        (
            "recovery.unattendedWindow",
            recovery(json!({"unattendedWindow": "77m"})),
            Plan("\\\"unattendedWindow\\\":\\\"77m\\\""),
        ),
        (
            "recovery.avoidFor",
            recovery(json!({"restartsBeforeReplace": 1, "avoidNodesPercent": 60, "avoidFor": "77m"})),
            Plan("node: \"n1\", gpu_uuids: [], until: \"2026-01-01T01:17:30Z\""),
        ),
        (
            "recovery.avoidNodesPercent",
            recovery(json!({"restartsBeforeReplace": 1, "avoidNodesPercent": 60})),
            Plan("node: \"n1\", gpu_uuids: [], until"),
        ),
        (
            "recovery.poisonRequests",
            recovery(json!({"poisonRequests": "Ignore"})),
            PlanLoses("\"truebeat.io/poison\": Some"),
        ),
        // the second of two stalls of one request, and 77 minutes
        ("recovery.poisonFor", recovery(json!({"poisonFor": "77m"})), Plan("1767230222000")),
        (
            "recovery.incidentTtl",
            recovery(json!({"incidentTtl": "77m"})),
            Plan("deletes: [(\"chat-old\", \"uid-old\")]"),
        ),
        ("drainSeconds", json!({"drainSeconds": 77}), Children("/drain?timeout_s=77")),
        ("gate.port", json!({"gate": {"port": 8777}}), Children("\"targetPort\":8777")),
        (
            "gate.inFlightMax",
            json!({"gate": {"inFlightMax": 77}}),
            Children("\"TRUEBEAT_IN_FLIGHT_MAX\",\"value\":\"77\""),
        ),
        (
            "gate.clientIdleSeconds",
            json!({"gate": {"clientIdleSeconds": 77}}),
            Children("\"TRUEBEAT_CLIENT_IDLE\",\"value\":\"77s\""),
        ),
        ("rollout.proof", rollout(json!({"proof": "None"})), Children("\"--unattended-after\",\"5m\"]")),
        ("rollout.soakSeconds", rollout(json!({"soakSeconds": 77})), Children("\"minReadySeconds\":77")),
        (
            "rollout.progressDeadlineSeconds",
            rollout(json!({"progressDeadlineSeconds": 777})),
            Children("\"progressDeadlineSeconds\":777"),
        ),
        ("rollout.maxSurge", rollout(json!({"maxSurge": 7})), Children("\"maxSurge\":7")),
        (
            "rollout.maxUnavailable",
            rollout(json!({"maxUnavailable": 7})),
            Children("\"maxUnavailable\":7,\"selector\""),
        ),
        ("rollout.toleratedStalls", rollout(json!({"toleratedStalls": 3})), PlanLoses("RolledBack(")),
        ("rollout.onFailure", rollout(json!({"onFailure": "Hold"})), Plan("\"paused\": Bool(true)")),
        ("rollout.attempt", rollout(json!({"attempt": 1})), PlanLoses(FIRST_REVISION)),
        (
            "scaling.duringIncidents",
            json!({"scaling": {"duringIncidents": "Hold"}}),
            Plan("5 replicas are wanted, 4 stay"),
        ),
        (
            "scaling.holdSecondsMax",
            json!({"scaling": {"duringIncidents": "Hold", "holdSecondsMax": 1}}),
            PlanLoses("5 replicas are wanted, 4 stay"),
        ),
        (
            "podOverlay.metadata.labels{}",
            overlay(json!({"metadata": {"labels": {"that": "label"}}})),
            Children("\"that\":\"label\""),
        ),
        (
            "podOverlay.metadata.annotations{}",
            overlay(json!({"metadata": {"annotations": {"that": "note"}}})),
            Children("\"that\":\"note\""),
        ),
        (
            "podOverlay.spec",
            overlay(json!({"spec": {"nodeSelector": {"that": "node"}}})),
            Children("\"nodeSelector\":{\"that\":\"node\"}"),
        ),
    ]
}

/// Stands for the revision of the unchanged spec, which is known only at run time.
pub const FIRST_REVISION: &str = "(first revision)";
