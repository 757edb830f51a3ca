//! The plain manifests by kustomize, as their head tells it: an overlay of one's own names the image, twice is once, and all of it goes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use truebeat_tests::product::OPERATOR_IMAGE;
use truebeat_tests::times::Times;

use crate::chart;
use crate::world::World;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// What an overlay stands on: kustomize reads nothing outside by absolute paths.
const BASE: [&str; 2] = ["crds", "operator/manifests"];

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let overlay = overlay(&world.cluster.layout().path("kustomize"))?.display().to_string();
    times.act("kubectl apply -k: an overlay with an image of one's own");
    world.cluster.kubectl(&["--warnings-as-errors", "apply", "-k", &overlay])?;
    let rollout = ["-n", "truebeat-system", "rollout", "status", "deploy/truebeat-operator", "--timeout=90s"];
    world.cluster.kubectl(&[&rollout[..], &["--request-timeout=0"]].concat())?;
    chart::candidates(world, "2 2").await?;
    times.now("two candidates available (PSS restricted)");
    world.cluster.kubectl(&["create", "namespace", "kustomized"])?;
    chart::acts(world, "kustomized").await?;
    times.now("it acts: an InferenceDeployment got a status");

    times.act("kubectl apply -k again, and kubectl diff -k");
    let said = world.cluster.kubectl(&["apply", "-k", &overlay])?;
    let changed: Vec<&str> = said.lines().filter(|line| !line.ends_with(" unchanged")).collect();
    ensure!(changed.is_empty() && said.lines().count() >= 14, "an apply of the same: {said}");
    let diff = world.cluster.kubectl(&["diff", "-k", &overlay])?;
    ensure!(diff.trim().is_empty(), "{diff}");
    times.now("nothing changes");

    times.act("kubectl delete -k");
    world.cluster.kubectl(&[
        "delete",
        "namespace",
        "kustomized",
        "--wait=true",
        "--timeout=60s",
        "--request-timeout=0",
    ])?;
    world.cluster.kubectl(&["delete", "-k", &overlay, "--wait=true", "--timeout=90s", "--request-timeout=0"])?;
    let left = world.cluster.kubectl(&["get", "crd,clusterrole,validatingadmissionpolicy", "-o", "name"])?;
    ensure!(!left.contains("truebeat"), "left behind: {left}");
    times.now("all of it gone, CRDs as well");
    Ok(())
}

/// A copy of the base, and beside it an overlay as the base's head shows it; its folder.
fn overlay(folder: &Path) -> Result<PathBuf> {
    for part in BASE {
        copy(&Path::new(ROOT).join(part), &folder.join(part))?;
    }
    let (image, tag) = OPERATOR_IMAGE.split_once(':').context("an image with a tag")?;
    let text = format!(
        "resources: [../operator/manifests]\nimages: [{{name: truebeat-operator, newName: {image}, newTag: {tag}}}]\n"
    );
    let overlay = folder.join("overlay");
    fs::create_dir_all(&overlay)?;
    fs::write(overlay.join("kustomization.yaml"), text)?;
    Ok(overlay)
}

/// The YAML of a folder and of the folders in it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let path = entry?.path();
        let target = to.join(path.file_name().context("a name")?);
        if path.is_dir() {
            copy(&path, &target)?;
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}
