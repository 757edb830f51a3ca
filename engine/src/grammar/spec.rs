//! What a request may ask of its output's form, and the library's words for it. Pure.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::grammar::GrammarError;

/// Bytes of a grammar, however it is written.
pub const BYTES_MAX: usize = 256 << 10;
/// Brackets within brackets: the library recurses over them.
const DEPTH_MAX: usize = 128;
/// White space between two parts of a JSON text: enough for a line break and indentation, no endless blanks.
const JSON_BLANKS: &str = r"[ \t\n\r]{0,32}";

/// The form of an output. Two that are equal are so word for word: of schemas, an output has the order of their properties.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that satisfies the schema of this text. What waits for its turn, or is kept, is as long as it was sent: parsed it is many times that.
    JsonSchema(Box<str>),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's syntax, as `llguidance` has it.
    Lark(String),
}

impl GrammarSpec {
    /// The library's grammar.
    ///
    /// # Errors
    /// It is larger or deeper than anything sensible, or no JSON where it should be.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        self.check_size()?;
        Ok(match self {
            Self::JsonObject => TopLevelGrammar::from_json_schema(bounded(json!({"type": "object"}))),
            Self::JsonSchema(schema) => TopLevelGrammar::from_json_schema(bounded(parsed(schema)?)),
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|t| lark_string(t)).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            Self::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        })
    }

    fn check_size(&self) -> Result<(), GrammarError> {
        let texts: Vec<&str> = match self {
            Self::JsonObject => Vec::new(),
            Self::JsonSchema(schema) => vec![schema],
            Self::Choice(texts) => texts.iter().map(String::as_str).collect(),
            Self::Regex(text) | Self::Lark(text) => vec![text],
        };
        let bytes = texts.iter().map(|text| text.len()).sum();
        if bytes > BYTES_MAX {
            return Err(GrammarError::TooLarge { bytes, bytes_max: BYTES_MAX });
        }
        let nests = !matches!(self, Self::Choice(_));
        let depth = texts.iter().filter(|_| nests).map(|t| bracket_depth(t)).max().unwrap_or(0);
        if depth > DEPTH_MAX {
            return Err(GrammarError::TooDeep { depth, depth_max: DEPTH_MAX });
        }
        Ok(())
    }
}

fn parsed(schema: &str) -> Result<Value, GrammarError> {
    serde_json::from_str(schema).map_err(|error| GrammarError::Invalid(format!("it is no JSON: {error}")))
}

/// A schema as text to stand behind `%json` in a Lark grammar.
pub(crate) fn lark_json(schema: &Value) -> String {
    bounded(schema.clone()).to_string()
}

/// A text as a literal of a Lark grammar.
pub(crate) fn lark_string(text: &str) -> String {
    Value::from(text).to_string()
}

/// The schema with our options for the library in place of the sender's.
fn bounded(mut schema: Value) -> Value {
    if let Some(object) = schema.as_object_mut() {
        object.insert("x-guidance".into(), json!({"whitespace_flexible": true, "whitespace_pattern": JSON_BLANKS}));
    }
    schema
}

/// How deep brackets are nested at most, those inside of literals too: an upper bound is all that is wanted.
fn bracket_depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => (),
        }
    }
    deepest
}
