//! The child that talks to NVML: one JSON line a second, until nobody reads it or its parent dies. Only cheap calls (utilisation, power,
//! clock), each value checked against what a card can have; never process lists, which take the driver's locks.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::resource::{Resource, setrlimit};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use vitals::observation::GpuObs;

use super::Line;

const READ_EVERY: Duration = Duration::from_secs(1);
/// No machine has more; a driver that says so is lying.
const GPUS_MAX: u32 = 64;
/// More than any card or board is built for.
const MILLIWATTS_MAX: u32 = 10_000_000;
const MEGAHERTZ_MAX: u32 = 10_000;
const UUID_CHARS_MAX: usize = 96;

/// The child: reads every GPU once a second and prints a line.
pub fn nvml_child_main() -> ExitCode {
    // without a parent this process has no purpose
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    // a driver library that crashes every few seconds must not fill a disk
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    probe(&mut std::io::stdout().lock(), &|| std::thread::sleep(READ_EVERY))
}

/// The child's work, written to `out`; `pause` runs between readings. Ends when there is no NVML or `out` is closed.
pub fn probe(out: &mut dyn Write, pause: &dyn Fn()) -> ExitCode {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(error) => return absent(out, &format!("{error}")),
    };
    let mut seen = false;
    loop {
        let gpus = match readings(&nvml) {
            Ok(gpus) => gpus,
            Err(error) if !seen => return absent(out, &format!("the driver does not tell its GPUs: {error}")),
            // it answered before: the parent starts a new child
            Err(_) => return ExitCode::FAILURE,
        };
        if gpus.is_empty() && !seen {
            return absent(out, "the driver tells of no GPU whose use can be read and believed");
        }
        seen = true;
        if say(out, &Line::Gpus(gpus)).is_err() {
            return ExitCode::SUCCESS;
        }
        pause();
    }
}

fn absent(out: &mut dyn Write, why: &str) -> ExitCode {
    // a parent that is gone need not be told
    let _ = say(out, &Line::Absent(why.to_owned()));
    ExitCode::SUCCESS
}

fn say(out: &mut dyn Write, line: &Line) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Every GPU whose use can be read and believed; one lost card must not hide the others. Power is 0 where a card does not tell it.
fn readings(nvml: &Nvml) -> Result<Vec<GpuObs>, NvmlError> {
    let count = nvml.device_count()?;
    Ok((0..count.min(GPUS_MAX)).filter_map(|index| reading(nvml, index)).collect())
}

fn reading(nvml: &Nvml, index: u32) -> Option<GpuObs> {
    let device = nvml.device_by_index(index).ok()?;
    let uuid: String = device.uuid().ok()?.chars().filter(char::is_ascii_graphic).take(UUID_CHARS_MAX).collect();
    let used = device.utilization_rates().ok()?;
    let believed = !uuid.is_empty() && used.gpu <= 100 && used.memory <= 100;
    let watts = |milliwatts: Result<u32, NvmlError>| {
        milliwatts.ok().filter(|mw| *mw <= MILLIWATTS_MAX).map_or(0.0, |mw| f64::from(mw) / 1_000.0)
    };
    believed.then(|| GpuObs {
        uuid,
        pci: None,
        util: used.gpu,
        memory_util: used.memory,
        power_watts: watts(device.power_usage()),
        power_limit_watts: watts(device.enforced_power_limit()),
        sm_clock_mhz: device.clock_info(Clock::SM).ok().filter(|mhz| *mhz <= MEGAHERTZ_MAX),
        silent_since_ms: None,
    })
}
