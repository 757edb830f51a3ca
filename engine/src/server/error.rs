//! Errors as OpenAI's clients expect them: a status, a body `{"error": {message, type, param, code}}`, and Retry-After where
//! another try later makes sense.

use axum::{
    Json,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::codec::CodecError;
use crate::grammar::GrammarError;
use crate::handle::{End, SubmitError};
use crate::scheduler::Refusal;
use crate::server::fields::{beginning, brief};

/// When another try makes sense: an engine that starts may be ready by then.
pub const RETRY_STARTING_S: u64 = 2;
/// One that stalls or ends may be replaced by then.
pub const RETRY_GONE_S: u64 = 5;
/// Others may have ended by then.
const RETRY_BUSY_S: u64 = 1;
/// The code of an end by the engine's own look at the deadline.
const UNREACHABLE: &str = "deadline_unreachable";
/// Templates refuse a chat in words of their own, which may have the chat's in them.
const TEMPLATE_CHARS_MAX: usize = 500;

/// An error on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    pub retry_after_s: Option<u64>,
    /// The label of `truebeat:requests_refused_total`, for errors at the door.
    pub refusal: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code, retry_after_s: None, refusal: None }
    }

    /// A field of the request is wrong.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, None, message);
        (error.param, error.refusal) = (Some(param.into()), Some("invalid"));
        error
    }

    /// The request as a whole is wrong.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self { refusal: Some("invalid"), ..Self::new(StatusCode::BAD_REQUEST, None, message) }
    }

    /// No model of this name is served here.
    pub fn unknown_model(name: &str, served: &str) -> Self {
        let name = brief(&format_args!("{name:?}"));
        let message = format!("the model {name} does not exist; this server has {served:?}");
        let error = Self::new(StatusCode::NOT_FOUND, Some("model_not_found"), message);
        Self { param: Some("model".into()), refusal: Some("invalid"), ..error }
    }

    /// There is nothing under this path.
    pub fn unknown_path(path: &str) -> Self {
        let path = brief(path);
        let message = format!("there is no {path}; see /v1/completions, /v1/chat/completions, /v1/models");
        Self { refusal: Some("invalid"), ..Self::new(StatusCode::NOT_FOUND, None, message) }
    }

    /// This path has no such method.
    pub fn method(method: &str, path: &str) -> Self {
        let message = format!("{} does not take {}", brief(path), brief(method));
        Self::new(StatusCode::METHOD_NOT_ALLOWED, None, message)
    }

    /// The body is no JSON by its own word.
    pub fn media_type(got: &str) -> Self {
        let got = brief(&format_args!("{got:?}"));
        let message = format!("the body must have the content type application/json, not {got}");
        Self { refusal: Some("invalid"), ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, message) }
    }

    pub fn body_too_large(bytes_max: usize) -> Self {
        let message = format!("the request's body is larger than {bytes_max} bytes");
        Self { refusal: Some("too_large"), ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, None, message) }
    }

    /// The body is short enough, but has so many values that it becomes `bytes` once it is parsed.
    pub fn body_too_rich(bytes: usize, bytes_max: usize) -> Self {
        let message = format!(
            "the request's body has so many lists, objects and values that it would take {bytes} bytes, at most {bytes_max} are given; \
             send its prompts in several requests"
        );
        Self { refusal: Some("too_large"), ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, None, message) }
    }

    /// The body did not come in time: `bytes` of it were here after so long.
    pub fn body_late(waited_ms: u128, bytes: usize) -> Self {
        let message = format!("the request's body did not come in time: {bytes} bytes in {waited_ms} ms");
        Self { refusal: Some("slow"), ..Self::new(StatusCode::REQUEST_TIMEOUT, Some("body_timeout"), message) }
    }

    /// The bodies of others fill what there is for bodies.
    pub fn bodies_busy() -> Self {
        Self::busy("bodies_busy", "the requests that are being read fill the room for them")
    }

    /// The answers of others, which their clients take slowly, fill what there is for answers.
    pub fn answers_busy() -> Self {
        Self::busy("answers_busy", "the answers that are being sent fill the room for them")
    }

    /// Others have taken all that there is of something at this moment; `code` says of what.
    fn busy(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, Some(code), message);
        Self { retry_after_s: Some(RETRY_BUSY_S), refusal: Some("queue_full"), ..error }
    }

    /// Not now, but perhaps later (E4, E7). `reason` is the code and the metric's label.
    pub fn unavailable(reason: &'static str, message: impl Into<String>, retry_after_s: u64) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, Some(reason), message);
        Self { retry_after_s: Some(retry_after_s), refusal: Some(reason), ..error }
    }

    /// The request's deadline passed while the engine was well (504), or because it is not (503 with the reason).
    pub fn deadline(timeout_ms: u128, stalled: Option<String>) -> Self {
        let (status, why) = match stalled {
            Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("the engine makes no progress: {reason}")),
            None => (StatusCode::GATEWAY_TIMEOUT, "the engine is busy".into()),
        };
        let message = format!("the request was not done within {timeout_ms} ms: {why}");
        Self { retry_after_s: Some(RETRY_BUSY_S), ..Self::new(status, Some("deadline_exceeded"), message) }
    }

    /// The engine ended the request by its deadline: it could not be met, or had passed.
    pub fn is_by_deadline(&self) -> bool {
        self.code == Some(UNREACHABLE)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
    }

    /// How an accepted request ended, when that was no finish.
    pub fn of_end(end: &End) -> Self {
        let error = match end {
            End::Failed(message) => Self::internal(format!("the request failed: {message}")),
            End::Barred(why) => Self::malformed(format!("the output cannot go on as the request wants it: {why}")),
            End::Late(why) => Self::unavailable(UNREACHABLE, format!("the engine is too busy: {why}"), RETRY_BUSY_S),
            End::Expired => Self::unavailable(UNREACHABLE, "the deadline passed while the request ran", RETRY_BUSY_S),
            End::Cut => Self::unavailable("cut", "the client reads too slowly; the request was cut", RETRY_BUSY_S),
            End::Shutdown => {
                Self::unavailable("shutdown", "the engine stopped before the request was done", RETRY_GONE_S)
            }
            End::Stop | End::Length | End::Cancelled => Self::internal("the request was cancelled"),
        };
        // It was accepted: the engine counts its end, the door does not count it as refused.
        Self { refusal: None, ..error }
    }

    /// `{"error": {...}}`, also the data of an SSE error event.
    pub fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            400 | 405 | 413 | 415 => "invalid_request_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            408 | 504 => "timeout_error",
            _ => "internal_server_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::NotReady => Self::unavailable("starting", message, RETRY_STARTING_S),
            SubmitError::Stopped => Self::unavailable("stalled", message, RETRY_GONE_S),
            SubmitError::Busy(_) => Self::busy("queue_full", message),
            SubmitError::Refused(Refusal::TooLong { .. } | Refusal::CacheTooSmall { .. }) => {
                Self { code: Some("context_length_exceeded"), ..Self::invalid("prompt", message) }
            }
            SubmitError::TooMany { .. } => Self::invalid("n", message),
            SubmitError::Refused(_) => Self::invalid("prompt", message),
        }
    }
}

impl ApiError {
    /// The grammar that `param` asks for is not accepted.
    pub fn grammar(param: &str, error: &GrammarError) -> Self {
        match error {
            GrammarError::Busy(_) => Self::busy("grammars_busy", error.to_string()),
            GrammarError::Died => Self::internal(format!("{param}: {error}")),
            _ => Self::invalid(param, format!("{param} cannot be used: {error}")),
        }
    }
}

impl From<CodecError> for ApiError {
    fn from(error: CodecError) -> Self {
        match error {
            CodecError::Encode(_) => Self::invalid("prompt", error.to_string()),
            CodecError::NoTemplate | CodecError::Template(_) => {
                Self::invalid("messages", beginning(&error, TEMPLATE_CHARS_MAX))
            }
            CodecError::Renderer(_) => Self::unavailable("no_renderer", error.to_string(), RETRY_BUSY_S),
            CodecError::Decode(_) => Self::internal(error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}
