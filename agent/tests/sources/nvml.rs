//! NVML's child: absent is said, silence is told with its beginning, and the silent child is killed.

use std::time::Duration;

use agent::sources::procs::ProcRoot;
use agent::sources::{NvmlSource, ProbeCommand, nvml_probe};

use crate::http::eventually_async;

const GPU: &str = r#"{"gpus":[{"uuid":"GPU-1","util":100,"memory_util":2,"power_watts":142.0,"power_limit_watts":600.0,"silent_since_ms":null}]}"#;

fn child(script: String) -> ProbeCommand {
    ProbeCommand {
        program: "sh".to_owned(),
        args: vec!["-c".to_owned(), script],
        first_line: Duration::from_secs(30),
        line: Duration::from_millis(300),
        pause: Duration::from_secs(600),
        ..ProbeCommand::default()
    }
}

#[test]
fn the_probe_says_what_it_finds_in_one_line() {
    let mut out = Vec::new();
    // one reading, then the reader is gone
    struct Once<'a>(&'a mut Vec<u8>);
    impl std::io::Write for Once<'_> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0.contains(&b'\n') { Err(std::io::ErrorKind::BrokenPipe.into()) } else { self.0.write(bytes) }
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let _ = nvml_probe(&mut Once(&mut out), Duration::ZERO);
    let said: serde_json::Value = serde_json::from_slice(&out).unwrap();
    let has_driver = std::path::Path::new("/dev/nvidiactl").exists();
    let key = if has_driver { "gpus" } else { "absent" };
    assert!(said.get(key).is_some(), "{said}");
}

#[tokio::test]
async fn absence_is_said_once_and_asked_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let count = directory.path().join("starts");
    let mut command = child(format!(r#"echo >> {}; echo '{{"absent":"no driver"}}'"#, count.display()));
    command.pause = Duration::ZERO;
    let source = NvmlSource::spawn(command);
    let note = eventually_async("a note", async || Some(source.note()).filter(|note| note.contains("absent"))).await;
    assert_eq!(note, "NVML absent: no driver");
    assert_eq!(source.latest().value, None);
    // with no pause between children a second one would have come long before this
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(std::fs::read_to_string(&count).unwrap().lines().count(), 1);
}

/// The only GPU is being reset when the second child asks for it.
#[tokio::test]
async fn d06_a_driver_that_answered_before_is_silent_and_not_absent() {
    let directory = tempfile::tempdir().unwrap();
    let (count, back) = (directory.path().join("starts"), directory.path().join("back"));
    let script = format!(
        r#"echo >> {0}; [ $(wc -l < {0}) = 1 ] && echo '{GPU}' && exit
        [ -e {1} ] && echo '{GPU}' && exec sleep 1000; echo '{{"absent":"no GPU"}}'"#,
        count.display(),
        back.display()
    );
    let mut command = child(script);
    (command.pause, command.pause_max) = (Duration::from_millis(20), Duration::from_millis(100));
    command.line = Duration::from_secs(600);
    let source = NvmlSource::spawn(command);
    let note = eventually_async("a note", async || Some(source.note()).filter(|note| note.contains("no GPU"))).await;
    assert!(note.starts_with("NVML answers no more: no GPU; silent for"), "{note}");
    let gpus = source.latest().value.unwrap();
    assert!(gpus[0].uuid == "GPU-1" && gpus[0].silent_since_ms.is_some(), "{gpus:?}");
    std::fs::write(&back, "").unwrap();
    eventually_async("a reading", async || {
        source.latest().value.filter(|gpus| gpus.iter().all(|gpu| gpu.silent_since_ms.is_none()))
    })
    .await;
    assert!(std::fs::read_to_string(&count).unwrap().lines().count() >= 3, "one saw none, and another was started");
}

#[tokio::test]
async fn a_child_that_falls_silent_is_killed_and_its_last_words_are_marked() {
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid");
    let source = NvmlSource::spawn(child(format!("echo $$ > {}; echo '{GPU}'; exec sleep 1000", pid_file.display())));
    let gpus =
        eventually_async("silence", async || source.latest().value.filter(|gpus| gpus[0].silent_since_ms.is_some()))
            .await;
    assert_eq!((gpus[0].uuid.as_str(), gpus[0].util, gpus[0].memory_util), ("GPU-1", 100, 2));
    eventually_async("a note", async || source.note().contains("its child was killed").then_some(())).await;
    let pid: i32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    eventually_async("the child is gone", async || {
        ProcRoot::live().stat(pid).is_none_or(|stat| stat.ended()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn nonsense_and_a_missing_program_are_notes() {
    let source = NvmlSource::spawn(child("echo what".to_owned()));
    eventually_async("a note", async || source.note().contains("it said something else").then_some(())).await;
    let mut command = child(String::new());
    command.program = "/nonexistent/probe".to_owned();
    let source = NvmlSource::spawn(command);
    eventually_async("a note", async || source.note().contains("could not start").then_some(())).await;
}
