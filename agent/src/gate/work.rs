//! Which requests are work that the engine owes an answer, and roughly how many prompt tokens each brings (V2, V3). Pure.

use http::Method;
use serde_json::Value;

/// Ends of paths whose POST makes an engine generate: OpenAI, Anthropic, vLLM, SGLang, TGI, llama.cpp, Ollama.
const WORK_PATHS: [&str; 18] = [
    "/completions",
    "/responses",
    "/messages",
    "/embeddings",
    "/embedding",
    "/generate",
    "/generate_stream",
    "/completion",
    "/infill",
    "/chat",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/encode",
    "/transcriptions",
    "/translations",
    "/invocations",
];
/// Fields that hold a prompt.
const PROMPT_FIELDS: [&str; 7] = ["prompt", "messages", "input", "inputs", "input_ids", "text", "documents"];
/// Characters a token, roughly; a deadline scales with it, nothing is billed by it.
const BYTES_PER_TOKEN: u64 = 4;

/// Does this request count as work owed?
pub fn is_work(method: &Method, path: &str) -> bool {
    let path = path.trim_end_matches('/');
    method == Method::POST && WORK_PATHS.iter().any(|end| path.ends_with(end))
}

/// Rough prompt tokens of a request body: ids counted, text by length; a body that is not JSON by its own length. At least 1.
pub fn prompt_tokens(body: &[u8]) -> u64 {
    let tokens = match serde_json::from_slice::<Value>(body) {
        Ok(Value::Object(fields)) => PROMPT_FIELDS.iter().filter_map(|name| fields.get(*name)).map(tokens_in).sum(),
        _ => body.len() as u64 / BYTES_PER_TOKEN,
    };
    tokens.max(1)
}

/// Numbers are token ids; of objects (chat messages) every text counts.
fn tokens_in(value: &Value) -> u64 {
    match value {
        Value::Number(_) => 1,
        Value::String(text) => (text.len() as u64).div_ceil(BYTES_PER_TOKEN),
        Value::Array(items) => items.iter().map(tokens_in).sum(),
        Value::Object(fields) => fields.values().filter(|value| !value.is_number()).map(tokens_in).sum(),
        Value::Null | Value::Bool(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posts_to_inference_paths_are_work_and_nothing_else_is() {
        for path in
            ["/v1/completions", "/v1/chat/completions/", "/v1/messages", "/generate", "/completion", "/v1/embeddings"]
        {
            assert!(is_work(&Method::POST, path), "{path}");
            assert!(!is_work(&Method::GET, path), "{path}");
        }
        for path in ["/health", "/metrics", "/v1/models", "/tokenize", "/sleep", "/"] {
            assert!(!is_work(&Method::POST, path), "{path}");
        }
    }

    #[test]
    fn prompts_are_estimated_by_their_kind() {
        assert_eq!(prompt_tokens(br#"{"prompt":"12345678","max_tokens":100000}"#), 2);
        assert_eq!(prompt_tokens(br#"{"prompt":[1,2,3]}"#), 3);
        assert_eq!(prompt_tokens(br#"{"prompt":[[1,2,3],[4]]}"#), 4);
        assert_eq!(prompt_tokens(br#"{"messages":[{"role":"user","content":"123456789"}]}"#), 1 + 3);
        assert_eq!(prompt_tokens(br#"{"max_tokens":3}"#), 1);
        assert_eq!(prompt_tokens(b"not json, 24 bytes long.."), 6);
        assert_eq!(prompt_tokens(b""), 1);
    }
}
