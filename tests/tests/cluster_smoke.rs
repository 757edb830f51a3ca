//! The harness itself, seen working: a real API server and a real node; a pod with a native sidecar becomes Ready, is found among
//! the machine's processes, restarts when killed, is deleted; and all of it is gone afterwards.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use nix::sys::signal::Signal;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::images::File;
use truebeat_tests::wait::until_async;
use truebeat_tests::{Cluster, Options, host, images, story};

const BOUND: Duration = Duration::from_secs(60);

const MANIFEST: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: pair, labels: {app: pair}}
spec:
  terminationGracePeriodSeconds: 2
  dnsPolicy: Default
  shareProcessNamespace: true
  initContainers:
  - {name: sidecar, image: "truebeat.local/shell:1", imagePullPolicy: Never, restartPolicy: Always, args: [-c, "trap 'exit 0' TERM; while :; do sleep 1; done"]}
  containers:
  - {name: main, image: "truebeat.local/shell:1", imagePullPolicy: Never, args: [-c, "exec sleep 1000000"]}
---
apiVersion: v1
kind: Service
metadata: {name: pair}
spec: {selector: {app: pair}, ports: [{port: 80}]}
"#;

#[test]
fn a_pod_with_a_sidecar_lives_and_dies_on_a_real_node() {
    let what = "a pod with a native sidecar on a real node";
    let Some(cluster) = story::cluster(what, &Options::default()).unwrap() else { return };
    cluster.run(async |client| pair(client, &cluster).await).unwrap();
    if cluster.owned() {
        // what a killed run leaves: everything up, and a pod in the middle of its life
        cluster.apply(MANIFEST).unwrap();
        let running = ["wait", "pod/pair", "--for=condition=Ready", "--timeout=60s"];
        cluster.kubectl(&running).unwrap();
        assert!(!Cluster::leftovers(story::NAME).unwrap().is_empty());
        drop(cluster);
        assert_eq!(Cluster::leftovers(story::NAME).unwrap(), Vec::<String>::new());
    }
}

async fn pair(client: Client, cluster: &Cluster) -> Result<()> {
    let sleep = [File::new("/bin/sleep".as_ref(), "/bin/sleep")];
    let out = cluster.layout().path("images");
    let archive = images::image_dynamic(&out, "truebeat.local/shell:1", "/bin/sh".as_ref(), &["/bin/sh"], &sleep)?;
    cluster.import(&archive)?;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let endpoints = Endpoints::watch(client, "default", "pair");
    let started = Instant::now();
    let step = |what: &str| eprintln!("smoke: {:6.2} s  {what}", started.elapsed().as_secs_f64());
    cluster.apply(MANIFEST)?;
    endpoints.flip("pair", true, started, BOUND).await?;
    step("endpoint ready");

    let pod = pods.get("pair").await?;
    // its container runs before its shell has become what it is to be
    let main = until_async("main to sleep", BOUND, || async {
        Ok(Some(host::root_process(&pod, "main", BOUND)?).filter(|main| main.command == "sleep 1000000"))
    })
    .await?;
    let killed = Instant::now();
    host::signal(&main, Signal::SIGKILL);
    endpoints.flip("pair", false, killed, BOUND).await?;
    step("main killed from outside: endpoint away");
    until_async("main's restart", BOUND, || async {
        Ok((restarts(&pods.get("pair").await?) == Some(1)).then_some(()))
    })
    .await?;
    endpoints.flip("pair", true, killed, BOUND).await?;
    step("restarted, endpoint ready");

    cluster.kubectl(&["delete", "pod", "pair", "--wait=true"])?;
    step("deleted");
    let uid = pod.metadata.uid.context("a pod without a uid")?;
    ensure!(host::processes(&uid).is_empty(), "processes of the pod are left: {:?}", host::processes(&uid));
    cluster.kubectl(&["delete", "service", "pair"]).map(drop)
}

fn restarts(pod: &Pod) -> Option<i32> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    containers.iter().find(|container| container.name == "main").map(|container| container.restart_count)
}
