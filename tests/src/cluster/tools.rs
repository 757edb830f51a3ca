//! The programs of a cluster come from `tests/tools/build.sh`; this asks it for them.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::layout::Layout;
use super::machine::{self, NotRun};

/// Builds what is missing (its progress goes to standard error) and gives the folder.
///
/// # Errors
/// When a build fails.
pub fn build() -> Result<PathBuf> {
    ask(&[])
}

/// [`build`], and kwok, which only the measurement of a large fleet needs.
///
/// # Errors
/// When a build fails.
pub fn with_kwok() -> Result<PathBuf> {
    ask(&["--with-kwok"])
}

/// The folder, without building.
///
/// # Errors
/// When the script cannot run (no Go).
pub fn folder() -> Result<PathBuf> {
    ask(&["--print"])
}

/// [`machine::check`] after the script had its chance to install what the machine's package manager can give (as root).
///
/// # Errors
/// All that is still missing.
pub fn apt_then_check(layout: &Layout, node: bool) -> Result<(), NotRun> {
    let first = machine::check(layout, node);
    if first.is_ok() || !nix::unistd::geteuid().is_root() {
        return first.and_then(|()| go_there());
    }
    // the script installs packages before it builds; its own failure shows up again, in full, when the build is asked for
    let _ = ask(&["--packages"]);
    machine::check(layout, node).and_then(|()| go_there())
}

fn go_there() -> Result<(), NotRun> {
    folder()
        .map(drop)
        .map_err(|error| NotRun { why: vec![format!("the cluster's programs cannot be built ({error:#})")] })
}

fn ask(args: &[&str]) -> Result<PathBuf> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/build.sh");
    let output = Command::new(script)
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {script}"))?;
    if !output.status.success() {
        bail!("tests/tools/build.sh ended with {}; its lines above say why", output.status);
    }
    let folder = String::from_utf8(output.stdout).context("tests/tools/build.sh printed no text")?;
    Ok(PathBuf::from(folder.trim()))
}
