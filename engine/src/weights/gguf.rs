//! A GGUF file: metadata and tensors in one. Parsing is pure: bytes in, checked tables out. No count, length or offset of the file
//! is believed: each is tested against the bytes that are there before anything is reserved or read.

mod builder;
mod names;
mod read;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::header::{HeaderFault, TensorInfo};
use super::{Bytes, WeightsError, map_file};
pub use builder::Builder;
pub use names::name_in_file;
use read::Reader;
pub use read::Value;

/// Tensors a file may have, each expert counted.
const TENSORS_MAX: usize = 1 << 20;
/// Dimensions a tensor may have.
const DIMS_MAX: u32 = 4;

/// Metadata and places of tensors.
#[derive(Debug, Default)]
pub struct Gguf {
    pub metadata: BTreeMap<String, Value>,
    /// By the names of a Hugging Face folder, shapes in its order.
    pub(super) tensors: BTreeMap<String, TensorInfo>,
}

/// The GGUF file that `path` means: the file itself, or the only one of a folder that has no `config.json`.
pub fn find(path: &Path) -> Option<PathBuf> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) && path.is_file();
    if is_gguf(path) {
        return Some(path.to_owned());
    }
    if path.join("config.json").exists() {
        return None;
    }
    let mut files = std::fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).filter(|path| is_gguf(path));
    let first = files.next()?;
    files.next().is_none().then_some(first)
}

impl Gguf {
    /// Maps and parses a file.
    ///
    /// # Errors
    /// [`WeightsError`] naming the file and, where it is one tensor's fault, the tensor.
    pub fn open(path: &Path) -> Result<(Self, Bytes), WeightsError> {
        let bytes = map_file(path)?;
        let gguf = Self::parse(&bytes).map_err(|fault| match fault.tensor {
            Some(tensor) => WeightsError::Tensor { path: path.to_owned(), tensor, reason: fault.reason },
            None => WeightsError::Gguf { path: path.to_owned(), reason: fault.reason },
        })?;
        Ok((gguf, bytes))
    }

    /// Parses the bytes of a whole file.
    ///
    /// # Errors
    /// A [`HeaderFault`] saying what cannot be.
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderFault> {
        let mut reader = Reader::new(bytes);
        let (metadata, raw) = head(&mut reader).map_err(|reason| HeaderFault { tensor: None, reason })?;
        let alignment = metadata.get("general.alignment").map_or(Some(32), Value::as_u64);
        let Some(alignment) = alignment.filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 20) else {
            let reason = "its `general.alignment` is no power of two up to 2^20".to_owned();
            return Err(HeaderFault { tensor: None, reason });
        };
        let data_start = (reader.position() as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for tensor in raw {
            let info = tensor
                .place(data_start, bytes.len() as u64)
                .map_err(|reason| HeaderFault { tensor: Some(tensor.name.clone()), reason })?;
            names::place(&tensor.name, info, &mut tensors);
            if tensors.len() > TENSORS_MAX {
                let reason = format!("it names more than {TENSORS_MAX} tensors");
                return Err(HeaderFault { tensor: None, reason });
            }
        }
        let mut gguf = Self { metadata, tensors };
        gguf.mark_interleaved();
        Ok(gguf)
    }

    /// Text of a key.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.get(key)?.as_str()
    }

    /// Whole number of a key.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.metadata.get(key)?.as_u64()
    }

    /// Elements of a key.
    pub fn list(&self, key: &str) -> Option<&[Value]> {
        self.metadata.get(key)?.as_list()
    }

    /// Shape of a tensor, by its name in a Hugging Face folder.
    pub fn shape(&self, tensor: &str) -> Option<&[usize]> {
        self.tensors.get(tensor).map(|info| &info.shape[..])
    }

    /// Files of the llama family keep the two halves of each head of Q and K interleaved.
    fn mark_interleaved(&mut self) {
        if self.text("general.architecture") != Some("llama") {
            return;
        }
        let heads = self.number("llama.attention.head_count");
        let kv_heads = self.number("llama.attention.head_count_kv").or(heads);
        for (name, info) in &mut self.tensors {
            let heads = match name {
                name if name.contains(".self_attn.q_proj.") => heads,
                name if name.contains(".self_attn.k_proj.") => kv_heads,
                _ => None,
            };
            info.interleaved_heads = heads.and_then(|heads| usize::try_from(heads).ok());
        }
    }
}

struct RawTensor {
    name: String,
    /// Fastest first, as in the file.
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl RawTensor {
    fn place(&self, data_start: u64, file_len: u64) -> Result<TensorInfo, String> {
        let dims: Option<Vec<usize>> = self.dims.iter().rev().map(|size| usize::try_from(*size).ok()).collect();
        let elements = self.dims.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let (Some(shape), Some(elements)) = (dims, elements) else {
            return Err(format!("its shape {:?} is larger than any memory", self.dims));
        };
        let start = data_start.checked_add(self.offset).ok_or_else(|| format!("its offset is {}", self.offset))?;
        let dtype = type_name(self.kind);
        let mut info = TensorInfo { dtype, shape, offset: start, len_bytes: 0, interleaved_heads: None };
        if let Some(kind) = info.weight_type() {
            let cols = info.shape.last().copied().unwrap_or(1);
            let len = usize::try_from(elements).ok().filter(|_| kind.len_bytes(cols).is_some());
            let Some(len) = len.and_then(|elements| kind.len_bytes(elements)) else {
                return Err(format!("rows of {cols} values are no whole blocks of {}", info.dtype));
            };
            info.len_bytes = len as u64;
        }
        match info.offset.checked_add(info.len_bytes) {
            Some(end) if end <= file_len => Ok(info),
            _ => {
                let (start, len) = (info.offset, info.len_bytes);
                Err(format!("it claims {len} bytes from {start} on; the file has {file_len}: is the copy complete?"))
            }
        }
    }
}

fn head(reader: &mut Reader<'_>) -> Result<(BTreeMap<String, Value>, Vec<RawTensor>), String> {
    if reader.take(4)? != b"GGUF" {
        return Err("it does not begin with `GGUF`".to_owned());
    }
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        return Err(format!("it is of version {version}; versions 2 and 3 (little endian) can be read"));
    }
    let (tensors, pairs) = (reader.u64()?, reader.u64()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..reader.plausible(pairs, 12)? {
        let key = reader.text()?;
        let value = reader.value().map_err(|reason| format!("key `{key}`: {reason}"))?;
        metadata.insert(key, value);
    }
    let mut raw = Vec::new();
    for _ in 0..reader.plausible(tensors, 24)? {
        let name = reader.text()?;
        let count = reader.u32()?;
        if count == 0 || count > DIMS_MAX {
            return Err(format!("tensor `{name}` has {count} dimensions; 1 to {DIMS_MAX} can be"));
        }
        let dims = (0..count).map(|_| reader.u64()).collect::<Result<_, _>>()?;
        raw.push(RawTensor { name, dims, kind: reader.u32()?, offset: reader.u64()? });
    }
    Ok((metadata, raw))
}

/// As the types are called where there is a name for them in this engine.
fn type_name(kind: u32) -> String {
    match kind {
        0 => "F32",
        1 => "F16",
        8 => "Q8_0",
        12 => "Q4_K",
        14 => "Q6_K",
        30 => "BF16",
        other => return format!("ggml type {other}"),
    }
    .to_owned()
}

#[cfg(test)]
pub mod tests;
