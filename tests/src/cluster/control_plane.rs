//! etcd, API server, controller manager and scheduler with the flags that a machine without anything else needs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::layout::{Layout, NODE_IP};
use super::process::{self, Identity};
use super::{Options, Stopwatch, kubectl};
use crate::wait::{GiveUp, until};

/// Below the state folder.
pub const AUDIT_LOG: &str = "audit.jsonl";
const AUDIT_POLICY: &str = "audit-policy.yaml";
const BOUND: Duration = Duration::from_secs(120);

/// Starts the four and waits until the API answers and the controller manager works.
///
/// # Errors
/// When one cannot be started, dies, or is not ready in 120 s.
pub fn start(layout: &Layout, bin: &Path, options: &Options, watch: &Stopwatch) -> Result<()> {
    process::start(layout, "etcd", bin, etcd(layout))?;
    let mut extra = options.apiserver_extra.clone();
    if options.audit {
        extra.extend(audit(layout)?);
    }
    let apiserver = process::start(layout, "apiserver", bin, apiserver(layout, &extra))?;
    until("the API server's /readyz", BOUND, || {
        alive_or_give_up(layout, "apiserver", apiserver)?;
        Ok((kubectl(layout, bin, &["get", "--raw", "/readyz"], None)? == "ok").then_some(()))
    })?;
    watch.say("API server ready");
    let kcm = process::start(layout, "kcm", bin, controller_manager(layout, &options.kcm_extra))?;
    let scheduler = process::start(layout, "sched", bin, scheduler(layout, &options.scheduler_extra))?;
    until("the default ServiceAccount (the controller manager's first work)", BOUND, || {
        alive_or_give_up(layout, "kcm", kcm)?;
        alive_or_give_up(layout, "sched", scheduler)?;
        kubectl(layout, bin, &["-n", "default", "get", "sa", "default"], None).map(Some)
    })?;
    watch.say("controllers work");
    Ok(())
}

/// Writes the policy; gives the flags that make the API server follow it.
fn audit(layout: &Layout) -> Result<[String; 2]> {
    let policy = layout.path(AUDIT_POLICY);
    std::fs::write(&policy, crate::audit::POLICY).with_context(|| format!("cannot write {}", policy.display()))?;
    let log = layout.text(AUDIT_LOG);
    Ok([format!("--audit-policy-file={}", policy.display()), format!("--audit-log-path={log}")])
}

/// [`GiveUp`] with the log's place when the process is dead.
///
/// # Errors
/// Then, and only then.
pub fn alive_or_give_up(layout: &Layout, name: &str, process: Identity) -> Result<()> {
    if process.alive() {
        return Ok(());
    }
    let log = std::fs::read_to_string(layout.log(name)).unwrap_or_default();
    let tail: Vec<&str> = log.lines().rev().take(5).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    Err(GiveUp(format!("{name} died; the end of {}:\n{}", layout.log(name).display(), tail.join("\n"))).into())
}

/// Words of a template (split at white space) with `@` standing for the state folder.
fn argv(layout: &Layout, template: &str, extra: &[String]) -> Vec<String> {
    let root = layout.root.display().to_string();
    template.split_whitespace().map(|word| word.replace('@', &root)).chain(extra.iter().cloned()).collect()
}

fn etcd(layout: &Layout) -> Vec<String> {
    // no fsync: this state is thrown away, and a shared disk would make every write a lottery
    argv(
        layout,
        "etcd --data-dir @/etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379
         --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380
         --initial-cluster default=http://127.0.0.1:2380 --unsafe-no-fsync --log-level warn",
        &[],
    )
}

fn apiserver(layout: &Layout, extra: &[String]) -> Vec<String> {
    // the advertised address must not be loopback, or the `kubernetes` Service gets no endpoint and pods cannot reach the API
    let template = format!(
        "kube-apiserver --etcd-servers http://127.0.0.1:2379 --bind-address 0.0.0.0 --secure-port 6443 --advertise-address {NODE_IP}
         --enable-aggregator-routing --tls-cert-file @/pki/apiserver.crt --tls-private-key-file @/pki/apiserver.key
         --client-ca-file @/pki/ca.crt --service-account-key-file @/pki/sa.pub --service-account-signing-key-file @/pki/sa.key
         --service-account-issuer https://kubernetes.default.svc --service-cluster-ip-range 10.96.0.0/24
         --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction --allow-privileged=true
         --kubelet-client-certificate @/pki/kubelet-client.crt --kubelet-client-key @/pki/kubelet-client.key
         --kubelet-certificate-authority @/pki/ca.crt --kubelet-preferred-address-types InternalIP,Hostname
         --proxy-client-cert-file @/pki/front-proxy.crt --proxy-client-key-file @/pki/front-proxy.key
         --requestheader-client-ca-file @/pki/ca.crt --requestheader-allowed-names front-proxy-client
         --requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group
         --requestheader-extra-headers-prefix X-Remote-Extra-"
    );
    argv(layout, &template, extra)
}

fn controller_manager(layout: &Layout, extra: &[String]) -> Vec<String> {
    argv(
        layout,
        "kube-controller-manager --kubeconfig @/pki/kcm.kubeconfig --authentication-kubeconfig @/pki/kcm.kubeconfig
         --authorization-kubeconfig @/pki/kcm.kubeconfig --bind-address 127.0.0.1
         --service-account-private-key-file @/pki/sa.key --root-ca-file @/pki/ca.crt --cluster-signing-cert-file @/pki/ca.crt
         --cluster-signing-key-file @/pki/ca.key --use-service-account-credentials --leader-elect=false",
        extra,
    )
}

fn scheduler(layout: &Layout, extra: &[String]) -> Vec<String> {
    argv(
        layout,
        "kube-scheduler --kubeconfig @/pki/sched.kubeconfig --authentication-kubeconfig @/pki/sched.kubeconfig
         --authorization-kubeconfig @/pki/sched.kubeconfig --bind-address 127.0.0.1 --leader-elect=false",
        extra,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_words_below_the_state_folder() {
        let layout = Layout { name: "t".into(), root: "/state dir".into() };
        let words = apiserver(&layout, &["--v=4".to_owned()]);
        assert_eq!(words[0], "kube-apiserver");
        assert!(
            words.contains(&"/state dir/pki/ca.crt".to_owned()),
            "a space in the folder's name does not split a word"
        );
        assert_eq!(words.last().map(String::as_str), Some("--v=4"));
        assert!(words.iter().all(|word| !word.contains('@')));
    }
}
