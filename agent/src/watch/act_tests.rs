//! Who is killed and who is spared, what a kill waits for, and what it leaves to be read where the detector that took the evidence is gone.

use std::os::unix::process::ExitStatusExt;

use clap::Parser;
use nix::sys::stat::Mode;

use super::*;
use crate::options::WatchArgs;

const SOON: Duration = Duration::from_secs(30);

#[derive(Parser)]
struct Words {
    #[command(flatten)]
    watch: WatchArgs,
}

/// A book whose episode has its evidence and its grant, as a restarted detector finds it.
fn book() -> Incidents {
    let episode = serde_json::json!({
        "id": "host-7-9-1", "class": "StepStalled", "stage": "Granted", "reasons": ["step 9 for\n2400 ms"],
        "evidenceAt": "t", "grantedAt": "t", "bundle": "/b/e.tar.zst", "fingerprint": "f00",
    });
    serde_json::from_value(serde_json::json!({ "list": [episode] })).unwrap()
}

#[tokio::test]
async fn a_restarted_detector_tells_of_the_evidence_by_what_is_in_the_book() {
    let dir = tempfile::tempdir().unwrap();
    let message = dir.path().join("message");
    std::fs::write(&message, "").unwrap();
    let words = ["detect".into(), "--termination-message-path".into(), message.clone().into_os_string()];
    let config = Words::try_parse_from(words).unwrap().watch.into_config(dir.path().to_owned()).unwrap();
    let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
    let engine = EngineProcess::of(child.id().unwrap().cast_signed()).unwrap();
    let scene = Scene {
        now_ms: 5_000,
        outcome: &Outcome::default(),
        observation: None,
        engine: Some(&engine),
        in_flight: 0,
        config: &config,
        program: Program::default(),
        is_guess: false,
    };
    Acts::new(book(), Killed::default()).kill(&scene);
    let ended = tokio::time::timeout(SOON, child.wait()).await.expect("it is killed").unwrap();
    assert_eq!(ended.signal(), Some(Signal::SIGKILL as i32));
    let told = std::fs::read_to_string(&message).unwrap();
    let want =
        "truebeat: StepStalled, episode host-7-9-1\n  step 9 for 2400 ms\nbundle: /b/e.tar.zst\nfingerprint: f00\n";
    assert_eq!(told, want);
}

fn job(engine: EngineProcess) -> Job {
    let (episode, summary) = ("a".to_owned(), String::new());
    Job { engine, episode, lost: 0, summary, doubt: None, never_served: false, reachable }
}

/// The engine's image is on its way, and a sidecar is the oldest of the pod.
#[test]
fn a_guess_that_names_another_directory_and_never_served_is_no_engine() {
    let process = |pid| EngineProcess { pid, start_ticks: 1 };
    let found = |pid, named, hides| Found { process: process(pid), named, hides };
    for (never_served, found, spared) in [
        (true, found(7, false, false), true),
        (false, found(7, false, false), false),
        (true, found(7, false, true), false),
        (true, found(7, true, false), false),
        (false, found(8, true, false), true),
    ] {
        let job = Job { never_served, ..job(process(7)) };
        assert_eq!(job.is_no_engine(&found), spared, "{never_served} {found:?}");
    }
}

/// A sidecar of another user, whose environment and whose signals are its own affair.
#[tokio::test]
async fn who_may_be_a_sidecar_and_cannot_be_signalled_is_spared() {
    let process = |pid| EngineProcess { pid, start_ticks: 1 };
    type Reachable = fn(&EngineProcess) -> (Vec<EngineProcess>, Vec<i32>);
    let refused: Reachable = |root| (vec![root.clone()], Vec::new());
    let reached: Reachable = |root| (vec![root.clone()], vec![root.pid]);
    let ended: Reachable = |_| (Vec::new(), Vec::new());
    for (never_served, doubt, reachable, spared) in [
        (true, true, refused, true),
        (false, true, refused, false),
        (true, false, refused, false),
        (true, true, reached, false),
        (true, true, ended, false),
    ] {
        let doubt = doubt.then(PathBuf::new);
        let job = Job { doubt, never_served, reachable, ..job(process(7)) };
        assert_eq!(job.is_out_of_reach().await, spared, "{never_served} {:?}", reachable(&process(7)));
    }
    let (mut acts, metrics) = (Acts::new(Incidents::default(), Killed::default()), Metrics::new().unwrap());
    acts.killed.begins(&process(7), 1);
    acts.tell.send(News::Spared { guess: process(7) }).unwrap();
    acts.take_news(&metrics);
    assert_eq!(acts.killed.spared(), Some(&process(7)));
    acts.killed.begins(&process(8), 2);
    assert_eq!(acts.killed.spared(), None);
}

/// Whoever reads the note of a kill later takes its process for one that outlived it.
#[tokio::test]
async fn of_a_kill_that_is_spared_nothing_is_written_and_nothing_sent() {
    let dir = tempfile::tempdir().unwrap();
    let message = dir.path().join("message");
    std::fs::write(&message, "").unwrap();
    let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
    let engine = EngineProcess::of(child.id().unwrap().cast_signed()).unwrap();
    let (tell, mut told) = mpsc::unbounded_channel();
    let job = Job {
        summary: "stalled".to_owned(),
        doubt: Some(dir.path().join("pages")),
        never_served: true,
        reachable: |root| (vec![root.clone()], Vec::new()),
        ..job(engine.clone())
    };
    execute(job, dir.path().to_owned(), Some(message.clone()), tell).await;
    let News::Spared { guess } = told.recv().await.unwrap() else { panic!("another word") };
    assert_eq!((guess, child.try_wait().unwrap()), (engine.clone(), None));
    assert_eq!((KillNote::age(dir.path(), &engine), std::fs::read(message).unwrap().len()), (None, 0));
}

#[tokio::test]
async fn d10_a_note_that_cannot_be_written_holds_no_kill() {
    let dir = tempfile::tempdir().unwrap();
    // whoever opens it to write waits until somebody reads, as on a disk that hangs
    let hangs = KillNote::path(dir.path()).with_extension("tmp");
    nix::unistd::mkfifo(&hangs, Mode::S_IRWXU).unwrap();
    let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
    let engine = EngineProcess::of(child.id().unwrap().cast_signed()).unwrap();
    let (pid, (tell, mut told)) = (engine.pid, mpsc::unbounded_channel());
    let executed = tokio::time::timeout(SOON, execute(job(engine), dir.path().to_owned(), None, tell)).await;
    // lets the writer go, whatever came of it: the runtime waits for it at its end
    let reader = std::fs::File::open(&hangs);
    executed.expect("the kill waits for a note");
    assert_eq!(child.wait().await.unwrap().signal(), Some(9));
    let News::Killed { pids, .. } = told.recv().await.unwrap() else { panic!("another word") };
    assert_eq!(pids, [pid]);
    drop(reader);
}

#[tokio::test]
async fn d10_a_bundle_disk_that_hangs_holds_no_kill() {
    let dir = tempfile::tempdir().unwrap();
    let (bundles, agent_dir) = (dir.path().join("bundles"), dir.path().join("agent"));
    std::fs::create_dir(&bundles).unwrap();
    let hangs = bundles.join(".host-7-9-1.tar.zst.partial");
    nix::unistd::mkfifo(&hangs, Mode::S_IRWXU).unwrap();
    let words = ["detect".into(), "--bundle-dir".into(), bundles.into_os_string()];
    let config = Words::try_parse_from(words).unwrap().watch.into_config(agent_dir).unwrap();
    let (outcome, mut sources) = (Outcome::default(), Sources::new(config.sources.clone()));
    let scene = Scene {
        now_ms: 5_000,
        outcome: &outcome,
        observation: None,
        engine: None,
        in_flight: 0,
        config: &config,
        program: Program { command_line: &[], image: "vllm:1" },
        is_guess: false,
    };
    let (mut acts, metrics) = (Acts::new(Incidents::default(), Killed::default()), Metrics::new().unwrap());
    acts.incidents.begin("host-7-9", 1, "StepStalled", "t0");
    acts.capture(&scene, &mut sources);
    let gathered = async {
        while acts.incidents.open().unwrap().evidence_at.is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            acts.take_news(&metrics);
        }
    };
    tokio::time::timeout(SOON, gathered).await.expect("a disk is waited for");
    let episode = acts.incidents.open().unwrap();
    assert_eq!((episode.bundle.as_deref(), episode.fingerprint.as_deref().map(str::len)), (None, Some(16)));
    let (_, summary) = acts.summary.clone().unwrap();
    assert!(summary.contains("if the disk takes it"), "told while the disk hangs: {summary}");
    // lets the writer go: the runtime waits for it at its end
    let reader = std::fs::File::open(&hangs);
    let written = async {
        while acts.summary.as_ref().unwrap().1.contains("if the disk takes it") {
            tokio::time::sleep(Duration::from_millis(10)).await;
            acts.take_news(&metrics);
        }
    };
    tokio::time::timeout(SOON, written).await.expect("what became of it is heard");
    drop(reader);
}
