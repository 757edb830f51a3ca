//! Text to tokens and back, as the server needs it. The server knows no tokenizer; tests bring a small codec of their own.

use serde_json::{Map, Value};
use thiserror::Error;

pub use crate::chat_template::ToolFormat;
pub use hf::HfCodec;

mod hf;

/// What can go wrong between text and tokens.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CodecError {
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
    #[error("the model has no chat template; use /v1/completions, or put a chat_template.jinja into its folder")]
    NoTemplate,
    #[error("the chat template refused the messages: {0}")]
    Template(String),
    /// Not the chat's fault: it may be tried again.
    #[error("the chat cannot be rendered now: {0}")]
    Renderer(String),
}

/// A model's tokenizer and chat template.
pub trait TextCodec: Send + Sync {
    /// Tokens of a prompt; `special`: with the tokens that the model expects around one (BOS).
    ///
    /// # Errors
    /// [`CodecError::Encode`].
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, CodecError>;

    /// Longest text, in bytes, that so many tokens may be made of; None: nobody knows, a long text may become a single token.
    fn text_bytes_max(&self, _tokens: usize) -> Option<usize> {
        None
    }

    /// Text of whole tokens; special tokens give none.
    ///
    /// # Errors
    /// [`CodecError::Decode`].
    fn decode(&self, ids: &[u32]) -> Result<String, CodecError>;

    /// One more than the highest id that a text may become; None: nobody knows.
    fn ids_end(&self) -> Option<usize> {
        None
    }

    /// The token that ends an output by the tokenizer's own files, which the model's may lack.
    fn end_token(&self) -> Option<u32> {
        None
    }

    /// Is it a control token, whose name is no text of the output?
    fn is_special(&self, id: u32) -> bool;

    /// One token as text, for logprobs; special tokens by their name.
    fn token_text(&self, id: u32) -> String;

    /// One token's bytes; a token may be a part of a character, which its text cannot show.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// A decoder for tokens from a text's beginning; `special`: special tokens show by their names.
    fn stream(&self, special: bool) -> Box<dyn TextStream>;

    /// A decoder for one request's output: it gives what prompt and output say together beyond what the prompt alone says for certain.
    fn stream_after(&self, prompt: &[u32], special: bool) -> Box<dyn TextStream>;

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// [`CodecError::NoTemplate`], [`CodecError::Template`], [`CodecError::Renderer`].
    fn chat_prompt(&self, chat: Chat<'_>) -> Result<String, CodecError>;

    /// How the model writes calls of tools, as its template shows it; nothing when it knows none.
    fn tool_format(&self) -> Option<ToolFormat>;
}

/// A conversation for the chat template.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    /// Objects of `{"role", "content"}` with text content.
    pub messages: &'a Value,
    /// Descriptions of tools that the model may call.
    pub tools: Option<&'a Value>,
    /// Further variables of the template.
    pub extra: Option<&'a Map<String, Value>>,
    /// End with the opening of the assistant's turn.
    pub opens_answer: bool,
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
