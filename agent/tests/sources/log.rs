//! The log's tail through everything that happens to log files.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use agent::sources::haste::Haste;
use agent::sources::log::{Follower, LINE_CHARS_MAX, LogTail, NewLine};

use crate::fixture::eventually;

fn append(path: &Path, text: &str) {
    OpenOptions::new().create(true).append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

fn texts(lines: &[NewLine]) -> Vec<&str> {
    lines.iter().map(|line| line.text.as_str()).collect()
}

#[test]
fn lines_come_once_and_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    let mut follower = Follower::new(&path);
    assert_eq!(follower.poll(), []);
    append(&path, "one\ntwo\nhal");
    assert_eq!(texts(&follower.poll()), ["one", "two"]);
    assert_eq!(follower.poll(), []);
    append(&path, "f\r\nlast\n");
    let lines = follower.poll();
    assert_eq!(texts(&lines), ["half", "last"]);
    assert!(lines.iter().all(|line| !line.history), "the file came after the tail began");
}

#[test]
fn what_was_there_before_is_history() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    append(&path, "old\n");
    let mut follower = Follower::new(&path);
    let first = follower.poll();
    assert_eq!((texts(&first), first[0].history), (vec!["old"], true));
    append(&path, "new\n");
    assert!(!follower.poll()[0].history);
}

#[test]
fn rotation_loses_nothing_and_truncation_begins_anew() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    append(&path, "a\n");
    let mut follower = Follower::new(&path);
    follower.poll();
    append(&path, "b\n");
    fs::rename(&path, directory.path().join("engine.log.1")).unwrap();
    append(&path, "c\n");
    let lines = follower.poll();
    assert_eq!(texts(&lines), ["b", "c"]);
    assert!(lines.iter().all(|line| !line.history), "a new file is news");
    File::create(&path).unwrap();
    assert_eq!(follower.poll(), []);
    append(&path, "d\n");
    assert_eq!(texts(&follower.poll()), ["d"]);
    fs::remove_file(&path).unwrap();
    assert_eq!(follower.poll(), []);
    append(&path, "e\n");
    assert_eq!(texts(&follower.poll()), ["e"]);
}

#[test]
fn long_lines_are_cut_and_bytes_that_are_no_text_do_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    let mut follower = Follower::new(&path);
    follower.poll();
    append(&path, &format!("{}\n", "ü".repeat(9_000)));
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"\xff\xfe\n").unwrap();
    let lines = follower.poll();
    assert_eq!(lines[0].text.chars().count(), LINE_CHARS_MAX);
    assert_eq!(lines[1].text, "\u{fffd}\u{fffd}");
}

/// What a client sent stands in the middle of a line, never at the beginning of one.
#[test]
fn the_middle_of_a_line_is_never_taken_for_a_beginning() {
    let forged = "ERROR 11-21 01:04:30 [core.py:936] EngineCore encountered a fatal error.";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    // as history, of which no more than its end is read
    append(&path, &format!("INFO prompt: {}{forged}\nold\n", "x".repeat(300_000)));
    let mut follower = Follower::new(&path);
    assert_eq!(texts(&follower.poll()), ["old"]);
    // longer than a line that is waited for, whatever the pieces are that it comes in
    append(&path, &format!("INFO prompt: {}", "x".repeat(100_000)));
    let cut = follower.poll();
    assert!(cut.len() == 1 && cut[0].text.starts_with("INFO prompt: xxx"), "{cut:?}");
    append(&path, forged);
    assert_eq!(follower.poll(), []);
    append(&path, &format!("{forged}\nnew\n"));
    assert_eq!(texts(&follower.poll()), ["new"]);
    // more than is read at once
    append(&path, &format!("INFO prompt: {}", "x".repeat(2 << 20)));
    let end = (1 << 20) - forged.len() - "\nlast\n".len();
    append(&path, &format!("{forged}{}\nlast\n", "x".repeat(end)));
    assert_eq!(texts(&follower.poll()), ["last"]);
}

/// As in a pod: the engine appends for ever, the file is in memory, and the agent alone reads it.
#[test]
fn a_log_that_is_trimmed_stays_small_and_no_line_is_lost() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("engine.log");
    let mut engine = OpenOptions::new().create(true).append(true).open(&path).unwrap();
    let mut follower = Follower::new(&path).trimming(true);
    follower.poll();
    let (mut number, mut bytes_max) = (0, 0);
    for _ in 0..200 {
        let lines: String = (number..number + 1_000).map(|n| format!("{n:0>99}\n")).collect();
        engine.write_all(lines.as_bytes()).unwrap();
        for line in follower.poll() {
            assert_eq!(line.text.parse(), Ok(number));
            number += 1;
        }
        bytes_max = bytes_max.max(512 * fs::metadata(&path).unwrap().blocks());
    }
    assert_eq!((number, fs::metadata(&path).unwrap().len()), (200_000, 20_000_000));
    assert!(bytes_max < 2 << 20, "{bytes_max} bytes");
    let again = Follower::new(&path).trimming(true).poll();
    assert_eq!(again.last().map(|line| line.text.parse()), Some(Ok(199_999)), "an agent that starts anew has history");
    assert!(again.len() > 600 && again.iter().all(|line| !line.text.contains('\0')));
    // whoever writes may begin anew as well
    engine.set_len(0).unwrap();
    engine.write_all(b"anew\n").unwrap();
    assert_eq!(texts(&follower.poll()), ["anew"]);
}

#[test]
fn a_log_that_is_not_to_be_trimmed_is_whole() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("engine.log");
    let mut follower = Follower::new(&path);
    for _ in 0..4 {
        append(&path, &format!("{}\n", "x".repeat(99)).repeat(10_000));
        follower.poll();
    }
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte != 0));
}

#[test]
fn what_is_no_file_is_no_log() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut follower = Follower::new(&path).trimming(true);
    assert_eq!(follower.poll(), [], "and nobody waits for one who writes");
    fs::remove_file(&path).unwrap();
    append(&path, "one\n");
    assert_eq!(texts(&follower.poll()), ["one"]);
}

/// As after a restart of the detector in the middle of an engine's end.
#[test]
fn a_tail_that_begins_late_keeps_what_an_earlier_one_would_have_kept() {
    let grave = "ERROR 11-21 01:04:30 [core.py:936] EngineCore encountered a fatal error.";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    append(&path, &format!("{grave}\n{}", format!("{}\n", "x".repeat(999)).repeat(200)));
    let tail = LogTail::spawn(Follower::new(&path), Haste::default()).unwrap();
    eventually("the history is read", || (tail.reader().lines().len() == 201).then_some(()));
    append(&path, &"flood\n".repeat(10_000));
    eventually("the flood is read", || (tail.reader().lines().len() > 4_000).then_some(()));
    assert_eq!((tail.reader().lines()[0].as_str(), tail.take_hits()), (grave, Vec::new()));
}

#[test]
fn the_tail_keeps_the_lines_and_tells_new_signatures_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    let signature = "TimeoutError: RPC call to sample_tokens timed out.\n";
    append(&path, signature);
    let tail = LogTail::spawn(Follower::new(&path), Haste::default()).unwrap();
    eventually("the history is read", || (tail.reader().lines().len() == 1).then_some(()));
    assert_eq!(tail.take_hits(), [], "a signature of before is no news");
    append(&path, &"filler\n".repeat(500));
    append(&path, signature);
    let hits = eventually("the new one is told", || Some(tail.take_hits()).filter(|hits| !hits.is_empty()));
    assert_eq!((hits.len(), hits[0].signature.as_str()), (1, "vllm-sample-tokens-timeout"));
    let lines = tail.reader().lines();
    assert_eq!((lines.len(), lines.last().unwrap().as_str()), (502, signature.trim_end()));
    assert_eq!(tail.take_hits(), []);
}
