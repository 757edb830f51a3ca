//! The OCI image layout as one tar: layers, configuration, manifest, index, each named by its digest. Deterministic: no clock, no
//! owner, entries in the order given.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// A file of this machine and its place in the image.
#[derive(Debug, Clone)]
pub struct File {
    pub(super) source: PathBuf,
    pub(super) path: String,
}

impl File {
    /// `source` here, `path` (absolute) in the image; executable there if it is here.
    pub fn new(source: &Path, path: &str) -> Self {
        Self { source: source.to_owned(), path: path.trim_start_matches('/').to_owned() }
    }
}

struct Blob {
    digest: String,
    bytes: Vec<u8>,
}

impl Blob {
    fn new(bytes: Vec<u8>) -> Self {
        let digest = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { digest, bytes }
    }

    fn descriptor(&self, media_type: &str) -> serde_json::Value {
        json!({"mediaType": media_type, "digest": format!("sha256:{}", self.digest), "size": self.bytes.len()})
    }
}

/// Writes `<out>/<last part of name>.tar`: one layer for each non-empty list of files.
///
/// # Errors
/// When a file cannot be read or the archive not written.
pub fn write(out: &Path, name: &str, entrypoint: &[&str], layers: &[Vec<File>]) -> Result<PathBuf> {
    let layers =
        layers.iter().filter(|files| !files.is_empty()).map(|files| layer(files)).collect::<Result<Vec<_>>>()?;
    let config = Blob::new(serde_json::to_vec(&json!({
        "architecture": architecture(), "os": "linux",
        "config": {"Entrypoint": entrypoint, "WorkingDir": "/", "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|blob| format!("sha256:{}", blob.digest)).collect::<Vec<_>>()},
    }))?);
    let manifest = Blob::new(serde_json::to_vec(&json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": config.descriptor(CONFIG),
        "layers": layers.iter().map(|blob| blob.descriptor(LAYER)).collect::<Vec<_>>(),
    }))?);
    let mut entry = manifest.descriptor(MANIFEST);
    entry["platform"] = json!({"architecture": architecture(), "os": "linux"});
    entry["annotations"] = json!({"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name});
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}))?;

    let last = name.rsplit('/').next().unwrap_or(name).replace(':', "-");
    let path = out.join(format!("{last}.tar"));
    let file = fs::File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut archive = tar::Builder::new(std::io::BufWriter::new(file));
    append(&mut archive, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    append(&mut archive, "index.json", 0o644, &index)?;
    let mut written = BTreeSet::new();
    for blob in [&config, &manifest].into_iter().chain(&layers) {
        if written.insert(&blob.digest) {
            append(&mut archive, &format!("blobs/sha256/{}", blob.digest), 0o644, &blob.bytes)?;
        }
    }
    archive.into_inner()?.flush().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn architecture() -> &'static str {
    if std::env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" }
}

fn layer(files: &[File]) -> Result<Blob> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut folders = BTreeSet::new();
    for File { source, path } in files {
        for (end, _) in path.match_indices('/') {
            let folder = &path[..end];
            if folders.insert(folder) {
                let mut header = header(0o755, 0);
                header.set_entry_type(tar::EntryType::Directory);
                archive.append_data(&mut header, format!("{folder}/"), std::io::empty())?;
            }
        }
        let bytes = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        let executable = fs::metadata(source).is_ok_and(|metadata| metadata.permissions().mode() & 0o111 != 0);
        append(&mut archive, path, if executable { 0o755 } else { 0o644 }, &bytes)?;
    }
    Ok(Blob::new(archive.into_inner()?))
}

fn append<W: Write>(archive: &mut tar::Builder<W>, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
    archive
        .append_data(&mut header(mode, bytes.len()), path, bytes)
        .with_context(|| format!("cannot put {path} into the archive"))
}

fn header(mode: u32, size: usize) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(size as u64);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
