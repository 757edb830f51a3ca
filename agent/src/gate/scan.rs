//! Does a chunk of an answer mean anything? Comment lines and blank lines of a stream keep a connection warm; they are no tokens.
//! Pure.

/// Remembers where in a line the last chunk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// `text/event-stream`: lines that begin with a colon are comments.
    Events { line: Line },
    /// Anything else: white space alone means nothing.
    Plain,
}

/// Where in an event stream's line we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    Start,
    Comment,
    Field,
}

impl Scan {
    /// By the answer's content type.
    pub fn for_content_type(content_type: Option<&str>) -> Self {
        let kind = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        if kind.eq_ignore_ascii_case("text/event-stream") { Self::Events { line: Line::Start } } else { Self::Plain }
    }

    /// Is the stream one of events?
    pub fn is_events(self) -> bool {
        matches!(self, Self::Events { .. })
    }

    /// Is the stream between two lines, so that an event can begin here?
    pub fn at_line_start(self) -> bool {
        !matches!(self, Self::Events { line: Line::Comment | Line::Field })
    }

    /// Takes a chunk; true when it carries something.
    pub fn feed(&mut self, chunk: &[u8]) -> bool {
        let Self::Events { line } = self else { return chunk.iter().any(|byte| !byte.is_ascii_whitespace()) };
        let mut carries = false;
        for byte in chunk {
            *line = match (*line, byte) {
                (_, b'\n' | b'\r') => Line::Start,
                (Line::Start, b':') => Line::Comment,
                (Line::Comment, _) => Line::Comment,
                (Line::Start | Line::Field, byte) => {
                    carries |= !byte.is_ascii_whitespace();
                    Line::Field
                }
            };
        }
        carries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blank_lines_carry_nothing_wherever_they_are_cut() {
        let text = b": keep-alive\n\n:\r\n\r\n: x: y\n";
        for cut in 0..text.len() {
            let mut scan = Scan::for_content_type(Some("text/event-stream; charset=utf-8"));
            assert!(!scan.feed(&text[..cut]) && !scan.feed(&text[cut..]), "cut at {cut}");
        }
    }

    #[test]
    fn a_field_carries_something_even_after_a_comment() {
        let mut scan = Scan::for_content_type(Some("text/event-stream"));
        assert!(scan.feed(b": hi\ndata: {}"));
        assert!(!scan.at_line_start());
        assert!(!scan.feed(b"\n\n"));
        assert!(scan.at_line_start());
    }

    #[test]
    fn other_bodies_count_unless_they_are_white_space() {
        let mut scan = Scan::for_content_type(Some("application/json"));
        assert!(scan.feed(b": {") && !scan.feed(b" \n\t"));
    }
}
