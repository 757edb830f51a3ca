//! Where evidence is looked for, whose it is taken for, and that a hostile list stays data.

use super::*;
use serde_json::json;

fn pod(name: &str, agent_runs: bool, claim: bool) -> Pod {
    let state = if agent_runs { json!({"running": {}}) } else { json!({"terminated": {"exitCode": 137}}) };
    let volume =
        if claim { json!({"persistentVolumeClaim": {"claimName": "evidence"}}) } else { json!({"emptyDir": {}}) };
    let mut bundles = json!({"name": "bundles"});
    bundles.as_object_mut().unwrap().extend(volume.as_object().unwrap().clone());
    let agent = json!({"name": "agent", "state": state, "image": "", "imageID": "", "ready": true, "restartCount": 0});
    serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"containers": [], "volumes": [{"name": "page", "emptyDir": {}}, bundles]},
        "status": {"initContainerStatuses": [agent]},
    }))
    .unwrap()
}

fn of(pod: Option<&str>) -> Wanted {
    Wanted { deployment: "chat".to_owned(), pod: pod.map(str::to_owned), episode: None }
}

fn places(namespace: &str, pods: &[Pod], wanted: &Wanted) -> Vec<Shelf> {
    shelves(namespace, pods, wanted).unwrap().0
}

fn shelved(pod: &str, episode: &str, written_s: u64) -> Shelved {
    let text = str::to_owned;
    Shelved { episode: text(episode), pod: text(pod), class: text("C"), fingerprint: text("f"), bytes: 1, written_s }
}

fn alone(agent: &str) -> Shelf {
    Shelf { agents: vec![agent.to_owned()], is_claim: false }
}

fn kept(agents: &[&str]) -> Shelf {
    Shelf { agents: agents.iter().map(|agent| (*agent).to_owned()).collect(), is_claim: true }
}

#[test]
fn without_a_claim_each_pod_tells_of_itself() {
    let pods = [pod("chat-1", true, false), pod("chat-2", false, false), pod("chat-3", true, false)];
    assert_eq!(places("serving", &pods, &of(Some("chat-3"))), [alone("chat-3")]);
    assert_eq!(places("serving", &pods, &of(None)), [alone("chat-1"), alone("chat-3")]);
    let gone = shelves("serving", &pods, &of(Some("chat-0"))).unwrap_err().to_string();
    assert!(gone.contains("chat-0 is gone") && gone.contains("claimName"), "{gone}");
    let away = shelves("serving", &pods, &of(Some("chat-2"))).unwrap_err().to_string();
    assert!(away.contains("does not run now") && away.contains("do not delete"), "{away}");
    let nobody = shelves("serving", &pods[1..2], &of(None)).unwrap_err().to_string();
    assert!(nobody.contains("no agent of chat runs"), "{nobody}");
}

/// What a sick replica has seen last is in the very pod that cannot be asked.
#[test]
fn who_cannot_be_asked_is_named() {
    let unheard = |pods: &[Pod]| shelves("serving", pods, &of(None)).unwrap().1;
    let away = ["the agent of pod chat-2 does not run now".to_owned()];
    assert_eq!(unheard(&[pod("chat-1", true, false), pod("chat-2", false, false)]), away);
    assert_eq!(unheard(&[pod("chat-1", true, false), pod("chat-2", false, true)]), away);
    assert_eq!(unheard(&[pod("chat-1", true, true), pod("chat-2", false, true)]), [""; 0], "another has its claim");
    let mut evicted = pod("chat-2", false, false);
    evicted.status.as_mut().unwrap().phase = Some("Failed".to_owned());
    assert_eq!(unheard(&[pod("chat-1", true, false), evicted.clone()]), [""; 0], "what it had went with it");
    evicted.spec = pod("chat-2", false, true).spec;
    assert_eq!(unheard(&[pod("chat-1", true, false), evicted]), away, "it lies on its claim");
    let mut young = pod("chat-2", false, false);
    let agents = young.status.as_mut().unwrap().init_container_statuses.as_mut().unwrap();
    agents[0].state = serde_json::from_value(json!({"waiting": {}})).unwrap();
    assert_eq!(unheard(&[pod("chat-1", true, false), young.clone()]), [""; 0], "it has seen nothing yet");
    young.status.as_mut().unwrap().init_container_statuses.as_mut().unwrap()[0].restart_count = 1;
    assert_eq!(unheard(&[pod("chat-1", true, false), young]), away, "its agent is in a back-off");
}

#[test]
fn a_claim_is_told_of_by_whoever_mounts_it_the_writer_first() {
    let pods = [pod("chat-1", false, true), pod("chat-2", true, true), pod("chat-3", true, true)];
    assert_eq!(places("serving", &pods, &of(Some("chat-0"))), [kept(&["chat-2", "chat-3"])]);
    assert_eq!(places("serving", &pods, &of(Some("chat-1"))), [kept(&["chat-2", "chat-3"])]);
    assert_eq!(places("serving", &pods, &of(Some("chat-3"))), [kept(&["chat-3", "chat-2"])]);
    assert_eq!(places("serving", &pods, &of(None)), [kept(&["chat-2", "chat-3"])]);
    let mixed = [pod("chat-1", true, false), pod("chat-2", true, true)];
    assert_eq!(places("serving", &mixed, &of(None)), [alone("chat-1"), kept(&["chat-2"])]);
}

#[test]
fn a_replica_is_known_by_its_name() {
    assert!(is_replica("chat-84c6888cdd-995md", "chat"));
    for other in ["chat-v2-84c6888cdd-995md", "chatty-84c6888cdd-995md", "chat", "chat-995md", "other-1-2"] {
        assert!(!is_replica(other, "chat"), "{other}");
    }
    let long = "c".repeat(48);
    assert!(is_replica(&format!("{long}-84c6888cd995md"), &long));
}

#[test]
fn each_bundle_once_and_none_of_another_deployment() {
    let of_two = [
        ("chat-r-1", "a", 5),
        ("chat-r-1", "b", 9),
        ("chat-v2-r-1", "c", 7),
        ("chat-r-1", "a", 5),
        ("chat-r-2", "d", 1),
    ];
    let found: Vec<_> = of_two.iter().map(|(pod, episode, at)| ("x".to_owned(), shelved(pod, episode, *at))).collect();
    let told = |wanted: &Wanted| -> Vec<String> {
        of_interest(found.clone(), wanted).into_iter().map(|(_, bundle)| bundle.episode).collect()
    };
    assert_eq!(told(&of(None)), ["b", "a", "d"]);
    assert_eq!(told(&of(Some("chat-r-1"))), ["b", "a"]);
    assert_eq!(told(&Wanted { episode: Some("a".to_owned()), ..of(Some("chat-r-1")) }), ["a"]);
    assert_eq!(told(&Wanted { episode: Some("a".to_owned()), ..of(Some("chat-r-2")) }), Vec::<String>::new());
}

#[test]
fn a_list_is_read_as_data() {
    let hostile = Shelved { class: "\u{1b}[2J".to_owned(), ..shelved("chat-1", "a", 1) };
    let line = serde_json::to_string(&hostile).unwrap();
    let told = parse(format!("{line}\n{line}\n").as_bytes()).unwrap();
    assert_eq!((told.len(), told[0].class.as_str()), (2, " [2J"));
    assert!(parse(b"sh: not found\n").is_err());
    assert_eq!(parse(b"").unwrap(), []);
}
