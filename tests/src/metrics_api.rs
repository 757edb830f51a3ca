//! The custom metrics API in small: an aggregated API server that says of each pod what its agent's own `/metrics` says, as an adapter
//! of Prometheus or KEDA would, so that a real HorizontalPodAutoscaler can be looked at. Only pods that may serve are named: what a
//! stalled replica holds is no measure of what the fleet can do.
//!
//! TLS and HTTP/1.1 by hand on threads of its own; speaks on the node's address inside the cluster's network.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::cluster::{Cluster, NODE_IP};

const PORT: u16 = 4443;
const GROUP: &str = "custom.metrics.k8s.io/v1beta2";
const AGENT_PORT: u16 = 9400;
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// An autoscaler should see load and not the moment: the mean of so many looks is told.
const LOOKS: usize = 8;
const CALL_MAX: Duration = Duration::from_secs(2);

/// A pod and its address, as long as it exists.
pub type Pods = Box<dyn Fn() -> Vec<(String, IpAddr)> + Send>;

/// The running server; dropping it ends it.
#[derive(Debug)]
pub struct MetricsApi {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<BTreeMap<String, VecDeque<f64>>>>,
}

impl MetricsApi {
    /// Serves `metric` of the pods that `pods` names, and registers with the cluster. Call it on a thread inside its network.
    ///
    /// # Errors
    /// When the port is taken, the keys cannot be read, or kubectl refuses.
    pub fn start(cluster: &Cluster, metric: &'static str, pods: Pods) -> Result<Self> {
        let listener =
            TcpListener::bind((NODE_IP, PORT)).with_context(|| format!("cannot listen on {NODE_IP}:{PORT}"))?;
        let (certificate, key) =
            (cluster.layout().path("pki/apiserver.crt"), cluster.layout().path("pki/apiserver.key"));
        let chain = CertificateDer::pem_file_iter(&certificate)?.collect::<Result<Vec<_>, _>>()?;
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(chain, PrivateKeyDer::from_pem_file(&key)?)
            .context("the API server's certificate")?;
        let api = Self { stop: Arc::default(), seen: Arc::default() };
        let (stop, seen) = (Arc::clone(&api.stop), Arc::clone(&api.seen));
        std::thread::spawn(move || look_for_ever(&pods, metric, &stop, &seen));
        let (stop, seen, config) = (Arc::clone(&api.stop), Arc::clone(&api.seen), Arc::new(config));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok).take_while(|_| !stop.load(Ordering::Relaxed)) {
                let (config, seen) = (Arc::clone(&config), Arc::clone(&seen));
                std::thread::spawn(move || serve(stream, config, metric, &seen));
            }
        });
        cluster.apply(&registration())?;
        Ok(api)
    }

    /// What it says now, by pod.
    pub fn figures(&self) -> BTreeMap<String, f64> {
        means(&self.seen)
    }
}

impl Drop for MetricsApi {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((NODE_IP, PORT)); // so that the listener looks
    }
}

/// A Service without selector that leads here, and the API that it serves.
fn registration() -> String {
    format!(
        r#"
apiVersion: v1
kind: Service
metadata: {{name: figures, namespace: kube-system}}
spec: {{ports: [{{name: https, port: 443, targetPort: {PORT}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: figures-1, namespace: kube-system, labels: {{kubernetes.io/service-name: figures}}}}
addressType: IPv4
ports: [{{name: https, port: {PORT}, protocol: TCP}}]
endpoints: [{{addresses: [{NODE_IP}], conditions: {{ready: true}}}}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {{name: v1beta2.custom.metrics.k8s.io}}
spec:
  group: custom.metrics.k8s.io
  version: v1beta2
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {{name: figures, namespace: kube-system}}
"#
    )
}

fn look_for_ever(pods: &Pods, metric: &str, stop: &AtomicBool, seen: &Mutex<BTreeMap<String, VecDeque<f64>>>) {
    while !stop.load(Ordering::Relaxed) {
        let said: Vec<(String, f64)> = pods()
            .into_iter()
            .filter_map(|(pod, ip)| Some((pod, figure(&scrape(SocketAddr::new(ip, AGENT_PORT))?, metric)?)))
            .collect();
        let mut all = seen.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|pod, _| said.iter().any(|(other, _)| other == pod));
        for (pod, value) in said {
            let looks = all.entry(pod).or_default();
            looks.push_back(value);
            looks.drain(..looks.len().saturating_sub(LOOKS));
        }
        drop(all);
        std::thread::sleep(LOOK_EVERY);
    }
}

fn scrape(agent: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&agent, CALL_MAX).ok()?;
    stream.set_read_timeout(Some(CALL_MAX)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

/// The value of `metric`, of an agent that says that its replica may serve.
fn figure(text: &str, metric: &str) -> Option<f64> {
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    value("truebeat_ready").filter(|ready: &f64| *ready > 0.0)?;
    value(metric)
}

fn means(seen: &Mutex<BTreeMap<String, VecDeque<f64>>>) -> BTreeMap<String, f64> {
    let all = seen.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().map(|(pod, looks)| (pod.clone(), looks.iter().sum::<f64>() / looks.len().max(1) as f64)).collect()
}

/// One connection of the API server, request after request.
fn serve(stream: TcpStream, config: Arc<ServerConfig>, metric: &str, seen: &Mutex<BTreeMap<String, VecDeque<f64>>>) {
    let Ok(connection) = ServerConnection::new(config) else { return };
    let mut stream = StreamOwned::new(connection, stream);
    let mut head = Vec::new();
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        head.push(byte[0]);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let text = String::from_utf8_lossy(&head).into_owned();
        let path = text.split(' ').nth(1).unwrap_or_default();
        let (status, body) = answer(path, metric, &means(seen));
        let body = body.to_string();
        let head_out = format!(
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(head_out.as_bytes()).and_then(|()| stream.flush()).is_err() {
            return;
        }
        head.clear();
    }
}

fn answer(path: &str, metric: &str, figures: &BTreeMap<String, f64>) -> (&'static str, Value) {
    let path = path.split('?').next().unwrap_or_default();
    let root = format!("/apis/{GROUP}");
    if path == root {
        let resource = json!({"name": format!("pods/{metric}"), "singularName": "", "namespaced": true, "kind": "MetricValueList", "verbs": ["get"]});
        return (
            "200 OK",
            json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [resource]}),
        );
    }
    let inside = path.strip_prefix(&root).and_then(|rest| rest.strip_prefix("/namespaces/")).unwrap_or_default();
    let [namespace, "pods", _, wanted] = inside.split('/').collect::<Vec<_>>()[..] else {
        return ("404 Not Found", json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}));
    };
    let now = k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let items: Vec<Value> = figures
        .iter()
        .filter(|_| wanted == metric)
        .map(|(pod, value)| {
            let object = json!({"kind": "Pod", "namespace": namespace, "name": pod, "apiVersion": "/v1"});
            let milli = format!("{}m", (value * 1000.0).round());
            json!({"describedObject": object, "metric": {"name": metric}, "timestamp": now, "value": milli})
        })
        .collect();
    ("200 OK", json!({"kind": "MetricValueList", "apiVersion": GROUP, "metadata": {}, "items": items}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_replica_that_may_serve_has_a_figure() {
        let text =
            |ready: u8| format!("HTTP/1.1 200 OK\r\n\r\n# HELP x\ntruebeat_ready {ready}\nowed_total 9\nowed 3\n");
        assert_eq!(
            (figure(&text(1), "owed"), figure(&text(0), "owed"), figure("owed 3\n", "owed")),
            (Some(3.0), None, None)
        );
    }

    #[test]
    fn it_answers_as_the_api_is_written() {
        let figures = [("a".to_owned(), 1.25)].into();
        let of = |path: &str| answer(path, "owed", &figures);
        assert_eq!(of("/apis/custom.metrics.k8s.io/v1beta2?timeout=32s").1["resources"][0]["name"], "pods/owed");
        let list = of("/apis/custom.metrics.k8s.io/v1beta2/namespaces/n/pods/*/owed?labelSelector=x").1;
        assert_eq!(
            (&list["items"][0]["value"], &list["items"][0]["describedObject"]["name"]),
            (&json!("1250m"), &json!("a"))
        );
        assert!(
            of("/apis/custom.metrics.k8s.io/v1beta2/namespaces/n/pods/*/other").1["items"]
                .as_array()
                .unwrap()
                .is_empty()
        );
        assert!(of("/openapi/v2").0.starts_with("404"));
    }
}
