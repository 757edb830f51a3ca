//! What a client sees of the scheduler: deadlines that cannot be met, priorities, shared beginnings, guesses.

use std::time::Duration;

use engine::handle::GenerateRequest;
use engine::server::TIMEOUT_HEADER;
use engine::speculation::SpeculationSpec;
use serde_json::json;

use crate::client::{metric, metric_becomes, open, post, whole};
use crate::support::{Setup, TestEngine, greedy};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_cannot_be_met_is_refused_at_once_with_the_figures() {
    // The pace is learned from the first prompt: at least five milliseconds a token, and so the second needs nine seconds and a half.
    let engine = TestEngine::ready(Setup { step_ms: 500, ..Setup::default() }).await;
    let body = |word: &str, count: usize| json!({"prompt": word.repeat(count), "max_tokens": 1, "temperature": 0});
    assert_eq!(post(engine.addr, COMPLETIONS, &body("a", 100)).await.status, 200);
    let answer = whole(open(engine.addr, COMPLETIONS, &body("b", 1900), &[(TIMEOUT_HEADER, "4000")]).await).await;
    assert_eq!(answer.status, 503, "{}", answer.text);
    assert_eq!(answer.json()["error"]["code"], "deadline_unreachable");
    assert!(answer.header("retry-after").is_some());
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("needs") && message.contains("the deadline is in"), "{message}");
    assert_eq!(metric(engine.addr, "truebeat:requests_ended_total", &["\"late\""]).await, 1.0);
    assert_eq!(metric(engine.addr, "truebeat:deadlines_exceeded_total", &[]).await, 0.0, "it was not waited for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_passes_during_the_output_is_told_as_that_whoever_is_the_first_to_see_it() {
    let engine = TestEngine::ready(Setup { step_ms: 5, ..Setup::default() }).await;
    let long = json!({"prompt": "long", "max_tokens": 1500, "temperature": 0, "ignore_eos": true});
    for _ in 0..3 {
        let answer = whole(open(engine.addr, COMPLETIONS, &long, &[(TIMEOUT_HEADER, "1500")]).await).await;
        assert_eq!(answer.json()["error"]["code"], "deadline_exceeded", "{}", answer.text);
    }
    assert_eq!(metric(engine.addr, "truebeat:deadlines_exceeded_total", &[]).await, 3.0);
}

/// A reader that is blocked does not look at the clock.
#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_reads_does_not_run_past_its_deadline() {
    let engine = TestEngine::ready(Setup { step_ms: 5, ..Setup::default() }).await;
    // long enough to begin in, however late a busy machine is
    let deadline_ns = Some(heartbeat::monotonic_ns() + 2_000_000_000);
    let long = GenerateRequest { prompt: [97].into(), max_new_tokens: 1500, ignore_eos: true, ..Default::default() };
    let _unread = engine.handle.submit(vec![GenerateRequest { deadline_ns, ..long }]).unwrap();
    metric_becomes(engine.addr, "truebeat:requests_ended_total", &["\"abort\""], 1.0).await;
    metric_becomes(engine.addr, "vllm:kv_cache_usage_perc", &[], 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_higher_priority_takes_the_place_of_a_lower_one() {
    let mut setup = Setup { step_ms: 5, ..Setup::default() };
    setup.core.num_seqs_max = 1;
    let engine = TestEngine::ready(setup).await;
    let long = json!({"prompt": "long", "max_tokens": 1500, "ignore_eos": true, "stream": true});
    let running = open(engine.addr, COMPLETIONS, &long, &[]).await;
    let urgent = json!({"prompt": "urgent", "max_tokens": 5, "temperature": 0, "ignore_eos": true, "priority": -1});
    let answer = post(engine.addr, COMPLETIONS, &urgent).await;
    assert_eq!(answer.json()["choices"][0]["text"], greedy("urgent", 5, true));
    assert!(metric(engine.addr, "vllm:num_preemptions_total", &[]).await >= 1.0);
    // the answer is there a moment before its place is free
    let alone = async {
        while metric(engine.addr, "truebeat:requests_in_flight", &[]).await != 1.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), alone).await.expect("the other one goes on");
    drop(running);
    let wrong = post(engine.addr, COMPLETIONS, &json!({"prompt": "a", "priority": "high"})).await;
    assert_eq!((wrong.status, wrong.json()["error"]["param"].as_str()), (400, Some("priority")));
}

#[tokio::test(flavor = "multi_thread")]
async fn beginnings_that_were_run_before_are_hits() {
    let engine = TestEngine::ready(Setup::default()).await;
    let prompt = "the same forty letters or so, as they are".repeat(2);
    for _ in 0..2 {
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        assert_eq!(post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0]["text"], greedy(&prompt, 8, true));
    }
    assert_eq!(metric(engine.addr, "vllm:prefix_cache_queries_total", &[]).await, 2.0 * prompt.len() as f64);
    assert_eq!(metric(engine.addr, "vllm:prefix_cache_hits_total", &[]).await, 80.0, "whole blocks of 16");
}

#[tokio::test(flavor = "multi_thread")]
async fn guesses_show_in_the_metrics_and_not_in_the_answer() {
    let mut setup = Setup::default();
    (setup.core.speculation, setup.core.speculates_always) = (Some(SpeculationSpec::Ngram), true);
    let engine = TestEngine::ready(setup).await;
    let prompt = "abcabcabcabcabcabcabcabc";
    let body = json!({"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": true, "logprobs": 1});
    let answer = post(engine.addr, COMPLETIONS, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], greedy(prompt, 60, true));
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 60);
    assert_eq!(metric(engine.addr, "truebeat:speculation_on", &[]).await, 1.0);
    let mut by_place = 0.0;
    for place in ["\"0\"", "\"1\"", "\"2\"", "\"3\""] {
        by_place += metric(engine.addr, "vllm:spec_decode_num_accepted_tokens_per_pos_total", &[place]).await;
    }
    assert_eq!(by_place, metric(engine.addr, "vllm:spec_decode_num_accepted_tokens_total", &[]).await);
}
