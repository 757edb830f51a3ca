//! Reads one call as it comes: its name as soon as that is whole, its arguments piece by piece as the model wrote them. Pure.

use serde_json::Value;

/// How far a call is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Head {
    /// More text is needed to know.
    Unknown,
    /// The function's name; its arguments begin at this byte.
    Called { name: String, arguments_at: usize },
    /// Not in the usual order; only the whole object will tell.
    Unusual,
}

/// The head of `{"name": "…", "arguments": {`, or with `parameters`.
pub fn head(raw: &str) -> Head {
    match usual_head(raw) {
        Ok(Some((name, arguments_at))) => Head::Called { name, arguments_at },
        Ok(None) => Head::Unknown,
        Err(NotUsual) => Head::Unusual,
    }
}

/// Name and arguments of a whole call, in any order; arguments may be given as text.
pub fn whole(raw: &str) -> Option<(String, String)> {
    let call: Value = serde_json::from_str(raw.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some((name, arguments))
}

/// Finds the end of one JSON object in text that comes in pieces.
#[derive(Debug, Clone, Default)]
pub struct ObjectEnd {
    seen: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// A mark may stand where the object should have ended.
    may_lack_end: bool,
    /// Another object may stand behind a comma where the object should have ended.
    in_list: bool,
    /// The comma after a field, if nothing has come behind it.
    comma: Option<usize>,
    end: Option<usize>,
}

impl ObjectEnd {
    /// An object that begins at this byte.
    pub fn from(at: usize) -> Self {
        Self { seen: at, ..Self::default() }
    }

    /// The object's rest, after one of its fields. Where it lacks its end, it ends before the first `<` that no string has: no JSON has that
    /// anywhere else, and a mark begins so. In a list of calls it may end before a comma, too, that an object follows, where a name has to.
    pub fn of_tail(in_list: bool) -> Self {
        Self { depth: 1, may_lack_end: true, in_list, ..Self::default() }
    }

    /// The byte after the object, once `raw` (which only ever grows) holds all of it.
    pub fn find(&mut self, raw: &str) -> Option<usize> {
        for byte in raw.as_bytes().iter().skip(self.seen) {
            if self.end.is_some() {
                break;
            }
            self.seen += 1;
            self.step(*byte);
        }
        self.end
    }

    fn step(&mut self, byte: u8) {
        match (self.in_string, byte) {
            (true, _) if self.escaped => self.escaped = false,
            (true, b'\\') => self.escaped = true,
            (_, b'"') => self.in_string = !self.in_string,
            (false, b'<') if self.may_lack_end => self.end = Some(self.seen - 1),
            (false, b'{') if self.in_list && self.depth == 1 && self.comma.is_some() => self.end = self.comma,
            (false, b'{') => self.depth += 1,
            (false, b'}') => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    self.end = Some(self.seen);
                }
            }
            _ => (),
        }
        self.comma = match byte {
            b',' if !self.in_string && self.depth == 1 => Some(self.seen - 1),
            _ if byte.is_ascii_whitespace() => self.comma,
            _ => None,
        };
    }
}

struct NotUsual;

/// Nothing: the text ends too early.
fn usual_head(raw: &str) -> Result<Option<(String, usize)>, NotUsual> {
    let mut rest = Rest(raw);
    for word in ["{", "\"name\"", ":"] {
        if !rest.take(word)? {
            return Ok(None);
        }
    }
    let Some(name) = rest.string()? else { return Ok(None) };
    if !rest.take(",")? {
        return Ok(None);
    }
    let Some(key) = rest.string()? else { return Ok(None) };
    if key != "arguments" && key != "parameters" {
        return Err(NotUsual);
    }
    if !rest.take(":")? {
        return Ok(None);
    }
    let arguments_at = raw.len() - rest.0.trim_start().len();
    Ok(rest.take("{")?.then_some((name, arguments_at)))
}

/// What is left to read.
struct Rest<'a>(&'a str);

impl Rest<'_> {
    /// Takes a word and the blanks before it. False: the text ends before it is known whether the word is there.
    fn take(&mut self, word: &str) -> Result<bool, NotUsual> {
        let text = self.0.trim_start();
        match text.strip_prefix(word) {
            Some(rest) => {
                self.0 = rest;
                Ok(true)
            }
            None if word.starts_with(text) => Ok(false),
            None => Err(NotUsual),
        }
    }

    /// Takes a JSON string, or nothing as long as it is not whole.
    fn string(&mut self) -> Result<Option<String>, NotUsual> {
        let text = self.0.trim_start();
        if text.is_empty() {
            return Ok(None);
        }
        if !text.starts_with('"') {
            return Err(NotUsual);
        }
        let mut escaped = false;
        let closes = |(_, c): &(usize, char)| {
            let is_end = *c == '"' && !escaped;
            escaped = *c == '\\' && !escaped;
            is_end
        };
        let Some((end, _)) = text.char_indices().skip(1).find(closes) else { return Ok(None) };
        let (string, rest) = text.split_at(end + 1);
        self.0 = rest;
        serde_json::from_str(string).map(Some).map_err(|_| NotUsual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_known_as_soon_as_it_is_whole() {
        let raw = "\n { \"name\" : \"get_\\u0041\", \"arguments\": {\"x\": 1}}";
        let whole = raw.find("{\"x\"").unwrap();
        for end in 0..=raw.len() {
            let told = head(&raw[..end]);
            if end <= whole {
                assert_eq!(told, Head::Unknown, "{end}");
            } else {
                assert_eq!(told, Head::Called { name: "get_A".into(), arguments_at: whole }, "{end}");
            }
        }
    }

    #[test]
    fn other_orders_wait_for_the_whole() {
        for raw in [
            r#"{"arguments": {}, "name": "f"}"#,
            r#"{"name": "f", "id": 1"#,
            r#"{"name": "f", "arguments": "{}"}"#,
            "nonsense",
        ] {
            assert_eq!(head(raw), Head::Unusual, "{raw}");
        }
        assert_eq!(whole(r#"{"arguments": {"a": 1}, "name": "f"}"#), Some(("f".into(), r#"{"a":1}"#.into())));
        assert_eq!(whole(r#"{"name": "f", "arguments": "{}"}"#), Some(("f".into(), "{}".into())));
        assert_eq!(whole(r#"{"name": "f"}"#), Some(("f".into(), "{}".into())));
        assert_eq!(whole(r#"{"name": 1}"#), None);
    }

    #[test]
    fn the_end_of_an_object_is_found_whatever_is_in_its_strings() {
        let raw = r#"..{"a": "}\"}", "b": {"c": [{}]}} rest"#;
        for cut in 2..raw.len() {
            let mut end = ObjectEnd::from(2);
            let first = end.find(&raw[..cut]);
            assert_eq!(first.or_else(|| end.find(raw)), Some(raw.find(" rest").unwrap()));
        }
    }
}
