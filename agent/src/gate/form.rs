//! Bodies in multipart, as sound and pictures come. What parts one is drawn anew for each attempt, and is no part of what is asked: a client's
//! second try must have the print of its first (I7). Pure.

use http::{HeaderMap, header};

use super::print::Print;

/// The standard's bound (RFC 2046, 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;
/// Stands before each boundary in a body.
const DASHES: &[u8] = b"--";

/// What parts a body, with the dashes before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form(Vec<u8>);

impl Form {
    /// Of a request with these headers; `None` where its body is in no form, or nothing says what parts it.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut words = headers.get(header::CONTENT_TYPE)?.to_str().ok()?.split(';').map(str::trim);
        let kind = words.next()?;
        kind.get(..10).filter(|kind| kind.eq_ignore_ascii_case("multipart/"))?;
        let boundary = words.find_map(|word| {
            let (name, value) = word.split_once('=')?;
            name.trim().eq_ignore_ascii_case("boundary").then(|| value.trim().trim_matches('"'))
        })?;
        let fits = (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len());
        fits.then(|| Self([DASHES, boundary.as_bytes()].concat()))
    }

    /// Does the body begin as one of this form's does? Whoever says so of a body that does not has sent another.
    pub fn is_of(&self, body: &[u8]) -> bool {
        body.starts_with(&self.0)
    }

    /// By what the body is known, whatever parts it this time.
    pub fn print(&self, path: &str, body: &[u8]) -> Print {
        Print::of_parts(path, self.parts(body))
    }

    fn parts<'a>(&self, body: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = Some(body);
        std::iter::from_fn(move || {
            let whole = rest?;
            let (part, after) = match self.next_in(whole) {
                Some(at) => (whole.get(..at), whole.get(at + self.0.len()..)),
                None => (Some(whole), None),
            };
            rest = after;
            part
        })
    }

    fn next_in(&self, body: &[u8]) -> Option<usize> {
        let first = self.0.first();
        body.windows(self.0.len()).position(|window| window.first() == first && window == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    const PATH: &str = "/v1/audio/transcriptions";

    fn form(content_type: &str) -> Option<Form> {
        Form::of(&HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_str(content_type).unwrap())]))
    }

    fn body(boundary: &str, sound: &str) -> Vec<u8> {
        let head = "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";
        format!("--{boundary}\r\n{head}{sound}\r\n--{boundary}--\r\n").into_bytes()
    }

    #[test]
    fn a_second_try_has_the_print_of_the_first_whatever_parts_it() {
        let first = form("multipart/form-data; boundary=4f3c").unwrap();
        let second = form("Multipart/Form-Data; charset=utf-8; BOUNDARY=\"----WebKit 7\"").unwrap();
        let print = |form: &Form, boundary, sound| form.print(PATH, &body(boundary, sound));
        assert_eq!(print(&first, "4f3c", "RIFF--x"), print(&second, "----WebKit 7", "RIFF--x"));
        assert_ne!(print(&first, "4f3c", "RIFF"), print(&first, "4f3c", "RIFX"), "another sound");
        assert_ne!(print(&first, "4f3c", "RIFF"), first.print("/v1/audio/translations", &body("4f3c", "RIFF")));
        let [whole, parted]: [&[u8]; 2] = [b"ab--4f3ccd", b"abcd"];
        assert_ne!(first.print(PATH, whole), first.print(PATH, parted), "one part is not two");
        assert_ne!(first.print(PATH, parted), Print::of(PATH, parted), "nor a form what is none");
    }

    #[test]
    fn a_body_is_parted_where_its_boundary_stands_and_nowhere_else() {
        let form = form("multipart/form-data; boundary=x").unwrap();
        let parts = |body: &'static str| form.parts(body.as_bytes()).map(|part| part.to_vec()).collect::<Vec<_>>();
        assert_eq!(parts(""), [b""]);
        assert_eq!(parts("--x\r\na--\r\n--x--"), [&b""[..], b"\r\na--\r\n", b"--"]);
        assert_eq!(parts("--"), [b"--"]);
    }

    #[test]
    fn what_says_no_boundary_is_no_form() {
        let long = format!("multipart/form-data; boundary={}", "x".repeat(71));
        for kind in ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multi", "", &long] {
            assert_eq!(form(kind), None, "{kind}");
        }
        assert_eq!(Form::of(&HeaderMap::new()), None);
        let form = form("multipart/form-data; boundary=x").unwrap();
        assert!(form.is_of(&body("x", "RIFF")) && !form.is_of(b"{\"prompt\":\"--x\"}"));
    }
}
