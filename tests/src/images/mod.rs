//! Container images without a registry: OCI archives assembled from files of this machine, for `ctr images import`. The same files
//! give the same bytes, so a layer that did not change is not unpacked again. Layers are not compressed: they travel from one folder
//! of this machine to another, and compressing would be most of the time. [`release`] makes those that people run.

mod oci;
pub mod read;
pub mod release;
pub mod sbom;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub use oci::File;

/// Name of the pause image (the kubelet's sandbox).
pub const PAUSE: &str = "truebeat.local/pause:1";

/// An image of one static program: it, at `entrypoint[0]`, and `extra` files.
///
/// # Errors
/// When a file cannot be read or the archive not written.
pub fn image_static(out: &Path, name: &str, binary: &Path, entrypoint: &[&str], extra: &[File]) -> Result<PathBuf> {
    let program = program(binary, entrypoint)?;
    oci::write(out, name, entrypoint, &[extra.to_vec(), vec![program]])
}

/// An image of one dynamic program: below it a layer with the loader and every library that `ldd` resolves for it on this machine
/// (one layer for all images whose programs need the same ones).
///
/// # Errors
/// As [`image_static`], and when a library is not found.
pub fn image_dynamic(out: &Path, name: &str, binary: &Path, entrypoint: &[&str], extra: &[File]) -> Result<PathBuf> {
    let program = program(binary, entrypoint)?;
    oci::write(out, name, entrypoint, &[libraries(binary)?, extra.to_vec(), vec![program]])
}

/// The pause image, compiled here by `cc -static`.
///
/// # Errors
/// In the compiler's words, or when the archive cannot be written.
pub fn pause(out: &Path) -> Result<PathBuf> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let (source, binary) = (out.join("pause.c"), out.join("pause"));
    fs::write(&source, include_str!("pause.c")).with_context(|| format!("cannot write {}", source.display()))?;
    let output = Command::new("cc")
        .args(["-Os", "-static", "-s", "-o"])
        .arg(&binary)
        .arg(&source)
        .output()
        .context("cannot start cc")?;
    if !output.status.success() {
        bail!("cc cannot make the static pause program: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    image_static(out, PAUSE, &binary, &["/pause"], &[])
}

fn program(binary: &Path, entrypoint: &[&str]) -> Result<File> {
    let path = entrypoint.first().context("an image needs an entrypoint")?;
    Ok(File::new(binary, path))
}

/// What `ldd` resolves, each at the path where the loader looks for it.
fn libraries(binary: &Path) -> Result<Vec<File>> {
    let output = Command::new("ldd").arg(binary).output().context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("ldd {}: {}{}", binary.display(), text.trim(), String::from_utf8_lossy(&output.stderr).trim());
    }
    let paths = parse_ldd(&text).with_context(|| format!("libraries of {}", binary.display()))?;
    Ok(paths.iter().map(|path| File::new(Path::new(path), path)).collect())
}

/// Lines are `libc.so.6 => /lib/…/libc.so.6 (0x…)`, `/lib64/ld-linux… (0x…)` or `linux-vdso.so.1 (0x…)`; sorted, each once.
fn parse_ldd(text: &str) -> Result<Vec<String>> {
    let mut found = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        let target = line.split_once("=>").map_or(line, |(_, target)| target.trim());
        if target.starts_with("not found") {
            bail!("{line}: install the package that has it");
        }
        if target.starts_with('/') {
            found.insert(target.split(" (").next().unwrap_or(target).to_owned(), ());
        }
    }
    Ok(found.into_keys().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_lines_are_read_and_a_missing_library_is_an_error() {
        let text = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld-linux.so.2 (0x3)\n";
        assert_eq!(parse_ldd(text).unwrap(), ["/lib/x/libc.so.6", "/lib64/ld-linux.so.2"]);
        assert!(parse_ldd("libx.so => not found").unwrap_err().to_string().contains("libx.so"));
    }

    #[test]
    fn the_same_files_give_the_same_bytes_and_a_program_brings_its_loader() {
        let dir = tempfile::tempdir().unwrap();
        let make = |sub: &str| {
            let out = dir.path().join(sub);
            fs::create_dir_all(&out).unwrap();
            fs::read(image_dynamic(&out, "truebeat.local/t:1", Path::new("/bin/sh"), &["/bin/sh"], &[]).unwrap())
                .unwrap()
        };
        let (first, second) = (make("a"), make("b"));
        assert!(first == second, "two archives of the same files differ");
        assert!(first.windows(8).any(|window| window == b"ld-linux"), "the loader is in the archive");
    }
}
