//! The codec of a Hugging Face model folder: its tokenizer and its chat template.

use std::path::Path;

use crate::chat_template::{ChatInput, ChatTemplate, ChatTemplateError};
use crate::codec::{Chat, CodecError, TextCodec, TextStream, ToolFormat};
use crate::core::LoadFailure;
use crate::tokenizer::{StreamDecoder, Tokenizer};

/// Tokenizer and template of one folder.
pub struct HfCodec {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl HfCodec {
    /// Reads `tokenizer.json` and the chat template, which a base model may lack.
    ///
    /// # Errors
    /// The tokenizer's or the template's own error, naming the file.
    pub fn from_dir(dir: &Path) -> Result<Self, LoadFailure> {
        Ok(Self { tokenizer: Tokenizer::from_dir(dir)?, template: ChatTemplate::from_dir(dir)? })
    }

    /// As [`Self::from_dir`], the template rendered in processes apart ([`ChatTemplate::sandboxed`]).
    ///
    /// # Errors
    /// As [`Self::from_dir`], and no such process can be started.
    pub fn sandboxed(dir: &Path) -> Result<Self, LoadFailure> {
        Ok(Self { tokenizer: Tokenizer::from_dir(dir)?, template: ChatTemplate::sandboxed(dir)? })
    }
}

impl TextCodec for HfCodec {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, CodecError> {
        self.tokenizer.encode(text, special).map_err(|e| CodecError::Encode(e.to_string()))
    }

    fn text_bytes_max(&self, tokens: usize) -> Option<usize> {
        self.tokenizer.text_bytes_max(tokens)
    }

    fn decode(&self, ids: &[u32]) -> Result<String, CodecError> {
        self.tokenizer.decode(ids, true).map_err(|e| CodecError::Decode(e.to_string()))
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer.is_special(id)
    }

    fn token_text(&self, id: u32) -> String {
        self.tokenizer.token_text(id)
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(id)
    }

    fn stream(&self, special: bool) -> Box<dyn TextStream> {
        Box::new(self.tokenizer.stream(!special))
    }

    fn stream_after(&self, prompt: &[u32], special: bool) -> Box<dyn TextStream> {
        Box::new(self.tokenizer.stream_after(prompt, !special))
    }

    fn tool_format(&self) -> Option<ToolFormat> {
        self.template.as_ref()?.tool_format()
    }

    fn chat_prompt(&self, chat: Chat<'_>) -> Result<String, CodecError> {
        let template = self.template.as_ref().ok_or(CodecError::NoTemplate)?;
        let now = jiff::Zoned::now().datetime();
        let Chat { messages, tools, extra, opens_answer } = chat;
        let input = ChatInput { messages, tools, add_generation_prompt: opens_answer, extra, now };
        template.render(input).map_err(|e| match e {
            ChatTemplateError::NoTemplate => CodecError::NoTemplate,
            ChatTemplateError::Renderer(error) => CodecError::Renderer(error.to_string()),
            other => CodecError::Template(other.to_string()),
        })
    }
}

impl TextStream for StreamDecoder {
    fn push(&mut self, id: u32) -> Result<String, CodecError> {
        let text = StreamDecoder::push(self, id).map_err(|e| CodecError::Decode(e.to_string()))?;
        Ok(text.unwrap_or_default())
    }

    fn finish(&mut self) -> Result<String, CodecError> {
        let text = StreamDecoder::finish(self).map_err(|e| CodecError::Decode(e.to_string()))?;
        Ok(text.unwrap_or_default())
    }
}
