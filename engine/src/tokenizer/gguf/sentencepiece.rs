//! SentencePiece's BPE, as Llama 2 and the first Mistral have it: blanks are `▁`, every token has a score, of two neighbours those are
//! joined first whose union scores highest, and what is in no token is spelled in bytes.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{added_tokens, bos_to_add, kinds, texts, vocab};
use crate::weights::{Gguf, GgufValue};

const UNKNOWN: u64 = 2;
const NORMAL: u64 = 1;
/// The longest token to be looked for in parts: many times the longest of any vocabulary. Every cut of a token is hashed on both sides, which
/// for one of a megabyte takes hours.
const TOKEN_BYTES_MAX: usize = 1024;

/// A `tokenizer.json`, and the id to put in front of a text.
///
/// # Errors
/// What the file lacks, or has that is not understood.
pub fn tokenizer_json(gguf: &Gguf) -> Result<(Value, Option<u32>), String> {
    let tokens = texts(gguf, "tokenizer.ggml.tokens")?;
    let scores = gguf.list("tokenizer.ggml.scores").ok_or("it has no list `tokenizer.ggml.scores`")?;
    let scores: Option<Vec<f64>> = scores.iter().map(GgufValue::as_f64).collect();
    let scores = scores.filter(|s| s.len() == tokens.len());
    let scores = scores.ok_or("`tokenizer.ggml.scores` has no number for every token")?;
    let kind = kinds(gguf);
    let unknown = (0..tokens.len()).find(|id| kind(*id) == UNKNOWN).map(|id| tokens[id]);
    let joined: Vec<usize> = (0..tokens.len()).filter(|id| kind(*id) == NORMAL).collect();
    if let Some(id) = joined.iter().find(|id| tokens[**id].len() > TOKEN_BYTES_MAX) {
        let len = tokens[*id].len();
        return Err(format!(
            "token {id} of `tokenizer.ggml.tokens` has {len} bytes; at most {TOKEN_BYTES_MAX} can be joined of others: put a \
             tokenizer.json beside it"
        ));
    }
    let prefixed = gguf.metadata.get("tokenizer.ggml.add_space_prefix").and_then(GgufValue::as_bool).unwrap_or(true);
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(gguf, &tokens),
        "normalizer": normalizer(prefixed),
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": decoder(prefixed),
        "model": {"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab(&tokens), "merges": merges(&tokens, &scores, &joined)},
    });
    Ok((json, bos_to_add(gguf, true)))
}

/// A blank before the text, and blanks as `▁`.
fn normalizer(prefixed: bool) -> Value {
    let blanks = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prefix = json!({"type": "Prepend", "prepend": "▁"});
    let both = if prefixed { vec![prefix, blanks] } else { vec![blanks] };
    json!({"type": "Sequence", "normalizers": both})
}

fn decoder(prefixed: bool) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    steps.extend(prefixed.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
    json!({"type": "Sequence", "decoders": steps})
}

/// All pairs of tokens whose union is a token, the highest scores first: the order in which SentencePiece would join them.
fn merges(tokens: &[&str], scores: &[f64], joined: &[usize]) -> Vec<[String; 2]> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (*token, id)).collect();
    let mut all: Vec<(f64, usize, usize)> = Vec::new();
    for &id in joined {
        let token = tokens[id];
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if ids.contains_key(left) && ids.contains_key(right) {
                all.push((scores[id], id, cut));
            }
        }
    }
    // Of equal scores the lower id, then the longer left part: the order is the same for the same file.
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(b.2.cmp(&a.2)));
    let pair = |(_, id, cut): (f64, usize, usize)| [tokens[id][..cut].to_owned(), tokens[id][cut..].to_owned()];
    all.into_iter().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{list, texts as text_list};
    use crate::tokenizer::Tokenizer;
    use crate::tokenizer::tests::prompt_and_output;
    use crate::weights::Gguf;
    use crate::weights::gguf::Builder;

    /// Three special tokens, the bytes, letters, and joined ones with scores in a wild order.
    fn vocabulary() -> Vec<(String, f32, i32)> {
        let special = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<tool>", 4)];
        let mut all: Vec<(String, f32, i32)> = special.iter().map(|(t, kind)| ((*t).into(), 0.0, *kind)).collect();
        all.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
        all.extend(["▁", "a", "b", "c", "é"].iter().map(|t| ((*t).into(), -100.0, 1)));
        let joined = ["▁a", "ab", "bc", "▁ab", "abc", "aa", "▁▁", "cc", "▁b", "éa", "bcc", "▁abc", "aab"];
        all.extend(joined.iter().enumerate().map(|(i, t)| ((*t).into(), -((i * 7 % joined.len()) as f32) - 1.0, 1)));
        all
    }

    fn tokenizer(more: impl Fn(Builder) -> Builder) -> Tokenizer {
        let all = vocabulary();
        let tokens: Vec<String> = all.iter().map(|t| t.0.clone()).collect();
        let file = Builder::default()
            .string("tokenizer.ggml.model", "llama")
            .u32("tokenizer.ggml.bos_token_id", 1)
            .pair("tokenizer.ggml.tokens", 9, &text_list(&tokens))
            .pair("tokenizer.ggml.scores", 9, &list(6, all.iter().map(|t| t.1.to_le_bytes().to_vec()).collect()))
            .pair("tokenizer.ggml.token_type", 9, &list(5, all.iter().map(|t| t.2.to_le_bytes().to_vec()).collect()));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, more(file).build()).unwrap();
        Tokenizer::from_dir(&path).unwrap()
    }

    /// SentencePiece as its paper has it: again and again the best pair, the leftmost of equals.
    fn reference(text: &str) -> Vec<u32> {
        let all = vocabulary();
        let find = |t: &str| all.iter().position(|v| v.0 == t && v.2 == 1);
        let mut parts: Vec<String> = format!("▁{}", text.replace(' ', "▁")).chars().map(String::from).collect();
        loop {
            let scores = parts.windows(2).enumerate().filter_map(|(i, p)| Some((all[find(&p.concat())?].1, i)));
            let Some((_, at)) = scores.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))) else { break };
            let right = parts.remove(at + 1);
            parts[at] += &right;
        }
        let ids = |part: &String| match find(part) {
            Some(id) => vec![id as u32],
            None => part.bytes().map(|byte| 4 + u32::from(byte)).collect(),
        };
        parts.iter().flat_map(ids).collect()
    }

    #[test]
    fn special_tokens_bytes_and_the_first_blank_are_as_in_llama() {
        let plain = tokenizer(|file| file);
        let ids = plain.encode("ab", true).unwrap();
        assert_eq!((ids[0], &ids[1..]), (1, &reference("ab")[..]));
        assert_eq!(plain.encode("</s>", false).unwrap(), [2]);
        assert_eq!(plain.decode(&plain.encode("漢 ab\n", false).unwrap(), true).unwrap(), "漢 ab\n");
        assert!(plain.is_special(2) && !plain.is_special(3) && !plain.is_special(300));
        let bare = tokenizer(|file| file.pair("tokenizer.ggml.add_space_prefix", 7, &[0]));
        assert_eq!(bare.decode(&bare.encode(" a", false).unwrap(), true).unwrap(), " a");
        assert_eq!(bare.encode("b", false).unwrap().len(), 1);
        let no_begin = tokenizer(|file| file.pair("tokenizer.ggml.add_bos_token", 7, &[0]));
        assert_ne!(no_begin.encode("ab", true).unwrap()[0], 1);
    }

    #[test]
    fn a_token_longer_than_any_vocabularys_is_refused() {
        let json = |len: usize| {
            let tokens = ["<unk>".to_owned(), "a".repeat(len)];
            let file = Builder::default().pair("tokenizer.ggml.tokens", 9, &text_list(&tokens));
            let scores = list(6, vec![vec![0; 4]; 2]);
            let gguf = Gguf::parse(&file.pair("tokenizer.ggml.scores", 9, &scores).build()).unwrap();
            super::tokenizer_json(&gguf)
        };
        assert!(json(1024).is_ok());
        let error = json(1025).unwrap_err();
        let needles = ["token 1 of `tokenizer.ggml.tokens`", "1025 bytes", "put a tokenizer.json beside it"];
        assert!(needles.iter().all(|needle| error.contains(needle)), "{error}");
    }

    proptest! {
        #[test]
        fn pairs_are_joined_in_sentencepieces_order(text in "[abcé 漢]{1,24}") {
            let tokenizer = tokenizer(|file| file);
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(&ids, &reference(&text));
            prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        }

        #[test]
        fn an_output_keeps_the_blank_that_it_begins_with(prompt in "[abcé 漢]{1,12}", output in "[abcé 漢]{1,12}") {
            let tokenizer = tokenizer(|file| file);
            // the output's tokens begin with the blank that is put before a text
            let (before, after) = (tokenizer.encode(&prompt, true).unwrap(), tokenizer.encode(&output, false).unwrap());
            let (certain, text) = prompt_and_output(&tokenizer, (&before, &after), true);
            prop_assert_eq!(&text, &format!(" {output}"));
            prop_assert_eq!(certain + &text, tokenizer.decode(&[before, after].concat(), true).unwrap());
        }
    }
}
