//! Text to token ids and back, through `tokenizer.json`. Encoding follows `transformers`, including who adds the
//! begin-of-sequence token. Decoding for streams lives in `stream`.

mod bounds;
mod gguf;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use thiserror::Error;
use tokenizers::Model as _;

use crate::panics::guarded;
use crate::weights;

pub use stream::StreamDecoder;

/// Why a tokenizer cannot be loaded or used.
#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a usable tokenizer: {reason}")]
    Parse { path: PathBuf, reason: String },
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
}

/// A tokenizer; cheap to clone, shared by all threads.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    /// Put in front of an encoded text that does not begin with it already.
    bos_to_add: Option<u32>,
    /// What `tokenizer_config.json` calls the end.
    end: Option<u32>,
    spelling: Spelling,
    /// Bytes of a text that a token may stand for; None: any number. Found when a long text first asks: the whole vocabulary is gone through.
    token_bytes_max: Arc<OnceLock<Option<usize>>>,
    /// A token that a text may begin with, and its text, where only the decoder knows what tokens say. Found when one is asked for.
    anchor: Arc<OnceLock<Option<(u32, String)>>>,
}

/// How tokens spell bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// Each token's bytes are its own, whatever stands around it, in the alphabet of byte-level BPE.
    ByteLevel,
    /// Each token's bytes are its own: blanks as `▁`, odd bytes as `<0xNN>`. The text loses the one blank that was put before it.
    Pieces { loses_blank: bool },
    /// The decoder looks at neighbours; only it knows.
    Decoder,
}

impl Spelling {
    fn of(decoder: Option<&tokenizers::DecoderWrapper>) -> Self {
        if matches!(decoder, Some(tokenizers::DecoderWrapper::ByteLevel(_))) {
            return Self::ByteLevel;
        }
        let json = serde_json::to_value(decoder).unwrap_or_default();
        let steps = json["decoders"].as_array().map(Vec::as_slice).unwrap_or_default();
        let blanks = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let (bytes, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
        match steps {
            [a, b, c] if (a, b, c) == (&blanks, &bytes, &fuse) => Self::Pieces { loses_blank: false },
            [a, b, c, d] if (a, b, c, d) == (&blanks, &bytes, &fuse, &strip) => Self::Pieces { loses_blank: true },
            _ => Self::Decoder,
        }
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` (and `tokenizer_config.json` where there is one) from `dir`; or the vocabulary of the GGUF file that
    /// `dir` means, unless a `tokenizer.json` lies beside it.
    ///
    /// # Errors
    /// [`TokenizerError`] naming the file.
    pub fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        let gguf = weights::gguf::find(dir);
        let dir = gguf.as_deref().and_then(Path::parent).unwrap_or(dir);
        let path = dir.join("tokenizer.json");
        if let Some(gguf) = gguf.as_deref().filter(|_| !path.is_file()) {
            return Self::from_gguf(gguf);
        }
        let bytes = read(&path)?;
        let refuse = |reason: String| TokenizerError::Parse { path: path.clone(), reason };
        let mut inner = parse(&bytes).map_err(refuse)?;
        // leftovers of training: a prompt is neither cut nor padded, as in `transformers`
        inner.with_truncation(None).map_err(|error| refuse(error.to_string()))?.with_padding(None);
        let config_path = dir.join("tokenizer_config.json");
        let config = if config_path.is_file() {
            serde_json::from_slice(&read(&config_path)?)
                .map_err(|error| TokenizerError::Parse { path: config_path, reason: error.to_string() })?
        } else {
            Value::Null
        };
        let (bos_to_add, end) = (bos_to_add(&inner, &config), named_token(&inner, &config, "eos_token"));
        Ok(Self { end, ..Self::new(inner, bos_to_add) })
    }

    fn from_gguf(path: &Path) -> Result<Self, TokenizerError> {
        let refuse = |reason: String| TokenizerError::Parse { path: path.to_owned(), reason };
        let (file, _) = weights::Gguf::open(path).map_err(|error| refuse(error.to_string()))?;
        let (json, bos_to_add) = gguf::tokenizer_json(&file).map_err(refuse)?;
        let inner = parse(json.to_string().as_bytes()).map_err(refuse)?;
        Ok(Self::new(inner, bos_to_add))
    }

    fn new(mut inner: tokenizers::Tokenizer, bos_to_add: Option<u32>) -> Self {
        // The library remembers the first 10,000 words that each thread encodes, for ever, at up to 8 KiB a word. The words of prompts have
        // no end, and a request is read on any of many threads: that grew by 11 to 55 MiB an hour, to spare a seventh of the encoding.
        // It lends its model to nobody who would change it: a copy, once, at start.
        let mut model = inner.get_model().clone();
        model.resize_cache(0);
        inner.with_model(model);
        let spelling = Spelling::of(inner.get_decoder());
        let (token_bytes_max, anchor) = (Arc::default(), Arc::default());
        Self { inner: Arc::new(inner), bos_to_add, end: None, spelling, token_bytes_max, anchor }
    }

    /// Token ids of `text`. `add_special_tokens` is for prompts; a rendered chat already holds its own.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the tokenizer cannot take the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = library(|| self.inner.encode_fast(text, add_special_tokens)).map_err(TokenizerError::Encode)?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(bos) = self.bos_to_add.filter(|bos| add_special_tokens && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Longest text, in bytes, that so many tokens may be made of; None: there is no such bound.
    pub fn text_bytes_max(&self, tokens: usize) -> Option<usize> {
        let one = self.token_bytes_max.get().copied().unwrap_or_else(|| {
            let found = bounds::token_bytes_max(self);
            // whoever asks in the same moment finds the same
            let _ = self.token_bytes_max.set(found);
            found
        });
        Some(one?.saturating_mul(tokens))
    }

    /// Text of `ids`; ids outside the vocabulary have none.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        if let Spelling::Pieces { .. } = self.spelling {
            // The library gives up every byte of a run in which one is wrong; a stream could not know that in time.
            let mut stream = self.stream(skip_special_tokens);
            let pieces: Vec<Option<String>> = ids.iter().map(|id| stream.push(*id)).collect::<Result<_, _>>()?;
            let text: String = pieces.into_iter().flatten().collect();
            return Ok(text + &stream.finish()?.unwrap_or_default());
        }
        library(|| self.inner.decode(ids, skip_special_tokens)).map_err(TokenizerError::Decode)
    }

    /// A decoder for one stream of tokens.
    pub fn stream(&self, skip_special_tokens: bool) -> StreamDecoder {
        StreamDecoder::new(self.clone(), skip_special_tokens)
    }

    /// A decoder for the tokens that follow a prompt: its text is what all of them have beyond the prompt's.
    pub fn stream_after(&self, prompt: &[u32], skip_special_tokens: bool) -> StreamDecoder {
        StreamDecoder::after(self, prompt, skip_special_tokens)
    }

    /// Text of one token by itself, for logprobs; a token that is part of a character gives U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }

    /// Bytes of one token by itself, for logprobs and grammars.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.spelling {
            Spelling::Decoder => self.decoded_text(id).into_bytes(),
            Spelling::ByteLevel | Spelling::Pieces { .. } => self.bytes_of(id, false),
        }
    }

    /// What a token adds to a text: at the beginning of one, decoders strip blanks that are the token's own.
    fn decoded_text(&self, id: u32) -> String {
        let after = |(anchor, text): &(u32, String)| {
            let both = self.decode(&[*anchor, id], false).ok()?;
            both.strip_prefix(text.as_str()).filter(|added| !added.is_empty()).map(str::to_owned)
        };
        let added = self.anchor().and_then(after);
        added.unwrap_or_else(|| self.decode(&[id], false).unwrap_or_default())
    }

    fn anchor(&self) -> Option<&(u32, String)> {
        if self.anchor.get().is_none() {
            let found = self.encode("a", false).ok().and_then(|ids| ids.last().copied());
            let found = found.and_then(|id| Some((id, self.decode(&[id], false).ok()?)));
            // whoever asks in the same moment finds the same
            let _ = self.anchor.set(found.filter(|(_, text)| !text.is_empty()));
        }
        self.anchor.get()?.as_ref()
    }

    /// Size of the vocabulary with added tokens.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// One more than the highest id; ids may have gaps.
    pub fn ids_end(&self) -> usize {
        self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// The token that ends a text by the tokenizer's own files; the model's may name others.
    pub fn end_token(&self) -> Option<u32> {
        self.end
    }

    /// Id of a token spelled exactly so.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Is it a control token?
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// Bytes of one token of a vocabulary whose tokens have bytes of their own.
    fn bytes_of(&self, id: u32, skip_special_tokens: bool) -> Vec<u8> {
        let added = self.inner.get_added_vocabulary();
        let token = added.simple_id_to_token(id).or_else(|| self.inner.get_model().id_to_token(id));
        let Some(token) = token else { return Vec::new() };
        if skip_special_tokens && added.is_special_token(&token) {
            return Vec::new();
        }
        if self.spelling != Spelling::ByteLevel {
            return byte_of_piece(&token).map_or_else(|| token.replace('▁', " ").into_bytes(), |byte| vec![byte]);
        }
        // a token with a character outside the byte alphabet stands for itself, as in the library's decoder
        let bytes: Option<Vec<u8>> = token.chars().map(byte_of_char).collect();
        bytes.unwrap_or_else(|| token.into_bytes())
    }
}

fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    library(|| tokenizers::Tokenizer::from_bytes(json))
}

/// The library panics over some parts that are malformed, and over some only when it comes to use them: a template whose special token is
/// nowhere, a decoder that strips more than a token has. It keeps no state that could be left half made: words are not remembered.
fn library<T>(part: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    guarded(|| part().map_err(|error| error.to_string()))
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    std::fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })
}

/// Most tokenizers add their begin token in `tokenizer.json` itself. The Llama classes obey `add_bos_token` of
/// `tokenizer_config.json` even where `tokenizer.json` adds none.
fn bos_to_add(tokenizer: &tokenizers::Tokenizer, config: &Value) -> Option<u32> {
    let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    if !class.starts_with("LlamaTokenizer") || config.get("add_bos_token") != Some(&Value::Bool(true)) {
        return None;
    }
    named_token(tokenizer, config, "bos_token")
}

/// A token that `tokenizer_config.json` names, as text or as an object with `content`.
fn named_token(tokenizer: &tokenizers::Tokenizer, config: &Value, name: &str) -> Option<u32> {
    let token = config.get(name)?;
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    tokenizer.token_to_id(text)
}

/// `<0xNN>`.
fn byte_of_piece(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
}

/// Inverse of the byte-level alphabet: printable bytes stand for themselves, the other 68 for U+0100 onwards, in order.
fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
