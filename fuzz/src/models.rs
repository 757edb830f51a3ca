//! The fuzz targets of what a model brings from the network. Apart from the others, which the agent's tests include: they know no engine.
//! Each takes any bytes and fails only where a promise is broken: a panic, or progress beyond the end.

use std::fs;
use std::path::{Path, PathBuf};

use engine::chat_template::ChatTemplate;
use engine::model::{LoadOptions, load_model_with};
use engine::tokenizer::Tokenizer;

/// Takes any bytes; panics where a promise is broken.
type Target = fn(&[u8]);

/// Every target of a model's files.
pub const TARGETS: [(&str, Target); 2] = [("gguf_model", gguf_model), ("model_folder", model_folder)];

/// Parts of an input of [`model_folder`], in their order; what is not there is not written.
const FILES: [&str; 4] = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
/// Bytes of weights behind the header, which is the last part: enough for every model of the corpus.
const WEIGHTS_BYTES: usize = 16 << 10;

/// A GGUF file: it is refused, or a tokenizer, a template and a model come of it.
pub fn gguf_model(data: &[u8]) {
    file_loads(data);
}

/// Files of a folder, a zero byte between them, the last one the header of its weights, which are all zero.
pub fn model_folder(data: &[u8]) {
    folder_loads(data);
}

/// Whether a GGUF file of these bytes is whole.
pub fn file_loads(data: &[u8]) -> bool {
    Place::with(|place| {
        let path = place.join("m.gguf");
        fs::write(&path, data).is_ok() && loads(&path)
    })
}

/// Whether a folder of these files is whole.
pub fn folder_loads(data: &[u8]) -> bool {
    Place::with(|place| {
        let mut parts = data.splitn(FILES.len() + 1, |byte| *byte == 0);
        let written = FILES.iter().zip(&mut parts).all(|(name, part)| fs::write(place.join(name), part).is_ok());
        let header = parts.next().unwrap_or_default();
        let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; WEIGHTS_BYTES]].concat();
        written && fs::write(place.join("model.safetensors"), weights).is_ok() && loads(place)
    })
}

fn loads(path: &Path) -> bool {
    let (tokenizer, template) = (Tokenizer::from_dir(path), ChatTemplate::from_dir(path));
    if let Ok(tokenizer) = &tokenizer {
        let tokens = tokenizer.encode("count: 1 é", true);
        let _ = tokens.map(|tokens| tokenizer.decode(&tokens, false));
    }
    let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
    let mut before = 0;
    let model = load_model_with(path, &options, &mut |done, total| {
        assert!(before <= done && done <= total, "{before}, then {done} of {total}");
        before = done;
    });
    if let Ok(model) = &model {
        assert!(model.info().vocab_size > 0 && model.info().seq_len_max > 0);
    }
    tokenizer.is_ok() && template.is_ok() && model.is_ok()
}

/// A directory of its own, empty at each use.
struct Place(PathBuf);

impl Place {
    /// False where this machine has no place for files; then there is nothing to load either.
    fn with(run: impl FnOnce(&Path) -> bool) -> bool {
        let name = format!("truebeat-fuzz-model-{}-{:?}", std::process::id(), std::thread::current().id());
        let place = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(&place.0).is_ok() && run(&place.0)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
