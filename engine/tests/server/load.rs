//! Many requests at once: full queues, few blocks, clients that leave or do not read, poisoned requests, drains.

use std::sync::atomic::Ordering;

use engine::handle::{End, GenerateRequest};
use engine::server::serve::ServeError;
use serde_json::{Value, json};

use crate::client::{get, metric, metric_becomes, open, post, whole};
use crate::support::{NAN, POISON, Setup, TestEngine, greedy, wait_until};

const COMPLETIONS: &str = "/v1/completions";

fn long(stream: bool) -> serde_json::Value {
    json!({"prompt": "long", "max_tokens": 1500, "temperature": 0, "ignore_eos": true, "stream": stream})
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_do_not_depend_on_batching_chunking_or_preemption() {
    // a step lasts, so that the requests meet however late a busy machine brings them
    let mut setup = Setup { step_ms: 5, ..Setup::default() };
    // 15 blocks of 4 tokens for 8 sequences of up to 46 tokens, 10 tokens a step: everybody is preempted now and then.
    (setup.core.block_size, setup.core.num_blocks, setup.core.step_tokens_max) = (4, Some(15), 10);
    let engine = TestEngine::ready(setup).await;
    let prompts: Vec<String> = (0..12).map(|i| format!("prompt number {i}")).collect();
    let bodies = prompts.iter().map(|p| json!({"prompt": p, "max_tokens": 30, "temperature": 0, "ignore_eos": true}));
    let bodies: Vec<_> = bodies.collect();
    let answers = futures::future::join_all(bodies.iter().map(|b| post(engine.addr, COMPLETIONS, b))).await;
    for (prompt, answer) in prompts.iter().zip(answers) {
        assert_eq!(answer.json()["choices"][0]["text"], greedy(prompt, 30, true));
    }
    assert!(metric(engine.addr, "vllm:num_preemptions_total", &[]).await > 0.0, "the test wants preemptions");
    metric_becomes(engine.addr, "vllm:kv_cache_usage_perc", &[], 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_blocks() {
    let engine = TestEngine::ready(Setup { step_ms: 5, ..Setup::default() }).await;
    let streamed = open(engine.addr, COMPLETIONS, &long(true), &[]).await;
    let body = long(false);
    let addr = engine.addr;
    let waiting = tokio::spawn(async move { post(addr, COMPLETIONS, &body).await });
    wait_until("two are in", || engine.handle.shared.in_flight() == 2).await;
    assert!(metric(engine.addr, "vllm:kv_cache_usage_perc", &[]).await > 0.0);
    assert!(!waiting.is_finished(), "it is not done so soon");
    waiting.abort();
    drop(streamed);
    metric_becomes(engine.addr, "vllm:kv_cache_usage_perc", &[], 0.0).await;
    metric_becomes(engine.addr, "vllm:request_success_total", &["\"abort\""], 2.0).await;
    metric_becomes(engine.addr, "truebeat:requests_in_flight", &[], 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_answers_429_with_retry_after() {
    let mut setup = Setup { step_ms: 5, ..Setup::default() };
    (setup.core.num_seqs_max, setup.core.queue_max) = (1, 1);
    let engine = TestEngine::ready(setup).await;
    let first = open(engine.addr, COMPLETIONS, &long(true), &[]).await;
    let body = long(true);
    let second = tokio::spawn(async move { open(engine.addr, COMPLETIONS, &body, &[]).await });
    wait_until("two requests are in", || engine.handle.shared.in_flight() == 2).await;
    let third = post(engine.addr, COMPLETIONS, &long(false)).await;
    assert_eq!((third.status, third.header("retry-after")), (429, Some("1")));
    assert_eq!(third.json()["error"]["code"], "queue_full");
    drop(first);
    // The second one runs now: its head arrives.
    assert_eq!(second.await.unwrap().status(), 200);
    metric_becomes(engine.addr, "truebeat:requests_in_flight", &[], 0.0).await;
    assert_eq!(post(engine.addr, COMPLETIONS, &json!({"prompt": "a", "max_tokens": 1})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_never_be_taken_is_refused_for_good_and_not_put_off() {
    let mut setup = Setup::default();
    (setup.core.num_seqs_max, setup.core.queue_max) = (100, 100);
    let engine = TestEngine::ready(setup).await;
    let ask = |n: usize, form: &str| {
        let prompts = vec!["a"; 2];
        let mut body = json!({"prompt": prompts, "n": n / 2, "max_tokens": 1, "temperature": 1});
        body.as_object_mut().unwrap().extend((!form.is_empty()).then(|| ("guided_regex".to_owned(), json!(form))));
        body
    };
    for (body, most) in [(ask(202, ""), "200"), (ask(130, "[a-z]"), "128"), (ask(256, "[a-z]"), "128")] {
        let answer = post(engine.addr, COMPLETIONS, &body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, error["param"].as_str()), (400, Some("n")), "{}", answer.text);
        assert!(error["message"].as_str().unwrap().contains(most) && answer.header("retry-after").is_none(), "{error}");
    }
    for body in [ask(200, ""), ask(128, "[a-z]")] {
        let answer = post(engine.addr, COMPLETIONS, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_does_not_read_is_cut_and_nobody_waits_for_it() {
    let mut setup = Setup::default();
    setup.core.client_queue = 4;
    let engine = TestEngine::ready(setup).await;
    let request =
        |n| GenerateRequest { prompt: [97].into(), max_new_tokens: n, ignore_eos: true, ..Default::default() };
    let mut slow = engine.handle.submit(vec![request(500)]).unwrap().remove(0);
    metric_becomes(engine.addr, "truebeat:requests_ended_total", &["\"cut\""], 1.0).await;
    let mut count = 0;
    let end = loop {
        match slow.next().await {
            Ok(_) => count += 1,
            Err(end) => break end,
        }
    };
    assert_eq!((count, end), (4, End::Cut));
    assert_eq!(slow.next().await, Err(End::Cut), "the end stays the end");
    let mut quick = engine.handle.submit(vec![request(3)]).unwrap().remove(0);
    while quick.next().await.is_ok() {}
    assert_eq!(quick.next().await, Err(End::Length));
}

fn one_token(prompt: usize) -> GenerateRequest {
    GenerateRequest { prompt: vec![97; prompt].into(), max_new_tokens: 1, ignore_eos: true, ..Default::default() }
}

/// What comes while a step lasts comes at once.
async fn during_a_step<T>(engine: &TestEngine, comes: impl FnOnce() -> T) -> T {
    engine.knobs.hold_step.store(true, Ordering::Relaxed);
    let mut running = engine.handle.submit(vec![one_token(1)]).unwrap().remove(0);
    wait_until("the step is under way", || engine.knobs.holds.load(Ordering::Relaxed)).await;
    let came = comes();
    engine.knobs.hold_step.store(false, Ordering::Relaxed);
    assert!(running.next().await.is_ok());
    came
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_is_taken_in_bit_by_bit() {
    let mut setup = Setup::default();
    (setup.core.num_seqs_max, setup.core.queue_max, setup.core.guards) = (200, 200, false);
    let engine = TestEngine::ready(setup).await;
    let burst = || engine.handle.submit((0..150).map(|_| one_token(1)).collect()).unwrap();
    for mut stream in during_a_step(&engine, burst).await {
        while stream.next().await.is_ok() {}
        assert_eq!(stream.next().await, Err(End::Length));
    }
    let most = engine.knobs.step_seqs_max.load(Ordering::Relaxed);
    assert_eq!(most, 32, "sequences in a step, each of which lasts no longer");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_left_before_its_turn_is_not_looked_at() {
    let mut setup = Setup { step_ms: 20, ..Setup::default() };
    setup.core.guards = false;
    let engine = TestEngine::ready(setup).await;
    // the pace is known then
    let mut first = engine.handle.submit(vec![one_token(100)]).unwrap().remove(0);
    while first.next().await.is_ok() {}
    let late = GenerateRequest { deadline_ns: Some(1), ..one_token(100) };
    during_a_step(&engine, || drop(engine.handle.submit(vec![late]).unwrap())).await;
    metric_becomes(engine.addr, "truebeat:requests_in_flight", &[], 0.0).await;
    assert_eq!(metric(engine.addr, "truebeat:requests_ended_total", &["\"abort\""]).await, 1.0);
    assert_eq!(metric(engine.addr, "truebeat:requests_ended_total", &["\"late\""]).await, 0.0, "nobody asked for it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_request_fails_alone() {
    let engine = TestEngine::ready(Setup { step_ms: 2, ..Setup::default() }).await;
    let neighbour = json!({"prompt": "fine", "max_tokens": 100, "temperature": 0, "ignore_eos": true});
    for poison in [POISON, NAN] {
        let body = json!({"prompt": [97, poison], "max_tokens": 4});
        let (fine, failed) =
            tokio::join!(post(engine.addr, COMPLETIONS, &neighbour), post(engine.addr, COMPLETIONS, &body));
        assert_eq!(failed.status, 500, "{}", failed.text);
        assert_eq!(fine.json()["choices"][0]["text"], greedy("fine", 100, true));
    }
    assert_eq!(metric(engine.addr, "truebeat:requests_ended_total", &["\"error\""]).await, 2.0);
    metric_becomes(engine.addr, "vllm:kv_cache_usage_perc", &[], 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_refuses_what_is_new_and_finishes_what_is_accepted() {
    // half a minute of steps, cut short once all has been asked
    let mut engine = TestEngine::ready(Setup { step_ms: 20, ..Setup::default() }).await;
    let running = open(engine.addr, COMPLETIONS, &long(true), &[]).await;
    assert_eq!(metric(engine.addr, "truebeat:healthy", &[]).await, 1.0);
    engine.terminate();
    let draining = engine.handle.shared.clone();
    wait_until("it drains", || draining.draining.load(Ordering::Relaxed)).await;
    let refused = post(engine.addr, COMPLETIONS, &long(false)).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("draining")));
    assert!(refused.header("retry-after").is_some());
    let health = get(engine.addr, "/health").await;
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("draining")));
    assert!(health.header("retry-after").is_some());
    assert_eq!(metric(engine.addr, "truebeat:healthy", &[]).await, 0.0);
    engine.knobs.step_ms.store(0, Ordering::Relaxed);
    let chunks = whole(running).await.chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(engine.ended().await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_says_what_was_left_and_tells_those_who_wait() {
    let drain_timeout = std::time::Duration::from_millis(50);
    let mut engine = TestEngine::ready(Setup { step_ms: 20, drain_timeout, ..Setup::default() }).await;
    let running = open(engine.addr, COMPLETIONS, &long(true), &[]).await;
    engine.terminate();
    assert!(matches!(engine.ended().await, Err(ServeError::DrainTimeout { left: 1, .. })));
    let answer = whole(running).await;
    let last: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutdown", "{}", answer.text);
}
