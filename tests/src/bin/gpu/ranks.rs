//! Two ranks of the program on one device, through the ranks' memory: what they answer, alone and in company, and how each of the hangs and
//! deaths of a worker ends the engine (E3).

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::backend::cuda::open::DeviceChoice;
use engine::stuck::EXIT_STUCK;

use crate::Tried;
use crate::serve::{ENGINE, ask, end_of, engine_is_up, engine_words, text};

/// Of each of the two ranks.
const MEMORY_MIB: &str = "4096";
/// What comes over the worker, some steps after the start.
const FAULTS: [&str; 4] = ["rank-hang", "device-wait:1", "sigstop:1", "segfault:1"];
/// Answers to the same request, at the same time.
const COMPANY: usize = 6;
/// A worker that is dead or stands still ends the step in a second; steps under way, the evidence and the process's end come on top.
const END_MAX: Duration = Duration::from_secs(5);

pub fn check(device: &DeviceChoice, Tried { program, model, out }: &Tried) -> Result<ExitCode> {
    std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    let mut good = true;
    for fault in FAULTS {
        let log = out.join(format!("{}.log", fault.replace(':', "-")));
        good &= struck(device, (program, model, &log), fault)?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Serves until the fault comes. True: answers were alike, and the engine ended in time, by itself, and named the rank.
fn struck(device: &DeviceChoice, (program, model, log): (&Path, &Path, &Path), fault: &str) -> Result<bool> {
    let mut command = Command::new(program);
    engine_words(&mut command, device, 2, model);
    command.args(["--device-memory-mib", MEMORY_MIB, "--fault", &format!("{fault}@300steps"), "--guards", "on"]);
    let file = File::create(log)?;
    let began = Instant::now();
    let mut engine = command.stderr(file.try_clone()?).stdout(file).spawn().context("starting the engine")?;
    let served = engine_is_up().and_then(|()| {
        println!("ranks.{fault}.ready {:.2} s -", began.elapsed().as_secs_f64());
        served()
    });
    let ended = end_of(&mut engine)?;
    let over = Instant::now();
    if ended.is_none() {
        engine.kill()?;
    }
    let (alike, answered, last) = served?;
    let took = over.duration_since(last);
    let code = ended.and_then(|status| status.code());
    let named = std::fs::read_to_string(log)?.lines().any(|line| line.contains("rank 1"));
    println!("ranks.{fault}.answers {answered}, alike: {alike} -");
    println!("ranks.{fault}.end_after_last_answer {} ms <={}", took.as_millis(), END_MAX.as_millis());
    println!("ranks.{fault}.status {code:?} goal={EXIT_STUCK}, names the rank: {named}");
    Ok(alike && named && code == Some(i32::from(EXIT_STUCK)) && took < END_MAX)
}

/// Whether the answer alone was that in company, all along; how many came before one did not, and when the last one.
fn served() -> Result<(bool, usize, Instant)> {
    let (status, body) = ask(ENGINE)?;
    let Some(alone) = text(&body).filter(|_| status == 200) else { bail!("status {status}: {body}") };
    let (mut alike, mut answered, mut last) = (true, 1, Instant::now());
    loop {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let one = || Some((text(&ask(ENGINE).ok().filter(|(status, _)| *status == 200)?.1)?, Instant::now()));
            let asked: Vec<_> = (0..COMPANY).map(|_| scope.spawn(one)).collect();
            asked.into_iter().filter_map(|one| one.join().ok()?).collect()
        });
        answered += answers.len();
        alike &= answers.iter().all(|(text, _)| *text == alone);
        last = answers.iter().map(|(_, at)| *at).fold(last, Instant::max);
        if answers.len() < COMPANY {
            return Ok((alike && answered > COMPANY, answered, last));
        }
    }
}
