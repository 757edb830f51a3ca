//! The hang of S2 on the device itself: a kernel that spins for ever, waited for as a step waits.

use std::io::Read;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::backend::cuda::open::{self, DeviceChoice};
use engine::backend::{Backend, DeviceFault, StepStart};
use engine::stuck::EXIT_STUCK;

use crate::hold;

/// What the step may take.
const ALLOWED: Duration = Duration::from_millis(500);
/// From the deadline to the end of the process (E1).
const END_MAX: Duration = Duration::from_secs(1);
/// For opening the device before.
const START_MAX: Duration = Duration::from_secs(60);

/// Launches the kernel, waits as a step does, and says what came.
pub fn spin(device: &DeviceChoice) -> Result<ExitCode> {
    let backend = open::open(device, &mut |_, _| {})?;
    backend.begin_step(&StepStart { shape: 0, allowed: Some(ALLOWED) });
    backend.spin(1, true);
    backend.end_step().context("a kernel that ends")?;
    println!("launched");
    let since = Instant::now();
    backend.begin_step(&StepStart { shape: 0, allowed: Some(ALLOWED) });
    backend.spin(1, false);
    match backend.end_step() {
        Err(DeviceFault::Stuck(stuck)) => {
            println!("given up after {} ms: {stuck}", since.elapsed().as_millis());
            Ok(ExitCode::from(EXIT_STUCK))
        }
        other => bail!("a kernel that never ends ended with {other:?}"),
    }
}

/// Runs `spin` beside this process and looks at its end.
pub fn check(device: &DeviceChoice) -> Result<ExitCode> {
    let mut child = hold::start(device, &["spin"])?;
    let mut out = child.stdout.take().context("its standard output")?;
    let mut first = [0; 9];
    out.read_exact(&mut first).context("it ended before it launched anything; its error is above")?;
    let launched = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if launched.elapsed() > START_MAX {
            child.kill().context("killing it")?;
            bail!("the process did not end {START_MAX:?} after its launch: killed");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let took = launched.elapsed();
    let mut said = String::new();
    out.read_to_string(&mut said)?;
    print!("{said}");
    let (late, code) = (took.saturating_sub(ALLOWED), status.code());
    println!("spin.end {} ms goal<={}", late.as_millis(), END_MAX.as_millis());
    println!("spin.status {code:?} goal={EXIT_STUCK}");
    let well = late <= END_MAX && code == Some(i32::from(EXIT_STUCK)) && said.contains("event did not come");
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
