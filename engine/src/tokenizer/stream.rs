//! Tokens in, text out, a piece as soon as it is certain. A character may be spread over several tokens; a stream never
//! shows half of one. Where tokens have bytes of their own, the pieces put together are exactly the text of all tokens at once.

use super::{Spelling, Tokenizer, TokenizerError};

/// Tokens held back at most while a text ends in U+FFFD: longer than any character, short enough to bound the work.
const HELD_TOKENS_MAX: usize = 16;

/// Of a prompt so many tokens with a text are looked at, and so many in all: more than any character has bytes, and than any template
/// writes control tokens in a row.
const PROMPT_TOKENS: usize = 8;
const PROMPT_TOKENS_MAX: usize = 64;

/// Decodes one stream of tokens.
#[derive(Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Bytes of an unfinished character (at most 3), and whether a blank that comes next was only put before the text.
    Bytes { pending: Vec<u8>, loses_blank: bool },
    /// For decoders that look at neighbours: the last tokens, of which the first
    /// `shown` have been given out as `shown_text`.
    Window { ids: Vec<u32>, shown: usize, shown_text: String },
}

impl StreamDecoder {
    pub(super) fn new(tokenizer: Tokenizer, skip_special_tokens: bool) -> Self {
        let bytes = |loses_blank| State::Bytes { pending: Vec::new(), loses_blank };
        let state = match tokenizer.spelling {
            Spelling::ByteLevel => bytes(false),
            Spelling::Pieces { loses_blank } => bytes(loses_blank),
            Spelling::Decoder => State::Window { ids: Vec::new(), shown: 0, shown_text: String::new() },
        };
        Self { tokenizer, skip_special_tokens, state }
    }

    /// One for what follows a prompt whose text was told already: a blank behind it is one of the text, and a character that it ends in
    /// the middle of is completed. Its end says all that matters.
    pub(super) fn after(tokenizer: &Tokenizer, prompt: &[u32], skip_special_tokens: bool) -> Self {
        let shows = |id: u32| !(skip_special_tokens && tokenizer.is_special(id));
        let last = prompt.len().saturating_sub(PROMPT_TOKENS_MAX);
        let places = (last..prompt.len()).rev().filter(|at| shows(prompt[*at]));
        let from = places.take(PROMPT_TOKENS).last().unwrap_or(last);
        let mut stream = Self::new(tokenizer.clone(), skip_special_tokens);
        match prompt[from..].iter().try_for_each(|id| stream.push(*id).map(drop)) {
            Ok(()) => stream,
            // a prompt that the decoder cannot read has no text that the output could go on with
            Err(_) => Self::new(tokenizer.clone(), skip_special_tokens),
        }
    }

    /// Takes the next token; gives the text that is now certain, if any.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the tokenizer's decoder fails.
    pub fn push(&mut self, token: u32) -> Result<Option<String>, TokenizerError> {
        match &mut self.state {
            State::Bytes { pending, loses_blank } => {
                let bytes = self.tokenizer.bytes_of(token, self.skip_special_tokens);
                let blanks = usize::from(*loses_blank && bytes.first() == Some(&b' '));
                *loses_blank &= bytes.is_empty();
                pending.extend(&bytes[blanks..]);
                Ok(take_certain(pending))
            }
            State::Window { ids, .. } => {
                ids.push(token);
                self.slide(false)
            }
        }
    }

    /// The rest of the text, when no token follows; an unfinished character becomes U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<Option<String>, TokenizerError> {
        match &mut self.state {
            State::Bytes { pending, .. } => {
                let rest = String::from_utf8_lossy(pending).into_owned();
                pending.clear();
                Ok(Some(rest).filter(|rest| !rest.is_empty()))
            }
            State::Window { .. } => self.slide(true),
        }
    }

    /// Decodes the window and gives what is new; the tokens given out last stay as context for the next ones.
    fn slide(&mut self, all: bool) -> Result<Option<String>, TokenizerError> {
        let State::Window { ids, shown, shown_text } = &mut self.state else { return Ok(None) };
        let text = self.tokenizer.decode(ids, self.skip_special_tokens)?;
        let held = ids.len() - *shown;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && !all && held < HELD_TOKENS_MAX {
            return Ok(None);
        }
        // where the decoder changed its mind about the past, only what is longer can still be told
        let new = text.get(shown_text.len()..).unwrap_or_default().to_owned();
        if new.is_empty() && !all && held < HELD_TOKENS_MAX {
            return Ok(None);
        }
        ids.drain(..*shown);
        *shown = ids.len();
        *shown_text = self.tokenizer.decode(ids, self.skip_special_tokens)?;
        Ok(Some(new).filter(|new| !new.is_empty()))
    }
}

/// Takes from the front of `pending` all that more bytes cannot change, malformed bytes as U+FFFD.
fn take_certain(pending: &mut Vec<u8>) -> Option<String> {
    let mut text = String::new();
    let mut rest = pending.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(len) = error.error_len() else {
                    rest = after;
                    break;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &after[len..];
            }
        }
    }
    *pending = rest.to_vec();
    Some(text).filter(|text| !text.is_empty())
}
