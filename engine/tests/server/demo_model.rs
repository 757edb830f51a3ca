//! The whole of `truebeat engine`: a real tiny model, its tokenizer and template, arguments, signals.

use std::path::Path;

use clap::Parser;
use engine::cli::EngineArgs;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

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

/// The tokenizer's library panics over every prompt that is text, and over the token `h` where it is put out.
fn harm_tokenizer(model: &Path) {
    let path = model.join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let parts = json!([{"SpecialToken": {"id": "<|gone|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    json["post_processor"] =
        json!({"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}});
    json["decoder"] = json!({"type": "Strip", "content": "h", "start": 1, "stop": 1});
    std::fs::write(&path, json.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_over_which_the_tokenizer_panics_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::launched_with(dir.path(), &[], harm_tokenizer).until_ready().await;
    let addr = engine.addr;
    let tokens = json!({"prompt": "h", "add_special_tokens": false});
    let tokens = post(addr, "/tokenize", &tokens).await.json()["tokens"].clone();
    let well = json!({"prompt": tokens, "max_tokens": 3, "temperature": 0, "ignore_eos": true});
    let (mut text, mut put_out) = (well.clone(), well.clone());
    text["prompt"] = "h".into();
    put_out["logit_bias"] = json!({tokens[0].to_string(): 100});
    for _ in 0..2 {
        let answer = post(addr, "/v1/completions", &text).await;
        assert!(
            answer.status == 400 && answer.text.contains("cannot be encoded"),
            "{}: {}",
            answer.status,
            answer.text
        );
        let answer = post(addr, "/v1/completions", &put_out).await;
        assert!(
            answer.status == 500 && answer.text.contains("cannot be decoded"),
            "{}: {}",
            answer.status,
            answer.text
        );
        put_out["stream"] = true.into();
        let answer = post(addr, "/v1/completions", &put_out).await;
        assert!(answer.text.contains("cannot be decoded"), "the stream ends in an error: {}", answer.text);
        put_out["stream"] = false.into();
        assert_eq!(post(addr, "/v1/completions", &well).await.status, 200, "its neighbours are served");
    }
    assert_eq!(
        metric(addr, "vllm:num_requests_running", &["model_name=\"tiny\""]).await,
        0.0,
        "nothing is left running"
    );
    engine.signal(Signal::SIGTERM);
    assert_eq!(engine.ended().await.code(), Some(0));
}
