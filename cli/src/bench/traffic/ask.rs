//! What clients ask: answers that must be the same every time, streamed and whole, long prompts, sampled ones, requests in a hurry,
//! requests that are wrong, and clients that leave. Which one comes next hangs on the seed, the client and its turn alone. Pure.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value, json};

/// Requests that are asked alone first and then again and again: what they say never changes (EP4).
pub const REFERENCES: usize = 12;
/// Requests that no engine can answer.
const WRONG: [&str; 6] = [
    "{",
    r#"{"model": "demo", "prompt": "x", "max_tokens": -1}"#,
    r#"{"model": "demo", "prompt": "x", "no_such_field": 1}"#,
    r#"{"model": "demo", "prompt": {}}"#,
    r#"{"model": "demo", "prompt": "x", "max_tokens": 10000000}"#,
    r#"{"model": "no-such-model", "prompt": "x"}"#,
];

/// One request, and what is known of its answer.
#[derive(Debug, Clone)]
pub struct Ask {
    pub body: String,
    pub stream: bool,
    /// Its answer is the so-many-th reference, or the beginning of it.
    pub reference: Option<usize>,
    /// The client leaves after so many pieces; 0: before anything came.
    pub leaves_after: Option<u64>,
    /// The client's own deadline.
    pub timeout_ms: Option<u64>,
    pub wrong: bool,
}

/// A number that hangs on all of these and on nothing else.
fn chance(of: (u64, u64, u64, &str)) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The so-many-th reference.
pub fn reference(index: usize, stream: bool) -> Ask {
    let body = json!({
        "model": "demo", "prompt": format!("{index} engines that tell the truth, ").repeat(1 + index % 5 * 8), "stream": stream,
        "max_tokens": 16 + index * 12, "ignore_eos": true, "temperature": 0.0,
    });
    ask(&body, Some(index))
}

/// What this client asks in this turn.
pub fn next(seed: u64, client: u64, turn: u64) -> Ask {
    let number = |what: &str, below: u64| chance((seed, client, turn, what)) % below;
    let index = number("reference", REFERENCES as u64) as usize;
    let stream = number("stream", 2) == 0;
    match number("kind", 100) {
        0..50 => reference(index, stream),
        50..62 => Ask { leaves_after: Some(number("leaves", 12)), ..reference(index, true) },
        62..74 => Ask { timeout_ms: Some(20 + number("timeout", 1500)), ..long(number("own", u64::MAX), stream) },
        74..84 => sampled(number("own", u64::MAX), stream),
        84..92 => Ask { leaves_after: Some(number("leaves", 6)), ..long(number("own", u64::MAX), true) },
        _ => wrong(WRONG[number("wrong", WRONG.len() as u64) as usize]),
    }
}

/// How long this client thinks before this turn.
pub fn think_ms(seed: u64, client: u64, turn: u64) -> u64 {
    chance((seed, client, turn, "thinks")) % 400
}

/// A prompt of its own from the first token on, so that no cache knows a part of it, and a long answer.
fn long(own: u64, stream: bool) -> Ask {
    let len = 100 + own % 1900;
    let prompt: Vec<u64> = (0..len).map(|at| 300 + (own % 1009 + at * 7 + own % 31 * at) % 500).collect();
    let body = json!({ "model": "demo", "prompt": prompt, "stream": stream, "max_tokens": 300, "ignore_eos": true });
    ask(&body, None)
}

fn sampled(own: u64, stream: bool) -> Ask {
    let body = json!({
        "model": "demo", "prompt": format!("one of many, {own}"), "stream": stream, "max_tokens": 1 + own % 120,
        "temperature": 1.0, "top_p": 0.9, "seed": own >> 1, "priority": own % 3,
    });
    ask(&body, None)
}

fn wrong(body: &str) -> Ask {
    Ask { wrong: true, body: body.to_owned(), ..ask(&Value::Null, None) }
}

fn ask(body: &Value, reference: Option<usize>) -> Ask {
    let stream = body["stream"].as_bool().unwrap_or(false);
    Ask { body: body.to_string(), stream, reference, leaves_after: None, timeout_ms: None, wrong: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_asks_the_same_and_every_kind_comes() {
        let bodies = |seed| (0..300).map(|turn| next(seed, 1, turn)).collect::<Vec<_>>();
        let (one, again, other) = (bodies(1), bodies(1), bodies(2));
        assert!(one.iter().zip(&again).all(|(a, b)| a.body == b.body));
        assert!(one.iter().zip(&other).any(|(a, b)| a.body != b.body));
        let has = |kind: &dyn Fn(&Ask) -> bool| one.iter().any(kind);
        assert!(has(&|a| a.wrong) && has(&|a| a.timeout_ms.is_some()) && has(&|a| a.leaves_after == Some(0)));
        assert!(has(&|a| a.stream && a.reference.is_some()) && has(&|a| !a.stream && a.reference.is_some()));
    }
}
