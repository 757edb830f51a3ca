//! A gate in the place of one that is gone: what its forerunner was told still holds.

use std::time::Duration;

use agent::gate::control::GateClient;
use agent::gate::ledger::Control;
use agent::gate::memory::{kept_beside, recall};
use agent::gate::run;
use tokio::net::TcpListener;

use super::{Gate, SOON, config, engine, post, rest};

#[tokio::test]
async fn a_gate_that_starts_anew_stays_shut_and_changes_its_epoch() {
    let (_listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    gate.control = Control { fenced: true, ..Control::default() };
    let first = gate.until("shut", |r| r.shut).await;
    let control = gate._dir.path().join("gate.sock");
    // the gate does not wait for a slow disk, and one that is killed before the write remembers nothing
    let kept = async {
        while !recall(&kept_beside(&control)).fenced {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, kept).await.expect("the fence is never kept");
    gate.task.abort();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    gate.address = listener.local_addr().unwrap().to_string();
    let config = config(&upstream, &control);
    gate.task = tokio::spawn(async move { run(listener, config).await.unwrap() });
    let refused = rest(&mut gate.send(&post("/v1/completions", "{}")).await).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "before any exchange: {refused}");
    gate.client = GateClient::new(control);
    let second = gate.until("the new gate", |_| true).await;
    assert!(second.shut && second.obs.epoch != first.obs.epoch);
}
