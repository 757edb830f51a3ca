//! Which requests are work that the engine owes an answer, and roughly how many prompt tokens each brings (V2, V3). Pure.

use std::borrow::Cow;
use std::fmt;

use http::Method;
use percent_encoding::percent_decode_str;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::form::Form;
use super::name::Name;
use super::print::Print;

/// Ends of paths whose POST makes an engine generate: OpenAI, Anthropic, vLLM, SGLang, TGI, llama.cpp, Ollama, KServe's two protocols (Triton,
/// MLServer), TEI.
const WORK_PATHS: [&str; 34] = [
    "/completions",
    "/responses",
    "/messages",
    "/embeddings",
    "/embedding",
    "/embed",
    "/generate",
    "/generate_stream",
    "/vertex_generate",
    "/completion",
    "/infill",
    "/chat",
    "/rerank",
    "/reranking",
    "/score",
    "/classify",
    "/pooling",
    "/encode",
    "/transcriptions",
    "/translations",
    "/invocations",
    "/completions/batch",
    "/generative_scoring",
    "/speech",
    "/images/generations",
    "/images/edits",
    "/images/variations",
    "/infer",
    ":predict",
    "/systemone",
    "/predict",
    "/embed_all",
    "/embed_sparse",
    "/similarity",
];
/// SGLang takes these by PUT as well.
const PUT_PATHS: [&str; 3] = ["/generate", "/encode", "/classify"];
/// Ends of paths whose POST brings no work and may be what ends a silence, or work that nobody wants any more: of vLLM and SGLang. In a pod the
/// gate is the only way to them.
const MENDING_PATHS: [&str; 11] = [
    "/resume",
    // a rank that has failed is tried once more (vLLM's fault tolerance)
    "/fault_tolerance/apply",
    // a trainer's, between its pause and its `/resume`
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
    "/wake_up",
    "/continue_generation",
    "/resume_memory_occupation",
    "/abort_request",
    "/abort_requests",
    "/cancel",
];
/// Fields that hold a prompt: what is asked, what stands before it (Anthropic's `system`, Ollama's too; `instructions` of the Responses API;
/// `context`, the token ids of Ollama's last answer), what stands behind it, and what is compared with what.
const PROMPT_FIELDS: [&str; 21] = [
    "prompt",
    "messages",
    "input",
    "inputs",
    "input_ids",
    "instances",
    "text",
    "texts",
    "text_1",
    "text_2",
    "documents",
    "query",
    "queries",
    "items",
    "system",
    "instructions",
    "context",
    "suffix",
    "input_prefix",
    "input_suffix",
    "input_extra",
];
/// Fields that a chat template writes out in the prompt as JSON, names and all: a tool's schema is half names.
const WRITTEN_OUT: [&str; 2] = ["tools", "functions"];
/// Quotes, colon and comma around a name.
const NAME_MARKS: u64 = 4;
/// Ends of paths whose bodies are sound.
const SOUND_PATHS: [&str; 2] = ["/transcriptions", "/translations"];
/// Characters a token, roughly; a deadline scales with it, nothing is billed by it.
const BYTES_PER_TOKEN: u64 = 4;
/// The same of pictures, sound and films, which are no text however they are written: a megabyte is a few thousand tokens. Counted as text
/// they would teach that a long prompt costs next to nothing, and the next long text would be late at once.
const MEDIA_BYTES_PER_TOKEN: u64 = 512;
const MEDIA_TOKENS_MIN: u64 = 256;
/// What pictures and sound in base64 are called: by OpenAI and Anthropic, by Ollama.
const DATA_NAMES: [&str; 2] = ["data", "images"];
/// No text is as long, for no model takes two million tokens.
const TEXT_BYTES_MAX: u64 = 8 << 20;
/// Base64 is told from words by so much of it.
const BASE64_BYTES: usize = 512;

/// A request's path as an engine reads it: `%73` in it is an `s`, and the work and its poison are the same.
pub fn plain(path: &str) -> Cow<'_, str> {
    percent_decode_str(path).decode_utf8_lossy()
}

/// Does this request count as work owed?
pub fn is_work(method: &Method, path: &str) -> bool {
    let path = path.trim_end_matches('/');
    let ends = |ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
    // TGI generates at its root as well
    method == Method::POST && (path.is_empty() || ends(&WORK_PATHS)) || method == Method::PUT && ends(&PUT_PATHS)
}

/// Does it bring no work, and may be what a shut gate waits for?
pub fn mends(path: &str) -> bool {
    MENDING_PATHS.iter().any(|end| path.trim_end_matches('/').ends_with(end))
}

/// What a request that is work asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// Rough prompt tokens, at least 1.
    pub prompt_tokens: u64,
    /// Does it ask for an answer that streams? One that does not is silent until its end by its own wish.
    pub stream: bool,
    /// By what a second try of it is known; `None` where the body was too long to be read.
    pub print: Option<Print>,
}

/// Reads a request body: token ids counted, text and files in it by length; a body that is not JSON by its own length.
pub fn asked(path: &str, body: &[u8]) -> Asked {
    // Counted while it is parsed: as a tree of values, token ids would take 30 times their own length.
    let prompt = serde_json::from_slice::<Prompt>(body);
    let prompt = prompt.unwrap_or_else(|_| Prompt { tokens: by_length(path, body.len() as u64), stream: None });
    Asked {
        prompt_tokens: prompt.tokens.max(1),
        stream: streams(path, prompt.stream),
        print: Some(Print::of(path, body)),
    }
}

/// Reads a body in parts: files, which no client sends in any other way, and words about them. Whether its answer streams stands in one of them.
pub fn asked_in(form: &Form, path: &str, body: &[u8]) -> Asked {
    let prompt_tokens = media_tokens(body.len() as u64);
    Asked { prompt_tokens, stream: streams(path, None), print: Some(form.print(path, body)) }
}

/// A body that is too long to be read: counted by its length, and held to stream only where the path says so.
pub fn asked_unread(path: &str, length: u64) -> Asked {
    Asked { prompt_tokens: by_length(path, length).max(1), stream: streams(path, None), print: None }
}

fn by_length(path: &str, bytes: u64) -> u64 {
    let sound = SOUND_PATHS.iter().any(|end| path.trim_end_matches('/').ends_with(end));
    if sound || bytes > TEXT_BYTES_MAX { media_tokens(bytes) } else { bytes / BYTES_PER_TOKEN }
}

fn media_tokens(bytes: u64) -> u64 {
    (bytes / MEDIA_BYTES_PER_TOKEN).max(MEDIA_TOKENS_MIN)
}

/// `data:image/png;base64,…`: a file within the request.
fn is_data_url(text: &str) -> bool {
    let head = text.as_bytes().iter().take(BASE64_BYTES).position(|byte| *byte == b',');
    head.and_then(|end| text.get(..end)).is_some_and(|head| head.starts_with("data:") && head.ends_with(";base64"))
}

fn is_base64(text: &str) -> bool {
    let of_it = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_' | b'=');
    text.as_bytes().get(..BASE64_BYTES).is_some_and(|head| head.iter().all(of_it))
}

/// By the body's field; Ollama's API streams unless told otherwise (others have theirs below `/api` and do not), TGI has a path for it.
fn streams(path: &str, field: Option<bool>) -> bool {
    let path = path.trim_end_matches('/');
    field.unwrap_or(["/api/generate", "/api/chat"].contains(&path)) || path.ends_with("/generate_stream")
}

/// Tokens in the prompt fields of a request, which is an object, and its wish to stream.
struct Prompt {
    tokens: u64,
    stream: Option<bool>,
}

/// Tokens in one value: numbers are token ids; of objects (chat messages) every text counts.
#[derive(Default)]
struct Tokens {
    count: u64,
    /// What the names of fields in it add where it is written out as JSON.
    names: u64,
    /// What it counts as under one of [`DATA_NAMES`].
    as_data: Option<u64>,
    /// A number of its own: no token id where it stands in an object.
    number: bool,
    /// It is `true` or `false`.
    flag: Option<bool>,
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
                let (mut sum, mut stream): (u64, _) = (0, None);
                while let Some(name) = map.next_key::<Name<'de>>()? {
                    if PROMPT_FIELDS.contains(&&*name) {
                        sum = sum.saturating_add(map.next_value::<Tokens>()?.count);
                    } else if WRITTEN_OUT.contains(&&*name) {
                        let tokens = map.next_value::<Tokens>()?;
                        sum = sum.saturating_add(tokens.count).saturating_add(tokens.names);
                    } else if &*name == "stream" {
                        stream = map.next_value::<Tokens>()?.flag;
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Prompt { tokens: sum, stream })
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

    fn visit_bool<E>(self, flag: bool) -> Result<Tokens, E> {
        Ok(Tokens { flag: Some(flag), ..Tokens::default() })
    }

    fn visit_unit<E>(self) -> Result<Tokens, E> {
        Ok(Tokens::default())
    }

    fn visit_i64<E>(self, _: i64) -> Result<Tokens, E> {
        Ok(Tokens { count: 1, number: true, ..Tokens::default() })
    }

    fn visit_u64<E>(self, _: u64) -> Result<Tokens, E> {
        Ok(Tokens { count: 1, number: true, ..Tokens::default() })
    }

    fn visit_f64<E>(self, _: f64) -> Result<Tokens, E> {
        Ok(Tokens { count: 1, number: true, ..Tokens::default() })
    }

    fn visit_str<E>(self, text: &str) -> Result<Tokens, E> {
        let bytes = text.len() as u64;
        let count = if is_data_url(text) { media_tokens(bytes) } else { bytes.div_ceil(BYTES_PER_TOKEN) };
        Ok(Tokens { count, as_data: is_base64(text).then(|| media_tokens(bytes)), ..Tokens::default() })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tokens, A::Error> {
        let (mut count, mut names, mut as_data): (u64, u64, _) = (0, 0, Some(0_u64));
        while let Some(item) = items.next_element::<Tokens>()? {
            count = count.saturating_add(item.count);
            names = names.saturating_add(item.names);
            as_data = as_data.zip(item.as_data).map(|(sum, data)| sum.saturating_add(data));
        }
        Ok(Tokens { count, names, as_data, ..Tokens::default() })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Tokens, A::Error> {
        let (mut count, mut names): (u64, u64) = (0, 0);
        while let Some((name, value)) = fields.next_entry::<Name<'de>, Tokens>()? {
            let data = value.as_data.filter(|_| DATA_NAMES.contains(&&*name));
            count = count.saturating_add(if value.number { 0 } else { data.unwrap_or(value.count) });
            let written = (name.len() as u64).saturating_add(NAME_MARKS).div_ceil(BYTES_PER_TOKEN);
            names = names.saturating_add(value.names).saturating_add(written);
        }
        Ok(Tokens { count, names, ..Tokens::default() })
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
