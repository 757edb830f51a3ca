//! What the API answers: texts, chunks, logprobs, usage, errors.

use std::sync::atomic::Ordering::Relaxed;

use engine::server::TIMEOUT_HEADER;
use serde_json::{Value, json};

use crate::client::{get, open, post, whole};
use crate::support::{Setup, TestEngine, greedy, wait_until};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn completions_give_the_models_text_whole_and_in_chunks() {
    let engine = TestEngine::ready(Setup::default()).await;
    let mut body = json!({"model": "fake", "prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    let whole = post(engine.addr, COMPLETIONS, &body).await.json();
    let expected = greedy("hello", 40, true);
    assert_eq!(whole["choices"][0]["text"], expected);
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["usage"], json!({"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45}));
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let answer = post(engine.addr, COMPLETIONS, &body).await;
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    let mut chunks = answer.chunks();
    let usage = chunks.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
    let text: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, expected);
    assert!(chunks.len() > 20, "streamed in {} chunks", chunks.len());
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_token_ends_the_text_and_is_no_part_of_it() {
    let engine = TestEngine::ready(Setup::default()).await;
    let body = json!({"prompt": "a", "max_tokens": 1500, "temperature": 0});
    let answer = post(engine.addr, COMPLETIONS, &body).await.json();
    let expected = greedy("a", 1500, false);
    assert!(expected.len() < 1500, "the end token comes");
    assert_eq!(answer["choices"][0]["text"], expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], expected.len() + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_come_as_text_ids_and_lists_of_either() {
    let engine = TestEngine::ready(Setup::default()).await;
    for prompt in
        [json!("ab"), json!([97, 98]), json!(["ab"]), json!([[97, 98]]), json!(["ab", "cd"]), json!(["ab", [99, 100]])]
    {
        let body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true});
        let choices = post(engine.addr, COMPLETIONS, &body).await.json()["choices"].as_array().unwrap().clone();
        assert_eq!(choices[0]["text"], greedy("ab", 4, true), "{prompt}");
        if let Some(second) = choices.get(1) {
            assert_eq!((&second["index"], &second["text"]), (&json!(1), &json!(greedy("cd", 4, true))));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_the_text_before_them_streamed_or_not() {
    let engine = TestEngine::ready(Setup::default()).await;
    let full = greedy("hello", 40, true);
    let stop = &full[10..14];
    let expected = &full[..full.find(stop).unwrap()];
    for stream in [false, true] {
        let body = json!({
            "prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": true, "stop": ["@@", stop], "stream": stream
        });
        let answer = post(engine.addr, COMPLETIONS, &body).await;
        let choices: Vec<Value> = match stream {
            true => answer.chunks().iter().map(|c| c["choices"][0].clone()).collect(),
            false => vec![answer.json()["choices"][0].clone()],
        };
        let text: String = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(text, expected);
        assert_eq!(choices.last().unwrap()["finish_reason"], "stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_gives_the_same_text_whatever_runs_beside_it() {
    let engine = TestEngine::ready(Setup::default()).await;
    let body = json!({"prompt": "x", "max_tokens": 60, "seed": 11, "top_p": 0.9, "top_k": 20, "ignore_eos": true});
    let alone = post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0]["text"].clone();
    let others = json!({"prompt": "y", "max_tokens": 200, "ignore_eos": true});
    let (a, b, c) = tokio::join!(
        post(engine.addr, COMPLETIONS, &others),
        post(engine.addr, COMPLETIONS, &body),
        post(engine.addr, COMPLETIONS, &others)
    );
    assert_eq!(b.json()["choices"][0]["text"], alone);
    assert_ne!(a.json()["choices"][0]["text"], c.json()["choices"][0]["text"], "without a seed they differ");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_completes_the_character_that_its_prompt_ends_in() {
    let engine = TestEngine::ready(Setup::default()).await;
    let mut body = json!({"prompt": [97, 0xC3], "max_tokens": 1, "allowed_token_ids": [0xA9]});
    assert_eq!(post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0]["text"], "é");
    (body["echo"], body["logprobs"]) = (true.into(), 0.into());
    let choice = post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0].clone();
    assert_eq!((&choice["text"], &choice["logprobs"]["text_offset"]), (&json!("aé"), &json!([0, 1, 1])));
}

#[tokio::test(flavor = "multi_thread")]
async fn echo_with_logprobs_tells_of_every_token_of_prompt_and_output() {
    // A budget of 8 tokens a step cuts the prompt: its rows come from several steps.
    let mut setup = Setup::default();
    setup.core.step_tokens_max = 8;
    let engine = TestEngine::ready(setup).await;
    let prompt = "a prompt of more than eight tokens";
    let body = json!({
        "prompt": prompt, "max_tokens": 3, "temperature": 0, "echo": true, "logprobs": 2, "ignore_eos": true
    });
    let choice = post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0].clone();
    let text = prompt.to_owned() + &greedy(prompt, 3, true);
    assert_eq!(choice["text"], text);
    let logprobs = &choice["logprobs"];
    let tokens: Vec<&str> = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), text);
    let values = logprobs["token_logprobs"].as_array().unwrap();
    assert!(values[0].is_null() && values[1..].iter().all(|v| v.as_f64().unwrap() < 0.0), "{values:?}");
    assert_eq!(logprobs["text_offset"][5], 5);
    assert!(logprobs["top_logprobs"][7].as_object().unwrap().len() >= 2);
    let only = json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 0});
    let answer = post(engine.addr, COMPLETIONS, &only).await.json();
    assert_eq!((&answer["choices"][0]["text"], &answer["usage"]["completion_tokens"]), (&json!(prompt), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_logprobs_of_a_completion_are_those_of_the_whole_answer_chunk_by_chunk() {
    let engine = TestEngine::ready(Setup::default()).await;
    for echo in [false, true] {
        // a character of two bytes, which are two tokens here
        let mut body = json!({"prompt": "hé!", "max_tokens": 30, "temperature": 0, "ignore_eos": true, "logprobs": 2, "echo": echo});
        let whole = post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0].clone();
        assert_eq!(whole["logprobs"]["tokens"].as_array().unwrap().len(), if echo { 34 } else { 30 });
        body["stream"] = true.into();
        let chunks = post(engine.addr, COMPLETIONS, &body).await.chunks();
        let choices = || chunks.iter().map(|c| &c["choices"][0]);
        assert_eq!(whole["text"], choices().map(|c| c["text"].as_str().unwrap()).collect::<String>());
        for (name, wanted) in whole["logprobs"].as_object().unwrap() {
            let told = choices().filter_map(|c| c["logprobs"][name].as_array()).flatten();
            assert!(told.eq(wanted.as_array().unwrap()), "{echo}, {name}: {chunks:?}");
        }
        // each with its own text, not all with the last
        assert!(choices().filter(|c| c["logprobs"]["tokens"].as_array().is_some_and(|t| !t.is_empty())).count() > 10);
    }
}

/// One that is long is written elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_answer_with_logprobs_is_whole() {
    let engine = TestEngine::ready(Setup::default()).await;
    let mut body = json!({"prompt": "hello", "max_tokens": 800, "temperature": 0, "ignore_eos": true, "logprobs": 20});
    let answer = post(engine.addr, COMPLETIONS, &body).await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let choice = answer.json()["choices"][0].clone();
    let told = |name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    assert_eq!((told("tokens").len(), told("text_offset").len(), told("top_logprobs").len()), (800, 800, 800));
    assert_eq!(choice["text"], greedy("hello", 800, true));
    (body["n"], body["max_tokens"]) = (64.into(), 1500.into());
    let refused = post(engine.addr, COMPLETIONS, &body).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("logprobs")), "{}", refused.text);
}

/// The threads that write long answers may all be busy.
#[test]
fn a_long_answer_that_nobody_writes_ends_at_its_deadline() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().worker_threads(2).max_blocking_threads(1).build().unwrap();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let answer = runtime.block_on(async {
        let mut setup = Setup::default();
        setup.core.guards = false;
        let engine = TestEngine::ready(setup).await;
        engine.knobs.hold_step.store(true, Relaxed);
        let (addr, more) = (engine.addr, [(TIMEOUT_HEADER, "10000")]);
        let body = json!({"prompt": "hello", "max_tokens": 1500, "temperature": 0, "ignore_eos": true, "logprobs": 20});
        let asked = tokio::spawn(async move { whole(open(addr, COMPLETIONS, &body, &more).await).await });
        // they have read the request by then
        wait_until("it is in", || engine.handle.shared.in_flight() == 1).await;
        drop(tokio::task::spawn_blocking(move || held.recv()));
        engine.knobs.hold_step.store(false, Relaxed);
        asked.await.unwrap()
    });
    drop(release);
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("deadline_exceeded")), "{}", answer.text);
}

/// Tokens of the fake model are bytes: é is two of them.
#[tokio::test(flavor = "multi_thread")]
async fn parts_of_characters_are_named_by_their_bytes_and_stand_where_their_character_does() {
    let engine = TestEngine::ready(Setup::default()).await;
    for (named, tokens) in [
        (false, ["h", r"bytes:\xc3", r"bytes:\xa9", "!"]),
        (true, ["token_id:104", "token_id:195", "token_id:169", "token_id:33"]),
    ] {
        let body = json!({
            "prompt": "hé!", "max_tokens": 2, "temperature": 0, "echo": true, "logprobs": 1, "ignore_eos": true,
            "return_tokens_as_token_ids": named
        });
        let choice = post(engine.addr, COMPLETIONS, &body).await.json()["choices"][0].clone();
        assert!(choice["text"].as_str().unwrap().starts_with("hé!"));
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["tokens"].as_array().unwrap()[..4], tokens.map(Value::from));
        assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2, 3, 4]), "characters of the text");
    }
}

/// Byte 0 is a special token here, and no text.
#[tokio::test(flavor = "multi_thread")]
async fn an_echoed_text_is_what_was_sent_with_its_special_tokens() {
    let engine = TestEngine::ready(Setup::default()).await;
    let ask = |more: Value| {
        let mut body = json!({"prompt": "a\0b", "max_tokens": 0, "echo": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        async move { post(engine.addr, COMPLETIONS, &body).await.json()["choices"].clone() }
    };
    assert_eq!(ask(json!({})).await[0]["text"], "a\0b");
    assert_eq!(ask(json!({"truncate_prompt_tokens": 3})).await[0]["text"], "a\0b", "nothing was cut");
    assert_eq!(ask(json!({"truncate_prompt_tokens": 2})).await[0]["text"], "b");
    assert_eq!(ask(json!({"prompt": [97, 0, 98]})).await[0]["text"], "ab");
    let told = ask(json!({"logprobs": 0})).await[0].clone();
    assert_eq!((&told["text"], &told["logprobs"]["text_offset"]), (&json!("ab"), &json!([0, 1, 1])));
    let texts = ask(json!({"n": 2, "max_tokens": 1, "prompt": ["x\0", "y"]})).await;
    let begins = ["x\0", "x\0", "y", "y"].iter().enumerate();
    begins.for_each(|(at, begin)| assert!(texts[at]["text"].as_str().unwrap().starts_with(begin), "{texts}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_answer_whole_and_streamed_with_logprobs() {
    let engine = TestEngine::ready(Setup::default()).await;
    let parts = json!([{"type": "text", "text": "hi"}]);
    let mut body = json!({
        "model": "fake", "messages": [{"role": "user", "content": parts}], "max_completion_tokens": 6, "temperature": 0,
        "logprobs": true, "top_logprobs": 2, "ignore_eos": true
    });
    let whole = post(engine.addr, CHAT, &body).await.json();
    let expected = greedy("user: hi\nassistant:", 6, true);
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"], json!({"role": "assistant", "content": expected}));
    let entries = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!((entries.len(), entries[0]["top_logprobs"].as_array().unwrap().len()), (6, 2));
    assert_eq!(entries[0]["bytes"], json!(entries[0]["token"].as_str().unwrap().as_bytes()));
    body["stream"] = true.into();
    let chunks = post(engine.addr, CHAT, &body).await.chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, expected);
    let logprobs = chunks.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array()).flatten();
    assert!(logprobs.eq(entries), "{chunks:?}");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(chunks.iter().all(|c| c["object"] == "chat.completion.chunk"));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_name_the_field_and_what_is_allowed() {
    let engine = TestEngine::ready(Setup::default()).await;
    let many_biases: Value = (0..4097).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into();
    let cases = [
        (COMPLETIONS, json!({"prompt": "a", "model": "other"}), 404, "model"),
        (COMPLETIONS, json!({}), 400, "prompt"),
        (COMPLETIONS, json!({"prompt": ""}), 400, "prompt"),
        (COMPLETIONS, json!({"prompt": [1, 999]}), 400, "prompt"),
        (COMPLETIONS, json!({"prompt": "a", "n": 0}), 400, "n"),
        (COMPLETIONS, json!({"prompt": ["a", "b", "c"], "n": 100}), 400, "n"),
        (COMPLETIONS, json!({"prompt": "a", "best_of": 2}), 400, "best_of"),
        (COMPLETIONS, json!({"prompt": "a", "suffix": "z"}), 400, "suffix"),
        (COMPLETIONS, json!({"prompt": "a", "max_token": 2}), 400, "max_token"),
        (COMPLETIONS, json!({"prompt": "a", "logit_bias": {"a": 1}}), 400, "logit_bias"),
        (COMPLETIONS, json!({"prompt": "a", "logit_bias": {"97": 101}}), 400, "logit_bias"),
        (COMPLETIONS, json!({"prompt": "a", "max_tokens": 3, "min_tokens": 4}), 400, "min_tokens"),
        (COMPLETIONS, json!({"prompt": "a", "logit_bias": many_biases}), 400, "logit_bias"),
        (COMPLETIONS, json!({"prompt": "a", "allowed_token_ids": vec![97; 4097]}), 400, "allowed_token_ids"),
        (COMPLETIONS, json!({"prompt": "a", "allowed_token_ids": []}), 400, "allowed_token_ids"),
        (COMPLETIONS, json!({"prompt": "a", "stop_token_ids": vec![97; 4097]}), 400, "stop_token_ids"),
        (COMPLETIONS, json!({"prompt": "a", "stop": vec!["a"; 17]}), 400, "stop"),
        (COMPLETIONS, json!({"prompt": "a", "stop": "a".repeat(1025)}), 400, "stop"),
        (COMPLETIONS, json!({"prompt": "a", "user": 7}), 400, "user"),
        (COMPLETIONS, json!({"prompt": "a", "user": "u".repeat(513)}), 400, "user"),
        (COMPLETIONS, json!({"prompt": "a", "temperature": 3}), 400, "temperature"),
        (COMPLETIONS, json!({"prompt": "a", "max_tokens": 0}), 400, "max_tokens"),
        (COMPLETIONS, json!({"prompt": "a", "max_tokens": 5000}), 400, "prompt"),
        (COMPLETIONS, json!({"prompt": "a", "presence_penalty": 2.5}), 400, "presence_penalty"),
        (
            COMPLETIONS,
            json!({"prompt": "a", "stream_options": {"include_usage": 1}}),
            400,
            "stream_options.include_usage",
        ),
        (COMPLETIONS, json!({"prompt": "a", "stream_options": {"usage": true}}), 400, "stream_options.usage"),
        (COMPLETIONS, json!({"prompt": "a", "stream_options": {"include_usage": true}}), 400, "stream_options"),
        (COMPLETIONS, json!({"prompt": "a", "allowed_token_ids": [0], "min_tokens": 1}), 400, "allowed_token_ids"),
        (CHAT, json!({"messages": []}), 400, "messages"),
        (CHAT, json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), 400, "messages"),
        (CHAT, json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}), 400, "top_logprobs"),
        (CHAT, json!({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}), 400, "tools"),
    ];
    for (path, body, status, param) in cases {
        let answer = post(engine.addr, path, &body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, error["param"].as_str()), (status, Some(param)), "{body}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string());
    }
    let nothing = json!({"prompt": "a", "max_tokens": 1, "stream_options": {}});
    assert_eq!(post(engine.addr, COMPLETIONS, &nothing).await.status, 200, "empty options ask for nothing");
    assert_eq!(get(engine.addr, "/health").await.json()["status"], "ok");
}

/// Cutting it into tokens, to find that these are too many, would take seconds where it is long.
#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_can_never_fit_is_refused_by_its_length() {
    let engine = TestEngine::ready(Setup::default()).await;
    let text = "a".repeat(3000);
    let prompt = json!({"prompt": text, "max_tokens": 1});
    let chat = json!({"messages": [{"role": "user", "content": text}]});
    for (path, body) in [(COMPLETIONS, &prompt), (CHAT, &chat)] {
        let error = post(engine.addr, path, body).await.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(message.contains("longest sequence is 2048 tokens") && message.contains("bytes"), "{message}");
    }
    let mut cut = prompt;
    cut["truncate_prompt_tokens"] = 10.into();
    assert_eq!(post(engine.addr, COMPLETIONS, &cut).await.json()["usage"]["prompt_tokens"], 10);
}

/// A cache of fewer tokens than the model's longest sequence is the longest there is: who leaves the length to the engine gets what fits.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_without_a_length_fits_into_a_small_cache() {
    let mut setup = Setup::default();
    (setup.core.block_size, setup.core.num_blocks) = (16, Some(4));
    let engine = TestEngine::ready(setup).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": true});
    let answer = post(engine.addr, CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.json()["usage"]["total_tokens"], 64);
    assert_eq!(get(engine.addr, "/v1/models").await.json()["data"][0]["max_model_len"], 64);
    let long = post(engine.addr, COMPLETIONS, &json!({"prompt": "a", "max_tokens": 64})).await;
    assert_eq!((long.status, long.json()["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
}
