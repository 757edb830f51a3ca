//! What the gate itself says to clients: OpenAI-shaped errors, with Retry-After where trying again makes sense. Pure.

use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::body::AnswerBody;
use super::ledger::Refusal;
use super::print::Print;
use super::upload::UploadError;

/// Seconds after which an engine that is not there is worth another try.
const RETRY_ABSENT_S: u32 = 1;
/// The same for a gate that has too many requests in hand: an answer takes seconds, as a rule.
const RETRY_CROWDED_S: u32 = 2;

/// The error object that OpenAI clients understand, on one line.
fn error_json(message: &str, code: &str) -> Value {
    typed_error_json(message, "server_error", code)
}

/// The same as an event of a stream that broke off anywhere in another. Clients that tell events apart by name (Anthropic's) would not see one
/// without, and take the half of an answer for all of it.
pub fn error_event(message: &str, code: &str, named: bool) -> String {
    let mut error = error_json(message, code);
    let mut name = "";
    if named {
        error["type"] = "error".into();
        name = "event: error\n";
    }
    format!("\n\n{name}data: {error}\n\n")
}

fn typed_error_json(message: &str, kind: &str, code: &str) -> Value {
    json!({ "error": { "message": message, "type": kind, "param": null, "code": code } })
}

/// The gate is shut.
pub fn refused(refusal: &Refusal) -> Response<AnswerBody> {
    answer(StatusCode::SERVICE_UNAVAILABLE, &refusal.reason, "replica_unavailable", Some(refusal.retry_after_s))
}

/// Nobody listens where the engine should.
pub fn absent() -> Response<AnswerBody> {
    answer(StatusCode::SERVICE_UNAVAILABLE, "the engine is not running yet", "engine_absent", Some(RETRY_ABSENT_S))
}

/// There is no descriptor left to reach the engine with. That is the gate's own want, or its machine's, and says nothing about the engine.
pub fn exhausted() -> Response<AnswerBody> {
    let message = "the gate has no file descriptor left for a connection to the engine; raise its limit (ulimit -n)";
    answer(StatusCode::SERVICE_UNAVAILABLE, message, "gate_exhausted", Some(RETRY_ABSENT_S))
}

/// There are as many requests at this gate as it may have. It says nothing about the engine, and another replica may have room.
pub fn crowded(in_flight_max: usize) -> Response<AnswerBody> {
    let message = format!("{in_flight_max} requests are in flight to this replica, and it takes no more at once");
    answer(StatusCode::SERVICE_UNAVAILABLE, &message, "gate_crowded", Some(RETRY_CROWDED_S))
}

/// The engine broke the connection before its answer was whole. Where the gate is `shut` that was most likely our own doing: the engine made no
/// progress and was ended, and the same client is as welcome later as one that is refused now.
pub fn broken(what: &str, shut: Option<&Refusal>) -> Response<AnswerBody> {
    let why = shut.map(|refusal| format!("; {}", refusal.reason)).unwrap_or_default();
    answer(
        if shut.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::BAD_GATEWAY },
        &format!("the engine died before it answered ({what}{why}); send the request again"),
        "engine_died",
        shut.map(|refusal| refusal.retry_after_s),
    )
}

/// Such requests were in flight at two stalls (I7). No `Retry-After`: trying again is what must not happen.
pub fn poison(print: Option<Print>) -> Response<AnswerBody> {
    let print = print.map(|print| print.to_string()).unwrap_or_default();
    let message = format!(
        "requests like this one were being answered when the engine stalled, twice, and are refused for a time; \
         the operator of this service knows it by the fingerprint {print}"
    );
    let text = typed_error_json(&message, "invalid_request_error", "poison_request");
    with_json(StatusCode::UNPROCESSABLE_ENTITY, &text, None)
}

/// The client's own mistake.
pub fn bad_request(status: StatusCode, message: &str) -> Response<AnswerBody> {
    // by this type the official clients' users tell their own mistake from the server's
    with_json(status, &typed_error_json(message, "invalid_request_error", "bad_request"), None)
}

/// The client's body stalled, or broke off. The engine had no part in it.
pub fn cut(upload: &UploadError) -> Response<AnswerBody> {
    let status = match upload {
        UploadError::Stalled => StatusCode::REQUEST_TIMEOUT,
        UploadError::Broken(_) => StatusCode::BAD_REQUEST,
    };
    bad_request(status, &upload.to_string())
}

fn answer(status: StatusCode, message: &str, code: &str, retry_after_s: Option<u32>) -> Response<AnswerBody> {
    with_json(status, &error_json(message, code), retry_after_s)
}

fn with_json(status: StatusCode, text: &Value, retry_after_s: Option<u32>) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::whole(text.to_string()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if status.is_server_error() {
        // on the same connection the next try would come here again; a new one may lead to another replica
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(seconds) = retry_after_s {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
