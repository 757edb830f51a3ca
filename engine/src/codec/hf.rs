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

    fn ids_end(&self) -> Option<usize> {
        Some(self.tokenizer.ids_end())
    }

    fn end_token(&self) -> Option<u32> {
        self.tokenizer.end_token()
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Hermes's marks as tokens that a text leaves out, as some models have them: calls are looked for between them.
    #[test]
    fn marks_of_calls_that_are_special_tokens_are_one_token_each_and_show_where_asked() {
        let dir = tempfile::tempdir().unwrap();
        let marks = [(2, "<tool_call>"), (3, "</tool_call>")];
        let added = marks.map(|(id, mark)| {
            json!({"id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        });
        let tokenizer = json!({"version": "1.0", "added_tokens": added, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": false},
            "model": {"type": "BPE", "vocab": {"{": 0, "}": 1}, "merges": []}});
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let codec = HfCodec::from_dir(dir.path()).unwrap();
        for (id, mark) in marks {
            assert_eq!(codec.encode(mark, false).unwrap(), [id]);
            assert!(codec.is_special(id));
        }
        let said = |special| {
            let mut stream = codec.stream_after(&[0], special);
            let pieces: String = [2, 0, 1, 3].map(|id| stream.push(id).unwrap()).concat();
            pieces + &stream.finish().unwrap()
        };
        assert_eq!((said(true).as_str(), said(false).as_str()), ("<tool_call>{}</tool_call>", "{}"));
    }
}
