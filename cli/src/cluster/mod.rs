//! `truebeat kubectl …`, also as `kubectl truebeat …` (a link to this program named `kubectl-truebeat`): the on-call's questions to a
//! cluster, which only read (what they print is made by the pure `tell`), the evidence in its pods, and a person's fence, maintenance and
//! restart, which write an annotation each.

mod evidence;
mod exec;
#[cfg(test)]
mod fake_api;
mod fence;
mod kubeconfig;
mod maintenance;
mod pods;
mod proxy;
mod replicas;
mod restart;
mod tell;
mod why;
mod word;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use crds::{EngineIncident, InferenceDeployment, LABEL_DEPLOYMENT};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::config::{Config, KubeConfigOptions, KubeconfigError};
use kube::{Api, Client, ResourceExt};
use tokio::time::timeout;

use crate::args::{BundleArgs, Output};
use crate::bundle::printable;

/// An API server that takes longer is not there for an on-call.
const DEADLINE: Duration = Duration::from_secs(15);
/// More incidents than this are not looked through.
const INCIDENTS_MAX: usize = 50_000;
/// So many come with one answer.
const PAGE_LEN: u32 = 500;

#[derive(Debug, Args)]
pub struct ClusterArgs {
    #[command(subcommand)]
    question: Question,
    /// Namespace; the kubeconfig's own by default.
    #[arg(short, long, global = true)]
    namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true)]
    context: Option<String>,
    #[arg(short, long, value_enum, global = true, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Debug, Subcommand)]
enum Question {
    #[command(flatten)]
    Ask(Ask),
    /// The evidence bundles of what is named, newest first. Asks the agents in the pods, so it needs the right to exec into them.
    Bundles {
        #[arg(value_name = "INCIDENT|POD|INFERENCEDEPLOYMENT")]
        name: String,
    },
    /// Fetches an incident's evidence bundle, or the newest of a pod or an InferenceDeployment, and shows it as `truebeat bundle` does.
    Bundle {
        #[arg(value_name = "INCIDENT|POD|INFERENCEDEPLOYMENT")]
        name: String,
        /// The episode that it is about, where the newest is not meant.
        #[arg(long)]
        episode: Option<String>,
        /// Where to. Default: EPISODE.tar.zst, here.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// Print one entry whole (by its name in the list).
        #[arg(long, value_name = "NAME")]
        show: Option<String>,
    },
    /// Takes a replica out of traffic until `unfence`: its gate refuses new requests, running ones go on, nothing is restarted.
    Fence {
        pod: String,
        /// Why, for clients and for the incident's record.
        #[arg(long, default_value = "")]
        reason: String,
        /// Even if no other replica serves.
        #[arg(long)]
        even_if_last: bool,
    },
    /// Takes a person's fence off again.
    Unfence { pod: String },
    /// Has a stalled replica restarted now, although restarts are held or have to wait for a pause. Within the budgets; evidence is saved first.
    Restart {
        pod: String,
        /// Why, for the event.
        #[arg(long, default_value = "")]
        reason: String,
        /// Even if no other replica serves.
        #[arg(long)]
        even_if_last: bool,
    },
    /// Declares that an engine may be silent on purpose: no silence counts until then. Traffic goes on (see `fence`).
    Maintenance {
        pod: String,
        /// For how long: 30m, 2h.
        #[arg(long = "for", value_name = "DURATION", required_unless_present = "end", conflicts_with = "end", value_parser = maintenance::span)]
        lasts: Option<Duration>,
        /// Why, for whoever finds it.
        #[arg(long, default_value = "")]
        reason: String,
        /// It is over now.
        #[arg(long)]
        end: bool,
    },
}

/// What only reads.
#[derive(Debug, Subcommand)]
enum Ask {
    /// Why is this pod fenced, or was it restarted? Takes the name of an incident, a pod or an InferenceDeployment.
    Why {
        #[arg(value_name = "INCIDENT|POD|INFERENCEDEPLOYMENT")]
        name: String,
    },
    /// The incidents, newest first; open ones on top.
    Incidents {
        /// Of all namespaces.
        #[arg(short = 'A', long)]
        all_namespaces: bool,
        /// Only those that are not closed.
        #[arg(long)]
        open: bool,
    },
}

/// Answers one question, or carries out one wish.
///
/// # Errors
/// No kubeconfig, no API server, no right to read, nothing of that name, or a wish that is refused.
pub async fn run(args: ClusterArgs) -> anyhow::Result<ExitCode> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
    // once: it may come by a pipe
    let kubeconfig = kubeconfig::read().map_err(unread)?;
    let named = proxy::named(&kubeconfig, args.context.as_deref());
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(unread)?;
    config.connect_timeout = Some(DEADLINE);
    let namespace = args.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
    config.proxy_url = proxy::of(named.as_deref(), &config.cluster_url, |name| std::env::var(name).ok())?;
    let server = config.cluster_url.clone();
    let client = Client::try_from(config).context("could not make a client of the kubeconfig")?;
    let late = || format!("{server} did not answer within {} s", DEADLINE.as_secs());
    let (pod, fence, even_if_last) = match &args.question {
        Question::Ask(ask) => {
            let answer = answer(&client, &namespace, ask, args.output);
            let answer = timeout(DEADLINE, answer).await.with_context(late)??;
            if !answer.is_empty() {
                println!("{}", printable(answer.trim_end()));
            }
            return Ok(ExitCode::SUCCESS);
        }
        Question::Bundles { name } => return bundles(&client, &namespace, name, args.output).await,
        Question::Bundle { name, episode, to, show } => {
            let mut wanted =
                timeout(DEADLINE, evidence::wanted(&client, &namespace, name)).await.with_context(late)??;
            wanted.episode = episode.clone().or(wanted.episode);
            let (file, found) = evidence::fetch(&client, &namespace, &wanted, to.as_deref()).await?;
            eprintln!("truebeat: {} ({} bytes, of pod {})", file.display(), found.bytes, found.pod);
            return crate::bundle::run(&BundleArgs { file, show: show.clone(), output: args.output });
        }
        Question::Fence { pod, reason, even_if_last } => (pod, Some(reason.clone()), *even_if_last),
        Question::Unfence { pod } => (pod, None, false),
        Question::Restart { pod, reason, even_if_last } => {
            let (reason, even_if_last) = (reason.clone(), *even_if_last);
            let wish = restart::Wish { pod: pod.clone(), reason, even_if_last };
            let (asked, word) =
                timeout(DEADLINE, restart::ask(&client, &namespace, &wish)).await.with_context(late)??;
            word.write(&client, &namespace).await?;
            told(args.output, pod, &restart::wait(&client, &namespace, pod, &asked).await?);
            return Ok(ExitCode::SUCCESS);
        }
        Question::Maintenance { pod, lasts, reason, .. } => {
            let declared = maintenance::declare(&client, &namespace, pod, *lasts, reason);
            let (word, said) = timeout(DEADLINE, declared).await.with_context(late)??;
            word.write(&client, &namespace).await?;
            told(args.output, pod, &said);
            return Ok(ExitCode::SUCCESS);
        }
    };
    let wish = fence::Wish { pod: pod.clone(), fence, even_if_last };
    if let Some(asked) = timeout(DEADLINE, fence::ask(&client, &namespace, &wish)).await.with_context(late)?? {
        asked.word.write(&client, &namespace).await?;
        fence::confirm(&client, &namespace, &wish, &asked).await?;
    }
    told(args.output, pod, &fence::wait(&client, &namespace, &wish).await?);
    Ok(ExitCode::SUCCESS)
}

/// What came of a wish about a pod.
fn told(output: Output, pod: &str, words: &str) {
    match output {
        Output::Json => println!("{}", serde_json::json!({"pod": pod, "said": words})),
        Output::Text => println!("{words}"),
    }
}

fn unread(error: KubeconfigError) -> anyhow::Error {
    let words = match &error {
        KubeconfigError::ParseNoProxy(_) => {
            "could not read NO_PROXY: it is a list of names, addresses and ranges between commas, with none empty"
        }
        KubeconfigError::ParseProxyUrl(_) => {
            "could not read the proxy (`proxy-url` of the kubeconfig, or HTTPS_PROXY): it is an address such as http://proxy:3128"
        }
        _ => "could not read the kubeconfig (KUBECONFIG or ~/.kube/config); --context names another of its contexts",
    };
    anyhow::Error::new(error).context(words)
}

async fn bundles(client: &Client, namespace: &str, name: &str, output: Output) -> anyhow::Result<ExitCode> {
    let wanted = timeout(DEADLINE, evidence::wanted(client, namespace, name)).await;
    let wanted = wanted.context("the API server does not answer in time")??;
    let evidence::Found { bundles, unheard } = evidence::list(client, namespace, &wanted).await?;
    let found: Vec<_> = bundles.into_iter().map(|(_, bundle)| bundle).collect();
    match output {
        Output::Json => {
            for bundle in &found {
                println!("{}", serde_json::to_string(bundle)?);
            }
        }
        Output::Text => print!("{}", printable(&tell::bundles(&found, jiff::Timestamp::now()))),
    }
    // (those are not all: whoever counts them shall know)
    unheard.iter().for_each(|why| eprintln!("truebeat: there may be more: {}", printable(why)));
    Ok(if unheard.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn answer(client: &Client, namespace: &str, ask: &Ask, output: Output) -> anyhow::Result<String> {
    match ask {
        Ask::Why { name } => why::why(client, namespace, name, output).await,
        Ask::Incidents { all_namespaces, open } => {
            let api =
                if *all_namespaces { Api::all(client.clone()) } else { Api::namespaced(client.clone(), namespace) };
            let mut incidents = list(&api).await?;
            incidents.retain(|incident| !open || tell::is_open(incident));
            tell::sort(&mut incidents);
            match output {
                Output::Json => lines(&incidents),
                Output::Text if incidents.is_empty() => {
                    Ok(tell::no_incidents((!all_namespaces).then_some(namespace), *open))
                }
                Output::Text => Ok(tell::table(&incidents, *all_namespaces, jiff::Timestamp::now())),
            }
        }
    }
}

/// What a name may stand for.
enum Named {
    Incident(Box<EngineIncident>),
    Pod(Box<Pod>),
    Deployment(Box<InferenceDeployment>),
}

async fn named(client: &Client, namespace: &str, name: &str) -> anyhow::Result<Option<Named>> {
    let incidents: Api<EngineIncident> = Api::namespaced(client.clone(), namespace);
    if let Some(incident) = incidents.get_opt(name).await.with_context(|| cannot("incident", namespace, name))? {
        return Ok(Some(Named::Incident(Box::new(incident))));
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    if let Some(pod) = pods.get_opt(name).await.with_context(|| cannot("pod", namespace, name))? {
        return Ok(Some(Named::Pod(Box::new(pod))));
    }
    let deployments: Api<InferenceDeployment> = Api::namespaced(client.clone(), namespace);
    let deployment = deployments.get_opt(name).await.with_context(|| cannot("InferenceDeployment", namespace, name))?;
    Ok(deployment.map(|deployment| Named::Deployment(Box::new(deployment))))
}

/// The incidents that are `wanted`, as they are shown.
async fn incidents_of(
    client: &Client,
    namespace: &str,
    wanted: impl Fn(&EngineIncident) -> bool,
) -> anyhow::Result<Vec<EngineIncident>> {
    let mut all = list(&Api::namespaced(client.clone(), namespace)).await?;
    all.retain(wanted);
    tell::sort(&mut all);
    Ok(all)
}

/// What is known of a name that nothing bears any more: the incidents of a pod that was called so, one at least.
async fn of_gone_pod(client: &Client, namespace: &str, name: &str) -> anyhow::Result<Vec<EngineIncident>> {
    let told = incidents_of(client, namespace, |incident| incident.spec.pod == name).await?;
    anyhow::ensure!(
        !told.is_empty(),
        "no incident, pod or InferenceDeployment is named {name} in namespace {namespace}, and no incident tells of such a pod; \
         `truebeat kubectl incidents -A` lists the incidents"
    );
    Ok(told)
}

/// The pods of an InferenceDeployment.
fn members(deployment: &str) -> ListParams {
    ListParams::default().labels(&format!("{LABEL_DEPLOYMENT}={deployment}"))
}

fn cannot(kind: &str, namespace: &str, name: &str) -> String {
    format!("could not read the {kind} {namespace}/{name} (may you read it, and are Truebeat's CRDs installed?)")
}

/// All incidents, page by page: what is asked for is chosen of all of them.
async fn list(api: &Api<EngineIncident>) -> anyhow::Result<Vec<EngineIncident>> {
    let (mut all, mut page) = (Vec::new(), ListParams::default().limit(PAGE_LEN));
    loop {
        let list = api.list(&page).await;
        let list =
            list.context("could not list the incidents (may you read them, and are Truebeat's CRDs installed?)")?;
        all.extend(list.items);
        match list.metadata.continue_.filter(|more| !more.is_empty()) {
            Some(more) if all.len() < INCIDENTS_MAX => page = page.continue_token(&more),
            Some(_) => {
                eprintln!("truebeat: there are more than {INCIDENTS_MAX} incidents; these are the first by name");
                return Ok(all);
            }
            None => return Ok(all),
        }
    }
}

fn lines<K: serde::Serialize + ResourceExt>(objects: &[K]) -> anyhow::Result<String> {
    let lines: Result<Vec<_>, _> = objects.iter().map(serde_json::to_string).collect();
    Ok(lines?.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn incidents_beyond_the_first_page_are_read_as_well() {
        let service = tower::service_fn(|request: http::Request<kube::client::Body>| async move {
            let query = request.uri().query().unwrap_or_default();
            let (name, more) = match query {
                query if query.contains("continue=second") => ("b", ""),
                _ => ("a", "second"),
            };
            let spec = serde_json::json!({"deployment": "chat", "pod": name, "podUid": name, "class": "StepStalled", "episodeId": name});
            let body = serde_json::json!({
                "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "EngineIncidentList", "metadata": {"continue": more},
                "items": [{
                    "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "EngineIncident", "metadata": {"name": name}, "spec": spec,
                }],
            });
            Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                body.to_string().into_bytes(),
            )))
        });
        let all = list(&Api::all(Client::new(service, "serving"))).await.unwrap();
        assert_eq!(all.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["a", "b"]);
    }
}
