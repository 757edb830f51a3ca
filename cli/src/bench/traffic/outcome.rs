//! What becomes of one request: exactly one of these, and everything that is none of them is an answer that lies.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::Value;

use super::ask::Ask;
use crate::http::HttpClient;
use crate::sse::Events;

/// Whoever hears nothing for so long was forgotten.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a client that leaves at once stays.
const GLANCE: Duration = Duration::from_millis(5);

/// The one end of a request, as its client saw it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Completed,
    /// The client left.
    Left,
    /// Not now: 429 or 503 with `Retry-After`, or their event in a stream.
    Refused,
    /// Its deadline came, or could not be met.
    TimedOut,
    /// It was wrong, and was told so.
    ToldWrong,
    /// It was in flight at two stalls (I7).
    Suspected,
    /// The engine died or failed, and the client was told so.
    Broken,
    /// It is poisoned, and failed (EP5).
    Failed,
    /// None of these: an answer without an end, with two, or with one that is not true.
    False(String),
}

/// An outcome, and the text that came before it.
#[derive(Debug)]
pub struct Answer {
    pub outcome: Outcome,
    pub text: String,
    /// Tokens that were heard, at least.
    pub tokens: u64,
}

fn only(outcome: Outcome) -> Answer {
    Answer { outcome, text: String::new(), tokens: 0 }
}

/// Asks, and reads to the end or to where the client leaves.
pub async fn send(client: &HttpClient, gate: &str, ask: &Ask) -> Answer {
    let answer = heard(client, gate, ask).await;
    Answer { outcome: of_poison(answer.outcome, ask.poisoned), ..answer }
}

/// Of a poisoned request nothing comes but its failure, or what would have come before it ran; and nobody else may fail (EP5).
fn of_poison(outcome: Outcome, poisoned: bool) -> Outcome {
    match outcome {
        Outcome::Completed if poisoned => Outcome::False("it is poisoned, and was answered".to_owned()),
        Outcome::Failed if !poisoned => Outcome::False("it failed, and was not poisoned".to_owned()),
        other => other,
    }
}

/// Did this one request fail, and the engine did not?
fn is_own_failure(error: &Value) -> bool {
    error["message"].as_str().is_some_and(|message| message.starts_with("the request failed"))
}

async fn heard(client: &HttpClient, gate: &str, ask: &Ask) -> Answer {
    let request = http::Request::post(format!("{gate}/v1/completions")).header("content-type", "application/json");
    let timeout = ask.timeout_ms.map(|ms| ("x-request-timeout-ms", ms.to_string()));
    let request = timeout.into_iter().fold(request, |request, (name, value)| request.header(name, value));
    let Ok(request) = request.body(Full::new(Bytes::from(ask.body.clone()))) else {
        return only(Outcome::False("it could not be written".to_owned()));
    };
    let leaves_at_once = ask.leaves_after == Some(0);
    let patience = if leaves_at_once { GLANCE } else { PATIENCE };
    let response = match tokio::time::timeout(patience, client.request(request)).await {
        Err(_) if leaves_at_once => return only(Outcome::Left),
        Err(_) => return only(Outcome::False(format!("no answer within {PATIENCE:?}"))),
        Ok(Err(_)) => return only(Outcome::Broken),
        Ok(Ok(response)) => response,
    };
    if leaves_at_once {
        return only(Outcome::Left);
    }
    let (head, body) = response.into_parts();
    if ask.stream && head.status.is_success() {
        return read_stream(body, ask.leaves_after).await;
    }
    let Ok(Ok(body)) = tokio::time::timeout(PATIENCE, body.collect()).await else { return only(Outcome::Broken) };
    let body = serde_json::from_slice(&body.to_bytes()).unwrap_or(Value::Null);
    if head.status.is_success() {
        return whole(&body);
    }
    let retry_after = head.headers.contains_key("retry-after");
    only(refusal(head.status.as_u16(), &body, retry_after, ask.wrong))
}

fn whole(body: &Value) -> Answer {
    let choice = &body["choices"][0];
    let text = choice["text"].as_str().unwrap_or_default().to_owned();
    let tokens = body["usage"]["completion_tokens"].as_u64().unwrap_or(0);
    let outcome = match choice["finish_reason"].as_str() {
        Some("stop" | "length") => Outcome::Completed,
        _ => Outcome::False(format!("an answer without an end: {body}")),
    };
    Answer { outcome, text, tokens }
}

/// An answer that is an error: does its status say what it must?
fn refusal(status: u16, body: &Value, retry_after: bool, wrong: bool) -> Outcome {
    let error = &body["error"];
    let code = error["code"].as_str().unwrap_or_default();
    match (status, code) {
        (503 | 504, "deadline_exceeded" | "deadline_unreachable") => Outcome::TimedOut,
        (429 | 503, _) if retry_after => Outcome::Refused,
        (422, "poison_request") => Outcome::Suspected,
        (400 | 404 | 413 | 422, _) if wrong && error.is_object() => Outcome::ToldWrong,
        (500, _) if is_own_failure(error) => Outcome::Failed,
        (500 | 502, _) if error.is_object() => Outcome::Broken,
        _ => Outcome::False(format!("status {status}, Retry-After {retry_after}: {body}")),
    }
}

/// What a stream has said of its end.
#[derive(Debug, Default)]
struct Heard {
    text: String,
    finishes: usize,
    done: usize,
    error: Option<Value>,
    after_the_end: bool,
    /// Pieces of text; each has a token of its own, but for what was held back to the end.
    pieces: u64,
}

impl Heard {
    fn event(&mut self, data: &str) {
        self.after_the_end |= self.done > 0 || self.error.is_some();
        if data == "[DONE]" {
            self.done += 1;
            return;
        }
        let value: Value = serde_json::from_str(data).unwrap_or(Value::Null);
        if value["error"].is_object() {
            self.error = Some(value);
            return;
        }
        let choice = &value["choices"][0];
        let piece = choice["text"].as_str().unwrap_or_default();
        self.pieces += u64::from(!piece.is_empty());
        self.text += piece;
        self.finishes += usize::from(choice["finish_reason"].is_string());
    }

    /// The end of the stream has come; `broken`: in the middle of its bytes.
    fn end(self, broken: bool) -> Answer {
        let outcome = match &self.error {
            _ if self.after_the_end => Outcome::False("something came after the end".to_owned()),
            Some(error) => match error["error"]["code"].as_str() {
                Some("deadline_exceeded" | "deadline_unreachable") => Outcome::TimedOut,
                Some("shutdown" | "stalled" | "replica_unavailable") => Outcome::Refused,
                _ if is_own_failure(&error["error"]) => Outcome::Failed,
                _ => Outcome::Broken,
            },
            None if (self.finishes, self.done) == (1, 1) => Outcome::Completed,
            None if broken => Outcome::Broken,
            None => Outcome::False(format!("{} finishes, {} [DONE]", self.finishes, self.done)),
        };
        Answer { outcome, text: self.text, tokens: self.pieces.saturating_sub(1) }
    }
}

async fn read_stream(mut body: Incoming, leaves_after: Option<u64>) -> Answer {
    let (mut heard, mut events, mut frames) = (Heard::default(), Events::default(), 0);
    loop {
        if leaves_after.is_some_and(|count| frames >= count) {
            return Answer { outcome: Outcome::Left, text: heard.text, tokens: heard.pieces.saturating_sub(1) };
        }
        let frame = match tokio::time::timeout(PATIENCE, body.frame()).await {
            Err(_) => return only(Outcome::False(format!("a stream that says nothing for {PATIENCE:?}"))),
            Ok(None) => return heard.end(false),
            Ok(Some(Err(_))) => return heard.end(true),
            Ok(Some(Ok(frame))) => frame,
        };
        frames += 1;
        events.push(frame.data_ref().map(AsRef::as_ref).unwrap_or_default());
        while let Some(data) = events.next_data() {
            heard.event(&data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(events: &[&str], broken: bool) -> Outcome {
        let mut heard = Heard::default();
        events.iter().for_each(|event| heard.event(event));
        heard.end(broken).outcome
    }

    #[test]
    fn a_stream_has_one_end() {
        let (piece, last) = (
            r#"{"choices": [{"text": "a", "finish_reason": null}]}"#,
            r#"{"choices": [{"text": "", "finish_reason": "length"}]}"#,
        );
        let error = r#"{"error": {"code": "shutdown"}}"#;
        assert_eq!(stream(&[piece, last, "[DONE]"], false), Outcome::Completed);
        assert_eq!(stream(&[piece, error], false), Outcome::Refused);
        assert_eq!(stream(&[piece], true), Outcome::Broken);
        let lies: [&[&str]; 6] =
            [&[], &[piece], &[piece, last], &[last, last, "[DONE]"], &[last, "[DONE]", "[DONE]"], &[error, piece]];
        for events in lies {
            assert!(matches!(stream(events, false), Outcome::False(_)), "{events:?}");
        }
    }

    #[test]
    fn an_error_says_whose_it_is() {
        let error = |code: &str| serde_json::json!({ "error": { "code": code } });
        assert_eq!(refusal(504, &error("deadline_exceeded"), true, false), Outcome::TimedOut);
        assert_eq!(refusal(503, &error("starting"), true, false), Outcome::Refused);
        assert!(matches!(refusal(503, &error("starting"), false, false), Outcome::False(_)), "when to try again?");
        assert_eq!(refusal(400, &error(""), false, true), Outcome::ToldWrong);
        assert!(matches!(refusal(400, &error(""), false, false), Outcome::False(_)), "nothing was wrong with it");
        assert_eq!(refusal(502, &error("engine_died"), false, false), Outcome::Broken);
    }

    #[test]
    fn a_failure_is_that_of_a_poisoned_request_alone() {
        let failed = serde_json::json!({ "error": { "message": "the request failed: no number" } });
        assert_eq!(refusal(500, &failed, false, false), Outcome::Failed);
        assert_eq!(stream(&[&failed.to_string()], false), Outcome::Failed);
        assert_eq!(of_poison(Outcome::Failed, true), Outcome::Failed);
        assert_eq!(of_poison(Outcome::Broken, true), Outcome::Broken, "the engine died, whoever asked");
        for (outcome, poisoned) in [(Outcome::Failed, false), (Outcome::Completed, true)] {
            assert!(matches!(of_poison(outcome, poisoned), Outcome::False(_)), "{poisoned}");
        }
    }
}
