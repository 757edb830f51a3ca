//! NVML's view of a device at each kind of work, once measured instead of guessed: a trace of samples, and how long each call took. The
//! process that samples has no context on the device; the work is another's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use engine::backend::cuda::open::DeviceChoice;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde_json::{Map, Value, json};

use crate::hold::{self, Work};

/// How often the device is looked at.
const EVERY: Duration = Duration::from_millis(100);

/// How long calls took, by name, in microseconds.
type Latencies = BTreeMap<&'static str, Vec<u64>>;

/// Writes the trace of all phases to `out` and the table of latencies to standard output.
pub fn run(device: &DeviceChoice, out: &Path, seconds: u64) -> Result<()> {
    let nvml = Nvml::init().context("NVML")?;
    let gpu = nvml.device_by_index(device.ordinal).context("the device, as NVML counts")?;
    let mut file = BufWriter::new(File::create(out).with_context(|| format!("writing {}", out.display()))?);
    let about = json!({"name": gpu.name()?, "driver": nvml.sys_driver_version()?, "power_limit_mw": gpu.enforced_power_limit().ok()});
    writeln!(file, "{about}")?;
    let mut latencies = Latencies::new();
    // nobody has a context on the device
    sampled(&gpu, ("nobody", seconds), &mut file, &mut latencies)?;
    for work in Work::value_variants() {
        phase(device, &gpu, (*work, seconds), &mut file, &mut latencies)?;
    }
    for (call, mut micros) in latencies {
        micros.sort_unstable();
        let at =
            |percent: usize| micros.get((micros.len() * percent / 100).min(micros.len() - 1)).copied().unwrap_or(0);
        let line = json!({"call": call, "count": micros.len(), "p50_us": at(50), "p99_us": at(99), "max_us": at(100)});
        println!("{line}");
        writeln!(file, "{line}")?;
    }
    file.flush().context("writing the trace")
}

/// Another process works; this one looks.
fn phase(
    device: &DeviceChoice,
    gpu: &Device<'_>,
    (work, seconds): (Work, u64),
    file: &mut impl Write,
    latencies: &mut Latencies,
) -> Result<()> {
    let mut child = hold::start(device, &["hold", work.name()])?;
    let begun = child.stdout.take().context("its standard output")?.read_exact(&mut [0; 6]);
    if begun.is_ok() {
        sampled(gpu, (work.name(), seconds), file, latencies)?;
    }
    // a spinning kernel is not waited for: its process is killed, which is what a supervisor would do
    child.kill().context("ending the work")?;
    let killed = Instant::now();
    while child.try_wait()?.is_none() && killed.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("{}.gone_after_kill {} ms", work.name(), killed.elapsed().as_millis());
    begun.with_context(|| format!("the work `{}` did not begin; its error is above", work.name()))
}

/// Looks for so long.
fn sampled(
    gpu: &Device<'_>,
    (phase, seconds): (&str, u64),
    file: &mut impl Write,
    latencies: &mut Latencies,
) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(seconds) {
        let mut sample = look(gpu, latencies);
        sample.insert("phase".to_owned(), json!(phase));
        sample.insert("t_s".to_owned(), json!(began.elapsed().as_secs_f64()));
        writeln!(file, "{}", Value::Object(sample))?;
        std::thread::sleep(EVERY);
    }
    Ok(())
}

/// One look at everything; a value that the device does not tell is left out.
fn look(gpu: &Device<'_>, latencies: &mut Latencies) -> Map<String, Value> {
    let mut sample = Map::new();
    let mut ask = |call: &'static str, answer: &dyn Fn() -> Result<Value, NvmlError>| {
        let began = Instant::now();
        let answer = answer();
        let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        latencies.entry(call).or_default().push(micros);
        if let Ok(value) = answer {
            sample.insert(call.to_owned(), value);
        }
    };
    ask("utilization_percent", &|| {
        gpu.utilization_rates().map(|rates| json!({"gpu": rates.gpu, "memory": rates.memory}))
    });
    ask("power_mw", &|| gpu.power_usage().map(|mw| json!(mw)));
    ask("energy_mj", &|| gpu.total_energy_consumption().map(|mj| json!(mj)));
    ask("sm_clock_mhz", &|| gpu.clock_info(Clock::SM).map(|mhz| json!(mhz)));
    ask("memory_clock_mhz", &|| gpu.clock_info(Clock::Memory).map(|mhz| json!(mhz)));
    ask("temperature_c", &|| gpu.temperature(TemperatureSensor::Gpu).map(|c| json!(c)));
    ask("performance_state", &|| gpu.performance_state().map(|state| json!(format!("{state:?}"))));
    ask("throttle_bits", &|| gpu.current_throttle_reasons().map(|reasons| json!(reasons.bits())));
    ask("memory_used_bytes", &|| gpu.memory_info().map(|memory| json!(memory.used)));
    ask("processes", &|| gpu.running_compute_processes_count().map(|count| json!(count)));
    sample
}
