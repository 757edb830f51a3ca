//! The layout, byte for byte (H1, H9): a committed page that every writer must make and every reader must understand.
//!
//! The hex file was made from the field table of `docs/contracts/heartbeat.md`, independently of this crate.
#![allow(clippy::unwrap_used, reason = "a test's helper may stop the test")]

use std::fs;
use std::path::Path;

use heartbeat::layout::{FILE_LEN, file_name};
use heartbeat::page::{Beat, Identity, Page, Phase, StepOutcome, StepRecord};
use heartbeat::{Reader, Writer};

const RANK: u32 = 1;

#[test]
fn the_writer_makes_the_golden_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(dir.path(), &identity()).unwrap();
    writer.publish(&Beat { steps_completed: 1, published_ns: 1, phase_entered_ns: 0, step_started_ns: 0, ..beat() });
    writer.publish(&beat());
    records().iter().for_each(|r| writer.record(r));
    let (made, golden) = (fs::read(writer.path()).unwrap(), golden());
    assert_eq!(made.len(), FILE_LEN);
    let differing: Vec<usize> = (0..FILE_LEN).filter(|at| made[*at] != golden[*at]).collect();
    assert!(differing.is_empty(), "bytes differ at {differing:?}");
}

#[test]
fn the_reader_understands_the_golden_bytes() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(file_name(RANK)), golden()).unwrap();
    let mut reader = Reader::open(dir.path(), RANK);
    assert_eq!(reader.read_unverified(), Ok(Page { identity: identity(), beat: beat() }));
    assert_eq!(reader.steps().unwrap(), records()[1..]);
}

/// Every phase and outcome has the number that the contract's table gives it.
#[test]
fn enum_numbers_are_the_contracts() {
    use Phase::{Capture, Compile, Decode, Drain, Idle, Load, Prefill, Sleep, WarmUp};
    let phases = [Load, Compile, Capture, WarmUp, Idle, Prefill, Decode, Sleep, Drain];
    assert!(phases.iter().zip(1..=9).all(|(phase, number)| *phase as u8 == number));
    let outcomes = [StepOutcome::Ok, StepOutcome::Failed, StepOutcome::DeadlineExceeded];
    assert!(outcomes.iter().zip(1..=3).all(|(outcome, number)| *outcome as u8 == number));
}

fn identity() -> Identity {
    let run = |first: u8| std::array::from_fn(|i| first + i as u8);
    Identity {
        pid: 4242,
        pid_start_ticks: 123_456_789,
        boot_id: run(0),
        nonce: 0x1122_3344_5566_7788,
        rank: RANK,
        world_size: 2,
        engines: 2,
        gpu_uuids: vec![run(0xa0), run(0xc0)],
    }
}

fn beat() -> Beat {
    Beat {
        steps_completed: 1001,
        tokens_delivered: 20_002,
        requests_finished: 303,
        running: 4,
        waiting: 5,
        prompt_tokens_owed: 60_006,
        phase: Phase::Prefill,
        phase_tokens: 7007,
        phase_entered_ns: 8_000_000_008,
        lease_ms: 9009,
        step_started_ns: 8_000_000_010,
        work_done: 11,
        work_total: 12,
        published_ns: 8_000_000_013,
    }
}

/// 257 records: the last one lies over the first.
fn records() -> Vec<StepRecord> {
    let filler = |i: u64| StepRecord {
        step: 999 + i,
        started_ns: 7_000_000_001 + i,
        ended_ns: 7_000_000_002 + i,
        requests: 1,
        prefill_tokens: 0,
        decode_tokens: 1,
        graph_key: 0,
        outcome: StepOutcome::Failed,
    };
    let mut records: Vec<_> = (0..256).map(filler).collect();
    records[1] = StepRecord {
        step: 1000,
        started_ns: 7_000_000_001,
        ended_ns: 7_000_000_002,
        requests: 4,
        decode_tokens: 4,
        graph_key: 0xfeed_face,
        outcome: StepOutcome::Ok,
        ..filler(1)
    };
    records.push(StepRecord {
        step: 1256,
        started_ns: 7_900_000_001,
        ended_ns: 7_900_000_002,
        requests: 4,
        prefill_tokens: 7007,
        decode_tokens: 3,
        graph_key: 0,
        outcome: StepOutcome::DeadlineExceeded,
    });
    records
}

fn golden() -> Vec<u8> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/page-v1.hex")).unwrap();
    let mut page = vec![0; FILE_LEN];
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (offset, hex) = line.split_once(' ').unwrap();
        let offset = usize::from_str_radix(offset, 16).unwrap();
        for i in 0..16 {
            page[offset + i] = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
        }
    }
    page
}
