//! What every request and answer have beside their bodies: an id, a content type.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header::CONTENT_TYPE};
use axum::middleware::Next;
use axum::response::Response;

use crate::server::error::ApiError;

/// The request's id: the client's own if it sends a sensible one. Every answer carries it, errors too.
pub const REQUEST_ID: &str = "x-request-id";
const REQUEST_ID_CHARS_MAX: usize = 128;

/// Gives every answer its request's id.
pub async fn with_request_id(request: Request, next: Next) -> Response {
    let id = request.headers().get(REQUEST_ID).filter(|id| is_sensible(id)).cloned().or_else(new_id);
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// A request's body is to be JSON.
///
/// # Errors
/// It says that it is something else.
pub fn check_json(headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(kind) = headers.get(CONTENT_TYPE) {
        let essence = kind.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_lowercase();
        if essence != "application/json" && !essence.ends_with("+json") {
            return Err(ApiError::media_type(&essence));
        }
    }
    Ok(())
}

fn is_sensible(id: &HeaderValue) -> bool {
    let fine = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:/".contains(b);
    (1..=REQUEST_ID_CHARS_MAX).contains(&id.len()) && id.as_bytes().iter().all(fine)
}

fn new_id() -> Option<HeaderValue> {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    // The clock makes ids of two starts differ, the counter those of one.
    let id = format!("req-{:x}-{:x}", heartbeat::monotonic_ns(), COUNT.fetch_add(1, Ordering::Relaxed));
    HeaderValue::try_from(id).ok()
}
