//! What the engine says about itself: `/health`, `/metrics`, `/v1/models`. None of it asks the engine thread for anything.

use std::sync::atomic::Ordering;

use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
    http::{Method, StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::beat::Health;
use crate::server::{AppState, error::ApiError};

/// 200 while the engine serves; else 503 with the reason (E6). With `--lie`: 200.
pub async fn health(State(app): State<AppState>) -> Response {
    if app.lie {
        return Json(json!({"status": "ok"})).into_response();
    }
    let shared = &app.handle.shared;
    let (status, state, reason) = match shared.health() {
        Health::Stalled(reason) => (StatusCode::SERVICE_UNAVAILABLE, "stalled", Some(reason)),
        _ if shared.draining.load(Ordering::Relaxed) => (StatusCode::SERVICE_UNAVAILABLE, "draining", None),
        Health::Serving if shared.ready.get().is_some() => (StatusCode::OK, "ok", None),
        Health::Serving | Health::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting", None),
    };
    let body = json!({"status": state, "reason": reason, "beat": beat(&app)});
    (status, Json(body)).into_response()
}

/// The last beat, as the page has it; null when it cannot be read.
fn beat(app: &AppState) -> Value {
    let Some(beat) = app.handle.shared.board.load().map(|v| v.beat) else { return Value::Null };
    let age_ms = |from_ns: u64| heartbeat::monotonic_ns().saturating_sub(from_ns) / 1_000_000;
    json!({
        "phase": format!("{:?}", beat.phase).to_lowercase(),
        "phase_age_ms": age_ms(beat.phase_entered_ns),
        "lease_ms": beat.lease_ms,
        "step_age_ms": (beat.step_started_ns > 0).then(|| age_ms(beat.step_started_ns)),
        "published_age_ms": age_ms(beat.published_ns),
        "steps_completed": beat.steps_completed,
        "tokens_delivered": beat.tokens_delivered,
        "requests_finished": beat.requests_finished,
        "running": beat.running,
        "waiting": beat.waiting,
        "work_done": beat.work_done,
        "work_total": beat.work_total,
    })
}

/// The exposition text.
pub async fn metrics(State(app): State<AppState>) -> Response {
    let shared = &app.handle.shared;
    match shared.metrics.text(&shared.board, shared.in_flight()) {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(error) => ApiError::internal(format!("the metrics cannot be written: {error}")).into_response(),
    }
}

/// The one model that is served here, as a list.
pub async fn models(State(app): State<AppState>) -> Response {
    Json(json!({"object": "list", "data": [describe(&app)]})).into_response()
}

/// One model by its name, which may have slashes.
pub async fn model(State(app): State<AppState>, id: Result<Path<String>, PathRejection>) -> Response {
    // what is no text is no model's name
    let Ok(Path(id)) = id else {
        return ApiError::malformed("the model's name in the path is not UTF-8").into_response();
    };
    if id == *app.served_name {
        return Json(describe(&app)).into_response();
    }
    ApiError::unknown_model(&id, &app.served_name).into_response()
}

fn describe(app: &AppState) -> Value {
    let seq_len_max = app.handle.shared.ready.get().map(|r| r.limits.seq_len_max);
    json!({
        "id": &*app.served_name, "object": "model", "created": app.created, "owned_by": "truebeat",
        "max_model_len": seq_len_max
    })
}

/// What is not here, in the same words as any other error.
pub async fn not_found(uri: Uri) -> Response {
    let message = format!("there is no {}; see /v1/completions, /v1/chat/completions, /v1/models", uri.path());
    ApiError { status: StatusCode::NOT_FOUND, ..ApiError::malformed(message) }.into_response()
}

/// A path that is here, but not for this method.
pub async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    ApiError::method(method.as_str(), uri.path()).into_response()
}
