//! The images that people run: operator (static), agent and engine (dynamic: they open NVML and CUDA at run time), each with a bill of
//! materials beside it. From scratch, and the same bytes for the same programs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::read::Image;
use super::{File, image_dynamic, image_static, libraries, sbom};
use crate::product::Programs;

/// One image and its bill, as files.
#[derive(Debug, Clone)]
pub struct Made {
    /// As it is called in a manifest.
    pub name: String,
    /// An OCI archive.
    pub archive: PathBuf,
    /// CycloneDX, JSON.
    pub bill: PathBuf,
    /// What a registry would call it.
    pub digest: String,
}

/// All three, in `out`. `prefix` is put before the names (a registry and a path, with the slash at its end).
///
/// # Errors
/// When a program or a library of it cannot be read, cargo does not resolve, or nothing can be written.
pub fn all(programs: &Programs, out: &Path, prefix: &str, tag: &str) -> Result<Vec<Made>> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let name = |part: &str| format!("{prefix}truebeat-{part}:{tag}");
    let arch = std::env::consts::ARCH;
    let (musl, gnu) = (format!("{arch}-unknown-linux-musl"), format!("{arch}-unknown-linux-gnu"));
    let operator = image_static(out, &name("operator"), &programs.operator, &["/truebeat-operator"], &[])?;
    let mut made = vec![billed(name("operator"), operator, ("operator", &musl), &[])?];
    for (part, program, entry) in
        [("agent", &programs.agent, "/truebeat-agent"), ("engine", &programs.engine, "/truebeat-engine")]
    {
        let archive = image_dynamic(out, &name(part), program, &[entry], &[])?;
        made.push(billed(name(part), archive, (part, &gnu), &libraries(program)?)?);
    }
    Ok(made)
}

fn billed(name: String, archive: PathBuf, (package, target): (&str, &str), libraries: &[File]) -> Result<Made> {
    let digest = Image::open(&archive)?.digest;
    let bill = archive.with_extension("cdx.json");
    let text = sbom::bill(package, target, &digest, libraries)?;
    std::fs::write(&bill, text).with_context(|| format!("cannot write {}", bill.display()))?;
    Ok(Made { name, archive, bill, digest })
}
