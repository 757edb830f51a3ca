//! What a publish costs (H7): instructions, counted and so repeatable, and nanoseconds, with their spread.
//!
//! Prints `name value unit goal`, one line each. Instructions are counted in a child (this program again) that runs the
//! loop with two lengths: the difference divided by the steps is the loop alone, without start-up. `perf` counts where
//! the machine has counters, else `valgrind`; where neither works the line says `not measured`.
//! Touches a temporary directory and those two programs.
#![allow(clippy::disallowed_methods, reason = "a bench may wait: who runs it has a deadline")]

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use heartbeat::Writer;
use heartbeat::page::{Beat, Identity, Phase, StepOutcome, StepRecord};

/// H7. Missing it in an optimised build ends the program with an error.
const INSTRUCTIONS_MAX: f64 = 60.0;
const SHORT: u64 = 10_000;
const LONG: u64 = 110_000;
const ROUNDS: usize = 15;
const PUBLISHES_A_ROUND: u64 = 200_000;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    if let [_, flag, what, count] = args.as_slice()
        && flag == "--child"
    {
        return run(what, count.parse()?);
    }
    let optimised = if cfg!(debug_assertions) { " (unoptimised build: no measurement)" } else { "" };
    let mut missed = Vec::new();
    for what in ["publish", "record"] {
        let counted = instructions(what);
        missed.extend(counted.filter(|(count, _)| *count > INSTRUCTIONS_MAX).map(|_| what));
        match counted {
            Some((count, by)) => {
                println!("heartbeat_{what}_instructions {count:.1} instr <={INSTRUCTIONS_MAX} # {by}{optimised}")
            }
            None => println!(
                "heartbeat_{what}_instructions not-measured instr <={INSTRUCTIONS_MAX} # no perf counters, no valgrind"
            ),
        }
    }
    let mut ns = Vec::new();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        run("publish", PUBLISHES_A_ROUND)?;
        ns.push(started.elapsed().as_nanos() as f64 / PUBLISHES_A_ROUND as f64);
    }
    ns.sort_by(f64::total_cmp);
    for (name, value) in [("min", ns[0]), ("median", ns[ROUNDS / 2]), ("max", ns[ROUNDS - 1])] {
        println!("heartbeat_publish_ns_{name} {value:.1} ns - # {ROUNDS} rounds{optimised}");
    }
    if !cfg!(debug_assertions) && !missed.is_empty() {
        return Err(format!("more than {INSTRUCTIONS_MAX} instructions: {}", missed.join(", ")).into());
    }
    Ok(())
}

/// The measured loop: changes the beat as an engine would, and publishes or records it. The few instructions of the
/// loop itself are counted as well.
fn run(what: &str, count: u64) -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let mut writer = Writer::create(dir.path(), &Identity::of_this_process(0, 1, 0)?)?;
    let (mut beat, mut record) = values();
    match what {
        "publish" => (0..count).for_each(|n| {
            beat.steps_completed = n;
            publish(&mut writer, black_box(&beat));
        }),
        "record" => (0..count).for_each(|n| {
            record.step = n;
            write_record(&mut writer, black_box(&record));
        }),
        other => return Err(format!("unknown loop {other:?}: publish or record").into()),
    }
    Ok(())
}

/// A call of its own, so that nothing is moved out of the loop and the call is counted.
#[inline(never)]
fn publish(writer: &mut Writer, beat: &Beat) {
    writer.publish(beat);
}

#[inline(never)]
fn write_record(writer: &mut Writer, record: &StepRecord) {
    writer.record(record);
}

/// Instructions a turn of the loop, and who counted them.
fn instructions(what: &str) -> Option<(f64, &'static str)> {
    let count = |counter: fn(&Path, &str, u64) -> Option<u64>| {
        let exe = std::env::current_exe().ok()?;
        let (short, long) = (counter(&exe, what, SHORT)?, counter(&exe, what, LONG)?);
        // A difference that is no difference means a counter that does not count.
        (long > short + (LONG - SHORT)).then(|| (long - short) as f64 / (LONG - SHORT) as f64)
    };
    count(by_perf).map(|n| (n, "perf")).or_else(|| count(by_valgrind).map(|n| (n, "valgrind")))
}

fn by_perf(exe: &Path, what: &str, turns: u64) -> Option<u64> {
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x", ",", "-e", "instructions:u"]).arg(exe).args(["--child", what, &turns.to_string()]);
    stderr_of(perf)?.lines().find(|line| line.contains("instructions"))?.split(',').next()?.parse().ok()
}

fn by_valgrind(exe: &Path, what: &str, turns: u64) -> Option<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(exe);
    valgrind.args(["--child", what, &turns.to_string()]);
    let text = stderr_of(valgrind)?;
    text.lines().find_map(|line| line.split_once("Collected : "))?.1.trim().parse().ok()
}

fn stderr_of(mut command: Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stderr).ok()
}

fn values() -> (Beat, StepRecord) {
    let beat = Beat {
        steps_completed: 0,
        tokens_delivered: 2,
        requests_finished: 3,
        running: 4,
        waiting: 5,
        prompt_tokens_owed: 6,
        phase: Phase::Decode,
        phase_tokens: 0,
        phase_entered_ns: 7,
        lease_ms: 500,
        step_started_ns: 8,
        work_done: 9,
        work_total: 10,
        published_ns: 11,
    };
    let record = StepRecord {
        step: 0,
        started_ns: 1,
        ended_ns: 2,
        requests: 4,
        prefill_tokens: 0,
        decode_tokens: 4,
        graph_key: 0,
        outcome: StepOutcome::Ok,
    };
    (beat, record)
}
