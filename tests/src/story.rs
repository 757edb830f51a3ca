//! A story: a test that needs a cluster. It gets one, or it is *not run*: said on standard error, written to
//! `target/not-run.jsonl` (what was not run and why, so that a summary can count it), and neither passed off as done nor failed,
//! unless `TRUEBEAT_REQUIRE_CLUSTER=1` says that this machine must be able to.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use kube::Client;

use crate::cluster::{Cluster, NotRun, Options};

/// The cluster's name for all stories (they run one after the other).
pub const NAME: &str = "e2e";

/// Runs `story` on a cluster: the one that is up when `TRUEBEAT_CLUSTER=reuse`, else one of its own.
///
/// # Errors
/// The cluster's or the story's own.
pub fn tell(
    what: &str,
    options: &Options,
    story: impl AsyncFnOnce(Client, &Cluster) -> Result<()> + Send,
) -> Result<()> {
    let Some(cluster) = cluster(what, options)? else { return Ok(()) };
    let started = Instant::now();
    let told = cluster.run(async |client| story(client, &cluster).await);
    match &told {
        Ok(()) => eprintln!("story: {what}: seen in {:.1} s", started.elapsed().as_secs_f64()),
        Err(_) => eprintln!("story: {what}: failed; logs in {}", cluster.layout().path("log").display()),
    }
    told
}

/// The cluster a story runs on; `None` when it cannot run here, which is then on record.
///
/// # Errors
/// When a cluster should run here and does not.
pub fn cluster(what: &str, options: &Options) -> Result<Option<Cluster>> {
    match one(options)? {
        Ok(cluster) => Ok(Some(cluster)),
        Err(reason) => not_run(what, &reason).map(|()| None),
    }
}

/// The cluster that is up when `TRUEBEAT_CLUSTER=reuse`, else one of one's own.
///
/// # Errors
/// When a cluster should run here and does not.
pub fn one(options: &Options) -> Result<Result<Cluster, NotRun>> {
    if std::env::var("TRUEBEAT_CLUSTER").is_ok_and(|word| word == "reuse") {
        match Cluster::attach(NAME)? {
            Some(cluster) => return Ok(Ok(cluster)),
            None => eprintln!("story: TRUEBEAT_CLUSTER=reuse, but none is up (`cluster up` makes one): starting one"),
        }
    }
    Cluster::up(NAME, options)
}

/// Says and records that `what` was not run.
///
/// # Errors
/// When this machine must be able to (`TRUEBEAT_REQUIRE_CLUSTER=1`), or the record cannot be written.
pub fn not_run(what: &str, reason: &NotRun) -> Result<()> {
    if std::env::var("TRUEBEAT_REQUIRE_CLUSTER").is_ok_and(|word| word == "1") {
        bail!("{what}: {reason} (and TRUEBEAT_REQUIRE_CLUSTER=1)");
    }
    record(what, &reason.why)
}

/// Says and records that `what` was not run, for a reason that no machine is to blame for.
///
/// # Errors
/// When the record cannot be written.
pub fn record(what: &str, why: &[String]) -> Result<()> {
    eprintln!("NOT RUN: {what}: {}", why.join("; "));
    let path = record_file();
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let line = serde_json::json!({"not_run": what, "why": why});
    writeln!(file, "{line}").with_context(|| format!("cannot write {}", path.display()))
}

/// `target/not-run.jsonl`: one object a line, `{"not_run": story, "why": [..]}`; whoever starts a run removes it first.
pub fn record_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/not-run.jsonl")
}
