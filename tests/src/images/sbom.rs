//! What a program is made of: a software bill of materials in CycloneDX, from what cargo itself resolves and the lock file's checksums.
//! No clock and no random number is in it, so the same tree gives the same bytes. Runs `cargo tree`; reads Cargo.lock.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// One crate that is linked into the program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    pub name: String,
    pub version: String,
    /// An SPDX expression.
    pub license: String,
}

/// The bill of `package` as built for `target`, as JSON text; `image` is the digest of what it comes in.
///
/// # Errors
/// When cargo cannot resolve it, or a crate of a registry has no checksum.
pub fn bill(package: &str, target: &str, image: &str) -> Result<String> {
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
    let components = crates.iter().map(component).collect::<Result<Vec<_>>>()?;
    let subject = json!({"type": "container", "bom-ref": image, "name": package, "version": image});
    let bill = json!({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": subject}, "components": components});
    Ok(serde_json::to_string_pretty(&bill)?)
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
        let text = bill("operator", TARGET, "sha256:0").unwrap();
        assert!(text == bill("operator", TARGET, "sha256:0").unwrap(), "two bills of one tree differ");
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
