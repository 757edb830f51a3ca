//! The engine tells its own stacks on SIGURG (H10), above all while it is frozen; whoever asks needs no right over it.

use std::{fs, path::Path, time::Duration};

use nix::sys::signal::Signal;

use crate::process::Engine;
use crate::support::wait_until;

/// Waits for the dump that `request` asked for, named and whole.
async fn dump(engine: &Engine, pages: &Path, request: u32) -> String {
    let path = pages.join(format!("stacks-{}.txt", engine.child.id()));
    engine.signal(Signal::SIGURG);
    let end = format!("end of dump {request}\n");
    wait_until("a dump", || fs::read_to_string(&path).is_ok_and(|text| text.ends_with(&end))).await;
    fs::read_to_string(&path).unwrap()
}

/// A dump of the frozen engine, the second or a later one, that shows where its thread stands: one that was asked for while the machine was
/// busy may say that the thread did not take the signal in time.
async fn frozen_dump(engine: &Engine, pages: &Path, place: &str) -> String {
    let mut request = 1;
    loop {
        request += 1;
        engine.freeze().await;
        let told = dump(engine, pages, request).await;
        if thread(&told, "engine").contains(place) {
            return told;
        }
        assert!(request < 60, "never {place}:\n{told}");
    }
}

/// What the dump says of the thread with this name.
fn thread<'a>(dump: &'a str, name: &str) -> &'a str {
    let quoted = format!("{name:?}");
    let told = dump.split("\n\n").find(|part| part.lines().next().is_some_and(|line| line.contains(&quoted)));
    told.unwrap_or_else(|| panic!("no thread {name} in\n{dump}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_engine_tells_where_each_thread_stands_and_lives_on() {
    for (fault, state, place) in
        [("step-stall@sigusr2", "state S", "sleep_for_ever"), ("device-wait@sigusr2", "state R", "spin_for_ever")]
    {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let mut engine = Engine::ready(dir.path(), &["--fault", fault, "--page-dir", pages.to_str().unwrap()]).await;
        let well = dump(&engine, &pages, 1).await;
        assert!(!thread(&well, "engine").contains("for_ever"), "{well}");
        let frozen = frozen_dump(&engine, &pages, place).await;
        let told = thread(&frozen, "engine");
        assert!(told.contains(state) && told.contains(place), "{fault}:\n{frozen}");
        // an optimised build inlines the step: its place is told, without the module's name
        assert!(told.contains("core/step.rs:"), "the way there is told:\n{told}");
        assert!(frozen.contains("tokio"), "the other threads are told too:\n{frozen}");
        assert_eq!(engine.child.try_wait().unwrap(), None, "asking costs nothing");
        let left: Vec<_> = fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "page, marker and one dump: {left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_hangs_is_told_and_the_marker_names_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("pages");
    let engine = Engine::launched(dir.path(), &["--fault", "startup-stall", "--page-dir", pages.to_str().unwrap()]);
    let marker = pages.join(format!("stacks-{}.ready", engine.child.id()));
    wait_until("a marker", || marker.exists()).await;
    let stat = fs::read_to_string(format!("/proc/{}/stat", engine.child.id())).unwrap();
    let ticks = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().to_owned();
    assert_eq!(fs::read_to_string(&marker).unwrap(), format!("{ticks} native\n"));
    let mut request = 0;
    loop {
        request += 1;
        let told = dump(&engine, &pages, request).await;
        if told.contains("sleep_for_ever") {
            return;
        }
        assert!(request < 60, "{told}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
