//! The bundle file: one `.tar.zst` of text entries with `manifest.json` first, written whole or not at all, and read with bounds.
//!
//! May write below the bundle directory only; reads any file that it is given and trusts nothing in it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bytes of all entries of one bundle, before compression.
pub const BYTES_MAX: usize = 16 << 20;
/// Bundles kept in one directory.
pub const KEPT_MAX: usize = 20;
/// So many bundles of one disease tell as much of it as more would.
const CROWD: usize = 3;
const SUFFIX: &str = ".tar.zst";
const PARTIAL_SUFFIX: &str = ".tar.zst.partial";
/// An unfinished file older than this has no writer any more.
const PARTIAL_AGE_MAX: Duration = Duration::from_secs(600);
const MANIFEST: &str = "manifest.json";
/// What makes a manifest ours.
const FORMAT: &str = "truebeat-bundle";
/// Bounds of reading a file of unknown origin: unpacked bytes and entries.
const READ_BYTES_MAX: u64 = 64 << 20;
const READ_ENTRIES_MAX: usize = 10_000;
/// The same of a manifest alone.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// One file of the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleEntry {
    /// Path within the bundle, e.g. `proc/42/status`.
    pub name: String,
    pub text: String,
}

/// What the bundle is and how it came about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `truebeat-bundle`.
    pub format: String,
    pub format_version: u32,
    /// Version of the agent that wrote it.
    pub agent_version: String,
    pub episode: String,
    pub class: String,
    pub fingerprint: String,
    /// Where the engine's processes stood, and what names its program: with class and flags what the fingerprint is made of.
    #[serde(default)]
    pub top_frames: Vec<String>,
    #[serde(default)]
    pub image: String,
    /// What was asked for, how long each took, and what went wrong with it.
    pub pieces: Vec<Piece>,
    pub notes: Vec<String>,
    /// Names and whole lengths of the entries; a cut one says so in `notes`.
    pub entries: Vec<EntryInfo>,
}

/// One piece of evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    pub name: String,
    pub took_ms: u64,
    pub note: Option<String>,
}

/// An entry as the manifest lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryInfo {
    pub name: String,
    pub bytes: usize,
}

/// A bundle that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleContents {
    pub manifest: Manifest,
    /// Everything but the manifest, in the order of the file.
    pub entries: Vec<BundleEntry>,
}

/// Why a bundle could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error("cannot open {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error("{path} is no readable .tar.zst; it may be cut off")]
    Unpack { path: PathBuf, source: io::Error },
    #[error("{path} unpacks to more than {bytes_max} bytes or {entries_max} entries; it is no bundle of ours")]
    TooLarge { path: PathBuf, bytes_max: u64, entries_max: usize },
    #[error("{path} is no plain file")]
    NoFile { path: PathBuf },
    #[error("{path} holds {name:?}, {why}; nothing of it was used")]
    Hostile { path: PathBuf, name: String, why: &'static str },
    #[error("{path} does not begin with the manifest of a truebeat bundle")]
    NoManifest { path: PathBuf },
    #[error("cannot make the directory {path}")]
    MakeDirectory { path: PathBuf, source: io::Error },
    #[error("cannot pack the bundle")]
    Pack { source: io::Error },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("the bundle was given up before {path} was complete")]
    GivenUp { path: PathBuf },
}

/// Reads a whole bundle. Bytes that are no UTF-8 are replaced.
pub fn read(path: &Path) -> Result<BundleContents, BundleError> {
    let unpack = |source| BundleError::Unpack { path: path.to_owned(), source };
    let too_large =
        || BundleError::TooLarge { path: path.to_owned(), bytes_max: READ_BYTES_MAX, entries_max: READ_ENTRIES_MAX };
    let no_manifest = || BundleError::NoManifest { path: path.to_owned() };
    let open = |source| BundleError::Open { path: path.to_owned(), source };
    // a pipe or a device would be waited for
    let no_wait = nix::fcntl::OFlag::O_NONBLOCK.bits();
    let file = fs::OpenOptions::new().read(true).custom_flags(no_wait).open(path).map_err(open)?;
    if !file.metadata().map_err(open)?.is_file() {
        return Err(BundleError::NoFile { path: path.to_owned() });
    }
    let unpacked = zstd::Decoder::new(file).map_err(unpack)?.take(READ_BYTES_MAX + 1);
    let mut archive = tar::Archive::new(unpacked);
    let mut manifest: Option<Manifest> = None;
    let mut entries = Vec::new();
    let mut bytes = 0_u64;
    for entry in archive.entries().map_err(unpack)? {
        let mut entry = entry.map_err(unpack)?;
        let name = entry.path().map_err(unpack)?.to_string_lossy().into_owned();
        if let Some(why) = refusal(&entry, &name) {
            return Err(BundleError::Hostile { path: path.to_owned(), name, why });
        }
        let mut content = Vec::new();
        entry.read_to_end(&mut content).map_err(unpack)?;
        bytes += content.len() as u64;
        if bytes > READ_BYTES_MAX || entries.len() >= READ_ENTRIES_MAX {
            return Err(too_large());
        }
        if manifest.is_none() {
            manifest = Some(parse_manifest(&name, &content).ok_or_else(no_manifest)?);
        } else {
            entries.push(BundleEntry { name, text: String::from_utf8_lossy(&content).into_owned() });
        }
    }
    Ok(BundleContents { manifest: manifest.ok_or_else(no_manifest)?, entries })
}

/// Why an entry is none that we ever write: nothing is unpacked to disk here, but who does it by hand is to be warned.
fn refusal(entry: &tar::Entry<'_, impl Read>, name: &str) -> Option<&'static str> {
    let path = Path::new(name);
    let plain = path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    if !entry.header().entry_type().is_file() {
        Some("which is no plain file (a link, a device, a folder)")
    } else if !plain || name.is_empty() || name.chars().any(char::is_control) {
        Some("a name that leads out of the bundle or cannot be shown")
    } else {
        None
    }
}

/// Writes `<directory>/<id>.tar.zst` under a temporary name and renames it, then removes bundles beyond [`KEPT_MAX`] (see `prune`).
/// Entries are cut to [`BYTES_MAX`] in all. `given_up` set by another thread stops it before the rename.
pub fn write(
    directory: &Path,
    id: &str,
    mut manifest: Manifest,
    mut entries: Vec<BundleEntry>,
    given_up: &AtomicBool,
) -> Result<PathBuf, BundleError> {
    manifest.entries =
        entries.iter().map(|entry| EntryInfo { name: entry.name.clone(), bytes: entry.text.len() }).collect();
    manifest.notes.extend(cut_to(&mut entries, BYTES_MAX));
    let packed = pack(&manifest, &entries).map_err(|source| BundleError::Pack { source })?;
    make(directory)?;
    remove_abandoned(directory);
    let path = path_of(directory, id);
    let partial = directory.join(format!(".{}{PARTIAL_SUFFIX}", safe_name(id)));
    let written = write_and_rename(&packed, &partial, &path, given_up);
    if written.is_err() {
        // on a full disk the rest of it would stay full
        let _ = fs::remove_file(&partial);
    }
    written?;
    prune(directory, &path);
    Ok(path)
}

/// Where the bundle of an episode lies.
pub fn path_of(directory: &Path, id: &str) -> PathBuf {
    directory.join(format!("{}{SUFFIX}", safe_name(id)))
}

/// The plain files of a directory that are called as bundles are, each with the time of its last change.
pub fn files_in(directory: &Path) -> Vec<(std::time::SystemTime, PathBuf)> {
    listed(directory, SUFFIX)
}

/// A manifest with nothing in it yet.
pub fn manifest(episode: &str, class: &str, fingerprint: &str) -> Manifest {
    Manifest {
        format: FORMAT.to_owned(),
        format_version: 1,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        episode: episode.to_owned(),
        class: class.to_owned(),
        fingerprint: fingerprint.to_owned(),
        top_frames: Vec::new(),
        image: String::new(),
        pieces: Vec::new(),
        notes: Vec::new(),
        entries: Vec::new(),
    }
}

/// An id as a file name: no separators, no leading dot, not too long for any file system.
fn safe_name(id: &str) -> String {
    let name: String = id
        .chars()
        .take(128)
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') { c } else { '_' })
        .collect();
    let name = name.trim_start_matches('.');
    if name.is_empty() { "episode".to_owned() } else { name.to_owned() }
}

fn parse_manifest(name: &str, content: &[u8]) -> Option<Manifest> {
    let manifest: Manifest = serde_json::from_slice(content).ok()?;
    (name == MANIFEST && manifest.format == FORMAT).then_some(manifest)
}

fn pack(manifest: &Manifest, entries: &[BundleEntry]) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(zstd::Encoder::new(Vec::new(), 3)?);
    let manifest = serde_json::to_string_pretty(manifest)?;
    append(&mut archive, MANIFEST, &manifest)?;
    for entry in entries {
        append(&mut archive, &entry.name, &entry.text)?;
    }
    archive.into_inner()?.finish()
}

fn append(archive: &mut tar::Builder<impl Write>, name: &str, text: &str) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(text.len() as u64);
    header.set_mode(0o640);
    header.set_entry_type(tar::EntryType::Regular);
    archive.append_data(&mut header, name, text.as_bytes())
}

/// Cuts the longest entries until all fit: finds the length that, as a limit for each, fills `bytes_max`. Returns a note for each.
fn cut_to(entries: &mut [BundleEntry], bytes_max: usize) -> Vec<String> {
    let total: usize = entries.iter().map(|entry| entry.text.len()).sum();
    if total <= bytes_max {
        return Vec::new();
    }
    let mut lengths: Vec<usize> = entries.iter().map(|entry| entry.text.len()).collect();
    lengths.sort_unstable();
    let mut left = bytes_max;
    let mut limit = 0;
    for (index, length) in lengths.iter().enumerate() {
        limit = left / (lengths.len() - index);
        if *length > limit {
            break;
        }
        left -= length;
    }
    let mut notes = Vec::new();
    for entry in entries.iter_mut().filter(|entry| entry.text.len() > limit) {
        notes.push(format!("{} was cut from {} to {limit} bytes", entry.name, entry.text.len()));
        let end = (0..=limit).rev().find(|at| entry.text.is_char_boundary(*at)).unwrap_or(0);
        entry.text.truncate(end);
    }
    notes
}

fn write_and_rename(packed: &[u8], partial: &Path, path: &Path, given_up: &AtomicBool) -> Result<(), BundleError> {
    let failed = |source| BundleError::Write { path: path.to_owned(), source };
    let mut file = create(partial).map_err(failed)?;
    for chunk in packed.chunks(1 << 20) {
        if given_up.load(Ordering::Relaxed) {
            return Err(BundleError::GivenUp { path: path.to_owned() });
        }
        file.write_all(chunk).map_err(failed)?;
    }
    // the machine may be about to be reset
    file.sync_all().map_err(failed)?;
    if given_up.load(Ordering::Relaxed) {
        return Err(BundleError::GivenUp { path: path.to_owned() });
    }
    fs::rename(partial, path).map_err(failed)?;
    // nor is a name on the disk before its folder is; where that cannot be said the bundle is there all the same
    drop(path.parent().map(|folder| File::open(folder).and_then(|folder| folder.sync_all())));
    Ok(())
}

/// A new file for the owner and group alone; a symbolic link that somebody put there is not followed.
fn create(path: &Path) -> io::Result<File> {
    let no_follow = nix::fcntl::OFlag::O_NOFOLLOW.bits();
    fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).custom_flags(no_follow).open(path)
}

/// Files of the directory with this ending, with their age order.
fn listed(directory: &Path, suffix: &str) -> Vec<(std::time::SystemTime, PathBuf)> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(suffix))
        .filter_map(|entry| {
            let meta = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            Some((meta.modified().ok()?, entry.path()))
        })
        .collect()
}

fn remove_abandoned(directory: &Path) {
    for (modified, path) in listed(directory, PARTIAL_SUFFIX) {
        if modified.elapsed().is_ok_and(|age| age > PARTIAL_AGE_MAX) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes bundles beyond the number kept: the oldest of the disease of which there are the most, if it crowds the others, so that an engine
/// that dies every few minutes does not push out the one stall before it; else the oldest of all. A file that is not a bundle of ours is left
/// alone, whatever its name.
fn prune(directory: &Path, newest: &Path) {
    let mut files = files_in(directory);
    files.sort();
    let ours = files.into_iter().filter_map(|(_, path)| Some((manifest_of(&path)?.fingerprint, path)));
    let mut bundles: Vec<(String, PathBuf)> = ours.collect();
    while bundles.len() > KEPT_MAX {
        let alike = |of: &str| bundles.iter().filter(|(fingerprint, _)| fingerprint == of).count();
        let most = bundles.iter().map(|(fingerprint, _)| alike(fingerprint)).max().filter(|most| *most > CROWD);
        let oldest = bundles.iter().position(|(of, path)| path != newest && Some(alike(of)) == most);
        let Some(at) = oldest.or_else(|| bundles.iter().position(|(_, path)| path != newest)) else { return };
        let _ = fs::remove_file(bundles.remove(at).1);
    }
}

/// Opens what another may have put there: a link is not followed, a pipe not waited for.
///
/// # Errors
/// As a file is opened; a link is an error.
pub fn open_itself(path: &Path) -> io::Result<File> {
    let careful = nix::fcntl::OFlag::O_NOFOLLOW | nix::fcntl::OFlag::O_NONBLOCK;
    fs::OpenOptions::new().read(true).custom_flags(careful.bits()).open(path)
}

/// The manifest of a bundle of ours, which comes first in it.
pub fn manifest_of(path: &Path) -> Option<Manifest> {
    let unpacked = zstd::Decoder::new(open_itself(path).ok()?).ok()?.take(MANIFEST_BYTES_MAX);
    let mut archive = tar::Archive::new(unpacked);
    let mut entry = archive.entries().ok()?.next()?.ok()?;
    let name = entry.path().ok()?.to_string_lossy().into_owned();
    // a sparse entry is as long as its head says, whatever the file holds
    if refusal(&entry, &name).is_some() {
        return None;
    }
    let mut content = Vec::new();
    entry.by_ref().take(MANIFEST_BYTES_MAX).read_to_end(&mut content).ok()?;
    parse_manifest(&name, &content)
}

fn make(directory: &Path) -> Result<(), BundleError> {
    fs::create_dir_all(directory).map_err(|source| BundleError::MakeDirectory { path: directory.to_owned(), source })
}

/// Can a bundle be written there? A file of nothing comes and goes.
///
/// # Errors
/// What a bundle would meet.
pub fn probe(directory: &Path) -> Result<(), BundleError> {
    make(directory)?;
    let path = directory.join(".probe");
    let failed = |source| BundleError::Write { path: path.clone(), source };
    create(&path).map_err(failed)?;
    fs::remove_file(&path).map_err(failed)
}
