//! How much text a token may stand for: what a text of too many bytes need not be cut into tokens for. Only tokenizers that keep every
//! character have such a bound: others drop blanks, or make one token of anything that they do not know.

use serde_json::Value;
use tokenizers::ModelWrapper;

use super::{Spelling, Tokenizer};

/// Canonical composition makes at least a third of a text: three letters of Korean, of three bytes each, become one.
const COMPOSED: usize = 3;

/// Bytes of a text that one token stands for at most, where that can be said.
pub(super) fn token_bytes_max(tokenizer: &Tokenizer) -> Option<usize> {
    let keeps_all = match (tokenizer.inner.get_model(), tokenizer.spelling) {
        (ModelWrapper::BPE(_), Spelling::ByteLevel) => true,
        (ModelWrapper::BPE(model), Spelling::Pieces { .. }) => model.byte_fallback,
        _ => false,
    };
    let words = serde_json::to_value(tokenizer.inner.get_pre_tokenizer()).ok()?;
    if !keeps_all || !keeps_characters(&words) {
        return None;
    }
    let shrinks = shrinks(&serde_json::to_value(tokenizer.inner.get_normalizer()).ok()?)?;
    let ids = tokenizer.inner.get_vocab(true).into_values();
    let longest = ids.map(|id| tokenizer.bytes_of(id, false).len()).max()?;
    Some(longest.max(1).saturating_mul(shrinks))
}

/// Words are cut, and nothing between them is dropped.
fn keeps_characters(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some("Split") => pre_tokenizer["behavior"] != "Removed",
        Some("Sequence") => parts(pre_tokenizer, "pretokenizers").iter().all(keeps_characters),
        Some(_) => false,
    }
}

/// To which part of its length a text may shrink; None: to nothing.
fn shrinks(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None => normalizer.is_null().then_some(1),
        Some("NFC") => Some(COMPOSED),
        Some("Prepend") => Some(1),
        Some("Replace") => {
            let pattern = normalizer["pattern"]["String"].as_str()?;
            normalizer["content"].as_str().filter(|content| content.len() >= pattern.len()).map(|_| 1)
        }
        Some("Sequence") => {
            parts(normalizer, "normalizers").iter().map(shrinks).try_fold(1, |all, one| Some(all * one?))
        }
        Some(_) => None,
    }
}

fn parts<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bound_is_told_only_where_nothing_is_dropped() {
        let (nfc, prepend) = (json!({"type": "NFC"}), json!({"type": "Prepend", "prepend": "▁"}));
        let replace = |pattern| json!({"type": "Replace", "pattern": pattern, "content": "▁"});
        let both = |a, b| json!({"type": "Sequence", "normalizers": [a, b]});
        assert_eq!(shrinks(&Value::Null), Some(1));
        assert_eq!(shrinks(&both(prepend.clone(), replace(json!({"String": " "})))), Some(1));
        assert_eq!(shrinks(&both(prepend, nfc)), Some(3));
        for other in [json!({"type": "Strip"}), replace(json!({"Regex": " +"})), replace(json!({"String": "many"}))] {
            assert_eq!(shrinks(&other), None, "{other}");
        }
        let split = |behavior| json!({"type": "Split", "behavior": behavior});
        let words = |one: Value| json!({"type": "Sequence", "pretokenizers": [one, {"type": "ByteLevel"}]});
        assert!(keeps_characters(&words(split("Isolated"))) && keeps_characters(&Value::Null));
        assert!(!keeps_characters(&words(split("Removed"))) && !keeps_characters(&json!({"type": "Whitespace"})));
    }
}
