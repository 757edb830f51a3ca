//! Prometheus and its adapter before a cluster of the harness: a real HorizontalPodAutoscaler is told what the agents count by the
//! programs, and by the rule, that users have (`docs/examples/autoscaling`). Both run as processes on the node's address.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cluster::{Cluster, Identity, NODE_IP};

/// The metric of pods that the rule makes.
pub const METRIC: &str = "truebeat_in_flight";
const RULE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples/autoscaling/prometheus-adapter.yaml"));
/// What the rule takes the mean of, for scrapes once in fifteen seconds; and here, where they come each second.
const WINDOW: (&str, &str) = ("[1m]", "[4s]");
const API: &str = "/apis/custom.metrics.k8s.io/v1beta2";
const GRACE: Duration = Duration::from_secs(5);

/// The two processes; dropping it ends them. The API stays registered until [`CustomMetrics::remove`].
#[derive(Debug)]
pub struct CustomMetrics<'a> {
    cluster: &'a Cluster,
    processes: Vec<Identity>,
}

impl<'a> CustomMetrics<'a> {
    /// Starts both and registers the API.
    ///
    /// # Errors
    /// When a file cannot be written, a program does not start, or kubectl refuses.
    pub fn start(cluster: &'a Cluster) -> Result<Self> {
        ensure!(RULE.contains(WINDOW.0), "the rule of docs/examples/autoscaling has no window {}", WINDOW.0);
        let mut this = Self { cluster, processes: Vec::new() };
        this.spawn("prometheus", &scrapes(cluster), PROMETHEUS)?;
        this.spawn("prometheus-adapter", &RULE.replace(WINDOW.0, WINDOW.1), ADAPTER)?;
        cluster.apply(&registration())?;
        Ok(this)
    }

    /// Starts `program` with `config` in its file; `@` in `flags` is the state folder.
    fn spawn(&mut self, program: &str, config: &str, flags: &str) -> Result<()> {
        let file = self.cluster.layout().path(&format!("{program}.yaml"));
        std::fs::write(&file, config).with_context(|| format!("cannot write {}", file.display()))?;
        let root = self.cluster.layout().root.display().to_string();
        let flags = flags.split_whitespace().map(|word| word.replace('@', &root));
        let argv = std::iter::once(program.to_owned()).chain(flags).collect();
        self.processes.push(self.cluster.spawn(program, argv)?);
        Ok(())
    }

    /// What the API says now of this deployment's pods, by name; empty as long as it says nothing.
    ///
    /// # Errors
    /// When it answers with something else than a list of metrics.
    pub fn figures(&self, namespace: &str, deployment: &str) -> Result<BTreeMap<String, f64>> {
        let selector = format!("{}%3D{deployment}", crds::LABEL_DEPLOYMENT);
        let path = format!("{API}/namespaces/{namespace}/pods/*/{METRIC}?labelSelector={selector}");
        // not registered yet, or no series of this name yet: both are refusals
        let Ok(text) = self.cluster.kubectl(&["get", "--raw", &path]) else { return Ok(BTreeMap::new()) };
        let list: Value = serde_json::from_str(&text).with_context(|| format!("{path} is no JSON: {text}"))?;
        list["items"].as_array().with_context(|| format!("{path} is no list: {text}"))?.iter().map(figure).collect()
    }

    /// Takes the API back from the cluster, and ends both.
    ///
    /// # Errors
    /// When kubectl refuses.
    pub fn remove(self) -> Result<()> {
        self.cluster.kubectl(&[
            "delete",
            "apiservice",
            "v1beta1.custom.metrics.k8s.io",
            "v1beta2.custom.metrics.k8s.io",
        ])?;
        Ok(())
    }
}

impl Drop for CustomMetrics<'_> {
    fn drop(&mut self) {
        for process in &self.processes {
            process.end(GRACE);
        }
    }
}

const PROMETHEUS: &str =
    "--config.file=@/prometheus.yaml --storage.tsdb.path=@/prometheus --web.listen-address=127.0.0.1:9090
    --log.level=warn";
const ADAPTER: &str = "--config=@/prometheus-adapter.yaml --prometheus-url=http://127.0.0.1:9090 --secure-port=4443
    --tls-cert-file=@/pki/apiserver.crt --tls-private-key-file=@/pki/apiserver.key --lister-kubeconfig=@/pki/admin.kubeconfig
    --authentication-kubeconfig=@/pki/admin.kubeconfig --authorization-kubeconfig=@/pki/admin.kubeconfig
    --metrics-relist-interval=2s --metrics-max-age=10s";

/// What the chart's PodMonitor of the agents asks for, in Prometheus' own words.
fn scrapes(cluster: &Cluster) -> String {
    let kubeconfig = cluster.layout().kubeconfig("admin").display().to_string();
    format!(
        r"
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: truebeat-agents
  kubernetes_sd_configs: [{{role: pod, kubeconfig_file: {kubeconfig}}}]
  relabel_configs:
  - {{action: keep, source_labels: [__meta_kubernetes_pod_label_app_kubernetes_io_component], regex: inference}}
  - {{action: keep, source_labels: [__meta_kubernetes_pod_container_port_name], regex: agent}}
  - {{source_labels: [__meta_kubernetes_namespace], target_label: namespace}}
  - {{source_labels: [__meta_kubernetes_pod_name], target_label: pod}}
  - {{source_labels: [__meta_kubernetes_pod_label_inference_truebeat_io_deployment], target_label: deployment}}
"
    )
}

/// A Service without selector that leads to the adapter, and the API that it serves.
fn registration() -> String {
    let version = |version: &str, priority: u32| {
        format!(
            r"
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {{name: {version}.custom.metrics.k8s.io}}
spec:
  group: custom.metrics.k8s.io
  version: {version}
  groupPriorityMinimum: 100
  versionPriority: {priority}
  insecureSkipTLSVerify: true
  service: {{name: prometheus-adapter, namespace: kube-system}}"
        )
    };
    let service = format!(
        r"
apiVersion: v1
kind: Service
metadata: {{name: prometheus-adapter, namespace: kube-system}}
spec: {{ports: [{{name: https, port: 443, targetPort: 4443}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: prometheus-adapter-1, namespace: kube-system, labels: {{kubernetes.io/service-name: prometheus-adapter}}}}
addressType: IPv4
ports: [{{name: https, port: 4443, protocol: TCP}}]
endpoints: [{{addresses: [{NODE_IP}], conditions: {{ready: true}}}}]"
    );
    [service, version("v1beta1", 100), version("v1beta2", 200)].concat()
}

/// Pod and value of one item of a `MetricValueList`.
fn figure(item: &Value) -> Result<(String, f64)> {
    let pod = item["describedObject"]["name"].as_str().with_context(|| format!("no pod in {item}"))?;
    let value = item["value"].as_str().and_then(quantity).with_context(|| format!("no value in {item}"))?;
    Ok((pod.to_owned(), value))
}

/// A quantity as the metrics API writes it: a number, or so many thousandths.
fn quantity(text: &str) -> Option<f64> {
    match text.strip_suffix('m') {
        Some(thousandths) => thousandths.parse::<f64>().ok().map(|value| value / 1000.0),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_figure_is_read_as_the_api_writes_it() {
        let item = |value: &str| json!({"describedObject": {"kind": "Pod", "name": "a"}, "value": value});
        let read = |value: &str| figure(&item(value)).ok();
        assert_eq!((read("1250m"), read("3")), (Some(("a".into(), 1.25)), Some(("a".into(), 3.0))));
        assert_eq!((read("x"), figure(&json!({"value": "3"})).ok()), (None, None));
    }
}
