//! What all stories share: the cluster, the watches on everything that matters, and words for what they look for.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::{EngineIncident, InferenceDeployment};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::{Api, Client, ResourceExt};
use nix::sys::signal::Signal;
use truebeat_tests::Cluster;
use truebeat_tests::cluster::command;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::film::Film;
use truebeat_tests::host;
use truebeat_tests::load::{Felt, Load, Pages};
use truebeat_tests::product::{self, Programs};
use truebeat_tests::times::Times;

/// Generous: a loaded machine is no failure, silence is.
pub const BOUND: Duration = Duration::from_secs(90);
pub const NAMESPACE: &str = "serving";
const CLIENTS: usize = 4;

/// The shared things.
pub struct World<'a> {
    pub client: Client,
    pub cluster: &'a Cluster,
    pub programs: Programs,
    pub pods: Film<Pod>,
    pub incidents: Film<EngineIncident>,
    pub infds: Film<InferenceDeployment>,
}

impl<'a> World<'a> {
    /// Starts the watch on pods; those on our own kinds begin again with [`World::watch_own_kinds`], once they exist.
    pub fn new(client: Client, cluster: &'a Cluster, programs: Programs) -> Self {
        let pods = Film::watch(Api::namespaced(client.clone(), NAMESPACE));
        let (incidents, infds) = own_kinds(&client);
        Self { client, cluster, programs, pods, incidents, infds }
    }

    pub fn watch_own_kinds(&mut self) {
        (self.incidents, self.infds) = own_kinds(&self.client);
    }

    /// Watches who gets traffic of the Service of this name.
    pub fn endpoints(&self, service: &str) -> Endpoints {
        Endpoints::watch(self.client.clone(), NAMESPACE, service)
    }

    /// Clients of the Service of this name, by its ClusterIP.
    pub async fn load(&self, service: &str) -> Result<Load> {
        Ok(Load::start(self.address(service).await?, "demo", CLIENTS))
    }

    /// Clients whose every lost request is somebody's fault.
    pub async fn patient_load(&self, service: &str) -> Result<Load> {
        Ok(Load::patient(self.address(service).await?, "demo", CLIENTS))
    }

    /// The same clients, each on one connection for as long as it is left open.
    pub async fn keeping_load(&self, service: &str) -> Result<Load> {
        Ok(Load::keeping(self.address(service).await?, "demo", CLIENTS))
    }

    /// Address of the Service of this name.
    pub async fn address(&self, service: &str) -> Result<SocketAddr> {
        let found: Service = Api::namespaced(self.client.clone(), NAMESPACE).get(service).await?;
        let ip = found.spec.and_then(|spec| spec.cluster_ip).context("a Service without a ClusterIP")?;
        Ok(SocketAddr::new(ip.parse()?, 80))
    }

    /// A client of this pod alone, past the Service: work is owed there for certain.
    pub fn load_on(&self, pod: &str) -> Result<Load> {
        Ok(Load::start(self.gate_of(pod)?, "demo", 1))
    }

    /// Where this pod's gate listens.
    pub fn gate_of(&self, pod: &str) -> Result<SocketAddr> {
        let status = self.pod(pod)?.status.clone();
        let ip = status.and_then(|status| status.pod_ip).context("a pod without an address")?;
        Ok(SocketAddr::new(ip.parse()?, 8080))
    }

    /// What these pods deliver, from their pages.
    pub fn pages(&self, pods: &[String]) -> Result<Pages> {
        let folder = |name: &String| Ok((name.clone(), product::volume(self.cluster, &uid(&*self.pod(name)?), "page")));
        Ok(Pages::watch(pods.iter().map(folder).collect::<Result<_>>()?))
    }

    pub fn pod(&self, name: &str) -> Result<Arc<Pod>> {
        self.pods.now().remove(name).with_context(|| format!("no pod {name}"))
    }

    /// SIGUSR2 to the engine of this pod: its next step never ends (`--fault step-stall@sigusr2`).
    pub fn freeze(&self, pod: &str) -> Result<()> {
        let engine = host::root_process(&*self.pod(pod)?, "engine", BOUND)?;
        host::signal(&engine, Signal::SIGUSR2);
        Ok(())
    }

    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.cluster.kubectl(&[&["-n", NAMESPACE], args].concat())
    }

    /// No pod was evicted, as far as the events tell.
    pub fn nobody_is_evicted(&self) -> Result<()> {
        let evicted = self.kubectl(&["get", "events", "--field-selector=reason=Evicted", "-o", "name"])?;
        ensure!(evicted.trim().is_empty(), "evicted: {evicted}");
        Ok(())
    }

    /// kubectl with the plugin of this very build in its PATH, as an administrator; `line` as it is typed in a shell, in a folder of its own.
    pub fn as_typed(&self, line: &str) -> Result<String> {
        let layout = self.cluster.layout();
        let plugins = layout.path("plugins");
        let link = plugins.join("kubectl-truebeat");
        if !link.is_symlink() {
            std::fs::create_dir_all(&plugins)?;
            std::os::unix::fs::symlink(std::fs::canonicalize(&self.programs.truebeat)?, &link)
                .with_context(|| format!("cannot link {}", link.display()))?;
        }
        let path = [plugins.display().to_string(), self.cluster.bin().display().to_string(), std::env::var("PATH")?];
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("kubectl {line} --namespace {NAMESPACE}")]).current_dir(&plugins);
        shell.env("PATH", path.join(":")).env("KUBECONFIG", layout.kubeconfig("admin"));
        command::run_with(&mut shell, None)
    }

    /// Waits for an incident of `pod` that was there at `since` not yet, and that `probe` is content with.
    pub async fn incident<T>(
        &self,
        what: &str,
        pod: &str,
        since: Instant,
        probe: impl Fn(&EngineIncident) -> Option<T>,
    ) -> Result<(Instant, T)> {
        let old = self.incidents_before(since);
        let mine = |inc: &EngineIncident| inc.spec.pod == pod && !old.contains(&inc.name_any());
        self.incidents.first(what, since, BOUND, |inc| if mine(inc) { probe(inc) } else { None }).await
    }

    /// Names of the incidents that had been seen before `since`.
    fn incidents_before(&self, since: Instant) -> BTreeSet<String> {
        self.incidents.frames().into_iter().filter(|frame| frame.at < since).map(|frame| frame.name).collect()
    }

    /// The incidents that appeared at or after `since`, as they are now.
    pub fn incidents_since(&self, since: Instant) -> Vec<Arc<EngineIncident>> {
        let old = self.incidents_before(since);
        self.incidents.now().into_iter().filter(|(name, _)| !old.contains(name)).map(|(_, inc)| inc).collect()
    }

    /// Waits until nothing is open: the whole truth of `infd` is healthy again.
    pub async fn quiet(&self, infd: &str) -> Result<Instant> {
        let healthy = |object: &InferenceDeployment| {
            let status = object.status.as_ref()?;
            let all = object.name_any() == infd
                && status.ready_replicas == object.spec.replicas
                && status.open_incidents == 0
                && status.recovery.grants.is_empty()
                && is(object, "Ready", "True")
                && !is(object, "Reconciling", "True")
                && is(object, "EnginesProgressing", "True");
            all.then_some(())
        };
        truebeat_tests::wait::until_async(&format!("{infd} to be all well"), BOUND, || async {
            Ok(self.infds.now().get(infd).and_then(|object| healthy(object)))
        })
        .await?;
        Ok(Instant::now())
    }
}

fn own_kinds(client: &Client) -> (Film<EngineIncident>, Film<InferenceDeployment>) {
    let incidents = Film::watch(Api::namespaced(client.clone(), NAMESPACE));
    (incidents, Film::watch(Api::namespaced(client.clone(), NAMESPACE)))
}

/// Has the object a condition of this type and status?
pub fn is(object: &InferenceDeployment, type_: &str, status: &str) -> bool {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == type_ && condition.status == status)
}

pub fn uid(pod: &Pod) -> String {
    pod.uid().unwrap_or_default()
}

/// How often container `name` (native sidecars too) was restarted.
pub fn restarts(pod: &Pod, name: &str) -> i32 {
    let status = pod.status.as_ref();
    let lists = status.map(|s| [&s.container_statuses, &s.init_container_statuses]);
    let all = lists.into_iter().flatten().flatten().flatten();
    all.filter(|container| container.name == name).map(|container| container.restart_count).sum()
}

pub fn ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Names of the pods of `infd` that are not on their way out.
pub fn members(pods: &Film<Pod>, infd: &str) -> Vec<String> {
    let mine = |pod: &Pod| {
        pod.labels().get(crds::LABEL_DEPLOYMENT).is_some_and(|name| name == infd)
            && pod.metadata.deletion_timestamp.is_none()
    };
    pods.now().into_iter().filter(|(_, pod)| mine(pod)).map(|(name, _)| name).collect()
}

/// The times that the incident itself tells, against the moment of the freeze.
pub fn by_its_own_clock(incident: &EngineIncident, frozen: std::time::SystemTime) -> Result<String> {
    let status = incident.status.as_ref().context("an incident without a status")?;
    let t = &status.timeline;
    let marks = [
        ("suspect", &t.suspect_at),
        ("fenced", &t.fenced_at),
        ("confirmed", &t.confirmed_at),
        ("evidence", &t.evidence_at),
        ("granted", &t.granted_at),
        ("killed", &t.killed_at),
        ("serving", &t.serving_at),
    ];
    let zero = k8s_openapi::jiff::Timestamp::try_from(frozen)?;
    let mut words = Vec::new();
    for (name, at) in marks {
        let at = at.as_ref().with_context(|| format!("the incident tells no time for `{name}`"))?;
        let at: k8s_openapi::jiff::Timestamp = at.parse()?;
        words.push(format!("{name} {}", at.duration_since(zero).as_millis()));
    }
    Ok(format!("the incident's own times, ms after the freeze: {}", words.join(", ")))
}

/// What the clients felt, as one line.
pub fn told(felt: &Felt) -> String {
    format!(
        "clients: {} answered, {} refused, {} unreachable, {} broken, {} given up; longest try {:.1} s",
        felt.whole,
        felt.refused,
        felt.unreachable,
        felt.broken,
        felt.silent,
        felt.longest.as_secs_f64()
    )
}

/// Waits until two pods get traffic, all is well and clients are answered; gives the pods' names, first who was restarted less: the first is
/// each story's victim, and whoever is it again and again waits twice as long for its container each time.
pub async fn two_serving(world: &World<'_>, endpoints: &Endpoints, load: &Load) -> Result<Vec<String>> {
    let pods = endpoints.count(2, BOUND).await?;
    world.quiet("chat").await?;
    answered(load).await?;
    let counted = pods.into_iter().map(|name| Ok((restarts(&*world.pod(&name)?, "engine"), name)));
    let mut counted = counted.collect::<Result<Vec<_>>>()?;
    counted.sort();
    Ok(counted.into_iter().map(|(_, name)| name).collect())
}

/// Waits until clients have got twenty whole answers from now on.
pub async fn answered(load: &Load) -> Result<()> {
    let since = Instant::now();
    let enough = || async { Ok((load.felt(since).whole >= 20).then_some(())) };
    truebeat_tests::wait::until_async("20 whole answers", BOUND, enough).await
}

/// The pod's engine after a restart: waits for `count` restarts and a running container.
pub async fn restarted(world: &World<'_>, pod: &str, count: i32, since: Instant, times: &mut Times) -> Result<Instant> {
    let what = format!("restart {count} of the engine of {pod}");
    let (at, ()) = world
        .pods
        .first(&what, since, BOUND, |seen| (seen.name_any() == pod && restarts(seen, "engine") == count).then_some(()))
        .await?;
    times.seen(&format!("{pod}: engine container restarted (restartCount {count})"), at);
    Ok(at)
}
