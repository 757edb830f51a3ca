//! The fields that ask for a form of the output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and tools
//! that must be called. One of them at most.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::grammar::{Constraint, GRAMMAR_BYTES_MAX, GrammarSpec, LIVE_MAX};
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
    asked.extend(by_tools.map(|grammar| ("tools", grammar)));
    if let [_, (second, _), ..] = asked.as_slice() {
        let message = format!("{second} cannot go with {}: the output has one form", asked[0].0);
        return Err(ApiError::invalid(second, message));
    }
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
        for (kind, _) in names {
            all.extend(asked(&inner, kind, kind, "structured_outputs")?);
        }
        inner.refuse_rest()?;
    }
    Ok(all)
}

/// One of vLLM's fields; `param` is its name for errors about the grammar itself.
fn asked(f: &Fields<'_>, kind: &str, name: &str, param: &'static str) -> Result<Option<Asked>, ApiError> {
    let spec = match kind {
        "json" => f.get(name).map(|v| schema(f, name, v)).transpose()?,
        "regex" => f.str(name)?.map(|s| GrammarSpec::Regex(s.to_owned())),
        "grammar" => f.str(name)?.map(|s| GrammarSpec::Lark(s.to_owned())),
        "json_object" => f.bool(name)?.filter(|wanted| *wanted).map(|_| GrammarSpec::JsonObject),
        _ => Some(f.strings(name, CHOICES_MAX, CHOICE_BYTES_MAX)?).filter(|c| !c.is_empty()).map(GrammarSpec::Choice),
    };
    Ok(spec.map(|spec| (param, spec)))
}

/// A schema as an object, or as its text.
fn schema(f: &Fields<'_>, name: &str, value: &Value) -> Result<GrammarSpec, ApiError> {
    let parsed = match value {
        // a longer one would be refused as well once it is parsed, which takes a hundred times its length
        Value::String(text) if text.len() > GRAMMAR_BYTES_MAX => {
            let message = format!("{name} has {} bytes; a schema has at most {GRAMMAR_BYTES_MAX}", text.len());
            return Err(ApiError::invalid(name, message));
        }
        Value::String(text) => serde_json::from_str(text).ok(),
        other => Some(other.clone()),
    };
    let object = parsed.filter(Value::is_object);
    object.map(GrammarSpec::JsonSchema).ok_or_else(|| f.wrong(name, "a JSON schema: an object, or one as text"))
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
            let spec = schema(&inner, "schema", value)?;
            inner.refuse_rest()?;
            Some(("response_format", spec))
        }
        _ => return Err(format.wrong("type", kinds)),
    };
    format.refuse_rest()?;
    Ok(asked)
}
