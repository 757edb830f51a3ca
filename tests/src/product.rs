//! Our own programs on the tests' cluster: images from what `tests/build-programs.sh` built, the installation as the README tells it,
//! and the state of everything for a story that failed. Builds nothing: a missing program is an error that says how to get it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use engine::demo_model::{DemoArch, write_demo_model};

use crate::cluster::Cluster;
use crate::images::{self, File};

/// Names of the images on the node.
pub const AGENT_IMAGE: &str = "truebeat.local/agent:e2e";
pub const ENGINE_IMAGE: &str = "truebeat.local/engine:e2e";
pub const OPERATOR_IMAGE: &str = "truebeat.local/operator:e2e";
const CRDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crds/yaml");
/// Where an agent tells what it sees.
const AGENT_PORT: u16 = 9400;
/// The model's folder in the engine's image.
pub const MODEL: &str = "/models/demo";

/// Where the programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    pub agent: PathBuf,
    pub engine: PathBuf,
    pub operator: PathBuf,
    /// The command line, which is also kubectl's plugin.
    pub truebeat: PathBuf,
}

impl Programs {
    /// Looks in `TRUEBEAT_BIN_DIR` (default: `target/release`), and at `TRUEBEAT_AGENT_BIN` and `TRUEBEAT_OPERATOR_BIN` (default: the
    /// small ones in `target`).
    ///
    /// # Errors
    /// Naming every program that is not there.
    pub fn find() -> Result<Self> {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
        let bin = std::env::var_os("TRUEBEAT_BIN_DIR").map_or_else(|| target.join("release"), PathBuf::from);
        let musl = format!("{}-unknown-linux-musl/image/truebeat-operator", std::env::consts::ARCH);
        let operator = std::env::var_os("TRUEBEAT_OPERATOR_BIN").map_or_else(|| target.join(musl), PathBuf::from);
        let agent =
            std::env::var_os("TRUEBEAT_AGENT_BIN").map_or_else(|| target.join("agent/truebeat-agent"), PathBuf::from);
        let [engine, truebeat] = ["truebeat-engine", "truebeat"].map(|name| bin.join(name));
        let programs = Self { agent, engine, operator, truebeat };
        let all = [&programs.agent, &programs.engine, &programs.operator, &programs.truebeat];
        let missing: Vec<_> =
            all.iter().filter(|path| !path.is_file()).map(|path| path.display().to_string()).collect();
        if !missing.is_empty() {
            bail!("not built: {}; run tests/build-programs.sh", missing.join(", "));
        }
        Ok(programs)
    }

    /// Makes the three images and puts them into the node's store.
    ///
    /// # Errors
    /// When a file cannot be read, or containerd refuses an image.
    pub fn import(&self, cluster: &Cluster) -> Result<()> {
        let out = cluster.layout().path("images");
        let model = model_files(&out.join("model"))?;
        let agent = images::image_dynamic(&out, AGENT_IMAGE, &self.agent, &["/truebeat-agent"], &[])?;
        cluster.import(&agent)?;
        let engine = images::image_dynamic(&out, ENGINE_IMAGE, &self.engine, &["/truebeat-engine"], &model)?;
        cluster.import(&engine)?;
        self.import_operator(cluster, OPERATOR_IMAGE)
    }

    /// Puts the operator into the node's store as the image of this name.
    ///
    /// # Errors
    /// When the program cannot be read, or containerd refuses the image.
    pub fn import_operator(&self, cluster: &Cluster, image: &str) -> Result<()> {
        let out = cluster.layout().path("images");
        cluster.import(&images::image_static(&out, image, &self.operator, &["/truebeat-operator"], &[])?)
    }

    /// CRDs and operator, by `kubectl apply` of the committed YAML and of what the operator itself prints for this image.
    ///
    /// # Errors
    /// In kubectl's words (a warning counts as an error).
    pub fn install(&self, cluster: &Cluster) -> Result<()> {
        cluster.kubectl(&["--warnings-as-errors", "apply", "-f", CRDS])?;
        cluster.kubectl(&["wait", "--for=condition=Established", "--timeout=30s", "-f", CRDS])?;
        apply(cluster, &self.manifests()?).map(drop)
    }

    /// Takes away what [`Self::install`] made, and waits until it is gone.
    ///
    /// # Errors
    /// In kubectl's words.
    pub fn uninstall(&self, cluster: &Cluster) -> Result<()> {
        let file = cluster.layout().path("uninstall.yaml");
        fs::write(&file, self.manifests()?).with_context(|| format!("cannot write {}", file.display()))?;
        let gone = ["delete", "--wait=true", "--timeout=90s", "-f"];
        cluster.kubectl(&[&gone[..], &[&file.display().to_string()]].concat())?;
        cluster.kubectl(&[&gone[..], &[CRDS]].concat()).map(drop)
    }

    /// What the operator itself prints for the image of these tests.
    fn manifests(&self) -> Result<String> {
        let print = ["operator", "manifests", "--image", OPERATOR_IMAGE, "--image-pull-policy", "Never"];
        let output = Command::new(&self.operator)
            .args(print)
            .output()
            .with_context(|| format!("cannot start {}", self.operator.display()))?;
        if !output.status.success() {
            bail!(
                "{} {}: {}",
                self.operator.display(),
                print.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// `kubectl apply` of `yaml`; gives kubectl's words.
///
/// # Errors
/// In kubectl's words; a warning counts as an error.
pub fn apply(cluster: &Cluster, yaml: &str) -> Result<String> {
    let file = cluster.layout().path("apply.yaml");
    fs::write(&file, yaml).with_context(|| format!("cannot write {}", file.display()))?;
    cluster.kubectl(&["--warnings-as-errors", "apply", "-f", &file.display().to_string()])
}

fn model_files(dir: &Path) -> Result<Vec<File>> {
    write_demo_model(dir, DemoArch::Llama, 7)?;
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names.iter().map(|name| File::new(&dir.join(name), &format!("{MODEL}/{name}"))).collect())
}

/// The folder of a pod's `emptyDir` volume as the machine sees it.
pub fn volume(cluster: &Cluster, pod_uid: &str, name: &str) -> PathBuf {
    cluster.layout().path(&format!("kubelet/pods/{pod_uid}/volumes/kubernetes.io~empty-dir/{name}"))
}

/// Everything that tells why a story failed, as text; what is asked first stands last, for whoever has only the end.
pub fn state(cluster: &Cluster, namespace: &str) -> String {
    let system = "truebeat-system";
    let pods = names(cluster, namespace);
    let ask = |command: &[&str]| {
        let said = cluster.kubectl(command).unwrap_or_else(|error| format!("{error:#}\n"));
        format!("\n$ kubectl {}\n{said}", command.join(" "))
    };
    let mut text = String::new();
    for command in [
        &["get", "infd,inc", "-n", namespace, "-o", "yaml"][..],
        &["describe", "pods", "-n", system],
        &["logs", "-n", system, "-l", "app.kubernetes.io/component=operator", "--prefix", "--tail=60"],
        &["describe", "pods", "-n", namespace],
        &["get", "events", "-n", namespace, "--sort-by=.lastTimestamp"],
    ] {
        text += &ask(command);
    }
    for pod in &pods {
        text += &ask(&["logs", "-n", namespace, pod, "-c", "engine", "--previous", "--tail=20"]);
        text += &ask(&["logs", "-n", namespace, pod, "--all-containers", "--prefix", "--tail=40"]);
    }
    text += &ask(&["get", "infd,inc,deploy,pods,endpointslices", "-A", "-o", "wide"]);
    for pod in &pods {
        text +=
            &ask(&["get", "--raw", &format!("/api/v1/namespaces/{namespace}/pods/{pod}:{AGENT_PORT}/proxy/verdict")]);
    }
    text
}

fn names(cluster: &Cluster, namespace: &str) -> Vec<String> {
    let words = ["get", "pods", "-n", namespace, "-o", "jsonpath={.items[*].metadata.name}"];
    cluster.kubectl(&words).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}
