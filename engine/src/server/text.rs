//! One choice's text: tokens become text, stop strings end it. Text that may be the beginning of a stop string is held back
//! until it is known not to be one. Pure.

use crate::codec::{CodecError, TextStream};

/// Finds stop strings in text that comes in pieces.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

impl StopMatcher {
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// The text that may be shown now, and whether a stop string was met (which is no part of the text).
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
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
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    let fits = |n: &usize| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n]);
    (1..=longest).rev().find(fits).unwrap_or(0)
}

/// Decoder and stop matcher of one choice.
pub struct ChoiceText {
    decoder: Box<dyn TextStream>,
    stops: StopMatcher,
}

impl ChoiceText {
    pub fn new(decoder: Box<dyn TextStream>, stops: Vec<String>) -> Self {
        Self { decoder, stops: StopMatcher::new(stops) }
    }

    /// The text that a token lets out, and whether a stop string was met.
    ///
    /// # Errors
    /// The token cannot be decoded.
    pub fn push(&mut self, id: u32) -> Result<(String, bool), CodecError> {
        let piece = self.decoder.push(id)?;
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
        let mut m = StopMatcher::new(stops.iter().map(|s| (*s).into()).collect());
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
    fn near_misses_are_shown_in_full_and_the_earliest_of_several_wins() {
        assert_eq!(run(&["STOP"], &["a ST", "OP", "less"]), ("a ".into(), true));
        assert_eq!(run(&["STOP"], &["a ST", "ONE STO"]), ("a STONE STO".into(), false));
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".into(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
        assert_eq!(run(&[], &["x"]), ("x".into(), false));
    }
}
