//! Paths, methods, content types, ids: what every answer has, whatever was asked. And the documented fields.

use serde_json::{Value, json};

use crate::client::{get, metric, post, request};
use crate::support::{Setup, TestEngine};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test(flavor = "multi_thread")]
async fn every_error_has_openais_body_and_an_id() {
    let engine = TestEngine::ready(Setup::default()).await;
    let large = "x".repeat((32 << 20) + 1);
    let form = ("content-type", "application/x-www-form-urlencoded");
    let cases = [
        ("GET", "/v2", JSON, "", 404),
        ("GET", "/v1/models/other", JSON, "", 404),
        ("GET", "/v1/models/%FF", JSON, "", 400),
        ("GET", COMPLETIONS, JSON, "", 405),
        ("POST", "/v1/models", JSON, "", 405),
        ("POST", COMPLETIONS, JSON, large.as_str(), 413),
        ("POST", CHAT, form, "{}", 415),
        ("POST", "/tokenize", form, "{}", 415),
        ("POST", COMPLETIONS, JSON, "{\"prompt\": ", 400),
        ("POST", COMPLETIONS, JSON, "[]", 400),
        ("POST", CHAT, JSON, "{\"messages\": {}}", 400),
        ("POST", COMPLETIONS, JSON, "{\"model\": \"other\", \"prompt\": \"a\"}", 404),
    ];
    for (method, path, header, body, status) in cases {
        let answer = request(engine.addr, method, path, &[header], body).await;
        let error = answer.json()["error"].clone();
        assert_eq!(answer.status, status, "{method} {path}: {error}");
        let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].as_str().unwrap().ends_with("_error"));
        assert!(answer.header("x-request-id").unwrap().starts_with("req-"), "{method} {path}");
    }
    assert!(metric(engine.addr, "truebeat:requests_refused_total", &["\"too_large\""]).await > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_request_id_comes_back_if_it_is_a_sensible_one() {
    let engine = TestEngine::ready(Setup::default()).await;
    let body = json!({"prompt": "a", "max_tokens": 1, "stream": true}).to_string();
    let ask = |id: &'static str| {
        let (addr, body) = (engine.addr, body.clone());
        async move { request(addr, "POST", COMPLETIONS, &[JSON, ("x-request-id", id)], &body).await }
    };
    assert_eq!(ask("mine-1.2:3").await.header("x-request-id"), Some("mine-1.2:3"));
    for other in ["has spaces", "", "quote\""] {
        assert!(ask(other).await.header("x-request-id").unwrap().starts_with("req-"), "{other}");
    }
    let ids = [get(engine.addr, "/v1/models").await, get(engine.addr, "/health").await];
    assert_ne!(ids[0].header("x-request-id"), ids[1].header("x-request-id"));
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_and_found_by_name() {
    let engine = TestEngine::ready(Setup::default()).await;
    let list = get(engine.addr, "/v1/models").await.json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("fake")));
    let model = get(engine.addr, "/v1/models/fake").await.json();
    assert_eq!((&model, &model["object"]), (&list["data"][0], &json!("model")));
    assert!(model["created"].as_u64().unwrap() > 1_500_000_000 && model["max_model_len"] == 2048);
    assert_eq!(get(engine.addr, "/health").await.json()["status"], "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_become_tokens_and_tokens_texts() {
    let engine = TestEngine::ready(Setup::default()).await;
    let told = post(engine.addr, "/tokenize", &json!({"model": "fake", "prompt": "héy", "return_token_strs": true}))
        .await
        .json();
    assert_eq!((&told["count"], &told["max_model_len"]), (&json!(4), &json!(2048)));
    assert_eq!((&told["tokens"], &told["token_strs"][0]), (&json!([104, 195, 169, 121]), &json!("h")));
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false});
    assert_eq!(post(engine.addr, "/tokenize", &chat).await.json()["count"], "user: hi\n".len());
    let text = post(engine.addr, "/detokenize", &json!({"tokens": [104, 105, 0]})).await.json();
    assert_eq!(text, json!({"prompt": "hi<end>"}));
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "odd": 1}), "odd"),
        ("/tokenize", json!({"prompt": "1 ".repeat(1 << 20)}), "prompt"),
        ("/detokenize", json!({"tokens": [300]}), "tokens"),
        ("/detokenize", json!({"tokens": vec![104; (1 << 20) + 1]}), "tokens"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [], "model": "other"}), "model"),
    ] {
        assert_eq!(post(engine.addr, path, &body).await.json()["error"]["param"], param, "{path} {body}");
    }
}

/// Gauges that the Gateway API's inference extension reads of a model server, in vLLM's names.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_picker_finds_its_metrics() {
    let engine = TestEngine::ready(Setup::default()).await;
    let text = get(engine.addr, "/metrics").await.text;
    for name in
        ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"]
    {
        assert!(text.contains(&format!("# TYPE {name} gauge")), "{name}");
        assert!(metric(engine.addr, name, &["model_name=\"fake\""]).await >= 0.0);
    }
    assert_eq!(metric(engine.addr, "vllm:cache_config_info", &["block_size=\"16\"", "num_gpu_blocks="]).await, 1.0);
}

/// A row of the document's tables: a field, and which of the two APIs have it.
struct Row {
    field: String,
    apis: String,
}

impl Row {
    fn is_of(&self, path: &str) -> bool {
        self.apis == "both" || (self.apis == "chat") == (path == CHAT)
    }
}

fn documented() -> Vec<Row> {
    let doc = include_str!("../../../docs/engine-api.md");
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
        let (field, apis) = (cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned());
        ["both", "chat", "completions"].contains(&apis.as_str()).then_some(Row { field, apis })
    };
    doc.lines().filter_map(row).collect()
}

/// The least that a path takes.
fn least(path: &str) -> Value {
    if path == CHAT { json!({"messages": [{"role": "user", "content": "a"}]}) } else { json!({"prompt": "a"}) }
}

/// Random values for random fields: whatever comes is answered, and never with 500.
#[tokio::test(flavor = "multi_thread")]
async fn no_body_is_the_servers_fault() {
    let values: Vec<Value> = serde_json::from_str(
        r#"[null, true, false, 0, 1, -1, 3, 1.5, 1e300, 9223372036854775807, "", "a", "none", "required", [], ["a"], ["a", "b"], [97],
            [[97]], [null], {}, {"a": 1}, {"97": 5}, {"type": "object"}, {"type": "json_object"}, {"type": "json_schema", "json_schema":
            {"name": "x", "schema": {"enum": ["a"]}}}, {"regex": "a"}, {"include_usage": true}, [{"role": "user", "content": "a"}],
            [{"type": "function", "function": {"name": "f"}}], {"type": "function", "function": {"name": "f"}}]"#,
    )
    .unwrap();
    let engine = TestEngine::ready(Setup::default()).await;
    let rows = documented();
    // a simple generator: the same bodies every time
    let mut state = 7u64;
    let mut draw = |count: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % count
    };
    let mut answered = 0;
    for turn in 0..600 {
        let path = if turn % 2 == 0 { COMPLETIONS } else { CHAT };
        let mut body = least(path);
        body["max_tokens"] = 3.into();
        for _ in 0..=draw(3) {
            let row = &rows[draw(rows.len())];
            if row.is_of(path) {
                body[&row.field] = values[draw(values.len())].clone();
            }
        }
        let answer = post(engine.addr, path, &body).await;
        assert!([200, 400, 404, 429].contains(&answer.status), "{body}: {} {}", answer.status, answer.text);
        answered += usize::from(answer.status == 200);
    }
    assert!(answered > 30, "{answered} of 600 were fine");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_field_is_read_and_no_other() {
    let engine = TestEngine::ready(Setup::default()).await;
    let rows = documented();
    assert!(rows.len() > 40, "{} rows", rows.len());
    for (path, row) in [COMPLETIONS, CHAT].iter().flat_map(|path| rows.iter().map(move |row| (*path, row))) {
        let (mut body, field) = (least(path), &row.field);
        // nearly no field takes this; one that is read says so by its name
        body[field] = json!({"?": 1});
        let answer = post(engine.addr, path, &body).await;
        let error = answer.json()["error"].clone();
        let known = error["message"] != format!("{field} is not a field that this server knows");
        assert_eq!(known, row.is_of(path), "{path} {field}: {error}");
        if known && ["chat_template_kwargs", "guided_json"].contains(&field.as_str()) {
            assert_eq!(answer.status, 200, "any object will do: {error}");
            continue;
        }
        assert_eq!(answer.status, 400, "{path} {field}: {error}");
        assert!(error["param"].as_str().unwrap().starts_with(field), "{path} {field}: {error}");
    }
}
