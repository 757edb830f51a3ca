//! From the body of `/v1/completions` and `/v1/chat/completions` to a [`Job`]: everything is checked here, nothing later.
//! Every field acts or is refused by name; docs/engine-api.md lists them, and a test holds the two together.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::handle::{GenerateRequest, Ready};
use crate::sampling::{LogitRules, SamplingParams};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::text::TextRules;
use crate::server::tools::ToolUse;
use prompts::{Echo, Input};
use structured::Form;

mod messages;
mod prompts;
mod sampling;
mod structured;

pub use prompts::{chat_input, check_tokens, one_prompt};

/// Outputs of one request: prompts times `n`.
const CHOICES_MAX: i64 = 256;
const STOPS_MAX: usize = 16;
/// Every output looks for its stop strings at each token.
const STOP_BYTES_MAX: usize = 1024;
/// What prompts that are echoed take in the answer, over all its outputs.
const ECHO_BYTES_MAX: usize = 16 << 20;
/// It stands in log lines.
const USER_BYTES_MAX: usize = 512;
/// Tokens and alternatives whose logprobs a whole answer tells, over all its outputs: each takes some hundred bytes until it is sent.
pub const TOLD_MAX: usize = 1 << 20;

/// Which of the two APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Completion,
    Chat,
}

/// A checked request.
#[derive(Debug)]
pub struct Job {
    pub kind: Kind,
    /// In the answer's order: all outputs of the first prompt, then those of the second.
    pub choices: Vec<ChoiceJob>,
    /// Tokens of all prompts, each counted once whatever `n` is.
    pub prompt_tokens: usize,
    pub text: TextRules,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: bool,
    /// Tokens stand in logprobs as `token_id:N`.
    pub names_token_ids: bool,
    /// Calls of tools are looked for in the outputs.
    pub tools: Option<ToolUse>,
    /// Who asked, by their own word; for the log.
    pub user: Option<String>,
    /// The form of the outputs, as long as it is not compiled.
    pub form: Option<Form>,
    /// What compiling the outputs' grammar took.
    pub grammar_took: Option<Duration>,
}

impl Job {
    /// The same with the grammar of its outputs. This may take seconds.
    ///
    /// # Errors
    /// The form cannot be followed.
    pub fn compiled(mut self, ready: &Ready) -> Result<Self, ApiError> {
        let Some(form) = self.form.take() else { return Ok(self) };
        let (first, took) = form.compile(ready)?;
        self.grammar_took = Some(took);
        let others = (1..self.choices.len()).map(|_| first.another());
        let others = others.collect::<Result<Vec<_>, _>>().map_err(|error| ApiError::grammar("n", &error))?;
        let all = self.choices.iter_mut().zip(std::iter::once(first).chain(others));
        all.for_each(|(choice, constraint)| choice.request.constraint = Some(constraint));
        Ok(self)
    }
}

/// One output as the engine is asked for it, and the prompt's text where that is to be echoed.
#[derive(Debug)]
pub struct ChoiceJob {
    pub request: GenerateRequest,
    pub echo: Option<Arc<str>>,
}

/// Reads a request's body.
///
/// # Errors
/// [`ApiError`] naming the field.
pub fn parse(kind: Kind, body: &Value, ready: &Ready, served: &str) -> Result<Job, ApiError> {
    let f = Fields::new(body)?;
    check_model(&f, served)?;
    refuse_unsupported(&f)?;
    let count = f.int("n", 1, 128)?.unwrap_or(1);
    f.unsupported("best_of", &[json!(count)])?;
    let sampling = sampling::params(kind, &f, ready)?;
    let logprobs = sampling.logprobs.is_some();
    let tools = if kind == Kind::Chat { ToolUse::of(&f, ready)? } else { None };
    let stops = Stops::of(&f, ready)?;
    check_allowed(&sampling.rules, &stops, &ready.info.eos_token_ids)?;
    let priority = f.int("priority", i64::from(i32::MIN), i64::from(i32::MAX))?.map_or(0, |n| n as i32);
    let echo = Echo { text: kind == Kind::Completion && f.bool("echo")?.unwrap_or(false), logprobs };
    let inputs = prompts::inputs(kind, &f, ready, echo, tools.as_ref())?;
    check_count(count, inputs.len())?;
    check_echo(count, &inputs)?;
    check_least(sampling.rules.min_tokens, &inputs)?;
    let stream = f.bool("stream")?.unwrap_or(false);
    if let Some(top) = sampling.logprobs.filter(|_| !stream) {
        // what the rest of the context would be is asked for by nobody: such an answer is measured as it comes
        let asked = ["max_tokens", "max_completion_tokens"].iter().any(|name| f.get(name).is_some());
        check_told(&inputs, asked, usize::try_from(count).unwrap_or(1), top)?;
    }
    let include_usage = include_usage(&f, stream)?;
    let mut job = Job {
        kind,
        choices: Vec::new(),
        prompt_tokens: inputs.iter().map(|i| i.tokens.len()).sum(),
        text: stops.text(&f, sampling.rules.min_tokens)?,
        stream,
        include_usage,
        logprobs,
        names_token_ids: f.bool("return_tokens_as_token_ids")?.unwrap_or(false),
        tools,
        user: user(&f)?,
        form: None,
        grammar_took: None,
    };
    let outputs = inputs.len() * usize::try_from(count).unwrap_or(1);
    job.form = structured::form(&f, &job, (stops.ignore_eos, outputs))?;
    job.tools.iter_mut().for_each(ToolUse::forget_schemas);
    f.refuse_rest()?;
    job.choices = choices(&inputs, (count, priority), &sampling, &stops);
    Ok(job)
}

/// Where only tokens that end the output may come, and none of them yet, nothing may.
fn check_allowed(rules: &LogitRules, stops: &Stops, eos: &[u32]) -> Result<(), ApiError> {
    let ends = |id: &u32| stops.token_ids.contains(id) || !stops.ignore_eos && eos.contains(id);
    if rules.min_tokens == 0 || rules.allowed.is_empty() || !rules.allowed.iter().all(ends) {
        return Ok(());
    }
    let message = format!(
        "allowed_token_ids names none but tokens that end the output, and before {} tokens (min_tokens) none of these may come",
        rules.min_tokens
    );
    Err(ApiError::invalid("allowed_token_ids", message))
}

/// The request's model is the one that is served here.
///
/// # Errors
/// It is another.
pub fn check_model(f: &Fields<'_>, served: &str) -> Result<(), ApiError> {
    match f.str("model")? {
        Some(name) if name != served => Err(ApiError::unknown_model(name, served)),
        _ => Ok(()),
    }
}

/// Fields that other servers have and this one has not, with the values that ask for nothing. (Whatever is not named anywhere is
/// refused too; these have values that clients send by default.)
fn refuse_unsupported(f: &Fields<'_>) -> Result<(), ApiError> {
    for name in ["use_beam_search", "store"] {
        f.unsupported(name, &[json!(false)])?;
    }
    for name in ["functions", "metadata", "documents", "bad_words"] {
        f.unsupported(name, &[json!([]), json!({})])?;
    }
    f.unsupported("suffix", &[json!("")])?;
    f.unsupported("function_call", &[json!("none")])?;
    f.unsupported("length_penalty", &[json!(1), json!(1.0)])?;
    f.unsupported("modalities", &[json!(["text"])])?;
    f.unsupported("service_tier", &[json!("auto"), json!("default")])?;
    f.unsupported("spaces_between_special_tokens", &[json!(true)])?;
    f.unsupported("guided_decoding_backend", &[json!("auto"), json!("guidance")])
}

fn user(f: &Fields<'_>) -> Result<Option<String>, ApiError> {
    match f.str("user")? {
        Some(user) if user.len() > USER_BYTES_MAX => {
            Err(f.wrong("user", &format!("a string of at most {USER_BYTES_MAX} bytes")))
        }
        user => Ok(user.map(str::to_owned)),
    }
}

/// What ends an output; one for all outputs of a request.
struct Stops {
    strings: Arc<[String]>,
    token_ids: Arc<[u32]>,
    ignore_eos: bool,
}

impl Stops {
    fn of(f: &Fields<'_>, ready: &Ready) -> Result<Self, ApiError> {
        Ok(Self {
            strings: f.strings("stop", STOPS_MAX, STOP_BYTES_MAX)?.into(),
            token_ids: f.few_token_ids("stop_token_ids", ready.info.vocab_size)?.into(),
            ignore_eos: f.bool("ignore_eos")?.unwrap_or(false),
        })
    }

    fn text(&self, f: &Fields<'_>, min_tokens: usize) -> Result<TextRules, ApiError> {
        Ok(TextRules {
            stops: self.strings.clone(),
            keeps_stop: f.bool("include_stop_str_in_output")?.unwrap_or(false),
            min_tokens,
            special: !f.bool("skip_special_tokens")?.unwrap_or(true),
        })
    }
}

fn include_usage(f: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = f.inner("stream_options", "stream_options.")? else { return Ok(false) };
    let wanted = options.bool("include_usage")?.unwrap_or(false);
    options.refuse_rest()?;
    // as in vLLM; an empty object asks for nothing, there too
    if !stream && !f.object("stream_options")?.is_some_and(Map::is_empty) {
        return Err(ApiError::invalid("stream_options", "stream_options can only be given with stream: true"));
    }
    Ok(wanted)
}

fn check_count(count: i64, prompts: usize) -> Result<(), ApiError> {
    let choices = i64::try_from(prompts).unwrap_or(i64::MAX).saturating_mul(count);
    if choices <= CHOICES_MAX {
        return Ok(());
    }
    let message =
        format!("n = {count} for {prompts} prompts asks for {choices} outputs; at most {CHOICES_MAX} are given");
    Err(ApiError::invalid("n", message))
}

/// An answer holds what it echoes for each of its outputs, and a body is far shorter than that.
fn check_echo(count: i64, inputs: &[Input]) -> Result<(), ApiError> {
    let once: usize = inputs.iter().filter_map(|input| input.echo.as_deref()).map(str::len).sum();
    let bytes = once.saturating_mul(usize::try_from(count).unwrap_or(usize::MAX));
    if bytes <= ECHO_BYTES_MAX {
        return Ok(());
    }
    let message = format!(
        "echo of {once} bytes of prompts for n = {count} outputs each is {bytes} bytes; at most {ECHO_BYTES_MAX} are echoed"
    );
    Err(ApiError::invalid("echo", message))
}

/// As many tokens as are wanted at least may come.
fn check_least(least: usize, inputs: &[Input]) -> Result<(), ApiError> {
    match inputs.iter().map(|input| input.max_new_tokens).min() {
        Some(most) if least > most => {
            let message = format!("min_tokens is {least}, but the output has at most {most} tokens");
            Err(ApiError::invalid("min_tokens", message))
        }
        _ => Ok(()),
    }
}

/// A whole answer with `top` alternatives a token is kept until its last one is there, so it must not become too large.
fn check_told(inputs: &[Input], asked: bool, count: usize, top: usize) -> Result<(), ApiError> {
    let tokens_of = |input: &Input| {
        let echoed = if input.prompt_logprobs { input.tokens.len() } else { 0 };
        echoed.saturating_add(if asked { input.max_new_tokens } else { 0 })
    };
    let tokens = inputs.iter().map(tokens_of).fold(0, usize::saturating_add).saturating_mul(count);
    let told = tokens.saturating_mul(top + 1);
    if told <= TOLD_MAX {
        return Ok(());
    }
    Err(told_too_much(&format!("logprobs of up to {tokens} tokens, with {top} alternatives each, are {told} entries")))
}

/// An answer that is no stream would have more than [`TOLD_MAX`] logprobs.
pub fn told_too_much(what: &str) -> ApiError {
    let message = format!(
        "{what}; an answer that is no stream has at most {TOLD_MAX}: lower max_tokens, n or the number of alternatives, or ask for a stream"
    );
    ApiError::invalid("logprobs", message)
}

/// `count` outputs for each prompt, which differ by their seeds. What they have in common they share: a request may ask for hundreds.
fn choices(
    inputs: &[Input],
    (count, priority): (i64, i32),
    sampling: &SamplingParams,
    stops: &Stops,
) -> Vec<ChoiceJob> {
    let choice = |(input, number): (&Input, i64)| {
        let seed = sampling.seed.map(|seed| seed.wrapping_add(number.cast_unsigned()));
        let request = GenerateRequest {
            prompt: input.tokens.clone(),
            max_new_tokens: input.max_new_tokens,
            ignore_eos: stops.ignore_eos,
            stop_token_ids: stops.token_ids.clone(),
            sampling: SamplingParams { seed, ..sampling.clone() },
            prompt_logprobs: input.prompt_logprobs,
            priority,
            ..GenerateRequest::default()
        };
        ChoiceJob { request, echo: input.echo.clone() }
    };
    inputs.iter().flat_map(|input| (0..count).map(move |number| (input, number))).map(choice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(tokens: usize, max_new_tokens: usize, prompt_logprobs: bool) -> Input {
        Input { tokens: vec![7; tokens].into(), max_new_tokens, echo: None, prompt_logprobs }
    }

    #[test]
    fn what_all_outputs_echo_together_is_bounded() {
        let echoes = |bytes: usize| Input { echo: Some("x".repeat(bytes).into()), ..input(1, 1, false) };
        assert_eq!(check_echo(16, &[echoes(1 << 19), echoes(1 << 19), input(1, 1, false)]), Ok(()));
        let error = check_echo(16, &[echoes(1 << 19), echoes((1 << 19) + 1)]).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("echo")));
        assert!(error.message.contains("at most 16777216"), "{}", error.message);
    }

    #[test]
    fn whole_answers_tell_of_so_many_tokens_and_no_more() {
        assert_eq!(check_told(&[input(9, 1 << 15, false)], true, 4, 7), Ok(()));
        assert_eq!(check_told(&[input(9, usize::MAX, false)], false, 128, 20), Ok(()));
        for (inputs, count, top) in [
            (vec![input(9, 1 << 15, false)], 4, 8),
            (vec![input(9, 1 << 15, false)], 5, 7),
            (vec![input(9, (1 << 15) + 1, false)], 4, 7),
            (vec![input(1, 1 << 15, true)], 4, 7),
            (vec![input(9, 1 << 16, false), input(9, (1 << 16) + 1, false)], 1, 7),
            (vec![input(9, usize::MAX, false)], 128, 20),
        ] {
            let error = check_told(&inputs, true, count, top).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("logprobs")));
            assert!(error.message.contains("lower max_tokens"), "{}", error.message);
        }
    }

    /// What a body may hold much of is there once, however many outputs are asked for.
    #[test]
    fn outputs_of_one_request_share_what_is_long() {
        let rules = LogitRules { allowed: vec![1; 4096], ..LogitRules::default() };
        let sampling = SamplingParams { rules: rules.into(), ..SamplingParams::default() };
        let stops = Stops { strings: ["end".to_owned()].into(), token_ids: [5, 6].into(), ignore_eos: false };
        let echoed = Input { echo: Some("hi".into()), ..input(2, 3, false) };
        let all = choices(&[echoed], (128, 0), &sampling, &stops);
        let echo = |choice: &ChoiceJob| choice.echo.clone().unwrap();
        assert!(Arc::ptr_eq(&echo(&all[0]), &echo(&all[127])));
        let (first, last) = (&all[0].request, &all[127].request);
        assert!(Arc::ptr_eq(&first.prompt, &last.prompt));
        assert!(Arc::ptr_eq(&first.stop_token_ids, &last.stop_token_ids));
        assert!(Arc::ptr_eq(&first.sampling.rules, &last.sampling.rules));
    }
}
