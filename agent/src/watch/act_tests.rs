//! What a kill leaves to be read where the detector that took the evidence is gone.

use super::*;
use crate::options::WatchArgs;
use clap::Parser;
use nix::sys::signal::Signal;

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
        command_line: &[],
        is_guess: false,
    };
    Acts::new(book()).kill(&scene);
    let ended = tokio::time::timeout(SOON, child.wait()).await.expect("it is killed").unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(Signal::SIGKILL as i32));
    let told = std::fs::read_to_string(&message).unwrap();
    let want =
        "truebeat: StepStalled, episode host-7-9-1\n  step 9 for 2400 ms\nbundle: /b/e.tar.zst\nfingerprint: f00\n";
    assert_eq!(told, want);
}
