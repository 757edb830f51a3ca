//! Tokens of published vocabularies: a GGUF file, beside it texts (`.inp`) and the tokens that the model's own tokenizer makes of each
//! (`.out`).

use std::path::Path;

use engine::tokenizer::Tokenizer;

use crate::{files, folder};

/// One or more for each way to cut words that is read: whatever else the folder holds must be refused by name.
const READ: [&str; 6] = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35"];
/// Marks that these texts have apart from their letters, and what Qwen makes of both before it looks for words (NFC). llama.cpp, which made the
/// tokens beside them, leaves them apart.
const COMPOSED: [(&str, &str); 2] = [("e\u{301}", "é"), ("a\u{300}", "à")];

/// Texts and their tokens.
fn cases(vocabulary: &Path) -> Vec<(String, Vec<u32>)> {
    let beside = |end: &str| std::fs::read_to_string(format!("{}.{end}", vocabulary.display())).unwrap();
    let (texts, tokens) = (beside("inp"), beside("out"));
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let tokens = tokens.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    let tokens: Vec<Vec<u32>> = tokens.collect();
    // the last separator ends the file
    assert!(texts.len() == tokens.len() + 1 && texts.last() == Some(&""), "{}", vocabulary.display());
    texts.into_iter().map(str::to_owned).zip(tokens).collect()
}

/// The tokens that Qwen has for a text whose marks stand apart, if they do: those of the composed one.
fn composed(tokenizer: &Tokenizer, name: &str, text: &str) -> Option<Vec<u32>> {
    let whole = COMPOSED.iter().fold(text.to_owned(), |text, (apart, whole)| text.replace(apart, whole));
    (name.starts_with("qwen") && whole != text).then(|| tokenizer.encode(&whole, false).unwrap())
}

#[test]
fn texts_become_the_tokens_of_the_models_own_tokenizers() {
    let (mut read, mut wrong) = (Vec::new(), Vec::new());
    for texts in files(folder(), ".gguf.inp") {
        let path = texts.with_extension("");
        let name = path.file_stem().unwrap().to_string_lossy().replace("ggml-vocab-", "");
        let tokenizer = match Tokenizer::from_dir(&path) {
            Ok(tokenizer) => tokenizer,
            Err(error) => {
                assert!(error.to_string().contains("put a tokenizer.json beside it"), "{name}: {error}");
                continue;
            }
        };
        for (text, want) in cases(&path) {
            let want = composed(&tokenizer, &name, &text).unwrap_or(want);
            let got = tokenizer.encode(&text, false).unwrap();
            if got != want {
                wrong.push(format!("{name}: {text:?}\n  {got:?}\n  {want:?}"));
            }
        }
        read.push(name);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(read, READ);
}
