//! Encoding with and without the begin token, and streams against decoding all at once.

use proptest::prelude::*;

use super::*;
use crate::demo_model::{DemoArch, write_demo_model};

fn demo(arch: DemoArch) -> (tempfile::TempDir, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    write_demo_model(dir.path(), arch, 0).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    (dir, tokenizer)
}

fn shared() -> &'static Tokenizer {
    #[allow(clippy::disallowed_types, reason = "a test may wait: its runner has a deadline")]
    static SHARED: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(|| demo(DemoArch::Qwen3).1);
    &SHARED
}

fn stream_all(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> (String, Vec<String>) {
    let mut stream = tokenizer.stream(skip);
    let mut pieces: Vec<String> = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    let certain = pieces.clone();
    pieces.extend(stream.finish().unwrap());
    (pieces.concat(), certain)
}

/// What a prompt says for certain, and what an output says after it: together all that both say.
pub fn prompt_and_output(tokenizer: &Tokenizer, (prompt, output): (&[u32], &[u32]), skip: bool) -> (String, String) {
    let mut stream = tokenizer.stream(skip);
    let certain: String = prompt.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    let mut stream = tokenizer.stream_after(prompt, skip);
    let mut text: String = output.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    text.extend(stream.finish().unwrap());
    (certain, text)
}

#[test]
fn llama_prompts_begin_with_bos_and_qwens_do_not() {
    let (_dir, llama) = demo(DemoArch::Llama);
    let bos = llama.token_id("<|begin|>").unwrap();
    assert_eq!(llama.encode("hello", true).unwrap()[0], bos);
    assert_ne!(llama.encode("hello", false).unwrap()[0], bos);
    assert_ne!(shared().encode("hello", true).unwrap()[0], bos);
    // a chat prompt spells its special tokens out; they are one token each
    assert_eq!(llama.encode("<|begin|><|end|>", false).unwrap(), [0, 1]);
}

#[test]
fn llama_classes_obey_add_bos_token() {
    let (dir, _) = demo(DemoArch::Qwen3);
    let config =
        r#"{"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": true, "bos_token": {"content": "<|begin|>"}}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("<|begin|>x", true).unwrap().iter().filter(|id| **id == 0).count(), 1);
    assert_eq!(tokenizer.encode("x", true).unwrap()[0], 0);
}

#[test]
fn the_end_token_is_the_one_that_the_configuration_names() {
    let (dir, tokenizer) = demo(DemoArch::Qwen3);
    assert_eq!(tokenizer.end_token(), Some(1));
    assert_eq!(tokenizer.ids_end(), tokenizer.vocab_size());
    for (eos, id) in [(json!({"content": "<|turn|>"}), Some(2)), (json!("<|nowhere|>"), None), (Value::Null, None)] {
        std::fs::write(dir.path().join("tokenizer_config.json"), json!({"eos_token": eos}).to_string()).unwrap();
        assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().end_token(), id);
    }
}

#[test]
fn a_prompt_is_never_cut_or_padded() {
    let (dir, _) = demo(DemoArch::Qwen3);
    let path = dir.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = serde_json::json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 3, "pad_type_id": 0, "pad_token": "<|pad|>"});
    std::fs::write(&path, json.to_string()).unwrap();
    let text = "one two three four five six seven";
    let ids = Tokenizer::from_dir(dir.path()).unwrap().encode(text, true).unwrap();
    assert_eq!(ids, shared().encode(text, true).unwrap());
}

#[test]
fn where_the_library_panics_over_a_text_the_text_fails_and_the_next_does_not() {
    let (dir, _) = demo(DemoArch::Qwen3);
    let path = dir.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let parts = json!([{"SpecialToken": {"id": "<|gone|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    json["post_processor"] =
        json!({"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}});
    json["decoder"] = json!({"type": "Strip", "content": "h", "start": 1, "stop": 1});
    std::fs::write(&path, json.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let refused = tokenizer.encode("h", true).unwrap_err().to_string();
    assert!(refused.starts_with("the text cannot be encoded: the engine panicked: "), "{refused}");
    let [bad, good] = ["h", "b"].map(|text| tokenizer.encode(text, false).unwrap());
    assert!(matches!(tokenizer.decode(&bad, true), Err(TokenizerError::Decode(_))));
    assert!(matches!(tokenizer.stream(true).push(bad[0]), Err(TokenizerError::Decode(_))));
    assert_eq!((tokenizer.decode(&good, true).unwrap().as_str(), tokenizer.token_text(bad[0]).as_str()), ("b", ""));
}

#[test]
fn the_byte_alphabet_is_the_librarys() {
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut bytes: Vec<u8> = alphabet.iter().map(|c| byte_of_char(*c).unwrap()).collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    assert_eq!((byte_of_char('Ġ'), byte_of_char('Ċ'), byte_of_char('好')), (Some(b' '), Some(b'\n'), None));
}

#[test]
fn a_character_of_several_tokens_comes_out_whole() {
    let ids = shared().encode("a🦀é漢", false).unwrap();
    let (text, pieces) = stream_all(shared(), &ids, true);
    assert!(ids.len() > 4 && text == "a🦀é漢");
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
}

#[test]
fn special_tokens_are_skipped_or_shown() {
    let ids = shared().encode("x<|end|>y", false).unwrap();
    assert_eq!(stream_all(shared(), &ids, true).0, "xy");
    assert_eq!(stream_all(shared(), &ids, false).0, "x<|end|>y");
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Tokenizer::from_dir(dir.path()).unwrap_err().to_string().contains("tokenizer.json"));
    for bytes in [&b"{"[..], b"\xff\xfe", b"{\"model\": 1}", b"[]", b"{\"decoder\": {\"type\" 1}}"] {
        std::fs::write(dir.path().join("tokenizer.json"), bytes).unwrap();
        assert!(matches!(Tokenizer::from_dir(dir.path()), Err(TokenizerError::Parse { .. })));
    }
}

/// A SentencePiece-like tokenizer: blanks as `▁`, unknown characters as byte tokens, the leading blank stripped.
fn sentencepiece() -> Tokenizer {
    let strip = serde_json::json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let replace = serde_json::json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    with_decoder(
        &serde_json::json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}),
    )
}

fn with_decoder(decoder: &Value) -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for token in ["<unk>", "<s>", "▁", "a", "b", "▁a", "▁b"] {
        vocab.insert(token.to_owned(), vocab.len().into());
    }
    for byte in 0..=255 {
        vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
    }
    let special = json!({"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    let json = serde_json::json!({"version": "1.0", "added_tokens": [special],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": decoder,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": ["▁ a", "▁ b"]}});
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::from_dir(dir.path()).unwrap()
}

/// A word with its blank and one without are two words to a grammar, and in logprobs.
#[test]
fn a_tokens_own_blank_is_told_where_only_the_decoder_knows() {
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    for tokenizer in [sentencepiece(), with_decoder(&metaspace)] {
        let text = |token: &str| tokenizer.token_text(tokenizer.token_id(token).unwrap());
        let told = ["b", "▁b", "a", "▁a", "▁", "<s>"].map(text);
        assert_eq!(told, ["b", " b", "a", " a", " ", "<s>"]);
    }
}

proptest! {
    /// Whatever the text, it is not longer than what its tokens may stand for.
    #[test]
    fn no_text_is_longer_than_its_tokens_allow(text in "[ab é漢🦀]{0,30}|\\PC{0,30}|(\u{1112}\u{1161}\u{11AB}|e\u{301}| {9}){0,9}") {
        for tokenizer in [shared(), &sentencepiece()] {
            let tokens = tokenizer.encode(&text, false).unwrap().len();
            prop_assert!(text.len() <= tokenizer.text_bytes_max(tokens).unwrap());
        }
    }

    /// Any tokens at all, malformed characters included: the stream is the text.
    #[test]
    fn pieces_put_together_are_the_text(ids in proptest::collection::vec(0u32..1600, 0..60), skip in any::<bool>()) {
        prop_assert_eq!(stream_all(shared(), &ids, skip).0, shared().decode(&ids, skip).unwrap());
    }

    /// Any text: nothing half is ever shown, and nothing is missing.
    #[test]
    fn text_survives_the_stream(text in "\\PC{0,40}") {
        let ids = shared().encode(&text, false).unwrap();
        let (out, pieces) = stream_all(shared(), &ids, true);
        prop_assert_eq!(&out, &text);
        let half_shown = pieces.iter().any(|piece| piece.contains(char::REPLACEMENT_CHARACTER));
        prop_assert!(!half_shown || text.contains(char::REPLACEMENT_CHARACTER));
    }

    /// The same for pieces with byte fallback, whose text the library decodes alike; nothing half is shown.
    #[test]
    fn sentencepiece_text_survives_the_stream(text in "[ab é漢🦀]{0,30}|\\PC{0,30}") {
        let tokenizer = sentencepiece();
        let ids = tokenizer.encode(&text, true).unwrap();
        let (out, pieces) = stream_all(&tokenizer, &ids, true);
        prop_assert_eq!(&out, &text);
        prop_assert_eq!(&tokenizer.inner.decode(&ids, true).unwrap(), &text);
        prop_assert!(text.contains('\u{FFFD}') || !pieces.concat().contains('\u{FFFD}'), "{:?}", pieces);
    }

    /// Any pieces at all, malformed characters included: the stream is the text.
    #[test]
    fn sentencepieces_put_together_are_the_text(ids in proptest::collection::vec(0u32..263, 0..60)) {
        let tokenizer = sentencepiece();
        prop_assert_eq!(stream_all(&tokenizer, &ids, true).0, tokenizer.decode(&ids, true).unwrap());
    }

    /// The output's text is what it adds to the prompt's, its first blank too: any pieces, cut anywhere, special ones at the cut.
    #[test]
    fn an_output_adds_to_its_prompt_what_it_says(
        ids in proptest::collection::vec(0u32..263, 0..30),
        marks in 0usize..20,
        at in any::<proptest::sample::Index>(),
    ) {
        let tokenizer = sentencepiece();
        let (prompt, output) = ids.split_at(at.index(ids.len() + 1));
        let prompt = [prompt, &vec![1; marks]].concat();
        let (certain, text) = prompt_and_output(&tokenizer, (&prompt, output), true);
        prop_assert_eq!(certain + &text, tokenizer.decode(&[&prompt, output].concat(), true).unwrap());
    }

    /// The same of a text and the library's own decoder.
    #[test]
    fn a_blank_after_a_prompt_is_kept(text in "[ab é漢🦀]{1,12}", at in any::<proptest::sample::Index>()) {
        let metaspace = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        for tokenizer in [sentencepiece(), with_decoder(&metaspace)] {
            let ids = tokenizer.encode(&text, true).unwrap();
            let (prompt, output) = ids.split_at(at.index(ids.len() + 1));
            let whole = |ids: &[u32]| tokenizer.inner.decode(ids, true).unwrap();
            let (certain, text) = prompt_and_output(&tokenizer, (prompt, output), true);
            prop_assert_eq!(certain.clone() + &text, whole(&ids));
            let is_certain = certain == whole(prompt) || whole(prompt).ends_with(char::REPLACEMENT_CHARACTER);
            prop_assert!(is_certain, "{:?}", certain);
        }
    }

    /// A decoder that only the library knows: its text comes through a window.
    #[test]
    fn text_of_other_decoders_survives_the_stream(text in "[ab]{1,6}( [ab]{1,6}){0,5}") {
        let metaspace = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        let tokenizer = with_decoder(&metaspace);
        let ids = tokenizer.encode(&text, true).unwrap();
        prop_assert_eq!(&stream_all(&tokenizer, &ids, true).0, &tokenizer.decode(&ids, true).unwrap());
        prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
}
