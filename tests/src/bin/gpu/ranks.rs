//! Two ranks of the program on one device, through the ranks' memory: what they answer, alone and in company, and how each of the hangs and
//! deaths of a worker ends the engine (E3).

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::backend::cuda::open::DeviceChoice;
use engine::stuck::EXIT_STUCK;

use crate::serve::{ENGINE, ask, end_of, engine_is_up, text};

/// Of each of the two ranks.
const MEMORY_MIB: &str = "4096";
/// What comes over the worker, some steps after the start.
const FAULTS: [&str; 4] = ["rank-hang", "device-wait:1", "sigstop:1", "segfault:1"];
/// Answers to the same request, at the same time.
const COMPANY: usize = 6;
/// A worker that is dead or stands still ends the step in a second; the log, the evidence and the process's end come on top.
const END_MAX: Duration = Duration::from_secs(5);

pub fn check(device: &DeviceChoice, program: &Path, model: &Path, out: &Path) -> Result<ExitCode> {
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
    command.args(["engine", "--listen", ENGINE, "--tensor-parallel", "2", "--device-memory-mib", MEMORY_MIB]);
    command.args(["--device", &format!("cuda:{0},{0}", device.ordinal), "--fault", &format!("{fault}@300steps")]);
    command.arg("--model").arg(model).args(["--guards", "on"]);
    if let Some(kernels) = &device.kernels {
        command.arg("--device-kernels").arg(kernels);
    }
    let file = File::create(log)?;
    let began = Instant::now();
    let mut engine = command.stderr(file.try_clone()?).stdout(file).spawn().context("starting the engine")?;
    let served = engine_is_up().and_then(|()| {
        println!("ranks.{fault}.ready {:.2} s -", began.elapsed().as_secs_f64());
        served()
    });
    let last = Instant::now();
    let ended = end_of(&mut engine)?;
    let took = last.elapsed();
    if ended.is_none() {
        engine.kill()?;
    }
    let (alike, answered) = served?;
    let code = ended.and_then(|status| status.code());
    let named = std::fs::read_to_string(log)?.lines().any(|line| line.contains("rank 1"));
    println!("ranks.{fault}.answers {answered}, alike: {alike} -");
    println!("ranks.{fault}.end_after_first_failure {} ms <={}", took.as_millis(), END_MAX.as_millis());
    println!("ranks.{fault}.status {code:?} goal={EXIT_STUCK}, names the rank: {named}");
    Ok(alike && named && code == Some(i32::from(EXIT_STUCK)) && took < END_MAX)
}

/// Whether the answer alone was that in company, all along; and how many came before one did not.
fn served() -> Result<(bool, usize)> {
    let (status, body) = ask(ENGINE)?;
    let Some(alone) = text(&body).filter(|_| status == 200) else { bail!("status {status}: {body}") };
    let (mut alike, mut answered) = (true, 1);
    loop {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..COMPANY).map(|_| scope.spawn(|| ask(ENGINE))).collect();
            asked.into_iter().map(|one| one.join()).collect()
        });
        for answer in answers {
            let Ok(Ok((200, body))) = answer else { return Ok((alike, answered)) };
            alike &= text(&body).is_some_and(|text| text == alone);
            answered += 1;
        }
    }
}
