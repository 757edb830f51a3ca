//! Tools: described to the model, forced by grammar, found in its text, told whole and in pieces.

use serde_json::{Value, json};

use engine::codec::ToolFormat;

use crate::client::post;
use crate::support::{Setup, TestEngine, calling, greedy};

const CHAT: &str = "/v1/chat/completions";

fn tools() -> Value {
    let word = |max: u32| json!({"type": "string", "maxLength": max});
    json!([
        {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {
            "type": "object", "properties": {"what": word(4)}, "required": ["what"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "count", "strict": true, "parameters": {
            "type": "object", "properties": {"n": {"$ref": "#/$defs/small"}}, "required": ["n"], "additionalProperties": false,
            "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
    ])
}

fn chat(more: Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "temperature": 0, "tools": tools()});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Message and reason of a whole answer, which must be the same as of the streamed one.
async fn ask(engine: &TestEngine, mut body: Value) -> (Value, String) {
    let answer = post(engine.addr, CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let choice = answer.json()["choices"][0].clone();
    body["stream"] = true.into();
    let chunks = post(engine.addr, CHAT, &body).await.chunks();
    let (mut text, mut calls): (String, Vec<Value>) = Default::default();
    for delta in chunks.iter().map(|c| &c["choices"][0]["delta"]) {
        text += delta["content"].as_str().unwrap_or_default();
        for piece in delta["tool_calls"].as_array().into_iter().flatten() {
            if piece["id"].is_string() {
                assert_eq!((piece["index"].as_u64(), &piece["type"]), (Some(calls.len() as u64), &json!("function")));
                calls.push(piece["function"].clone());
                continue;
            }
            let call = &mut calls[piece["index"].as_u64().unwrap() as usize];
            let more = piece["function"]["arguments"].as_str().unwrap();
            call["arguments"] = (call["arguments"].as_str().unwrap().to_owned() + more).into();
        }
    }
    let message = choice["message"].clone();
    let told = message["tool_calls"].as_array().cloned().unwrap_or_default();
    assert_eq!(told.iter().map(|c| c["function"].clone()).collect::<Vec<_>>(), calls, "whole and streamed");
    assert_eq!(message["content"].as_str().unwrap_or_default(), text);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"]);
    (message, choice["finish_reason"].as_str().unwrap().to_owned())
}

fn arguments(call: &Value) -> Value {
    serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_function_is_called_with_arguments_that_fit() {
    let engine = TestEngine::ready(Setup::default()).await;
    let named = |name: &str| chat(json!({"tool_choice": {"type": "function", "function": {"name": name}}}));
    let (message, reason) = ask(&engine, named("find")).await;
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"]["name"], reason.as_str()), (1, &json!("find"), "stop"));
    assert!(message["content"].is_null() && calls[0]["id"].as_str().unwrap().starts_with("call_"), "{message}");
    assert!(arguments(&calls[0])["what"].as_str().unwrap().len() <= 4);
    let (message, _) = ask(&engine, named("count")).await;
    assert!(arguments(&message["tool_calls"][0])["n"].as_u64().unwrap() <= 9, "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn required_calls_something_and_parallel_says_how_often() {
    let engine = TestEngine::ready(Setup::default()).await;
    let one = chat(json!({"tool_choice": "required", "parallel_tool_calls": false}));
    let (message, reason) = ask(&engine, one).await;
    assert_eq!((message["tool_calls"].as_array().unwrap().len(), reason.as_str()), (1, "tool_calls"));
    let many = chat(json!({"tool_choice": "required", "temperature": 1.0, "seed": 2, "max_tokens": 1500}));
    let (message, reason) = ask(&engine, many).await;
    let calls = message["tool_calls"].as_array().unwrap();
    assert!(!calls.is_empty() && calls.len() <= 16 && reason == "tool_calls", "{message}");
    let ids: std::collections::BTreeSet<_> = calls.iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), calls.len());
}

/// The calls of an answer that has to call `count`, and of one that has to call something, between marks that are special tokens.
async fn forced_calls(engine: &TestEngine) -> [Vec<Value>; 2] {
    let named = chat(json!({"tool_choice": {"type": "function", "function": {"name": "count"}}}));
    let (message, reason) = ask(engine, named).await;
    let one = message["tool_calls"].as_array().unwrap().clone();
    assert_eq!((one.len(), &one[0]["function"]["name"], reason.as_str()), (1, &json!("count"), "stop"));
    assert!(message["content"].is_null() && arguments(&one[0])["n"].as_u64().unwrap() <= 9, "{message}");
    let many = chat(json!({"tool_choice": "required", "temperature": 1.0, "seed": 2, "max_tokens": 1500}));
    let (message, reason) = ask(engine, many).await;
    let some = message["tool_calls"].as_array().unwrap().clone();
    assert!(!some.is_empty() && some.len() <= 16 && reason == "tool_calls", "{message}");
    [one, some]
}

#[tokio::test(flavor = "multi_thread")]
async fn mistrals_calls_begin_with_a_special_token_that_no_text_shows() {
    let engine = calling(ToolFormat::Mistral).await;
    let [one, calls] = forced_calls(&engine).await;
    let id = one[0]["id"].as_str().unwrap();
    assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
    let ids: std::collections::BTreeSet<_> = calls.iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), calls.len());
    // free to call or not, it says what it likes
    let loose: Value = tools().as_array().unwrap()[..1].into();
    let auto = chat(json!({"tools": loose, "max_tokens": 6}));
    let expected = greedy(&format!("tools: {loose}\nuser: hi\nassistant:"), 6, false);
    assert_eq!(ask(&engine, auto).await.0["content"], expected);
}

/// As those of some of Hermes's own tokenizers.
#[tokio::test(flavor = "multi_thread")]
async fn hermes_calls_between_special_tokens_are_found_as_those_in_letters() {
    forced_calls(&calling(ToolFormat::Hermes).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_leaves_it_to_the_model_and_none_does_not_even_mention_them() {
    let engine = TestEngine::ready(Setup::default()).await;
    let without = chat(json!({"tool_choice": "none", "max_tokens": 6, "ignore_eos": true}));
    assert_eq!(ask(&engine, without).await.0["content"], greedy("user: hi\nassistant:", 6, true));
    let loose: Value = tools().as_array().unwrap()[..1].into();
    let auto = chat(json!({"tools": loose, "max_tokens": 6, "ignore_eos": true}));
    let expected = greedy(&format!("tools: {loose}\nuser: hi\nassistant:"), 6, true);
    assert_eq!(ask(&engine, auto).await.0["content"], expected);
    // with a strict function a grammar watches, but it forces nothing
    let strict = chat(json!({"tool_choice": "auto", "max_tokens": 6}));
    let expected = greedy(&format!("tools: {}\nuser: hi\nassistant:", tools()), 6, false);
    assert_eq!(ask(&engine, strict).await.0["content"], expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_with_calls_goes_on_and_bad_tools_are_named() {
    let engine = TestEngine::ready(Setup::default()).await;
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{\"what\": \"x\"}"}});
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"}]);
    let body = json!({"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let answer = post(engine.addr, CHAT, &body).await.json();
    let expected = greedy("user: hi\nassistant: \ntool: found\nassistant:", 4, true);
    assert_eq!(answer["choices"][0]["message"]["content"], expected);
    let function = |f: Value| chat(json!({"tools": [{"type": "function", "function": f}]}));
    let loose: Value = tools().as_array().unwrap()[..1].into();
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}});
    let cases = [
        (chat(json!({"tools": [{}]})), "tools"),
        (chat(json!({"tools": "x"})), "tools"),
        (chat(json!({"tools": [{"type": "custom", "custom": {"name": "x"}}]})), "tools"),
        (function(json!({"name": "no spaces"})), "tools"),
        (function(json!({"name": "f", "parameters": 7})), "tools"),
        (chat(json!({"tool_choice": "sometimes"})), "tool_choice"),
        (chat(json!({"tool_choice": {"type": "function", "function": {"name": "gone"}}})), "tool_choice"),
        (chat(json!({"tools": [], "tool_choice": "required"})), "tool_choice"),
        (chat(json!({"tool_choice": "required", "guided_regex": "a"})), "tools"),
        (chat(json!({"guided_regex": "a"})), "tools"),
        (chat(json!({"tools": loose, "tool_choice": "auto", "response_format": {"type": "json_object"}})), "tools"),
        (chat(json!({"tools": loose, "response_format": schema})), "tools"),
        (chat(json!({"functions": [{"name": "old"}]})), "functions"),
    ];
    for (body, param) in cases {
        let answer = post(engine.addr, CHAT, &body).await;
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)), "{}", answer.text);
    }
    let uncalled = chat(json!({"tools": loose, "tool_choice": "none", "response_format": schema}));
    assert_eq!(post(engine.addr, CHAT, &uncalled).await.status, 200, "tools that may not be called go with a form");
    let bad_schema = json!({"name": "f", "parameters": {"type": "nonsense"}});
    let forced = json!({"tools": [{"type": "function", "function": bad_schema}], "tool_choice": "required"});
    assert_eq!(post(engine.addr, CHAT, &chat(forced)).await.status, 400);
}
