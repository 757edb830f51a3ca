//! The vocabulary of a GGUF file, put as the `tokenizer.json` it was made from. Pure.

mod sentencepiece;

use serde_json::{Map, Value, json};

use crate::weights::{Gguf, GgufValue};

/// How Llama 3 and Qwen cut a text into words; they differ in the digits a number may have, and in whether a word goes on over marks.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?LETTER+|NUMBER| ?[^\s\p{L}MARK\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Types of tokens that stand for themselves in a text: control and user defined.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// A `tokenizer.json`, and the id to put in front of a text.
///
/// # Errors
/// What the file lacks, or has that is not understood.
pub fn tokenizer_json(gguf: &Gguf) -> Result<(Value, Option<u32>), String> {
    match gguf.text("tokenizer.ggml.model").unwrap_or("none") {
        "gpt2" => byte_level(gguf),
        "llama" => sentencepiece::tokenizer_json(gguf),
        other => Err(format!(
            "its tokenizer is `{other}`; only `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE) are read: put a \
             tokenizer.json beside it"
        )),
    }
}

fn byte_level(gguf: &Gguf) -> Result<(Value, Option<u32>), String> {
    let (tokens, merges) = (texts(gguf, "tokenizer.ggml.tokens")?, texts(gguf, "tokenizer.ggml.merges")?);
    let pre = gguf.text("tokenizer.ggml.pre").unwrap_or("default");
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(gguf, &tokens),
        "normalizer": if pre.starts_with("qwen") { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": pre_tokenizer(pre, &byte_level)?,
        "post_processor": null,
        "decoder": byte_level(false),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre == "llama-bpe", "vocab": vocab(&tokens), "merges": merges},
    });
    let adds_bos = matches!(pre, "llama-bpe" | "llama3" | "llama-v3");
    Ok((json, bos_to_add(gguf, adds_bos)))
}

fn texts<'a>(gguf: &'a Gguf, key: &str) -> Result<Vec<&'a str>, String> {
    let list = gguf.list(key).ok_or_else(|| format!("it has no list `{key}`"))?;
    let texts: Option<Vec<&str>> = list.iter().map(GgufValue::as_str).collect();
    texts.ok_or_else(|| format!("`{key}` holds something else than texts"))
}

fn vocab(tokens: &[&str]) -> Map<String, Value> {
    tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect()
}

/// What kind of token each is; plain ones where the file says nothing.
fn kinds(gguf: &Gguf) -> impl Fn(usize) -> u64 {
    let list = gguf.list("tokenizer.ggml.token_type").unwrap_or_default();
    let kinds: Vec<u64> = list.iter().map(|kind| kind.as_u64().unwrap_or(1)).collect();
    move |id| kinds.get(id).copied().unwrap_or(1)
}

fn added_tokens(gguf: &Gguf, tokens: &[&str]) -> Vec<Value> {
    let kind = kinds(gguf);
    let stands_for_itself = |(id, _): &(usize, &&str)| matches!(kind(*id), CONTROL | USER_DEFINED);
    let added = tokens.iter().enumerate().filter(stands_for_itself).map(|(id, token)| {
        json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": kind(id) == CONTROL})
    });
    added.collect()
}

fn pre_tokenizer(pre: &str, byte_level: &dyn Fn(bool) -> Value) -> Result<Value, String> {
    let (letter, mark, number) = match pre {
        "llama-bpe" | "llama3" | "llama-v3" => (r"\p{L}", "", r"\p{N}{1,3}"),
        "qwen2" => (r"\p{L}", "", r"\p{N}"),
        "qwen35" => (r"[\p{L}\p{M}]", r"\p{M}", r"\p{N}"),
        "gpt-2" => return Ok(byte_level(true)),
        // `default`, or no word at all: converters wrote so before they knew, whatever the model's own way is
        other => {
            return Err(format!(
                "its words are cut the `{other}` way, which is not known: put a tokenizer.json beside it"
            ));
        }
    };
    let pattern = WORDS.replace("LETTER", letter).replace("MARK", mark).replace("NUMBER", number);
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    Ok(json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]}))
}

/// The begin token, if the file says that it is to be put in front; `default` where it says nothing.
fn bos_to_add(gguf: &Gguf, default: bool) -> Option<u32> {
    let add = gguf.metadata.get("tokenizer.ggml.add_bos_token").and_then(GgufValue::as_bool);
    let id = gguf.number("tokenizer.ggml.bos_token_id").and_then(|id| u32::try_from(id).ok());
    id.filter(|_| add.unwrap_or(default))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::demo_model::{DemoArch, write_demo_model};
    use crate::tokenizer::Tokenizer;
    use crate::weights::gguf::Builder;

    pub fn list(kind: u32, items: Vec<Vec<u8>>) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes(), &items.concat()].concat()
    }

    pub fn texts(texts: &[String]) -> Vec<u8> {
        list(8, texts.iter().map(|t| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat()).collect())
    }

    /// The demo model's tokenizer as a GGUF file would hold it.
    fn as_gguf(tokenizer: &Value, pre: &str) -> Vec<u8> {
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        let mut tokens = vec![String::new(); vocab.len()];
        vocab.iter().for_each(|(token, id)| tokens[id.as_u64().unwrap() as usize] = token.clone());
        let special = |id: usize| tokenizer["added_tokens"].as_array().unwrap().iter().any(|t| t["id"] == json!(id));
        let kinds = (0..tokens.len()).map(|id| (if special(id) { 3i32 } else { 1 }).to_le_bytes().to_vec()).collect();
        let merge = |m: &Value| {
            m.as_str().map_or_else(|| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()), str::to_owned)
        };
        let merges: Vec<String> = tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
        Builder::default()
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", pre)
            .u32("tokenizer.ggml.bos_token_id", 0)
            .u32("tokenizer.ggml.eos_token_id", 1)
            .string("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
            .pair("tokenizer.ggml.tokens", 9, &texts(&tokens))
            .pair("tokenizer.ggml.token_type", 9, &list(5, kinds))
            .pair("tokenizer.ggml.merges", 9, &texts(&merges))
            .build()
    }

    #[test]
    fn the_tokenizer_of_a_file_is_the_one_it_was_made_from() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        write_demo_model(&folder, DemoArch::Llama, 0).unwrap();
        let whole = Tokenizer::from_dir(&folder).unwrap();
        let json: Value = serde_json::from_slice(&std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, as_gguf(&json, "gpt-2")).unwrap();
        let mine = Tokenizer::from_dir(&path).unwrap();
        for text in ["count: 1, 2 é 漢", "<|turn|>user\nhello<|end|>\n", "  two  spaces\t\n\n12345", ""] {
            let ids = whole.encode(text, false).unwrap();
            assert_eq!(mine.encode(text, false).unwrap(), ids, "{text}");
            assert_eq!(mine.decode(&ids, false).unwrap(), text);
        }
        let template = crate::chat_template::ChatTemplate::from_dir(&path).unwrap().unwrap();
        let (messages, now) =
            (json!([{"role": "user", "content": "hi"}]), jiff::civil::date(2026, 1, 1).at(0, 0, 0, 0));
        let input = crate::chat_template::ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            extra: None,
            now,
        };
        assert_eq!(template.render(input).unwrap(), "<|begin|>hi<|end|>");
        std::fs::write(&path, as_gguf(&json, "llama-bpe")).unwrap();
        let llama = Tokenizer::from_dir(&path).unwrap();
        assert_eq!(llama.encode("a", true).unwrap()[0], 0);
        assert!(llama.encode("12345", false).unwrap().len() >= 2);
    }

    /// Devanagari writes vowels as marks: Qwen2 ends a word before each, Qwen3.5 does not.
    #[test]
    fn marks_are_part_of_a_word_where_the_model_has_it_so() {
        let words = |pre: &str| {
            let json = pre_tokenizer(pre, &|use_regex| json!({"type": "ByteLevel", "use_regex": use_regex})).unwrap();
            let split: tokenizers::PreTokenizerWrapper =
                serde_json::from_value(json["pretokenizers"][0].clone()).unwrap();
            let mut text = tokenizers::PreTokenizedString::from("a हिन्दी\u{301}! \u{301}.");
            tokenizers::PreTokenizer::pre_tokenize(&split, &mut text).unwrap();
            let words = text.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
            words.into_iter().map(|(word, ..)| word.to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(words("qwen35"), ["a", " हिन्दी\u{301}", "!", " \u{301}", "."]);
        assert_eq!(words("qwen2"), ["a", " ह", "िन", "्द", "ी\u{301}!", " \u{301}."]);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let parse = |file: Builder| tokenizer_json(&Gguf::parse(&file.build()).unwrap()).unwrap_err();
        assert!(parse(Builder::default().string("tokenizer.ggml.model", "bert")).contains("`bert`"));
        assert!(parse(Builder::default().string("tokenizer.ggml.model", "llama")).contains("tokenizer.ggml.tokens"));
        let bare = Builder::default().string("tokenizer.ggml.model", "gpt2");
        assert!(parse(bare).contains("tokenizer.ggml.tokens"));
        for pre in ["default", "tekken"] {
            assert!(pre_tokenizer(pre, &|_| Value::Null).unwrap_err().contains(&format!("`{pre}`")), "{pre}");
        }
    }
}
