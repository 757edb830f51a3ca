//! One choice's text: tokens become text, stop strings end it. Text that may be the beginning of a stop string is held back
//! until it is known not to be one. Pure.

use std::sync::Arc;

use crate::codec::{CodecError, TextStream};

/// How tokens become the text that is shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextRules {
    pub stops: Arc<[String]>,
    /// The stop string that ends the text is a part of it, and so is a stop token's text.
    pub keeps_stop: bool,
    /// Stop strings are looked for in what comes after so many tokens.
    pub min_tokens: usize,
    /// Special tokens show by their names.
    pub special: bool,
}

/// Finds stop strings in text that comes in pieces.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    keeps: bool,
    held: String,
}

impl StopMatcher {
    pub fn new(stops: Arc<[String]>, keeps: bool) -> Self {
        Self { stops, keeps, held: String::new() }
    }

    /// The text that may be shown now, and whether a stop string was met (which is no part of the text, unless it is to be kept).
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|s| Some((self.held.find(s.as_str())?, s.len())));
        if let Some((at, len)) = found.min() {
            self.held.truncate(if self.keeps { at + len } else { at });
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.held.len() - self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What is held back at the end: no stop string came of it.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of `text` that are a beginning of `stop`.
pub(super) fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    let fits = |n: &usize| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n]);
    (1..=longest).rev().find(fits).unwrap_or(0)
}

/// Decoder and stop matcher of one choice.
pub struct ChoiceText {
    decoder: Box<dyn TextStream>,
    stops: StopMatcher,
    /// Tokens that may come before stop strings count.
    free: usize,
    decoded_chars: usize,
}

impl ChoiceText {
    /// `decoder` is one for `rules.special`.
    pub fn new(decoder: Box<dyn TextStream>, rules: TextRules) -> Self {
        let stops = StopMatcher::new(rules.stops, rules.keeps_stop);
        Self { decoder, stops, free: rules.min_tokens, decoded_chars: 0 }
    }

    /// What ends the output is a part of it: a stop string, or the text of a token, if it has one that shows.
    pub fn keeps_stop(&self) -> bool {
        self.stops.keeps
    }

    /// Characters of the text so far, those that are held back too; a part of a character is none yet.
    pub fn decoded_chars(&self) -> usize {
        self.decoded_chars
    }

    /// The text that a token lets out, and whether a stop string was met.
    ///
    /// # Errors
    /// The token cannot be decoded.
    pub fn push(&mut self, id: u32) -> Result<(String, bool), CodecError> {
        let piece = self.decoder.push(id)?;
        self.decoded_chars += piece.chars().count();
        if self.free > 0 {
            self.free -= 1;
            return Ok((piece, false));
        }
        Ok(self.stops.push(&piece))
    }

    /// The rest, when the output has ended by itself; a stop string may still be completed by it.
    ///
    /// # Errors
    /// The rest cannot be decoded.
    pub fn finish(&mut self) -> Result<(String, bool), CodecError> {
        let tail = self.decoder.finish()?;
        let (mut text, stopped) = self.stops.push(&tail);
        if !stopped {
            text.push_str(&self.stops.finish());
        }
        Ok((text, stopped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut m = StopMatcher::new(stops.iter().map(|s| (*s).into()).collect(), false);
        let mut shown = String::new();
        for p in pieces {
            let (text, stopped) = m.push(p);
            shown += &text;
            if stopped {
                return (shown, true);
            }
        }
        (shown + &m.finish(), false)
    }

    #[test]
    fn a_stop_string_is_found_however_the_text_is_cut() {
        let text = "one two STOP three";
        for i in 0..text.len() {
            for j in i..text.len() {
                assert_eq!(run(&["STOP"], &[&text[..i], &text[i..j], &text[j..]]), ("one two ".into(), true));
            }
        }
    }

    #[test]
    fn the_stop_string_is_kept_if_it_is_wanted() {
        let mut m = StopMatcher::new(["b!".into(), "c".into()].into(), true);
        assert_eq!(m.push("ab"), ("a".into(), false));
        assert_eq!(m.push("!cd"), ("b!".into(), true));
    }

    #[test]
    fn near_misses_are_shown_in_full_and_the_earliest_of_several_wins() {
        assert_eq!(run(&["STOP"], &["a ST", "OP", "less"]), ("a ".into(), true));
        assert_eq!(run(&["STOP"], &["a ST", "ONE STO"]), ("a STONE STO".into(), false));
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".into(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
        assert_eq!(run(&[], &["x"]), ("x".into(), false));
    }
}
