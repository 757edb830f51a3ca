//! `truebeat kubectl maintenance POD`: a person says for how long an engine may be silent on purpose, or that it is over.

use std::time::Duration;

use anyhow::{Context, ensure};
use crds::fence::Fence;
use crds::maintenance::{ANNOTATION_MAINTENANCE, Maintenance};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use serde_json::Value;

use super::word::{Word, pod_of_ours, who, written};

/// Longer is no maintenance: a pod that nobody is to watch for days needs none of this.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// A length of time as people write it, for clap.
///
/// # Errors
/// It is none, or longer than a week.
pub fn span(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text).ok().filter(|span| !span.is_zero() && *span <= LONGEST) {
        Some(span) => Ok(span),
        None => Err("a length of time, a week at most, for example 30m or 2h".to_owned()),
    }
}

/// What is to be written to declare it for so long, or to take it off, and what to say when that is done.
///
/// # Errors
/// No such pod, none of Truebeat's, or none declared that could be over.
pub async fn declare(
    client: &Client,
    namespace: &str,
    name: &str,
    lasts: Option<Duration>,
    reason: &str,
) -> anyhow::Result<(Word, String)> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (pod, _) = pod_of_ours(&pods, namespace, name, "read of it").await?;
    let Some(lasts) = lasts else {
        ensure!(
            pod.annotations().contains_key(ANNOTATION_MAINTENANCE),
            "no maintenance is declared for pod {name}: there is nothing to end"
        );
        let said = format!("pod {name}: maintenance is over, silence counts again once its kubelet has handed that on");
        return Ok((Word::of(&pod, ANNOTATION_MAINTENANCE, Value::Null), said));
    };
    let declared = from(Timestamp::now(), lasts, &who(client).await, reason)?;
    let said = format!("pod {name}: {}; it holds once its kubelet has handed it on, within a minute", declared.words());
    Ok((Word::of(&pod, ANNOTATION_MAINTENANCE, Value::String(serde_json::to_string(&declared)?)), said))
}

fn from(now: Timestamp, lasts: Duration, by: &str, reason: &str) -> anyhow::Result<Maintenance> {
    let until = now.checked_add(lasts).context("it would never end")?;
    Ok(Maintenance { fence: Fence::of(by, &written(now), reason), until: Some(written(until)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_is_a_week_at_most() {
        assert_eq!(span("30m"), Ok(Duration::from_secs(1800)));
        assert_eq!(span("1h 30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(span("7d"), Ok(LONGEST));
        for wrong in ["", "30", "0s", "-1h", "200h", "soon"] {
            assert!(span(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_written_ends_when_it_was_to() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let declared = from(now, Duration::from_secs(1800), "ann", "weights").unwrap();
        let read = Maintenance::read(&serde_json::to_string(&declared).unwrap()).unwrap();
        assert_eq!(read.words(), "maintenance declared by ann until 2026-01-01T00:30:00Z: weights");
    }

    #[tokio::test]
    async fn what_was_never_declared_does_not_end() {
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {crds::LABEL_DEPLOYMENT: "chat"}},
        });
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let body = kube::client::Body::from(pod.to_string().into_bytes());
            async { Ok::<_, std::convert::Infallible>(http::Response::new(body)) }
        });
        let ended = declare(&Client::new(service, "serving"), "serving", "p", None, "").await;
        assert!(ended.unwrap_err().to_string().contains("there is nothing to end"));
    }
}
