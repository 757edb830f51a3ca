//! What goes to the API server and what comes back, against servers of a few lines.

use super::*;

fn wish(progressing: &str, stage: &str) -> Declaration {
    let episode = Episode { id: "e1".into(), stage: stage.into(), ..Episode::default() };
    let text = String::new();
    Declaration {
        progressing: progressing.into(),
        reason: "R".into(),
        message: text,
        health_lies: stage == "Stalled",
        episode: Some(episode),
        unfenced: false,
        left: false,
        drain: None,
    }
}

#[test]
fn a_word_that_ages_is_given_anew_now_and_then_and_no_other_bears_a_time() {
    let mut vouched = Vouched::default();
    let every = u64::try_from(VOUCHED_EVERY.as_millis()).unwrap();
    let mut sent = |ages: bool, ms: u64| {
        let mut conditions = conditions(&wish("True", "Recovered"), &mut Transitions::new(), "t");
        vouched.put(&mut conditions, ages, (ms, format!("at {ms}")));
        assert!(conditions[1]["lastProbeTime"].is_null() && conditions[2]["lastProbeTime"].is_null());
        conditions[0]["lastProbeTime"].as_str().map(str::to_owned)
    };
    assert_eq!(sent(false, 0), None);
    let told = [1, 2, every, every + 1, every + 2].map(|ms| sent(true, ms).unwrap());
    let anew = format!("at {}", every + 1);
    assert_eq!(told, ["at 1", "at 1", "at 1", &anew, &anew], "an equal apply writes nothing");
    assert_eq!(sent(false, every + 3), None, "somebody fences again");
    assert_eq!(sent(true, every + 4), Some(format!("at {}", every + 4)));
}

#[test]
fn a_transition_time_moves_with_the_status_alone() {
    let mut known = Transitions::new();
    let first = conditions(&wish("True", "Suspect"), &mut known, "t1");
    let second = conditions(&wish("True", "Stalled"), &mut known, "t2");
    let third = conditions(&wish("False", "Recovered"), &mut known, "t3");
    let since = |value: &Value| [value[0]["lastTransitionTime"].clone(), value[1]["lastTransitionTime"].clone()];
    assert_eq!([since(&first), since(&second), since(&third)], [["t1", "t1"], ["t1", "t1"], ["t3", "t3"]]);
    assert_eq!((&second[1]["status"], &second[1]["reason"]), (&json!("True"), &json!("Stalled")));
    let lies = |value: &Value| [value[2]["type"].clone(), value[2]["status"].clone(), value[2]["reason"].clone()];
    assert_eq!(lies(&first), ["truebeat.io/health-lie", "False", "NoLieSeen"]);
    assert_eq!(lies(&second), ["truebeat.io/health-lie", "True", "Answers200"]);
    let message = third[1]["message"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Episode>(message).unwrap().id, "e1");
}

#[test]
fn the_body_names_the_uid_and_nothing_but_conditions() {
    let pod = PodIdentity { name: "p".into(), namespace: "n".into(), uid: Some("u".into()) };
    let value = body(&pod, &json!([]));
    assert_eq!(value["metadata"], json!({ "name": "p", "namespace": "n", "uid": "u" }));
    assert_eq!(value["status"], json!({ "conditions": [] }));
}

/// An API that takes one request and answers with `answer`, or never.
async fn api_that_says(answer: Option<&'static str>) -> (Api<Pod>, tokio::task::JoinHandle<String>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut config = Config::new(url.parse().unwrap());
    config.default_retry = false;
    let seen = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut text = String::new();
        while !text.contains("conditions") {
            let mut buffer = [0; 4096];
            let n = stream.read(&mut buffer).await.unwrap();
            text += &String::from_utf8_lossy(&buffer[..n]);
        }
        match answer {
            Some(answer) => stream.write_all(answer.as_bytes()).await.unwrap(),
            None => std::future::pending().await,
        }
        text
    });
    (Api::namespaced(Client::try_from(config).unwrap(), "n"), seen)
}

fn pod() -> PodIdentity {
    PodIdentity { name: "p".into(), namespace: "n".into(), uid: None }
}

#[tokio::test]
async fn the_grant_comes_back_in_the_answer_to_the_apply() {
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n\
        {\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"p\",\"annotations\":{\"truebeat.io/last-serving\":\"true\",\"truebeat.io/restart-grant\":\"e1\",\"truebeat.io/restart-queued\":\"e1@t\"}}}";
    let (api, seen) = api_that_says(Some(answer)).await;
    let conditions = conditions(&wish("False", "Stalled"), &mut Transitions::new(), "t");
    let answer = apply(&api, &pod(), &conditions).await.unwrap();
    let stays = Answer { grant: Some("e1".into()), queued: Some("e1@t".into()), last_serving: true, deleted: false };
    assert_eq!(answer, stays);
    let request = seen.await.unwrap().to_lowercase();
    assert!(request.starts_with("patch /api/v1/namespaces/n/pods/p/status?"), "{request}");
    assert!(request.contains("content-type: application/apply-patch+yaml"), "{request}");
    assert!(request.contains("fieldmanager=truebeat-agent") && request.contains("force=true"), "{request}");
}

#[tokio::test]
async fn the_answer_says_that_the_pod_is_being_deleted() {
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n\
        {\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"p\",\"deletionTimestamp\":\"2026-01-01T00:00:00Z\"}}";
    let (api, _seen) = api_that_says(Some(answer)).await;
    let answer = apply(&api, &pod(), &conditions(&wish("True", "None"), &mut Transitions::new(), "t")).await.unwrap();
    assert_eq!(answer, Answer { deleted: true, ..Answer::default() });
}

/// Whatever the operator's clock says, and however often the same word is read.
#[test]
fn a_place_in_the_queue_is_worth_as_much_as_its_note_is_renewed() {
    let mut note = QueueNote::default();
    let mut queued = |text: &str, now_s: u64| note.queued_now(Some(text.to_owned()), now_s * 1_000);
    let waits = Some("u-7-1".to_owned());
    let years_ago = ["u-7-1@2020-01-01T00:00:00Z", "u-7-1@2020-01-01T00:00:20Z"];
    assert_eq!([9, 30, 68].map(|now_s| queued(years_ago[0], now_s)), [waits.clone(), waits.clone(), waits.clone()]);
    assert_eq!(queued(years_ago[0], 69), None, "it has stood for a minute");
    assert_eq!([70, 129, 130].map(|now_s| queued(years_ago[1], now_s)), [waits.clone(), waits, None]);
    assert_eq!(queued("u-8-1@2099-01-01T00:00:00Z", 131).as_deref(), Some("u-8-1"));
    assert_eq!([queued("no time", 132), queued("", 133)], [None, None]);
    assert_eq!(note.queued_now(None, 134_000), None);
}

#[tokio::test]
async fn a_silent_api_costs_one_deadline_and_a_refusal_is_no_grant() {
    let (api, _seen) = api_that_says(None).await;
    assert!(matches!(apply(&api, &pod(), &json!([])).await, Err(ReportError::Late)));
    let busy = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let (api, _seen) = api_that_says(Some(busy)).await;
    assert!(matches!(apply(&api, &pod(), &json!([])).await, Err(ReportError::Apply { .. })));
}

/// D3: the API server is away. Nothing queues up: when it is back it hears what is true now, and not what was.
#[tokio::test]
async fn d03_an_agent_cut_off_from_the_api_says_only_the_newest_when_it_is_back() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let away = Arc::new(AtomicBool::new(true));
    let cut_off = Arc::clone(&away);
    let connect = move |_: &PodIdentity| {
        if cut_off.load(Ordering::Relaxed) {
            return Err(ReportError::Late);
        }
        let mut config = Config::new(format!("http://{address}").parse().unwrap());
        config.default_retry = false;
        Ok(Api::namespaced(Client::try_from(config).map_err(ReportError::Client)?, "n"))
    };
    let dir = tempfile::tempdir().unwrap();
    let (wish_sender, wishes) = watch::channel(None);
    let (says, mut heard) = watch::channel(Heard::default());
    let book = TransitionBook::in_dir(dir.path()).unwrap();
    let reporter = Reporter { wish: wish_sender, heard: heard.clone(), written: book.file.written().clone() };
    let reporting = tokio::spawn(report(pod(), book, connect, wishes, says));
    reporter.declare(wish("True", "Recovered"));
    heard.wait_for(|heard| heard.failures > 0).await.unwrap();
    for n in 0..1_000 {
        reporter.declare(Declaration { message: format!("wish {n}"), ..wish("False", "Stalled") });
    }
    assert_eq!(reporter.heard().grant, None, "nobody grants anything meanwhile");
    away.store(false, Ordering::Relaxed);
    let back = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut text = String::new();
        while !text.contains("truebeat.io/health-lie") {
            let mut buffer = [0; 4096];
            let n = stream.read(&mut buffer).await.unwrap();
            text += &String::from_utf8_lossy(&buffer[..n]);
        }
        let answer = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"}}"#;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
        stream.write_all(format!("{head}{answer}").as_bytes()).await.unwrap();
        heard.wait_for(|heard| heard.answered_ms.is_some()).await.unwrap();
        text
    };
    let text = tokio::time::timeout(Duration::from_secs(60), back).await.unwrap();
    assert!(text.contains("wish 999") && text.matches("PATCH ").count() == 1, "{text}");
    reporting.abort();
}

#[tokio::test]
async fn transition_times_outlive_a_detector() {
    let (dir, mut known) = (tempfile::tempdir().unwrap(), Transitions::new());
    conditions(&wish("True", "None"), &mut known, "t1");
    let mut book = TransitionBook::in_dir(dir.path()).unwrap();
    book.keep(&known);
    assert!(book.file.written().settled(Duration::from_secs(40)).await);
    assert_eq!(TransitionBook::in_dir(dir.path()).unwrap().recalled().await, known);
}

/// A FIFO that nobody opens holds whoever reads from it or writes to it, as a disk that hangs does, until this is dropped.
struct Hanging(Vec<PathBuf>);

impl Hanging {
    fn at(paths: Vec<PathBuf>) -> Self {
        paths.iter().for_each(|path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap());
        Self(paths)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| drop(std::fs::File::options().read(true).write(true).open(path)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d10_a_disk_that_hangs_holds_no_declaration() {
    let dir = tempfile::tempdir().unwrap();
    let _hanging = Hanging::at(["conditions.json", "conditions.tmp"].map(|name| dir.path().join(name)).into());
    let (wishes, wished) = watch::channel(Some(wish("False", "Stalled")));
    let (says, mut heard) = watch::channel(Heard::default());
    let book = TransitionBook::in_dir(dir.path()).unwrap();
    let reporting = tokio::spawn(report(pod(), book, |_| Err(ReportError::Late), wished, says));
    let called = tokio::time::timeout(Duration::from_secs(40), heard.wait_for(|heard| heard.failures > 0)).await;
    assert!(called.is_ok(), "the API server is never called");
    reporting.abort();
    drop(wishes);
}

/// A detector that starts while nobody answers must not fence the last replica that serves (I3).
#[tokio::test]
async fn what_the_api_said_last_of_who_else_serves_holds_until_it_answers() {
    let dir = tempfile::tempdir().unwrap();
    for last_serving in [true, false] {
        let heard = Reporter::start(pod(), dir.path(), last_serving).unwrap().heard();
        assert_eq!((heard.last_serving, heard.answered_ms), (last_serving, None));
    }
}
