//! A field's name in a body: borrowed from there, unless it is written with escapes. serde's own `Cow` is a copy each time.

use std::borrow::Cow;
use std::ops::Deref;

use serde::Deserialize;

/// One name; reads as a text.
#[derive(Debug, Deserialize)]
pub struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl Deref for Name<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::{Deserializer, MapAccess, Visitor};
    use std::fmt;

    /// The names of an object, and which of them are no copies.
    struct Names(Vec<(String, bool)>);

    impl<'de> Deserialize<'de> for Names {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            struct Fields;
            impl<'de> Visitor<'de> for Fields {
                type Value = Names;

                fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                    to.write_str("an object")
                }

                fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                    let mut names = Vec::new();
                    while let Some((name, ())) = map.next_entry::<Name<'de>, ()>()? {
                        names.push((name.to_owned(), matches!(name.0, Cow::Borrowed(_))));
                    }
                    Ok(Names(names))
                }
            }
            from.deserialize_map(Fields)
        }
    }

    #[test]
    fn a_name_is_no_copy_unless_it_must_be() {
        let body = br#"{"prompt":null,"pr\u006fmpt":null}"#;
        let Names(names) = serde_json::from_slice(body).unwrap();
        assert_eq!(names, [("prompt".to_owned(), true), ("prompt".to_owned(), false)]);
    }
}
