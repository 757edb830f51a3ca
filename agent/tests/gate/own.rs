//! The agent's own question: known by a word of the gate's, which clients do not have and engines do not see.

use agent::gate::ledger::Control;
use agent::gate::print::Print;
use agent::gate::suspects::Poison;
use tokio::io::AsyncWriteExt;

use super::{Gate, engine, rest, take};

const PATH: &str = "/v1/completions";
const BODY: &str = r#"{"prompt":"hangs"}"#;

fn marked(word: &str) -> String {
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-truebeat-own: {word}\r\n");
    format!("{head}content-length: {}\r\n\r\n{BODY}", BODY.len())
}

/// A gate that refuses [`BODY`], and its word.
async fn refusing(upstream: &str) -> (Gate, String) {
    let mut gate = Gate::before(upstream).await;
    let request = Print::of(PATH, BODY.as_bytes()).to_string();
    gate.control = Control { poison: vec![Poison { request, since_ms: u64::MAX }], ..Control::default() };
    gate.until("told", |_| true).await;
    let word = gate.client.own().expect("the gate tells its detector").to_owned();
    (gate, word)
}

#[tokio::test]
async fn a_client_does_not_pass_for_the_agent() {
    let (listener, upstream) = engine().await;
    let (mut gate, word) = refusing(&upstream).await;
    for guess in ["1", "", &word[1..], &word.to_uppercase().replace(char::is_numeric, "x")] {
        let refused = rest(&mut gate.send(&marked(guess)).await).await;
        assert!(refused.starts_with("HTTP/1.1 422"), "{guess}: {refused}");
    }
    gate.control = Control::default();
    gate.until("told", |_| true).await;
    let client = gate.send(&marked("1")).await;
    let (_server, asked) = take(&listener).await;
    assert!(!asked.to_lowercase().contains("truebeat"), "{asked}");
    let suspects = gate.answered(async |client| client.suspects().await).await;
    assert_eq!(suspects.len(), 1, "its request may be what stalls the engine, too");
    drop(client);
}

#[tokio::test]
async fn the_agents_own_question_is_never_poison_and_goes_on_without_its_mark() {
    let (listener, upstream) = engine().await;
    let (mut gate, word) = refusing(&upstream).await;
    let mut client = gate.send(&marked(&word)).await;
    let (mut server, asked) = take(&listener).await;
    assert!(!asked.contains(&word) && !asked.to_lowercase().contains("truebeat"), "{asked}");
    assert!(gate.answered(async |client| client.suspects().await).await.is_empty());
    server.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert!(rest(&mut client).await.ends_with("ok"));
    let (_, other) = refusing(&upstream).await;
    assert_ne!(word, other, "drawn anew at each start");
}
