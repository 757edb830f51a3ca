//! Weights of a model: one `model.safetensors`, shards named by `model.safetensors.index.json`, or one GGUF file. Files are mapped
//! and tensors stay where they are, in their own type; every place is checked against the file's true length at opening.

pub mod gguf;
mod header;
mod raw_weight;
mod sum;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::raw::FileMap;
pub use gguf::{Gguf, Value as GgufValue};
use header::{HeaderFault, TensorInfo};
pub use raw_weight::{Bytes, RawWeight, WeightType, decode_row, q4_k_bits, q4_k_scales, q6_k_bits};
pub use sum::sum_of;

/// What can be wrong with the weights of a folder.
#[derive(Debug, Error)]
pub enum WeightsError {
    #[error(
        "{dir} holds neither model.safetensors nor model.safetensors.index.json: it is not a model folder with safetensors weights"
    )]
    NoWeights { dir: PathBuf },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not an index of weight files: {reason}")]
    Index { path: PathBuf, reason: String },
    #[error("{path} is not a usable safetensors file: {reason}")]
    Header { path: PathBuf, reason: String },
    #[error("{path} is not a usable GGUF file: {reason}")]
    Gguf { path: PathBuf, reason: String },
    #[error("{path}: tensor `{tensor}`: {reason}")]
    Tensor { path: PathBuf, tensor: String, reason: String },
    #[error("{dir} lacks the tensor `{tensor}` (expected shape {expected:?})")]
    Missing { dir: PathBuf, tensor: String, expected: Vec<usize> },
    #[error("{path}: tensor `{tensor}` has shape {found:?}, but config.json calls for {expected:?}")]
    Shape { path: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("{path}: tensor `{tensor}` is {found}; the engine reads F32, BF16, F16, Q8_0, Q4_K and Q6_K")]
    Dtype { path: PathBuf, tensor: String, found: String },
}

/// What a fingerprint looks at of a file: its beginning, and so many samples of so many bytes.
const HEAD_SAMPLE: usize = 1 << 20;
const SAMPLES: usize = 64;
const SAMPLE: usize = 4096;

/// The opened weight files of a folder, with every tensor's place checked.
#[derive(Debug)]
pub struct WeightsFolder {
    dir: PathBuf,
    files: Vec<(PathBuf, Bytes)>,
    /// Tensor name to its file and place.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

impl WeightsFolder {
    /// Opens the weight files of `dir` and reads their headers.
    ///
    /// # Errors
    /// [`WeightsError`] naming the file and, where it is one tensor's fault, the tensor.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let (single, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
        let mut folder = Self { dir: dir.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        if single.is_file() {
            folder.add_file(single, None)?;
        } else if index.is_file() {
            for (file, names) in read_index(&index)? {
                folder.add_file(dir.join(file), Some(&names))?;
            }
        } else {
            return Err(WeightsError::NoWeights { dir: dir.to_owned() });
        }
        Ok(folder)
    }

    /// The tensors of a GGUF file, under the names they have in a folder.
    pub fn of_gguf(path: &Path, gguf: Gguf, bytes: Bytes) -> Self {
        let tensors = gguf.tensors.into_iter().map(|(name, info)| (name, (0, info))).collect();
        Self { dir: path.to_owned(), files: vec![(path.to_owned(), bytes)], tensors }
    }

    /// Names what the files hold: their lengths, times of change and heads, and samples of the rest. Who changes weights in place without
    /// any of these is not seen.
    ///
    /// # Errors
    /// A file that can no longer be asked for its time.
    pub fn fingerprint(&self) -> Result<u64, WeightsError> {
        let mut words = Vec::new();
        for (path, bytes) in &self.files {
            let read_error = |source| WeightsError::Read { path: path.clone(), source };
            let changed = std::fs::metadata(path).and_then(|about| about.modified()).map_err(read_error)?;
            let changed = changed.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            words.extend([bytes.len() as u64, changed.as_secs(), u64::from(changed.subsec_nanos())]);
            words.push(sum_of(&bytes[..bytes.len().min(HEAD_SAMPLE)]));
            let starts = (0..SAMPLES).map(|i| bytes.len() / SAMPLES * i);
            words.extend(starts.map(|at| sum_of(&bytes[at..bytes.len().min(at + SAMPLE)])));
        }
        Ok(sum_of(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()))
    }

    /// Whether a tensor of this name exists.
    pub fn contains(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of a tensor on disk; 0 when there is none.
    pub fn len_bytes(&self, tensor: &str) -> u64 {
        self.tensors.get(tensor).map_or(0, |(_, info)| info.len_bytes)
    }

    /// Bytes on disk of all tensors whose name is wanted.
    pub fn len_bytes_where(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        self.tensors.iter().filter(|(name, _)| wanted(name)).map(|(_, (_, info))| info.len_bytes).sum()
    }

    /// Type of a tensor, if it is there and of a type that can be read.
    pub fn weight_type(&self, tensor: &str) -> Option<WeightType> {
        self.tensors.get(tensor)?.1.weight_type()
    }

    /// Types of the tensors, of those that can be read.
    pub fn kinds(&self) -> impl Iterator<Item = WeightType> {
        self.tensors.values().filter_map(|(_, info)| info.weight_type())
    }

    /// A tensor of `rows × cols`, where it lies.
    ///
    /// # Errors
    /// [`WeightsError`] when it is missing, of another shape or of a type that cannot be read.
    pub fn matrix(&self, tensor: &str, rows: usize, cols: usize) -> Result<RawWeight, WeightsError> {
        self.find(tensor, &[rows, cols], (rows, cols))
    }

    /// Why a tensor that is there cannot be used as wanted.
    pub fn unusable(&self, tensor: &str, reason: String) -> WeightsError {
        let file = self.tensors.get(tensor).and_then(|(file, _)| self.files.get(*file));
        let path = file.map_or_else(|| self.dir.clone(), |(path, _)| path.clone());
        WeightsError::Tensor { path, tensor: tensor.to_owned(), reason }
    }

    /// A tensor of one dimension as f32.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn vector(&self, tensor: &str, len: usize) -> Result<Vec<f32>, WeightsError> {
        Ok(self.find(tensor, &[len], (1, len))?.to_f32())
    }

    fn find(&self, tensor: &str, expected: &[usize], (rows, cols): (usize, usize)) -> Result<RawWeight, WeightsError> {
        let Some((file, info)) = self.tensors.get(tensor) else {
            let (dir, tensor) = (self.dir.clone(), tensor.to_owned());
            return Err(WeightsError::Missing { dir, tensor, expected: expected.to_vec() });
        };
        let (path, bytes) = &self.files[*file];
        let (path, tensor) = (|| path.clone(), || tensor.to_owned());
        if info.shape != expected {
            let (expected, found) = (expected.to_vec(), info.shape.clone());
            return Err(WeightsError::Shape { path: path(), tensor: tensor(), expected, found });
        }
        let Some(kind) = info.weight_type() else {
            return Err(WeightsError::Dtype { path: path(), tensor: tensor(), found: info.dtype.clone() });
        };
        let (start, end) = (info.offset as usize, (info.offset + info.len_bytes) as usize);
        let weight = bytes.part(start..end).and_then(|bytes| RawWeight::new(rows, cols, kind, bytes));
        let weight = match info.interleaved_heads {
            None => weight,
            Some(heads) => weight.and_then(|weight| weight.halves_apart(heads)),
        };
        weight.ok_or_else(|| {
            let reason = format!("bytes {start}..{end} are not a {rows} x {cols} matrix of {}", info.dtype);
            WeightsError::Tensor { path: path(), tensor: tensor(), reason }
        })
    }

    /// Opens one file; with `names` (from an index) only those tensors are taken, and all must be there.
    fn add_file(&mut self, path: PathBuf, names: Option<&[String]>) -> Result<(), WeightsError> {
        let (bytes, mut found) = open_file(&path)?;
        let index = self.files.len();
        match names {
            None => self.tensors.extend(found.into_iter().map(|(name, info)| (name, (index, info)))),
            Some(names) => {
                for name in names {
                    let Some((name, info)) = found.remove_entry(name) else {
                        let reason = "the index places it in this file, which does not hold it".to_owned();
                        return Err(WeightsError::Tensor { path, tensor: name.clone(), reason });
                    };
                    self.tensors.insert(name, (index, info));
                }
            }
        }
        self.files.push((path, bytes));
        Ok(())
    }
}

fn open_file(path: &Path) -> Result<(Bytes, BTreeMap<String, TensorInfo>), WeightsError> {
    let fault = |fault: HeaderFault| match fault.tensor {
        Some(tensor) => WeightsError::Tensor { path: path.to_owned(), tensor, reason: fault.reason },
        None => WeightsError::Header { path: path.to_owned(), reason: fault.reason },
    };
    let bytes = map_file(path)?;
    let file_len = bytes.len() as u64;
    let Some(length_field) = bytes.first_chunk() else {
        let reason = format!("it has {file_len} bytes, too few for a header: is the copy complete?");
        return Err(WeightsError::Header { path: path.to_owned(), reason });
    };
    let len = header::header_len(*length_field, file_len).map_err(fault)?;
    let header_end = header::LENGTH_BYTES + len;
    let tensors = header::parse(&bytes[header::LENGTH_BYTES as usize..header_end as usize], file_len).map_err(fault)?;
    Ok((bytes, tensors))
}

fn map_file(path: &Path) -> Result<Bytes, WeightsError> {
    let read_error = |source| WeightsError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read_error)?;
    if file.metadata().map_err(read_error)?.len() == 0 {
        return Ok(Bytes::from(Vec::new())); // nothing cannot be mapped
    }
    FileMap::new(&file).map(Bytes::of_map).map_err(read_error)
}

/// The index, turned around: each file with the tensors it must hold.
fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, WeightsError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let bytes = std::fs::read(path).map_err(|source| WeightsError::Read { path: path.to_owned(), source })?;
    let refuse = |reason: String| WeightsError::Index { path: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(&bytes).map_err(|error| refuse(error.to_string()))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in index.weight_map {
        // a model folder comes from the network: it may not name files outside itself
        if Path::new(&file).file_name().is_none_or(|name| name != file.as_str()) {
            return Err(refuse(format!("`{tensor}` is placed in `{file}`, which is not a plain file name")));
        }
        files.entry(file).or_default().push(tensor);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_may_not_point_outside_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors.index.json");
        for file in ["../x.safetensors", "/etc/passwd", "a/b", ".."] {
            std::fs::write(&path, format!(r#"{{"weight_map":{{"t":"{file}"}}}}"#)).unwrap();
            let error = WeightsFolder::open(dir.path()).unwrap_err();
            assert!(matches!(&error, WeightsError::Index { reason, .. } if reason.contains(file)), "{error}");
        }
    }
}
