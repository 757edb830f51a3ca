//! Step programs in the engine as a process: they run its decodes, the flag that forbids them does, and the flight recorder tells (E2, H6).

use std::time::{Duration, Instant};

use heartbeat::Reader;
use serde_json::json;

use crate::client::{metric, post};
use crate::process::Engine;

async fn generate(engine: &Engine) -> String {
    let body = json!({"prompt": "once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    post(engine.addr, "/v1/completions", &body).await.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn decodes_run_by_programs_unless_that_is_forbidden_and_say_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("pages");
    let page_args = ["--page-dir", pages.to_str().unwrap()];
    let engine = Engine::ready(dir.path(), &page_args).await;
    let said = generate(&engine).await;
    let since = Instant::now();
    while metric(engine.addr, "truebeat:steps_replayed_total", &[]).await == 0.0 {
        assert!(since.elapsed() < Duration::from_secs(60), "never replayed");
        assert_eq!(generate(&engine).await, said);
    }
    assert!(metric(engine.addr, "truebeat:programs_captured_total", &[]).await > 0.0);
    let steps = Reader::open(&pages, 0).steps().unwrap();
    assert!(steps.iter().any(|step| step.graph_key != 0), "{steps:?}");
    drop(engine);
    let eager = Engine::ready(dir.path(), &["--enforce-eager"]).await;
    assert_eq!(generate(&eager).await, said);
    let never =
        ["truebeat:steps_replayed_total", "truebeat:programs_captured_total", "truebeat:programs_evicted_total"];
    for name in never {
        assert_eq!(metric(eager.addr, name, &[]).await, 0.0, "{name}");
    }
}
