//! A model's vocabulary as the grammar library wants it: the bytes of every token, special ones marked, and the tokens that end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::codec::TextCodec;
use crate::model::ModelInfo;

/// The vocabulary.
///
/// # Errors
/// What of this model's vocabulary the library cannot take.
pub fn environment(codec: &dyn TextCodec, info: &ModelInfo) -> Result<TokEnv, String> {
    let vocab_size = u32::try_from(info.vocab_size).map_err(|_| "its vocabulary is too large".to_owned())?;
    let ends: Vec<u32> = info.eos_token_ids.iter().copied().filter(|id| *id < vocab_size).collect();
    let Some(end) = ends.first() else { return Err("it has no token that ends an output".into()) };
    let words: Vec<Vec<u8>> = (0..vocab_size).map(|id| word(codec, id)).collect();
    let rx =
        TokRxInfo { vocab_size, tok_eos: *end, tok_bos: None, tok_pad: None, tok_unk: None, tok_end_of_turn: None };
    // The library asserts what it expects of a vocabulary; a model's files are not ours.
    let build = || Ok(TokTrie::from(&rx, &words).with_eos_tokens(&ends));
    let trie = catch_unwind(AssertUnwindSafe(build)).map_err(|error| error.to_string())?;
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// Special tokens are marked by a byte that no text has: a grammar's texts never match one.
fn word(codec: &dyn TextCodec, id: u32) -> Vec<u8> {
    let bytes = codec.token_bytes(id);
    if codec.is_special(id) { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat() } else { bytes }
}
