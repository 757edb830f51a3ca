//! By what two requests are known to be the same (I7): path, model, prompt and parameters, hashed. Pure.
//!
//! Left out is what names the user or the attempt and not the work: a client's second try must have the print of its first. White space, the
//! order of top-level fields and the way a text is escaped make no difference. Nothing of a prompt can be read from a print, but who has a
//! prompt can tell whether it is the one: prints are shown only where incidents are.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use sha2::{Digest, Sha256};

use super::name::Name;

/// Fields of users, attempts, accounts and transport, by their names in the APIs of OpenAI, Anthropic, vLLM and SGLang.
const NOISE: [&str; 18] = [
    "user",
    "user_id",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "cache_salt",
    "request_id",
    "rid",
    "id",
    "session_id",
    "conversation_id",
    "store",
    "service_tier",
    "priority",
    "stream",
    "stream_options",
    "kv_transfer_params",
    "bootstrap_room",
];
/// A request with more fields than anybody sends is hashed as it stands.
const FIELDS_MAX: usize = 256;

/// A request's fingerprint; prints as 16 hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Print(pub u64);

impl fmt::Display for Print {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{:016x}", self.0)
    }
}

impl Print {
    /// Of a whole body. One that is no JSON object is hashed as it stands.
    pub fn of(path: &str, body: &[u8]) -> Self {
        let fields = serde_json::from_slice::<Fields>(body);
        let mut hash = Sha256::new();
        part(&mut hash, path.trim_end_matches('/').as_bytes());
        match fields {
            Ok(Fields(mut digests)) => {
                digests.sort_unstable();
                digests.iter().for_each(|digest| hash.update(digest));
            }
            Err(_) => part(&mut hash, body),
        }
        Self(first_word(hash))
    }

    /// Of a body in these parts, in their order: as no body is known that is in none.
    pub fn of_parts<'a>(path: &str, parts: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        part(&mut hash, path.trim_end_matches('/').as_bytes());
        hash.update(b"parts");
        parts.for_each(|bytes| part(&mut hash, bytes));
        Self(first_word(hash))
    }

    /// As agents and operator write it.
    pub fn read(text: &str) -> Option<Self> {
        let digits = crds::poison::is_fingerprint(text).then_some(text)?;
        u64::from_str_radix(digits, 16).ok().map(Self)
    }
}

fn part(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn first_word(hash: Sha256) -> u64 {
    let digest: [u8; 32] = hash.finalize().into();
    digest.first_chunk().map_or(0, |word| u64::from_be_bytes(*word))
}

/// A digest for each top-level field that is no noise.
struct Fields(Vec<[u8; 32]>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut digests = Vec::new();
        while let Some(name) = map.next_key::<Name<'de>>()? {
            if NOISE.contains(&&*name) {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if digests.len() == FIELDS_MAX {
                return Err(serde::de::Error::custom("too many fields"));
            }
            let mut hash = Sha256::new();
            part(&mut hash, name.as_bytes());
            map.next_value_seed(Into { hash: &mut hash })?;
            digests.push(hash.finalize().into());
        }
        Ok(Fields(digests))
    }
}

/// Hashes any value while it is parsed, each kind with a mark of its own, and builds nothing.
struct Into<'a> {
    hash: &'a mut Sha256,
}

impl<'de> DeserializeSeed<'de> for Into<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Into<'_> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("any value")
    }

    fn visit_bool<E>(self, flag: bool) -> Result<(), E> {
        self.hash.update([b'b', u8::from(flag)]);
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.hash.update(b"n");
        Ok(())
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<(), E> {
        self.visit_f64(number as f64)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<(), E> {
        self.visit_f64(number as f64)
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.hash.update(b"f");
        self.hash.update(number.to_le_bytes());
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.hash.update(b"s");
        part(self.hash, text.as_bytes());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.hash.update(b"[");
        while items.next_element_seed(Into { hash: self.hash })?.is_some() {}
        self.hash.update(b"]");
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        self.hash.update(b"{");
        while let Some(name) = fields.next_key::<Name<'de>>()? {
            part(self.hash, name.as_bytes());
            fields.next_value_seed(Into { hash: self.hash })?;
        }
        self.hash.update(b"}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/v1/chat/completions";

    fn print(body: &str) -> Print {
        Print::of(PATH, body.as_bytes())
    }

    #[test]
    fn a_second_try_has_the_print_of_the_first() {
        let first = print(
            r#"{"model":"m","messages":[{"role":"user","content":"h\u00e9 \"x\""}],"temperature":1,"user":"ann","stream":true}"#,
        );
        let second = print(
            "{ \"user\": \"bob\", \"metadata\": {\"try\": 2}, \"temperature\": 1.0,\n \"messages\": \
             [ {\"role\": \"user\", \"content\": \"hé \\u0022x\\u0022\"} ], \"model\": \"m\" }",
        );
        assert_eq!(first, second);
        assert_eq!(
            first,
            Print::of(
                "/v1/chat/completions/",
                br#"{"temperature":1,"model":"m","messages":[{"role":"user","content":"h\u00e9 \"x\""}]}"#
            )
        );
        assert_eq!(Print::read(&first.to_string()), Some(first));
    }

    #[test]
    fn other_work_has_another_print() {
        let bodies = [
            r#"{"model":"m","prompt":"a"}"#,
            r#"{"model":"n","prompt":"a"}"#,
            r#"{"model":"m","prompt":"b"}"#,
            r#"{"model":"m","prompt":["a"]}"#,
            r#"{"model":"m","prompt":["a",""]}"#,
            r#"{"model":"m","prompt":[["a"],[]]}"#,
            r#"{"model":"m","prompt":{"a":1}}"#,
            r#"{"model":"m","prompt":null}"#,
            r#"{"model":"m","prompt":true}"#,
            r#"{"model":"m","prompt":[1,2]}"#,
            r#"{"model":"m","prompt":[12]}"#,
            r#"{"model":"m","prompt":"a","max_tokens":7}"#,
            r#"{"model":"m"}"#,
            "{}",
            "no json",
            "no json, either",
            "[]",
        ];
        let mut prints: Vec<Print> = bodies.iter().map(|body| print(body)).collect();
        prints.push(Print::of("/v1/completions", bodies[0].as_bytes()));
        prints.sort_unstable();
        prints.dedup();
        assert_eq!(prints.len(), bodies.len() + 1);
    }

    #[test]
    fn a_body_without_end_or_measure_is_hashed_as_it_stands() {
        let deep = format!("{{\"prompt\":{}", "[".repeat(10_000));
        let wide = (0..=FIELDS_MAX).map(|n| format!("\"f{n}\":1,")).collect::<String>();
        let wide = format!("{{{}}}", wide.trim_end_matches(','));
        for body in [deep.as_str(), wide.as_str(), "{\"prompt\":\"a\"} and more"] {
            assert_ne!(print(body), print(&format!("{body} ")), "{body:.20}");
        }
    }
}
