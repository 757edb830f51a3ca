//! The sidecar's supervisor, without an engine of its own.

use std::net::TcpListener;
use std::process::{Child, Command};

use agent::kill::send;
use nix::sys::signal::Signal;

use crate::asking::{get, until};
use crate::not_run::not_run;
use crate::run::AGENT;
use crate::run::free_addresses::free_addresses;

/// Its children end with it.
struct Sidecar(Child);

impl Drop for Sidecar {
    fn drop(&mut self) {
        send(&[self.0.id().cast_signed()], Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

#[test]
fn in_a_pod_whoever_asks_is_answered_at_addresses_of_both_kinds() {
    if TcpListener::bind("[::1]:0").is_err() {
        return not_run("there is no IPv6 here");
    }
    let dir = tempfile::tempdir().unwrap();
    let [gate, agent] = free_addresses().map(|address| address.port());
    let path = |name: &str| dir.path().join(name);
    let sidecar = Command::new(AGENT)
        .args(["agent", "supervise", "--no-nvml", "--recovery-mode=Observe", "--outlive=0s"])
        .args([format!("--listen=0.0.0.0:{gate}"), format!("--agent-listen=0.0.0.0:{agent}")])
        .args(["--engine-url=http://127.0.0.1:1", "--agent-dir"])
        .arg(path("agent"))
        .arg("--page-dir")
        .arg(path("pages"))
        .arg("--bundle-dir")
        .arg(path("bundles"))
        .spawn();
    let _sidecar = Sidecar(sidecar.unwrap());
    for host in ["127.0.0.1", "[::1]"] {
        let status = |port, path| get(&format!("{host}:{port}"), path).and_then(|text| text.get(9..12)?.parse().ok());
        until("a probe's answer", || status(agent, "/livez") == Some(200));
        until("the gate's word of an engine that is not there", || status(gate, "/health") == Some(503));
    }
}
