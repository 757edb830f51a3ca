//! The fuzz targets of what a model brings from the network. Apart from the others, which the agent's tests include: they know no engine.
//! Each takes any bytes and fails only where a promise is broken: a panic, or progress beyond the end.

use std::fs;
use std::path::{Path, PathBuf};

use engine::chat_template::{ChatInput, ChatTemplate};
use engine::model::{KvShape, LoadOptions, LogitsWanted, Model, SeqInput, StepBatch, load_model_with};
use engine::tokenizer::Tokenizer;

/// Takes any bytes; panics where a promise is broken.
type Target = fn(&[u8]);

/// Every target of a model's files.
pub const TARGETS: [(&str, Target); 2] = [("gguf_model", gguf_model), ("model_folder", model_folder)];

/// Parts of an input of [`model_folder`], in their order; what is empty is not written.
const FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors.index.json",
];
/// Those of them that may hold a template.
const TEMPLATES: [&str; 2] = ["tokenizer_config.json", "chat_template.jinja"];
/// Files of weights, whose headers are the parts behind these: the first alone, or, where there is an index, `0.safetensors` and so on.
const SHARDS_MAX: usize = 3;
/// Bytes of weights behind each header: enough for every model of the corpus.
const WEIGHTS_BYTES: usize = 16 << 10;
/// What a chat's rendering could grow with beyond any time and memory: the process that bounds both is not here.
const GROWS: [&str; 18] = [
    "*",
    "~",
    "+",
    "range",
    "macro",
    "recursive",
    "call",
    "set",
    "self",
    "block",
    "include",
    "import",
    "join",
    "replace",
    "format",
    "batch",
    "slice",
    "center",
];
/// Loops within loops go through the chat this often, each with two words.
const LOOPS_MAX: usize = 3;
const CHAT: &str = r#"[{"role": "user", "content": "count: 1 é"}, {"role": "assistant", "content": null}]"#;

/// A GGUF file: it is refused, or a tokenizer, a template and a model come of it.
pub fn gguf_model(data: &[u8]) {
    file_refusals(data);
}

/// Files of a folder, a zero byte between them, the last ones the headers of its weights, which are all zero.
pub fn model_folder(data: &[u8]) {
    folder_refusals(data);
}

/// What is refused of a GGUF file of these bytes, and why. Nothing: it is whole, its model runs, and its template prints a chat.
pub fn file_refusals(data: &[u8]) -> Vec<String> {
    Place::with(|place| {
        let path = place.join("m.gguf");
        if fs::write(&path, data).is_ok() { refusals(&path, data) } else { no_place() }
    })
}

/// What is refused of a folder of these files, as above.
pub fn folder_refusals(data: &[u8]) -> Vec<String> {
    Place::with(|place| {
        let mut parts = data.splitn(FILES.len() + SHARDS_MAX, |byte| *byte == 0);
        let files: Vec<(&str, &[u8])> =
            FILES.into_iter().zip(&mut parts).filter(|(_, part)| !part.is_empty()).collect();
        let written = files.iter().all(|(name, part)| fs::write(place.join(name), part).is_ok());
        let sharded = files.iter().any(|(name, _)| Some(name) == FILES.last());
        let weights = parts.enumerate().all(|(shard, header)| {
            let name = if sharded { format!("{shard}.safetensors") } else { "model.safetensors".to_owned() };
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header, &[0; WEIGHTS_BYTES]].concat();
            // without an index there is one file
            (!sharded && shard > 0) || fs::write(place.join(name), bytes).is_ok()
        });
        let templates = files.iter().filter(|(name, _)| TEMPLATES.contains(name)).map(|(_, part)| *part);
        if written && weights { refusals(place, &templates.collect::<Vec<_>>().concat()) } else { no_place() }
    })
}

fn no_place() -> Vec<String> {
    vec!["this machine has no place for files".to_owned()]
}

/// `templates`: what holds them, if there are any.
fn refusals(path: &Path, templates: &[u8]) -> Vec<String> {
    let mut refused = Vec::new();
    match Tokenizer::from_dir(path) {
        Ok(tokenizer) => {
            let tokens = tokenizer.encode("count: 1 é", true);
            let _ = tokens.map(|tokens| tokenizer.decode(&tokens, false));
        }
        Err(error) => refused.push(error.to_string()),
    }
    match ChatTemplate::from_dir(path) {
        Ok(None) => (),
        Ok(Some(template)) if tame(templates) => refused.extend(prints(&template).err()),
        Ok(Some(_)) => refused.push("the template could grow beyond any memory".to_owned()),
        Err(error) => refused.push(error.to_string()),
    }
    let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
    let mut before = 0;
    let model = load_model_with(path, &options, &mut |done, total| {
        assert!(before <= done && done <= total, "{before}, then {done} of {total}");
        before = done;
    });
    match model {
        Ok(mut model) => {
            assert!(model.info().vocab_size > 0 && model.info().seq_len_max > 0);
            refused.extend(runs(model.as_mut()).err());
        }
        Err(error) => refused.push(error.to_string()),
    }
    refused
}

/// Whether a template, wherever in these bytes it is, can be rendered in this process.
fn tame(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let (Some(first), Some(last)) = (
        ["{{", "{%"].iter().filter_map(|mark| text.find(mark)).min(),
        ["}}", "%}"].iter().filter_map(|mark| text.rfind(mark)).max(),
    ) else {
        return true;
    };
    let source = text.get(first..last).unwrap_or_default();
    let loops = source.matches("for").count();
    loops <= 2 * LOOPS_MAX && !GROWS.iter().any(|word| source.contains(word))
}

fn prints(template: &ChatTemplate) -> Result<(), String> {
    let messages = CHAT.parse().map_err(|error| format!("{error}"))?;
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
        now: Default::default(),
    };
    template.render(input).map(drop).map_err(|error| error.to_string())
}

/// A step of a token or two: it is refused, or every row that was asked for is there.
fn runs(model: &mut dyn Model) -> Result<(), String> {
    let (vocab_size, seq_len_max) = (model.info().vocab_size, model.info().seq_len_max);
    model.allocate_kv(KvShape { num_blocks: 1, block_size: 4 }).map_err(|error| error.to_string())?;
    let tokens: Vec<u32> = (0..seq_len_max.min(2)).map(|at| u32::from(at < vocab_size && at > 0)).collect();
    let rows_wanted = tokens.len();
    let seq = SeqInput { tokens, start_pos: 0, block_table: vec![0], logits: LogitsWanted::All };
    let logits = model.forward(&StepBatch::of(vec![seq])).map_err(|error| error.to_string())?;
    let lens: Vec<usize> = logits.rows.iter().flatten().map(Vec::len).collect();
    assert_eq!(lens, vec![vocab_size; rows_wanted], "rows of logits, each of the whole vocabulary");
    Ok(())
}

/// A directory of its own, empty at each use.
struct Place(PathBuf);

impl Place {
    /// Where this machine has no place for files there is nothing to load either.
    fn with(run: impl FnOnce(&Path) -> Vec<String>) -> Vec<String> {
        let name = format!("truebeat-fuzz-model-{}-{:?}", std::process::id(), std::thread::current().id());
        let place = Self(std::env::temp_dir().join(name));
        if fs::create_dir_all(&place.0).is_ok() { run(&place.0) } else { no_place() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
