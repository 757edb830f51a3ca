//! What is known against a version that the lock file names (H11), by a copy of RustSec's database. Such a copy comes from the network and
//! is old soon, so none is kept here: `TRUEBEAT_ADVISORIES` is the folder of a clone of `github.com/rustsec/advisory-db`. Without one
//! nothing is compared, and that is on record. What is known and taken all the same stands in `deny.toml`, each with its reason.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use semver::{Version, VersionReq};
use serde_json::Value;

use crate::supply::{DENY, LOCK, each, name};
use crate::tree::Finding;

/// Fewer of them are no database.
const COUNT_MIN: usize = 500;

/// One entry of the database.
#[derive(Debug)]
pub struct Advisory {
    id: String,
    package: String,
    /// In these versions there is nothing of it.
    fine: Vec<VersionReq>,
}

/// The folder that somebody has brought.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os("TRUEBEAT_ADVISORIES").map(PathBuf::from)
}

/// Reads the entries of `crates/` that were not withdrawn.
///
/// # Errors
/// When one of them cannot be read: what is not understood is not known to be fine.
pub fn read(folder: &Path) -> Result<Vec<Advisory>> {
    let crates = folder.join("crates");
    let mut all = Vec::new();
    for package in fs::read_dir(&crates).with_context(|| format!("cannot list {}", crates.display()))? {
        for entry in fs::read_dir(package?.path())? {
            let path = entry?.path();
            if path.extension().is_some_and(|kind| kind == "md") {
                let text = fs::read_to_string(&path)?;
                all.extend(parse(&text).with_context(|| format!("cannot read {}", path.display()))?);
            }
        }
    }
    ensure!(all.len() >= COUNT_MIN, "{} holds {} advisories: it is not the database", folder.display(), all.len());
    Ok(all)
}

/// An entry is Markdown that begins with a block of TOML.
fn parse(text: &str) -> Result<Option<Advisory>> {
    let block = text.split("```").nth(1).and_then(|block| block.trim_start().strip_prefix("toml"));
    let entry: Value = toml::from_str(block.context("it does not begin with TOML")?)?;
    let advisory = &entry["advisory"];
    if advisory["withdrawn"].is_string() {
        return Ok(None);
    }
    let text = |key: &str| advisory[key].as_str().map(str::to_owned).with_context(|| format!("it has no {key}"));
    let lists = [&entry["versions"]["patched"], &entry["versions"]["unaffected"]];
    let fine = lists.into_iter().flat_map(each).filter_map(Value::as_str).map(VersionReq::parse);
    Ok(Some(Advisory { id: text("id")?, package: text("package")?, fine: fine.collect::<Result<_, _>>()? }))
}

impl Advisory {
    /// Does it speak of this version? A requirement never matches a pre-release by itself, so that one counts as hit.
    fn hits(&self, version: &Version) -> bool {
        !self.fine.iter().any(|fine| fine.matches(version))
    }
}

/// What is known against the packages of the lock file and not taken by `deny.toml`, and what is taken for nothing.
///
/// # Errors
/// When the lock file names a version that is none.
pub fn check(lock: &Value, deny: &Value, advisories: &[Advisory]) -> Result<Vec<Finding>> {
    let taken: BTreeSet<&str> = each(&deny["advisories"]["ignore"]).filter_map(|one| one["id"].as_str()).collect();
    let mut hit = BTreeSet::new();
    let mut findings = Vec::new();
    for package in each(&lock["package"]).filter(|package| package["source"].is_string()) {
        let (name, version) = (name(package), package["version"].as_str().unwrap_or_default());
        let parsed = Version::parse(version).with_context(|| format!("{LOCK}: {name} {version:?}"))?;
        for advisory in advisories.iter().filter(|advisory| advisory.package == name && advisory.hits(&parsed)) {
            hit.insert(advisory.id.as_str());
            if !taken.contains(advisory.id.as_str()) {
                findings.push(finding(LOCK, format!("{name} {version}: {}", advisory.id)));
            }
        }
    }
    let idle = taken.difference(&hit).map(|id| finding(DENY, format!("{id} is taken, and nothing of it is here")));
    findings.extend(idle);
    let bare = each(&deny["advisories"]["ignore"]).filter(|one| one["reason"].as_str().is_none_or(str::is_empty));
    findings.extend(bare.map(|one| finding(DENY, format!("an advisory is taken without a reason: {one}"))));
    Ok(findings)
}

fn finding(path: &str, what: String) -> Finding {
    Finding { path: path.to_owned(), line: 1, what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ENTRY: &str = "```toml\n[advisory]\nid = \"RUSTSEC-2026-0001\"\npackage = \"guest\"\ndate = \"2026-01-01\"\n\n\
        [versions]\npatched = [\">= 1.2.3\", \"^1.1.5\"]\nunaffected = [\"< 1.0.0\"]\n```\n\n# It steals\n";

    fn words(version: &str, deny: &Value) -> String {
        let advisory = parse(ENTRY).unwrap().unwrap();
        let lock = json!({"package": [{"name": "guest", "version": version, "source": "registry"}]});
        let findings = check(&lock, deny, &[advisory]).unwrap();
        findings.iter().map(|finding| finding.what.clone()).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn what_is_known_is_found_in_the_versions_that_have_it() {
        for fine in ["0.9.0", "1.1.5", "1.2.3", "2.0.0"] {
            assert_eq!(words(fine, &Value::Null), "", "{fine}");
        }
        for hit in ["1.0.0", "1.1.4", "1.2.3-rc.1"] {
            assert_eq!(words(hit, &Value::Null), format!("guest {hit}: RUSTSEC-2026-0001"));
        }
    }

    #[test]
    fn what_is_taken_has_a_reason_and_is_there() {
        let taken = |reason: Value| json!({"advisories": {"ignore": [{"id": "RUSTSEC-2026-0001", "reason": reason}]}});
        assert_eq!(words("1.0.0", &taken(json!("nobody calls it"))), "");
        assert!(words("1.0.0", &taken(Value::Null)).contains("without a reason"));
        assert!(words("1.2.3", &taken(json!("nobody calls it"))).contains("nothing of it is here"));
    }

    #[test]
    fn what_was_withdrawn_is_nothing_and_what_cannot_be_read_is_an_error() {
        let withdrawn = ENTRY.replace("package", "withdrawn = \"2026-02-01\"\npackage");
        assert!(parse(&withdrawn).unwrap().is_none());
        assert!(parse("# It steals").is_err() && parse(&ENTRY.replace("id = ", "it = ")).is_err());
        assert!(parse(&ENTRY.replace(">= 1.2.3", "newer")).is_err());
    }
}
