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
/// Names of the last event of an answer, in the APIs that know no `[DONE]`: Anthropic's, and the Responses API.
const LAST: [&[u8]; 3] = [b"event:message_stop", b"event:response.completed", b"event:response.incomplete"];
/// Longer than any of them.
const HEAD_BYTES: usize = 32;
/// Ends of paths whose answers' events have names.
const NAMED_PATHS: [&str; 2] = ["/messages", "/responses"];
/// Content types of answers that are one JSON text a line (Ollama's).
const JSON_LINES: [&str; 3] = ["application/x-ndjson", "application/ndjson", "application/jsonl"];

/// Remembers where in a line the last chunk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// `text/event-stream`.
    Events(Events),
    /// Lines of JSON; was any an error?
    Lines { line: Line, failed: bool },
    /// Anything else: white space alone means nothing.
    Plain,
}

/// What was seen of an event stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Events {
    line: Line,
    /// An event had a name, or will have one.
    named: bool,
    /// One was an error.
    failed: bool,
    /// The name of the last one was there, and the rest of it may be to come.
    ends: bool,
    /// The last one was there, whole.
    done: bool,
    /// A carriage return came last: the line feed behind it ends no other line.
    returned: bool,
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
    /// By the answer's content type, and by the path that was asked: before the first event nothing else says that events have names.
    pub fn of(content_type: Option<&str>, path: &str) -> Self {
        let kind = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let line = Line::Start;
        if kind.eq_ignore_ascii_case("text/event-stream") {
            let named = NAMED_PATHS.iter().any(|end| path.trim_end_matches('/').ends_with(end));
            Self::Events(Events { line, named, failed: false, ends: false, done: false, returned: false })
        } else if JSON_LINES.iter().any(|lines| kind.eq_ignore_ascii_case(lines)) {
            Self::Lines { line, failed: false }
        } else {
            Self::Plain
        }
    }

    /// Is the stream one of events?
    pub fn is_events(self) -> bool {
        matches!(self, Self::Events(_))
    }

    /// Are its events told apart by their names, as those of Anthropic's API and of the Responses API?
    pub fn names_events(self) -> bool {
        matches!(self, Self::Events(Events { named: true, .. }))
    }

    /// Has an event told of an error? Whoever sent this request was not answered, whatever came before.
    pub fn told_of_an_error(self) -> bool {
        matches!(self, Self::Events(Events { failed: true, .. }) | Self::Lines { failed: true, .. })
    }

    /// Has the stream said that nothing comes after?
    pub fn is_done(self) -> bool {
        matches!(self, Self::Events(Events { done: true, .. }))
    }

    /// Takes a chunk; true when it carries something, or completes what does.
    pub fn feed(&mut self, chunk: &[u8]) -> bool {
        match self {
            Self::Events(events) => chunk.iter().fold(false, |carries, byte| events.feed(*byte) | carries),
            Self::Lines { line, failed } => chunk.iter().fold(false, |carries, byte| {
                let shows = line.feed_json(*byte);
                *failed |= shows == Some(Shows::Error);
                carries | (shows == Some(Shows::Something))
            }),
            Self::Plain => chunk.iter().any(|byte| !byte.is_ascii_whitespace()),
        }
    }
}

impl Events {
    /// Does the line carry something, as this byte shows?
    fn feed(&mut self, byte: u8) -> bool {
        let ends_line = byte == b'\r' || (byte == b'\n' && !self.returned);
        // an event is whole with the empty line behind it: before that its data may be to come
        self.done |= self.ends && ends_line && self.line == Line::Start;
        self.returned = byte == b'\r';
        let shows = self.line.feed(byte);
        self.failed |= shows == Some(Shows::Error);
        self.done |= shows == Some(Shows::Done);
        self.ends |= shows == Some(Shows::Last);
        self.named |= self.line.is_name();
        shows == Some(Shows::Something)
    }
}

/// What a byte shows of its line, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shows {
    Something,
    Error,
    /// It is the name of the last event.
    Last,
    /// Nothing comes after it.
    Done,
}

impl Line {
    fn is_name(self) -> bool {
        matches!(self, Self::Head { bytes, .. } if bytes.starts_with(EVENT))
    }

    /// The same of a line of JSON, which is the data of an event without its name.
    fn feed_json(&mut self, byte: u8) -> Option<Shows> {
        if *self == Self::Start && !byte.is_ascii_whitespace() {
            b"data:".iter().for_each(|byte| _ = self.feed(*byte));
        }
        self.feed(byte)
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
            if fails || LAST.contains(&head) {
                return Some(if fails { Shows::Error } else { Shows::Last });
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
        Scan::of(Some("text/event-stream; charset=utf-8"), "/v1/chat/completions")
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
        let mut scan = Scan::of(Some("application/json"), "/v1/completions");
        assert!(scan.feed(b": {") && !scan.feed(b" \n\t"));
    }

    #[test]
    fn an_api_whose_events_have_names_is_known_before_the_first_one() {
        for (path, named) in [
            ("/v1/messages", true),
            ("/v1/responses/", true),
            ("/v1/messages/count", false),
            ("/v1/completions", false),
        ] {
            assert_eq!(Scan::of(Some("text/event-stream"), path).names_events(), named, "{path}");
        }
        assert!(!Scan::of(Some("application/json"), "/v1/messages").names_events());
    }

    #[test]
    fn the_last_event_of_those_with_names_ends_an_answer_when_it_is_whole() {
        let last = |name: &str, end: &str| format!("event: {name}{end}data: {{\"type\":\"{name}\"}}{end}{end}");
        for (name, ends) in [
            ("message_stop", true),
            ("response.completed", true),
            ("response.incomplete", true),
            ("message_delta", false),
        ] {
            for end in ["\n", "\r\n", "\r"] {
                let text = format!("{}{}", last("message_delta", end), last(name, end));
                for cut in 0..text.len() - end.len() {
                    let mut scan = events();
                    scan.feed(&text.as_bytes()[..cut]);
                    assert!(!scan.is_done(), "{name} cut at {cut}: {end:?}");
                    scan.feed(&text.as_bytes()[cut..]);
                    assert_eq!(scan.is_done(), ends, "{name}, in two at {cut}: {end:?}");
                }
            }
        }
    }

    #[test]
    fn a_line_of_json_that_tells_of_an_error_delivers_nothing_wherever_it_is_cut() {
        for (text, delivers, failed) in [
            ("{\"message\":{\"content\":\"a\"}}\n", true, false),
            ("{\"error\":\"llama runner has ended\"}\n", false, true),
            ("\r\n{ \"error\": {\"code\":500}}", false, true),
            ("{\"error\":null,\"response\":\"a\"}\n", true, false),
            ("{\"response\":\"event: error\"}\n", true, false),
            ("{\"response\":\"a\"}\n{\"error\":\"x\"}\n", true, true),
            ("\n \n", false, false),
        ] {
            for cut in 0..text.len() {
                let mut scan = Scan::of(Some("application/x-ndjson"), "/api/chat");
                let said = [scan.feed(&text.as_bytes()[..cut]), scan.feed(&text.as_bytes()[cut..])].contains(&true);
                assert_eq!((said, scan.told_of_an_error()), (delivers, failed), "{text:?} cut at {cut}");
                assert!(!scan.is_events() && !scan.is_done());
            }
        }
    }
}
