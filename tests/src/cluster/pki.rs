//! The keys of a cluster: a certificate authority, a certificate for each party, kubeconfigs, the key of service-account tokens.
//! Made by `openssl` (EC keys: a second for all of them) so that no crypto library enters the tree for the tests' sake.

use std::fs;

use anyhow::{Context, Result};

use super::command::run;
use super::layout::{Layout, NODE, NODE_IP};

const APISERVER_NAMES: &str = "IP:127.0.0.1,IP:10.96.0.1,IP:10.244.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,\
    DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local";
const DAYS: &str = "3650";

/// Writes `pki/` whole.
///
/// # Errors
/// When `openssl` is missing or refuses, or the folder cannot be written.
pub fn create(layout: &Layout) -> Result<()> {
    let node_names = format!("DNS:{NODE},IP:127.0.0.1,IP:{NODE_IP}");
    let node_subject = format!("/O=system:nodes/CN=system:node:{NODE}");
    authority(layout)?;
    certificate(layout, "apiserver", "/CN=kube-apiserver", "serverAuth", Some(APISERVER_NAMES))?;
    certificate(layout, "admin", "/O=system:masters/CN=admin", "clientAuth", None)?;
    certificate(layout, "kcm", "/CN=system:kube-controller-manager", "clientAuth", None)?;
    certificate(layout, "sched", "/CN=system:kube-scheduler", "clientAuth", None)?;
    certificate(layout, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "clientAuth", None)?;
    certificate(layout, NODE, &node_subject, "clientAuth,serverAuth", Some(&node_names))?;
    certificate(layout, "front-proxy", "/CN=front-proxy-client", "clientAuth", None)?;
    let (private, public) = (layout.text("pki/sa.key"), layout.text("pki/sa.pub"));
    run("openssl", &["genrsa", "-out", &private, "2048"])?;
    run("openssl", &["rsa", "-in", &private, "-pubout", "-out", &public])?;
    ["admin", "kcm", "sched", NODE].iter().try_for_each(|user| kubeconfig(layout, user))
}

fn key(layout: &Layout, name: &str) -> Result<String> {
    let file = layout.text(&format!("pki/{name}.key"));
    run("openssl", &["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &file])?;
    Ok(file)
}

fn authority(layout: &Layout) -> Result<()> {
    let key = key(layout, "ca")?;
    let mut args = vec!["req", "-x509", "-new", "-key", &key, "-subj", "/CN=kubernetes-ca", "-days", DAYS];
    let out = layout.text("pki/ca.crt");
    args.extend(["-out", &out, "-addext", "basicConstraints=critical,CA:TRUE"]);
    args.extend(["-addext", "keyUsage=critical,keyCertSign,cRLSign"]);
    run("openssl", &args).map(drop)
}

fn certificate(layout: &Layout, name: &str, subject: &str, usage: &str, names: Option<&str>) -> Result<()> {
    let key = key(layout, name)?;
    let file = |suffix: &str| layout.text(&format!("pki/{name}.{suffix}"));
    let (request, extensions, out) = (file("csr"), file("ext"), file("crt"));
    let mut text = format!("keyUsage=critical,digitalSignature,keyEncipherment\nextendedKeyUsage={usage}\n");
    if let Some(names) = names {
        text.push_str(&format!("subjectAltName={names}\n"));
    }
    fs::write(&extensions, text).with_context(|| format!("cannot write {extensions}"))?;
    run("openssl", &["req", "-new", "-key", &key, "-subj", subject, "-out", &request])?;
    let (authority, authority_key) = (layout.text("pki/ca.crt"), layout.text("pki/ca.key"));
    let mut args =
        vec!["x509", "-req", "-in", &request, "-CA", &authority, "-CAkey", &authority_key, "-CAcreateserial"];
    args.extend(["-days", DAYS, "-extfile", &extensions, "-out", &out]);
    run("openssl", &args).map(drop)
}

fn kubeconfig(layout: &Layout, user: &str) -> Result<()> {
    let pki = layout.text("pki");
    let text = format!(
        r#"apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:6443", certificate-authority: {pki}/ca.crt}}}}]
users: [{{name: u, user: {{client-certificate: {pki}/{user}.crt, client-key: {pki}/{user}.key}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"#
    );
    let file = layout.kubeconfig(user);
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}
