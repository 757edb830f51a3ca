//! What must not leave the machine with a bundle: prompts in log lines, secrets on command lines (I6). Pure.
//!
//! Three nets: keys whose values are text (here), words that no engine says (`words`), secrets by name and by value (`command`).
//! Over-redaction costs a word, under-redaction a customer's text: where a value's end is unclear, the rest of the line goes.

mod command;
mod words;

pub use self::command::{once, redact_command, redact_environment, secrets, strike_out};
pub use self::words::redact_words;

/// Keys whose values are what users wrote or models answered, quoted or not (`"prompt": …`, `prompt='…'`).
const TEXT_KEYS: [&str; 12] = [
    "prompt",
    "prompts",
    "messages",
    "content",
    "text",
    "input",
    "inputs",
    "prompt_token_ids",
    "token_ids",
    "completion",
    "query",
    "output_text",
];
/// Keys of which even an unquoted value is taken to be text.
const BARE_KEYS: [&str; 3] = ["prompt", "prompts", "messages"];
/// A bracketed value is followed over line ends this far (bytes).
const BRACKETS_BYTES_MAX: usize = 64 << 10;
/// A log as it may leave the machine: values of [`TEXT_KEYS`] first, then every word that no engine says.
pub fn redact_log(text: &str) -> String {
    words::redact_words(&redact_text(text))
}

/// The text with the values of [`TEXT_KEYS`] replaced by `[redacted n chars]`.
pub fn redact_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        if let Some((value_at, value_len)) = value_here(text, at) {
            let hidden = &text[value_at..value_at + value_len];
            out.push_str(&text[at..value_at]);
            out.push_str(&format!("[redacted {} chars]", hidden.chars().count()));
            at = value_at + value_len;
            continue;
        }
        let step = rest.chars().next().map_or(1, char::len_utf8);
        out.push_str(&rest[..step]);
        at += step;
    }
    out
}

/// If a key begins at `at`: where its value lies.
fn value_here(text: &str, at: usize) -> Option<(usize, usize)> {
    let bytes = text.as_bytes();
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    if at > 0 && is_word(&bytes[at - 1]) {
        return None;
    }
    let length = bytes[at..].iter().take_while(|byte| is_word(byte)).count();
    // only ASCII was counted, so this is a boundary of characters
    let key = text.get(at..at + length)?.to_ascii_lowercase();
    if !TEXT_KEYS.contains(&key.as_str()) {
        return None;
    }
    let mut end = skip(bytes, at + length, |byte| byte == b'\\');
    end += usize::from(matches!(bytes.get(end), Some(b'"' | b'\'')));
    end = skip(bytes, end, |byte| byte == b' ');
    if !matches!(bytes.get(end), Some(b':' | b'=')) {
        return None;
    }
    let begin = skip(bytes, end + 1, |byte| byte == b' ' || byte == b'\t');
    let length = value_length(bytes, begin, BARE_KEYS.contains(&key.as_str()))?;
    Some((begin, length)).filter(|_| text.is_char_boundary(begin + length))
}

fn value_length(bytes: &[u8], begin: usize, bare_too: bool) -> Option<usize> {
    let line_end = bytes[begin..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |n| begin + n);
    let opening = skip(bytes, begin, |byte| byte == b'\\');
    match bytes.get(opening) {
        Some(b'"' | b'\'') => Some(string_end(bytes, begin).filter(|end| *end <= line_end).unwrap_or(line_end) - begin),
        Some(b'[' | b'{') => Some(brackets_end(bytes, begin).unwrap_or(line_end) - begin),
        _ if bare_too && line_end > begin => Some(line_end - begin),
        _ => None,
    }
}

/// The end of a string that begins at `begin`, perhaps with escaped quotes (JSON within JSON): the first quote of the same kind
/// with no more backslashes before it than the first has.
fn string_end(bytes: &[u8], begin: usize) -> Option<usize> {
    let opening = skip(bytes, begin, |byte| byte == b'\\');
    let depth = opening - begin;
    let quote = *bytes.get(opening)?;
    let mut slashes = 0;
    for (at, byte) in bytes.iter().enumerate().skip(opening + 1) {
        if *byte == quote && slashes <= depth {
            return Some(at + 1);
        }
        slashes = if *byte == b'\\' { slashes + 1 } else { 0 };
    }
    None
}

/// The end of a bracketed value, strings inside it skipped.
fn brackets_end(bytes: &[u8], begin: usize) -> Option<usize> {
    let mut depth = 0_usize;
    let mut at = begin;
    while at < bytes.len().min(begin + BRACKETS_BYTES_MAX) {
        match bytes[at] {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            b'"' | b'\'' => {
                let slashes = bytes[begin..at].iter().rev().take_while(|byte| **byte == b'\\').count();
                at = string_end(bytes, at - slashes)?;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

fn skip(bytes: &[u8], from: usize, wanted: impl Fn(u8) -> bool) -> usize {
    from + bytes.get(from..).map_or(0, |rest| rest.iter().take_while(|byte| wanted(**byte)).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_of_a_prompt_is_hidden() {
        for line in [
            r#"{"prompt": "MARK", "n": 1}"#,
            r#"{"prompt":["MARK","MARK \" ]"],"n":1}"#,
            r#"{"messages": [{"role": "user", "content": "MARK"}], "n": 1}"#,
            r#"{"content":[{"type":"text","text":"it's MARK"}]} tail"#,
            r#"INFO body="{\"prompt\": \"MARK \\\" MARK\", \"n\": 1}""#,
            r#"Received request cmpl-1: prompt: 'say \'MARK\'', params: SamplingParams(n=1)"#,
            "Received request: prompt: MARK without quotes, MARK",
            r#"RequestOutput(prompt='MARK', prompt_token_ids=[1, 2])"#,
            r#"{"prompt": "MARK cut in the mid"#,
            "{\"prompt\": [\n  \"MARK\",\n  \"MARK\"\n]}",
            "{\"messages\": [\n {\"content\": \"MARK\n",
            r#"{"Prompt" : "MARK ünï"}"#,
        ] {
            let redacted = redact_text(line);
            assert!(!redacted.contains("MARK"), "{line}\n{redacted}");
            assert!(redacted.contains("[redacted "), "{redacted}");
        }
    }

    #[test]
    fn the_rest_of_the_line_stays() {
        let redacted = redact_text(r#"{"prompt": "abcd", "n": 1} Avg prompt throughput: 12 tokens/s, prompt_tokens=7"#);
        assert_eq!(
            redacted,
            r#"{"prompt": [redacted 6 chars], "n": 1} Avg prompt throughput: 12 tokens/s, prompt_tokens=7"#
        );
        let plain = "No available shared memory broadcast block found in 60 seconds. Content-Length: 12 ü";
        assert_eq!(redact_text(plain), plain);
    }
}
