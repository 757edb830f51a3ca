//! What a body takes once it is parsed, told from its bytes as they come. Seven bytes of `{"":0},` become half a kilobyte: the length of a
//! body does not bound what is made of it. Pure.

use serde_json::Value;

/// A value in a list; lists grow by doubling.
const VALUE: usize = 2 * size_of::<Value>();
/// What a field has beside its value: name, hash, place in the table.
const FIELD: usize = 2 * (size_of::<String>() + 3 * size_of::<usize>());
/// Lists and objects have room for four at once, and objects a table.
const LIST: usize = 4 * size_of::<Value>();
const OBJECT: usize = LIST + 4 * FIELD;

/// Texts are not counted: they are as long as they came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weight {
    bytes: usize,
    in_text: bool,
    escaped: bool,
}

impl Weight {
    /// Bytes that the parsed body takes beside its texts, about, and hardly more.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What comes next is another text: whatever the last one left open is closed.
    pub fn end_text(&mut self) {
        (self.in_text, self.escaped) = (false, false);
    }

    /// More of the body; where it is cut does not matter.
    pub fn add(&mut self, chunk: &[u8]) {
        for byte in chunk {
            if self.in_text {
                self.in_text = self.escaped || *byte != b'"';
                self.escaped = !self.escaped && *byte == b'\\';
                continue;
            }
            self.bytes += match byte {
                b',' => VALUE,
                b':' => FIELD,
                b'[' => LIST,
                b'{' => OBJECT,
                _ => 0,
            };
            self.in_text = *byte == b'"';
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Weight {
        let mut weight = Weight::default();
        chunks.into_iter().for_each(|chunk| weight.add(chunk));
        weight
    }

    #[test]
    fn what_stands_in_a_text_is_text_however_the_body_is_cut() {
        let body = br#"{"prompt": "a, [b] {\"c\": 1}\\", "stop": [1, 2]}"#;
        let expected = OBJECT + 2 * FIELD + LIST + 2 * VALUE;
        for at in 0..body.len() {
            let (head, tail) = body.split_at(at);
            let told = weight([head, tail]);
            assert_eq!((told.bytes(), told.in_text), (expected, false), "cut at {at}");
        }
    }

    /// Each kind of value is at least what the parser takes for it, as far as sizes of types tell.
    #[test]
    fn small_pieces_weigh_what_they_become() {
        let of = |piece: &str| weight([piece.repeat(1000).as_bytes()]).bytes() / 1000;
        let (value, field) = (size_of::<Value>(), size_of::<(usize, String, Value)>());
        assert!(of("0,") >= 2 * value);
        assert!(of("[0],") >= value + 4 * value);
        assert!(of(r#"{"":0},"#) >= value + 4 * field);
    }
}
