//! `truebeat demo-model`: a tiny random model that is complete in every file. It needs no download, serves in
//! microseconds and talks nonsense; demos and tests run on it. The same seed gives the same folder, byte for byte.
//! It loads in `transformers` too, so that nothing about it is private to this engine.

mod tokenizer;
mod weights;

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use thiserror::Error;

/// Which architecture the model claims, and has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoArch {
    /// LlamaForCausalLM, f32, output head of its own.
    Llama,
    /// Qwen3ForCausalLM, bf16, tied embeddings.
    Qwen3,
    /// As Llama, with eight KV heads for up to eight ranks, quantised (Q8_0), as a GGUF file.
    LlamaQ8,
    /// As Qwen3, with 78 million parameters: a step takes milliseconds, as a real model's, and not microseconds.
    #[value(name = "qwen3-78m")]
    Qwen3Medium,
}

impl DemoArch {
    fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
            Self::LlamaQ8 => "llama-q8",
            Self::Qwen3Medium => "qwen3-78m",
        }
    }

    fn is_qwen3(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Medium)
    }
}

/// Arguments of `truebeat demo-model`.
#[derive(Debug, Args)]
pub struct DemoModelArgs {
    /// Folder to write; made if it is not there
    pub dir: PathBuf,
    /// Architecture of the model
    #[arg(long, value_enum, default_value_t = DemoArch::Llama)]
    pub arch: DemoArch,
    /// Seed of the weights: the same seed gives the same model
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemoModelReport {
    pub dir: PathBuf,
    pub arch: &'static str,
    pub vocab_size: usize,
    pub parameters: usize,
    /// Bytes of all files.
    pub bytes: u64,
}

impl fmt::Display for DemoModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dir, arch, vocab_size, parameters, bytes } = self;
        let dir = dir.display();
        write!(f, "{dir}: random {arch} model, {parameters} parameters, vocabulary {vocab_size}, {bytes} bytes")
    }
}

/// Why no model was written.
#[derive(Debug, Error)]
pub enum DemoModelError {
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{path} is there already and is not this demo model's; choose another folder, or remove it")]
    Foreign { path: PathBuf },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot train the tokenizer on the bundled text: {0}")]
    Tokenizer(String),
    #[error("cannot lay out the weights: {0}")]
    Weights(String),
}

/// Runs `truebeat demo-model`; the caller prints the report. A file of another content in the folder is somebody's model.
///
/// # Errors
/// [`DemoModelError`] as [`write_demo_model`], and where such a file is in the way: then nothing is written.
pub fn run(args: &DemoModelArgs) -> Result<DemoModelReport, DemoModelError> {
    let made = Made::of(args.arch, args.seed)?;
    for (name, content) in &made.files {
        let path = args.dir.join(name);
        match std::fs::read(&path) {
            Ok(found) if found != *content => return Err(DemoModelError::Foreign { path }),
            Err(source) if source.kind() != ErrorKind::NotFound => return Err(DemoModelError::Read { path, source }),
            Ok(_) | Err(_) => {}
        }
    }
    made.write(&args.dir)
}

/// Writes a complete model folder into `dir`.
///
/// # Errors
/// [`DemoModelError::Write`] naming the file that could not be written.
pub fn write_demo_model(dir: &Path, arch: DemoArch, seed: u64) -> Result<DemoModelReport, DemoModelError> {
    Made::of(arch, seed)?.write(dir)
}

/// A model that is not written yet.
struct Made {
    shape: DemoShape,
    parameters: usize,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Made {
    fn of(arch: DemoArch, seed: u64) -> Result<Self, DemoModelError> {
        let tokenizer = tokenizer::train(arch)?;
        let shape = DemoShape::of(arch, tokenizer.vocab_size);
        let weights = weights::random(&shape, seed)?;
        let mut files = vec![
            ("tokenizer.json", tokenizer.json.into_bytes()),
            ("tokenizer_config.json", pretty(&tokenizer::config(arch))),
        ];
        if arch == DemoArch::LlamaQ8 {
            files.push(("model.gguf", weights.bytes));
        } else {
            files.push(("model.safetensors", weights.bytes));
            files.push(("config.json", pretty(&config(&shape))));
            let ends = json!({"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID]});
            files.push(("generation_config.json", pretty(&ends)));
        }
        Ok(Self { shape, parameters: weights.parameters, files })
    }

    fn write(self, dir: &Path) -> Result<DemoModelReport, DemoModelError> {
        std::fs::create_dir_all(dir).map_err(|source| DemoModelError::Write { path: dir.to_owned(), source })?;
        let mut bytes = 0;
        for (name, content) in self.files {
            let path = dir.join(name);
            bytes += content.len() as u64;
            std::fs::write(&path, content).map_err(|source| DemoModelError::Write { path, source })?;
        }
        let (arch, vocab_size) = (self.shape.arch.name(), self.shape.vocab);
        Ok(DemoModelReport { dir: dir.to_owned(), arch, vocab_size, parameters: self.parameters, bytes })
    }
}

/// Ids of the special tokens: the trainer gives them the first numbers, in this order.
const BOS_ID: u32 = 0;
const EOS_ID: u32 = 1;
const SPECIAL_TOKENS: [&str; 4] = ["<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"];

/// Sizes of a demo model.
struct DemoShape {
    arch: DemoArch,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    seq_len_max: usize,
}

impl DemoShape {
    fn of(arch: DemoArch, vocab: usize) -> Self {
        // Qwen3's heads are wider than hidden / heads, as in the real ones
        let (head_dim, heads, kv_heads, intermediate) = match arch {
            DemoArch::Llama => (16, 4, 2, 160),
            DemoArch::Qwen3 => (32, 4, 2, 160),
            // an eighth of everything is a whole number of blocks of 32
            DemoArch::LlamaQ8 => (32, 8, 8, 256),
            DemoArch::Qwen3Medium => (64, 12, 4, 2048),
        };
        let (hidden, layers) = if arch == DemoArch::Qwen3Medium { (768, 12) } else { (64, 2) };
        Self { arch, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, seq_len_max: 8192 }
    }
}

fn config(shape: &DemoShape) -> Value {
    let (class, model_type, dtype, tied) = match shape.arch {
        DemoArch::Llama | DemoArch::LlamaQ8 => ("LlamaForCausalLM", "llama", "float32", false),
        DemoArch::Qwen3 | DemoArch::Qwen3Medium => ("Qwen3ForCausalLM", "qwen3", "bfloat16", true),
    };
    json!({
        "architectures": [class],
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.seq_len_max,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": false,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    })
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn somebody_elses_model_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut args = DemoModelArgs { dir: dir.path().join("model"), arch: DemoArch::Llama, seed: 1 };
        run(&args).unwrap();
        run(&args).expect("the same again");
        args.seed = 2;
        let refused = run(&args).unwrap_err();
        assert!(
            matches!(&refused, DemoModelError::Foreign { path } if path.ends_with("model.safetensors")),
            "{refused}"
        );
        args.seed = 1;
        run(&args).expect("nothing was written");
    }

    #[test]
    fn the_same_seed_gives_the_same_folder_and_another_seed_other_weights() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, seed| {
            let path = dir.path().join(name);
            write_demo_model(&path, DemoArch::Llama, seed).unwrap();
            path
        };
        let (a, b, c) = (write("a", 7), write("b", 7), write("c", 8));
        let file = |dir: &Path, name: &str| std::fs::read(dir.join(name)).unwrap();
        for name in ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"] {
            assert!(file(&a, name) == file(&b, name), "{name}");
        }
        assert!(file(&a, "model.safetensors") != file(&c, "model.safetensors"));
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let error = write_demo_model(Path::new("/dev/null/x"), DemoArch::Llama, 0).unwrap_err().to_string();
        assert!(error.contains("/dev/null/x"), "{error}");
    }
}
