//! Which tokens of a GGUF file end an output. Its keys name some of them, and files of chat models often leave out the one that ends a turn;
//! llama.cpp, for which such files are made, goes by the names of tokens besides. Pure.

use std::collections::BTreeSet;

use crate::weights::{Gguf, GgufValue};

/// Type of a token that stands for itself and is no text.
const CONTROL: u64 = 3;
/// `tokenizer.ggml.*_token_id` of tokens that end an output; of those of a text with a hole, the ones that another file would follow.
const KEYS: [&str; 6] = ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"];
/// What llama.cpp knows tokens by that end an output, if they are control tokens.
const NAMES: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];
/// The same where no key names them: what pads a text with a hole, and what begins a repository or a file beside it.
const FILE_NAMES: [&str; 11] = [
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Ids of all of them, in order.
pub(super) fn of_gguf(gguf: &Gguf) -> Vec<u32> {
    let tokens = gguf.list("tokenizer.ggml.tokens").unwrap_or_default();
    let kinds = gguf.list("tokenizer.ggml.token_type").unwrap_or_default();
    let name = |id: u32| tokens.get(id as usize).and_then(GgufValue::as_str).unwrap_or_default();
    let by_key = |key: &&str| u32::try_from(gguf.number(&format!("tokenizer.ggml.{key}_token_id"))?).ok();
    let control = (0u32..).zip(kinds).filter(|(_, kind)| kind.as_u64() == Some(CONTROL)).map(|(id, _)| id);
    let named = control.filter(|id| NAMES.contains(&name(*id)) || FILE_NAMES.contains(&name(*id)));
    let mut ends: BTreeSet<u32> = KEYS.iter().filter_map(by_key).chain(named).collect();
    let has = |wanted: &str| ends.iter().any(|id| name(*id) == wanted);
    // in some families one of the names ends a part of an answer, or is a text like any other
    let of_a_part = (has("<|call|>") || has("<|calls|>")) && (has("<|return|>") || has("<|flush|>"));
    let of_a_text = has("<|tool_response>") || has("<|plamo:eos|>");
    ends.retain(|id| match name(*id) {
        "<|end|>" => !of_a_part,
        "</s>" => !of_a_text,
        _ => true,
    });
    ends.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::gguf::Builder;

    fn list(kind: u32, items: &[Vec<u8>]) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes(), &items.concat()].concat()
    }

    /// Of a file with these tokens and their types, and these ids by key.
    fn ends(tokens: &[(&str, i32)], keys: &[(&str, u32)]) -> Vec<u32> {
        let text = |name: &str| [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
        let names: Vec<Vec<u8>> = tokens.iter().map(|token| text(token.0)).collect();
        let kinds: Vec<Vec<u8>> = tokens.iter().map(|token| token.1.to_le_bytes().to_vec()).collect();
        let file = Builder::default().pair("tokenizer.ggml.tokens", 9, &list(8, &names));
        let mut file = file.pair("tokenizer.ggml.token_type", 9, &list(5, &kinds));
        for (key, id) in keys {
            file = file.u32(&format!("tokenizer.ggml.{key}_token_id"), *id);
        }
        of_gguf(&Gguf::parse(&file.build()).unwrap())
    }

    #[test]
    fn control_tokens_end_by_their_names_and_any_token_by_its_key() {
        let chat = [("a", 1), ("<|endoftext|>", 3), ("<|im_start|>", 3), ("<|im_end|>", 3), ("<|eot_id|>", 1)];
        assert_eq!(ends(&chat, &[("eos", 1)]), [1, 3], "a key alone would miss the end of a turn");
        assert_eq!(ends(&chat, &[("eos", 4), ("eot", 0), ("eom", 4)]), [0, 1, 3, 4]);
        assert_eq!(ends(&[], &[("eos", 7)]), [7], "a file without a vocabulary");
    }

    #[test]
    fn of_holes_and_tools_only_what_llama_cpp_ends_at() {
        let code = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"];
        assert_eq!(ends(&code.map(|name| (name, 3)), &[]), [2, 3, 4]);
        assert!(ends(&code.map(|name| (name, 4)), &[]).is_empty(), "they are texts there");
        assert!(ends(&["<tool_call>", "</tool_call>", "<think>"].map(|name| (name, 3)), &[]).is_empty());
    }

    #[test]
    fn what_ends_a_part_of_an_answer_does_not_end_it() {
        let names = |names: &[&'static str]| names.iter().map(|name| (*name, 3)).collect::<Vec<_>>();
        assert_eq!(ends(&names(&["<|return|>", "<|end|>"]), &[]), [0, 1]);
        assert_eq!(ends(&names(&["<|return|>", "<|end|>", "<|call|>"]), &[("eos", 1)]), [0, 2]);
        assert_eq!(ends(&names(&["<|flush|>", "<|end|>", "<|calls|>"]), &[]), [0, 2]);
        assert_eq!(ends(&names(&["</s>", "<|tool_response>", "<eos>"]), &[]), [1, 2]);
    }
}
