//! Which requests are work that the engine owes an answer, and roughly how many prompt tokens each brings (V2, V3). Pure.

use std::borrow::Cow;
use std::fmt;

use http::Method;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

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
    // Counted while it is parsed: as a tree of values, token ids would take 30 times their own length.
    let tokens = serde_json::from_slice::<Prompt>(body).map_or(body.len() as u64 / BYTES_PER_TOKEN, |prompt| prompt.0);
    tokens.max(1)
}

/// Tokens in the prompt fields of a request, which is an object.
struct Prompt(u64);

/// Tokens in one value: numbers are token ids; of objects (chat messages) every text counts.
struct Tokens {
    count: u64,
    /// A number of its own: no token id where it stands in an object.
    number: bool,
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Prompt;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Prompt, A::Error> {
                let mut sum: u64 = 0;
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    if PROMPT_FIELDS.contains(&name.as_ref()) {
                        sum = sum.saturating_add(map.next_value::<Tokens>()?.count);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Prompt(sum))
            }
        }
        from.deserialize_map(Fields)
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Count)
    }
}

/// Counts and builds nothing.
struct Count;

impl<'de> Visitor<'de> for Count {
    type Value = Tokens;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("any value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Tokens, E> {
        Ok(Tokens { count: 0, number: false })
    }

    fn visit_unit<E>(self) -> Result<Tokens, E> {
        Ok(Tokens { count: 0, number: false })
    }

    fn visit_i64<E>(self, _: i64) -> Result<Tokens, E> {
        Ok(Tokens { count: 1, number: true })
    }

    fn visit_u64<E>(self, _: u64) -> Result<Tokens, E> {
        Ok(Tokens { count: 1, number: true })
    }

    fn visit_f64<E>(self, _: f64) -> Result<Tokens, E> {
        Ok(Tokens { count: 1, number: true })
    }

    fn visit_str<E>(self, text: &str) -> Result<Tokens, E> {
        Ok(Tokens { count: (text.len() as u64).div_ceil(BYTES_PER_TOKEN), number: false })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tokens, A::Error> {
        let mut count: u64 = 0;
        while let Some(item) = items.next_element::<Tokens>()? {
            count = count.saturating_add(item.count);
        }
        Ok(Tokens { count, number: false })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Tokens, A::Error> {
        let mut count: u64 = 0;
        while let Some((IgnoredAny, value)) = fields.next_entry::<IgnoredAny, Tokens>()? {
            count = count.saturating_add(if value.number { 0 } else { value.count });
        }
        Ok(Tokens { count, number: false })
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
        assert_eq!(
            prompt_tokens(
                br#"{"input":[{"a":7,"b":[7,-1,0.5],"c":null,"d":true,"e\n":"1\u00e9"}],"x":{"y":"12345678"}}"#
            ),
            4
        );
        assert_eq!(prompt_tokens(b"[1,2,3,4,5,6,7]"), 3);
        assert_eq!(prompt_tokens(br#"{"prompt":[1,2,3]} and more"#), 6);
        assert_eq!(prompt_tokens(b"not json, 24 bytes long.."), 6);
        assert_eq!(prompt_tokens(b""), 1);
    }
}
