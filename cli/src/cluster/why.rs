//! `truebeat kubectl why NAME`: what NAME stands for, and what the cluster knows of it; it only reads.

use crds::{InferenceDeployment, LABEL_DEPLOYMENT};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};

use super::{Named, incidents_of, lines, members, named, of_gone_pod, tell};
use crate::args::Output;

/// What is known of an incident, a pod, also one that is gone, or an InferenceDeployment.
///
/// # Errors
/// Nothing of that name, or no right to read it.
pub async fn why(client: &Client, namespace: &str, name: &str, output: Output) -> anyhow::Result<String> {
    let Some(named) = named(client, namespace, name).await? else {
        return why_gone(client, namespace, name, output).await;
    };
    match named {
        Named::Incident(incident) => match output {
            Output::Json => lines(&[*incident]),
            Output::Text => {
                let known = known_bad(client, namespace, &incident.spec.deployment).await;
                Ok(tell::incident(&incident) + &known)
            }
        },
        Named::Pod(pod) => {
            let all = incidents_of(client, namespace, |incident| incident.spec.pod == name).await?;
            match output {
                Output::Json => Ok(serde_json::json!({"pod": pod, "incidents": all}).to_string()),
                Output::Text => {
                    let deployment = pod.labels().get(LABEL_DEPLOYMENT).map_or("", String::as_str);
                    let known = known_bad(client, namespace, deployment).await;
                    Ok(tell::pod(&pod, &all, jiff::Timestamp::now()) + &known)
                }
            }
        }
        Named::Deployment(deployment) => {
            let all = incidents_of(client, namespace, |incident| incident.spec.deployment == name).await?;
            let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
            let pods = match pods.list(&members(name)).await {
                Ok(list) => list.items,
                Err(error) => {
                    eprintln!("truebeat: the replicas are left out (may you list pods?): {error}");
                    Vec::new()
                }
            };
            match output {
                Output::Json => {
                    let told = serde_json::json!({"inferenceDeployment": deployment, "pods": pods, "incidents": all});
                    Ok(told.to_string())
                }
                Output::Text => Ok(tell::deployment(&deployment, &pods, &all, jiff::Timestamp::now())),
            }
        }
    }
}

/// Of a pod that is gone its incidents still tell.
async fn why_gone(client: &Client, namespace: &str, name: &str, output: Output) -> anyhow::Result<String> {
    let told = of_gone_pod(client, namespace, name).await?;
    match output {
        Output::Json => Ok(serde_json::json!({"pod": null, "incidents": told}).to_string()),
        Output::Text => {
            let each: Vec<_> = told.iter().map(tell::incident).collect();
            Ok(format!("pod {name} is gone; what its incidents tell, the newest first:\n\n{}", each.join("\n")))
        }
    }
}

/// What upstream knows against the flags of a deployment. It is told beside an answer, which stands without it: where it cannot be read,
/// nothing is said.
async fn known_bad(client: &Client, namespace: &str, deployment: &str) -> String {
    if deployment.is_empty() {
        return String::new();
    }
    let deployments: Api<InferenceDeployment> = Api::namespaced(client.clone(), namespace);
    let found = deployments.get_opt(deployment).await.ok().flatten();
    found.map(|infd| tell::known_bad(&infd)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// An API server that has these incidents and nothing else.
    fn server(incidents: serde_json::Value) -> Client {
        let list = json!({"apiVersion": "inference.truebeat.io/v1alpha1", "kind": "EngineIncidentList", "metadata": {}, "items": incidents});
        let absent = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let lists = request.uri().path().ends_with("/engineincidents");
            let (status, body) = if lists { (200, &list) } else { (404, &absent) };
            let body = kube::client::Body::from(serde_json::to_vec(body).unwrap());
            let answer = http::Response::builder().status(status).body(body).unwrap();
            async { Ok::<_, std::convert::Infallible>(answer) }
        });
        Client::new(service, "serving")
    }

    #[tokio::test]
    async fn of_a_pod_that_is_gone_its_incidents_tell() {
        let incident = json!({
            "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "EngineIncident", "metadata": {"name": "inc-1"},
            "spec": {"deployment": "chat", "pod": "chat-0", "podUid": "u", "class": "StepStalled", "episodeId": "e"},
        });
        let known = server(json!([incident]));
        let text = why(&known, "serving", "chat-0", Output::Text).await.unwrap();
        assert!(text.starts_with("pod chat-0 is gone") && text.contains("StepStalled"), "{text}");
        let json: serde_json::Value =
            serde_json::from_str(&why(&known, "serving", "chat-0", Output::Json).await.unwrap()).unwrap();
        assert_eq!((&json["pod"], json["incidents"].as_array().unwrap().len()), (&serde_json::Value::Null, 1));
        let error = why(&known, "serving", "chat-1", Output::Text).await.unwrap_err().to_string();
        assert!(error.contains("no incident tells of such a pod"), "{error}");
    }
}
