//! Forbidden edges (docs/ARCHITECTURE.md): which crate may not depend on which, and which module may not name which.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::paths;
use crate::tree::{Finding, Tree};

/// Crate, what it must never depend on (in any kind of dependency), why.
const CRATES: [(&str, &[&str], &str); 6] = [
    ("operator", &["agent", "engine"], "three programs that never import each other"),
    ("agent", &["engine", "operator"], "three programs that never import each other"),
    ("engine", &["agent", "operator"], "three programs that never import each other"),
    ("vitals", &["tokio", "kube", "crds"], "the detector is a pure function"),
    ("heartbeat", &["tokio", "axum", "kube"], "the page is read and written by anything"),
    ("role", &["heartbeat", "vitals", "crds", "kube"], "how a program starts knows nothing of what it does"),
];

/// Only the second crate may depend on the first.
const ONLY: [(&str, &str); 1] = [("cudarc", "engine")];

struct Modules {
    /// Files whose path starts with this …
    below: &'static str,
    /// … but not with one of these …
    but: &'static [&'static str],
    /// … must not name a path that has this segment (with `^`: that begins with it).
    never: &'static [&'static str],
    why: &'static str,
}

const MODULES: [Modules; 5] = [
    Modules {
        below: "vitals/src/",
        // a driver measures its own speed
        but: &["vitals/src/bin/"],
        never: &["^tokio", "^kube", "^crds", "Instant", "SystemTime", "UNIX_EPOCH"],
        why: "the detector has no clock and no I/O: time is an argument",
    },
    Modules {
        below: "heartbeat/src/",
        but: &[],
        never: &["^tokio", "^axum", "^kube"],
        why: "the page knows no runtime",
    },
    Modules {
        below: "engine/src/scheduler",
        but: &[],
        never: &["^tokio", "^axum", "^cudarc", "backend"],
        why: "the scheduler is pure: it plans, others run",
    },
    Modules { below: "", but: &["engine/src/backend/cuda"], never: &["^cudarc"], why: "one module talks to CUDA" },
    Modules {
        below: "agent/src/",
        but: &["agent/src/report.rs", "agent/src/report/"],
        never: &["^kube"],
        why: "the agent knows the cluster in one module",
    },
];

/// `cargo metadata --no-deps` of this workspace.
pub fn metadata() -> Result<Value> {
    cargo_metadata(&["--no-deps", "--offline"])
}

/// `cargo metadata` of this workspace.
pub fn cargo_metadata(args: &[&str]) -> Result<Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--manifest-path"])
        .arg(manifest)
        .args(args)
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")
}

/// Every forbidden dependency in the manifests.
pub fn manifests(metadata: &Value) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let on = dependency["name"].as_str().unwrap_or_default();
            if let Some(why) = forbidden(name, on) {
                findings.push(Finding {
                    path: format!("{name}/Cargo.toml"),
                    line: 1,
                    what: format!("{name} depends on {on}: {why}"),
                });
            }
        }
    }
    findings
}

fn forbidden(name: &str, on: &str) -> Option<String> {
    if on == "truebeat-tests" {
        return Some("nothing depends on the tests".to_owned());
    }
    if let Some((_, only)) = ONLY.iter().find(|(dependency, only)| *dependency == on && *only != name) {
        return Some(format!("only {only} may"));
    }
    let (_, _, why) = CRATES.iter().find(|(from, to, _)| *from == name && to.contains(&on))?;
    Some((*why).to_owned())
}

/// Every path that a module must not name.
pub fn modules(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, source) in tree.sources() {
        let named = paths::named(source);
        let applies = |rule: &&Modules| {
            file.path.starts_with(rule.below) && !rule.but.iter().any(|but| file.path.starts_with(but))
        };
        for rule in MODULES.iter().filter(applies) {
            for path in named.iter().filter(|path| rule.never.iter().any(|never| contains(&path.segments, never))) {
                let what = format!("names {}: {}", path.segments.join("::"), rule.why);
                findings.push(Finding { path: file.path.clone(), line: path.line, what });
            }
        }
    }
    findings
}

fn contains(segments: &[String], never: &str) -> bool {
    match never.strip_prefix('^') {
        // a lone segment is a local name, unless it is all that a `use` names (then its uses have a path)
        Some(first) => segments.len() > 1 && segments[0] == first,
        None => segments.iter().any(|segment| segment == never),
    }
}

#[test]
fn a_forbidden_dependency_is_found() {
    let metadata = serde_json::json!({"packages": [
        {"name": "operator", "dependencies": [{"name": "agent"}, {"name": "crds"}]},
        {"name": "agent", "dependencies": [{"name": "cudarc"}, {"name": "truebeat-tests"}]},
    ]});
    let found: Vec<_> = manifests(&metadata).into_iter().map(|finding| finding.what).collect();
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn a_forbidden_path_is_found_and_its_exception_is_not() {
    let found = |path: &str, text: &str| modules(&Tree::one(path, text)).len();
    assert_eq!(found("vitals/src/a.rs", "fn f() -> u64 { std::time::Instant::now(); 0 }"), 1);
    assert_eq!(found("vitals/src/a.rs", "use std::time::{Duration, SystemTime};"), 1);
    assert_eq!(found("vitals/src/a.rs", "use std::time::Duration;"), 0);
    assert_eq!(found("engine/src/scheduler/mod.rs", "use crate::backend::Cpu;"), 1);
    assert_eq!(found("agent/src/gate.rs", "use kube::Client;"), 1);
    assert_eq!(found("agent/src/report.rs", "use kube::Client;"), 0);
    assert_eq!(found("engine/src/model/mod.rs", "use cudarc::driver;"), 1);
    assert_eq!(found("engine/src/backend/cuda/mod.rs", "use cudarc::driver;"), 0);
}
