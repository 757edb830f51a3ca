//! Tools that the model may or must call: what the request says of them, the grammar that forces a call, and the calls in what
//! comes out. How a model writes a call is its template's business ([`ToolFormat`]).

mod calls;
mod forced;
mod parser;

use serde_json::{Value, json};

use crate::codec::ToolFormat;
use crate::grammar::GrammarSpec;
use crate::handle::Ready;
use crate::server::error::ApiError;
use crate::server::fields::Fields;

pub use parser::{CallPiece, Parsed, ToolParser};

const TOOLS_MAX: usize = 128;
const NAME_CHARS_MAX: usize = 64;

/// What a request says about tools, once something may be called.
#[derive(Debug, Clone)]
pub struct ToolUse {
    pub format: ToolFormat,
    /// The functions that may be called.
    functions: Vec<Function>,
    choice: Choice,
    /// More than one call in an answer is fine.
    parallel: bool,
    /// As the request has them, for the template.
    described: Value,
    marks: Marks,
}

/// The tokens that begin and end calls, where they are ones that no text has.
#[derive(Debug, Clone, Copy, Default)]
struct Marks {
    begin: Option<u32>,
    end: Option<u32>,
}

/// A function, as far as its calls are concerned.
#[derive(Debug, Clone, PartialEq)]
struct Function {
    name: String,
    /// Schema of its arguments.
    parameters: Value,
    /// The arguments must satisfy the schema even where the model is free to call or not.
    strict: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Choice {
    /// As the model likes.
    Auto,
    /// Some call, at least one.
    Required,
    /// This function, whose name the client knows already.
    Named,
}

impl ToolUse {
    /// What the request says; nothing when it has no tools, or wants none called.
    ///
    /// # Errors
    /// A field is not what it must be, or the model knows no tools.
    pub fn of(f: &Fields<'_>, ready: &Ready) -> Result<Option<Self>, ApiError> {
        let (tools, choice) = (f.get("tools"), f.get("tool_choice"));
        let parallel = f.bool("parallel_tool_calls")?.unwrap_or(true);
        let described = match tools {
            Some(Value::Array(list)) if list.len() <= TOOLS_MAX => list.clone(),
            None => Vec::new(),
            Some(_) => return Err(f.wrong("tools", &format!("a list of at most {TOOLS_MAX} tools"))),
        };
        let functions: Vec<Function> =
            described.iter().enumerate().map(|(i, tool)| function(i, tool)).collect::<Result<_, _>>()?;
        if functions.is_empty() {
            let harmless = [json!("none"), json!("auto")];
            return match choice {
                Some(c) if !harmless.contains(c) => Err(f.wrong("tool_choice", "\"none\" where there are no tools")),
                _ => Ok(None),
            };
        }
        let Some((choice, functions)) = chosen(f, choice, functions)? else { return Ok(None) };
        let format = ready.codec.tool_format().ok_or_else(|| {
            ApiError::invalid("tools", "this model's chat template does not say how it calls tools; none can be used")
        })?;
        let marks = match format {
            ToolFormat::Hermes => Marks { begin: special(parser::OPEN, ready)?, end: special(parser::CLOSE, ready)? },
            ToolFormat::Llama3 => Marks { begin: special(parser::PYTHON_TAG, ready)?, end: None },
            ToolFormat::Mistral => Marks { begin: special(parser::TOOL_CALLS, ready)?, end: None },
        };
        Ok(Some(Self { format, functions, choice, parallel, described: Value::Array(described), marks }))
    }

    /// The answer's special tokens must show: one of them begins or ends calls, which nothing else does. (A Llama's call is known without its
    /// mark.)
    pub fn shows_special(&self) -> bool {
        let Marks { begin, end } = self.marks;
        self.format != ToolFormat::Llama3 && (begin.is_some() || end.is_some())
    }

    /// The tools as the template describes them to the model.
    pub fn described(&self) -> Option<&Value> {
        Some(&self.described)
    }

    /// Prompt and grammar are made: what only they needed does not wait with the request.
    pub fn forget_schemas(&mut self) {
        self.described = Value::Null;
        self.functions.iter_mut().for_each(|function| function.parameters = Value::Null);
    }

    /// The grammar of the output, where there is something to force.
    pub fn grammar(&self) -> Option<GrammarSpec> {
        let strict = self.functions.iter().any(|f| f.strict);
        match (&self.choice, strict) {
            (Choice::Auto, false) => None,
            (Choice::Auto, true) => Some(forced::free(self.format, &self.functions, self.marks)),
            (Choice::Required, _) => Some(forced::forced(self.format, &self.functions, self.parallel, self.marks)),
            (Choice::Named, _) => Some(forced::forced(self.format, &self.functions, false, self.marks)),
        }
    }

    /// A parser for one output; `id` begins the ids of its calls.
    pub fn parser(&self, id: String) -> ToolParser {
        let names = self.functions.iter().map(|f| f.name.clone()).collect();
        let calls_max = if self.parallel { usize::MAX } else { 1 };
        ToolParser::new(self.format, names, calls_max, id)
    }

    /// How an output ends that called something and would have ended with "stop".
    pub fn finish_reason(&self) -> &'static str {
        // as OpenAI: who named the function knows that it is called
        if self.choice == Choice::Named { "stop" } else { "tool_calls" }
    }
}

/// The special token that is spelled like this, if there is one.
fn special(text: &str, ready: &Ready) -> Result<Option<u32>, ApiError> {
    let ids = ready.codec.encode(text, false)?;
    Ok(match ids[..] {
        [id] if ready.codec.is_special(id) => Some(id),
        _ => None,
    })
}

fn function(index: usize, tool: &Value) -> Result<Function, ApiError> {
    let wrong = |what: String| ApiError::invalid("tools", format!("tools[{index}] {what}"));
    let kind = tool.get("type").and_then(Value::as_str);
    if kind != Some("function") {
        return Err(wrong("must have the type \"function\"".into()));
    }
    let function = tool.get("function").and_then(Value::as_object);
    let function = function.ok_or_else(|| wrong("must have an object `function`".into()))?;
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    let fine = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > NAME_CHARS_MAX || !name.chars().all(fine) {
        return Err(wrong(format!("must have a name of 1 to {NAME_CHARS_MAX} letters, digits, `_` and `-`")));
    }
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object"}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong("must have parameters that are a JSON schema".into())),
    };
    let strict = match function.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(_) => return Err(wrong("must have true or false for strict".into())),
    };
    Ok(Function { name: name.to_owned(), parameters, strict })
}

/// The choice, and the functions that are left by it; nothing when none may be called.
fn chosen(
    f: &Fields<'_>,
    choice: Option<&Value>,
    functions: Vec<Function>,
) -> Result<Option<(Choice, Vec<Function>)>, ApiError> {
    let wanted =
        "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": one of the tools'}}";
    match choice {
        None => Ok(Some((Choice::Auto, functions))),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Ok(None),
            "auto" => Ok(Some((Choice::Auto, functions))),
            "required" => Ok(Some((Choice::Required, functions))),
            _ => Err(f.wrong("tool_choice", wanted)),
        },
        Some(object) => {
            let is_function = object.get("type").and_then(Value::as_str) == Some("function");
            let name = object.get("function").and_then(|o| o.get("name")).and_then(Value::as_str);
            let found = functions.into_iter().find(|function| is_function && Some(function.name.as_str()) == name);
            let found = found.ok_or_else(|| f.wrong("tool_choice", wanted))?;
            Ok(Some((Choice::Named, vec![found])))
        }
    }
}
