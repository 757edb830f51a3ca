//! Pages that lie (H2, H8): any bytes, any length, a dead or forged writer, odd things under the page's name.
//! The reader must say Unknown with the right reason, and never panic, block or die of SIGBUS.
#![allow(clippy::unwrap_used, reason = "a test's helper may stop the test")]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use heartbeat::layout::{BEAT_OFFSET, FILE_LEN, HEADER_LEN, RECORD_LEN, file_name};
use heartbeat::page::{Beat, GPUS_MAX, Identity, Phase, StepOutcome, StepRecord};
use heartbeat::{Reader, Stale, Unknown, Writer, WriterError, is_live};
use proptest::prelude::{ProptestConfig, any, prop, prop_assert, prop_assert_eq, proptest};

const NOW: u64 = 5_000;

#[test]
fn a_page_has_a_reader_only_once_it_exists_and_beats() {
    let dir = tempfile::tempdir().unwrap();
    let mut reader = Reader::open(dir.path(), 0);
    assert_eq!(reason(reader.read()), "Missing");
    let mut writer = Writer::create(dir.path(), &me(9)).unwrap();
    assert_eq!(reader.read(), Err(Unknown::NoBeat));
    assert_eq!(reader.steps(), Ok(vec![]));
    writer.publish(&beat(1));
    assert_eq!(reader.read().unwrap().beat, beat(1));
    fs::remove_file(writer.path()).unwrap();
    assert_eq!(reason(reader.read()), "Missing", "the old file must not be read on once its name is gone");
}

#[test]
fn a_page_that_was_replaced_is_opened_anew_and_may_count_from_zero() {
    let dir = tempfile::tempdir().unwrap();
    let mut reader = Reader::open(dir.path(), 0);
    let mut first = Writer::create(dir.path(), &me(1)).unwrap();
    first.publish(&beat(100));
    assert_eq!(reader.read().unwrap().beat, beat(100));
    let mut second = Writer::create(dir.path(), &me(2)).unwrap();
    second.publish(&beat(1));
    first.publish(&beat(101));
    let page = reader.read().unwrap();
    assert_eq!((page.identity.nonce, page.beat), (2, beat(1)));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn reading_on_asks_the_file_alone_and_reading_anew_asks_the_path() {
    let (_dir, mut writer, mut reader) = published();
    fs::remove_file(writer.path()).unwrap();
    writer.publish(&beat(8));
    assert_eq!(reader.reread().unwrap().beat, beat(8), "whoever has it open writes and reads on");
    assert_eq!(reason(reader.read()), "Missing");
    assert_eq!(reason(reader.reread()), "Missing", "a file that was given up is not read again");
}

#[test]
fn counters_that_go_back_are_reported_once() {
    let (_dir, mut writer, mut reader) = published();
    writer.publish(&Beat { published_ns: NOW + 1, ..beat(0) });
    assert_eq!(reader.read(), Err(Unknown::WentBack { field: "steps_completed", from: 7, to: 0 }));
    assert!(reader.read().is_ok());
}

#[test]
fn a_writer_that_died_in_mid_write_is_torn_but_its_recorder_can_be_read() {
    let (_dir, mut writer, mut reader) = published();
    (0..3).for_each(|step| writer.record(&record(step)));
    poke(writer.path(), BEAT_OFFSET, &5_u64.to_le_bytes());
    poke(writer.path(), HEADER_LEN + RECORD_LEN, &3_u64.to_le_bytes());
    assert_eq!(reader.read(), Err(Unknown::Torn { tries: 64 }));
    assert_eq!(reader.steps().unwrap(), [record(0), record(2)], "the torn slot alone is missing");
}

#[test]
fn truncation_under_a_running_reader_is_unknown_and_no_sigbus() {
    let (_dir, mut writer, mut reader) = published();
    writer.record(&record(1));
    let file = OpenOptions::new().write(true).open(writer.path()).unwrap();
    for len in [FILE_LEN as u64 - 1, HEADER_LEN as u64, BEAT_OFFSET as u64 + 8, 0] {
        file.set_len(len).unwrap();
        let short = Unknown::TooShort { found: len, expected: FILE_LEN as u64 };
        assert_eq!(reader.read(), Err(short.clone()));
        assert_eq!(reader.steps(), Err(short));
    }
}

#[test]
fn each_impossible_field_is_named() {
    let (_dir, writer, mut reader) = published();
    let good = fs::read(writer.path()).unwrap();
    for (at, value, want) in [
        (0, 0_u32, "BadMagic"),
        (8, 2, "BadVersion"),
        (12, 8192, "header_len"),
        (16, 0, "file_len"),
        (20, 512, "ring_len"),
        (24, 32, "record_len"),
        (28, 9, "gpu_count"),
        (32, 0, "pid"),
        (32, u32::MAX, "pid"),
        (36, 1, "rank"),
        (40, 0, "world_size"),
        (44, 2, "engines"),
        (304, 0, "phase"),
        (304, 10, "phase"),
        (316, 1 << 20, "phase_entered_ns"),
        (332, 1 << 20, "step_started_ns"),
    ] {
        poke(writer.path(), at, &value.to_le_bytes());
        let unknown = reader.read().unwrap_err();
        let got = if let Unknown::BadField { field, .. } = unknown { field } else { unknown.reason() };
        assert_eq!(got, want, "{value} at {at}");
        poke(writer.path(), 0, &good);
    }
    assert!(reader.read().is_ok());
}

#[test]
fn things_that_are_no_file_neither_block_nor_lead_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file_name(0));
    let mut reader = Reader::open(dir.path(), 0);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(reason(reader.read()), "NotAFile");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
    assert_eq!(reason(reader.read()), "NotAFile");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(reason(reader.read()), "NotAFile");
}

#[test]
fn g09_a_page_of_another_user_than_its_process_is_refused_by_name() {
    let (_dir, writer, reader) = published();
    let proc_root = tempfile::tempdir().unwrap();
    let mut reader = reader.with_proc_root(proc_root.path());
    let id = me(9);
    fake_process(proc_root.path(), &id.boot_id, id.pid, 'S', id.pid_start_ticks);
    assert!(reader.read().is_ok(), "whose the process is is not told");
    if nix::unistd::geteuid().is_root() {
        // root's pages are nobody's forgeries
        std::os::unix::fs::chown(writer.path(), Some(4_243), None).unwrap();
    }
    let owner = fs::metadata(writer.path()).unwrap().uid();
    let status = |user: u32| {
        let users = format!("Name:\tengine\nUid:\t{user}\t{user}\t{user}\t{user}\n");
        fs::write(proc_root.path().join(id.pid.to_string()).join("status"), users).unwrap();
    };
    // (a file that changes hands is looked at anew when it is opened anew)
    let mut reader = Reader::open(writer.path().parent().unwrap(), 0).with_proc_root(proc_root.path());
    status(owner);
    assert!(reader.read().is_ok());
    status(owner + 1);
    assert_eq!(reader.read(), Err(Unknown::WrongOwner { owner, pid: id.pid, user: owner + 1 }));
    assert!(reader.read_unverified().is_ok());
}

#[test]
fn a_page_is_evidence_only_of_its_own_live_process() {
    let (dir, _writer, reader) = published();
    let proc_root = tempfile::tempdir().unwrap();
    let mut reader = reader.with_proc_root(proc_root.path());
    assert_eq!(reason(reader.read()), "Io", "a blind reader does not know");
    let id = me(9);
    let at = |pid, state, ticks| {
        fake_process(proc_root.path(), &id.boot_id, pid, state, ticks);
        is_live(&id, proc_root.path())
    };
    assert!(at(id.pid, 'S', id.pid_start_ticks));
    assert!(reader.read().is_ok());
    assert!(!at(id.pid, 'Z', id.pid_start_ticks));
    assert_eq!(reader.read(), Err(Unknown::Stale(Stale::Zombie { pid: id.pid })));
    let (live, page) = (id.pid_start_ticks + 1, id.pid_start_ticks);
    assert!(!at(id.pid, 'S', live));
    assert_eq!(reader.read(), Err(Unknown::Stale(Stale::OtherProcess { pid: id.pid, live, page })));
    fs::remove_dir_all(proc_root.path().join(id.pid.to_string())).unwrap();
    assert_eq!(reader.read(), Err(Unknown::Stale(Stale::NoProcess { pid: id.pid })));
    assert!(reader.read_unverified().is_ok(), "the last words of the dead can be read");
    // The same process under another number, as another PID namespace sees it.
    fake_process(proc_root.path(), &id.boot_id, 3, 'R', id.pid_start_ticks);
    let mut elsewhere = Reader::open(dir.path(), 0).with_proc_root(proc_root.path()).with_pid(3);
    assert!(elsewhere.read().is_ok());
    fake_process(proc_root.path(), &[1; 16], 3, 'R', id.pid_start_ticks);
    assert_eq!(elsewhere.read(), Err(Unknown::Stale(Stale::OtherBoot)));
}

#[test]
fn a_forged_nonce_is_refused() {
    let (_dir, _writer, reader) = published();
    assert_eq!(reader.with_nonce(10).read(), Err(Unknown::WrongNonce { found: 9, expected: 10 }));
}

#[test]
fn an_identity_that_no_reader_would_take_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    for bad in [
        Identity { pid: 0, ..me(0) },
        Identity { rank: 1, ..me(0) },
        Identity { world_size: 0, ..me(0) },
        Identity { engines: 2, ..me(0) },
        Identity { gpu_uuids: vec![[0; 16]; GPUS_MAX + 1], ..me(0) },
    ] {
        assert!(matches!(Writer::create(dir.path(), &bad), Err(WriterError::Identity { .. })), "{bad:?}");
    }
    let missing = Writer::create(&dir.path().join("absent"), &me(0)).unwrap_err().to_string();
    assert!(missing.contains("absent") && missing.contains("TRUEBEAT_PAGE_DIR"), "{missing}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_unknown(bytes in prop::collection::vec(any::<u8>(), 0..FILE_LEN + 64)) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file_name(0)), &bytes).unwrap();
        let mut reader = Reader::open(dir.path(), 0);
        let want = if bytes.len() < FILE_LEN { "TooShort" } else { "BadMagic" };
        prop_assert_eq!(reason(reader.read()), want);
        prop_assert!(reader.steps().is_err());
    }

    /// A good page with some bytes overwritten: whatever is believed keeps the bounds.
    #[test]
    fn scribbled_pages_never_break_the_bounds(
        pokes in prop::collection::vec((0..512_usize, any::<u8>()), 1..12),
        ring in prop::collection::vec((HEADER_LEN..FILE_LEN, any::<u8>()), 0..200),
    ) {
        let (_dir, mut writer, mut reader) = published();
        (0..300).for_each(|step| writer.record(&record(step)));
        pokes.iter().chain(&ring).for_each(|(at, byte)| poke(writer.path(), *at, &[*byte]));
        if let Ok(page) = reader.read_unverified() {
            prop_assert!(page.identity.rank == 0 && page.identity.world_size >= 1);
            prop_assert!(page.identity.gpu_uuids.len() <= GPUS_MAX && page.identity.pid > 0);
            prop_assert!(page.beat.phase_entered_ns <= page.beat.published_ns);
        }
        if let Ok(steps) = reader.steps() {
            prop_assert!(steps.len() <= 256 && steps.iter().all(|s| s.started_ns <= s.ended_ns));
        }
        let _ = reader.read(); // liveness over arbitrary pids and boot ids: must not panic either
    }
}

fn published() -> (tempfile::TempDir, Writer, Reader) {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(dir.path(), &me(9)).unwrap();
    writer.publish(&beat(7));
    let mut reader = Reader::open(dir.path(), 0);
    assert_eq!(reader.read().unwrap().beat, beat(7));
    (dir, writer, reader)
}

fn me(nonce: u64) -> Identity {
    Identity::of_this_process(0, 1, nonce).unwrap()
}

fn beat(n: u64) -> Beat {
    Beat {
        steps_completed: n,
        tokens_delivered: 3 * n,
        requests_finished: n / 2,
        running: 1,
        phase_entered_ns: 10,
        lease_ms: 500,
        step_started_ns: 20,
        ..Beat::of_phase(Phase::Decode, NOW)
    }
}

fn record(step: u64) -> StepRecord {
    StepRecord {
        step,
        started_ns: step,
        ended_ns: step + 1,
        requests: 1,
        prefill_tokens: 0,
        decode_tokens: 1,
        graph_key: 0,
        outcome: StepOutcome::Ok,
    }
}

fn poke(path: &Path, at: usize, bytes: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at as u64).unwrap();
}

fn reason<T: std::fmt::Debug>(result: Result<T, Unknown>) -> &'static str {
    result.unwrap_err().reason()
}

/// A procfs with one process and a boot id.
fn fake_process(root: &Path, boot_id: &[u8; 16], pid: u32, state: char, ticks: u64) {
    let (random, process) = (root.join("sys/kernel/random"), root.join(pid.to_string()));
    fs::create_dir_all(&random).unwrap();
    fs::create_dir_all(&process).unwrap();
    let hex: String = boot_id.iter().map(|b| format!("{b:02x}")).collect();
    fs::write(random.join("boot_id"), hex + "\n").unwrap();
    let zeros = "0 ".repeat(18);
    fs::write(process.join("stat"), format!("{pid} (engine) {state} {zeros}{ticks} 0 0")).unwrap();
}
