//! Runs a job: hands it to the engine, gathers or streams what comes, and answers in time whatever the engine does (E4).

use std::{
    collections::VecDeque,
    convert::Infallible,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json,
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
    choice::{Choice, ChoiceStart, Delta},
    error::ApiError,
    request::Job,
    shape::{Envelope, Usage},
    text::ChoiceText,
};

type Deltas = BoxStream<'static, Result<Delta, ApiError>>;

/// When a request must be answered.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    pub arrived: Instant,
    pub timeout: Duration,
}

impl Deadline {
    /// The same moment on the clock that the engine thread reads.
    fn monotonic_ns(&self) -> u64 {
        let left = (self.arrived + self.timeout).saturating_duration_since(Instant::now());
        heartbeat::monotonic_ns().saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Answers a job.
///
/// # Errors
/// [`ApiError`], as long as no byte of a stream was sent; later errors are events of the stream.
pub async fn answer(app: AppState, ready: &Ready, job: Job, deadline: Deadline) -> Result<Response, ApiError> {
    let deadline_ns = Some(deadline.monotonic_ns());
    let requests = job.prompts.iter().map(|p| GenerateRequest { deadline_ns, ..p.request.clone() }).collect();
    let envelope = envelope(&app, &job);
    let usage = Usage { prompt_tokens: job.prompts.iter().map(|p| p.request.prompt.len()).sum(), ..Usage::default() };
    let streams = app.handle.submit(requests)?;
    let (stream, include_usage) = (job.stream, job.include_usage);
    let starts = job.prompts.into_iter().zip(streams).enumerate().map(|(index, (prompt, stream))| ChoiceStart {
        index,
        stream,
        text: ChoiceText::new(ready.codec.stream(), job.stop.clone()),
        echo: prompt.echo,
        first_token: prompt.request.prompt.first().filter(|_| prompt.request.prompt_logprobs).copied(),
        prompt_tokens: prompt.request.prompt.len(),
        logprobs: job.logprobs,
    });
    let metrics = &app.handle.shared.metrics;
    let choices = starts.map(|s| Choice::new(s, ready.codec.clone(), metrics.clone(), deadline.arrived));
    let choices: Vec<Choice> = choices.collect();
    let count = choices.len();
    let deltas = select_all(choices.into_iter().map(|c| pieces(c, deadline, app.clone()))).boxed();
    if stream {
        let sse = Sse::new(envelope, usage, include_usage);
        streamed(sse, deltas).await
    } else {
        let (choices, usage) = gather(deltas, count, usage).await?;
        Ok(Json(envelope.whole(&choices, usage)).into_response())
    }
}

fn envelope(app: &AppState, job: &Job) -> Envelope {
    let prefix = if job.kind == crate::server::request::Kind::Chat { "chatcmpl" } else { "cmpl" };
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let id = format!("{prefix}-{}", app.next_answer_id());
    Envelope { kind: job.kind, id, created, model: app.served_name.to_string(), logprobs: job.logprobs }
}

/// A choice as a stream that ends with its finish, with its first error, or with its deadline.
fn pieces(choice: Choice, deadline: Deadline, app: AppState) -> Deltas {
    let step = move |state: Option<Choice>| {
        let app = app.clone();
        async move {
            let mut choice = state?;
            let at = tokio::time::Instant::from_std(deadline.arrived + deadline.timeout);
            let piece = match tokio::time::timeout_at(at, choice.next()).await {
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
    while let Some(delta) = deltas.next().await {
        let delta = delta?;
        usage.completion_tokens += delta.finish.map_or(0, |f| f.completion_tokens);
        if let Some(choice) = whole.get_mut(delta.index) {
            choice.text += &delta.text;
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
    include_usage: bool,
    opened: Vec<usize>,
    pending: VecDeque<Bytes>,
    ended: bool,
}

impl Sse {
    fn new(envelope: Envelope, usage: Usage, include_usage: bool) -> Self {
        Self { envelope, usage, include_usage, opened: Vec::new(), pending: VecDeque::new(), ended: false }
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
        if !delta.text.is_empty() || !delta.tokens.is_empty() || delta.finish.is_some() {
            let chunk = self.envelope.chunk(&delta);
            self.send(&chunk);
        }
    }

    fn done(&mut self) {
        if self.include_usage {
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
