//! What clients ask: answers that must be the same every time, streamed and whole, long prompts, sampled ones, requests in a hurry,
//! requests that are wrong, requests that the model makes no numbers of, and clients that leave. Which one comes next hangs on the seed, the client and its turn alone. Pure.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value, json};

use super::poison;

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
    /// Nothing can come of it but its own failure (EP5).
    pub poisoned: bool,
    /// Tokens of its answer at most, and whether exactly so many come.
    pub tokens_max: u64,
    pub exact: bool,
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
        92..96 => poisoned(number("own", u64::MAX), stream),
        _ => wrong(WRONG[number("wrong", WRONG.len() as u64) as usize]),
    }
}

/// How long this client thinks before this turn.
pub fn think_ms(seed: u64, client: u64, turn: u64) -> u64 {
    chance((seed, client, turn, "thinks")) % 400
}

/// A prompt of its own from the first token on, so that no cache knows a part of it.
fn own_prompt(own: u64) -> Vec<u64> {
    let len = 100 + own % 1900;
    (0..len).map(|at| 300 + (own % 1009 + at * 7 + own % 31 * at) % 500).collect()
}

/// A prompt of its own, and a long answer.
fn long(own: u64, stream: bool) -> Ask {
    let body = json!({
        "model": "demo", "prompt": own_prompt(own), "stream": stream, "max_tokens": 300, "ignore_eos": true,
        "logit_bias": never_drawn(),
    });
    ask(&body, None)
}

/// The token of which the model makes no numbers, somewhere in a prompt that is short or long.
fn poisoned(own: u64, stream: bool) -> Ask {
    let mut prompt = own_prompt(own);
    prompt.truncate(if own.is_multiple_of(2) { 40 } else { prompt.len() });
    let at = own as usize / 2 % prompt.len();
    prompt[at] = poison::TOKEN;
    let body = json!({ "model": "demo", "prompt": prompt, "stream": stream, "max_tokens": 50, "ignore_eos": true });
    Ask { poisoned: true, ..ask(&body, None) }
}

/// Whoever draws this token has it in its text.
fn never_drawn() -> Value {
    json!({ (poison::TOKEN.to_string()): -100 })
}

fn sampled(own: u64, stream: bool) -> Ask {
    let body = json!({
        "model": "demo", "prompt": format!("one of many, {own}"), "stream": stream, "max_tokens": 1 + own % 120,
        "temperature": 1.0, "top_p": 0.9, "seed": own >> 1, "priority": own % 3,
        "logit_bias": never_drawn(),
    });
    ask(&body, None)
}

fn wrong(body: &str) -> Ask {
    Ask { wrong: true, body: body.to_owned(), ..ask(&Value::Null, None) }
}

fn ask(body: &Value, reference: Option<usize>) -> Ask {
    let stream = body["stream"].as_bool().unwrap_or(false);
    let (tokens_max, exact) = (body["max_tokens"].as_u64().unwrap_or(0), body["ignore_eos"] == true);
    let (leaves_after, timeout_ms, wrong, poisoned, body) = (None, None, false, false, body.to_string());
    Ask { body, stream, reference, leaves_after, timeout_ms, wrong, poisoned, tokens_max, exact }
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
        assert!(has(&|a| a.poisoned && a.stream) && has(&|a| a.poisoned && !a.stream));
        assert!(has(&|a| a.stream && a.reference.is_some()) && has(&|a| !a.stream && a.reference.is_some()));
    }
}
