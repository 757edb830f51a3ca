//! The busy-and-cold sign against what NVML told of real devices (tests/gpu): it is said of a kernel that hangs, on one multiprocessor or
//! on all, and of nothing else.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::*;

/// NVML tells power as a mean over about a second: what came before is in it for so long.
const SETTLED_S: f64 = 1.5;

/// The looks of each phase of a trace, in their order, with the time since it began.
fn phases(path: &Path) -> BTreeMap<String, Vec<(f64, GpuObs)>> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let limit = lines[0]["power_limit_mw"].as_f64().unwrap();
    let mut phases = BTreeMap::<String, Vec<(f64, GpuObs)>>::new();
    for line in lines.iter().filter(|line| line["phase"].is_string()) {
        let percent = |of: &str| u32::try_from(line["utilization_percent"][of].as_u64().unwrap()).unwrap();
        let look = GpuObs {
            uuid: "GPU-0".to_owned(),
            util: percent("gpu"),
            memory_util: percent("memory"),
            power_watts: Some(line["power_mw"].as_f64().unwrap() / 1e3),
            power_limit_watts: Some(limit / 1e3),
            ..GpuObs::default()
        };
        let phase = line["phase"].as_str().unwrap().to_owned();
        phases.entry(phase).or_default().push((line["t_s"].as_f64().unwrap(), look));
    }
    phases
}

fn traces() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|end| end == "gz")).collect()
}

#[test]
fn a_kernel_that_hangs_is_busy_and_cold_and_nothing_else_is() {
    let traces = traces();
    assert!(!traces.is_empty());
    for trace in traces {
        let phases = phases(&trace);
        for learned in ["decode", "prefill"] {
            let mut witnesses = Witnesses::default();
            phases[learned].iter().for_each(|(_, look)| witnesses.learn_power(std::slice::from_ref(look)));
            for (phase, looks) in &phases {
                let settled: Vec<_> = looks.iter().filter(|(t_s, _)| *t_s >= SETTLED_S).collect();
                let cold = settled.iter().filter(|(_, look)| witnesses.busy_and_cold(look)).count();
                let wanted = if phase.starts_with("spin") { settled.len() } else { 0 };
                assert!(settled.len() >= 10 && cold == wanted, "{}: {phase} after {learned}: {cold}", trace.display());
            }
        }
    }
}
