//! S9 by packets: what the chart's network policy and the one of `docs/security.md` let through, where a network plugin enforces them. Each
//! question is asked before the policies are there as well: a port that nothing reaches anyway would prove nothing.

use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use nix::sched::{CloneFlags, setns};
use truebeat_tests::host;
use truebeat_tests::images::PAUSE;
use truebeat_tests::product::{self, AGENT_IMAGE, ENGINE_IMAGE, MODEL};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::chart::{self, CHART, SYSTEM};
use crate::world::{BOUND, World, uid};

/// Where the documented policy is; `monitoring` is whom both policies name, `elsewhere` is anybody.
const PLACES: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: network}
---
apiVersion: v1
kind: Namespace
metadata: {name: monitoring}
---
apiVersion: v1
kind: Namespace
metadata: {name: elsewhere}
"#;
const DOCUMENT: &str = include_str!("../../../docs/security.md");
const FROM_MONITORING: &str =
    r"networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring";
/// Of the API server, which both policies let out to, and two that nobody named.
const OUTSIDE: [u16; 4] = [443, 6443, 8080, 9999];
/// What is dropped is waited for so long; what is refused, or taken, answers at once.
const PATIENCE: Duration = Duration::from_secs(2);

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    product::apply(world.cluster, chart::NAMESPACES)?;
    product::apply(world.cluster, PLACES)?;
    chart::install(world, times, "install").await?;
    world.cluster.enforce_network_policies()?;
    for place in ["monitoring", "elsewhere"] {
        product::apply(world.cluster, &probe(place))?;
    }
    product::apply(world.cluster, &engine())?;
    wait(world, "network", "infd/served")?;
    wait(world, "monitoring", "pod/probe")?;
    wait(world, "elsewhere", "pod/probe")?;
    times.now(
        "an operator, an engine, and two pods that try their ports; a plugin that enforces policies, and no policy",
    );

    let see = Sight::of(world).await?;
    until_async("everything to be reached that listens", BOUND, || async { see.ports()?.are(&see.open()?) }).await?;
    times.now("all that listens is reached from everywhere, and everything outside from both");

    times.act("helm upgrade: networkPolicy.enabled; kubectl apply: the policy of docs/security.md");
    let upgrade = ["upgrade", "truebeat", CHART, "--wait", "--timeout", "90s"];
    chart::helm(world, &upgrade, &["networkPolicy.enabled=true", FROM_MONITORING])?;
    product::apply(world.cluster, documented()?)?;
    let named = Ports {
        of_operator: [vec![9500], vec![]],
        of_engine: [vec![8080, 9400], vec![8080]],
        outside: [vec![443, 6443], vec![443, 6443]],
    };
    until_async("nothing to be reached but what is named", BOUND, || async { see.ports()?.are(&named) }).await?;
    times.now("monitoring reaches the operator's port, the gate and the agent; anybody the gate alone; both are let out to the API server's ports alone");

    let said = chart::helm(world, &["test", "truebeat", "--timeout", "60s"], &[])?;
    ensure!(said.contains("Succeeded"), "{said}");
    chart::acts(world, "network").await?;
    wait(world, "network", "infd/served")?;
    times.now(
        "and all is well behind them: helm test, a new InferenceDeployment, an engine that is asked for its health",
    );
    see.ports()?.are(&named)?.context("the policies still hold")?;
    chart::helm(world, &["uninstall", "truebeat", "--wait", "--timeout", "90s"], &[]).map(drop)
}

/// What each of two pods reaches, `monitoring` first, and where the operator and the engine come.
#[derive(Debug, PartialEq)]
struct Ports {
    of_operator: [Vec<u16>; 2],
    of_engine: [Vec<u16>; 2],
    outside: [Vec<u16>; 2],
}

impl Ports {
    fn are(&self, wanted: &Self) -> Result<Option<()>> {
        ensure!(self == wanted, "reached: {self:?}, and wanted: {wanted:?}");
        Ok(Some(()))
    }
}

/// The four pods, as who looks at their ports.
struct Sight {
    operator: Inside,
    engine: Inside,
    probes: [Inside; 2],
    _outside: Vec<TcpListener>,
}

impl Sight {
    async fn of(world: &World<'_>) -> Result<Self> {
        let operator = Inside::of(&pod(world, SYSTEM, "app.kubernetes.io/component=operator").await?)?;
        let engine = Inside::of(&pod(world, "network", "app.kubernetes.io/component=inference").await?)?;
        let monitoring = Inside::of(&pod(world, "monitoring", "app=probe").await?)?;
        let elsewhere = Inside::of(&pod(world, "elsewhere", "app=probe").await?)?;
        let outside =
            elsewhere.within(|| OUTSIDE.map(|port| TcpListener::bind(("0.0.0.0", port))).into_iter().collect())?;
        let outside: std::io::Result<Vec<TcpListener>> = outside;
        Ok(Self { operator, engine, probes: [monitoring, elsewhere], _outside: outside.context("no port outside")? })
    }

    /// What is reached now.
    fn ports(&self) -> Result<Ports> {
        let [monitoring, elsewhere] = &self.probes;
        let (operator, engine) = (self.operator.listeners()?, self.engine.listeners()?);
        let of = |whom: &Inside, ports: &[u16]| -> Result<[Vec<u16>; 2]> {
            Ok([monitoring.reaches(whom.address, ports)?, elsewhere.reaches(whom.address, ports)?])
        };
        let out = |whom: &Inside| whom.reaches(elsewhere.address, &OUTSIDE);
        Ok(Ports {
            of_operator: of(&self.operator, &operator)?,
            of_engine: of(&self.engine, &engine)?,
            outside: [out(&self.operator)?, out(&self.engine)?],
        })
    }

    /// All that there is to be reached.
    fn open(&self) -> Result<Ports> {
        let (operator, engine) = (self.operator.listeners()?, self.engine.listeners()?);
        ensure!(operator == [9500] && engine.contains(&8080) && engine.contains(&9400), "{operator:?}, {engine:?}");
        let twice = |ports: Vec<u16>| [ports.clone(), ports];
        Ok(Ports { of_operator: twice(operator), of_engine: twice(engine), outside: twice(OUTSIDE.to_vec()) })
    }
}

/// The network of a pod. A thread that goes there sends what the pod would send.
struct Inside {
    netns: PathBuf,
    /// Where its sockets are told.
    table: PathBuf,
    address: IpAddr,
}

impl Inside {
    fn of(pod: &Pod) -> Result<Self> {
        let address =
            pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).context("a pod without an address")?;
        let processes = host::processes(&uid(pod));
        let process = processes.first().with_context(|| format!("{} has no process", pod.name_any()))?;
        let proc = PathBuf::from(format!("/proc/{}", process.identity.pid));
        Ok(Self { netns: proc.join("ns/net"), table: proc.join("net"), address: address.parse()? })
    }

    /// Those of `ports` at `to` that take a connection.
    fn reaches(&self, to: IpAddr, ports: &[u16]) -> Result<Vec<u16>> {
        let taken = |port: &u16| TcpStream::connect_timeout(&SocketAddr::new(to, *port), PATIENCE).is_ok();
        self.within(|| ports.iter().copied().filter(taken).collect())
    }

    /// The ports on which somebody in the pod listens for others than itself, in order.
    fn listeners(&self) -> Result<Vec<u16>> {
        let mut ports = Vec::new();
        for (table, own) in [("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")] {
            let path = self.table.join(table);
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            for line in text.lines().skip(1) {
                let mut words = line.split_whitespace().skip(1);
                let local = words.next().and_then(|local| local.split_once(':'));
                let (address, port) = local.with_context(|| format!("{}: {line}", path.display()))?;
                if words.nth(1) == Some("0A") && address != own {
                    ports.push(u16::from_str_radix(port, 16)?);
                }
            }
        }
        ports.sort_unstable();
        ports.dedup();
        Ok(ports)
    }

    /// Done by a thread in the pod's network.
    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let there = || -> Result<T> {
            let netns = File::open(&self.netns).with_context(|| self.netns.display().to_string())?;
            setns(netns, CloneFlags::CLONE_NEWNET).context("cannot enter the network of a pod")?;
            Ok(work())
        };
        std::thread::scope(|scope| scope.spawn(there).join()).map_err(|_| anyhow!("a panic in the network of a pod"))?
    }
}

async fn pod(world: &World<'_>, namespace: &str, labels: &str) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), namespace);
    let found = pods.list(&ListParams::default().labels(labels)).await?;
    found
        .items
        .into_iter()
        .find(|pod| pod.metadata.deletion_timestamp.is_none())
        .with_context(|| format!("no pod {labels} in {namespace}"))
}

fn wait(world: &World<'_>, namespace: &str, what: &str) -> Result<()> {
    let words = ["-n", namespace, "wait", what, "--for=condition=Ready", "--timeout=90s", "--request-timeout=0"];
    world.cluster.kubectl(&words).map(drop)
}

fn documented() -> Result<&'static str> {
    let blocks = DOCUMENT.split("```yaml\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(block, _)| block);
    blocks.into_iter().find(|block| block.contains("kind: NetworkPolicy")).context("docs/security.md has no policy")
}

/// A pod that does nothing, in whose network we try things.
fn probe(namespace: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: probe, namespace: {namespace}, labels: {{app: probe}}}}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{{name: probe, image: "{PAUSE}", imagePullPolicy: Never}}]
"#
    )
}

fn engine() -> String {
    format!(
        r#"
apiVersion: inference.truebeat.io/v1alpha1
kind: InferenceDeployment
metadata: {{name: served, namespace: network}}
spec:
  replicas: 1
  model: {{source: {{file: {{path: {MODEL}}}}}}}
  engine:
    kind: Truebeat
    image: {ENGINE_IMAGE}
    imagePullPolicy: Never
    resources: {{requests: {{cpu: 50m, memory: 64Mi}}}}
  agent: {{image: {AGENT_IMAGE}, imagePullPolicy: Never}}
"#
    )
}
