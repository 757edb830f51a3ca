//! Where a model keeps its chat templates: files of its folder, or beside its GGUF file, or keys of that. They are read here, and not looked into.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{ChatTemplateError, NAME_WITH_TOOLS, ToolFormat};
use crate::weights::{Gguf, gguf};

/// A model's templates as text, with the special tokens they may name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Sources {
    pub default: String,
    pub with_tools: Option<String>,
    /// `bos_token`, `eos_token`, …: name and text.
    pub special_tokens: Vec<(String, String)>,
}

impl From<String> for Sources {
    fn from(default: String) -> Self {
        Self { default, ..Self::default() }
    }
}

impl Sources {
    /// The templates of a model, and the file they are in; `None` when it has none. What lies beside a GGUF file goes before its own, as a
    /// tokenizer there does.
    ///
    /// # Errors
    /// [`ChatTemplateError`] when a file is there but unusable.
    pub fn from_dir(dir: &Path) -> Result<Option<(PathBuf, Self)>, ChatTemplateError> {
        let Some(path) = gguf::find(dir) else { return Self::from_folder(dir) };
        let beside = Self::from_folder(path.parent().unwrap_or(dir))?;
        let (file, _) = Gguf::open(&path)
            .map_err(|error| ChatTemplateError::Config { path: path.clone(), reason: error.to_string() })?;
        let Some((path, mut sources)) = beside.or_else(|| Some((path, Self::of_gguf(&file)?))) else { return Ok(None) };
        for (name, text) in special_tokens(&file) {
            if sources.special_tokens.iter().all(|(known, _)| *known != name) {
                sources.special_tokens.push((name, text));
            }
        }
        Ok(Some((path, sources)))
    }

    fn from_folder(dir: &Path) -> Result<Option<(PathBuf, Self)>, ChatTemplateError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = match read_if_there(&config_path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|error| ChatTemplateError::Config { path: config_path.clone(), reason: error.to_string() })?,
            None => Json::Null,
        };
        let file_path = dir.join("chat_template.jinja");
        let (path, mut sources) = match read_if_there(&file_path)? {
            Some(default) => {
                let with_tools = read_if_there(&dir.join("additional_chat_templates/tool_use.jinja"))?;
                (file_path, Self { default, with_tools, ..Self::default() })
            }
            None => match of_config(&config) {
                Some(sources) => (config_path, sources),
                None => return Ok(None),
            },
        };
        let names = ["bos_token", "eos_token", "unk_token", "pad_token"].into_iter();
        let token = |name: &str| Some((name.to_owned(), token_text(config.get(name)?)?));
        sources.special_tokens = names.filter_map(token).collect();
        Ok(Some((path, sources)))
    }

    /// The templates of a GGUF file, without its special tokens.
    fn of_gguf(file: &Gguf) -> Option<Self> {
        let default = file.text("tokenizer.chat_template")?.to_owned();
        let with_tools = file.text("tokenizer.chat_template.tool_use").map(str::to_owned);
        Some(Self { default, with_tools, ..Self::default() })
    }

    /// How the model calls tools, if its template knows of any.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        ToolFormat::of_template(self.with_tools.as_ref().unwrap_or(&self.default))
    }
}

/// The special tokens of a GGUF file, which names them by id.
fn special_tokens(file: &Gguf) -> Vec<(String, String)> {
    let token = |(name, key): (&str, &str)| {
        let id = usize::try_from(file.number(&format!("tokenizer.ggml.{key}_token_id"))?).ok()?;
        Some((name.to_owned(), file.list("tokenizer.ggml.tokens")?.get(id)?.as_str()?.to_owned()))
    };
    let names = [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")];
    names.into_iter().filter_map(token).collect()
}

fn read_if_there(path: &Path) -> Result<Option<String>, ChatTemplateError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ChatTemplateError::Read { path: path.to_owned(), source }),
    }
}

/// A string, or a list of named templates of which `default` is the one for chats and `tool_use` the one for chats with tools.
fn of_config(config: &Json) -> Option<Sources> {
    match config.get("chat_template")? {
        Json::String(source) => Some(source.clone().into()),
        Json::Array(named) => {
            let text = |entry: &Json| Some(entry.get("template")?.as_str()?.to_owned());
            let find = |name: &str| named.iter().find(|entry| entry["name"] == name);
            let default = text(find("default").or_else(|| named.first())?)?;
            Some(Sources { default, with_tools: find(NAME_WITH_TOOLS).and_then(text), ..Sources::default() })
        }
        _ => None,
    }
}

/// Special tokens are written as text or as an object with `content`.
fn token_text(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}
