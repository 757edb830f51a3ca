//! One choice of an answer: the engine's events for one prompt, turned into pieces of text with their logprobs.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use crate::codec::{TextCodec, TextStream};
use crate::handle::{End, RequestStream, TokenEvent};
use crate::metrics::Metrics;
use crate::sampling::TokenLogprob;
use crate::server::error::ApiError;
use crate::server::text::ChoiceText;
use crate::server::tools::{CallPiece, Parsed, ToolParser};

/// What one event adds to a choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Delta {
    pub index: usize,
    pub text: String,
    pub calls: Vec<CallPiece>,
    /// Logprobs, where they were asked for.
    pub tokens: Vec<TokenInfo>,
    /// Set on the last one.
    pub finish: Option<Finish>,
}

impl Delta {
    /// Logprobs that it tells.
    pub fn told(&self) -> usize {
        self.tokens.iter().map(|token| 1 + token.top.len()).sum()
    }

    /// What it takes in an answer, about.
    pub fn bytes(&self) -> usize {
        self.text.len() + self.told() * TOLD_BYTES
    }
}

/// What a token and its logprob take in an answer, about.
const TOLD_BYTES: usize = 64;

/// A token as logprobs show it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenInfo {
    pub token: TokenText,
    /// None: the first token of an echoed prompt has nothing before it.
    pub logprob: Option<f32>,
    pub top: Vec<(TokenText, f32)>,
    /// Characters of the text, from the beginning of the echo, before the one that this token begins or is a part of.
    pub offset: usize,
}

/// A token for people, and its bytes: a part of a character has no text of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenText {
    pub text: String,
    pub bytes: Vec<u8>,
}

/// How a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finish {
    pub reason: &'static str,
    pub completion_tokens: usize,
}

/// What a choice begins with.
pub struct ChoiceStart {
    pub index: usize,
    pub stream: RequestStream,
    pub text: ChoiceText,
    /// The prompt's text, if it is echoed.
    pub echo: Option<Arc<str>>,
    /// The prompt's first token, if its logprobs are told.
    pub first_token: Option<u32>,
    pub prompt_tokens: usize,
    pub logprobs: bool,
    /// Tokens stand as `token_id:N`.
    pub names_token_ids: bool,
    pub tools: Option<ChoiceTools>,
}

/// Calls of tools in a choice.
pub struct ChoiceTools {
    pub parser: ToolParser,
    /// How a choice ends that called something and stopped by itself.
    pub finish_reason: &'static str,
}

/// A choice under way.
pub struct Choice {
    start: ChoiceStart,
    codec: Arc<dyn TextCodec>,
    metrics: Arc<Metrics>,
    arrived: Instant,
    last_token: Option<Instant>,
    completion_tokens: usize,
    /// Characters of the echo.
    echo_chars: usize,
    told: PromptTold,
    /// Infos that wait for the delta they go with.
    infos: VecDeque<TokenInfo>,
}

impl Choice {
    pub fn new(start: ChoiceStart, codec: Arc<dyn TextCodec>, metrics: Arc<Metrics>, arrived: Instant) -> Self {
        let (last_token, completion_tokens, infos) = (None, 0, VecDeque::new());
        let (echo_chars, told) = (
            start.echo.as_ref().map_or(0, |echo| echo.chars().count()),
            PromptTold { text: codec.stream(false), chars: 0 },
        );
        let mut choice =
            Self { start, codec, metrics, arrived, last_token, completion_tokens, echo_chars, told, infos };
        if let Some(id) = choice.start.first_token {
            let (token, offset) = (choice.spell(id), choice.told.offset(id));
            choice.infos.push_back(TokenInfo { token, logprob: None, top: Vec::new(), offset });
        }
        choice
    }

    /// The next piece; after one with a `finish`, or an error, there is none. The caller brings the deadline.
    ///
    /// # Errors
    /// [`ApiError`]: the request ended otherwise than by finishing.
    pub async fn next(&mut self) -> Result<Delta, ApiError> {
        let (text, reason) = match self.start.stream.next().await {
            Ok(TokenEvent::Prompt(logprobs)) => {
                for told in logprobs {
                    let offset = self.told.offset(told.token);
                    self.note_logprob(told, offset);
                }
                (String::new(), None)
            }
            Ok(TokenEvent::Token { id, logprob, stop }) => self.token(id, logprob, stop)?,
            Err(End::Stop) => (self.start.text.finish()?.0, Some("stop")),
            Err(End::Length) => {
                let (text, stopped) = self.start.text.finish()?;
                (text, Some(if stopped { "stop" } else { "length" }))
            }
            Err(end) => return Err(ApiError::of_end(&end)),
        };
        let text = match self.start.echo.take() {
            Some(echo) => format!("{echo}{text}"),
            None => text,
        };
        let (parsed, reason) = self.find_calls(text, reason);
        let finish = reason.map(|reason| self.finish(reason));
        let tokens = self.infos.drain(..).collect();
        Ok(Delta { index: self.start.index, text: parsed.text, calls: parsed.calls, tokens, finish })
    }

    /// Parts the calls from the text; `reason` is set when this is the end.
    fn find_calls(&mut self, text: String, reason: Option<&'static str>) -> (Parsed, Option<&'static str>) {
        let Some(ChoiceTools { parser, finish_reason }) = &mut self.start.tools else {
            return (Parsed { text, calls: Vec::new() }, reason);
        };
        let mut parsed = parser.push(&text);
        if reason.is_some() {
            let rest = parser.finish();
            parsed.text += &rest.text;
            parsed.calls.extend(rest.calls);
        }
        let called = reason == Some("stop") && parser.called();
        (parsed, if called { Some(finish_reason) } else { reason })
    }

    fn token(
        &mut self,
        id: u32,
        logprob: Option<TokenLogprob>,
        stop: bool,
    ) -> Result<(String, Option<&'static str>), ApiError> {
        self.completion_tokens += 1;
        self.time_token();
        if stop && !self.start.text.keeps_stop() {
            // Ends the output and is no part of it; the end itself is the next event.
            return Ok((String::new(), None));
        }
        if let Some(logprob) = logprob {
            let offset = self.echo_chars + self.start.text.decoded_chars();
            self.note_logprob(logprob, offset);
        }
        let (text, stopped) = self.start.text.push(id)?;
        if stopped {
            self.start.stream.satisfied();
        }
        Ok((text, stopped.then_some("stop")))
    }

    fn time_token(&mut self) {
        let now = Instant::now();
        let since = |t: Instant| now.saturating_duration_since(t).as_secs_f64();
        match self.last_token.replace(now) {
            None => self.metrics.first_token.observe(since(self.arrived)),
            Some(last) => self.metrics.inter_token.observe(since(last)),
        }
    }

    fn finish(&mut self, reason: &'static str) -> Finish {
        self.metrics.e2e.observe(self.arrived.elapsed().as_secs_f64());
        self.metrics.request_prompt_tokens.observe(self.start.prompt_tokens as f64);
        self.metrics.request_generation_tokens.observe(self.completion_tokens as f64);
        Finish { reason, completion_tokens: self.completion_tokens }
    }

    fn note_logprob(&mut self, l: TokenLogprob, offset: usize) {
        if self.start.logprobs {
            let top = l.top.iter().map(|(id, logprob)| (self.spell(*id), *logprob)).collect();
            let (token, logprob) = (self.spell(l.token), Some(l.logprob));
            self.infos.push_back(TokenInfo { token, logprob, top, offset });
        }
    }

    fn spell(&self, id: u32) -> TokenText {
        let named = self.start.names_token_ids;
        let text = if named { format!("token_id:{id}") } else { self.codec.token_text(id) };
        TokenText { text, bytes: self.codec.token_bytes(id) }
    }
}

/// How far a prompt's text is told, token by token.
struct PromptTold {
    text: Box<dyn TextStream>,
    chars: usize,
}

impl PromptTold {
    /// Where the next token stands in the echo.
    fn offset(&mut self, id: u32) -> usize {
        let offset = self.chars;
        // the echo was decoded from the same tokens: what cannot be decoded has failed the request already
        self.chars += self.text.push(id).map_or(0, |text| text.chars().count());
        offset
    }
}
