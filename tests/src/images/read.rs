//! What is in an image: the archive read back, entry by entry, as a scanner would. Reads one file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// One entry of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Without a leading slash.
    pub path: String,
    /// Permission bits, with those of setuid and its like.
    pub mode: u32,
    /// Is it a folder?
    pub folder: bool,
    pub bytes: Vec<u8>,
}

/// An image as an archive has it.
#[derive(Debug)]
pub struct Image {
    /// `sha256:…` of its manifest: what a registry would call it.
    pub digest: String,
    pub manifest: Value,
    pub config: Value,
    /// Of all layers, lowest first.
    pub entries: Vec<Entry>,
}

impl Image {
    /// The one image of an OCI archive.
    ///
    /// # Errors
    /// When it is no such archive, or lacks something that it names.
    pub fn open(archive: &Path) -> Result<Self> {
        let file = File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
        let blobs: BTreeMap<String, Vec<u8>> = entries(file)?.into_iter().map(|e| (e.path, e.bytes)).collect();
        let blob = |digest: &str| {
            let path = format!("blobs/{}", digest.replace(':', "/"));
            blobs.get(&path).with_context(|| format!("no {path} in the archive"))
        };
        let digest_of = |descriptor: &Value| descriptor["digest"].as_str().map(str::to_owned).context("no digest");
        let index: Value = serde_json::from_slice(blobs.get("index.json").context("no index.json in the archive")?)?;
        let digest = digest_of(&index["manifests"][0])?;
        let manifest: Value = serde_json::from_slice(blob(&digest)?)?;
        let config = serde_json::from_slice(blob(&digest_of(&manifest["config"])?)?)?;
        let mut all = Vec::new();
        for layer in manifest["layers"].as_array().context("no layers")? {
            all.extend(entries(blob(&digest_of(layer)?)?.as_slice())?);
        }
        Ok(Image { digest, manifest, config, entries: all })
    }
}

fn entries(tar: impl Read) -> Result<Vec<Entry>> {
    let mut found = Vec::new();
    for entry in tar::Archive::new(tar).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().into_owned();
        let (mode, folder) = (entry.header().mode()?, entry.header().entry_type().is_dir());
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        found.push(Entry { path, mode, folder, bytes });
    }
    Ok(found)
}
