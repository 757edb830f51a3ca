//! Objects for the tests of the pure stages.

use crds::{
    InferenceDeployment,
    episode::{CLASS_UNKILLABLE, Episode},
    recovery::Recovery,
    recovery_note::RecoveryNote,
    xid::{Xid, XidRemedy},
};
use serde_json::{Value, json};

use super::{
    build::build,
    observed::{EpisodeView, Observed, PodView, ReportedEpisode},
};

/// The pod template that is built of `infd`.
pub fn template(infd: &InferenceDeployment) -> Value {
    build(infd).pop().expect("a Deployment comes last").body["spec"]["template"].take()
}

/// Two replicas of our engine with a model in its image.
pub fn infd(name: &str) -> InferenceDeployment {
    serde_json::from_value(json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "serving", "uid": "uid-infd", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "replicas": 2,
            "model": {"source": {"file": {"path": "/models/tiny"}}},
            "engine": {"kind": "Truebeat", "image": "engine:1", "imagePullPolicy": "Never", "args": ["--lie"]},
            "agent": {"image": "agent:1", "imagePullPolicy": "Never"},
        },
    }))
    .expect("the test's object has the right shape")
}

/// A foreign engine with a GPU and a model in a claim.
pub fn infd_vllm(name: &str) -> InferenceDeployment {
    let mut object = serde_json::to_value(infd(name)).expect("JSON");
    object["spec"]["model"] = json!({"source": {"pvc": {"claimName": "models", "path": "llama"}}});
    object["spec"]["engine"] = json!({
        "kind": "VLLM", "image": "vllm:1", "command": ["vllm", "serve"],
        "args": ["$(TRUEBEAT_MODEL_PATH)", "--port=$(TRUEBEAT_ENGINE_PORT)"],
        "env": [
            {"name": "HOME", "value": "/tmp/home"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        ],
        "resources": {"limits": {"nvidia.com/gpu": "1"}}, "port": 8001,
    });
    serde_json::from_value(object).expect("the test's object has the right shape")
}

/// A look that found these pods and nothing else.
pub fn looked(infd: InferenceDeployment, pods: Vec<PodView>) -> Observed {
    let (children, incidents, nodes, doubted, going, unread) = Default::default();
    Observed { infd, children, pods, incidents, nodes, doubted, going, unread }
}

/// A pod whose agent reports an episode `e-NAME` at `stage`, suspected at second `suspect_s`.
pub fn pod(name: &str, stage: &str, suspect_s: u8) -> PodView {
    let at = format!("2026-01-01T00:00:{suspect_s:02}Z");
    let episode = Episode {
        id: format!("e-{name}"),
        class: "StepStalled".to_owned(),
        stage: stage.to_owned(),
        reasons: vec!["4 requests owed, no token for 3.0 s".to_owned()],
        suspect_at: Some(at.clone()),
        fenced_at: Some(at.clone()),
        serving_at: (stage == "Recovered").then(|| "2026-01-01T00:01:00Z".to_owned()),
        ..Episode::default()
    };
    let open = !episode.closed();
    PodView {
        recovery: Some(RecoveryNote::of(&Recovery::default()).text()),
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        node: "n1".to_owned(),
        ready: !open,
        progressing: Some(!open),
        episode: EpisodeView::Known(Box::new(ReportedEpisode { episode, open, changed_at: Some(at) })),
        ..PodView::default()
    }
}

/// The same pod with a Xid of its GPU in its episode.
pub fn with_xid(mut pod: PodView, code: i32, remedy: XidRemedy) -> PodView {
    if let EpisodeView::Known(reported) = &mut pod.episode {
        reported.episode.xids = vec![Xid { code, gpu: "GPU-1".to_owned(), remedy }];
    }
    pod
}

/// The same pod, whose engine died by itself and is started again.
pub fn died(mut pod: PodView) -> PodView {
    if let EpisodeView::Known(reported) = &mut pod.episode {
        reported.episode.class = "Dead".to_owned();
        reported.episode.stage = "Restarting".to_owned();
    }
    pod
}

/// The same pod, whose engine outlives its kill.
pub fn undead(mut pod: PodView) -> PodView {
    if let EpisodeView::Known(reported) = &mut pod.episode {
        CLASS_UNKILLABLE.clone_into(&mut reported.episode.class);
    }
    pod
}

/// Says who granted the restart that the pod's episode tells of.
pub fn granted_by(pod: &mut PodView, who: &str) {
    if let EpisodeView::Known(reported) = &mut pod.episode {
        reported.episode.granted_by = Some(who.to_owned());
    }
}

/// The same pod, on its way out, whose grace ends at `grace_until`.
pub fn leaving(pod: PodView, grace_until: &str) -> PodView {
    PodView { leaving: true, ready: false, grace_until: Some(grace_until.to_owned()), ..pod }
}

/// A pod that serves and has nothing to report.
pub fn healthy(name: &str) -> PodView {
    PodView { ready: true, progressing: Some(true), episode: EpisodeView::None, ..pod(name, "Recovered", 0) }
}
