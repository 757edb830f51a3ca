//! The child that talks to NVML: one JSON line a second, until nobody reads it or its parent dies. Only cheap calls (utilisation, power,
//! clock), each value checked against what a card can have; never process lists, which take the driver's locks. Between the lines it
//! waits for Xids ([`super::xids`]) and tells them at once.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use vitals::observation::GpuObs;

use super::Line;
use super::xids::Ears;

const READ_EVERY: Duration = Duration::from_secs(1);
/// No machine has more; a driver that says so is lying.
pub(super) const GPUS_MAX: u32 = 64;
/// More than any card or board is built for.
const MILLIWATTS_MAX: u32 = 10_000_000;
const MEGAHERTZ_MAX: u32 = 10_000;
const UUID_CHARS_MAX: usize = 96;
const PCI_CHARS_MAX: usize = 32;
/// When the driver answers no more, it may just have said why.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The child: reads every GPU once a second and prints a line.
pub fn nvml_child_main() -> ExitCode {
    // without a parent this process has no purpose
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    // a driver library that crashes every few seconds must not fill a disk
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    probe(&mut std::io::stdout().lock(), READ_EVERY)
}

/// The child's work, written to `out`, a reading each `every`. Ends when there is no NVML or `out` is closed.
pub fn probe(out: &mut dyn Write, every: Duration) -> ExitCode {
    let nvml: &'static Nvml = match Nvml::init() {
        // whoever listens may be held by the driver for ever; it ends with the process
        Ok(nvml) => Box::leak(Box::new(nvml)),
        Err(error) => return absent(out, &format!("{error}")),
    };
    let mut ears: Option<Ears> = None;
    let mut told: Option<Vec<GpuObs>> = None;
    loop {
        let (gpus, unread) = match readings(nvml) {
            Ok(gpus) => gpus,
            Err(error) => {
                let Some(ears) = &ears else {
                    return absent(out, &format!("the driver does not tell its GPUs: {error}"));
                };
                // it answered before: the parent starts a new child
                let _ = tell_xids(out, ears, Instant::now() + LAST_WORDS);
                return ExitCode::FAILURE;
            }
        };
        if gpus.is_empty() && unread.is_empty() && ears.is_none() {
            return absent(out, "the driver names no GPU");
        }
        let mut said = say(out, &Line::Gpus(gpus));
        if told.as_ref() != Some(&unread) {
            said = said.and_then(|()| say(out, &Line::Unread(unread.clone())));
            told = Some(unread);
        }
        // a GPU whose use cannot be read has Xids all the same
        let ears = ears.get_or_insert_with(|| Ears::open(nvml));
        if said.and_then(|()| tell_xids(out, ears, Instant::now() + every)).is_err() {
            return ExitCode::SUCCESS;
        }
    }
}

/// Tells the Xids that come until then, as they come: however many, the GPUs are read no sooner.
fn tell_xids(out: &mut dyn Write, ears: &Ears, until: Instant) -> std::io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let xids = ears.wait(left);
        if !xids.is_empty() {
            say(out, &Line::Xids(xids))?;
        }
        if left.is_zero() {
            return Ok(());
        }
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

/// Every GPU whose use can be read and believed, and those that only have a name; one lost card must not hide the others.
fn readings(nvml: &Nvml) -> Result<(Vec<GpuObs>, Vec<GpuObs>), NvmlError> {
    let count = nvml.device_count()?;
    let (mut read, mut unread) = (Vec::new(), Vec::new());
    for index in 0..count.min(GPUS_MAX) {
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let Some(named) = name(&device, index) else { continue };
        match device.utilization_rates() {
            Ok(used) if used.gpu <= 100 && used.memory <= 100 => {
                read.push(GpuObs { util: used.gpu, memory_util: used.memory, ..reading(&device, named) });
            }
            // one that is cut into parts: CUDA's numbers are other ones then
            Err(NvmlError::NotSupported) => unread.push(GpuObs { index: None, ..named }),
            _ => unread.push(named),
        }
    }
    Ok((read, unread))
}

/// What does not change.
fn name(device: &Device<'_>, index: u32) -> Option<GpuObs> {
    let pci = || device.pci_info().ok().map(|pci| graphic(&pci.bus_id, PCI_CHARS_MAX)).filter(|pci| !pci.is_empty());
    uuid(device).map(|uuid| GpuObs { uuid, index: Some(index), pci: pci(), ..GpuObs::default() })
}

/// What a card does not tell, or cannot mean, is unknown: no card that answers draws 0 W.
fn reading(device: &Device<'_>, named: GpuObs) -> GpuObs {
    let watts = |milliwatts: Result<u32, NvmlError>| {
        milliwatts.ok().filter(|mw| (1..=MILLIWATTS_MAX).contains(mw)).map(|mw| f64::from(mw) / 1_000.0)
    };
    GpuObs {
        power_watts: watts(device.power_usage()),
        power_limit_watts: watts(device.enforced_power_limit()),
        sm_clock_mhz: device.clock_info(Clock::SM).ok().filter(|mhz| *mhz <= MEGAHERTZ_MAX),
        ..named
    }
}

/// A name that the driver gives a GPU; only what prints.
pub(super) fn uuid(device: &Device<'_>) -> Option<String> {
    device.uuid().ok().map(|uuid| graphic(&uuid, UUID_CHARS_MAX)).filter(|uuid| !uuid.is_empty())
}

fn graphic(text: &str, chars_max: usize) -> String {
    text.chars().filter(char::is_ascii_graphic).take(chars_max).collect()
}
