//! Text to tokens and back, as the server needs it. The server knows no tokenizer; tests bring a small codec of their own.

use serde_json::{Map, Value};
use thiserror::Error;

pub use hf::HfCodec;

mod hf;

/// What can go wrong between text and tokens.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CodecError {
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
    #[error("the model has no chat template; use /v1/completions")]
    NoTemplate,
    #[error("the chat template refused the messages: {0}")]
    Template(String),
}

/// A model's tokenizer and chat template.
pub trait TextCodec: Send + Sync {
    /// Tokens of a prompt; `special`: with the tokens that the model expects around one (BOS).
    ///
    /// # Errors
    /// [`CodecError::Encode`].
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, CodecError>;

    /// Text of whole tokens; special tokens give none.
    ///
    /// # Errors
    /// [`CodecError::Decode`].
    fn decode(&self, ids: &[u32]) -> Result<String, CodecError>;

    /// One token as text, for logprobs; special tokens by their name.
    fn token_text(&self, id: u32) -> String;

    /// One token's bytes; a token may be a part of a character, which its text cannot show.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// A decoder for one request's output.
    fn stream(&self) -> Box<dyn TextStream>;

    /// The prompt for a conversation: messages of `{"role", "content"}` with text content; `extra`: further variables of
    /// the template.
    ///
    /// # Errors
    /// [`CodecError::NoTemplate`], [`CodecError::Template`].
    fn chat_prompt(&self, messages: &Value, extra: Option<&Map<String, Value>>) -> Result<String, CodecError>;
}

/// Decodes tokens as they come; text that ends in the middle of a character is held back.
pub trait TextStream: Send {
    /// The text that this token completes; may be empty.
    ///
    /// # Errors
    /// [`CodecError::Decode`].
    fn push(&mut self, id: u32) -> Result<String, CodecError>;

    /// What is still held back, at the end.
    ///
    /// # Errors
    /// [`CodecError::Decode`].
    fn finish(&mut self) -> Result<String, CodecError>;
}
