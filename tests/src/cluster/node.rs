//! The one real node: containerd with runc and the CNI bridge, kubelet, kube-proxy (nftables), all with state of their own.
//! Every odd setting has its reason beside it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::cgroup::{self, Version};
use super::command::run;
use super::control_plane::alive_or_give_up;
use super::layout::{Layout, NODE, NODE_IP};
use super::{Options, Stopwatch, kubectl, net, process};
use crate::images::{self, PAUSE};
use crate::wait::until;

const BOUND: Duration = Duration::from_secs(120);

/// Starts the node and waits until it is Ready.
///
/// # Errors
/// When a part cannot be started, dies, or the node is not Ready in 120 s.
pub fn start(layout: &Layout, bin: &Path, options: &Options, watch: &Stopwatch) -> Result<()> {
    cgroup::create(&layout.cgroup())?;
    write_configs(layout, bin, options)?;
    let containerd = process::start(layout, "containerd", bin, words(layout, "containerd -c @/containerd.toml"))?;
    let socket = layout.containerd_socket();
    let ctr = bin.join("ctr").display().to_string();
    until("containerd", BOUND, || {
        alive_or_give_up(layout, "containerd", containerd)?;
        run(&ctr, &["-a", &socket, "version"]).map(Some)
    })?;
    import(layout, bin, &images::pause(&layout.path("images"))?)?;
    watch.say("containerd ready");
    let kubelet = process::start(layout, "kubelet", bin, kubelet_args(layout))?;
    let proxy = process::start(layout, "kubeproxy", bin, words(layout, "kube-proxy --config @/kubeproxy.yaml"))?;
    let ready = r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
    until("the node's Ready", BOUND, || {
        alive_or_give_up(layout, "kubelet", kubelet)?;
        alive_or_give_up(layout, "kubeproxy", proxy)?;
        Ok((kubectl(layout, bin, &["get", "node", NODE, "-o", ready], None)? == "True").then_some(()))
    })?;
    watch.say("node Ready");
    Ok(())
}

/// Puts an image archive into the node's store.
///
/// # Errors
/// In `ctr`'s words.
pub fn import(layout: &Layout, bin: &Path, archive: &Path) -> Result<()> {
    let (ctr, archive) = (bin.join("ctr").display().to_string(), archive.display().to_string());
    // --local: the transfer service would unpack through a second snapshotter configuration
    run(&ctr, &["-a", &layout.containerd_socket(), "-n", "k8s.io", "images", "import", "--local", &archive]).map(drop)
}

fn words(layout: &Layout, template: &str) -> Vec<String> {
    let root = layout.root.display().to_string();
    template.split_whitespace().map(|word| word.replace('@', &root)).collect()
}

fn kubelet_args(layout: &Layout) -> Vec<String> {
    // --containerd (deprecated, cAdvisor's): without it container metrics carry no labels when the socket is not at its usual place
    let template = format!(
        "kubelet --config @/kubelet.yaml --kubeconfig @/pki/{NODE}.kubeconfig --hostname-override {NODE} --node-ip {NODE_IP}
         --root-dir @/kubelet --cert-dir @/kubelet/pki --containerd @/containerd/containerd.sock -v 2"
    );
    words(layout, &template)
}

fn write_configs(layout: &Layout, bin: &Path, options: &Options) -> Result<()> {
    let files = [
        ("containerd.toml", containerd_config(layout, bin)),
        ("kubelet.yaml", kubelet_config(layout, options, cgroup::version()?)),
        ("kubeproxy.yaml", proxy_config(layout)),
        ("cni/10-truebeat.conflist", net::cni_config(layout)),
    ];
    for (name, text) in files {
        let file = layout.path(name);
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn containerd_config(layout: &Layout, bin: &Path) -> String {
    let (root, bin) = (layout.root.display(), bin.display());
    // restrict_oom_score_adj: a machine without CAP_SYS_RESOURCE may not lower it
    // netns_mounts_under_state_dir: the pods' namespaces are ours to take away, by their place and not by guessing names
    format!(
        r#"version = 3
root = "{root}/containerd/root"
state = "{root}/containerd/state"
[grpc]
  address = "{root}/containerd/containerd.sock"
[ttrpc]
  address = "{root}/containerd/containerd.sock.ttrpc"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{bin}/cni"]
    conf_dir = "{root}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "{bin}/runc"
        Root = "{root}/containerd/runc"
        SystemdCgroup = false
"#
    )
}

fn kubelet_config(layout: &Layout, options: &Options, cgroups: Version) -> String {
    let root = layout.root.display();
    let back_off = options
        .restart_period_max_s
        .map_or_else(String::new, |s| format!("crashLoopBackOff: {{maxContainerRestartPeriod: {s}s}}\n"));
    let v1 = if cgroups == Version::V1 { "failCgroupV1: false\n" } else { "" };
    // address and node IP must not be loopback (the kubelet refuses); no thresholds that a full developer's disk would cross;
    // oomScoreAdj 0 for the same reason as in containerd's file; short leases and status periods make a lost node visible in seconds
    format!(
        r#"apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
{v1}{back_off}cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
containerRuntimeEndpoint: unix://{socket}
address: {NODE_IP}
tlsCertFile: {root}/pki/{NODE}.crt
tlsPrivateKeyFile: {root}/pki/{NODE}.key
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: {root}/pki/ca.crt}}}}
authorization: {{mode: Webhook}}
failSwapOn: false
enforceNodeAllocatable: []
evictionHard: {{memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 0%}}
imageGCHighThresholdPercent: 100
makeIPTablesUtilChains: false
oomScoreAdj: 0
resolvConf: ""
volumePluginDir: {root}/volplugins
podLogsDir: {root}/podlogs
syncFrequency: 10s
registerNode: true
registerWithTaints: []
nodeLeaseDurationSeconds: 4
nodeStatusUpdateFrequency: 2s
"#,
        cgroup = layout.cgroup(),
        socket = layout.containerd_socket(),
    )
}

fn proxy_config(layout: &Layout) -> String {
    // masqueradeAll: all pods share one bridge, so a reply would otherwise bypass the address translation
    format!(
        r#"apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddress: {NODE_IP}
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
clusterCIDR: 10.244.0.0/24
hostnameOverride: {NODE}
clientConnection: {{kubeconfig: {kubeconfig}}}
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
nodePortAddresses: ["primary"]
nftables: {{masqueradeAll: true}}
"#,
        kubeconfig = layout.kubeconfig("admin").display(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubelet_accepts_cgroup_v1_only_where_there_is_one_and_the_back_off_only_when_asked() {
        let layout = Layout { name: "t".into(), root: "/r".into() };
        let plain = kubelet_config(&layout, &Options::default(), Version::V2);
        assert!(!plain.contains("failCgroupV1") && !plain.contains("crashLoopBackOff"));
        let quick = Options { restart_period_max_s: Some(1), ..Options::default() };
        let text = kubelet_config(&layout, &quick, Version::V1);
        assert!(text.contains("failCgroupV1: false") && text.contains("maxContainerRestartPeriod: 1s"), "{text}");
    }
}
