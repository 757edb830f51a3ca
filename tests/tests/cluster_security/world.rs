//! What all rows share: the installed product with its operator running, and tenants whose replicas serve.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::episode::ANNOTATION_RESTART_GRANT;
use crds::{InferenceDeployment, LABEL_DEPLOYMENT};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use truebeat_tests::Cluster;
use truebeat_tests::audit::{self, Entry};
use truebeat_tests::fleet::nodes;
use truebeat_tests::fleet::operator::{ACCOUNT, Candidate, NAMESPACE, Operator, USER};
use truebeat_tests::fleet::replica::{self, Says};
use truebeat_tests::product::{self, Programs};
use truebeat_tests::wait::until_async;

/// Generous: a loaded machine is no failure.
pub const BOUND: Duration = Duration::from_secs(120);
const NODES: usize = 4;
/// A tenth of a small fleet is one recovery: what one pod holds must not be what another waits for here.
/// One failure domain has two nodes, and bears one recovery less than both.
pub const OPERATOR_ARGS: [&str; 6] =
    ["--fleet-restarts-percent", "50", "--fleet-hold-percent", "100", "--domain-restarts-max", "3"];

/// The shared things.
pub struct World<'a> {
    pub client: Client,
    pub cluster: &'a Cluster,
    pub programs: Programs,
    pub operator: Operator,
}

impl<'a> World<'a> {
    /// Nodes, the product as its manifests install it (a warning is an error), one operator.
    pub async fn start(client: Client, cluster: &'a Cluster, programs: Programs) -> Result<Self> {
        nodes::create(&client, NODES, &json!({})).await?;
        cluster.kubectl(&["label", "node", "sim-0003", "--overwrite", "topology.kubernetes.io/zone=zone-2"])?;
        product::apply(cluster, &namespace(NAMESPACE))?;
        programs.install(cluster)?;
        // its pods could never start here; the operator runs as a process
        cluster.kubectl(&["-n", NAMESPACE, "scale", "deployment/truebeat-operator", "--replicas=0"])?;
        let candidate = Candidate {
            binary: &programs.operator,
            name: "operator",
            port: 9500,
            account: (NAMESPACE, ACCOUNT),
            args: &OPERATOR_ARGS,
        };
        let operator = candidate.start(cluster, &client).await?;
        operator.ready().await?;
        Ok(Self { client, cluster, programs, operator })
    }

    /// A namespace that takes restricted pods alone, and warns.
    pub fn tenant(&self, name: &str) -> Result<()> {
        product::apply(self.cluster, &namespace(name)).map(drop)
    }

    /// Applies an InferenceDeployment and waits until its replicas serve; `spec` is merged over a small default.
    pub async fn deploy(&self, namespace: &str, name: &str, spec: Value) -> Result<Vec<Pod>> {
        let object = infd(namespace, name, spec);
        let replicas = object["spec"]["replicas"].as_u64().and_then(|n| usize::try_from(n).ok()).context("replicas")?;
        product::apply(self.cluster, &object.to_string())?;
        let pods = self.scheduled(namespace, name, replicas).await?;
        replica::say_all(&self.client, pods.iter().map(|pod| (pod, Says::Serves)).collect()).await?;
        self.status(namespace, name, "all replicas to be ready and their revision good", |infd| {
            let status = infd.status.as_ref();
            status.is_some_and(|s| s.ready_replicas == infd.spec.replicas && !s.rollout.stable.is_empty())
        })
        .await?;
        Ok(pods)
    }

    /// Waits until `count` pods have a node; gives them.
    pub async fn scheduled(&self, namespace: &str, name: &str, count: usize) -> Result<Vec<Pod>> {
        until_async(&format!("{count} pods of {namespace}/{name} on nodes"), BOUND, || async {
            let mut pods = self.pods(namespace, name).await?;
            pods.retain(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()));
            Ok((pods.len() == count).then_some(pods))
        })
        .await
    }

    /// The pods that are not on their way out.
    pub async fn pods(&self, namespace: &str, name: &str) -> Result<Vec<Pod>> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let list = api.list(&ListParams::default().labels(&format!("{LABEL_DEPLOYMENT}={name}"))).await?;
        Ok(list.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
    }

    /// This very pod as it is now; `None`: it is gone, or going.
    pub async fn now(&self, pod: &Pod) -> Result<Option<Pod>> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        let found = api.get_opt(&pod.name_any()).await?;
        Ok(found.filter(|found| found.uid() == pod.uid() && found.metadata.deletion_timestamp.is_none()))
    }

    /// Says it for `pod`.
    pub async fn say(&self, pod: &Pod, says: Says) -> Result<()> {
        replica::say(&self.client, pod, &says).await
    }

    /// Stalls `pod` and waits for the grant of that very episode; how long it took.
    pub async fn stall_until_granted(&self, pod: &Pod, id: &str) -> Result<Duration> {
        let started = Instant::now();
        self.say(pod, Says::stalls(id)).await?;
        self.granted(pod, id).await?;
        Ok(started.elapsed())
    }

    /// Waits for the grant of this very episode.
    pub async fn granted(&self, pod: &Pod, id: &str) -> Result<()> {
        until_async(&format!("the grant of {id} on {}", pod.name_any()), BOUND, || async {
            Ok((self.grant(pod).await?.as_deref() == Some(id)).then_some(()))
        })
        .await
    }

    /// Of which episode the restart of `pod` is granted.
    pub async fn grant(&self, pod: &Pod) -> Result<Option<String>> {
        let pod = self.now(pod).await?.context("the pod is gone")?;
        Ok(pod.annotations().get(ANNOTATION_RESTART_GRANT).cloned())
    }

    /// Says that the episode is over, and waits until its grant is.
    pub async fn recover(&self, pod: &Pod, id: &str) -> Result<()> {
        self.say(pod, Says::Recovered(id.to_owned())).await?;
        let name = pod.labels().get(LABEL_DEPLOYMENT).cloned().unwrap_or_default();
        let over = |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|s| s.recovery.grants.is_empty());
        self.status(&pod.namespace().unwrap_or_default(), &name, "the grant to be over", over).await.map(drop)
    }

    /// Waits until the operator has deleted `pod`, and lets it be gone.
    pub async fn replaced(&self, pod: &Pod) -> Result<()> {
        let what = format!("{} to be replaced", pod.name_any());
        until_async(&what, BOUND, || async { Ok(self.now(pod).await?.is_none().then_some(())) }).await?;
        replica::bury(&self.client, pod).await
    }

    /// Waits for a state of an InferenceDeployment; gives it.
    pub async fn status(
        &self,
        namespace: &str,
        name: &str,
        what: &str,
        probe: impl Fn(&InferenceDeployment) -> bool,
    ) -> Result<InferenceDeployment> {
        let api: Api<InferenceDeployment> = Api::namespaced(self.client.clone(), namespace);
        until_async(&format!("{namespace}/{name}: {what}"), BOUND, || async {
            Ok(api.get_opt(name).await?.filter(|infd| probe(infd)))
        })
        .await
    }

    /// What the operator has asked the API server for so far, and how it was answered.
    pub fn asked(&self) -> Result<Vec<Entry>> {
        audit::read(&self.cluster.audit_log(), USER)
    }

    /// What it has tried to change since it had asked for so much, but for its Lease.
    pub fn tried_since(&self, asked: usize) -> Result<Vec<Entry>> {
        let tried = self.asked()?.into_iter().skip(asked);
        Ok(tried.filter(|entry| entry.writes() && entry.resource() != "leases").collect())
    }

    /// JSON of one object, as an administrator sees it.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let text = self.cluster.kubectl(&[&["get", "-o", "json"], args].concat())?;
        serde_json::from_str(&text).with_context(|| format!("kubectl get {}", args.join(" ")))
    }

    /// Takes everything of a tenant away.
    pub async fn leave(&self, namespace: &str) -> Result<()> {
        self.cluster.kubectl(&["-n", namespace, "delete", "infd", "--all", "--wait=true", "--timeout=60s"])?;
        self.without_pods(namespace).await
    }

    /// Waits until a namespace has no pods, and ends those that are on their way out: nobody else would.
    pub async fn without_pods(&self, namespace: &str) -> Result<()> {
        until_async(&format!("the pods of {namespace} to be gone"), BOUND, || async {
            let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
            let left = api.list(&ListParams::default()).await?.items;
            for pod in left.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()) {
                replica::bury(&self.client, pod).await?;
            }
            ensure!(left.is_empty(), "{} are there", left.len());
            Ok(Some(()))
        })
        .await
    }
}

/// The example of `docs/security.md` that has this line.
pub fn documented(line: &str) -> Result<&'static str> {
    let mut blocks = include_str!("../../../docs/security.md").split("\n```");
    let found = blocks.find(|block| block.lines().any(|own| own == line)).and_then(|block| block.split_once('\n'));
    Ok(found.with_context(|| format!("docs/security.md has no example with the line {line}"))?.1)
}

fn namespace(name: &str) -> String {
    let level = |mode: &str| format!("pod-security.kubernetes.io/{mode}: restricted");
    let levels = ["enforce", "warn", "audit"].map(level).join(", ");
    format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {name}, labels: {{{levels}}}}}}}")
}

/// An InferenceDeployment of two small replicas with `spec` over it.
pub fn infd(namespace: &str, name: &str, spec: Value) -> Value {
    let mut object = json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": 2,
            "model": {"source": {"file": {"path": "/models/demo"}}},
            "engine": {"kind": "Truebeat", "image": "simulated"},
            "agent": {"image": "simulated"},
            "rollout": {"soakSeconds": 0},
        },
    });
    for (key, value) in spec.as_object().into_iter().flatten() {
        object["spec"][key] = value.clone();
    }
    object
}
