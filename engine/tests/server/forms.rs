//! Outputs of a given form: every way to ask for one, and grammars that are refused without a trace.

use serde_json::{Value, json};

use crate::client::{metric_becomes, post};
use crate::support::{Setup, TestEngine, greedy};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn person() -> Value {
    json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": false})
}

async fn form(engine: &TestEngine, more: Value) -> Value {
    let mut body = json!({"prompt": "hello", "max_tokens": 400, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = post(engine.addr, COMPLETIONS, &body).await;
    assert_eq!(answer.status, 200, "{body}: {}", answer.text);
    let choice = answer.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "stop", "{body}: {choice}");
    choice["text"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn json_is_json_however_it_is_asked_for() {
    let engine = TestEngine::ready(Setup::default()).await;
    let schema = person();
    let asked = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": true, "schema": schema}}}),
        json!({"guided_json": schema}),
        json!({"guided_json": schema.to_string()}),
        json!({"structured_outputs": {"json": schema}}),
    ];
    for more in asked {
        let text = form(&engine, more).await;
        let value: Value = serde_json::from_str(text.as_str().unwrap()).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(value["name"].as_str().unwrap().len() <= 5 && value["age"].as_u64().unwrap() <= 99, "{value}");
    }
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": true,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}});
    let chunks = post(engine.addr, CHAT, &body).await.chunks();
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert!(serde_json::from_str::<Value>(&text).unwrap()["age"].is_u64(), "{text}");
    let object =
        json!({"prompt": "hello", "max_tokens": 30, "temperature": 0, "response_format": {"type": "json_object"}});
    let begun = post(engine.addr, COMPLETIONS, &object).await.json();
    let text = begun["choices"][0]["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with('{') && begun["choices"][0]["finish_reason"] == "length", "{text}");
}

/// A schema that was compiled for somebody else is another one where its properties come in another order.
#[tokio::test(flavor = "multi_thread")]
async fn properties_come_in_the_order_of_the_requests_own_schema() {
    let engine = TestEngine::ready(Setup::default()).await;
    for order in [["why", "what"], ["what", "why"], ["why", "what"]] {
        let properties: Value = order.iter().map(|name| (*name, json!({"type": "boolean"}))).collect();
        let schema = json!({"type": "object", "properties": properties, "required": ["what", "why"], "additionalProperties": false});
        let text = form(&engine, json!({"guided_json": schema})).await;
        let said: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        assert!(said.as_object().unwrap().keys().eq(order.iter()), "{order:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_follow_expressions_choices_and_grammars() {
    let engine = TestEngine::ready(Setup::default()).await;
    let digits = form(&engine, json!({"guided_regex": "[a-c]{3}[0-9]{2}"})).await;
    let digits = digits.as_str().unwrap();
    assert!(digits.len() == 5 && digits[..3].chars().all(|c| ('a'..='c').contains(&c)), "{digits}");
    let choice = form(&engine, json!({"structured_outputs": {"choice": ["yes", "no"]}})).await;
    assert!(choice == "yes" || choice == "no", "{choice}");
    let lark = "start: \"<\" WORD \">\"\nWORD: /[xyz]{4}/";
    let word = form(&engine, json!({"guided_grammar": lark})).await;
    assert!(word.as_str().unwrap().starts_with('<') && word.as_str().unwrap().len() == 6, "{word}");
    let plain = form(&engine, json!({"prompt": "a", "response_format": {"type": "text"}, "max_tokens": 1500})).await;
    assert_eq!(plain, greedy("a", 1500, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn n_outputs_each_follow_the_form_and_logprobs_stay_the_models() {
    let engine = TestEngine::ready(Setup::default()).await;
    let body =
        json!({"prompt": "hello", "n": 4, "seed": 1, "max_tokens": 400, "guided_regex": "[a-z]{6}!", "logprobs": 1});
    let answer = post(engine.addr, COMPLETIONS, &body).await.json();
    let texts: std::collections::BTreeSet<&str> =
        answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert!(texts.len() == 4 && texts.iter().all(|t| t.len() == 7 && t.ends_with('!')), "{texts:?}");
    let last = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().last().unwrap().as_f64().unwrap();
    assert!(last < -10.0, "the model itself would not have said `!`: {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_forms_are_refused_alone_and_by_name() {
    let engine = TestEngine::ready(Setup { step_ms: 1, ..Setup::default() }).await;
    let neighbour = json!({"prompt": "fine", "max_tokens": 100, "temperature": 0, "ignore_eos": true});
    let schema =
        |s: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}});
    let cases = [
        (schema(json!({"type": "nonsense"})), "response_format"),
        (schema(json!("text")), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (json!({"response_format": {"type": "text", "x": 1}}), "response_format.x"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_grammar": "start: nowhere"}), "guided_grammar"),
        (json!({"guided_choice": [1]}), "guided_choice"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"structured_outputs": {}}), "structured_outputs"),
        (json!({"structured_outputs": {"regex": "["}}), "structured_outputs"),
        (json!({"structured_outputs": {"xml": "a"}}), "structured_outputs.xml"),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
        (json!({"guided_regex": "a", "ignore_eos": true}), "ignore_eos"),
        (json!({"guided_regex": "a", "min_tokens": 1}), "min_tokens"),
        (json!({"guided_regex": "a", "allowed_token_ids": [97]}), "allowed_token_ids"),
        (json!({"guided_regex": "x".repeat(300_000)}), "guided_regex"),
        (json!({"guided_grammar": "(".repeat(50_000)}), "guided_grammar"),
    ];
    let fine = tokio::spawn({
        let (addr, body) = (engine.addr, neighbour);
        async move { post(addr, COMPLETIONS, &body).await }
    });
    for (more, param) in cases {
        let mut body = json!({"prompt": "hello"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = post(engine.addr, COMPLETIONS, &body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{error}");
        assert!(error["message"].as_str().unwrap().len() < 1000, "{error}");
    }
    assert_eq!(fine.await.unwrap().json()["choices"][0]["text"], greedy("fine", 100, true));
    metric_becomes(engine.addr, "truebeat:requests_in_flight", &[], 0.0).await;
}
