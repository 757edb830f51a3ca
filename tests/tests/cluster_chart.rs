//! The chart, without a cluster: what it renders is what `operator manifests` prints, wrong values are refused with words that help, the
//! alerts do what their tests say. (On a cluster it is installed, upgraded, rolled back and removed by the e2e story `chart`.)
//! The programs helm, kubectl and promtool are those of `tests/tools`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use truebeat_tests::cluster::tools;
use truebeat_tests::queries::{self, Query};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/truebeat");
const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../operator/manifests");

fn program(name: &str) -> PathBuf {
    let path = tools::folder().unwrap().join(name);
    assert!(path.is_file(), "{} is not built: run tests/tools/build.sh", path.display());
    path
}

fn run(name: &str, args: &[&str], dir: &Path) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(program(name));
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME", "HOME"] {
        command.env(variable, home.path());
    }
    command.args(args).current_dir(dir).output().unwrap()
}

fn template(sets: &[&str]) -> Output {
    let mut args = vec!["template", "truebeat", CHART, "--namespace", "truebeat-system"];
    for set in sets {
        args.extend(["--set", set]);
    }
    run("helm", &args, CHART.as_ref())
}

/// The objects of a YAML stream, by kind and name.
fn objects(yaml: &str) -> Vec<(String, Value)> {
    let mut list = Vec::new();
    for document in yaml.split("\n---") {
        if document.lines().all(|line| line.trim().is_empty() || line.starts_with('#') || line == "---") {
            continue;
        }
        let object: Value = serde_saphyr::from_str(document).unwrap_or_else(|error| panic!("{error}: {document}"));
        let name = format!("{}/{}", object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        list.push((name, object));
    }
    list
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What helm adds to every object and a plain manifest has not.
fn without_helms_own(mut object: Value) -> Value {
    if let Some(labels) = object["metadata"]["labels"].as_object_mut() {
        let ours = ["app.kubernetes.io/name", "app.kubernetes.io/component"];
        labels.retain(|key, _| ours.contains(&key.as_str()) || key.starts_with("rbac.authorization.k8s.io/"));
    }
    if ["Lease", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
        .iter()
        .any(|kind| object["kind"] == *kind)
    {
        object["metadata"].as_object_mut().unwrap().remove("annotations"); // that helm keeps it
    }
    object
}

#[test]
fn the_chart_renders_what_the_operator_prints() {
    let charted = objects(&stdout(&template(&[])));
    let plain = objects(&std::fs::read_to_string(format!("{MANIFESTS}/install.yaml")).unwrap());
    let mut compared = 0;
    for (name, object) in plain.into_iter().filter(|(name, _)| !name.starts_with("Namespace/")) {
        let twin = charted.iter().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("the chart lacks {name}"));
        assert_eq!(without_helms_own(twin.1.clone()), object, "{name}");
        compared += 1;
    }
    assert_eq!(compared, 15);
    let crds = charted.iter().filter(|(name, _)| name.starts_with("CustomResourceDefinition/"));
    assert!(
        crds.clone().count() == 2
            && crds.clone().all(|(_, crd)| crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep")
    );
}

/// With one namespace to look after nothing of the cluster is asked for, and nothing beyond it scraped: two installations would count each
/// agent twice.
#[test]
fn an_operator_of_one_namespace_gets_a_role_there_and_no_right_on_nodes() {
    let all = objects(&stdout(&template(&["watchNamespace=serving", "podMonitor.enabled=true"])));
    let named = |kind: &str| {
        all.iter().filter(|(name, _)| name.starts_with(kind)).map(|(_, object)| object).collect::<Vec<_>>()
    };
    assert!(named("ClusterRole").is_empty(), "neither role nor binding");
    let roles = named("Role/");
    let places: Vec<_> = roles.iter().map(|role| role["metadata"]["namespace"].as_str().unwrap()).collect();
    assert_eq!(places, ["serving", "truebeat-system"]);
    assert!(!roles.iter().any(|role| role["rules"].to_string().contains("\"nodes")));
    let monitors = named("PodMonitor/");
    let places: Vec<_> =
        monitors.iter().map(|monitor| &monitor["spec"]["namespaceSelector"]["matchNames"][0]).collect();
    assert_eq!(places.iter().filter(|place| **place == "serving").count(), 2, "{places:?}");
}

/// Every value has an effect: with it set, the rendered text differs, and holds what it should.
#[test]
fn every_value_shows_in_what_is_rendered() {
    let plain = stdout(&template(&[]));
    let cases = [
        ("image.repository=registry.example/operator", "image: registry.example/operator:0.1.0"),
        ("image.tag=v9", "image: truebeat-operator:v9"),
        (
            "image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "image: truebeat-operator@sha256:0123",
        ),
        ("image.pullPolicy=Always", "imagePullPolicy: Always"),
        ("imagePullSecrets[0].name=registry", "imagePullSecrets:"),
        ("replicas=3", "replicas: 3"),
        ("watchNamespace=serving", "TRUEBEAT_WATCH_NAMESPACE"),
        ("logFilter=debug", "value: \"debug\""),
        ("confine=false", "TRUEBEAT_NO_CONFINE"),
        ("fleet.restartsPercent=25", "TRUEBEAT_FLEET_RESTARTS_PERCENT"),
        ("fleet.holdPercent=100", "TRUEBEAT_FLEET_HOLD_PERCENT"),
        ("fleet.nodeRestartsMax=1", "TRUEBEAT_NODE_RESTARTS_MAX"),
        ("fleet.domainRestartsMax=3", "TRUEBEAT_DOMAIN_RESTARTS_MAX"),
        ("fleet.domainTopologyKey=example.com/rack", "TRUEBEAT_DOMAIN_TOPOLOGY_KEY"),
        ("serviceAccount.annotations.team=serving", "team: serving"),
        ("resources.requests.cpu=70m", "cpu: 70m"),
        ("podAnnotations.one=two", "one: two"),
        ("podLabels.tier=control", "tier: control"),
        ("nodeSelector.disk=ssd", "disk: ssd"),
        ("tolerations[0].operator=Exists", "tolerations:"),
        ("affinity.nodeAffinity.x=y", "nodeAffinity:"),
        ("topologySpreadConstraints[0].maxSkew=1", "maxSkew: 1"),
        ("priorityClassName=high", "priorityClassName: \"high\""),
        ("networkPolicy.enabled=true", "kind: NetworkPolicy"),
        ("podMonitor.enabled=true", "name: truebeat-engines"),
        (
            "prometheusRule.enabled=true",
            "runbook_url: https://github.com/truebeat/truebeat/blob/main/docs/runbooks/TruebeatMassStall.md",
        ),
        ("dashboard.enabled=true", "grafana_dashboard: \"1\""),
    ];
    for (set, wanted) in cases {
        let rendered = stdout(&template(&[set]));
        assert!(
            rendered.contains(wanted) && !plain.contains(wanted),
            "--set {set}: `{wanted}` is not there, or always"
        );
    }
    for (set, gone) in [
        ("crds.install=false", "CustomResourceDefinition"),
        ("crds.keep=false", "helm.sh/resource-policy: keep\n  name: engineincidents"), // (the Lease is kept in any case)
        ("crds.keep=false", "annotations: {helm.sh/resource-policy: keep}"), // of the policy of agents that outlive the chart
        ("admissionPolicy.install=false", "ValidatingAdmissionPolicy"),
        ("admissionPolicy.knownBad=false", "truebeat-known-bad"),
        ("lease.install=false", "kind: Lease"),
        ("rbac.aggregate=false", "rbac.authorization.k8s.io/aggregate-to-"),
        ("podDisruptionBudget.enabled=false", "kind: PodDisruptionBudget"),
        ("podDisruptionBudget.enabled=false", "unhealthyPodEvictionPolicy: AlwaysAllow"), // or a sick candidate blocks them
        ("replicas=1", "kind: PodDisruptionBudget"), // one candidate and a budget of one would block every drain
    ] {
        assert!(
            plain.contains(gone) && !stdout(&template(&[set])).contains(gone),
            "--set {set}: {gone} is still there"
        );
    }
    let monitors = ["podMonitor.enabled=true", "podMonitor.interval=7s", "podMonitor.labels.release=prom"];
    let monitors = stdout(&template(&monitors));
    for each in ["interval: 7s", "release: prom"] {
        assert_eq!(monitors.matches(each).count(), 3, "{each}: operator, agents, engines");
    }
    let two = stdout(&template(&["podMonitor.enabled=true", "podMonitor.engines=false"]));
    assert!(two.contains("name: truebeat-agents") && !two.contains("truebeat-engines"));
    let rules = [
        "prometheusRule.enabled=true",
        "prometheusRule.labels.role=alert",
        "prometheusRule.runbookUrl=https://wiki.example/runbooks",
        "prometheusRule.startMax=1h17m",
    ];
    let rules = stdout(&template(&rules));
    assert!(rules.contains("role: alert") && rules.contains("https://wiki.example/runbooks/TruebeatRestartLoop.md"));
    assert_eq!(rules.matches("for: 1h17m").count(), 1, "TruebeatNothingReady's");
    // (a fraction comes as text from --set, and as a number from a file)
    let objectives = ["prometheusRule.enabled=true", "prometheusRule.objectives.requests=99.9"];
    let objectives = stdout(&template(&objectives));
    for (name, expr) in [("truebeat_gate_requests", "1 - 99.9 / 100"), ("truebeat_verdict", "1 - 99 / 100")] {
        let line = format!("expr: vector({expr})\n      record: slo:{name}:budget");
        assert!(objectives.contains(&line), "{line}");
    }
    let policy = ["networkPolicy.enabled=true", "networkPolicy.from[0].namespaceSelector.matchLabels.name=monitoring"];
    let policy = stdout(&template(&policy));
    assert!(policy.contains("name: monitoring"));
    assert_eq!(policy.matches("app.kubernetes.io/component: test").count(), 2, "`helm test` is let in");
    for (set, wanted) in [
        ("nodeSelector.disk=ssd", "disk: ssd"),
        ("tolerations[0].operator=Exists", "tolerations:"),
        ("priorityClassName=high", "priorityClassName: \"high\""),
    ] {
        assert_eq!(
            stdout(&template(&[set])).matches(wanted).count(),
            2,
            "{set}: `helm test` runs where the operator may"
        );
    }
    let ports = ["networkPolicy.enabled=true", "networkPolicy.apiServerPorts={8443}"];
    assert!(stdout(&template(&ports)).contains("port: 8443"));
    assert!(stdout(&template(&["dashboard.enabled=true", "dashboard.labels.mine=yes1"])).contains("mine: yes1"));
    let sets = "watchNamespace=serving,prometheusRule.enabled=true,admissionPolicy.install=false";
    let notes = ["install", "truebeat", CHART, "--dry-run=client", "--set", sets];
    let notes = stdout(&run("helm", &notes, CHART.as_ref()));
    let kept = "kubectl delete validatingadmissionpolicybinding,validatingadmissionpolicy truebeat-agent-own-pod-only";
    for each in ["\nNOTES:\n", kept, "belong in one\nrelease of the cluster alone"] {
        assert!(notes.contains(each), "what the notes lack: {each}");
    }
}

/// Pods as the operator makes them, by the snapshot that its own tests hold.
const CHILDREN: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../operator/src/controllers/inference_deployment/build/snapshots/",
    "operator__controllers__inference_deployment__build__tests__children_of_a_truebeat_engine.snap"
);

/// A PodMonitor that selects nobody, or names a port that nobody has, is silence on every dashboard.
#[test]
fn pod_monitors_find_the_pods_that_there_are() {
    let rendered = objects(&stdout(&template(&["podMonitor.enabled=true"])));
    let of = |name: &str| rendered.iter().find(|(other, _)| other == name).map(|(_, object)| object).unwrap();
    let snapshot = std::fs::read_to_string(CHILDREN).unwrap();
    let children: Value = serde_json::from_str(snapshot.splitn(3, "---\n").nth(2).unwrap()).unwrap();
    let engine = &children.as_array().unwrap().iter().find(|child| child["kind"] == "Deployment").unwrap()["spec"];
    let operator = &of("Deployment/truebeat-operator")["spec"];
    for (monitor, template) in [
        (of("PodMonitor/truebeat-operator"), &operator["template"]),
        (of("PodMonitor/truebeat-agents"), &engine["template"]),
        (of("PodMonitor/truebeat-engines"), &engine["template"]),
    ] {
        for (label, value) in monitor["spec"]["selector"]["matchLabels"].as_object().unwrap() {
            assert_eq!(&template["metadata"]["labels"][label], value, "{label}");
        }
        let lists = ["containers", "initContainers"].map(|list| template["spec"][list].as_array().cloned());
        let ports =
            lists.into_iter().flatten().flatten().flat_map(|c| c["ports"].as_array().cloned().unwrap_or_default());
        let named: Vec<Value> = ports.map(|port| port["name"].clone()).collect();
        let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
        assert!(named.contains(&endpoint["port"]), "{} of {named:?}", endpoint["port"]);
        for relabeling in endpoint["relabelings"].as_array().into_iter().flatten() {
            assert!(relabeling["action"].is_string(), "the CRD adds it, and Argo CD is never in sync: {relabeling}");
            let labels = template["metadata"]["labels"].as_object().unwrap();
            let meta = |label: &String| {
                let word: String = label.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
                format!("__meta_kubernetes_pod_label_{word}")
            };
            let source = relabeling["sourceLabels"][0].as_str().unwrap();
            // (an annotation is somebody's wish, and need not be there)
            let wish = source == "__meta_kubernetes_pod_annotation_prometheus_io_scrape";
            assert!(wish || labels.keys().map(meta).any(|meta| source == meta), "{relabeling}");
        }
    }
}

/// The operator's series name the namespace of what they are about, which a scrape would push aside for the operator's own. An agent's word
/// for another namespace is never taken.
#[test]
fn the_operator_alone_may_name_a_namespace_in_its_series() {
    let rendered = objects(&stdout(&template(&["podMonitor.enabled=true"])));
    let honoured = |name: &str| {
        let monitor = rendered.iter().find(|(other, _)| other == name).map(|(_, object)| object).unwrap();
        let endpoints = monitor["spec"]["podMetricsEndpoints"].as_array().unwrap();
        assert_eq!(endpoints.len(), 1, "{name}");
        endpoints[0]["honorLabels"].as_bool().unwrap_or(false)
    };
    assert!(honoured("PodMonitor/truebeat-operator"), "its alerts would name the operator's namespace");
    assert!(!honoured("PodMonitor/truebeat-agents") && !honoured("PodMonitor/truebeat-engines"));
    let engines = rendered.iter().find(|(name, _)| name == "PodMonitor/truebeat-engines").map(|(_, object)| object);
    let kept_out = &engines.unwrap()["spec"]["podMetricsEndpoints"][0]["metricRelabelings"][0];
    let rule = serde_json::json!({"sourceLabels": ["__name__"], "regex": "([a-z]+:)?truebeat_.*", "action": "drop"});
    assert_eq!(kept_out, &rule, "an engine speaks in the name of an agent");
}

#[test]
fn wrong_values_are_refused_by_name() {
    for (set, word) in [
        ("replicas=0", "replicas"),
        ("replicas=many", "replicas"),
        ("replica=2", "replica"),
        ("image.digest=latest", "digest"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("watchNamespace=Not_a_name", "watchNamespace"),
        ("podMonitor.interval=soon", "interval"),
        ("podMonitor.interval=2m", "interval"),
        ("podMonitor.interval=0ms", "interval"),
        ("podMonitor.interval=600000ms", "interval"),
        ("prometheusRule.startMax=soon", "startMax"),
        ("podMonitor.engines=some", "engines"),
        ("prometheusRule.objectives.requests=100", "requests"),
        ("prometheusRule.objectives.progress=most", "progress"),
        ("prometheusRule.objectives.progress=null", "progress"),
        ("prometheusRule.objectives=null", "objectives"),
        ("fleet.holdPercent=0", "holdPercent"),
        ("fleet.holdPercent=null", "holdPercent"),
        ("fleet.domainTopologyKey=null", "domainTopologyKey"),
        ("logFilter=null", "logFilter"),
        ("confine=null", "confine"),
        ("fleet=null", "fleet"),
        ("serviceAccount=null", "serviceAccount"),
        ("networkPolicy.apiServerPorts=null", "apiServerPorts"),
        ("lease.install=maybe", "install"),
        ("prometheusRule.startMax=null", "startMax"),
        ("prometheusRule.runbookUrl=null", "runbookUrl"),
        ("podLabels.app\\.kubernetes\\.io/component=x", "app.kubernetes.io/component"),
        ("podMonitor.labels.app\\.kubernetes\\.io/instance=prom", "app.kubernetes.io/instance"),
    ] {
        let output = template(&[set]);
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && words.contains(word), "--set {set}: {words}");
    }
}

#[test]
fn helm_lint_and_the_alerts_own_tests_pass() {
    let lint = run("helm", &["lint", "--strict", CHART], CHART.as_ref());
    assert!(
        lint.status.success(),
        "{}{}",
        String::from_utf8_lossy(&lint.stdout),
        String::from_utf8_lossy(&lint.stderr)
    );
    let rules = Path::new(CHART).join("rules");
    for args in [
        ["check", "rules", "truebeat.rules.yaml"],
        ["test", "rules", "truebeat.rules.test.yaml"],
        ["test", "rules", "objectives.rules.test.yaml"],
    ] {
        let output = run("promtool", &args, &rules);
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "promtool {}: {said}", args.join(" "));
    }
}

/// An expression that does not parse is a panel that is empty, an autoscaler that does nothing, and a page that misleads. (What they name is
/// held to the programs by the test `queries`.)
#[test]
fn every_expression_that_is_shown_anywhere_parses() {
    let dir = tempfile::tempdir().unwrap();
    let check = |queries: &[Query]| {
        let groups = queries.iter().enumerate().map(|(i, query)| {
            let name = format!("{i} {}", query.place);
            serde_json::json!({"name": name, "rules": [{"record": format!("query_{i}"), "expr": query.expr}]})
        });
        let all = serde_json::json!({"groups": groups.collect::<Vec<_>>()});
        std::fs::write(dir.path().join("all.yaml"), all.to_string()).unwrap();
        run("promtool", &["check", "rules", "all.yaml"], dir.path())
    };
    let mut queries = queries::all().unwrap();
    let output = check(&queries);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    queries.push(Query { expr: "sum(truebeat_up".to_owned(), ..Query::default() });
    assert!(!check(&queries).status.success(), "promtool takes whatever it is given");
}

/// Each alert has a runbook of its name, which leads to what all of them take for known, and a test that sees it; no runbook is left
/// of an alert that is gone.
#[test]
fn every_alert_has_a_runbook_and_a_test() {
    let rules = std::fs::read_to_string(format!("{CHART}/rules/truebeat.rules.yaml")).unwrap();
    let tests = ["truebeat", "objectives"].map(|file| format!("{CHART}/rules/{file}.rules.test.yaml"));
    let tests = tests.map(|file| std::fs::read_to_string(file).unwrap()).concat();
    let mut alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/runbooks");
    let mut books: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    alerts.sort_unstable();
    books.retain(|book| book != "README.md");
    books.sort_unstable();
    assert_eq!(books, alerts.iter().map(|alert| format!("{alert}.md")).collect::<Vec<_>>());
    for alert in alerts {
        let fires = tests.contains(&format!("alertname: {alert}\n    exp_alerts:\n    - exp_labels"));
        assert!(fires, "no test sees {alert} fire");
        let book = std::fs::read_to_string(format!("{folder}/{alert}.md")).unwrap();
        assert!(book.contains("](README.md)"), "{alert}.md does not say where its words are explained");
    }
}

#[test]
fn kustomize_builds_crds_and_operator() {
    let built = stdout(&run("kubectl", &["kustomize", MANIFESTS], MANIFESTS.as_ref()));
    let plain = std::fs::read_to_string(format!("{MANIFESTS}/install.yaml")).unwrap();
    let names = |yaml: &str| objects(yaml).into_iter().map(|(name, _)| name).collect::<std::collections::BTreeSet<_>>();
    let (built, plain) = (names(&built), names(&plain));
    assert!(built.is_superset(&plain) && built.len() == plain.len() + 2, "{built:?}");
}
