//! Proof of progress before the first client: a replica whose engine has delivered nothing yet is asked for a few tokens, through the
//! gate like any client, and is not called ready before they were delivered. An open port proves nothing (V2), and neither does a first
//! token: it is the prefill's, and engines hang in decode. A rollout must not replace replicas that deliver by such that never will.
//!
//! Through the gate, so that the request is work owed by the most trusted count: an engine that hangs on it is caught as on any other.
//! May open connections to the gate; waits for nothing on the way of a tick.

use std::time::Duration;

use http::{StatusCode, Uri};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use vitals::observation::Observation;
use vitals::verdict::Verdict;

use crate::sources::get::{Answer, Get, GetError, with_path};

/// The first answer of an engine may wait for compilers; the detector judges the wait meanwhile, this is only the end of it.
const ANSWER_MAX: Duration = Duration::from_secs(300);
const MODELS_MAX: Duration = Duration::from_secs(5);
/// Between two tries.
const RETRY_MS: u64 = 1_000;
const BODY_BYTES_MAX: usize = 1 << 20;
/// Enough for some steps of decode after the prefill.
const TOKENS: u64 = 8;
/// What completions and chat engines answer to, in the order in which they are tried.
const PATHS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

/// What one try came to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    Tokens,
    /// The engine answers and has nothing that could be asked: no completions, or a key is needed.
    NoWayToAsk(StatusCode),
    NotYet(String),
}

/// Whether this engine process has shown progress.
#[derive(Debug)]
pub struct Proof {
    through: Option<Uri>,
    given: bool,
    asking: Option<JoinHandle<Found>>,
    again_ms: u64,
}

impl Proof {
    /// `through` is the gate's address; without it no proof is asked for. `given`: this process showed it to an earlier detector.
    pub fn new(through: Option<Uri>, given: bool) -> Self {
        Self { given: given || through.is_none(), through, asking: None, again_ms: 0 }
    }

    /// The engine is another process: what its forerunner showed says nothing of it.
    pub fn engine_changed(&mut self) {
        self.given = self.through.is_none();
        self.asking.take().into_iter().for_each(|asking| asking.abort());
    }

    /// Was it given, at the last look?
    pub fn is_given(&self) -> bool {
        self.given
    }

    /// Was it given? Asks where nobody else has, once the engine takes requests; the gate knows the question by `own`, and
    /// one that was not heard lately is not asked: the question would be taken for a client's.
    pub async fn look(&mut self, now_ms: u64, verdict: &Verdict, obs: &Observation, own: Option<&str>) -> bool {
        if self.given {
            return true;
        }
        let pages = obs.pages.value.iter().flatten();
        if pages.map(|page| page.tokens_delivered).max().unwrap_or(0) >= TOKENS {
            self.given = true;
        } else if self.asking.as_ref().is_some_and(JoinHandle::is_finished) {
            self.take(now_ms).await;
        } else if let Some(own) = own
            && self.asking.is_none()
            && now_ms >= self.again_ms
            && takes_requests(verdict)
        {
            let own = own.to_owned();
            self.asking = self.through.clone().map(|gate| tokio::spawn(ask(gate, own)));
        }
        self.given
    }

    async fn take(&mut self, now_ms: u64) {
        let Some(asking) = self.asking.take() else { return };
        match asking.await {
            Ok(Found::Tokens) => {
                tracing::info!("the engine has delivered its first tokens");
                self.given = true;
            }
            Ok(Found::NoWayToAsk(status)) => {
                tracing::warn!(%status, "the engine takes no request for tokens: its first client is its proof");
                self.given = true;
            }
            Ok(Found::NotYet(why)) => {
                tracing::info!(why, "no first tokens yet");
                self.again_ms = now_ms + RETRY_MS;
            }
            Err(_) => self.again_ms = now_ms + RETRY_MS,
        }
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        self.asking.take().into_iter().for_each(|asking| asking.abort());
    }
}

fn takes_requests(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Idle | Verdict::Progressing | Verdict::Slow)
}

async fn ask(gate: Uri, own: String) -> Found {
    let mut refusal = StatusCode::NOT_FOUND;
    let get = |path: &str, deadline| Get {
        uri: with_path(&gate, path),
        accept: "application/json",
        deadline,
        body_bytes_max: BODY_BYTES_MAX,
    };
    let model = match get("/v1/models", MODELS_MAX).fetch().await {
        Ok(answer) if is_later(answer.status) => return Found::NotYet(format!("/v1/models says {}", answer.status)),
        Ok(answer) => model(&answer.body),
        Err(error) => return Found::NotYet(error.to_string()),
    };
    for path in PATHS {
        match judge(get(path, ANSWER_MAX).post(&question(path, &model), &own).await) {
            Found::NoWayToAsk(status) => refusal = status,
            found => return found,
        }
    }
    Found::NoWayToAsk(refusal)
}

/// The engine says that it cannot answer now, which says nothing of what it answers at all.
fn is_later(status: StatusCode) -> bool {
    status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED || status == StatusCode::TOO_MANY_REQUESTS
}

/// The first model that the engine names.
fn model(body: &[u8]) -> String {
    let list: Value = serde_json::from_slice(body).unwrap_or_default();
    list["data"][0]["id"].as_str().unwrap_or("default").to_owned()
}

fn question(path: &str, model: &str) -> Value {
    let mut body = json!({"model": model, "max_tokens": TOKENS, "temperature": 0});
    if path.contains("chat") {
        body["messages"] = json!([{"role": "user", "content": "1"}]);
    } else {
        body["prompt"] = json!("1");
    }
    body
}

/// The client's own mistakes (a path that is not there, a key that is missing) are the engine's word that it cannot be asked so.
fn judge(answer: Result<Answer, GetError>) -> Found {
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => return Found::NotYet(error.to_string()),
    };
    let said: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let choices = said["choices"].as_array().is_some_and(|choices| !choices.is_empty());
    match answer.status {
        StatusCode::TOO_MANY_REQUESTS => Found::NotYet("the engine is full".to_owned()),
        status if status.is_client_error() || status == StatusCode::NOT_IMPLEMENTED => Found::NoWayToAsk(status),
        status if status.is_success() && choices => Found::Tokens,
        status => Found::NotYet(format!("status {status}, no choice in the answer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Result<Answer, GetError> {
        Ok(Answer { status: StatusCode::from_u16(status).unwrap(), body: body.to_owned().into() })
    }

    #[test]
    fn only_a_choice_is_proof() {
        assert_eq!(judge(answer(200, r#"{"choices":[{"text":"x"}]}"#)), Found::Tokens);
        for (status, body) in [(200, r#"{"choices":[]}"#), (200, "ok"), (500, "{}"), (503, "{}"), (429, "{}")] {
            assert!(matches!(judge(answer(status, body)), Found::NotYet(_)), "{status} {body}");
        }
        for status in [400, 401, 404, 405, 501] {
            assert!(matches!(judge(answer(status, "{}")), Found::NoWayToAsk(_)), "{status}");
        }
    }

    #[test]
    fn the_question_fits_the_path_and_names_the_engines_model() {
        assert_eq!(model(br#"{"data":[{"id":"llama"}]}"#), "llama");
        assert_eq!(model(b"nonsense"), "default");
        assert!(question(PATHS[0], "m")["prompt"].is_string());
        assert!(question(PATHS[1], "m")["messages"].is_array());
    }

    #[tokio::test]
    async fn without_a_gate_nothing_is_asked_and_delivery_by_others_is_proof_enough() {
        let idle = Observation::default();
        assert!(Proof::new(None, false).look(0, &Verdict::Starting, &idle, None).await);
        let gate: Uri = "http://127.0.0.1:1".parse().unwrap();
        let mut proof = Proof::new(Some(gate.clone()), false);
        assert!(
            !proof.look(0, &Verdict::Starting, &idle, None).await && proof.asking.is_none(),
            "it takes no requests yet"
        );
        assert!(!proof.look(0, &Verdict::Idle, &idle, None).await && proof.asking.is_none(), "no gate is heard");
        assert!(!proof.look(0, &Verdict::Idle, &idle, Some("")).await && proof.asking.is_some());
        let mut proof = Proof::new(Some(gate), true);
        assert!(proof.look(0, &Verdict::Idle, &idle, None).await, "shown to an earlier detector");
        proof.engine_changed();
        assert!(!proof.look(0, &Verdict::Idle, &idle, None).await, "another process");
    }

    /// A little engine: answers each request by its first line, and ends after `answers` of them.
    async fn engine(answers: &'static [(&'static str, u16, &'static str)]) -> Uri {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            for (head, status, body) in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).await.unwrap();
                let said = String::from_utf8_lossy(&request[..length]).into_owned();
                assert!(said.starts_with(head), "{said}");
                let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        format!("http://{address}").parse().unwrap()
    }

    #[tokio::test]
    async fn completions_are_tried_before_chat_and_an_answer_of_either_is_proof() {
        const TOKEN: &str = r#"{"choices":[{}]}"#;
        let models = ("GET /v1/models", 200, r#"{"data":[{"id":"m"}]}"#);
        let plain: &[_] = Box::leak(Box::new([models, ("POST /v1/completions", 200, TOKEN)]));
        assert_eq!(ask(engine(plain).await, String::new()).await, Found::Tokens);
        let missing = ("POST /v1/completions", 404, "{}");
        let chat: &[_] = Box::leak(Box::new([models, missing, ("POST /v1/chat/completions", 200, TOKEN)]));
        assert_eq!(ask(engine(chat).await, String::new()).await, Found::Tokens);
        let none: &[_] = Box::leak(Box::new([models, missing, ("POST /v1/chat/completions", 401, "{}")]));
        assert_eq!(ask(engine(none).await, String::new()).await, Found::NoWayToAsk(StatusCode::UNAUTHORIZED));
        let away: &[_] = Box::leak(Box::new([]));
        assert!(matches!(ask(engine(away).await, String::new()).await, Found::NotYet(_)));
    }
}
