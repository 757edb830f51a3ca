//! What NCCL's RAS says of its ranks, word for word in the bundle: that is what whoever looks into a hang of many ranks asks for.

use std::net::SocketAddr;
use std::path::Path;

use agent::forensics::bundle::{self, BundleContents};
use agent::forensics::{CaptureRequest, capture};
use agent::sources::clock::monotonic_ms;
use vitals::observation::{Observation, RasObs, Signal};

use super::ras_server::{JSON, Manner, TEXT, server};
use super::{MARKER, request, unheard};

async fn captured(dir: &Path, before: Option<&str>, address: String) -> BundleContents {
    let ras_before = before.map(|text| (77, text.to_owned()));
    let request = CaptureRequest { ras_before, ras_address: Some(address), ..request(dir, None) };
    bundle::read(&capture(request, unheard).await.bundle.unwrap()).unwrap()
}

fn ras(contents: &BundleContents) -> Option<&str> {
    contents.entries.iter().find(|entry| entry.name == "ras.txt").map(|entry| entry.text.as_str())
}

fn notes(contents: &BundleContents) -> Vec<&String> {
    contents.manifest.notes.iter().filter(|note| note.contains("nccl ras")).collect()
}

#[tokio::test]
async fn what_nccls_ras_answered_last_and_answers_now_is_in_the_bundle_redacted() {
    let directory = tempfile::tempdir().unwrap();
    // a secret of the engine's command line, and what no NCCL says
    let before = format!("{TEXT}host {MARKER}\n{{\"prompt\": \"a user's words\"}}\n");
    // (a machine that gives nobody a core for a second costs the second answer)
    for attempt in 1.. {
        let contents = captured(directory.path(), Some(&before), server(Manner::Json).await).await;
        let told = ras(&contents).unwrap();
        assert!(told.starts_with(&format!("# asked at 77 ms of CLOCK_MONOTONIC\n{TEXT}")), "{told}");
        assert!(!told.contains(MARKER) && !told.contains("a user's words"), "{told}");
        if told.contains(&format!(" ms of CLOCK_MONOTONIC\n{}", JSON.trim_end())) {
            assert!(notes(&contents).is_empty(), "{:?}", contents.manifest.notes);
            return;
        }
        assert!(attempt < 3, "{told}; {:?}", contents.manifest.notes);
    }
}

/// NCCL waits two seconds for a rank that is silent, which is when its answer is worth most.
#[tokio::test]
async fn the_answer_of_a_service_that_waits_for_a_silent_rank_is_in_the_bundle() {
    let directory = tempfile::tempdir().unwrap();
    // (a machine that gives nobody a core for a second costs the answer)
    for attempt in 1.. {
        let contents = captured(directory.path(), None, server(Manner::Waits).await).await;
        if ras(&contents).is_some_and(|told| told.ends_with(&format!("CLOCK_MONOTONIC\n{}\n", JSON.trim_end()))) {
            return;
        }
        assert!(attempt < 3, "{:?}", contents.manifest.notes);
    }
}

#[tokio::test]
async fn a_service_that_has_named_the_silent_rank_is_not_waited_for_once_more() {
    let directory = tempfile::tempdir().unwrap();
    let now_ms = monotonic_ms();
    let said = RasObs { silent_ranks: vec![21], answered: true, ..RasObs::default() };
    let request = CaptureRequest {
        ras_before: Some((now_ms, TEXT.to_owned())),
        ras_address: Some(server(Manner::Half).await),
        observation: Some(Observation { ras: Signal::at(now_ms, said), ..Observation::default() }),
        ..request(directory.path(), None)
    };
    let contents = bundle::read(&capture(request, unheard).await.bundle.unwrap()).unwrap();
    let last = format!("# asked at {now_ms} ms of CLOCK_MONOTONIC\n{}\n", TEXT.trim_end());
    assert_eq!(ras(&contents), Some(last.as_str()));
    assert!(notes(&contents).is_empty(), "it was asked: {:?}", contents.manifest.notes);
}

#[tokio::test]
async fn a_service_that_does_not_answer_in_time_costs_a_note_and_one_that_is_not_there_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let contents = captured(directory.path(), Some(TEXT), server(Manner::Half).await).await;
    assert_eq!(ras(&contents).unwrap().matches("# asked at").count(), 1, "the last answer is there");
    assert!(notes(&contents)[0].contains("did not answer in full within 3000 ms"), "{:?}", contents.manifest.notes);
    let closed: SocketAddr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let contents = captured(directory.path(), None, closed.to_string()).await;
    assert_eq!((ras(&contents), notes(&contents)), (None, vec![]));
}
