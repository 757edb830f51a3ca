//! From the body of `/v1/completions` and `/v1/chat/completions` to a [`Job`]: everything is checked here, nothing later.
//! What this server cannot do is an error that says so, never silently something else.

use serde_json::{Value, json};

use crate::handle::{GenerateRequest, Ready};
use crate::sampling::SamplingParams;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, token_list, token_list_wanted};

/// OpenAI's default for completions; chats get the rest of the context.
const COMPLETION_TOKENS_DEFAULT: usize = 16;
const PROMPTS_MAX: usize = 256;
const STOPS_MAX: usize = 16;
const TOP_LOGPROBS_MAX: i64 = 20;

/// Which of the two APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Completion,
    Chat,
}

/// A checked request: one choice a prompt.
#[derive(Debug, Clone)]
pub struct Job {
    pub kind: Kind,
    pub prompts: Vec<Prompt>,
    pub stop: Vec<String>,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: bool,
}

/// One prompt as the engine takes it, and its text where that is to be echoed.
#[derive(Debug, Clone)]
pub struct Prompt {
    pub request: GenerateRequest,
    pub echo: String,
}

/// Reads a request's body.
///
/// # Errors
/// [`ApiError`] naming the field.
pub fn parse(kind: Kind, body: &Value, ready: &Ready, served: &str) -> Result<Job, ApiError> {
    let f = Fields::new(body)?;
    match f.str("model")? {
        Some(name) if name != served => return Err(ApiError::unknown_model(name, served)),
        _ => refuse_unsupported(&f)?,
    }
    let template = GenerateRequest {
        ignore_eos: f.bool("ignore_eos")?.unwrap_or(false),
        stop_token_ids: f.token_ids("stop_token_ids", ready.info.vocab_size)?,
        sampling: sampling(kind, &f)?,
        priority: f.int("priority", i64::from(i32::MIN), i64::from(i32::MAX))?.map_or(0, |n| n as i32),
        ..GenerateRequest::default()
    };
    let echo = kind == Kind::Completion && f.bool("echo")?.unwrap_or(false);
    let max_tokens = max_tokens(kind, &f, echo)?;
    let inputs = match kind {
        Kind::Completion => completion_prompts(&f, ready)?,
        Kind::Chat => vec![chat_prompt(&f, ready)?],
    };
    let logprobs = template.sampling.logprobs.is_some();
    let build = |tokens: Vec<u32>| -> Result<Prompt, ApiError> {
        let echoed = if echo { ready.codec.decode(&tokens)? } else { String::new() };
        let max_new_tokens = fit(kind, tokens.len(), max_tokens, ready)?;
        let prompt_logprobs = echo && logprobs;
        let request = GenerateRequest { prompt: tokens, max_new_tokens, prompt_logprobs, ..template.clone() };
        Ok(Prompt { request, echo: echoed })
    };
    let stream = f.bool("stream")?.unwrap_or(false);
    let usage = f.inner("stream_options", "stream_options.")?.map(|o| o.bool("include_usage")).transpose()?.flatten();
    Ok(Job {
        kind,
        prompts: inputs.into_iter().map(build).collect::<Result<_, _>>()?,
        stop: f.strings("stop", STOPS_MAX)?,
        stream,
        include_usage: usage.unwrap_or(false),
        logprobs,
    })
}

/// Fields that change the output and that we do not have, with the values that ask for nothing.
fn refuse_unsupported(f: &Fields<'_>) -> Result<(), ApiError> {
    let zero = [json!(0), json!(0.0)];
    let one = [json!(1), json!(1.0)];
    for name in ["presence_penalty", "frequency_penalty", "min_p", "min_tokens"] {
        f.unsupported(name, &zero)?;
    }
    for name in ["n", "best_of", "repetition_penalty"] {
        f.unsupported(name, &one)?;
    }
    for name in ["tools", "functions", "logit_bias"] {
        f.unsupported(name, &[json!([]), json!({})])?;
    }
    f.unsupported("suffix", &[json!("")])?;
    f.unsupported("tool_choice", &[json!("none"), json!("auto")])?;
    f.unsupported("response_format", &[json!({"type": "text"})])?;
    f.unsupported("use_beam_search", &[json!(false)])
}

fn sampling(kind: Kind, f: &Fields<'_>) -> Result<SamplingParams, ApiError> {
    let top_k = f.int("top_k", -1, i64::from(i32::MAX))?.unwrap_or(0);
    Ok(SamplingParams {
        temperature: f.number("temperature", 0.0, 2.0)?.unwrap_or(1.0) as f32,
        top_p: f.number("top_p", 0.0, 1.0)?.unwrap_or(1.0) as f32,
        top_k: usize::try_from(top_k).unwrap_or(0),
        seed: f.int("seed", i64::MIN, i64::MAX)?.map(i64::cast_unsigned),
        logprobs: logprobs(kind, f)?,
    })
}

fn logprobs(kind: Kind, f: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let count = |n: i64| usize::try_from(n).unwrap_or(0);
    if kind == Kind::Completion {
        return Ok(f.int("logprobs", 0, TOP_LOGPROBS_MAX)?.map(count));
    }
    let wanted = f.bool("logprobs")?.unwrap_or(false);
    let top = f.int("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
    if top.is_some_and(|n| n > 0) && !wanted {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
    }
    Ok(wanted.then(|| count(top.unwrap_or(0))))
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
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    let message = format!(
        "this model's longest sequence is {longest} tokens; the prompt has {prompt} and {granted} more are asked for"
    );
    Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) })
}

/// `prompt`: a text, a list of token ids, or a list of either.
fn completion_prompts(f: &Fields<'_>, ready: &Ready) -> Result<Vec<Vec<u32>>, ApiError> {
    let vocab = ready.info.vocab_size;
    let wanted = || {
        let ids = token_list_wanted(vocab);
        f.wrong("prompt", &format!("a text, {ids}, or a list of at most {PROMPTS_MAX} of either, none of them empty"))
    };
    let one = |value: &Value| match value {
        Value::String(text) => Ok(ready.codec.encode(text, true)?),
        other => token_list(other, vocab).ok_or_else(wanted),
    };
    let prompts = match f.get("prompt") {
        Some(Value::Array(list)) if list.first().is_some_and(|v| !v.is_number()) && list.len() <= PROMPTS_MAX => {
            list.iter().map(one).collect::<Result<Vec<_>, ApiError>>()?
        }
        Some(value) => vec![one(value)?],
        None => return Err(wanted()),
    };
    if prompts.iter().any(Vec::is_empty) { Err(wanted()) } else { Ok(prompts) }
}

fn chat_prompt(f: &Fields<'_>, ready: &Ready) -> Result<Vec<u32>, ApiError> {
    let wanted = || f.wrong("messages", "a list of messages, each with a role and a content of text, at least one");
    let list = f.get("messages").and_then(Value::as_array).filter(|l| !l.is_empty()).ok_or_else(wanted)?;
    let messages: Value = list.iter().map(|m| message(m).ok_or_else(wanted)).collect::<Result<_, _>>()?;
    let extra = f.object("chat_template_kwargs")?;
    let text = ready.codec.chat_prompt(&messages, extra)?;
    // The template wrote the special tokens itself.
    Ok(ready.codec.encode(&text, false)?)
}

/// A message with its content as one text; `None` when it has parts that are no text.
fn message(value: &Value) -> Option<Value> {
    let mut message = value.as_object()?.clone();
    message.get("role")?.as_str()?;
    let content = match message.get("content")? {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(text_part).collect::<Option<Vec<_>>>()?.join("\n"),
        _ => return None,
    };
    message.insert("content".into(), content.into());
    Some(Value::Object(message))
}

fn text_part(part: &Value) -> Option<&str> {
    (part.get("type")?.as_str()? == "text").then_some(())?;
    part.get("text")?.as_str()
}
