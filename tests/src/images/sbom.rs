//! What an image is made of: a software bill of materials in CycloneDX, from what cargo itself resolves, the lock file's checksums, and
//! the libraries that come along. No clock and no random number is in it, so the same tree gives the same bytes. Runs `cargo tree`, and
//! `dpkg-query` where there is one; reads Cargo.lock.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::File;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// One crate that is linked into the program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    pub name: String,
    pub version: String,
    /// An SPDX expression.
    pub license: String,
}

/// The bill of `package` as built for `target`, with the files that come beside it, as JSON text; `image` is the digest of what it
/// comes in.
///
/// # Errors
/// When cargo cannot resolve it, or a crate of a registry has no checksum.
pub fn bill(package: &str, target: &str, image: &str, libraries: &[File]) -> Result<String> {
    let crates = crates(package, target)?;
    let sums =
        checksums(&std::fs::read_to_string(Path::new(ROOT).join("Cargo.lock")).context("cannot read Cargo.lock")?);
    let component = |of: &Crate| -> Result<Value> {
        let (name, version) = (&of.name, &of.version);
        let purl = format!("pkg:cargo/{name}@{version}");
        let mut component = json!({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
            "licenses": [{"expression": of.license}]});
        // those of this workspace have none: they are the program
        if let Some(sum) = sums.get(&(name.clone(), version.clone())).context("a crate that the lock file has not")? {
            component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
        }
        Ok(component)
    };
    let linked = crates.iter().map(component);
    let components = linked.chain(libraries.iter().map(library)).collect::<Result<Vec<_>>>()?;
    let subject = json!({"type": "container", "bom-ref": image, "name": package, "version": image});
    let bill = json!({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": subject}, "components": components});
    Ok(serde_json::to_string_pretty(&bill)?)
}

/// A library of the machine on which the image was made, and the package that it is from, where one is known.
fn library(file: &File) -> Result<Value> {
    let File { source, path } = file;
    let bytes = std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let hashes = json!([{"alg": "SHA-256", "content": sum}]);
    let mut component = json!({"type": "library", "bom-ref": path, "name": path, "hashes": hashes});
    if let Some((package, version)) = package_of(source) {
        component["version"] = json!(version);
        component["purl"] = json!(format!("pkg:deb/debian/{package}@{version}"));
    }
    Ok(component)
}

/// Name and version of the Debian package that owns a file; its database may know it by the path before or behind a link.
fn package_of(file: &Path) -> Option<(String, String)> {
    let ask = |args: &[&str]| {
        let output = Command::new("dpkg-query").args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let real = file.canonicalize().ok()?;
    let stripped = real.strip_prefix("/usr").map(|path| Path::new("/").join(path));
    let paths = [Some(file.to_owned()), Some(real.clone()), stripped.ok()];
    let owner = paths.into_iter().flatten().find_map(|path| ask(&["--search", path.to_str()?]))?;
    let package = owner.lines().next()?.split([':', ',']).next()?.to_owned();
    let version = ask(&["--show", "--showformat=${Version}\n", &package])?.lines().next()?.to_owned();
    Some((package, version))
}

/// Every crate that `package` links for `target`; build scripts' and tests' own are not in the program.
///
/// # Errors
/// In cargo's words.
pub fn crates(package: &str, target: &str) -> Result<BTreeSet<Crate>> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--package", package, "--target", target])
        .args(["--edges", "normal", "--prefix", "none", "--format", "{p}\t{l}"])
        .current_dir(ROOT)
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8_lossy(&output.stdout).lines().map(read).collect()
}

/// A line of `cargo tree`: `name v1.2.3 (where it is from)`, a tab, the licence, and `(*)` where it was listed before.
fn read(line: &str) -> Result<Crate> {
    let parts = line.split_once('\t').and_then(|(what, license)| {
        let mut words = what.split(' ');
        Some((words.next()?, words.next()?.strip_prefix('v')?, license.trim_end_matches(" (*)").trim()))
    });
    let (name, version, license) = parts.with_context(|| format!("no line of cargo tree: {line}"))?;
    Ok(Crate { name: name.to_owned(), version: version.to_owned(), license: license.replace('/', " OR ") })
}

/// Name and version of every crate of a lock file, with its checksum where it comes from a registry.
fn checksums(lock: &str) -> BTreeMap<(String, String), Option<String>> {
    let field = |block: &str, name: &str| {
        let start = format!("{name} = \"");
        block.lines().find_map(|line| Some(line.strip_prefix(&start)?.trim_end_matches('"').to_owned()))
    };
    let blocks = lock.split("[[package]]").skip(1);
    blocks
        .filter_map(|block| Some(((field(block, "name")?, field(block, "version")?), field(block, "checksum"))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: &str = "x86_64-unknown-linux-musl";

    #[test]
    fn the_operators_bill_is_whole_and_the_same_each_time() {
        let text = bill("operator", TARGET, "sha256:0", &[]).unwrap();
        assert!(text == bill("operator", TARGET, "sha256:0", &[]).unwrap(), "two bills of one tree differ");
        let bill: Value = serde_json::from_str(&text).unwrap();
        let components = bill["components"].as_array().unwrap();
        assert_eq!(components.len(), crates("operator", TARGET).unwrap().len());
        let ours = ["operator", "crds", "role"];
        for component in components {
            let name = component["name"].as_str().unwrap();
            let sum = component["hashes"][0]["content"].as_str();
            assert_eq!(sum.map(str::len), if ours.contains(&name) { None } else { Some(64) }, "{name}");
            assert!(
                component["licenses"][0]["expression"].as_str().is_some_and(|text| !text.is_empty()),
                "{name}: no licence"
            );
        }
        let has = |name: &str| components.iter().any(|component| component["name"] == name);
        assert!(has("rustls") && has("kube") && !has("proptest"), "what is linked is in it, what tests use is not");
    }

    #[test]
    fn a_library_that_comes_along_is_named_with_its_sum() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("libx.so");
        std::fs::write(&library, "x").unwrap();
        let bill = bill("crds", TARGET, "sha256:0", &[File::new(&library, "/lib/libx.so")]).unwrap();
        let bill: Value = serde_json::from_str(&bill).unwrap();
        let last = bill["components"].as_array().and_then(|all| all.last()).unwrap();
        assert_eq!(last["name"], "lib/libx.so");
        assert_eq!(last["hashes"][0]["content"], "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881");
        assert!(last["purl"].is_null(), "no package has it: {last}");
    }

    #[test]
    fn lines_of_cargo_and_of_the_lock_file_are_read() {
        let of = |license: &str| Crate { name: "ring".into(), version: "0.17.1".into(), license: license.into() };
        assert_eq!(read("ring v0.17.1\tApache-2.0 AND ISC").unwrap(), of("Apache-2.0 AND ISC"));
        assert_eq!(read("ring v0.17.1 (/a/b) (*)\tMIT/Apache-2.0 (*)").unwrap(), of("MIT OR Apache-2.0"));
        assert!(read("nonsense").is_err());
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"ff\"\n\n[[package]]\nname = \"b\"\nversion = \"2.0.0\"\n";
        let sums = checksums(lock);
        assert_eq!(sums[&("a".to_owned(), "1.0.0".to_owned())].as_deref(), Some("ff"));
        assert_eq!(sums[&("b".to_owned(), "2.0.0".to_owned())], None);
    }
}
