//! Weights of a Hugging Face folder: one `model.safetensors`, or shards named by `model.safetensors.index.json`.
//! Tensors are read by position and converted to f32 piece by piece. Not memory-mapped on purpose: every value is copied
//! into its f32 place anyway, and a file that shrinks under a mapping kills the process (SIGBUS) where a read returns an error.

mod header;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde::Deserialize;
use thiserror::Error;

use header::{Dtype, HeaderFault, TensorInfo};

/// Bytes read and converted at a time: the step of the progress reports.
const PIECE_BYTES: usize = 8 << 20;

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
    #[error("{path}: tensor `{tensor}`: {reason}")]
    Tensor { path: PathBuf, tensor: String, reason: String },
    #[error("{dir} lacks the tensor `{tensor}` (expected shape {expected:?})")]
    Missing { dir: PathBuf, tensor: String, expected: Vec<usize> },
    #[error("{path}: tensor `{tensor}` has shape {found:?}, but config.json calls for {expected:?}")]
    Shape { path: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("{path}: tensor `{tensor}` is {found}; the engine reads F32, BF16 and F16")]
    Dtype { path: PathBuf, tensor: String, found: String },
}

/// The opened weight files of a folder, with every tensor's place checked.
#[derive(Debug)]
pub struct WeightsFolder {
    dir: PathBuf,
    files: Vec<(PathBuf, File)>,
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

    /// Whether a tensor of this name exists.
    pub fn contains(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Bytes of a tensor on disk; 0 when there is none.
    pub fn len_bytes(&self, tensor: &str) -> u64 {
        self.tensors.get(tensor).map_or(0, |(_, info)| info.len_bytes)
    }

    /// Reads a tensor as f32, row-major. `advance` is told the bytes of each piece as it is done.
    ///
    /// # Errors
    /// [`WeightsError`] when it is missing, of another shape or dtype, or cannot be read.
    pub fn read_f32(
        &self,
        tensor: &str,
        expected: &[usize],
        advance: &mut dyn FnMut(u64),
    ) -> Result<Vec<f32>, WeightsError> {
        let Some((file, info)) = self.tensors.get(tensor) else {
            let (dir, tensor) = (self.dir.clone(), tensor.to_owned());
            return Err(WeightsError::Missing { dir, tensor, expected: expected.to_vec() });
        };
        let (path, file) = &self.files[*file];
        let (path, tensor) = (|| path.clone(), || tensor.to_owned());
        if info.shape != expected {
            let (expected, found) = (expected.to_vec(), info.shape.clone());
            return Err(WeightsError::Shape { path: path(), tensor: tensor(), expected, found });
        }
        let Some(dtype) = info.readable_dtype() else {
            return Err(WeightsError::Dtype { path: path(), tensor: tensor(), found: info.dtype.clone() });
        };
        let mut values = Vec::new();
        values.try_reserve_exact(info.len_bytes as usize / dtype.size()).map_err(|_| {
            let reason = format!("no memory for its {} bytes as f32", info.len_bytes as usize / dtype.size() * 4);
            WeightsError::Tensor { path: path(), tensor: tensor(), reason }
        })?;
        read_pieces(file, info, |piece| {
            convert(piece, dtype, &mut values);
            advance(piece.len() as u64);
        })
        .map_err(|error| WeightsError::Tensor {
            path: path(),
            tensor: tensor(),
            reason: format!("read: {error}"),
        })?;
        Ok(values)
    }

    /// Opens one file; with `names` (from an index) only those tensors are taken, and all must be there.
    fn add_file(&mut self, path: PathBuf, names: Option<&[String]>) -> Result<(), WeightsError> {
        let (file, mut found) = open_file(&path)?;
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
        self.files.push((path, file));
        Ok(())
    }
}

fn open_file(path: &Path) -> Result<(File, BTreeMap<String, TensorInfo>), WeightsError> {
    let read_error = |source| WeightsError::Read { path: path.to_owned(), source };
    let fault = |fault: HeaderFault| match fault.tensor {
        Some(tensor) => WeightsError::Tensor { path: path.to_owned(), tensor, reason: fault.reason },
        None => WeightsError::Header { path: path.to_owned(), reason: fault.reason },
    };
    let file = File::open(path).map_err(read_error)?;
    let file_len = file.metadata().map_err(read_error)?.len();
    if file_len < header::LENGTH_BYTES {
        let reason = format!("it has {file_len} bytes, too few for a header: is the copy complete?");
        return Err(WeightsError::Header { path: path.to_owned(), reason });
    }
    let mut length_field = [0; header::LENGTH_BYTES as usize];
    file.read_exact_at(&mut length_field, 0).map_err(read_error)?;
    let len = header::header_len(length_field, file_len).map_err(fault)?;
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, header::LENGTH_BYTES).map_err(read_error)?;
    let tensors = header::parse(&bytes, file_len).map_err(fault)?;
    Ok((file, tensors))
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

fn read_pieces(file: &File, info: &TensorInfo, mut take: impl FnMut(&[u8])) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES.min(info.len_bytes as usize)];
    let mut done = 0;
    while done < info.len_bytes {
        let len = piece.len().min((info.len_bytes - done) as usize);
        file.read_exact_at(&mut piece[..len], info.offset + done)?;
        take(&piece[..len]);
        done += len as u64;
    }
    Ok(())
}

/// Appends the little-endian elements of `bytes` as f32.
fn convert(bytes: &[u8], dtype: Dtype, values: &mut Vec<f32>) {
    match dtype {
        Dtype::F32 => values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        Dtype::Bf16 => values.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        Dtype::F16 => values.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three_dtypes_become_the_same_f32() {
        let want = [1.0f32, -2.5, 0.0];
        let mut values = Vec::new();
        convert(&want.map(f32::to_le_bytes).concat(), Dtype::F32, &mut values);
        convert(&want.map(|v| bf16::from_f32(v).to_le_bytes()).concat(), Dtype::Bf16, &mut values);
        convert(&want.map(|v| f16::from_f32(v).to_le_bytes()).concat(), Dtype::F16, &mut values);
        assert_eq!(values, [want, want, want].concat());
    }

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
