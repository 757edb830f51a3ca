//! An engine whose log nobody reads: the pipe is full with its first line, and nobody waits for it (E1).

use std::io::{PipeReader, Write, pipe};
use std::os::fd::AsFd;

use engine::server::TIMEOUT_HEADER;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::client::{get, open, post, whole};
use crate::guards::{gives_up, streaming};
use crate::process::Engine;

const COMPLETIONS: &str = "/v1/completions";

/// The reader is kept and never reads: were it gone, words would be errors and not waits.
async fn unread(dir: &std::path::Path, more: &[&str]) -> (Engine, PipeReader) {
    let (reader, mut writer) = pipe().unwrap();
    let size = fcntl(writer.as_fd(), FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    writer.write_all(&vec![b'.'; usize::try_from(size).unwrap()]).unwrap();
    let pages = dir.join("pages");
    let args = [&["--guards", "on", "--page-dir", pages.to_str().unwrap()][..], more].concat();
    (Engine::launched_to(writer.into(), dir, &args, |_| ()).until_ready().await, reader)
}

#[tokio::test(flavor = "multi_thread")]
async fn it_serves_and_ends_when_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, _reader) = unread(dir.path(), &[]).await;
    // more refusals than the front end has threads, each a line
    for _ in 0..16 {
        let long = json!({"prompt": "a", "max_tokens": 8000, "ignore_eos": true});
        let late = whole(open(engine.addr, COMPLETIONS, &long, &[(TIMEOUT_HEADER, "1")]).await).await;
        assert!(late.status >= 500, "{}", late.text);
    }
    let answer = post(engine.addr, COMPLETIONS, &json!({"prompt": "a", "max_tokens": 3})).await;
    assert_eq!((answer.status, get(engine.addr, "/health").await.status), (200, 200), "{}", answer.text);
    engine.signal(Signal::SIGTERM);
    assert_eq!(engine.ended().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_hangs_is_given_up_and_explained() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, _reader) = unread(dir.path(), &["--fault", "step-stall@sigusr2"]).await;
    let stream = streaming(&engine).await;
    engine.signal(Signal::SIGUSR2);
    let told = gives_up(&mut engine, stream, &dir.path().join("pages"), std::time::Instant::now()).await;
    assert_eq!(told["kind"], "loop", "{told}");
}
