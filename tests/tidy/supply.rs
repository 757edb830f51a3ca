//! What may come in from outside (H11): each dependency from the one registry and with its checksum, under a licence of the list, and
//! none that is banned. `deny.toml` is the list; that tool itself also knows wildcards and other systems' dependencies.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use spdx::{Expression, ParseMode};

use crate::edges;
use crate::tree::Finding;

pub const LOCK: &str = "Cargo.lock";
pub const DENY: &str = "deny.toml";
/// What a ban may say.
const BAN: [&str; 3] = ["name", "wrappers", "reason"];
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The lock file, the list, and what cargo makes of the whole tree on this system.
pub struct Supply {
    pub lock: Value,
    pub deny: Value,
    pub metadata: Value,
}

impl Supply {
    /// # Errors
    /// When one of them is not there or cannot be read.
    pub fn of_this_repository() -> Result<Self> {
        // other systems' packages are not there after a build, and would have to be fetched for this alone
        let system = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let metadata = edges::cargo_metadata(&["--locked", "--filter-platform", &system])?;
        Ok(Self { lock: read(LOCK)?, deny: read(DENY)?, metadata })
    }

    /// Everything that is not as the list wants it.
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = self.sources();
        findings.extend(self.licences());
        findings.extend(self.bans());
        findings
    }

    /// A package without a source is one of this workspace; all others come from the registry, with a checksum.
    fn sources(&self) -> Vec<Finding> {
        let own: BTreeSet<&str> = self.packages().filter(|package| self.is_own(package)).map(name).collect();
        let wrong = |package: &Value| match package["source"].as_str() {
            None => (!own.contains(name(package))).then(|| "comes from a folder outside of this workspace".to_owned()),
            Some(REGISTRY) => package["checksum"].as_str().is_none().then(|| "has no checksum".to_owned()),
            Some(other) => Some(format!("comes from {other}, which is not the registry")),
        };
        each(&self.lock["package"]).filter_map(|package| Some(finding(LOCK, package, &wrong(package)?))).collect()
    }

    fn licences(&self) -> Vec<Finding> {
        let allowed: BTreeSet<&str> = each(&self.deny["licenses"]["allow"]).filter_map(Value::as_str).collect();
        let wrong = |package: &Value| {
            let Some(text) = package["license"].as_str() else { return Some("names no licence".to_owned()) };
            match Expression::parse_mode(text, ParseMode::LAX) {
                Ok(expression) => {
                    let fine = expression.evaluate(|wanted| allowed.contains(wanted.to_string().as_str()));
                    (!fine).then(|| format!("is under {text}, which {DENY} does not allow"))
                }
                Err(error) => Some(format!("is under {text}, which cannot be read: {}", error.reason)),
            }
        };
        let packages = self.packages().filter(|package| !self.is_own(package));
        packages.filter_map(|package| Some(finding(DENY, package, &wrong(package)?))).collect()
    }

    /// Of a banned package with `wrappers`, these may depend on it, and nobody else.
    fn bans(&self) -> Vec<Finding> {
        let named = |id: &Value| self.packages().find(|package| package["id"] == *id).map_or("?", name);
        let mut findings = Vec::new();
        for ban in each(&self.deny["bans"]["deny"]) {
            let keys: Vec<&str> = ban.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
            if !ban["name"].is_string() || keys.iter().any(|key| !BAN.contains(key)) {
                let what = format!("a ban of {BAN:?} is looked for, and this is another: {ban}");
                findings.push(Finding { path: DENY.to_owned(), line: 1, what });
            }
            let wrappers: BTreeSet<&str> = each(&ban["wrappers"]).filter_map(Value::as_str).collect();
            for banned in self.packages().filter(|package| package["name"] == ban["name"]) {
                let takes = |node: &&Value| each(&node["dependencies"]).any(|on| *on == banned["id"]);
                let users = each(&self.metadata["resolve"]["nodes"]).filter(takes).map(|node| named(&node["id"]));
                let users: Vec<&str> = users.filter(|user| !wrappers.contains(user)).collect();
                if !users.is_empty() {
                    let why = ban["reason"].as_str().unwrap_or("no reason is given");
                    let what = format!("is banned ({why}), and used by {}", users.join(", "));
                    findings.push(finding(DENY, banned, &what));
                }
            }
        }
        findings
    }

    fn packages(&self) -> impl Iterator<Item = &Value> {
        each(&self.metadata["packages"])
    }

    fn is_own(&self, package: &Value) -> bool {
        each(&self.metadata["workspace_members"]).any(|id| *id == package["id"])
    }
}

fn read(name: &str) -> Result<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {name}"))?;
    toml::from_str(&text).with_context(|| format!("{name} is no TOML"))
}

pub fn each(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

pub fn name(package: &Value) -> &str {
    package["name"].as_str().unwrap_or_default()
}

fn finding(path: &str, package: &Value, what: &str) -> Finding {
    let version = package["version"].as_str().unwrap_or_default();
    Finding { path: path.to_owned(), line: 1, what: format!("{} {version} {what}", name(package)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A package `guest` that came in by `host`; `change` makes something wrong of it.
    fn words(change: impl FnOnce(&mut Supply)) -> String {
        let package =
            |name: &str, source: Value| json!({"name": name, "version": "1.0.0", "id": name, "source": source});
        let mut guest = package("guest", json!(REGISTRY));
        guest["license"] = json!("MIT/Apache-2.0");
        let mut locked = package("guest", json!(REGISTRY));
        locked["checksum"] = json!("00");
        let nodes = json!([{"id": "host", "dependencies": ["guest"]}, {"id": "guest", "dependencies": []}]);
        let mut supply = Supply {
            lock: json!({"package": [package("host", Value::Null), locked]}),
            deny: json!({"licenses": {"allow": ["Apache-2.0"]}, "bans": {"deny": [{"name": "other"}]}}),
            metadata: json!({
                "packages": [package("host", Value::Null), guest], "resolve": {"nodes": nodes}, "workspace_members": ["host"],
            }),
        };
        change(&mut supply);
        supply.check().iter().map(|finding| finding.what.clone()).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn what_comes_from_elsewhere_is_found() {
        assert_eq!(words(|_| ()), "");
        let git = |supply: &mut Supply| supply.lock["package"][1]["source"] = json!("git+https://example.com/guest");
        assert!(words(git).contains("guest 1.0.0 comes from git+https://example.com/guest"));
        let bare = |supply: &mut Supply| supply.lock["package"][1]["checksum"] = Value::Null;
        assert_eq!(words(bare), "guest 1.0.0 has no checksum");
        let beside = |supply: &mut Supply| {
            supply.lock["package"][1]["source"] = Value::Null;
            supply.metadata["packages"][1]["source"] = Value::Null;
        };
        assert!(words(beside).contains("from a folder outside"));
    }

    #[test]
    fn a_licence_that_is_not_on_the_list_is_found() {
        let under = |text: &'static str| words(move |supply| supply.metadata["packages"][1]["license"] = json!(text));
        assert!(under("GPL-3.0-only").contains("guest 1.0.0 is under GPL-3.0-only"));
        assert!(under("Apache-2.0 AND MIT").contains("does not allow"), "both hold");
        assert!(under("my own").contains("cannot be read"));
        assert_eq!(under("GPL-3.0-only OR Apache-2.0"), "");
        assert!(words(|supply| supply.metadata["packages"][1]["license"] = Value::Null).contains("names no licence"));
    }

    #[test]
    fn a_banned_one_is_found_but_behind_its_wrapper() {
        let ban = |rest: Value| {
            words(|supply| {
                supply.deny["bans"]["deny"] = json!([{"name": "guest", "reason": "it steals", "wrappers": rest}]);
            })
        };
        assert_eq!(ban(Value::Null), "guest 1.0.0 is banned (it steals), and used by host");
        assert_eq!(ban(json!(["host"])), "");
        let other = |supply: &mut Supply| supply.deny["bans"]["deny"] = json!([{"crate": "guest"}]);
        assert!(words(other).contains("this is another"), "a spelling that is not read is no ban");
    }
}
