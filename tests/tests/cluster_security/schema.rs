//! H10: the rules (CEL) of the CRDs on the API server that is to keep them. Each refuses one bad object, by itself and in its own words, and
//! lets the good one beside it through. Dry runs, but for two objects that stand there so that they can be changed.

use anyhow::{Context, Result, ensure};
use crds::{EngineIncident, InferenceDeployment};
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::world::{World, infd};

const NAMESPACE: &str = "rules";
/// Those that stand there.
const STANDING: &str = "standing";

/// A rule as it is generated.
struct Rule {
    kind: String,
    /// Of the field that it is about, `[]` for whatever of a list.
    path: String,
    message: String,
}

/// An object that a rule is there to refuse, and the nearest good one.
struct Case {
    path: &'static str,
    /// What only the message of this rule says, among those of its path.
    words: &'static str,
    bad: Value,
    good: Value,
}

impl Case {
    fn is_of(&self, rule: &Rule) -> bool {
        self.bad["kind"] == *rule.kind && self.path == rule.path && rule.message.contains(self.words)
    }
}

/// Every rule has a case, every case a rule, and the API server sees both objects as the case says.
pub async fn rules(world: &World<'_>) -> Result<()> {
    let (rules, cases) = (generated()?, cases());
    for rule in &rules {
        let Rule { kind, path, message } = rule;
        ensure!(!message.is_empty(), "a rule of {kind} {path} has no words of its own");
        ensure!(cases.iter().any(|case| case.is_of(rule)), "no case is about a rule of {kind} {path}: {message}");
    }
    world.tenant(NAMESPACE)?;
    let standing = [infd(NAMESPACE, STANDING, json!({"replicas": 0})), incident(json!({}))];
    for object in &standing {
        apply(world, object, false).await.with_context(|| format!("{object}"))?;
    }
    let mut faults = Vec::new();
    for case in &cases {
        let mut of = rules.iter().filter(|rule| case.is_of(rule));
        let (Some(rule), None) = (of.next(), of.next()) else {
            faults.push(format!("{}: not one rule says '{}'", case.path, case.words));
            continue;
        };
        faults.extend(fault(world, case, rule).await);
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    println!(
        "      {} rules, {} bad objects refused by one each, as many good ones let through",
        rules.len(),
        cases.len()
    );
    let incidents: Api<EngineIncident> = Api::namespaced(world.client.clone(), NAMESPACE);
    incidents.delete(STANDING, &DeleteParams::default()).await?;
    world.leave(NAMESPACE).await
}

/// What the API server does not do as the case says.
async fn fault(world: &World<'_>, case: &Case, rule: &Rule) -> Option<String> {
    let Rule { path, message, .. } = rule;
    if let Err(error) = apply(world, &case.good, true).await {
        return Some(format!("{path}: a good object is refused: {error}"));
    }
    let status = match apply(world, &case.bad, true).await {
        Ok(()) => return Some(format!("{path}: nobody says '{message}' of {}", case.bad["spec"])),
        Err(kube::Error::Api(status)) => status,
        Err(error) => return Some(format!("{path}: {error}")),
    };
    let causes = status.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
    match causes {
        [cause] if cause.message.contains(message.as_str()) && placeless(&cause.field) == *path => None,
        _ => Some(format!("{path}: '{message}' should be all that is said, and this is: {}", status.message)),
    }
}

/// The path of a field without the places in lists. The API server calls the whole object `<nil>`.
fn placeless(field: &str) -> String {
    let mut path: String = field.chars().filter(|c| !c.is_ascii_digit()).collect();
    if path == "<nil>" {
        path.clear();
    }
    path
}

/// As users apply it, and with unknown fields refused: a bad object that is good but for a slip of this file's pen would be no case.
async fn apply(world: &World<'_>, object: &Value, dry_run: bool) -> Result<(), kube::Error> {
    let resource = match object["kind"].as_str() {
        Some("EngineIncident") => ApiResource::erase::<EngineIncident>(&()),
        _ => ApiResource::erase::<InferenceDeployment>(&()),
    };
    let api: Api<DynamicObject> = Api::namespaced_with(world.client.clone(), NAMESPACE, &resource);
    let params = PatchParams { dry_run, ..PatchParams::apply("a-user").validation_strict() };
    api.patch(object["metadata"]["name"].as_str().unwrap_or_default(), &params, &Patch::Apply(object)).await.map(drop)
}

/// All rules of both CRDs, wherever in the schema they are.
fn generated() -> Result<Vec<Rule>> {
    let mut rules = Vec::new();
    for (file, text) in crds::yaml::crdgen()? {
        let crd: Value = serde_saphyr::from_str(&text).with_context(|| file.clone())?;
        let kind = crd["spec"]["names"]["kind"].as_str().context("a kind")?.to_owned();
        let before = rules.len();
        for version in crd["spec"]["versions"].as_array().context("versions")? {
            rules_of(&kind, "", &version["schema"]["openAPIV3Schema"], &mut rules);
        }
        ensure!(rules.len() > before, "no rule was found in {file}");
    }
    Ok(rules)
}

fn rules_of(kind: &str, path: &str, schema: &Value, rules: &mut Vec<Rule>) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let message = rule["message"].as_str().unwrap_or_default().to_owned();
        rules.push(Rule { kind: kind.to_owned(), path: path.to_owned(), message });
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let dot = if path.is_empty() { "" } else { "." };
        rules_of(kind, &format!("{path}{dot}{name}"), property, rules);
    }
    for inner in ["items", "additionalProperties"] {
        if schema[inner].is_object() {
            rules_of(kind, &format!("{path}[]"), &schema[inner], rules);
        }
    }
}

fn cases() -> Vec<Case> {
    let name = |name: &str| infd(NAMESPACE, name, json!({}));
    let mut cases = vec![
        Case { path: "", words: "also names a Service", bad: name("chat.two"), good: name("chat-two") },
        Case {
            path: "spec",
            words: "one episode of one pod",
            bad: incident(json!({"episodeId": "another"})),
            good: incident(json!({"class": "DeviceWait"})),
        },
        Case {
            path: "spec",
            words: "gate.port cannot change",
            bad: infd(NAMESPACE, STANDING, json!({"replicas": 0, "gate": {"port": 8081}})),
            good: infd(NAMESPACE, STANDING, json!({"replicas": 0, "drainSeconds": 31})),
        },
    ];
    cases.extend(of_the_whole());
    cases.extend(of_containers());
    cases.extend(of_agents());
    cases.extend(of_sources());
    cases.extend(of_durations());
    cases
}

/// Of objects that differ by these fields of the spec; null takes one away.
fn case(path: &'static str, words: &'static str, bad: Value, good: Value) -> Case {
    let object = |spec: Value| {
        let mut object = infd(NAMESPACE, "chat", spec);
        if let Some(spec) = object["spec"].as_object_mut() {
            spec.retain(|_, value| !value.is_null());
        }
        object
    };
    Case { path, words, bad: object(bad), good: object(good) }
}

fn incident(with: Value) -> Value {
    let mut spec =
        json!({"deployment": "chat", "pod": "chat-1", "podUid": "u", "episodeId": "e", "class": "StepStalled"});
    for (key, value) in with.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
    json!({
        "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "EngineIncident",
        "metadata": {"name": STANDING, "namespace": NAMESPACE}, "spec": spec,
    })
}

fn engine(with: Value) -> Value {
    let mut engine = json!({"kind": "VLLM", "image": "simulated"});
    for (key, value) in with.as_object().into_iter().flatten() {
        engine[key] = value.clone();
    }
    json!({"engine": engine})
}

fn agent(with: Value) -> Value {
    let mut agent = json!({"image": "simulated"});
    for (key, value) in with.as_object().into_iter().flatten() {
        agent[key] = value.clone();
    }
    json!({"agent": agent})
}

fn of_the_whole() -> [Case; 4] {
    let rollout = |most: u64| json!({"rollout": {"soakSeconds": 60, "progressDeadlineSeconds": most}});
    let pauses = |most: &str| json!({"recovery": {"restartBackoff": "90s", "restartBackoffMax": most}});
    let without_model = |kind: &str| {
        let mut spec = engine(json!({"kind": kind}));
        spec["model"] = Value::Null;
        spec
    };
    [
        case("spec", "needs model.source", without_model("Truebeat"), without_model("VLLM")),
        case("spec", "must differ", engine(json!({"port": 8080})), engine(json!({"port": 8081}))),
        case("spec", "would ever be in time", rollout(60), rollout(61)),
        case("spec", "the pause that it bounds", pauses("1m29s"), pauses("1m30s")),
    ]
}

fn of_containers() -> Vec<Case> {
    let secret = json!({"secretKeyRef": {"name": "s", "key": "k"}});
    let both = json!({"secretKeyRef": {"name": "s", "key": "k"}, "configMapKeyRef": {"name": "c", "key": "k"}});
    let ranks = |kind: &str| engine(json!({"kind": kind, "tensorParallel": 2}));
    let split = |ranks: u8| engine(json!({"kind": "Truebeat", "tensorParallel": ranks}));
    let told = |flag: &str| engine(json!({"tensorParallel": 2, "args": [flag, "2"]}));
    let gpus = |count: &str| engine(json!({"tensorParallel": 2, "resources": {"limits": {"nvidia.com/gpu": count}}}));
    let mut cases = vec![
        case("spec.engine", "kind Custom", ranks("Custom"), ranks("SGLang")),
        case("spec.engine", "at most 16 ranks", split(17), split(16)),
        case("spec.engine", "say it once", told("--tensor-parallel-size"), told("--pipeline-parallel-size")),
        case("spec.engine", "a GPU for each rank", gpus("1"), gpus("2")),
    ];
    let of_engine = |variable: Value| engine(json!({"env": [variable]}));
    let of_agent = |variable: Value| agent(json!({"env": [variable]}));
    let named = |name: &str| json!({"name": name, "value": "1"});
    let from = |source: &Value| json!({"name": "A", "valueFrom": source});
    let twice = json!({"name": "A", "value": "1", "valueFrom": secret});
    let env = [
        (["spec.engine.env[].name", "spec.agent.env[].name"], "start with TRUEBEAT_", named("TRUEBEAT_X"), named("A")),
        (["spec.engine.env[].valueFrom", "spec.agent.env[].valueFrom"], "exactly one", from(&both), from(&secret)),
        (["spec.engine.env[]", "spec.agent.env[]"], "not both", twice, named("A")),
    ];
    for ([engines, agents], words, bad, good) in env {
        cases.push(case(agents, words, of_agent(bad.clone()), of_agent(good.clone())));
        cases.push(case(engines, words, of_engine(bad), of_engine(good)));
    }
    for (list, words) in [("requests", "requests: a quantity"), ("limits", "limits: a quantity")] {
        let resources = |cpu: &str| json!({list: {"cpu": cpu}});
        let of_agent = |cpu: &str| agent(json!({"resources": resources(cpu)}));
        let of_engine = |cpu: &str| engine(json!({"resources": resources(cpu)}));
        cases.push(case("spec.agent.resources", words, of_agent("half"), of_agent("500m")));
        cases.push(case("spec.engine.resources", words, of_engine("-1"), of_engine("1")));
    }
    cases
}

fn of_agents() -> Vec<Case> {
    let variable = |name: &str| agent(json!({"env": [{"name": name}]}));
    let policy = |bounds: Value| agent(json!({"policy": bounds}));
    let far = |floor: &str| policy(json!({"nativeFloor": floor, "leaseCap": "20m"}));
    let cap = |cap: &str| policy(json!({"leaseCap": cap}));
    let strange = |floor: &str| policy(json!({"foreignFloor": floor}));
    let mut cases = vec![
        case("spec.agent", "are the operator's", variable("POD_NAME"), variable("NVIDIA_VISIBLE_DEVICES")),
        case("spec.agent.policy", "nativeFloor is above patienceCap", far("301s"), far("5m")),
        case("spec.agent.policy", "nativeFloor is above leaseCap", cap("299ms"), cap("300ms")),
        case("spec.agent.policy", "foreignFloor is above patienceCap", strange("5m1ms"), strange("300s")),
    ];
    let bound = |field: &str, text: &str| policy(json!({field: text}));
    for (path, field) in [
        ("spec.agent.policy.decodeStarved", "decodeStarved"),
        ("spec.agent.policy.idlePatience", "idlePatience"),
        ("spec.agent.policy.leaseCap", "leaseCap"),
        ("spec.agent.policy.patienceCap", "patienceCap"),
        ("spec.agent.policy.slowToken", "slowToken"),
        ("spec.agent.policy.startupLeaseCap", "startupLeaseCap"),
        ("spec.agent.policy.startupSilence", "startupSilence"),
    ] {
        cases.push(case(path, "at most 24h", bound(field, "24h1ms"), bound(field, "24h")));
    }
    // floors that are too long would be above their caps as well, and another rule says that: these are nothing
    for (path, field) in
        [("spec.agent.policy.foreignFloor", "foreignFloor"), ("spec.agent.policy.nativeFloor", "nativeFloor")]
    {
        cases.push(case(path, "more than nothing", bound(field, "0s"), bound(field, "1ms")));
    }
    cases
}

fn of_sources() -> [Case; 4] {
    let source = |source: Value| json!({"model": {"source": source}});
    let claim = |path: &str| source(json!({"pvc": {"claimName": "models", "path": path}}));
    let image = |reference: &str, path: &str| source(json!({"oci": {"reference": reference, "path": path}}));
    let two = source(json!({"pvc": {"claimName": "models"}, "file": {"path": "/models/demo"}}));
    [
        case("spec.model.source", "exactly one of file, pvc and oci", two, claim("demo")),
        case("spec.model.source.pvc.path", "the volume's root", claim("../demo"), claim("a/demo")),
        case("spec.model.source.oci.path", "the image's root", image("demo:1", "/demo"), image("demo:1", "demo")),
        case("spec.model.source.oci.reference", "without blanks", image("demo 1", ""), image("demo:1", "")),
    ]
}

fn of_durations() -> Vec<Case> {
    let is = |field: &str, text: &str| json!({"recovery": {field: text}});
    let words = "a duration is a number with a unit";
    let long = |path: &'static str, field| case(path, words, is(field, "721h"), is(field, "720h"));
    vec![
        long("spec.recovery.avoidFor", "avoidFor"),
        long("spec.recovery.incidentTtl", "incidentTtl"),
        long("spec.recovery.poisonFor", "poisonFor"),
        long("spec.recovery.restartBackoffMax", "restartBackoffMax"),
        long("spec.recovery.stabilityWindow", "stabilityWindow"),
        long("spec.recovery.trialAfter", "trialAfter"),
        long("spec.recovery.unattendedAfter", "unattendedAfter"),
        long("spec.recovery.unattendedWindow", "unattendedWindow"),
        // one that is too long would be longer than the longest pause as well, and another rule says that: this one has too many digits
        case(
            "spec.recovery.restartBackoff",
            words,
            is("restartBackoff", "00000001s"),
            is("restartBackoff", "0000001s"),
        ),
        case("spec.recovery.incidentTtl", "at least 1m", is("incidentTtl", "59s"), is("incidentTtl", "60s")),
        case("spec.recovery.trialAfter", "at least 1m", is("trialAfter", "59s"), is("trialAfter", "60s")),
    ]
}
