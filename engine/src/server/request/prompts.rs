//! The fields that make the prompt: text, token ids or a conversation, and how much output it leaves room for.

use std::sync::Arc;

use serde_json::Value;

use crate::codec::Chat;
use crate::handle::Ready;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, brief, ids_of, token_list, token_list_wanted};
use crate::server::request::Kind;
use crate::server::request::messages::{check_arguments, message};
use crate::server::tools::ToolUse;

/// OpenAI's default for completions; chats get the rest of the context.
const COMPLETION_TOKENS_DEFAULT: usize = 16;
const PROMPTS_MAX: usize = 256;
/// What `/tokenize` counts and `/detokenize` takes, and what is left of a prompt that may be cut.
const TOKENS_MAX: usize = 1 << 20;
/// A longer text is counted in pieces of this before it is encoded as a whole: an encoder takes hundreds of bytes for a word, and every word
/// is a token at least.
const PIECE_BYTES: usize = 512 << 10;
/// So many tokens more than the whole has, at most, two halves of a text have together.
const SEAM_TOKENS: usize = 64;

/// One prompt, and what is to follow it.
#[derive(Debug)]
pub struct Input {
    pub tokens: Arc<[u32]>,
    pub max_new_tokens: usize,
    /// Its text, if it is to be echoed.
    pub echo: Option<Arc<str>>,
    pub prompt_logprobs: bool,
}

/// What an answer says of its prompt.
#[derive(Debug, Clone, Copy)]
pub struct Echo {
    pub text: bool,
    /// Logprobs are told at all.
    pub logprobs: bool,
}

/// A prompt's tokens, and the text that they are all of, if it was sent as one.
type Prompt<'a> = (Vec<u32>, Option<&'a str>);

/// The prompts, each with room for its output.
///
/// # Errors
/// A field is not what it must be, or prompt and output do not fit.
pub fn inputs(
    kind: Kind,
    f: &Fields<'_>,
    ready: &Ready,
    echo: Echo,
    tools: Option<&ToolUse>,
) -> Result<Vec<Input>, ApiError> {
    let max_tokens = max_tokens(kind, f, echo.text)?;
    let mut prompts = match kind {
        Kind::Completion => completion_prompts(f, ready)?,
        Kind::Chat => {
            let text = chat_text(f, ready, tools.and_then(|t| t.described()))?;
            check_length("messages", &text, f, ready)?;
            vec![(chat_tokens(&text, f, tokens_max(f, ready), ready)?, None)]
        }
    };
    if let Some(last) = f.int("truncate_prompt_tokens", 1, i64::from(u32::MAX))? {
        let last = usize::try_from(last).unwrap_or(usize::MAX);
        for (tokens, sent) in prompts.iter_mut().filter(|(tokens, _)| tokens.len() > last) {
            tokens.drain(..tokens.len() - last);
            *sent = None;
        }
    }
    prompts.iter().try_for_each(|(tokens, _)| check_known(kind, tokens, ready))?;
    let build = |(tokens, sent): Prompt<'_>| -> Result<Input, ApiError> {
        let text = match sent {
            _ if !echo.text => None,
            // what the tokens say lacks the special ones, which a client may well have written
            Some(text) if !echo.logprobs => Some(text.into()),
            // offsets are counted in what the tokens say
            _ => Some(told(&tokens, ready)?.into()),
        };
        let max_new_tokens = fit(kind, tokens.len(), max_tokens, ready)?;
        Ok(Input { tokens: tokens.into(), max_new_tokens, echo: text, prompt_logprobs: echo.text && echo.logprobs })
    };
    prompts.into_iter().map(build).collect()
}

/// A tokenizer may have tokens that the model has not: lists of ids have been looked through, what a text becomes has not.
fn check_known(kind: Kind, tokens: &[u32], ready: &Ready) -> Result<(), ApiError> {
    let vocab = ready.info.vocab_size;
    let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) else { return Ok(()) };
    let (param, text) = (param_of(kind), ready.codec.token_text(*id));
    let message = format!("{param} has the token {id} ({}), and this model's are {}", brief(&text), ids_of(vocab));
    Err(ApiError::invalid(param, message))
}

fn param_of(kind: Kind) -> &'static str {
    if kind == Kind::Chat { "messages" } else { "prompt" }
}

/// The text of a prompt that an output follows: a character that it ends in the middle of is the output's.
fn told(tokens: &[u32], ready: &Ready) -> Result<String, ApiError> {
    let text = ready.codec.decode(tokens)?;
    if !text.ends_with(char::REPLACEMENT_CHARACTER) {
        return Ok(text);
    }
    let mut stream = ready.codec.stream(false);
    Ok(tokens.iter().map(|id| stream.push(*id)).collect::<Result<_, _>>()?)
}

/// One prompt of `/tokenize`: a text.
///
/// # Errors
/// It is no text.
pub fn one_prompt(f: &Fields<'_>, ready: &Ready) -> Result<Vec<u32>, ApiError> {
    let text = f.str("prompt")?.ok_or_else(|| f.wrong("prompt", "a text"))?;
    encode("prompt", text, f.bool("add_special_tokens")?.unwrap_or(true), TOKENS_MAX, ready)
}

/// The tokens of a text, unless they are more than `most`, which is told before the memory for them is needed.
fn encode(param: &str, text: &str, special: bool, most: usize, ready: &Ready) -> Result<Vec<u32>, ApiError> {
    if text.len() > PIECE_BYTES {
        check_count(param, text, most, ready)?;
    }
    Ok(ready.codec.encode(text, special)?)
}

fn check_count(param: &str, text: &str, most: usize, ready: &Ready) -> Result<(), ApiError> {
    let (mut rest, mut count) = (text, 0_usize);
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        count = (count + ready.codec.encode(piece, false)?.len()).saturating_sub(SEAM_TOKENS);
        if count > most {
            return Err(too_many(
                param,
                &format!("the text has more than {most} tokens, the most that are taken here"),
            ));
        }
        rest = after;
    }
    Ok(())
}

/// The tokens of `/detokenize` are no more than `/tokenize` gives: each may become hundreds of bytes of text.
///
/// # Errors
/// They are more.
pub fn check_tokens(f: &Fields<'_>) -> Result<(), ApiError> {
    match f.get("tokens").and_then(Value::as_array).map(Vec::len) {
        Some(count) if count > TOKENS_MAX => {
            Err(too_many("tokens", &format!("the list has {count} tokens; at most {TOKENS_MAX} are taken here")))
        }
        _ => Ok(()),
    }
}

fn too_many(param: &str, message: &str) -> ApiError {
    ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message.to_owned()) }
}

/// The tokens of a conversation, as the model's template writes it.
///
/// # Errors
/// The messages are not what they must be, or the template refuses them.
pub fn chat_input(f: &Fields<'_>, ready: &Ready, tools: Option<&Value>) -> Result<Vec<u32>, ApiError> {
    chat_tokens(&chat_text(f, ready, tools)?, f, TOKENS_MAX, ready)
}

fn chat_text(f: &Fields<'_>, ready: &Ready, tools: Option<&Value>) -> Result<String, ApiError> {
    let wanted = || f.wrong("messages", "a list of messages, at least one");
    let list = f.get("messages").and_then(Value::as_array).filter(|l| !l.is_empty()).ok_or_else(wanted)?;
    check_arguments(list)?;
    let messages: Value = list.iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<_, _>>()?;
    let chat = Chat {
        messages: &messages,
        tools,
        extra: f.object("chat_template_kwargs")?,
        opens_answer: f.bool("add_generation_prompt")?.unwrap_or(true),
    };
    Ok(ready.codec.chat_prompt(chat)?)
}

fn chat_tokens(text: &str, f: &Fields<'_>, most: usize, ready: &Ready) -> Result<Vec<u32>, ApiError> {
    // The template wrote the special tokens itself.
    encode("messages", text, f.bool("add_special_tokens")?.unwrap_or(false), most, ready)
}

fn max_tokens(kind: Kind, f: &Fields<'_>, echo: bool) -> Result<Option<usize>, ApiError> {
    // Without an echo there would be nothing to answer with.
    let least = i64::from(!echo);
    let old = f.int("max_tokens", least, i64::from(u32::MAX))?;
    let new = if kind == Kind::Chat { f.int("max_completion_tokens", least, i64::from(u32::MAX))? } else { None };
    Ok(new.or(old).and_then(|n| usize::try_from(n).ok()))
}

/// The output's length, so that prompt and output fit into the longest sequence.
fn fit(kind: Kind, prompt: usize, wanted: Option<usize>, ready: &Ready) -> Result<usize, ApiError> {
    let longest = ready.limits.seq_len_max;
    let room = longest.saturating_sub(prompt);
    let granted = match (wanted, kind) {
        (Some(n), _) => n,
        (None, Kind::Completion) => room.clamp(1, COMPLETION_TOKENS_DEFAULT),
        (None, Kind::Chat) => room.clamp(1, longest),
    };
    if granted <= room {
        return Ok(granted);
    }
    Err(too_long(param_of(kind), longest, &format!("has {prompt} and {granted} more are asked for")))
}

fn too_long(param: &str, longest: usize, what: &str) -> ApiError {
    too_many(param, &format!("this model's longest sequence is {longest} tokens; the prompt {what}"))
}

/// No prompt of more tokens is served. One that may be cut may have been longer.
fn tokens_max(f: &Fields<'_>, ready: &Ready) -> usize {
    let longest = ready.limits.seq_len_max;
    if f.get("truncate_prompt_tokens").is_none() { longest } else { longest.max(TOKENS_MAX) }
}

/// A text that is too long whatever its tokens are is not cut into any: that would take seconds, for nothing.
fn check_length(param: &str, text: &str, f: &Fields<'_>, ready: &Ready) -> Result<(), ApiError> {
    let longest = ready.limits.seq_len_max;
    if text.len() <= longest {
        // no token stands for less than a byte
        return Ok(());
    }
    match ready.codec.text_bytes_max(longest).filter(|most| text.len() > *most) {
        Some(most) if f.get("truncate_prompt_tokens").is_none() => {
            Err(too_long(param, longest, &format!("has {} bytes, and so many tokens {most} at most", text.len())))
        }
        _ => Ok(()),
    }
}

/// `prompt`: a text, a list of token ids, or a list of either.
fn completion_prompts<'a>(f: &Fields<'a>, ready: &Ready) -> Result<Vec<Prompt<'a>>, ApiError> {
    let vocab = ready.info.vocab_size;
    let wanted = || {
        let ids = token_list_wanted(vocab);
        f.wrong("prompt", &format!("a text, {ids}, or a list of at most {PROMPTS_MAX} of either, none of them empty"))
    };
    let special = f.bool("add_special_tokens")?.unwrap_or(true);
    let one = |value: &'a Value| match value {
        Value::String(text) => {
            check_length("prompt", text, f, ready)?;
            let tokens = encode("prompt", text, special, tokens_max(f, ready), ready)?;
            Ok((tokens, Some(text.as_str())))
        }
        other => Ok((token_list(other, vocab).ok_or_else(wanted)?, None)),
    };
    let prompts = match f.get("prompt") {
        Some(Value::Array(list)) if list.first().is_some_and(|v| !v.is_number()) && list.len() <= PROMPTS_MAX => {
            list.iter().map(one).collect::<Result<Vec<_>, ApiError>>()?
        }
        Some(value) => vec![one(value)?],
        None => return Err(wanted()),
    };
    if prompts.iter().any(|(tokens, _)| tokens.is_empty()) { Err(wanted()) } else { Ok(prompts) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::codec::{HfCodec, TextCodec};
    use crate::demo_model::{DemoArch, write_demo_model};
    use crate::grammar::tests::info;
    use crate::model::ModelInfo;
    use crate::scheduler::Limits;

    /// The demo model's tokenizer, and a model of a smaller vocabulary.
    #[test]
    fn a_text_of_tokens_that_the_model_has_not_is_refused_by_their_ids() {
        let dir = tempfile::tempdir().unwrap();
        write_demo_model(dir.path(), DemoArch::Qwen3, 0).unwrap();
        let codec = Arc::new(HfCodec::from_dir(dir.path()).unwrap());
        let id = codec.encode("a", false).unwrap()[0] as usize;
        let echo = Echo { text: false, logprobs: false };
        let read = |kind, body: Value, vocab_size| {
            let info = ModelInfo { vocab_size, ..info(Vec::new()) };
            let ready = Ready { info, limits: Limits::default(), codec: codec.clone(), grammars: Arc::default() };
            inputs(kind, &Fields::new(&body).unwrap(), &ready, echo, None)
        };
        let prompt = json!({"prompt": ["<|turn|>", "a"]});
        let chat = json!({"messages": [{"role": "user", "content": "a"}]});
        assert_eq!(read(Kind::Completion, prompt.clone(), id + 1).unwrap()[1].tokens[..], [id as u32]);
        for (kind, body, param) in [(Kind::Completion, prompt, "prompt"), (Kind::Chat, chat, "messages")] {
            let error = read(kind, body, 4).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)));
            assert!(error.message.contains("has the token ") && error.message.contains("0 to 3"), "{}", error.message);
        }
    }
}
