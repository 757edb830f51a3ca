//! The kernels as they were compiled ahead of time (`make kernels`): found by the name of their sources, so that an engine never runs kernels
//! of another tree. Reads files, and nothing else.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// The sources, in the order of kernels/key.py.
const SOURCES: [&str; 19] = [
    include_str!("../../../../kernels/all.cu"),
    include_str!("../../../../kernels/attention.cu"),
    include_str!("../../../../kernels/attention.cuh"),
    include_str!("../../../../kernels/attention_mma.cu"),
    include_str!("../../../../kernels/attention_tiles.cuh"),
    include_str!("../../../../kernels/common.cuh"),
    include_str!("../../../../kernels/elementwise.cu"),
    NAMES,
    include_str!("../../../../kernels/matmul.cu"),
    include_str!("../../../../kernels/mma.cu"),
    include_str!("../../../../kernels/mma.cuh"),
    include_str!("../../../../kernels/mma_sums.cuh"),
    include_str!("../../../../kernels/mma_tile.cu"),
    include_str!("../../../../kernels/norm.cu"),
    include_str!("../../../../kernels/sampling.cu"),
    include_str!("../../../../kernels/spin.cu"),
    include_str!("../../../../kernels/wgmma.cu"),
    include_str!("../../../../kernels/wgmma.cuh"),
    include_str!("../../../../kernels/wgmma_tile.cuh"),
];
const NAMES: &str = include_str!("../../../../kernels/kernels.inc");

/// No image of these kernels.
#[derive(Debug, Error)]
pub enum ImageError {
    #[error("no {name} in {}: `make kernels` writes it to target/kernels", folders(dirs))]
    Missing { name: String, dirs: Vec<PathBuf> },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
}

fn folders(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// FNV-1a over the sources of the kernels that this engine calls.
pub fn key() -> u64 {
    let bytes = SOURCES.iter().flat_map(|source| source.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Every kernel that an image must hold.
pub fn names() -> impl Iterator<Item = &'static str> {
    NAMES.lines().filter_map(|line| line.strip_prefix("ENTRY(")?.strip_suffix(')'))
}

/// The image's file name.
pub fn file_name() -> String {
    format!("truebeat-kernels-{:016x}.fatbin", key())
}

/// The image, from the first of `dirs` that has it.
///
/// # Errors
/// [`ImageError`].
pub fn read(dirs: &[PathBuf]) -> Result<Vec<u8>, ImageError> {
    let name = file_name();
    let Some(path) = dirs.iter().map(|dir| dir.join(&name)).find(|path| path.is_file()) else {
        return Err(ImageError::Missing { name, dirs: dirs.to_vec() });
    };
    std::fs::read(&path).map_err(|source| ImageError::Read { path, source })
}

/// Where an image is looked for when nobody says: beside the program.
pub fn beside_program() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel of a graph begins before the one in front of it has ended: one that did not wait would read what is not written yet.
    #[test]
    fn every_kernel_waits_for_the_one_before_it_first_of_all() {
        let begins = SOURCES
            .iter()
            .filter(|source| !source.contains("#define KERNEL"))
            .flat_map(|source| source.split("KERNEL ").skip(1))
            .filter(|rest| rest.contains(") {"));
        let bodies: Vec<&str> =
            begins.filter_map(|rest| Some(rest.split_once("{")?.1.trim_start_matches(['\\', ' ', '\n']))).collect();
        assert!(bodies.len() >= 30, "{}", bodies.len());
        // the products of few rows ask for their weights first, which nobody writes
        let firsts = ["follow();", "few<", "pair_few<", "Product of_q ="];
        for body in bodies {
            assert!(firsts.iter().any(|first| body.starts_with(first)), "{}", &body[..body.len().min(80)]);
        }
        let products = include_str!("../../../../kernels/mma.cu");
        let asks =
            ["soon(its.weight, first, M * TALL, cols, its.outputs);", "soon(weights[m], first, TALL, cols, outputs);"];
        assert!(asks.iter().all(|asks| products.contains(&format!("{asks}\n    follow();"))));
    }

    #[test]
    fn the_key_is_that_of_the_script_and_an_image_of_another_is_not_taken() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/key.py");
        #[allow(clippy::disallowed_methods, reason = "a test may wait for a short program")]
        let said = std::process::Command::new("python3").arg("-B").arg(script).output().unwrap();
        assert_eq!(String::from_utf8(said.stdout).unwrap().trim(), format!("{:016x}", key()));
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("truebeat-kernels-0123456789abcdef.fatbin"), "x").unwrap();
        let dirs = [dir.path().to_owned()];
        let error = read(&dirs).unwrap_err().to_string();
        assert!(error.contains(&file_name()) && error.contains("make kernels"), "{error}");
        std::fs::write(dir.path().join(file_name()), "y").unwrap();
        assert_eq!(read(&dirs).unwrap(), b"y");
        assert!(names().count() == 75 && names().any(|name| name == "attention_join"));
    }
}
