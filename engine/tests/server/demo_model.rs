//! The whole of `truebeat engine`: a real tiny model, its tokenizer and template, arguments, signals.

use clap::Parser;
use engine::cli::EngineArgs;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::client::{metric, post};
use crate::process::Engine;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    engine: EngineArgs,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demo_model_serves_text_and_chat_until_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("pages");
    let mut engine = Engine::ready(dir.path(), &["--page-dir", pages.to_str().unwrap()]).await;
    let addr = engine.addr;
    let body =
        json!({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let whole = post(addr, "/v1/completions", &body).await.json();
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let chunks = post(addr, "/v1/completions", &streamed).await.chunks();
    let text: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(whole["choices"][0]["text"], text);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": true});
    let answer = post(addr, "/v1/chat/completions", &chat).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(metric(addr, "vllm:generation_tokens_total", &["model_name=\"tiny\""]).await, 29.0);
    assert!(pages.join("rank-0.beat").is_file());
    engine.signal(Signal::SIGTERM);
    assert_eq!(engine.ended().await.code(), Some(0));
}

#[test]
fn arguments_are_checked_with_reasons() {
    let parse = |more: &[&str]| Cli::try_parse_from([&["x", "--model", "m"], more].concat());
    let args =
        parse(&["--fault", "step-stall@10s", "--fault", "crash@sigusr2", "--request-timeout", "90s"]).unwrap().engine;
    assert_eq!((args.fault.len(), args.request_timeout.as_secs()), (2, 90));
    let error = |more: &[&str]| parse(more).map(|_| ()).unwrap_err().to_string();
    assert!(error(&["--fault", "nap"]).contains("allowed: step-stall"));
    assert!(error(&["--block-size", "0"]).contains("--block-size"));
}
