//! The engine against the official OpenAI client, which is what nearly everybody has in front of it. The client is installed once, into
//! the cache of this user; that takes the network the first time.

use std::path::Path;
use std::process::{Command, Output};

use crate::process::Engine;

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_client_is_content() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/openai");
    let installed = run(&mut Command::new(here.join("install.sh")));
    assert!(installed.status.success(), "the OpenAI client was not installed: {}", text(&installed.stderr));
    let python = Path::new(text(&installed.stdout).trim()).join("bin/python");
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::ready(dir.path(), &[]).await;
    let mut client = Command::new(python);
    client.arg("-B").arg(here.join("client.py")).arg(engine.addr.port().to_string());
    // A proxy of this machine is none for its own ports.
    let told = run(client.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1"));
    let report = text(&told.stderr);
    assert!(told.status.success() && report.contains("\nOK"), "{report}");
    let ran = report.lines().find_map(|l| l.strip_prefix("Ran ")?.split(' ').next()?.parse::<u32>().ok());
    assert!(ran >= Some(15), "{report}");
}
