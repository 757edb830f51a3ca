//! A real writer against a real reader, as threads and as processes (H7): no beat is believed that was never published,
//! and a writer killed at any instant leaves a page that reads as one of its beats or as torn.
#![allow(clippy::unwrap_used, reason = "a test's helper may stop the test")]
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use heartbeat::page::{Beat, Identity, Phase, StepOutcome, StepRecord};
use heartbeat::{Reader, Stale, Unknown, Writer};

const CONSISTENT_READS: u32 = 2_000;
/// Reads among them that saw a newer beat than the one before: a writer at rest would prove nothing.
const MOVES: u32 = 100;
const BOUND: Duration = Duration::from_secs(60);
const DIR_ENV: &str = "HEARTBEAT_RACE_DIR";

#[test]
fn threads_never_believe_an_inconsistent_beat() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = create(dir.path());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| write_until(&mut writer, || stop.load(Ordering::Relaxed)));
        let outcome = std::panic::catch_unwind(|| read_while_written(&mut Reader::open(dir.path(), 0)));
        stop.store(true, Ordering::Relaxed);
        assert!(outcome.is_ok(), "the reader failed; see its message above");
    });
}

#[test]
fn processes_never_believe_an_inconsistent_beat_and_a_kill_leaves_no_other_page() {
    for _ in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Reaped(start_writer(dir.path()));
        let mut reader = Reader::open(dir.path(), 0);
        read_while_written(&mut reader);
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        match reader.read_unverified() {
            Ok(page) => {
                assert_related(&page.beat);
                let pid = child.0.id();
                assert_eq!(reader.read(), Err(Unknown::Stale(Stale::NoProcess { pid })));
            }
            Err(unknown) => assert_eq!(unknown, Unknown::Torn { tries: 64 }),
        }
        let steps = reader.steps().unwrap();
        assert!(steps.len() >= 255, "one slot at most was under the pen: {}", steps.len());
        assert!(steps.windows(2).all(|pair| pair[0].step < pair[1].step));
    }
}

/// Not a test of its own: the writer process of the test above, which starts it with a directory in the environment.
#[test]
#[ignore = "started as a child process by the kill test"]
fn writer_process() {
    let Ok(dir) = std::env::var(DIR_ENV) else { return };
    let mut writer = create(Path::new(&dir));
    write_until(&mut writer, || false);
}

/// Reads until enough beats were believed; each must keep its relations, and so must the recorder.
fn read_while_written(reader: &mut Reader) {
    let (started, mut believed, mut moved, mut last) = (Instant::now(), 0, 0, 0);
    while believed < CONSISTENT_READS || moved < MOVES || last < 1_000 {
        assert!(started.elapsed() < BOUND, "only {believed} consistent reads, {moved} of them new");
        match reader.read_unverified() {
            Ok(page) => {
                assert_related(&page.beat);
                believed += 1;
                moved += u32::from(page.beat.steps_completed > last);
                last = page.beat.steps_completed;
            }
            Err(Unknown::Torn { .. } | Unknown::NoBeat) => {}
            Err(other) => assert_eq!(other, Unknown::NoBeat, "no other answer is right while a writer writes"),
        }
        if believed % 64 == 0 {
            let steps = reader.steps().unwrap();
            assert!(steps.iter().all(related_record) && steps.windows(2).all(|pair| pair[0].step < pair[1].step));
        }
    }
}

/// Publishes in bursts as fast as it can. The short rests are what every real engine has between steps; without them a
/// reader finds no undisturbed window and rightly says Torn.
fn write_until(writer: &mut Writer, stop: impl Fn() -> bool) {
    for n in 1_u64.. {
        writer.publish(&beat(n));
        writer.record(&record(n));
        if n % 64 == 0 {
            if stop() {
                return;
            }
            (0..(n % 7) * 400).for_each(|_| std::hint::spin_loop());
        }
    }
}

fn start_writer(dir: &Path) -> Child {
    let exe = std::env::current_exe().unwrap();
    let args = ["--exact", "writer_process", "--ignored", "--nocapture"];
    let mut child = Command::new(exe).args(args).env(DIR_ENV, dir).stdout(Stdio::piped()).spawn().unwrap();
    // The harness prints a line before the test runs; then the page appears in no time, or the child has died.
    BufReader::new(child.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let started = Instant::now();
    while matches!(Reader::open(dir, 0).read(), Err(Unknown::Missing { .. } | Unknown::NoBeat)) {
        assert!(started.elapsed() < BOUND && child.try_wait().unwrap().is_none(), "the writer did not start");
        std::thread::yield_now();
    }
    child
}

/// Ends its child also where the test fails.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn create(dir: &Path) -> Writer {
    Writer::create(dir, &Identity::of_this_process(0, 1, 0).unwrap()).unwrap()
}

/// Every field follows from `n`, so that a mixture of two beats shows.
fn beat(n: u64) -> Beat {
    Beat {
        steps_completed: n,
        tokens_delivered: 3 * n,
        requests_finished: n / 2,
        running: n as u32,
        waiting: !(n as u32),
        prompt_tokens_owed: n ^ 0xaaaa_aaaa,
        phase: if n.is_multiple_of(2) { Phase::Prefill } else { Phase::Decode },
        phase_tokens: (n >> 1) as u32,
        phase_entered_ns: 5 * n,
        lease_ms: n as u32 ^ 0x5555,
        step_started_ns: 6 * n,
        work_done: n + 1,
        work_total: n + 2,
        published_ns: 7 * n,
    }
}

fn record(n: u64) -> StepRecord {
    StepRecord {
        step: n,
        started_ns: 5 * n,
        ended_ns: 6 * n,
        requests: n as u32,
        prefill_tokens: !(n as u32),
        decode_tokens: (n >> 1) as u32,
        graph_key: n.rotate_left(32),
        outcome: if n.is_multiple_of(2) { StepOutcome::Ok } else { StepOutcome::Failed },
    }
}

fn assert_related(seen: &Beat) {
    assert_eq!(*seen, beat(seen.steps_completed));
}

fn related_record(seen: &StepRecord) -> bool {
    *seen == record(seen.step)
}
