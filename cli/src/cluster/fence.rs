//! `truebeat kubectl fence|unfence POD`: a person takes a replica out of traffic and puts it back. It writes one annotation
//! on the pod and waits until the pod shows it; the agent shuts the gate, and nothing is restarted for it (I1).

use std::time::Duration;

use anyhow::{Context, bail};
use crds::episode::CONDITION_PROGRESSING;
use crds::fence::{ANNOTATION_FENCE, FENCED_BY_PERSON, Fence};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::pods::{condition, is_last, is_ready};
use super::word::{annotate, pod_of_ours, who, written};

/// The kubelet hands the annotation on within a minute at worst, seconds as a rule.
const SEEN_MAX: Duration = Duration::from_secs(90);
pub const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A look that takes longer has met an API server, or a connection to it, that is gone: the next one may find another.
pub const LOOK_MAX: Duration = Duration::from_secs(10);

/// What a person wants.
#[derive(Debug, Clone)]
pub struct Wish {
    pub pod: String,
    /// `Some`: fence, with the reason in words; `None`: unfence.
    pub fence: Option<String>,
    /// Even where nobody else serves.
    pub even_if_last: bool,
}

/// Writes the annotation.
///
/// # Errors
/// No such pod, none of Truebeat's, the last one that serves, or no right to patch pods.
pub async fn write(client: &Client, namespace: &str, wish: &Wish) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let name = &wish.pod;
    let (pod, deployment) = pod_of_ours(&pods, namespace, name, "fence it").await?;
    let fence = match &wish.fence {
        None => Value::Null,
        Some(why) => {
            let all = pods.list(&super::members(&deployment)).await.context("could not list the deployment's pods")?;
            if is_last(&pod, &all.items) && !wish.even_if_last {
                bail!(
                    "{name} is the last replica of {deployment} that serves: its clients would have nobody (I3); --even-if-last fences it all the same"
                );
            }
            let fence = Fence::of(&who(client).await, &written(jiff::Timestamp::now()), why);
            Value::String(serde_json::to_string(&fence)?)
        }
    };
    annotate(&pods, &pod, ANNOTATION_FENCE, fence).await
}

/// Waits until the pod shows it: out of traffic by the agent's word that a person wants it so, or in it again. Says so, with the time it took.
/// Readiness alone says too little: a replica that is out of traffic for a reason of its own may be back before the kubelet has handed the
/// annotation on.
///
/// # Errors
/// It does not show within a minute and a half; the wish stands all the same.
pub async fn wait(client: &Client, namespace: &str, wish: &Wish) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (name, since) = (&wish.pod, Instant::now());
    let wanted = wish.fence.is_none();
    let (mut heard, mut out, mut gone) = (false, false, false);
    let shows = async {
        loop {
            let pod = timeout(LOOK_MAX, pods.get_opt(name)).await.ok().and_then(Result::ok);
            heard = pod.is_some();
            gone = matches!(pod, Some(None));
            if gone {
                return;
            }
            if let Some(pod) = pod.flatten() {
                out = !is_ready(&pod);
                if out != wanted && says_by_person(&pod) != wanted {
                    return;
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let seen = timeout(SEEN_MAX, shows).await.is_ok();
    let (written, after) = (if wanted { "the fence is off" } else { "the fence is written" }, SEEN_MAX.as_secs());
    match (seen, wanted) {
        (_, true) if gone => bail!("pod {name} is gone meanwhile: there is no fence to take off"),
        (_, false) if gone => Ok(format!("pod {name} is gone meanwhile: it takes no requests")),
        (true, true) => Ok(format!("pod {name} is Ready again after {:.1} s", since.elapsed().as_secs_f64())),
        (true, false) => Ok(format!("pod {name} takes no new requests after {:.1} s", since.elapsed().as_secs_f64())),
        (false, _) if !heard => bail!(
            "{written}, but the API server has not said within {after} s whether pod {name} shows it; look again with \
             `kubectl get pod {name} -n {namespace}`"
        ),
        (false, false) if out => bail!(
            "{written}, and pod {name} takes no requests, but its agent has not said within {after} s that it has read the fence: \
             `truebeat kubectl why {name} -n {namespace}`"
        ),
        (false, true) if !out => bail!(
            "{written}, and pod {name} is Ready, but its agent has not said within {after} s that it has read so: \
             `truebeat kubectl why {name} -n {namespace}`"
        ),
        (false, true) => bail!(
            "{written}, but pod {name} is not Ready after {after} s: `truebeat kubectl why {name} -n {namespace}`"
        ),
        (false, false) => bail!("{written}, but pod {name} is still Ready after {after} s: is its agent new enough?"),
    }
}

/// Does its agent say that a person keeps it out of traffic?
fn says_by_person(pod: &Pod) -> bool {
    condition(pod, CONDITION_PROGRESSING).is_some_and(|c| c.reason.as_deref() == Some(FENCED_BY_PERSON))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, ready: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": name},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_goes_silent_holds_nobody_for_ever() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // takes connections and says nothing
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::try_from(kube::Config::new(server.parse().unwrap())).unwrap();
        for (fence, word) in [(Some("a look".to_owned()), "the fence is written"), (None, "the fence is off")] {
            let wish = Wish { pod: "p".to_owned(), fence, even_if_last: false };
            let told = timeout(SEEN_MAX * 2, wait(&client, "serving", &wish)).await.expect("it waits for ever");
            let told = told.unwrap_err().to_string();
            assert!(told.starts_with(word) && told.contains("kubectl get pod p"), "{told}");
        }
    }

    /// An API server that shows the same pod always.
    fn shows(pod: &Pod) -> Client {
        let body = serde_json::to_vec(pod).unwrap();
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let answer = http::Response::new(kube::client::Body::from(body.clone()));
            async { Ok::<_, std::convert::Infallible>(answer) }
        });
        Client::new(service, "serving")
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_is_gone_is_not_waited_for() {
        let absent = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).to_string();
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let body = kube::client::Body::from(absent.clone().into_bytes());
            let answer = http::Response::builder().status(404).body(body).unwrap();
            async { Ok::<_, std::convert::Infallible>(answer) }
        });
        let client = Client::new(service, "serving");
        let wish = |fence| Wish { pod: "p".to_owned(), fence, even_if_last: false };
        let began = Instant::now();
        let fenced = wait(&client, "serving", &wish(Some("a look".to_owned()))).await.unwrap();
        let error = wait(&client, "serving", &wish(None)).await.unwrap_err().to_string();
        assert!(fenced.contains("gone meanwhile") && error.contains("gone meanwhile"), "{fenced} {error}");
        assert!(began.elapsed() < LOOK_EVERY);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_is_out_of_traffic_for_a_reason_of_its_own_is_not_yet_fenced() {
        let pod = |ready: &str, reason: &str| -> Pod {
            let word = json!({"type": CONDITION_PROGRESSING, "status": "False", "reason": reason});
            serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "uid": "p"},
                "status": {"conditions": [{"type": "Ready", "status": ready}, word]},
            }))
            .unwrap()
        };
        let fence = || Some("a look".to_owned());
        for (fence, pod, word) in [
            (fence(), pod("False", "StepStalled"), Err("has read the fence")),
            (fence(), pod("True", FENCED_BY_PERSON), Err("still Ready")),
            (fence(), pod("False", FENCED_BY_PERSON), Ok("takes no new requests")),
            (None, pod("True", FENCED_BY_PERSON), Err("is Ready, but its agent has not said")),
            (None, pod("False", "StepStalled"), Err("not Ready after")),
            (None, pod("True", "Progressing"), Ok("Ready again")),
        ] {
            let wish = Wish { pod: "p".to_owned(), fence, even_if_last: false };
            let told = wait(&shows(&pod), "serving", &wish).await.map_err(|error| error.to_string());
            let fits = match (&told, word) {
                (Ok(told), Ok(word)) | (Err(told), Err(word)) => told.contains(word),
                _ => false,
            };
            assert!(fits, "{told:?} {word:?}");
        }
    }

    #[test]
    fn the_last_one_that_serves_is_recognised() {
        let (a, b, sick) = (pod("a", "True"), pod("b", "True"), pod("s", "False"));
        assert!(!is_last(&a, &[a.clone(), b.clone()]));
        assert!(is_last(&a, &[a.clone(), sick.clone()]));
        assert!(!is_last(&sick, &[a.clone(), sick.clone()]), "it does not serve");
        let mut leaving = b;
        leaving.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        assert!(is_last(&a, &[a.clone(), leaving]), "one on its way out does not count");
    }
}
