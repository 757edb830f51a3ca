//! The HTTP front end. It runs on its own threads and never waits for the engine thread without a deadline: a frozen engine
//! gives errors with reasons, not silence (E4), and `/health` that tells the truth (E6) unless it was asked to lie.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::{Request, State},
    http::HeaderMap,
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::Value;

use crate::beat::Health;
use crate::handle::{EngineHandle, Ready};
use crate::metrics::Metrics;
use error::{ApiError, RETRY_GONE_S, RETRY_STARTING_S};
use exchange::Exchanges;
use generate::Deadline;
use intake::Intake;
use outgoing::Outgoing;
use request::Kind;

mod choice;
pub mod error;
mod exchange;
mod fields;
mod generate;
mod intake;
mod outgoing;
mod request;
mod room;
pub mod serve;
mod shape;
mod socket;
mod status;
mod text;
mod tokens;
mod tools;
mod wire;

/// A client may pause for so long while it sends its request, and take nothing of its answer for so long (see [`role::patience`]).
const CLIENT_PATIENCE: Duration = Duration::from_secs(30);
/// A client's own deadline in milliseconds; it can only shorten the server's.
pub const TIMEOUT_HEADER: &str = "x-request-timeout-ms";

/// What the handlers share.
#[derive(Clone)]
pub struct AppState {
    pub handle: EngineHandle,
    pub served_name: Arc<str>,
    /// Answer like the engines of the field: `/health` is 200 whatever happens, and a stalled engine goes on accepting.
    pub lie: bool,
    pub request_timeout: Duration,
    /// How long a client may pause while it sends, and take nothing while it is sent to.
    pub client_patience: Duration,
    /// Unix seconds of this start.
    created: u64,
    answers: Arc<AtomicU64>,
    intake: Arc<Intake>,
    outgoing: Outgoing,
    exchanges: Exchanges,
}

impl AppState {
    pub fn new(handle: EngineHandle, served_name: &str, lie: bool, request_timeout: Duration) -> Self {
        let created = generate::unix_now_s();
        Self {
            handle,
            served_name: served_name.into(),
            lie,
            request_timeout,
            client_patience: CLIENT_PATIENCE,
            created,
            answers: Arc::default(),
            intake: Arc::default(),
            outgoing: Outgoing::default(),
            exchanges: Exchanges::default(),
        }
    }

    fn next_answer_id(&self) -> String {
        // The process's start makes ids of two engines differ, the counter those of one.
        let started = self.handle.shared.started_ns;
        format!("{started:x}-{:x}", self.answers.fetch_add(1, Ordering::Relaxed))
    }

    /// May a request come in? Does not need the engine thread.
    fn admit(&self) -> Result<&Ready, ApiError> {
        let shared = &self.handle.shared;
        if shared.draining.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable("draining", "the engine is shutting down", RETRY_GONE_S));
        }
        let ready = shared.ready.get();
        match (shared.health(), ready) {
            (Health::Stalled(reason), _) if !self.lie => {
                Err(ApiError::unavailable("stalled", format!("the engine makes no progress: {reason}"), RETRY_GONE_S))
            }
            (_, None) => Err(ApiError::unavailable("starting", "the engine is starting", RETRY_STARTING_S)),
            (_, Some(ready)) => Ok(ready),
        }
    }

    fn deadline_error(&self, timeout: Duration) -> ApiError {
        self.handle.shared.metrics.deadlines_exceeded.inc();
        let stalled = match self.handle.shared.health() {
            Health::Stalled(reason) if !self.lie => Some(reason),
            _ => None,
        };
        ApiError::deadline(timeout.as_millis(), stalled)
    }

    fn deadline(&self, headers: &HeaderMap) -> Result<Deadline, ApiError> {
        let wrong = || ApiError::invalid(TIMEOUT_HEADER, format!("{TIMEOUT_HEADER} must be a number of milliseconds"));
        let read = |v: &axum::http::HeaderValue| v.to_str().ok().and_then(|s| s.trim().parse().ok()).ok_or_else(wrong);
        let wanted = headers.get(TIMEOUT_HEADER).map(read).transpose()?.map(Duration::from_millis);
        let timeout = wanted.map_or(self.request_timeout, |w| w.min(self.request_timeout));
        Ok(Deadline { arrived: Instant::now(), timeout })
    }
}

/// All routes of the engine.
pub fn router(app: AppState) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*id}", get(status::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(status::health))
        .route("/metrics", get(status::metrics))
        .fallback(status::not_found)
        .method_not_allowed_fallback(status::method_not_allowed)
        .layer(middleware::from_fn(wire::with_request_id))
        .with_state(app)
}

async fn completions(State(app): State<AppState>, request: Request) -> Response {
    respond(app, Kind::Completion, request).await
}

async fn chat(State(app): State<AppState>, request: Request) -> Response {
    respond(app, Kind::Chat, request).await
}

async fn respond(app: AppState, kind: Kind, request: Request) -> Response {
    let (metrics, exchanges) = (app.handle.shared.metrics.clone(), app.exchanges.clone());
    let answer = async { handle(app, kind, request).await.unwrap_or_else(|error| refuse(&metrics, &error)) };
    exchanges.counted(answer).await
}

/// An error at the door: counted, and told.
fn refuse(metrics: &Metrics, error: &ApiError) -> Response {
    if let Some(reason) = error.refusal {
        metrics.refused.with_label_values(&[reason]).inc();
    }
    error.clone().into_response()
}

async fn handle(app: AppState, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    // a body is not even read for a request that there is no place for
    let admit = || -> Result<Ready, ApiError> {
        let ready = app.admit()?.clone();
        app.handle.check_room()?;
        Ok(ready)
    };
    let (deadline, ready, body) = intake::head(&app, &head.headers, body, admit)?;
    let (for_parsing, served) = (ready.clone(), app.served_name.clone());
    let parse = move |value: &Value| request::parse(kind, value, &for_parsing, &served);
    let (mut job, room) = intake::read(&app, deadline, body, parse).await?;
    if job.form.is_some() {
        let for_compiling = ready.clone();
        job = intake::compile(&app, deadline, room, move || job.compiled(&for_compiling)).await?;
    } else {
        drop(room);
    }
    let user = job.user.clone();
    let answered = generate::answer(app, &ready, job, deadline).await;
    if let Err(error) = &answered {
        tracing::info!(status = error.status.as_u16(), user, message = error.message, "a request was not answered");
    }
    answered
}
