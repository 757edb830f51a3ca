//! What the engine says about itself: `/health`, `/metrics`, `/v1/models`. None of it asks the engine thread for anything.

use std::sync::atomic::Ordering;

use axum::{
    Json,
    extract::{Path, Request, State, rejection::PathRejection},
    http::{
        HeaderValue, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::beat::Health;
use crate::handle::Shared;
use crate::server::error::{ApiError, RETRY_GONE_S, RETRY_STARTING_S};
use crate::server::{AppState, intake};

/// Why the engine does not serve.
struct Unwell {
    state: &'static str,
    reason: Option<String>,
    retry_after_s: u64,
}

/// Does the engine serve? What is asked for may be a lie, this is not.
fn condition(shared: &Shared) -> Result<(), Unwell> {
    let (state, reason, retry_after_s) = match shared.health() {
        Health::Stalled(reason) => ("stalled", Some(reason), RETRY_GONE_S),
        _ if shared.draining.load(Ordering::Relaxed) => ("draining", None, RETRY_GONE_S),
        Health::Serving if shared.ready.get().is_some() => return Ok(()),
        Health::Serving | Health::Starting => ("starting", None, RETRY_STARTING_S),
    };
    Err(Unwell { state, reason, retry_after_s })
}

/// 200 while the engine serves; else 503 with the reason (E6). With `--lie`: 200.
pub async fn health(State(app): State<AppState>) -> Response {
    if app.lie {
        return Json(json!({"status": "ok"})).into_response();
    }
    match condition(&app.handle.shared) {
        Ok(()) => Json(json!({"status": "ok", "reason": null, "beat": beat(&app)})).into_response(),
        Err(Unwell { state, reason, retry_after_s }) => {
            let later = [(RETRY_AFTER, HeaderValue::from(retry_after_s))];
            let body = json!({"status": state, "reason": reason, "beat": beat(&app)});
            (StatusCode::SERVICE_UNAVAILABLE, later, Json(body)).into_response()
        }
    }
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
    shared.metrics.health(condition(shared).is_ok());
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
pub async fn not_found(request: Request) -> Response {
    let error = ApiError::unknown_path(request.uri().path());
    intake::hear_out(request.into_body().into_data_stream());
    error.into_response()
}

/// A path that is here, but not for this method.
pub async fn method_not_allowed(request: Request) -> Response {
    let error = ApiError::method(request.method().as_str(), request.uri().path());
    intake::hear_out(request.into_body().into_data_stream());
    error.into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    use heartbeat::monotonic_ns;

    use super::*;
    use crate::beat::{Heart, StepShape, Tally};
    use crate::handle::EngineHandle;
    use crate::metrics::Metrics;

    fn app() -> AppState {
        let shared = Arc::new(Shared::new(Arc::new(Metrics::new("m").unwrap()), 1));
        let (inbox, _outbox) = std::sync::mpsc::sync_channel(1);
        AppState::new(EngineHandle::new(shared, inbox, 1), "m", false, Duration::from_secs(1))
    }

    /// A step began ten seconds ago, and a row of it is done now: what is not ready yet starts, for who asks and for who wants in.
    #[tokio::test]
    async fn a_step_that_is_sampled_for_long_is_no_stall_to_health_and_admission() {
        for (rows, word) in [(0, "stalled"), (1, "starting")] {
            let (app, began_ns) = (app(), monotonic_ns().saturating_sub(10_000_000_000));
            let clock_ns = Arc::new(AtomicU64::new(began_ns));
            let clock = clock_ns.clone();
            let by = Box::new(move || clock.load(Ordering::Relaxed));
            let mut heart = Heart::by(by, None, app.handle.shared.board.clone());
            heart.step_begins(&StepShape::default(), &Tally { running: 1, ..Tally::default() });
            clock_ns.store(monotonic_ns(), Ordering::Relaxed);
            (0..rows).for_each(|_| heart.row_is_done());
            assert_eq!(condition(&app.handle.shared).unwrap_err().state, word);
            assert_eq!(app.admit().err().unwrap().refusal, Some(word));
        }
    }
}
