//! Reads a request's JSON field by field, so that each error names its field, what it was and what is allowed.
//! `null` is the same as absent. A field that no reader asked for is an error in the end: a misspelt one must not be lost in silence.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::{self, Display, Write};

use serde_json::{Map, Value};

use crate::server::error::ApiError;

/// Token ids that a rule of a request may name.
pub const IDS_MAX: usize = 4096;
/// What an error repeats of something that a client sent.
const BRIEF_CHARS: usize = 60;

/// The fields of one JSON object; `path` is put before a field's name in errors.
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: &'static str,
    /// Names that somebody asked for.
    asked: RefCell<HashSet<String>>,
}

impl<'a> Fields<'a> {
    /// # Errors
    /// The value is no object.
    pub fn new(value: &'a Value) -> Result<Self, ApiError> {
        let object = value.as_object().ok_or_else(|| ApiError::malformed("the body must be a JSON object"))?;
        Ok(Self::at(object, ""))
    }

    /// The fields of an object that stands at `path` (which ends in a dot).
    pub fn at(object: &'a Map<String, Value>, path: &'static str) -> Self {
        Self { object, path, asked: RefCell::default() }
    }

    /// The fields of an object inside this one, if it is there.
    ///
    /// # Errors
    /// It is no object.
    pub fn inner(&self, name: &str, path: &'static str) -> Result<Option<Self>, ApiError> {
        Ok(self.object(name)?.map(|object| Self::at(object, path)))
    }

    /// Every field has been asked for by somebody.
    ///
    /// # Errors
    /// One has not: this server does not know it.
    pub fn refuse_rest(&self) -> Result<(), ApiError> {
        let asked = self.asked.borrow();
        match self.object.iter().find(|(name, value)| !value.is_null() && !asked.contains(*name)) {
            Some((name, _)) => {
                // a name is as long as its sender likes
                let field = brief(&format_args!("{}{name}", self.path));
                Err(ApiError::invalid(&field, format!("{field} is not a field that this server knows")))
            }
            None => Ok(()),
        }
    }

    /// # Errors
    /// It is no object.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.get(name).map(|v| v.as_object().ok_or_else(|| self.wrong(name, "an object"))).transpose()
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(name.to_owned());
        self.object.get(name).filter(|v| !v.is_null())
    }

    /// # Errors
    /// It is no boolean.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.get(name).map(|v| v.as_bool().ok_or_else(|| self.wrong(name, "true or false"))).transpose()
    }

    /// # Errors
    /// It is no string.
    pub fn str(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.get(name).map(|v| v.as_str().ok_or_else(|| self.wrong(name, "a string"))).transpose()
    }

    /// # Errors
    /// It is no whole number of `min..=max`.
    pub fn int(&self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let allowed = || format!("a whole number from {min} to {max}");
        let read = |v: &Value| v.as_i64().filter(|n| (min..=max).contains(n));
        self.get(name).map(|v| read(v).ok_or_else(|| self.wrong(name, &allowed()))).transpose()
    }

    /// # Errors
    /// It is no number of `min..=max`.
    pub fn number(&self, name: &str, min: f64, max: f64) -> Result<Option<f64>, ApiError> {
        let read = |v: &Value| v.as_f64().filter(|n| (min..=max).contains(n));
        let allowed = || format!("a number from {min} to {max}");
        self.get(name).map(|v| read(v).ok_or_else(|| self.wrong(name, &allowed()))).transpose()
    }

    /// A string or a list of them.
    ///
    /// # Errors
    /// It is neither, or there are more than `count_max`, or one is empty or longer than `bytes_max`.
    pub fn strings(&self, name: &str, count_max: usize, bytes_max: usize) -> Result<Vec<String>, ApiError> {
        let wrong = || {
            let each = format!("each of 1 to {bytes_max} bytes");
            self.wrong(name, &format!("a string or at most {count_max} strings, {each}"))
        };
        let fits = |s: &&str| (1..=bytes_max).contains(&s.len());
        let read = |v: &Value| v.as_str().filter(fits).map(str::to_owned).ok_or_else(wrong);
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) if list.len() <= count_max => list.iter().map(read).collect(),
            Some(one) => Ok(vec![read(one)?]),
        }
    }

    /// A list of token ids below `vocab_size`.
    ///
    /// # Errors
    /// It is no such list.
    pub fn token_ids(&self, name: &str, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        token_list(value, vocab_size).ok_or_else(|| self.wrong(name, &token_list_wanted(vocab_size)))
    }

    /// The same, of [`IDS_MAX`] at most: for what every output carries along and looks through at each token.
    ///
    /// # Errors
    /// It is no such list, or a longer one.
    pub fn few_token_ids(&self, name: &str, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
        let few = self.get(name).and_then(Value::as_array).is_none_or(|list| list.len() <= IDS_MAX);
        if few {
            return self.token_ids(name, vocab_size);
        }
        Err(self.wrong(name, &format!("{}, at most {IDS_MAX} of them", token_list_wanted(vocab_size))))
    }

    /// An error for a field that is set to something that this server cannot do.
    ///
    /// # Errors
    /// The field is there and is none of `harmless`.
    pub fn unsupported(&self, name: &str, harmless: &[Value]) -> Result<(), ApiError> {
        match self.get(name) {
            Some(v) if !harmless.contains(v) => {
                let field = format!("{}{name}", self.path);
                Err(ApiError::invalid(&field, format!("{field} = {} is not supported", brief(v))))
            }
            _ => Ok(()),
        }
    }

    /// The error for a field that is not what it must be.
    pub fn wrong(&self, name: &str, allowed: &str) -> ApiError {
        let got = self.get(name).map_or("nothing".into(), brief);
        let field = format!("{}{name}", self.path);
        let message = format!("{field} must be {allowed}, not {got}");
        ApiError::invalid(&field, message)
    }
}

/// A list of token ids, or nothing if the value is no such list.
pub fn token_list(value: &Value, vocab_size: usize) -> Option<Vec<u32>> {
    let id = |v: &Value| v.as_u64().filter(|n| *n < vocab_size as u64).and_then(|n| u32::try_from(n).ok());
    value.as_array()?.iter().map(id).collect()
}

/// What `token_list` wants, for people.
pub fn token_list_wanted(vocab_size: usize) -> String {
    format!("a list of token ids, each {}", ids_of(vocab_size))
}

/// The ids of a vocabulary, for people.
pub fn ids_of(vocab_size: usize) -> String {
    format!("from 0 to {}", vocab_size.saturating_sub(1))
}

/// What a client sent, for an error: its beginning, where it is long.
pub fn brief<T: Display + ?Sized>(value: &T) -> String {
    beginning(value, BRIEF_CHARS)
}

/// The first characters of what may be megabytes long; no more than these is ever written.
pub fn beginning<T: Display + ?Sized>(value: &T, chars_max: usize) -> String {
    let mut begun = Beginning { text: String::new(), chars_left: chars_max };
    match write!(begun, "{value}") {
        Ok(()) => begun.text,
        Err(_full) => begun.text + "…",
    }
}

/// Takes so many characters and no more.
struct Beginning {
    text: String,
    chars_left: usize,
}

impl Write for Beginning {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        match piece.char_indices().nth(self.chars_left) {
            Some((cut, _)) => {
                self.text.push_str(&piece[..cut]);
                self.chars_left = 0;
                Err(fmt::Error)
            }
            None => {
                self.text.push_str(piece);
                self.chars_left -= piece.chars().count();
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_the_field_the_value_and_what_is_allowed() {
        let value = json!({"n": 2.5, "stop": ["a", ""], "s": {"x": 1}, "ids": [1, 99], "many": vec![1; IDS_MAX + 1]});
        let f = Fields::new(&value).unwrap();
        let error = f.int("n", 1, 4).unwrap_err();
        assert_eq!(error.message, "n must be a whole number from 1 to 4, not 2.5");
        assert_eq!(error.param.as_deref(), Some("n"));
        assert!(f.strings("stop", 4, 9).is_err());
        assert!(f.token_ids("ids", 50).unwrap_err().message.contains("from 0 to 49"));
        assert_eq!(f.token_ids("many", 50).unwrap().len(), IDS_MAX + 1);
        assert!(f.few_token_ids("many", 50).unwrap_err().message.contains("at most 4096 of them, not [1,1"));
        assert_eq!(f.inner("s", "s.").unwrap().unwrap().bool("x").unwrap_err().param.as_deref(), Some("s.x"));
        assert!(Fields::new(&json!([])).is_err());
    }

    #[test]
    fn errors_repeat_no_more_than_the_beginning_of_what_was_sent() {
        assert_eq!(brief(&"é".repeat(60)), "é".repeat(60));
        assert_eq!(brief(&"é".repeat(61)), "é".repeat(60) + "…");
        assert_eq!(beginning(&json!(["ab", 1]), 4), "[\"ab…");
        assert_eq!(beginning(&json!({"a": 1}), 7), "{\"a\":1}", "no more and no less");
        let name = "x".repeat(100_000);
        let value = json!({ (name): 1 });
        let unknown = Fields::new(&value).unwrap().refuse_rest().unwrap_err();
        assert!(unknown.message.len() < 200 && unknown.param.is_some_and(|param| param.len() < 100));
    }

    #[test]
    fn what_nobody_asked_for_is_refused_in_the_end() {
        let value = json!({"n": 1, "max_token": 5, "gone": null});
        let f = Fields::new(&value).unwrap();
        assert_eq!(f.int("n", 1, 4), Ok(Some(1)));
        assert_eq!(f.refuse_rest().unwrap_err().param.as_deref(), Some("max_token"));
        assert!(f.get("max_token").is_some() && f.refuse_rest().is_ok());
    }

    #[test]
    fn null_is_absent() {
        let value = json!({"n": null});
        assert_eq!(Fields::new(&value).unwrap().int("n", 1, 4), Ok(None));
    }
}
