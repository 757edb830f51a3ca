//! Splits a model's output into text and calls of tools, as it comes. What looks like a call and is none stays text. Pure.

use super::calls::{Head, ObjectEnd, head, whole};
use crate::codec::ToolFormat;
use crate::server::text::overlap;
use crate::splitmix::SplitMix64;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
/// Llama 3's mark of a call; mostly a special token that no text shows.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
/// Mistral's mark of a list of calls; mostly a special token.
pub(super) const TOOL_CALLS: &str = "[TOOL_CALLS]";

/// A call whose arguments begin later is read as a whole.
const HEAD_BYTES_MAX: usize = 4 << 10;

/// A piece of a call: the first one of each has a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPiece {
    /// Which call of this output.
    pub index: usize,
    /// Id and name.
    pub head: Option<(String, String)>,
    /// More of the arguments' JSON.
    pub arguments: String,
}

/// Text and calls of an output, as far as they are certain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parsed {
    pub text: String,
    pub calls: Vec<CallPiece>,
}

/// Reads one output.
#[derive(Debug)]
pub struct ToolParser {
    format: ToolFormat,
    names: Vec<String>,
    calls_max: usize,
    id: String,
    state: State,
    /// What came and is not dealt with.
    rest: String,
    /// What was taken for the beginning of a call, to be said if it is none.
    opened: String,
    /// White space that may turn out to stand before a call, where nobody wants it.
    blanks: String,
    calls: usize,
    /// A call was begun.
    called: bool,
    /// Something was said that is no call.
    spoke: bool,
}

#[derive(Debug)]
enum State {
    Text,
    /// In a call whose head is not known; where its object ends, and how much of the rest holds no beginning of an end mark.
    Head {
        end: ObjectEnd,
        sought: usize,
    },
    /// In the arguments, `sent` bytes of the rest were given out.
    Arguments {
        sent: usize,
        arguments: ObjectEnd,
    },
    /// Between the end of the arguments and that of the call's object.
    Tail(ObjectEnd),
    /// After a call's object.
    Closing,
}

impl State {
    fn head() -> Self {
        Self::Head { end: ObjectEnd::default(), sought: 0 }
    }
}

impl ToolParser {
    /// Calls of `names` alone are calls; more than `calls_max` are dropped; `id` begins the calls' ids.
    pub fn new(format: ToolFormat, names: Vec<String>, calls_max: usize, id: String) -> Self {
        let (state, calls, called, spoke) = (State::Text, 0, false, false);
        let (rest, opened, blanks) = Default::default();
        Self { format, names, calls_max, id, state, rest, opened, blanks, calls, called, spoke }
    }

    /// Was anything called?
    pub fn called(&self) -> bool {
        self.called
    }

    /// What this text makes certain.
    pub fn push(&mut self, text: &str) -> Parsed {
        self.rest.push_str(text);
        let mut out = Parsed::default();
        while self.step(&mut out) {}
        out
    }

    /// What is left when no more text comes: a call without its end mark is a call, an unfinished one is text.
    pub fn finish(&mut self) -> Parsed {
        let mut out = self.push("");
        if let State::Head { .. } = self.state {
            let raw = std::mem::take(&mut self.rest);
            self.call_or_text(&raw, "", &mut out);
        }
        if let State::Text = self.state {
            let rest = std::mem::take(&mut self.rest);
            self.say(&rest, &mut out);
            if self.calls == 0 {
                out.text += &std::mem::take(&mut self.blanks);
            }
        }
        out
    }

    /// One step; false: more text is needed.
    fn step(&mut self, out: &mut Parsed) -> bool {
        match &mut self.state {
            State::Text => match self.format {
                ToolFormat::Hermes => self.hermes_text(out),
                ToolFormat::Llama3 => self.llama_text(out),
                ToolFormat::Mistral => self.mistral_text(out),
            },
            State::Head { .. } => self.read_head(out),
            State::Arguments { .. } => self.read_arguments(out),
            State::Tail(_) => self.read_tail(),
            State::Closing => self.close(),
        }
    }

    fn hermes_text(&mut self, out: &mut Parsed) -> bool {
        let text = std::mem::take(&mut self.rest);
        match text.split_once(OPEN) {
            Some((before, after)) => {
                self.say(before, out);
                OPEN.clone_into(&mut self.opened);
                self.rest = after.to_owned();
                self.state = State::head();
                true
            }
            None => {
                let (certain, held) = text.split_at(text.len() - overlap(&text, OPEN));
                self.say(certain, out);
                self.rest = held.to_owned();
                false
            }
        }
    }

    /// A call stands at the very beginning, or after another one and a semicolon.
    fn llama_text(&mut self, out: &mut Parsed) -> bool {
        let text = self.rest.trim_start();
        let may_be_mark = !text.is_empty() && PYTHON_TAG.starts_with(text);
        if self.spoke || !(text.is_empty() || may_be_mark || text.starts_with('{') || text.starts_with(PYTHON_TAG)) {
            let rest = std::mem::take(&mut self.rest);
            self.say(&rest, out);
            return false;
        }
        if text.is_empty() || may_be_mark && text != PYTHON_TAG {
            return false;
        }
        self.rest = text.strip_prefix(PYTHON_TAG).unwrap_or(text).to_owned();
        if self.rest.starts_with('{') {
            self.state = State::head();
        }
        !self.rest.is_empty()
    }

    /// A list of calls stands after its mark.
    fn mistral_text(&mut self, out: &mut Parsed) -> bool {
        let text = std::mem::take(&mut self.rest);
        let Some(at) = text.find(TOOL_CALLS) else {
            let (certain, held) = text.split_at(text.len() - overlap(&text, TOOL_CALLS));
            self.say(certain, out);
            self.rest = held.to_owned();
            return false;
        };
        let (before, marked) = text.split_at(at);
        self.say(before, out);
        let after = &marked[TOOL_CALLS.len()..];
        match after.trim_start().strip_prefix('[') {
            Some(list) => {
                marked[..marked.len() - list.len()].clone_into(&mut self.opened);
                self.rest = list.to_owned();
                self.state = State::head();
            }
            None if after.trim_start().is_empty() => {
                self.rest = marked.to_owned();
                return false;
            }
            None => {
                self.say(TOOL_CALLS, out);
                self.rest = after.to_owned();
            }
        }
        true
    }

    fn read_head(&mut self, out: &mut Parsed) -> bool {
        let first = self.rest.trim_start().chars().next();
        if self.format == ToolFormat::Hermes && first.is_some_and(|first| first != '{') {
            // no call, whatever comes: nobody is to wait for its end
            let opened = std::mem::take(&mut self.opened);
            self.say(&opened, out);
            self.state = State::Text;
            return true;
        }
        // the same part of it however it comes, and no more: it is read anew with each piece
        match head(&self.rest[..self.rest.floor_char_boundary(HEAD_BYTES_MAX)]) {
            Head::Called { name, arguments_at } if self.names.contains(&name) => {
                self.open(Some(name), out);
                self.state = State::Arguments { sent: arguments_at, arguments: ObjectEnd::from(arguments_at) };
                true
            }
            Head::Unknown | Head::Called { .. } | Head::Unusual => self.end_of_odd_call(out),
        }
    }

    /// A call that has to be seen as a whole: up to its end mark, or to the end of its object where there is none.
    fn end_of_odd_call(&mut self, out: &mut Parsed) -> bool {
        let end = match (self.format, &mut self.state) {
            (ToolFormat::Hermes, State::Head { sought, .. }) => find_on(&self.rest, CLOSE, sought),
            (ToolFormat::Llama3 | ToolFormat::Mistral, State::Head { end, .. }) => end.find(&self.rest),
            _ => None,
        };
        let Some(end) = end else { return false };
        let raw: String = self.rest.drain(..end).collect();
        self.state = State::Closing;
        self.call_or_text(&raw, if self.format == ToolFormat::Hermes { CLOSE } else { "" }, out);
        true
    }

    /// `raw` stood where a call should: if it is none it was text all the time, with the marks around it.
    fn call_or_text(&mut self, raw: &str, close: &str, out: &mut Parsed) {
        match whole(raw).filter(|(name, _)| self.names.contains(name)) {
            Some((name, arguments)) => {
                self.open(Some(name), out);
                self.arguments(&arguments, out);
                self.calls += 1;
                self.state = State::Closing;
            }
            None => {
                let opened = std::mem::take(&mut self.opened);
                self.say(&format!("{opened}{raw}{close}"), out);
                self.rest = self.rest.strip_prefix(close).unwrap_or(&self.rest).to_owned();
                self.state = State::Text;
            }
        }
    }

    fn read_arguments(&mut self, out: &mut Parsed) -> bool {
        let State::Arguments { sent, arguments } = &mut self.state else { return false };
        let end = arguments.find(&self.rest);
        let upto = end.unwrap_or(self.rest.len());
        let piece = self.rest.get(*sent..upto).unwrap_or_default().to_owned();
        *sent = upto;
        self.arguments(&piece, out);
        let Some(end) = end else { return false };
        self.calls += 1;
        self.rest.drain(..end);
        self.state = State::Tail(ObjectEnd::of_tail(self.format == ToolFormat::Mistral));
        true
    }

    /// Passes over the last brace, and over fields that a call has besides. Models forget the brace: what cannot stand in its object ends
    /// the call too, be it its mark or text.
    fn read_tail(&mut self) -> bool {
        let State::Tail(object) = &mut self.state else { return false };
        let end = match self.rest.trim_start().chars().next() {
            None => None,
            Some('}' | ',') => object.find(&self.rest),
            Some(_) => Some(0),
        };
        let Some(end) = end else { return false };
        self.rest.drain(..end);
        self.state = State::Closing;
        true
    }

    /// Passes over what stands between a call and what follows it.
    fn close(&mut self) -> bool {
        let text = self.rest.trim_start();
        let mark = match self.format {
            ToolFormat::Hermes => CLOSE,
            ToolFormat::Llama3 => ";",
            ToolFormat::Mistral if text.starts_with(',') => return self.next_of_list(),
            ToolFormat::Mistral => "]",
        };
        if mark.starts_with(text) && text != mark {
            return false;
        }
        self.rest = text.strip_prefix(mark).unwrap_or(text).to_owned();
        self.state = State::Text;
        true
    }

    /// After a comma: another call.
    fn next_of_list(&mut self) -> bool {
        self.opened = ",".to_owned();
        self.rest = self.rest.trim_start()[1..].to_owned();
        self.state = State::head();
        true
    }

    fn open(&mut self, name: Option<String>, out: &mut Parsed) {
        // nobody wants the line break before a call
        self.blanks.clear();
        if self.calls < self.calls_max {
            self.called = true;
            let id = format!("{}_{}", self.id, self.calls);
            let id = if self.format == ToolFormat::Mistral { short_id(&id) } else { id };
            let head = name.map(|name| (id, name));
            out.calls.push(CallPiece { index: self.calls, head, arguments: String::new() });
        }
    }

    fn arguments(&self, text: &str, out: &mut Parsed) {
        if self.calls >= self.calls_max || text.is_empty() {
            return;
        }
        match out.calls.last_mut() {
            Some(last) if last.index == self.calls => last.arguments += text,
            _ => out.calls.push(CallPiece { index: self.calls, head: None, arguments: text.to_owned() }),
        }
    }

    /// Text, but for blanks at its end, which wait for what follows.
    fn say(&mut self, text: &str, out: &mut Parsed) {
        let solid = text.trim_end();
        if !solid.is_empty() {
            out.text += &std::mem::take(&mut self.blanks);
            out.text += solid;
            self.spoke = true;
        }
        self.blanks += &text[solid.len()..];
    }
}

/// Finds a mark in text that only ever grows; `sought`: before that byte none begins.
fn find_on(text: &str, mark: &str, sought: &mut usize) -> Option<usize> {
    let found = text[*sought..].find(mark).map(|at| *sought + at);
    *sought = found.unwrap_or_else(|| text.len() - overlap(text, mark));
    found
}

/// Templates of Mistral's take back calls whose ids are nine letters and digits, and no others.
fn short_id(id: &str) -> String {
    let hash = id
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let mut random = SplitMix64(hash);
    let digit = |_| char::from_digit((random.next() % 36) as u32, 36).unwrap_or('0');
    (0..9).map(digit).collect()
}

#[cfg(test)]
mod tests;
