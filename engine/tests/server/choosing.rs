//! The fields that choose tokens and texts: each does what it says, on a model whose every row is known.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use engine::speculation::SpeculationSpec;
use serde_json::{Value, json};

use crate::client::{metric, post};
use crate::support::{EOS, Setup, TestEngine, greedy, greedy_with};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The body's completion, greedy unless it says otherwise.
async fn complete(engine: &TestEngine, more: Value) -> Value {
    let mut body = json!({"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = post(engine.addr, COMPLETIONS, &body).await;
    assert_eq!(answer.status, 200, "{body}: {}", answer.text);
    answer.json()
}

async fn text(engine: &TestEngine, more: Value) -> String {
    complete(engine, more).await["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn count(context: &[u32], id: usize) -> f32 {
    context["hello".len()..].iter().filter(|t| **t as usize == id).count() as f32
}

#[tokio::test(flavor = "multi_thread")]
async fn penalties_bias_and_allowed_tokens_change_the_text_as_defined() {
    let engine = TestEngine::ready(Setup::default()).await;
    let plain = greedy("hello", 40, true);
    assert_eq!(text(&engine, json!({"presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0})).await, plain);
    let each = |change: fn(&[u32], usize, &mut f32)| {
        greedy_with("hello", 40, true, |context, row| {
            row.iter_mut().enumerate().for_each(|(i, l)| change(context, i, l))
        })
    };
    let presence = each(|c, i, l| *l -= if count(c, i) > 0.0 { 1.5 } else { 0.0 });
    let frequency = each(|c, i, l| *l -= 0.75 * count(c, i));
    let repeated = |logit: f32| if logit > 0.0 { logit / 1.25 } else { logit * 1.25 };
    let repetition = greedy_with("hello", 40, true, |context, row| {
        context.iter().collect::<BTreeSet<_>>().iter().for_each(|id| row[**id as usize] = repeated(row[**id as usize]));
    });
    assert_eq!(text(&engine, json!({"presence_penalty": 1.5})).await, presence);
    assert_eq!(text(&engine, json!({"frequency_penalty": 0.75})).await, frequency);
    assert_eq!(text(&engine, json!({"repetition_penalty": 1.25})).await, repetition);
    assert_eq!(BTreeSet::from([&plain, &presence, &frequency, &repetition]).len(), 4, "each does something");
    assert_eq!(text(&engine, json!({"logit_bias": {"113": 100, "114": -100}})).await, "q".repeat(40));
    let two = text(&engine, json!({"allowed_token_ids": [97, 98]})).await;
    assert!(two.len() == 40 && two.chars().all(|c| c == 'a' || c == 'b'), "{two}");
    let likeliest = json!({"temperature": 1.0, "min_p": 1.0, "seed": 5});
    assert_eq!(text(&engine, likeliest).await, plain, "only the likeliest is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn n_outputs_differ_by_their_seeds_and_count_the_prompt_once() {
    let engine = TestEngine::ready(Setup::default()).await;
    let body =
        json!({"temperature": 1.0, "seed": 20, "n": 3, "best_of": 3, "prompt": ["hello", "other"], "echo": true});
    let answer = complete(&engine, body.clone()).await;
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<u64> = choices.iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
    assert_eq!(answer["usage"], json!({"prompt_tokens": 10, "completion_tokens": 240, "total_tokens": 250}));
    for (i, choice) in choices.iter().enumerate() {
        let (prompt, seed) = (["hello", "other"][i / 3], 20 + i % 3);
        let alone = json!({"temperature": 1.0, "seed": seed, "prompt": prompt, "echo": true});
        assert_eq!(choice["text"], text(&engine, alone).await.as_str(), "{i}");
    }
    assert_eq!(choices.iter().map(|c| c["text"].to_string()).collect::<BTreeSet<_>>().len(), 6);
    let mut streamed =
        json!({"max_tokens": 40, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}});
    streamed.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let mut chunks = post(engine.addr, COMPLETIONS, &streamed).await.chunks();
    assert_eq!(chunks.pop().unwrap()["usage"], answer["usage"]);
    assert!(chunks.iter().all(|c| c["usage"].is_null() && c.as_object().unwrap().contains_key("usage")));
    for (i, choice) in choices.iter().enumerate() {
        let mine = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == i);
        let text: String = mine.map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(choice["text"], text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outputs_of_a_chat_are_those_of_their_seeds_whole_and_streamed_and_count_the_prompt_once() {
    let engine = TestEngine::ready(Setup::default()).await;
    let ask = async |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 40, "temperature": 1.0,
            "ignore_eos": true, "logprobs": true, "top_logprobs": 2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = post(engine.addr, CHAT, &body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text);
        answer
    };
    let whole = ask(json!({"n": 3, "seed": 20})).await.json();
    let choices = whole["choices"].as_array().unwrap();
    let prompt_tokens = "user: hi\nassistant:".len();
    let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": 120, "total_tokens": prompt_tokens + 120});
    assert_eq!((choices.len(), &whole["usage"]), (3, &usage));
    for (i, choice) in choices.iter().enumerate() {
        let mut alone = ask(json!({"seed": 20 + i})).await.json()["choices"][0].clone();
        alone["index"] = i.into();
        assert_eq!(*choice, alone);
        assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 40);
    }
    let texts: BTreeSet<&str> = choices.iter().map(|c| c["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    let streamed = json!({"n": 3, "seed": 20, "stream": true, "stream_options": {"include_usage": true}});
    let mut chunks = ask(streamed).await.chunks();
    assert_eq!(chunks.pop().unwrap()["usage"], usage);
    for (i, choice) in choices.iter().enumerate() {
        let mine: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == i).collect();
        let roles: Vec<usize> = (0..mine.len()).filter(|at| mine[*at]["delta"]["role"] == "assistant").collect();
        let finishes: Vec<usize> = (0..mine.len()).filter(|at| !mine[*at]["finish_reason"].is_null()).collect();
        assert_eq!((roles, finishes), (vec![0], vec![mine.len() - 1]), "{i}");
        assert_eq!(mine[mine.len() - 1]["finish_reason"], choice["finish_reason"]);
        let text: String = mine.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(choice["message"]["content"], text);
        let logprobs = mine.iter().filter_map(|c| c["logprobs"]["content"].as_array()).flatten();
        assert!(logprobs.eq(choice["logprobs"]["content"].as_array().unwrap()), "{i}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_last_as_long_as_they_are_told_to() {
    let engine = TestEngine::ready(Setup::default()).await;
    let end = json!({"prompt": "a", "max_tokens": 1500, "ignore_eos": false});
    let short = text(&engine, end.clone()).await;
    let least = short.len() + 7;
    let mut body = end;
    body["min_tokens"] = least.into();
    let longer = complete(&engine, body).await;
    assert!(longer["usage"]["completion_tokens"].as_u64().unwrap() > least as u64);
    assert!(longer["choices"][0]["text"].as_str().unwrap().starts_with(&short));
    let full = greedy("hello", 40, true);
    let stop = &full[12..14];
    let at = full.find(stop).unwrap();
    assert_eq!(text(&engine, json!({"stop": stop, "include_stop_str_in_output": true})).await, full[..at + 2]);
    assert_eq!(text(&engine, json!({"stop": stop, "min_tokens": 40})).await, full, "it is not looked for so early");
    let id = u32::from(full.as_bytes()[5]);
    let first = full.bytes().position(|b| u32::from(b) == id).unwrap();
    let stopped = complete(&engine, json!({"stop_token_ids": [id]})).await;
    assert_eq!(stopped["choices"][0]["text"], full[..first]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
}

/// As in vLLM, whatever made the token a stop; an end token is special, and shows where special tokens do.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_token_is_a_part_of_the_output_if_that_is_wanted() {
    let engine = TestEngine::ready(Setup::default()).await;
    let full = greedy("hello", 40, true);
    let first = full.find(&full[5..6]).unwrap();
    let mut body = json!({"stop_token_ids": [full.as_bytes()[5]], "include_stop_str_in_output": true, "logprobs": 0});
    let kept = complete(&engine, body.clone()).await["choices"][0].clone();
    assert_eq!((&kept["text"], &kept["finish_reason"]), (&json!(full[..=first]), &json!("stop")));
    assert_eq!(kept["logprobs"]["tokens"].as_array().unwrap().len(), first + 1);
    body["include_stop_str_in_output"] = false.into();
    let left = complete(&engine, body).await["choices"][0].clone();
    assert_eq!((&left["text"], left["logprobs"]["tokens"].as_array().unwrap().len()), (&json!(full[..first]), first));
    let end = json!({"prompt": "a", "max_tokens": 1500, "ignore_eos": false, "include_stop_str_in_output": true});
    let short = greedy("a", 1500, false);
    assert_eq!(text(&engine, end.clone()).await, short);
    let mut shown = end;
    shown["skip_special_tokens"] = false.into();
    assert_eq!(text(&engine, shown).await, short + "<end>");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_cut_and_tokens_named_as_told() {
    let engine = TestEngine::ready(Setup::default()).await;
    assert_eq!(
        text(&engine, json!({"prompt": "say hello", "truncate_prompt_tokens": 5})).await,
        greedy("hello", 40, true)
    );
    let named = complete(&engine, json!({"max_tokens": 3, "logprobs": 1, "return_tokens_as_token_ids": true})).await;
    let tokens = named["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    let expected = greedy("hello", 3, true).bytes().map(|b| format!("token_id:{b}")).collect::<Vec<_>>();
    assert_eq!(tokens.iter().map(|t| t.as_str().unwrap()).collect::<Vec<_>>(), expected);
    let forced = json!({"logit_bias": {EOS.to_string(): 100}, "max_tokens": 2});
    assert_eq!(text(&engine, forced.clone()).await, "");
    let mut shown = forced;
    shown["skip_special_tokens"] = false.into();
    assert_eq!(text(&engine, shown).await, "<end><end>");
}

/// Masks that are never waited for are mostly late: steps run again, and nothing else changes.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_mask_costs_a_step_and_no_token() {
    let mut setup = Setup::default();
    let form = json!({"ignore_eos": false, "guided_regex": "[a-f]{30,40}-[x-z]{5}", "max_tokens": 60});
    let waited = text(&TestEngine::ready(setup.clone()).await, form.clone()).await;
    setup.core.mask_wait = Duration::ZERO;
    let engine = TestEngine::ready(setup).await;
    let neighbour = json!({"max_tokens": 300});
    let greedily = greedy("hello", 300, true);
    // on a busy machine the engine's own thread may be the late one
    let begun = Instant::now();
    while metric(engine.addr, "truebeat:grammar_masks_late_total", &[]).await == 0.0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no mask was ever late");
        let (late, beside) = tokio::join!(text(&engine, form.clone()), text(&engine, neighbour.clone()));
        assert_eq!((&late, &beside), (&waited, &greedily));
    }
}

/// EP4 with everything that looks at a request's own past.
#[tokio::test(flavor = "multi_thread")]
async fn nobodys_rules_reach_a_neighbour() {
    let mut setup = Setup { step_ms: 2, ..Setup::default() };
    (setup.core.block_size, setup.core.num_blocks, setup.core.step_tokens_max) = (4, Some(18), 10);
    let engine = TestEngine::ready(setup.clone()).await;
    let rules = [
        json!({}),
        json!({"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        json!({"repetition_penalty": 1.5}),
        json!({"logit_bias": {"113": 3, "101": -3}}),
        // these two repeat themselves, which can be guessed
        json!({"logit_bias": {"113": 100}}),
        json!({"ignore_eos": false, "guided_regex": "(abc){8,12}!"}),
        json!({"temperature": 1.0, "seed": 9, "min_p": 0.1}),
        json!({"ignore_eos": false, "guided_regex": "[a-f]{10,20}-[x-z]{5}"}),
        json!({"ignore_eos": false, "guided_choice": ["alpha beta gamma delta", "omega"], "temperature": 1.0, "seed": 3}),
        json!({"ignore_eos": false, "temperature": 1.0, "seed": 4, "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}}}}),
    ];
    let mut alone = Vec::new();
    for more in &rules {
        alone.push(text(&engine, more.clone()).await);
    }
    let together = futures::future::join_all(rules.iter().map(|more| text(&engine, more.clone()))).await;
    assert_eq!(together, alone);
    assert!(metric(engine.addr, "vllm:num_preemptions_total", &[]).await > 0.0, "the test wants preemptions");
    // guesses, right and wrong, whatever they cost
    (setup.core.speculation, setup.core.speculates_always) = (Some(SpeculationSpec::Ngram), true);
    let guessing = TestEngine::ready(setup).await;
    let guessed = futures::future::join_all(rules.iter().map(|more| text(&guessing, more.clone()))).await;
    assert_eq!(guessed, alone);
    assert!(
        metric(guessing.addr, "vllm:spec_decode_num_draft_tokens_total", &[]).await > 0.0,
        "the test wants guesses"
    );
}
