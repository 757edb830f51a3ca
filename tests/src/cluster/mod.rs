//! A real Kubernetes for tests: etcd, API server, controller manager, scheduler and one real node, in a network namespace of its own.
//!
//! [`Cluster::up`] makes it (about 15 s), dropping it takes it away. One cluster of a name runs at a time on a machine (a lock in the
//! cache folder); what a killed run left behind is cleaned by the next. With `TRUEBEAT_CLUSTER=reuse` a cluster that
//! `cluster up` started is used and left running.

mod cgroup;
pub mod command;
mod control_plane;
mod layout;
mod machine;
mod net;
mod node;
mod pki;
mod policies;
mod process;
mod teardown;
pub mod tools;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use kube::config::{KubeConfigOptions, Kubeconfig};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;

pub use layout::{Layout, NODE, NODE_IP, cache_dir};
pub use machine::NotRun;
pub use process::Identity;

/// What differs from one cluster to another.
#[derive(Debug, Clone)]
pub struct Options {
    /// With a real node (else: control plane alone).
    pub node: bool,
    /// The kubelet's `crashLoopBackOff.maxContainerRestartPeriod`, in seconds; `None` leaves the field's 300.
    pub restart_period_max_s: Option<u32>,
    /// Further arguments of the API server.
    pub apiserver_extra: Vec<String>,
    /// Further arguments of the controller manager.
    pub kcm_extra: Vec<String>,
    /// Further arguments of the scheduler.
    pub scheduler_extra: Vec<String>,
    /// The API server keeps an audit log ([`Cluster::audit_log`]).
    pub audit: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node: true,
            restart_period_max_s: None,
            apiserver_extra: Vec::new(),
            kcm_extra: Vec::new(),
            scheduler_extra: Vec::new(),
            audit: false,
        }
    }
}

/// A running cluster; dropping it ends it, unless it was [attached](Cluster::attach) or [left](Cluster::leave).
#[derive(Debug)]
pub struct Cluster {
    layout: Layout,
    bin: PathBuf,
    owned: bool,
    _lock: Option<Flock<File>>,
}

impl Cluster {
    /// Starts cluster `name` from nothing; cleans first what an earlier run of that name left. `Ok(Err(_))`: not on this machine.
    ///
    /// # Errors
    /// When a part does not build, start or become ready; what was started is ended then.
    pub fn up(name: &str, options: &Options) -> Result<Result<Self, NotRun>> {
        let layout = Layout::new(name)?;
        let watch = Stopwatch::new();
        let lock = lock(&layout)?;
        teardown::run(&layout)?;
        if let Err(not_run) = tools::apt_then_check(&layout, options.node) {
            return Ok(Err(not_run));
        }
        let bin = tools::build()?;
        watch.say("programs there");
        for dir in ["pki", "proc", "log", "images", "etcd"] {
            fs::create_dir_all(layout.path(dir)).with_context(|| format!("cannot make {}", layout.text(dir)))?;
        }
        // from here on the value owns what is started: an error below drops it, and that ends everything
        let cluster = Self { layout, bin, owned: true, _lock: Some(lock) };
        cluster.start(options, &watch)?;
        Ok(Ok(cluster))
    }

    /// A cluster that is already up; `None` when its API server does not run.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn attach(name: &str) -> Result<Option<Self>> {
        let layout = Layout::new(name)?;
        let up = process::recorded(&layout, "apiserver")?.is_some_and(Identity::alive);
        if !up {
            return Ok(None);
        }
        Ok(Some(Self { layout, bin: tools::folder()?, owned: false, _lock: None }))
    }

    /// Keeps the cluster running after this value is gone (`cluster up`).
    pub fn leave(mut self) {
        self.owned = false;
    }

    /// Ends a cluster by its name, whoever started it.
    ///
    /// # Errors
    /// Naming what could not be removed.
    pub fn down(name: &str) -> Result<()> {
        teardown::run(&Layout::new(name)?)
    }

    /// What a cluster of this name has on the machine now (logs aside): nothing, once it is down.
    ///
    /// # Errors
    /// When the machine cannot be asked.
    pub fn leftovers(name: &str) -> Result<Vec<String>> {
        teardown::leftovers(&Layout::new(name)?)
    }

    /// Was it started by this value (and does it end with it)?
    pub fn owned(&self) -> bool {
        self.owned
    }

    /// Its names and paths.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Folder of kubectl and the others.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// Where the API server of a cluster with [`Options::audit`] writes down what it was asked ([`crate::audit`]).
    pub fn audit_log(&self) -> PathBuf {
        self.layout.path(control_plane::AUDIT_LOG)
    }

    /// `kubectl` as admin; gives its output.
    ///
    /// # Errors
    /// In kubectl's words.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        kubectl(&self.layout, &self.bin, args, None)
    }

    /// `helm`, as an administrator of this cluster.
    ///
    /// # Errors
    /// In helm's words.
    pub fn helm(&self, args: &[&str]) -> Result<String> {
        let home = self.layout.path("helm");
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.layout.netns_file().display())).arg(self.bin.join("helm"));
        command.arg("--kubeconfig").arg(self.layout.kubeconfig("admin")).args(args);
        for (name, folder) in [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")]
        {
            command.env(name, home.join(folder));
        }
        command::run_with(&mut command, None)
    }

    /// `kubectl apply -f -` of `yaml`.
    ///
    /// # Errors
    /// In kubectl's words.
    pub fn apply(&self, yaml: &str) -> Result<String> {
        kubectl(&self.layout, &self.bin, &["apply", "-f", "-"], Some(yaml))
    }

    /// Puts an OCI archive (see [`crate::images`]) into the node's store.
    ///
    /// # Errors
    /// In `ctr`'s words.
    pub fn import(&self, archive: &Path) -> Result<()> {
        node::import(&self.layout, &self.bin, archive)
    }

    /// Runs `story` on a runtime inside the cluster's network, with an admin client; gives what it gives.
    ///
    /// # Errors
    /// The story's own, or that the network cannot be entered. A panic in the story is passed on.
    pub fn run<T: Send>(&self, story: impl AsyncFnOnce(kube::Client) -> Result<T> + Send) -> Result<T> {
        let body = || -> Result<T> {
            net::enter(&self.layout)?;
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            runtime.block_on(async { story(self.client("admin").await?).await })
        };
        std::thread::scope(|scope| match scope.spawn(body).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// A client of `admin`, `kcm`, `sched` or `node1`. Only usable on a thread inside the network: call it in [`Cluster::run`].
    ///
    /// # Errors
    /// When the kubeconfig cannot be read.
    pub async fn client(&self, user: &str) -> Result<kube::Client> {
        // the first caller installs it; for the others it is there already
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::read_from(self.layout.kubeconfig(user))?;
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(kube::Client::try_from(config)?)
    }

    /// SIGKILLs one of `etcd`, `apiserver`, `kcm`, `sched`, `containerd`, `kubelet`, `kubeproxy`.
    ///
    /// # Errors
    /// When it never ran or does not die.
    pub fn kill(&self, process: &str) -> Result<()> {
        let identity = process::recorded(&self.layout, process)?
            .with_context(|| format!("no process `{process}` in this cluster"))?;
        identity.signal(Signal::SIGKILL);
        if identity.left_nothing_within(std::time::Duration::from_secs(10)) {
            Ok(())
        } else {
            Err(anyhow!("{process} does not die"))
        }
    }

    /// Starts a killed one again, as it was.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_again(&self, process: &str) -> Result<Identity> {
        process::start_again(&self.layout, process)
    }

    /// The process of this name as it was started last; `None`: there was none.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn process(&self, name: &str) -> Result<Option<Identity>> {
        process::recorded(&self.layout, name)
    }

    /// Starts a process of one's own (an operator, say) inside the cluster's network; it ends with [`Identity::end`], or with the story.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, name: &str, argv: Vec<String>) -> Result<Identity> {
        process::start(&self.layout, name, &self.bin, argv)
    }

    /// From now on NetworkPolicies are enforced.
    ///
    /// # Errors
    /// When what enforces them cannot be started.
    pub fn enforce_network_policies(&self) -> Result<Identity> {
        policies::enforce(&self.layout, &self.bin)
    }

    fn start(&self, options: &Options, watch: &Stopwatch) -> Result<()> {
        pki::create(&self.layout)?;
        net::create(&self.layout)?;
        control_plane::start(&self.layout, &self.bin, options, watch)?;
        if options.node { node::start(&self.layout, &self.bin, options, watch) } else { Ok(()) }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let watch = Stopwatch::new();
        match teardown::run(&self.layout) {
            Ok(()) => watch.say("everything torn down"),
            Err(error) => eprintln!("cluster: teardown: {error:#}"),
        }
    }
}

/// Says what was reached after how many seconds.
#[derive(Debug)]
struct Stopwatch(Instant);

impl Stopwatch {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn say(&self, what: &str) {
        eprintln!("cluster: {:6.1} s  {what}", self.0.elapsed().as_secs_f64());
    }
}

fn kubectl(layout: &Layout, bin: &Path, args: &[&str], input: Option<&str>) -> Result<String> {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", layout.netns_file().display())).arg(bin.join("kubectl"));
    command.arg("--kubeconfig").arg(layout.kubeconfig("admin")).arg("--request-timeout=20s").args(args);
    command::run_with(&mut command, input)
}

fn lock(layout: &Layout) -> Result<Flock<File>> {
    let dir = cache_dir()?.join("run");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let path = dir.join(format!("{}.lock", layout.name));
    let mut file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    crate::wait::until("the lock of another run's cluster", std::time::Duration::from_secs(1200), || {
        let attempt = File::try_clone(&file).context("cannot duplicate the lock's descriptor")?;
        match Flock::lock(attempt, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Some(lock)),
            Err((returned, nix::errno::Errno::EWOULDBLOCK)) => {
                file = returned;
                Ok(None)
            }
            Err((_, error)) => Err(crate::wait::GiveUp(format!("cannot lock {}: {error}", path.display())).into()),
        }
    })
}
