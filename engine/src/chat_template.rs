//! The model's own chat template, rendered as `transformers` renders it. Templates come with models from the network,
//! so they run with a budget of steps and no way out; an engine that serves has them run in a process apart besides ([`sandbox`]), for
//! neither memory nor the time of one step has a bound here. What they can do wrong is an error with their name.
//! Pure once loaded, but for that process: the time a template may ask for is an argument.

mod python;
pub mod sandbox;
mod sources;

use std::io::Write;
use std::path::{Path, PathBuf};

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use serde_json::Value as Json;
use thiserror::Error;

use self::sandbox::Sandbox;
use self::sources::Sources;

/// Steps one rendering may take: thousands of messages, yet no endless loop (E7).
const FUEL_PER_RENDER: u64 = 20_000_000;
/// Nesting of macros and includes; deep enough for every published template.
const RECURSION_MAX: usize = 100;
/// No prompt is longer: a template that prints without end stops here, whatever its fuel.
const PROMPT_BYTES_MAX: usize = 16 << 20;
const NAME: &str = "chat_template";
/// A second template that some models have for conversations with tools.
const NAME_WITH_TOOLS: &str = "tool_use";

/// Why a chat cannot be rendered.
#[derive(Debug, Error)]
pub enum ChatTemplateError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid: {reason}")]
    Config { path: PathBuf, reason: String },
    #[error("the chat template of {path} does not parse: {reason}")]
    Syntax { path: PathBuf, reason: String },
    #[error(
        "this model has no chat template (neither chat_template.jinja nor `chat_template` in tokenizer_config.json, nor \
         `tokenizer.chat_template` in its GGUF file): use /v1/completions, or put a chat_template.jinja into the model's folder"
    )]
    NoTemplate,
    /// The template itself refused the messages (`raise_exception`); the text is meant for the client.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    #[error("the chat template failed: {0}")]
    Render(String),
    #[error("no process can be started that renders chats: {0}")]
    Renderer(std::io::Error),
}

/// What is rendered.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// The request's `messages`: an array of objects with `role` and `content`.
    pub messages: &'a Json,
    /// The request's `tools`, if any.
    pub tools: Option<&'a Json>,
    /// Ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), e.g. `enable_thinking`.
    pub extra: Option<&'a serde_json::Map<String, Json>>,
    /// Local time for `strftime_now`.
    pub now: DateTime,
}

/// How a model writes that it calls a tool; its template shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// Hermes, Qwen: `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`, any number of them, after any text.
    Hermes,
    /// Llama 3: the answer is `{"name": …, "parameters": {…}}` and nothing else.
    Llama3,
    /// Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, after any text.
    Mistral,
}

impl ToolFormat {
    /// What a template's text shows; nothing when it does not speak of tools.
    fn of_template(source: &str) -> Option<Self> {
        // Qwen3-Coder and GLM write the arguments as marks of their own, which nobody reads here: a call of theirs would stay text
        let no_json = ["<function=", "<arg_key>"].iter().any(|mark| source.contains(mark));
        if !source.contains("tools") || no_json {
            None
        } else if source.contains("<tool_call>") {
            Some(Self::Hermes)
        } else if source.contains("[TOOL_CALLS]") {
            // later ones write NAME[ARGS]{…}, which nobody reads here
            (!source.contains("[ARGS]")).then_some(Self::Mistral)
        } else if source.contains("<|python_tag|>") || source.contains("\"parameters\":") {
            Some(Self::Llama3)
        } else {
            None
        }
    }
}

/// A template that can be rendered.
#[derive(Debug)]
pub struct ChatTemplate {
    sources: Sources,
    tool_format: Option<ToolFormat>,
    place: Place,
}

/// Where it is rendered.
#[derive(Debug)]
enum Place {
    Here(Box<Environment<'static>>),
    Apart(Sandbox),
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`, of the folder or beside the GGUF file, or that file's own;
    /// `None` when the model has none. It is compiled and rendered in this process: what it asks of memory has no bound but the machine's.
    ///
    /// # Errors
    /// [`ChatTemplateError`] when a file is there but unusable.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, ChatTemplateError> {
        let Some((path, sources)) = Sources::from_dir(dir)? else { return Ok(None) };
        let refuse = |error: minijinja::Error| ChatTemplateError::Syntax { path, reason: describe(&error) };
        Self::compile(sources).map(Some).map_err(refuse)
    }

    /// As [`Self::from_dir`], compiled and rendered in processes apart, so that nothing a template does ends this one: for an engine that
    /// serves, whose program knows [`sandbox::RENDERER_FLAG`].
    ///
    /// # Errors
    /// As [`Self::from_dir`], and [`ChatTemplateError::Renderer`].
    pub fn sandboxed(dir: &Path) -> Result<Option<Self>, ChatTemplateError> {
        let Some((path, sources)) = Sources::from_dir(dir)? else { return Ok(None) };
        let (sandbox, tool_format) = (Sandbox::new(&sources, path)?, sources.tool_format());
        Ok(Some(Self { sources, tool_format, place: Place::Apart(sandbox) }))
    }

    fn compile(sources: Sources) -> Result<Self, minijinja::Error> {
        let mut environment = Environment::new();
        // as transformers sets up jinja
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL_PER_RENDER));
        environment.set_recursion_limit(RECURSION_MAX);
        python::add_to(&mut environment);
        environment.add_function("raise_exception", raise_exception);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_template_owned(NAME, without_generation_tags(&sources.default))?;
        if let Some(source) = &sources.with_tools {
            environment.add_template_owned(NAME_WITH_TOOLS, without_generation_tags(source))?;
        }
        let tool_format = sources.tool_format();
        Ok(Self { sources, tool_format, place: Place::Here(Box::new(environment)) })
    }

    /// How the model calls tools, if its template knows of any.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// The prompt for a chat. It holds the special tokens it needs: encode it without adding any.
    ///
    /// # Errors
    /// [`ChatTemplateError::Refused`] when the template rejects the messages, [`ChatTemplateError::Render`] when it fails.
    pub fn render(&self, input: ChatInput<'_>) -> Result<String, ChatTemplateError> {
        let environment = match &self.place {
            Place::Here(environment) => environment,
            Place::Apart(sandbox) => return sandbox.render(&self.sources, input),
        };
        let name = if self.sources.with_tools.is_some() && input.tools.is_some() { NAME_WITH_TOOLS } else { NAME };
        let template = environment.get_template(name).map_err(|error| render_error(&error))?;
        let mut variables: Vec<(String, Value)> = Vec::new();
        for (key, value) in input.extra.into_iter().flatten() {
            variables.push((key.clone(), Value::from(Serde(value))));
        }
        for (name, text) in &self.sources.special_tokens {
            variables.push((name.clone(), Value::from(text)));
        }
        variables.push(("messages".to_owned(), Value::from(Serde(input.messages))));
        variables.push(("tools".to_owned(), Value::from(Serde(input.tools))));
        variables.push(("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)));
        let now = input.now;
        variables.push(("strftime_now".to_owned(), Value::from_function(move |format: &str| strftime(format, now))));
        let mut prompt = Bounded(Vec::new());
        template.render_captured_to(Value::from_pairs(variables), &mut prompt).map_err(|error| render_error(&error))?;
        String::from_utf8(prompt.0).map_err(|error| ChatTemplateError::Render(error.to_string()))
    }
}

/// A prompt under way.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > PROMPT_BYTES_MAX {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// `{% generation %}…{% endgeneration %}` marks the assistant's text for training and prints nothing. It is no tag of
/// jinja, so it becomes `{% if true %}…{% endif %}`, which treats the white space around it alike.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        let tag_end = after.find("%}").unwrap_or(after.len());
        let (tag, tail) = after.split_at(tag_end);
        match tag.trim_matches(['-', '+', ' ', '\n', '\t']) {
            word @ "generation" => out.push_str(&tag.replacen(word, "if true", 1)),
            word @ "endgeneration" => out.push_str(&tag.replacen(word, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = tail;
    }
    out + rest
}

/// Marks an error as the template's own refusal; its detail is the template's message.
const REFUSAL: &str = "raise_exception: ";

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{REFUSAL}{message}")))
}

fn render_error(error: &minijinja::Error) -> ChatTemplateError {
    if error.kind() == ErrorKind::WriteFailure {
        return ChatTemplateError::Render(format!("the prompt is longer than {PROMPT_BYTES_MAX} bytes"));
    }
    let refusal = error.detail().and_then(|detail| detail.strip_prefix(REFUSAL));
    refusal.map_or_else(
        || ChatTemplateError::Render(describe(error)),
        |message| ChatTemplateError::Refused(message.to_owned()),
    )
}

fn describe(error: &minijinja::Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    let detail = error.detail().map_or_else(String::new, |detail| format!(": {detail}"));
    format!("{}{detail}{line}", error.kind())
}

fn strftime(format: &str, now: DateTime) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

#[cfg(test)]
mod tests;
