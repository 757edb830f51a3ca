//! A file of prepared weights, written once and mapped by every rank (E5). Its head says where the index lies, the index where each weight
//! lies. No number in it is believed: places are checked against the file's true length, shapes against what is asked for, and the bytes
//! against their sum, before anything is computed with them. What does not fit is as if it were not there.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::lease::temporary;
use crate::backend::{Part, WeightShape};
use crate::raw::FileMap;
use crate::weights::{Bytes, sum_of};

const MAGIC: [u8; 8] = *b"TBPACK01";
/// The head, and what every weight begins at a multiple of.
const LINE: u64 = 64;
/// More than this is no index: a thousand times what large models have.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// So much is written between two signs of life: a slow disk takes it within a small part of the time that an owner may be silent.
const PIECE_BYTES: usize = 8 << 20;

/// Why a file of prepared weights cannot be used.
#[derive(Debug, Error)]
#[error("{path} is not a usable file of prepared weights: {reason}")]
pub struct PackError {
    pub path: PathBuf,
    pub reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    /// Of which model, in which form, for how many ranks.
    key: String,
    weights: BTreeMap<String, Place>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Place {
    rows: usize,
    cols: usize,
    kind: String,
    at: u64,
    len: u64,
    sum: u64,
}

/// A name for a part of a weight.
fn name_of(tensor: &str, part: &Part) -> String {
    match part {
        Part::Whole => tensor.to_owned(),
        Part::Outputs(range) | Part::Gathered { mine: range, .. } => format!("{tensor} rows {range:?}"),
        Part::Inputs(range) => format!("{tensor} columns {range:?}"),
    }
}

/// A file that is being written, under a name of its own until it is whole. The first error stays, and is told at the end.
#[derive(Debug)]
pub struct PackWriter {
    path: PathBuf,
    file: File,
    index: Index,
    at: u64,
    result: io::Result<()>,
}

impl PackWriter {
    /// Begins a file that is to stand at `path`; what owners that are gone have left there unfinished goes.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path, key: &str) -> io::Result<Self> {
        sweep(path);
        let (path, file) = temporary(path, "pack")?;
        let index = Index { key: key.to_owned(), weights: BTreeMap::new() };
        Ok(Self { path, file, index, at: LINE, result: Ok(()) })
    }

    /// Whether this part is there already: several ranks may hold the same.
    pub fn has(&self, tensor: &str, part: &Part) -> bool {
        self.index.weights.contains_key(&name_of(tensor, part))
    }

    /// Adds a prepared part, piece by piece; `alive` is called before each, and says whether to go on.
    pub fn add(
        &mut self,
        (tensor, part): (&str, &Part),
        shape: WeightShape,
        bytes: &[u8],
        alive: &mut dyn FnMut() -> bool,
    ) {
        if self.result.is_err() {
            return;
        }
        let (len, sum) = (bytes.len() as u64, sum_of(bytes));
        for (piece, at) in bytes.chunks(PIECE_BYTES).zip((self.at..).step_by(PIECE_BYTES)) {
            self.result = if alive() { self.file.write_all_at(piece, at) } else { Err(given_up()) };
            if self.result.is_err() {
                return;
            }
        }
        let WeightShape { rows, cols, kind } = shape;
        let place = Place { rows, cols, kind: format!("{kind:?}"), at: self.at, len, sum };
        self.index.weights.insert(name_of(tensor, part), place);
        self.at = (self.at + len).next_multiple_of(LINE);
    }

    /// Whether an error was met: the rest is not worth the work.
    pub fn is_broken(&self) -> bool {
        self.result.is_err()
    }

    /// Puts the whole file in its place, for all to see at once.
    ///
    /// # Errors
    /// The first that was met.
    pub fn finish(mut self, path: &Path) -> io::Result<()> {
        std::mem::replace(&mut self.result, Ok(()))?;
        let index = serde_json::to_vec(&self.index)?;
        self.file.write_all_at(&index, self.at)?;
        let words = [u64::from_le_bytes(MAGIC), self.at, index.len() as u64, sum_of(&index)];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.file.write_all_at(&head, 0)?;
        self.file.flush()?;
        fs::rename(&self.path, path)
    }
}

fn given_up() -> io::Error {
    io::Error::other("whoever wrote it was told to end")
}

/// Removes unfinished files of `path`: who still writes one has lost his lease, and finds it gone when he is done.
fn sweep(path: &Path) {
    let Some((dir, stem)) = path.parent().zip(path.file_stem()) else { return };
    let unfinished = ["pack", "lease", "probe"].map(|kind| format!("{}.{kind}-", stem.to_string_lossy()));
    let Ok(entries) = fs::read_dir(dir) else { return };
    let begins = |name: &str| unfinished.iter().any(|unfinished| name.starts_with(unfinished));
    let left = entries.flatten().filter(|entry| begins(&entry.file_name().to_string_lossy()));
    left.for_each(|entry| drop(fs::remove_file(entry.path())));
}

impl Drop for PackWriter {
    fn drop(&mut self) {
        // gone already where it was put in its place
        drop(fs::remove_file(&self.path));
    }
}

/// A whole file, mapped.
#[derive(Debug)]
pub struct PackFile {
    path: PathBuf,
    bytes: Bytes,
    index: Index,
}

impl PackFile {
    /// Opens the file at `path` if there is one.
    ///
    /// # Errors
    /// [`PackError`] for a file that is there and is not one of `key`.
    pub fn open(path: &Path, key: &str) -> Result<Option<Self>, PackError> {
        let failed = |reason: String| PackError { path: path.to_owned(), reason };
        let map = match File::open(path).and_then(|file| Ok((file.metadata()?.len(), file))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Ok((0, _)) => return Err(failed("it is empty".into())),
            other => other.and_then(|(_, file)| FileMap::new(&file)).map_err(|error| failed(error.to_string()))?,
        };
        let bytes = Bytes::of_map(map);
        let index = read_index(&bytes).map_err(failed)?;
        if index.key != key {
            return Err(failed(format!("it is of {}, not of {key}", index.key)));
        }
        Ok(Some(Self { path: path.to_owned(), bytes, index }))
    }

    /// A prepared part, if it is there, of this shape, and whole.
    pub fn get(&self, tensor: &str, part: &Part, shape: WeightShape) -> Option<Bytes> {
        let place = self.index.weights.get(&name_of(tensor, part))?;
        let same = (place.rows, place.cols, &place.kind) == (shape.rows, shape.cols, &format!("{:?}", shape.kind));
        let bytes = same.then(|| part_of(&self.bytes, place.at, place.len)).flatten();
        let whole = bytes.filter(|bytes| place.at.is_multiple_of(LINE) && sum_of(bytes) == place.sum);
        if whole.is_none() {
            tracing::warn!(path = %self.path.display(), tensor, "a prepared weight is not what it should be: it is prepared anew");
            // the next start makes a whole one
            drop(fs::remove_file(&self.path));
        }
        whole
    }
}

fn part_of(bytes: &Bytes, at: u64, len: u64) -> Option<Bytes> {
    let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
    bytes.part(at..at.checked_add(len)?)
}

fn read_index(bytes: &Bytes) -> Result<Index, String> {
    let word = |i: usize| bytes.get(8 * i..8 * i + 8)?.first_chunk().copied().map(u64::from_le_bytes);
    let head = [word(0), word(1), word(2), word(3)];
    let [Some(magic), Some(at), Some(len), Some(sum)] = head else { return Err("it is too short for a head".into()) };
    if magic.to_le_bytes() != MAGIC {
        return Err("it does not begin as one".into());
    }
    let index = part_of(bytes, at, len).filter(|_| len <= INDEX_BYTES_MAX);
    let index =
        index.ok_or_else(|| format!("its index of {len} bytes at {at} is not within its {} bytes", bytes.len()))?;
    if sum_of(&index) != sum {
        return Err("its index is damaged".into());
    }
    serde_json::from_slice(&index).map_err(|error| format!("its index cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::WeightType;
    use proptest::prelude::*;

    const SHAPE: WeightShape = WeightShape { rows: 3, cols: 32, kind: WeightType::Q8_0 };

    fn written(dir: &Path) -> (PathBuf, Vec<u8>) {
        let path = dir.join("a.pack");
        let mut writer = PackWriter::create(&path, "key").unwrap();
        writer.add(("q", &Part::Outputs(0..3)), SHAPE, &[7; 100], &mut || true);
        writer.add(("k", &Part::Inputs(0..32)), SHAPE, &[9; 65], &mut || true);
        assert!(writer.has("q", &Part::Outputs(0..3)) && !writer.has("q", &Part::Whole));
        writer.finish(&path).unwrap();
        assert_eq!(fs::read_dir(dir).unwrap().count(), 1, "nothing else is left behind");
        let bytes = fs::read(&path).unwrap();
        (path, bytes)
    }

    #[test]
    fn what_was_added_is_found_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = written(dir.path());
        assert!(PackFile::open(&dir.path().join("b.pack"), "key").unwrap().is_none());
        assert!(PackFile::open(&path, "another").unwrap_err().to_string().contains("it is of key"));
        let file = PackFile::open(&path, "key").unwrap().unwrap();
        let bytes = file.get("k", &Part::Inputs(0..32), SHAPE).unwrap();
        assert_eq!((&bytes[..], bytes.as_ptr().align_offset(64)), (&[9; 65][..], 0), "on a cache line");
        assert!(file.get("q", &Part::Whole, SHAPE).is_none());
        assert!(file.get("q", &Part::Outputs(0..3), WeightShape { cols: 64, ..SHAPE }).is_none());
        assert!(!path.exists(), "what was not as asked for is made anew by the next start");
    }

    #[test]
    fn a_large_weight_is_written_in_pieces_with_signs_of_life_and_ends_where_it_is_told_to() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..2 * PIECE_BYTES + 1).map(|i| (i / 64) as u8).collect();
        let write = |pieces_max| {
            let path = dir.path().join("a.pack");
            let (mut writer, mut pieces) = (PackWriter::create(&path, "key").unwrap(), 0);
            writer.add(("q", &Part::Whole), SHAPE, &bytes, &mut || {
                pieces += 1;
                pieces <= pieces_max
            });
            let (len, told) = (writer.file.metadata().unwrap().len(), writer.finish(&path));
            (pieces, len, told.and_then(|()| PackFile::open(&path, "key").map_err(io::Error::other)))
        };
        let (pieces, _, file) = write(3);
        let got = file.unwrap().unwrap().get("q", &Part::Whole, SHAPE).unwrap();
        assert!(pieces == 3 && got[..] == bytes[..]);
        let (pieces, len, file) = write(1);
        assert!((pieces, len) == (2, LINE + PIECE_BYTES as u64) && file.is_err());
    }

    #[test]
    fn a_writer_that_is_given_up_leaves_nothing_and_what_the_killed_left_goes() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.pack-77-0"), "half of it").unwrap();
        drop(PackWriter::create(&dir.path().join("a.pack"), "key").unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    proptest! {
        /// No bytes make it panic; and a weight that comes out is the one that went in.
        #[test]
        fn damage_is_an_error_or_seen(at in 0usize..600, to in any::<u8>(), cut in 0usize..600, noise: Vec<u8>) {
            let dir = tempfile::tempdir().unwrap();
            let (path, whole) = written(dir.path());
            let mut flipped = whole.clone();
            let place = at % whole.len();
            flipped[place] = to;
            for bytes in [flipped, whole[..cut.min(whole.len())].to_vec(), [&MAGIC[..], &noise].concat(), noise.clone()] {
                fs::write(&path, &bytes).unwrap();
                if let Ok(Some(file)) = PackFile::open(&path, "key") {
                    let got = file.get("q", &Part::Outputs(0..3), SHAPE);
                    prop_assert!(got.is_none_or(|got| got[..] == [7; 100]));
                }
            }
        }
    }
}
