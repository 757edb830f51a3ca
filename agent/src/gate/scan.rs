//! Does a chunk of an answer mean anything? Comment lines, pings, names of events, `[DONE]` and error objects of a stream are no
//! tokens: an engine that says nothing else delivers nothing (V2). Pure.

/// What a line of an event stream begins with that carries nothing, white space left out. Everything else carries something: a
/// rule that is too strict would take tokens for silence.
const NOTHING: [&[u8]; 10] =
    [b":", b"id:", b"retry:", DONE, b"data:{\"type\":\"ping\"", ERRORS[0], ERRORS[1], ERRORS[2], ERRORS[3], ERRORS[4]];
/// The last event of an answer.
const DONE: &[u8] = b"data:[DONE]";
/// Those by which an engine says in the middle of an answer that it failed: its status said 200 long ago, and its end will be a clean one. The
/// last is a field of llama.cpp's own.
const ERRORS: [&[u8]; 5] = [
    b"data:{\"error\":{",
    b"data:{\"error\":\"",
    b"data:{\"type\":\"error\"",
    b"data:{\"object\":\"error\"",
    b"error:{",
];
/// The name of an event carries nothing either, and says whether the data behind it does.
const EVENT: &[u8] = b"event:";
/// Events by which the Responses API says that it has heard: an engine sends them before it has begun with the prompt.
const ANNOUNCED: [&[u8]; 3] = [b"event:response.created", b"event:response.in_progress", b"event:response.queued"];
/// Names by which it says that it failed, whatever the data behind them begins with.
const FAILED: [&[u8]; 2] = [b"event:error", b"event:response.failed"];
/// Longer than any of them.
const HEAD_BYTES: usize = 32;

/// Remembers where in a line the last chunk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// `text/event-stream`; has any event had a name, was any an error, and was the last one there?
    Events { line: Line, named: bool, failed: bool, done: bool },
    /// Anything else: white space alone means nothing.
    Plain,
}

/// Where in an event stream's line we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    Start,
    /// The start of one that carries nothing: the name before it was one of [`ANNOUNCED`] or [`FAILED`].
    Announced,
    /// What came of it without white space; it is the name of an event, or may still become one of [`NOTHING`].
    Head {
        bytes: [u8; HEAD_BYTES],
        len: usize,
    },
    /// It was told what it is.
    Decided,
}

impl Scan {
    /// By the answer's content type.
    pub fn for_content_type(content_type: Option<&str>) -> Self {
        let kind = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        if kind.eq_ignore_ascii_case("text/event-stream") {
            Self::Events { line: Line::Start, named: false, failed: false, done: false }
        } else {
            Self::Plain
        }
    }

    /// Is the stream one of events?
    pub fn is_events(self) -> bool {
        matches!(self, Self::Events { .. })
    }

    /// Are its events told apart by their names, as those of Anthropic's API and of the Responses API?
    pub fn names_events(self) -> bool {
        matches!(self, Self::Events { named: true, .. })
    }

    /// Has an event told of an error? Whoever sent this request was not answered, whatever came before.
    pub fn told_of_an_error(self) -> bool {
        matches!(self, Self::Events { failed: true, .. })
    }

    /// Has the stream said that nothing comes after?
    pub fn is_done(self) -> bool {
        matches!(self, Self::Events { done: true, .. })
    }

    /// Takes a chunk; true when it carries something, or completes what does.
    pub fn feed(&mut self, chunk: &[u8]) -> bool {
        let Self::Events { line, named, failed, done } = self else {
            return chunk.iter().any(|byte| !byte.is_ascii_whitespace());
        };
        let mut carries = false;
        for byte in chunk {
            let shows = line.feed(*byte);
            carries |= shows == Some(Shows::Something);
            *failed |= shows == Some(Shows::Error);
            *done |= shows == Some(Shows::Done);
            *named |= line.is_name();
        }
        carries
    }
}

/// What a byte shows of its line, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shows {
    Something,
    Error,
    Done,
}

impl Line {
    fn is_name(self) -> bool {
        matches!(self, Self::Head { bytes, .. } if bytes.starts_with(EVENT))
    }

    /// What the line carries, with the byte that shows it.
    fn feed(&mut self, byte: u8) -> Option<Shows> {
        let ends = matches!(byte, b'\n' | b'\r');
        let (mut bytes, mut len) = match *self {
            Self::Start => ([0; HEAD_BYTES], 0),
            Self::Head { bytes, len } => (bytes, len),
            Self::Announced if byte.is_ascii_whitespace() => return None,
            Self::Announced | Self::Decided => {
                *self = if ends { Self::Start } else { Self::Decided };
                return None;
            }
        };
        if ends {
            let head = bytes.get(..len).unwrap_or_default();
            let fails = FAILED.contains(&head);
            *self = if fails || ANNOUNCED.contains(&head) { Self::Announced } else { Self::Start };
            if fails {
                return Some(Shows::Error);
            }
            // A line that is still undecided is none of them; an empty field is none of anything.
            let empty = matches!(head, b"" | b"data:" | b"data") || head.starts_with(EVENT);
            return (!empty).then_some(Shows::Something);
        }
        if !byte.is_ascii_whitespace()
            && let Some(free) = bytes.get_mut(len)
        {
            *free = byte;
            len += 1;
        }
        let head = bytes.get(..len).unwrap_or_default();
        let named = head.starts_with(EVENT) && head.len() < HEAD_BYTES;
        let open = named || EVENT.starts_with(head) || NOTHING.iter().any(|nothing| nothing.starts_with(head));
        let nothing = NOTHING.iter().chain([&EVENT]).any(|nothing| !named && head.starts_with(nothing));
        *self = if open && !nothing { Self::Head { bytes, len } } else { Self::Decided };
        match nothing {
            true if head.starts_with(DONE) => Some(Shows::Done),
            true => ERRORS.iter().any(|error| head.starts_with(error)).then_some(Shows::Error),
            false => (!open).then_some(Shows::Something),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> Scan {
        Scan::for_content_type(Some("text/event-stream; charset=utf-8"))
    }

    #[test]
    fn comments_errors_and_ends_carry_nothing_wherever_they_are_cut() {
        let text = b": keep-alive\n\n:\r\n\r\n: x: y\nevent: error\ndata: {\"error\": {\"code\": 500}}\n\nid: 7\n\
            data:{\"error\":\"dead\"}\n\nevent: ping\ndata: {\"type\": \"ping\"}\n\ndata:\ndata: {\"type\":\"error\",\"error\":{}}\n\n\
            data: {\"object\":\"error\",\"message\":\"x\"}\n\nevent: error\ndata: {\"code\":500}\n\nerror: {\"code\":500}\n\n\
            event: response.failed\ndata: {\"response\":{}}\n\ndata: [DONE]\n\n";
        for cut in 0..text.len() {
            let mut scan = events();
            assert!(!scan.feed(&text[..cut]) && !scan.feed(&text[cut..]), "cut at {cut}");
        }
    }

    #[test]
    fn an_error_in_the_middle_of_an_answer_is_remembered_wherever_it_is_cut() {
        for (event, told) in [
            (&b"data: {\"error\": {\"code\": 500}}\n\n"[..], true),
            (b"data:{\"error\":\"dead\"}\r\n\r\n", true),
            (b"event: error\ndata: {\"type\":\"error\",\"error\":{}}\n\n", true),
            (b"data: {\"object\":\"error\",\"message\":\"x\"}\n\n", true),
            (b"event: error\ndata: {\"code\":500,\"message\":\"x\",\"type\":\"server_error\"}\n\n", true),
            (
                b"event: response.failed\r\ndata: {\"response\":{\"error\":{}},\"type\":\"response.failed\"}\r\n\r\n",
                true,
            ),
            (b"error: {\"code\":500}\n\n", true),
            (b"event: errors\ndata: {\"code\":500}\n\n", false),
            (b"data: {\"error\":null,\"x\":1}\n\n", false),
            (b"data: {\"choices\":[{\"text\":\"{\\\"error\\\":{\"}]}\n\n", false),
            (b"data: [DONE]\n\n: data:{\"error\":{\n", false),
        ] {
            let all = [b"data: 1\n\n", event, b"data: [DONE]\n\n"].concat();
            for cut in 0..all.len() {
                let mut scan = events();
                let _ = (scan.feed(&all[..cut]), scan.feed(&all[cut..]));
                assert!(scan.is_done() && !events().is_done());
                assert_eq!(scan.told_of_an_error(), told, "{} cut at {cut}", String::from_utf8_lossy(event));
            }
        }
    }

    #[test]
    fn a_token_carries_something_once_wherever_it_is_cut() {
        for text in [
            ": hi\ndata: {\"choices\":[]}\n\n",
            "data: {\"error\":null,\"x\":1}\n\n",
            "data: late\n\n",
            "data: {\n\n",
            "event: x\ndata: 1\n\n",
            "idle\n",
        ] {
            for cut in 0..text.len() {
                let mut scan = events();
                let (first, second) = text.as_bytes().split_at(cut);
                assert_eq!(u8::from(scan.feed(first)) + u8::from(scan.feed(second)), 1, "{text:?} cut at {cut}");
                assert_eq!(scan.names_events(), text.starts_with("event"));
            }
        }
    }

    #[test]
    fn what_only_says_that_a_request_was_heard_carries_nothing_and_the_next_event_does() {
        let heard = "event: response.created\ndata: {\"response\":{\"id\":\"r\"},\"type\":\"response.created\"}\n\n\
            event: response.in_progress\ndata: {\"response\":{},\"type\":\"response.in_progress\"}\n\n";
        let token = "event: response.output_text.delta\ndata: {\"delta\":\"x\"}\n\n";
        for (heard, token) in [(heard.to_owned(), token), (heard.replace('\n', "\r\n"), "data: {\"delta\":\"x\"}\n\n")]
        {
            for cut in 0..heard.len() {
                let mut scan = events();
                let (first, second) = heard.as_bytes().split_at(cut);
                assert!(!scan.feed(first) && !scan.feed(second), "cut at {cut}");
                assert!(scan.feed(token.as_bytes()));
            }
        }
    }

    #[test]
    fn other_bodies_count_unless_they_are_white_space() {
        let mut scan = Scan::for_content_type(Some("application/json"));
        assert!(scan.feed(b": {") && !scan.feed(b" \n\t"));
    }
}
