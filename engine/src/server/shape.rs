//! The JSON of answers: whole ones and chunks, for completions and for chats. Pure.
//!
//! A whole answer with logprobs is written token by token: as one value it would be ten times as large as its text.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::server::choice::{Delta, TokenInfo, TokenText};
use crate::server::request::Kind;
use crate::server::tools::CallPiece;

/// What every object of one answer has in common.
#[derive(Debug, Clone)]
pub struct Envelope {
    pub kind: Kind,
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    pub model: String,
    pub logprobs: bool,
    /// Chunks speak of usage: null until the last one.
    pub include_usage: bool,
}

/// Token counts of one answer, over all its choices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
}

impl Usage {
    fn json(self) -> Value {
        let total = self.prompt_tokens + self.completion_tokens;
        json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total})
    }
}

impl Envelope {
    /// The whole answer as text; `choices` are deltas gathered to the end, in order.
    ///
    /// # Errors
    /// It cannot be written; nothing that it is made of is a cause.
    pub fn whole(&self, choices: &[Delta], usage: Usage) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Whole {
            id: &self.id,
            object: if self.kind == Kind::Chat { "chat.completion" } else { "text_completion" },
            created: self.created,
            model: &self.model,
            choices: choices.iter().map(|choice| self.whole_choice(choice)).collect(),
            usage: usage.json(),
        })
    }

    fn whole_choice<'a>(&self, delta: &'a Delta) -> WholeChoice<'a> {
        let chat = self.kind == Kind::Chat;
        WholeChoice {
            index: delta.index,
            logprobs: self.logprobs_of(delta),
            finish_reason: delta.finish.map(|f| f.reason),
            text: (!chat).then_some(delta.text.as_str()),
            message: chat.then(|| message(delta)),
        }
    }

    /// The first chunk of a chat's choice: who speaks.
    pub fn opening(&self, index: usize) -> Option<Value> {
        let choice = json!({
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null
        });
        (self.kind == Kind::Chat).then(|| self.object(self.chunk_name(), vec![choice], None))
    }

    /// One piece of an answer.
    pub fn chunk(&self, delta: &Delta) -> Value {
        self.object(self.chunk_name(), vec![self.chunk_choice(delta)], None)
    }

    /// The last chunk, for those who asked for it.
    pub fn usage_chunk(&self, usage: Usage) -> Value {
        self.object(self.chunk_name(), Vec::new(), Some(usage))
    }

    fn chunk_name(&self) -> &'static str {
        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn object(&self, name: &str, choices: Vec<Value>, usage: Option<Usage>) -> Value {
        let mut object = json!({
            "id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices
        });
        match usage {
            Some(usage) => object["usage"] = usage.json(),
            None if self.include_usage => object["usage"] = Value::Null,
            None => (),
        }
        object
    }

    fn chunk_choice(&self, delta: &Delta) -> Value {
        let (logprobs, finish) = (self.logprobs_of(delta), delta.finish.map(|f| f.reason));
        let mut choice = json!({"index": delta.index, "logprobs": logprobs, "finish_reason": finish});
        match self.kind {
            Kind::Completion => choice["text"] = delta.text.clone().into(),
            Kind::Chat => choice["delta"] = chat_delta(delta),
        }
        choice
    }

    fn logprobs_of<'a>(&self, delta: &'a Delta) -> Option<Logprobs<'a>> {
        self.logprobs.then_some(Logprobs { kind: self.kind, tokens: &delta.tokens })
    }
}

/// A whole answer.
#[derive(Serialize)]
struct Whole<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<WholeChoice<'a>>,
    usage: Value,
}

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
    /// Of a completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    /// Of a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Value>,
}

/// The logprobs of some tokens, as one of the two APIs has them.
struct Logprobs<'a> {
    kind: Kind,
    tokens: &'a [TokenInfo],
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let each = |value: fn(&TokenInfo) -> Value| Each { tokens: self.tokens, value };
        let mut map = to.serialize_map(None)?;
        match self.kind {
            Kind::Chat => map.serialize_entry("content", &each(chat_logprob))?,
            Kind::Completion => {
                map.serialize_entry("tokens", &each(|token| name(&token.token).into()))?;
                map.serialize_entry("token_logprobs", &each(|token| json!(token.logprob)))?;
                map.serialize_entry("top_logprobs", &each(top_logprobs))?;
                map.serialize_entry("text_offset", &each(|token| token.offset.into()))?;
            }
        }
        map.end()
    }
}

/// A list with a value for each token, of which one at a time is there.
struct Each<'a> {
    tokens: &'a [TokenInfo],
    value: fn(&TokenInfo) -> Value,
}

impl Serialize for Each<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.tokens.iter().map(self.value))
    }
}

fn chat_delta(delta: &Delta) -> Value {
    let mut object = json!({});
    if !delta.text.is_empty() {
        object["content"] = delta.text.clone().into();
    }
    if !delta.calls.is_empty() {
        object["tool_calls"] = delta.calls.iter().map(call_piece).collect();
    }
    object
}

fn call_piece(piece: &CallPiece) -> Value {
    match &piece.head {
        Some((id, name)) => json!({
            "index": piece.index, "id": id, "type": "function", "function": {"name": name, "arguments": piece.arguments}
        }),
        None => json!({"index": piece.index, "function": {"arguments": piece.arguments}}),
    }
}

/// A whole message; its content is null when it only calls.
fn message(delta: &Delta) -> Value {
    let mut calls: Vec<Value> = Vec::new();
    for piece in &delta.calls {
        if let Some((id, name)) = &piece.head {
            calls.push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": ""}}));
        }
        if let Some(Value::String(arguments)) = calls.last_mut().map(|call| &mut call["function"]["arguments"]) {
            arguments.push_str(&piece.arguments);
        }
    }
    if calls.is_empty() {
        return json!({"role": "assistant", "content": delta.text});
    }
    let content = if delta.text.is_empty() { Value::Null } else { delta.text.clone().into() };
    json!({"role": "assistant", "content": content, "tool_calls": calls})
}

fn chat_logprob(info: &TokenInfo) -> Value {
    let entry = |t: &TokenText, logprob: Option<f32>| json!({"token": t.text, "logprob": logprob, "bytes": t.bytes});
    let mut own = entry(&info.token, info.logprob);
    own["top_logprobs"] = info.top.iter().map(|(token, logprob)| entry(token, Some(*logprob))).collect();
    own
}

/// The likeliest tokens at a token's place, by their names.
fn top_logprobs(info: &TokenInfo) -> Value {
    // The prompt's first token has no distribution before it.
    let Some(own) = info.logprob else { return Value::Null };
    // two tokens may have one name: the likelier one has it, and before all the one that was chosen
    let mut all: Map<String, Value> = Map::new();
    for (token, logprob) in &info.top {
        all.entry(name(token)).or_insert(json!(logprob));
    }
    all.insert(name(&info.token), json!(own));
    Value::Object(all)
}

/// A token as logprobs of completions name it, which have no bytes beside: a part of a character by its bytes, as OpenAI does it
/// (`bytes:\xe2\x80`). Different tokens would else have the same name, and all but one of them be lost.
fn name(token: &TokenText) -> String {
    if !token.text.contains(char::REPLACEMENT_CHARACTER) || std::str::from_utf8(&token.bytes).is_ok() {
        return token.text.clone();
    }
    let spelled = token.bytes.iter().map(|byte| match byte {
        b'\\' => "\\\\".to_owned(),
        b' '..=b'~' => char::from(*byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    });
    format!("bytes:{}", spelled.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_are_named_by_their_bytes() {
        let token = |bytes: &[u8]| TokenText { text: String::from_utf8_lossy(bytes).into_owned(), bytes: bytes.into() };
        assert_eq!(name(&token("é".as_bytes())), "é");
        assert_eq!(name(&token(b" \\\xe2\x80")), r"bytes: \\\xe2\x80");
        assert_eq!(name(&token("\u{fffd}".as_bytes())), "\u{fffd}", "the text itself");
        let named = TokenText { text: "token_id:7".into(), bytes: vec![0xe2] };
        assert_eq!(name(&named), "token_id:7");
        let top = vec![(token(b"\xe2"), -1.0), (token(b"\xe3"), -2.0)];
        let info = TokenInfo { token: token(b"\xe4"), logprob: Some(-3.0), top, offset: 0 };
        assert_eq!(top_logprobs(&info).as_object().unwrap().len(), 3);
    }

    #[test]
    fn of_two_tokens_of_one_name_the_chosen_one_is_told_or_else_the_likelier() {
        let token = |text: &str, byte| TokenText { text: text.into(), bytes: vec![byte] };
        let top = vec![(token("A", 1), -1.0), (token("B", 2), -2.0), (token("A", 3), -3.0), (token("B", 4), -4.0)];
        let info = TokenInfo { token: token("A", 3), logprob: Some(-3.0), top, offset: 0 };
        assert_eq!(top_logprobs(&info), json!({"A": -3.0, "B": -2.0}));
    }
}
