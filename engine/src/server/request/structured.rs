//! The fields that ask for a form of the output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and tools
//! that must be called. One of them at most.

use std::io;
use std::time::{Duration, Instant};

use serde::de::IgnoredAny;
use serde_json::Value;

use crate::grammar::{Constraint, GRAMMAR_BYTES_MAX, GrammarError, GrammarSpec, LIVE_MAX};
use crate::handle::Ready;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::request::Job;

const CHOICES_MAX: usize = 4096;
/// The whole form is bounded too, when it is compiled.
const CHOICE_BYTES_MAX: usize = 256 << 10;

/// The form that the output has to follow, as it was asked for.
#[derive(Debug)]
pub struct Form {
    param: &'static str,
    spec: GrammarSpec,
}

impl Form {
    /// Its grammar, compiled, and how long that took.
    ///
    /// # Errors
    /// It is bad, or there are too many.
    pub fn compile(&self, ready: &Ready) -> Result<(Constraint, Duration), ApiError> {
        let began = Instant::now();
        let compiled = ready.grammars.compile(&self.spec, ready.codec.as_ref(), &ready.info);
        compiled.map(|c| (c, began.elapsed())).map_err(|error| ApiError::grammar(self.param, &error))
    }
}

/// The form of the output, where one is asked for.
///
/// # Errors
/// There are two, or it does not go with another field.
pub fn form(f: &Fields<'_>, job: &Job, (ignore_eos, outputs): (bool, usize)) -> Result<Option<Form>, ApiError> {
    let mut asked = forms(f)?;
    let by_tools = job.tools.as_ref().and_then(|tools| tools.grammar());
    if let Some(GrammarSpec::Lark(text)) = &by_tools {
        check_size("tools", text.len())?;
    }
    // tools that the model is free to call are none by which the output goes, but a form would never let it call any
    let names = asked.iter().map(|(name, _)| *name).chain(job.tools.as_ref().map(|_| "tools"));
    if let [first, second, ..] = names.collect::<Vec<_>>()[..] {
        let message = format!("{second} cannot go with {first}: the output has one form");
        return Err(ApiError::invalid(second, message));
    }
    asked.extend(by_tools.map(|grammar| ("tools", grammar)));
    let Some((param, spec)) = asked.pop() else { return Ok(None) };
    // The form says when the output ends and which tokens may come; these say something else.
    let rivals = [
        ("ignore_eos", ignore_eos),
        ("min_tokens", job.text.min_tokens > 0),
        ("allowed_token_ids", f.get("allowed_token_ids").is_some()),
    ];
    if let Some((rival, _)) = rivals.iter().find(|(_, set)| *set) {
        return Err(ApiError::invalid(rival, format!("{rival} cannot go with {param}")));
    }
    if outputs > LIVE_MAX {
        let message = format!("{outputs} outputs are to follow {param}; at most {LIVE_MAX} can at the same time");
        return Err(ApiError::invalid("n", message));
    }
    Ok(Some(Form { param, spec }))
}

type Asked = (&'static str, GrammarSpec);

fn forms(f: &Fields<'_>) -> Result<Vec<Asked>, ApiError> {
    let mut all: Vec<Asked> = response_format(f)?.into_iter().collect();
    let names = [
        ("json", "guided_json"),
        ("regex", "guided_regex"),
        ("choice", "guided_choice"),
        ("grammar", "guided_grammar"),
        ("json_object", "guided_json_object"),
    ];
    for (kind, name) in names {
        all.extend(asked(f, kind, name, name)?);
    }
    if let Some(inner) = f.inner("structured_outputs", "structured_outputs.")? {
        let before = all.len();
        for (kind, _) in names {
            all.extend(asked(&inner, kind, kind, "structured_outputs")?);
        }
        inner.refuse_rest()?;
        // as in vLLM: who asks for no form at all forgot to say which
        if all.len() == before {
            let kinds = "an object with one of json, regex, choice, grammar and json_object";
            return Err(f.wrong("structured_outputs", kinds));
        }
    }
    Ok(all)
}

/// One of vLLM's fields; `param` is its name for errors about the grammar itself.
fn asked(f: &Fields<'_>, kind: &str, name: &str, param: &'static str) -> Result<Option<Asked>, ApiError> {
    let spec = match kind {
        "json" => f.get(name).map(|v| schema(f, name, param, v)).transpose()?,
        "regex" => text(f, name, param)?.map(GrammarSpec::Regex),
        "grammar" => text(f, name, param)?.map(GrammarSpec::Lark),
        "json_object" => f.bool(name)?.filter(|wanted| *wanted).map(|_| GrammarSpec::JsonObject),
        _ => choice(f, name, param)?.map(GrammarSpec::Choice),
    };
    Ok(spec.map(|spec| (param, spec)))
}

/// What waits for its turn to be compiled is no larger than what may be compiled: it is measured before any of it is kept.
fn check_size(param: &str, bytes: usize) -> Result<(), ApiError> {
    let bytes_max = GRAMMAR_BYTES_MAX;
    let error = GrammarError::TooLarge { bytes, bytes_max };
    if bytes > bytes_max { Err(ApiError::grammar(param, &error)) } else { Ok(()) }
}

fn text(f: &Fields<'_>, name: &str, param: &str) -> Result<Option<String>, ApiError> {
    let Some(text) = f.str(name)? else { return Ok(None) };
    check_size(param, text.len())?;
    Ok(Some(text.to_owned()))
}

/// Texts of which the output is one. An empty list allows none, and is refused as in vLLM.
fn choice(f: &Fields<'_>, name: &str, param: &str) -> Result<Option<Vec<String>>, ApiError> {
    let Some(value) = f.get(name) else { return Ok(None) };
    let texts = value.as_array().into_iter().flatten().filter_map(Value::as_str);
    check_size(param, texts.map(str::len).sum())?;
    let texts = f.strings(name, CHOICES_MAX, CHOICE_BYTES_MAX)?;
    if texts.is_empty() {
        return Err(f.wrong(name, "a string, or a list of one at least"));
    }
    Ok(Some(texts))
}

/// Bytes of a value's text, which need not be there for that.
fn length(value: &Value) -> usize {
    let mut length = Length(0);
    // what only counts cannot fail
    drop(serde_json::to_writer(&mut length, value));
    length.0
}

/// Counts what is written.
struct Length(usize);

impl io::Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A schema as an object, or as its text, and it waits as its text: nothing weighs what would be made of one that was sent as text.
fn schema(f: &Fields<'_>, name: &str, param: &str, value: &Value) -> Result<GrammarSpec, ApiError> {
    check_size(param, value.as_str().map_or_else(|| length(value), str::len))?;
    let text = match value {
        Value::String(text) if is_object(text) => Some(text.as_str().into()),
        Value::Object(_) => Some(value.to_string().into()),
        _ => None,
    };
    text.map(GrammarSpec::JsonSchema).ok_or_else(|| f.wrong(name, "a JSON schema: an object, or one as text"))
}

/// Is this the text of an object? It is looked through, and not made.
fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok()
}

fn response_format(f: &Fields<'_>) -> Result<Option<Asked>, ApiError> {
    let Some(format) = f.inner("response_format", "response_format.")? else { return Ok(None) };
    let kinds = "one of \"text\", \"json_object\", \"json_schema\"";
    let asked = match format.str("type")? {
        Some("text") => None,
        Some("json_object") => Some(("response_format", GrammarSpec::JsonObject)),
        Some("json_schema") => {
            let inner = format.inner("json_schema", "response_format.json_schema.")?;
            let inner = inner.ok_or_else(|| format.wrong("json_schema", "an object with a schema"))?;
            for name in ["name", "description"] {
                inner.str(name)?;
            }
            // strict or not: what is shown satisfies the schema
            inner.bool("strict")?;
            let value = inner.get("schema").ok_or_else(|| inner.wrong("schema", "a JSON schema"))?;
            let spec = schema(&inner, "schema", "response_format", value)?;
            inner.refuse_rest()?;
            Some(("response_format", spec))
        }
        _ => return Err(format.wrong("type", kinds)),
    };
    format.refuse_rest()?;
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(body: &Value) -> ApiError {
        forms(&Fields::new(body).unwrap()).err().unwrap_or_else(|| panic!("{}", &body.to_string()[..60]))
    }

    /// What waits to be compiled is in no other bound.
    #[test]
    fn a_form_that_is_too_large_is_refused_before_it_waits() {
        let long = "x".repeat(GRAMMAR_BYTES_MAX);
        let schema = json!({"type": "object", "description": long});
        let halves = [&long[..GRAMMAR_BYTES_MAX / 2 + 1]; 2];
        for (body, param) in [
            (json!({"guided_json": schema}), "guided_json"),
            (json!({"guided_json": schema.to_string()}), "guided_json"),
            (json!({"structured_outputs": {"json": schema}}), "structured_outputs"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}), "response_format"),
            (json!({"guided_regex": format!("{long}x")}), "guided_regex"),
            (json!({"guided_grammar": format!("{long}x")}), "guided_grammar"),
            (json!({"guided_choice": halves}), "guided_choice"),
        ] {
            let error = refused(&body);
            assert_eq!(error.param.as_deref(), Some(param));
            assert!(error.message.contains("at most 262144"), "{}", error.message);
        }
        assert!(forms(&Fields::new(&json!({"guided_regex": long})).unwrap()).is_ok());
    }

    /// Parsed it is many times as long, and others may be before it for minutes.
    #[test]
    fn a_schema_waits_as_its_text() {
        let lists = format!("{{\"enum\": [{}[0]]}}", "[0],".repeat(1000));
        let value: Value = serde_json::from_str(&lists).unwrap();
        for sent in [Value::from(lists.as_str()), value.clone()] {
            let asked = forms(&Fields::new(&json!({"guided_json": sent})).unwrap()).unwrap();
            let [(_, GrammarSpec::JsonSchema(waits))] = &asked[..] else { panic!("{asked:?}") };
            assert!(waits.len() <= lists.len() && serde_json::from_str::<Value>(waits).unwrap() == value);
        }
        for none in ["", "[]", "3", "{\"type\": }", "{} {}", "text"] {
            assert_eq!(refused(&json!({"guided_json": none})).param.as_deref(), Some("guided_json"), "{none}");
        }
    }

    #[test]
    fn who_asks_for_a_form_says_which() {
        for (body, param) in [
            (json!({"structured_outputs": {}}), "structured_outputs"),
            (json!({"structured_outputs": {"json": null, "json_object": false}}), "structured_outputs"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
            (json!({"guided_choice": []}), "guided_choice"),
        ] {
            assert_eq!(refused(&body).param.as_deref(), Some(param), "{body}");
        }
        assert!(forms(&Fields::new(&json!({"guided_json_object": false, "guided_choice": null})).unwrap()).is_ok());
    }
}
