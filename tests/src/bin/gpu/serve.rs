//! The program itself on the device: requests over HTTP, then the hang of S2 in earnest (a kernel that never ends, in front of everything
//! else). With guards the engine ends by itself with status 85; without them the agent must see it, by NVML too, and replace it.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::backend::cuda::open::DeviceChoice;
use engine::stuck::EXIT_STUCK;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use truebeat_tests::wait::until;

use crate::Tried;

pub const ENGINE: &str = "127.0.0.1:18000";
const GATE: &str = "127.0.0.1:18080";
const AGENT: &str = "127.0.0.1:19400";
/// Some steps, and then the hang; on a part of the device, whatever else is on it.
const FAULT: [&str; 4] = ["--device-memory-mib", "4096", "--fault", "device-wait@300steps"];
/// For a start, and for an end that must come.
const START_MAX: Duration = Duration::from_secs(60);
const END_MAX: Duration = Duration::from_secs(60);
const ANSWER_MAX: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const TOKENS: u32 = 48;

/// Both ways.
pub fn check(device: &DeviceChoice, Tried { program, model, out }: &Tried) -> Result<ExitCode> {
    std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    let guarded = guarded(device, (program, model, out))?;
    let watched = watched(device, (program, model, out))?;
    Ok(if guarded && watched { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Starts the engine alone, with a model of any size, and says when it is ready; the second start finds the files in memory.
pub fn ready(device: &DeviceChoice, program: &Path, model: &Path) -> Result<()> {
    let files = std::fs::read_dir(model).with_context(|| format!("reading {}", model.display()))?;
    let bytes: u64 = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum();
    for start in ["first", "second"] {
        let mut command = Command::new(program);
        engine_words(&mut command, device, 1, model);
        let began = Instant::now();
        let mut engine = command.spawn().context("starting the engine")?;
        let up = engine_is_up();
        let took = began.elapsed().as_secs_f64();
        kill(Pid::from_raw(engine.id().cast_signed()), Signal::SIGTERM).context("ending the engine")?;
        if end_of(&mut engine)?.is_none() {
            engine.kill()?;
        }
        up?;
        println!(
            "ready.{start} {took:.2} s <=3 ({:.1} GB of files, {:.1} GB/s)",
            bytes as f64 / 1e9,
            bytes as f64 / took / 1e9
        );
    }
    Ok(())
}

/// The engine alone, guards on.
fn guarded(device: &DeviceChoice, (program, model, out): (&Path, &Path, &Path)) -> Result<bool> {
    let log = File::create(out.join("guarded.log"))?;
    let mut command = Command::new(program);
    engine_words(&mut command, device, 1, model);
    command.args(FAULT).args(["--guards", "on"]).stderr(log.try_clone()?).stdout(log);
    let began = Instant::now();
    let mut engine = command.spawn().context("starting the engine")?;
    engine_is_up()?;
    println!("serve.ready {:.2} s -", began.elapsed().as_secs_f64());
    let (status, body) = ask(ENGINE)?;
    let (again, same) = ask(ENGINE)?;
    println!("serve.same_answer {} -", status == 200 && again == 200 && text(&body) == text(&same));
    let (mut whole, mut last) = (2, Instant::now());
    // until the hang: whoever is in flight then is answered with an error, or cut off
    while let Ok((200, _)) = ask(ENGINE) {
        (whole, last) = (whole + 1, Instant::now());
    }
    let ended = end_of(&mut engine)?;
    let code = ended.and_then(|status| status.code());
    let after = last.elapsed();
    println!("serve.answered {whole} requests -");
    println!("serve.end_after_last_answer {} ms -", after.as_millis());
    println!("serve.status {code:?} goal={EXIT_STUCK}");
    Ok(code == Some(i32::from(EXIT_STUCK)) && text(&body) == text(&same))
}

/// Behind the agent, guards off: it hangs for good.
fn watched(device: &DeviceChoice, (program, model, out): (&Path, &Path, &Path)) -> Result<bool> {
    let log = File::create(out.join("watched.log"))?;
    let mut command = Command::new(program);
    command.args(["run", "--listen", GATE, "--agent-listen", AGENT, "--engine-url", &format!("http://{ENGINE}")]);
    command.arg("--bundle-dir").arg(out.join("bundles")).arg("--").arg(program);
    engine_words(&mut command, device, 1, model);
    command.args(FAULT).args(["--guards", "off"]).stderr(log.try_clone()?).stdout(log);
    let mut agent = command.spawn().context("starting the agent")?;
    let seen = see(out);
    kill(Pid::from_raw(agent.id().cast_signed()), Signal::SIGTERM).context("ending the agent")?;
    if end_of(&mut agent)?.is_none() {
        agent.kill()?;
        bail!("`truebeat run` did not end: killed");
    }
    seen
}

/// What the agent says of the hang, from the outside.
fn see(out: &Path) -> Result<bool> {
    until("the replica is ready", START_MAX, || Ok(replica_is_ready().then_some(())))?;
    let mut last = Instant::now();
    while let Ok((200, _)) = ask(GATE) {
        last = Instant::now();
    }
    until("the replica is fenced", END_MAX, || Ok((!replica_is_ready()).then_some(())))?;
    println!("agent.fenced_after_last_answer {} ms -", last.elapsed().as_millis());
    std::fs::write(out.join("verdict.json"), get(AGENT, "/verdict")?.1)?;
    std::fs::write(out.join("metrics.txt"), get(AGENT, "/metrics")?.1)?;
    until("the replica is ready again", END_MAX, || Ok(replica_is_ready().then_some(())))?;
    println!("agent.ready_again {} ms -", last.elapsed().as_millis());
    let incidents = get(AGENT, "/incidents")?.1;
    std::fs::write(out.join("incidents.json"), &incidents)?;
    let named = incidents.contains("DeviceWait");
    println!("agent.names_the_device {named} -");
    Ok(named)
}

/// An engine of so many ranks, all of them on the one device.
pub fn engine_words(command: &mut Command, device: &DeviceChoice, ranks: usize, model: &Path) {
    command.args(["engine", "--listen", ENGINE, "--tensor-parallel", &ranks.to_string(), "--model"]).arg(model);
    command.args(["--device", &format!("cuda:{}", vec![device.ordinal.to_string(); ranks].join(","))]);
    if let Some(kernels) = &device.kernels {
        command.arg("--device-kernels").arg(kernels);
    }
}

/// Its status, if it ends in time.
pub fn end_of(child: &mut Child) -> Result<Option<std::process::ExitStatus>> {
    let since = Instant::now();
    while since.elapsed() < END_MAX {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(None)
}

/// Until the engine says that it serves.
pub fn engine_is_up() -> Result<()> {
    until("the engine is ready", START_MAX, || {
        Ok(get(ENGINE, "/health").is_ok_and(|(status, _)| status == 200).then_some(()))
    })
}

fn replica_is_ready() -> bool {
    get(AGENT, "/readyz").is_ok_and(|(status, _)| status == 200)
}

pub fn ask(at: &str) -> Result<(u16, String)> {
    let body =
        json!({"model": "m", "prompt": "hello there", "max_tokens": TOKENS, "ignore_eos": true, "temperature": 0});
    let body = body.to_string();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {}", body.len());
    exchange(at, &head, &body)
}

pub fn text(body: &str) -> Option<String> {
    let value: Value = serde_json::from_str(body).ok()?;
    value["choices"][0]["text"].as_str().map(str::to_owned)
}

fn get(at: &str, path: &str) -> Result<(u16, String)> {
    exchange(at, &format!("GET {path} HTTP/1.1"), "")
}

/// One request on a connection of its own.
fn exchange(at: &str, head: &str, body: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(at).with_context(|| format!("connecting to {at}"))?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    write!(stream, "{head}\r\nhost: {at}\r\nconnection: close\r\n\r\n{body}")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).context("reading the answer")?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without an end of its head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("an answer without a status")?;
    Ok((status, body.to_owned()))
}
