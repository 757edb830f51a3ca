//! Runs a job: hands it to the engine, gathers or streams what comes, and answers in time whatever the engine does (E4).

use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt::Display,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    body::{Body, Bytes},
    http::header::{CACHE_CONTROL, CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use futures::{
    Stream, StreamExt,
    stream::{BoxStream, select_all, unfold},
};
use serde_json::Value;

use crate::handle::{GenerateRequest, Ready};
use crate::server::{
    AppState,
    choice::{Choice, ChoiceStart, ChoiceTools, Delta},
    error::ApiError,
    request::{Job, Kind, TOLD_MAX, told_too_much},
    shape::{Envelope, Usage},
    text::ChoiceText,
    tools::ToolUse,
};

type Deltas = BoxStream<'static, Result<Delta, ApiError>>;

/// A whole answer that is longer, about, is written on a thread that may take its time: streams of others do not wait for that.
const WRITTEN_AT_ONCE_BYTES: usize = 256 << 10;

/// When a request must be answered.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    pub arrived: Instant,
    pub timeout: Duration,
}

impl Deadline {
    /// The moment, for whoever waits for something else until then.
    pub fn at(&self) -> tokio::time::Instant {
        tokio::time::Instant::from_std(self.arrived + self.timeout)
    }

    /// The same moment on the clock that the engine thread reads.
    fn monotonic_ns(&self) -> u64 {
        let left = self.at().into_std().saturating_duration_since(Instant::now());
        heartbeat::monotonic_ns().saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Answers a job.
///
/// # Errors
/// [`ApiError`], as long as no byte of a stream was sent; later errors are events of the stream.
pub async fn answer(app: AppState, ready: &Ready, job: Job, deadline: Deadline) -> Result<Response, ApiError> {
    let envelope = envelope(&app, &job);
    let usage = Usage { prompt_tokens: job.prompt_tokens, ..Usage::default() };
    let metrics = &app.handle.shared.metrics;
    job.grammar_took.iter().for_each(|took| metrics.grammar_compile.observe(took.as_secs_f64()));
    let stream = job.stream;
    let starts = begin(&app, ready, job, &envelope.id, deadline.monotonic_ns())?;
    let count = starts.len();
    let choices = starts.into_iter().map(|s| Choice::new(s, ready.codec.clone(), metrics.clone(), deadline.arrived));
    let deltas = select_all(choices.map(|c| pieces(c, deadline, app.clone()))).boxed();
    if stream {
        streamed(Sse::new(envelope, usage), deltas).await
    } else {
        let (choices, usage) = gather(deltas, count, usage).await?;
        whole(&app, envelope, (choices, usage), deadline).await
    }
}

/// The answer in one piece.
async fn whole(
    app: &AppState,
    envelope: Envelope,
    (choices, usage): (Vec<Delta>, Usage),
    deadline: Deadline,
) -> Result<Response, ApiError> {
    let bytes: usize = choices.iter().map(Delta::bytes).sum();
    let write = move || envelope.whole(&choices, usage);
    let failed = |error: &dyn Display| ApiError::internal(format!("the answer could not be written: {error}"));
    let written = if bytes > WRITTEN_AT_ONCE_BYTES {
        match tokio::time::timeout_at(deadline.at(), tokio::task::spawn_blocking(write)).await {
            Ok(written) => written.map_err(|error| failed(&error))?,
            Err(_elapsed) => return Err(app.deadline_error(deadline.timeout)),
        }
    } else {
        write()
    };
    app.outgoing.json(written.map_err(|error| failed(&error))?)
}

/// Hands all outputs to the engine, or none.
fn begin(app: &AppState, ready: &Ready, job: Job, id: &str, deadline_ns: u64) -> Result<Vec<ChoiceStart>, ApiError> {
    let Job { choices, text, logprobs, names_token_ids, tools, .. } = job;
    let prompt = |r: &GenerateRequest| (r.prompt.clone(), r.prompt.first().filter(|_| r.prompt_logprobs).copied());
    let prompts: Vec<_> = choices.iter().map(|c| prompt(&c.request)).collect();
    let (requests, echoes): (Vec<_>, Vec<_>) =
        choices.into_iter().map(|c| (GenerateRequest { deadline_ns: Some(deadline_ns), ..c.request }, c.echo)).unzip();
    let streams = app.handle.submit(requests)?;
    let special = text.special || tools.as_ref().is_some_and(ToolUse::shows_special);
    let text_after = |prompt: &Arc<[u32]>| ChoiceText::new(ready.codec.stream_after(prompt, special), text.clone());
    let start = |(index, ((stream, echo), (prompt, first_token)))| ChoiceStart {
        index,
        stream,
        text: text_after(&prompt),
        echo,
        first_token,
        prompt_tokens: prompt.len(),
        logprobs,
        names_token_ids,
        tools: tools.as_ref().map(|tools| ChoiceTools {
            parser: tools.parser(format!("call_{id}_{index}")),
            finish_reason: tools.finish_reason(),
        }),
    };
    Ok(streams.into_iter().zip(echoes).zip(prompts).enumerate().map(start).collect())
}

fn envelope(app: &AppState, job: &Job) -> Envelope {
    let prefix = if job.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{}", app.next_answer_id());
    let (model, include_usage) = (app.served_name.to_string(), job.stream && job.include_usage);
    Envelope { kind: job.kind, id, created: unix_now_s(), model, logprobs: job.logprobs, include_usage }
}

/// Seconds of the Unix epoch, as answers tell when they were made.
pub fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A choice as a stream that ends with its finish, with its first error, or with its deadline.
fn pieces(choice: Choice, deadline: Deadline, app: AppState) -> Deltas {
    let step = move |state: Option<Choice>| {
        let app = app.clone();
        async move {
            let mut choice = state?;
            let at = deadline.at();
            let piece = match tokio::time::timeout_at(at, choice.next()).await {
                // the engine may have been the first to see that it has passed
                Ok(Err(error)) if error.is_by_deadline() && tokio::time::Instant::now() >= at => {
                    Err(app.deadline_error(deadline.timeout))
                }
                Ok(piece) => piece,
                Err(_elapsed) => Err(app.deadline_error(deadline.timeout)),
            };
            let goes_on = matches!(&piece, Ok(delta) if delta.finish.is_none());
            Some((piece, goes_on.then_some(choice)))
        }
    };
    unfold(Some(choice), step).boxed()
}

/// All pieces of all choices, put together. The first error ends everything.
async fn gather(mut deltas: Deltas, count: usize, mut usage: Usage) -> Result<(Vec<Delta>, Usage), ApiError> {
    let mut whole: Vec<Delta> = (0..count).map(|index| Delta { index, ..Delta::default() }).collect();
    let mut told = 0;
    while let Some(delta) = deltas.next().await {
        let delta = delta?;
        told += delta.told();
        if told > TOLD_MAX {
            return Err(told_too_much("the output has more logprobs than an answer may hold"));
        }
        usage.completion_tokens += delta.finish.map_or(0, |f| f.completion_tokens);
        if let Some(choice) = whole.get_mut(delta.index) {
            choice.text += &delta.text;
            choice.calls.extend(delta.calls);
            choice.tokens.extend(delta.tokens);
            choice.finish = delta.finish;
        }
    }
    Ok((whole, usage))
}

/// Waits for the first piece before it commits to a 200: a request that never starts gets a true status.
async fn streamed(mut sse: Sse, mut deltas: Deltas) -> Result<Response, ApiError> {
    if let Some(first) = deltas.next().await {
        sse.piece(Ok(first?));
    }
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(sse.events(deltas))).into_response())
}

/// Writes server-sent events.
struct Sse {
    envelope: Envelope,
    usage: Usage,
    opened: Vec<usize>,
    pending: VecDeque<Bytes>,
    ended: bool,
}

impl Sse {
    fn new(envelope: Envelope, usage: Usage) -> Self {
        Self { envelope, usage, opened: Vec::new(), pending: VecDeque::new(), ended: false }
    }

    fn events(self, deltas: Deltas) -> impl Stream<Item = Result<Bytes, Infallible>> {
        unfold((self, deltas), |(mut sse, mut deltas)| async move {
            loop {
                if let Some(event) = sse.pending.pop_front() {
                    return Some((Ok(event), (sse, deltas)));
                }
                if sse.ended {
                    return None;
                }
                match deltas.next().await {
                    Some(piece) => sse.piece(piece),
                    None => sse.done(),
                }
            }
        })
    }

    fn piece(&mut self, piece: Result<Delta, ApiError>) {
        let delta = match piece {
            Ok(delta) => delta,
            Err(error) => {
                // No [DONE] after an error: the answer is not complete, and must not look so.
                self.send(&error.body());
                self.ended = true;
                return;
            }
        };
        if !self.opened.contains(&delta.index) {
            self.opened.push(delta.index);
            if let Some(opening) = self.envelope.opening(delta.index) {
                self.send(&opening);
            }
        }
        self.usage.completion_tokens += delta.finish.map_or(0, |f| f.completion_tokens);
        let says = !delta.text.is_empty() || !delta.calls.is_empty() || !delta.tokens.is_empty();
        if says || delta.finish.is_some() {
            let chunk = self.envelope.chunk(&delta);
            self.send(&chunk);
        }
    }

    fn done(&mut self) {
        if self.envelope.include_usage {
            let chunk = self.envelope.usage_chunk(self.usage);
            self.send(&chunk);
        }
        self.pending.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.ended = true;
    }

    fn send(&mut self, data: &Value) {
        self.pending.push_back(format!("data: {data}\n\n").into());
    }
}
