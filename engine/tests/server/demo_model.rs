//! The whole of `truebeat engine` but the process: a real tiny model, its tokenizer and template, signals.

use std::time::Duration;

use clap::Parser;
use engine::cli::{EngineArgs, run};
use nix::sys::signal::{Signal, raise};
use serde_json::json;

use crate::client::{get, metric, post};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    engine: EngineArgs,
}

fn free_addr() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demo_model_serves_text_and_chat_until_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("tiny");
    engine::demo_model::write_demo_model(&model, engine::demo_model::DemoArch::Llama, 0).unwrap();
    let addr = free_addr();
    let pages = dir.path().join("pages");
    let words =
        ["x", "--model", model.to_str().unwrap(), "--listen", &addr.to_string(), "--page-dir", pages.to_str().unwrap()];
    let args = Cli::try_parse_from(words).unwrap().engine;
    let served = tokio::spawn(run(args));
    let ready = async {
        while tokio::net::TcpStream::connect(addr).await.is_err() || get(addr, "/health").await.status != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), ready).await.expect("ready in time");
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
    raise(Signal::SIGTERM).unwrap();
    tokio::time::timeout(Duration::from_secs(30), served).await.expect("drained in time").unwrap().unwrap();
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
