//! An event stream goes to its client in whole events: the beginning of one waits for its end. So an answer that breaks off ends behind an
//! event, and what its client reads next is ours alone, not half of a JSON object that it fails to parse. Pure.
//!
//! An event ends with an empty line (the standard's `text/event-stream`); a comment is over with its own line, since it is there to be seen
//! by whoever waits. What is called an event stream and is none (a line of JSON a token, data without empty lines) goes on as it comes.

use bytes::{Bytes, BytesMut};

/// A longer event goes on as it comes: one of these is a token or a few of them, and every stream may hold back so much.
const HELD_BYTES_MAX: usize = 16 << 10;

/// All that a line of an event may begin with; who waits for an empty line expects nothing else.
const FIELDS: [&[u8]; 4] = [DATA, b"event", b"id", b"retry"];
const DATA: &[u8] = b"data";
/// More than the longest of them.
const HEAD_BYTES: usize = 6;

/// What a stream holds back, and where in an event it is.
#[derive(Debug, Default)]
pub struct WholeEvents {
    held: BytesMut,
    at: At,
}

impl WholeEvents {
    /// Takes what the engine said; gives what may go on, which may be nothing.
    pub fn feed(&mut self, mut chunk: Bytes) -> Bytes {
        let mut whole_bytes = 0;
        for (index, byte) in chunk.iter().enumerate() {
            if self.at.feed(*byte) {
                whole_bytes = index + 1;
            }
        }
        if self.held.is_empty() && whole_bytes == chunk.len() {
            return chunk;
        }
        let begun_bytes = chunk.len() - whole_bytes + if whole_bytes == 0 { self.held.len() } else { 0 };
        if begun_bytes > HELD_BYTES_MAX {
            self.at.as_it_comes = true;
            whole_bytes = chunk.len();
        }
        let begun = chunk.split_off(whole_bytes);
        if whole_bytes > 0 && !self.held.is_empty() {
            self.held.extend_from_slice(&chunk);
            chunk = self.rest();
        }
        self.held.extend_from_slice(&begun);
        chunk
    }

    /// What was held back, where the stream ended well.
    pub fn rest(&mut self) -> Bytes {
        // none of its memory is kept for a stream that may live for long
        std::mem::take(&mut self.held).freeze()
    }

    /// Is anything held back?
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }
}

/// Where in an event stream the next byte is.
#[derive(Debug, Default)]
struct At {
    line: Line,
    /// The event has a line that is a field, and one of data.
    begun: bool,
    has_data: bool,
    /// The event that we are in goes on as it comes.
    as_it_comes: bool,
    /// A line feed would belong to the end of the line before.
    after_cr: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Line {
    #[default]
    Empty,
    Comment,
    /// What it begins with, still without a colon.
    Head {
        bytes: [u8; HEAD_BYTES],
        len: usize,
    },
    Field,
}

impl At {
    /// True: all up to and with this byte may go on.
    fn feed(&mut self, byte: u8) -> bool {
        let ends_before = std::mem::replace(&mut self.after_cr, byte == b'\r') && byte == b'\n';
        match byte {
            b'\n' | b'\r' => {
                if !ends_before {
                    self.end_line();
                }
                !self.begun || self.as_it_comes
            }
            _ => {
                self.line = match self.line {
                    Line::Empty if byte == b':' => Line::Comment,
                    Line::Empty => self.head([0; HEAD_BYTES], 0, byte),
                    Line::Head { bytes, len } => self.head(bytes, len, byte),
                    other => other,
                };
                self.as_it_comes
            }
        }
    }

    fn head(&mut self, mut bytes: [u8; HEAD_BYTES], mut len: usize, byte: u8) -> Line {
        let before = bytes.get(..len).unwrap_or_default();
        if byte == b':' && FIELDS.contains(&before) {
            self.field(before == DATA);
            return Line::Field;
        }
        if let Some(free) = bytes.get_mut(len) {
            *free = byte;
            len += 1;
        }
        let head = bytes.get(..len).unwrap_or_default();
        if FIELDS.iter().any(|field| field.starts_with(head)) {
            return Line::Head { bytes, len };
        }
        self.as_it_comes = true;
        Line::Field
    }

    /// A second one of data is a stream without empty lines, or so rare that it may as well go on as it comes.
    fn field(&mut self, is_data: bool) {
        self.as_it_comes |= is_data && self.has_data;
        self.has_data |= is_data;
    }

    fn end_line(&mut self) {
        match std::mem::take(&mut self.line) {
            Line::Empty => (self.begun, self.has_data, self.as_it_comes) = (false, false, false),
            Line::Comment => (),
            Line::Head { .. } | Line::Field => self.begun = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What goes on at each of the pieces, and what is held at the end.
    fn passed(pieces: &[&[u8]]) -> (Vec<String>, String) {
        let text = |bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned();
        let mut events = WholeEvents::default();
        let out = pieces.iter().map(|piece| text(events.feed(Bytes::copy_from_slice(piece)))).collect();
        assert_eq!(events.holds(), !events.held.is_empty());
        (out, text(events.rest()))
    }

    #[test]
    fn what_goes_on_ends_behind_an_event_wherever_it_is_cut() {
        for end in ["\n", "\r\n", "\r"] {
            let event = |text: &str| format!("{}{end}", text.replace('\n', end));
            let (first, second, half) = (event("data: 1\n"), event("event: x\ndata: 2\n: not yet\n"), event("data: 3"));
            let all = [&*first, &second, &half].concat();
            for cut in 0..=all.len() {
                let (one, other) = all.as_bytes().split_at(cut);
                let (out, rest) = passed(&[one, other]);
                assert_eq!((out.concat(), rest), ([&*first, &second].concat(), half.clone()), "{end:?} cut at {cut}");
                // the line feed of the empty line's end may come later
                let whole = [0, first.len(), first.len() + second.len()].map(|len| all[..len].to_owned());
                let short =
                    |text: &str| end == "\r\n" && whole.iter().any(|whole| whole.strip_suffix('\n') == Some(text));
                assert!(whole.contains(&out[0]) || short(&out[0]), "{end:?} cut at {cut}: {:?}", out[0]);
            }
        }
    }

    #[test]
    fn a_comment_is_over_with_its_line_where_no_event_has_begun() {
        let (out, rest) = passed(&[b": keep", b"-alive\n", b"\n:\r", b"\ndata: 1\n: ping\n", b"\n"]);
        assert_eq!(
            (out.join("|"), &*rest),
            (": |: keep-alive\n|\n:\r|\n|data: 1\n: ping\n\n".replacen(": |", "|", 1), "")
        );
    }

    #[test]
    fn what_is_no_stream_of_events_goes_on_as_it_comes() {
        for (pieces, held) in [
            (&["{\"text\":\"a\"}\n", "{\"te", "xt\":\"b\"}\n"][..], 0),
            (&["hello", " you"], 0),
            (&["[DONE]"], 0),
            // a word that might have been a field, until it is none
            (&["dat", "e: 1", "\n"], 1),
            // without empty lines, a line waits for the beginning of the next one of data
            (&["data: 1\n", "data: 2\n", "data: 3\n"], 1),
        ] {
            let (out, rest) = passed(&pieces.iter().map(|piece| piece.as_bytes()).collect::<Vec<_>>());
            assert_eq!((out.concat(), &*rest), (pieces.concat(), ""), "{pieces:?}");
            assert!(
                out[..held].iter().all(String::is_empty) && out[held..].iter().all(|out| !out.is_empty()),
                "{out:?}"
            );
        }
        let (out, rest) = passed(&[b"data: 1\nid: 4\ndata: 2\n\nda", b"ta: 3\n"]);
        assert_eq!(
            (out.concat(), &*rest),
            ("data: 1\nid: 4\ndata: 2\n\n".to_owned(), "data: 3\n"),
            "the next event waits again"
        );
    }

    #[test]
    fn a_long_event_goes_on_as_it_comes_and_the_next_one_waits_again() {
        let long = vec![b'x'; HELD_BYTES_MAX];
        let (out, rest) = passed(&[b"data: 0\n\ndata", &long, b"yy", b"\n\ndata: 1", b"\n", b"\n"]);
        let lens: Vec<usize> = out.iter().map(String::len).collect();
        assert_eq!((lens, &*rest), (vec![9, 4 + long.len(), 2, 2, 0, 9], ""));
    }
}
