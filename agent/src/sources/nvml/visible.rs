//! Which of the machine's GPUs are the engine's: those that its environment lets it see. Pure; where that is not known, all are.
//!
//! NVML tells of every GPU, also of a neighbour's, and who computes on one is asked under the driver's locks ([`super::child`]). The
//! environment is what CUDA itself goes by.

use vitals::observation::{GpuObs, XidObs};

use super::UNKNOWN;

/// What an engine's environment says of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisibleGpus {
    /// UUIDs that its container was given; `None` where it is given what we are.
    given: Option<Vec<String>>,
    /// Those that CUDA may use, in its order; `None`: all that were given.
    chosen: Option<Vec<Device>>,
    /// Some of these by number.
    numbered: bool,
    /// CUDA's numbers follow the bus, as NVML's do; otherwise they do where all cards are alike.
    by_bus: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Device {
    /// Among those that were given.
    Number(u32),
    /// As much of the UUID as was written, `GPU-` before it.
    Uuid(String),
}

impl VisibleGpus {
    /// Reads an environment as `/proc` has it. `ours`: it is of a process in our own container, which is given what we are. `None` where it
    /// does not say, or says it by a name that only the driver understands (a partition's).
    pub fn of_environ(environ: &[u8], ours: bool) -> Option<Self> {
        let value = |name: &str| {
            let of = |entry: &'_ [u8]| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(lossy);
            environ.split(|byte| *byte == 0).find_map(of)
        };
        let given = if ours { None } else { value("NVIDIA_VISIBLE_DEVICES").and_then(|list| uuids(&list)) };
        let chosen = match value("CUDA_VISIBLE_DEVICES") {
            Some(list) => Some(devices(&list)?),
            None => None,
        };
        let numbered = chosen.iter().flatten().any(|device| matches!(device, Device::Number(_)));
        if (given.is_none() && chosen.is_none()) || (given.is_none() && numbered && !ours) {
            return None;
        }
        let by_bus = value("CUDA_DEVICE_ORDER").as_deref() == Some("PCI_BUS_ID");
        Some(Self { given, chosen, numbered, by_bus })
    }

    /// Leaves the engine's own of all that NVML tells of; all where it cannot be told.
    pub fn keep(&self, gpus: &mut Vec<GpuObs>) {
        let Some(own) = self.own(gpus, alike(gpus)) else { return };
        let mut own = own.into_iter();
        gpus.retain(|_| own.next().unwrap_or(true));
    }

    /// Leaves the Xids that may be of one of its own: one that NVML tells of no more may have been. `unread`: those that have no more than
    /// a name, and a number where CUDA's are known to follow it.
    pub fn keep_xids(&self, gpus: &[GpuObs], unread: &[GpuObs], xids: &mut Vec<XidObs>) {
        let mut all: Vec<_> = gpus.iter().chain(unread).cloned().collect();
        all.sort_by_key(|gpu| gpu.index);
        let (gpus, is_alike) = (&all, !gpus.is_empty() && alike(gpus));
        let Some(own) = self.own(gpus, is_alike) else { return };
        xids.retain(|xid| !gpus.iter().zip(&own).any(|(gpu, own)| !own && gpu.uuid == xid.uuid));
    }

    /// For each whether it is the engine's.
    fn own(&self, gpus: &[GpuObs], alike: bool) -> Option<Vec<bool>> {
        // the name of one that NVML has never told
        let nameless = |gpu: &GpuObs| gpu.uuid == UNKNOWN;
        let given = |gpu: &GpuObs| self.given.as_ref().is_none_or(|given| given.iter().any(|uuid| is_of(gpu, uuid)));
        let Some(chosen) = &self.chosen else {
            return Some(gpus.iter().map(|gpu| nameless(gpu) || given(gpu)).collect());
        };
        if self.numbered && !(self.counted(gpus) && (self.by_bus || alike)) {
            return None;
        }
        let mut number = 0..;
        let mut is_chosen = |gpu: &GpuObs| {
            let number = if given(gpu) { number.next() } else { None };
            let number = if self.given.is_some() { number } else { gpu.index };
            chosen.iter().any(|device| match device {
                Device::Number(chosen) => number == Some(*chosen),
                Device::Uuid(uuid) => is_of(gpu, uuid),
            })
        };
        Some(gpus.iter().map(|gpu| is_chosen(gpu) || nameless(gpu)).collect())
    }

    /// Are all there that the numbers count, each with its own?
    fn counted(&self, gpus: &[GpuObs]) -> bool {
        match &self.given {
            Some(given) => {
                let has_number = |uuid: &String| gpus.iter().any(|gpu| is_of(gpu, uuid) && gpu.index.is_some());
                given.iter().all(has_number)
            }
            None => gpus.iter().all(|gpu| gpu.index.is_some() || gpu.uuid == UNKNOWN),
        }
    }
}

fn is_of(gpu: &GpuObs, uuid: &str) -> bool {
    gpu.uuid.starts_with(uuid)
}

/// Cards of one kind, as far as NVML tells: CUDA numbers the quickest first, and these by their place on the bus. Limits that are not told
/// are not the same.
fn alike(gpus: &[GpuObs]) -> bool {
    let same = |a: &GpuObs, b: &GpuObs| a.power_limit_watts.is_some() && a.power_limit_watts == b.power_limit_watts;
    gpus.windows(2).all(|pair| matches!(pair, [a, b] if same(a, b)))
}

/// What a container was given, where it is told by UUIDs: numbers are those of whoever started it, which may see others than we do.
fn uuids(list: &str) -> Option<Vec<String>> {
    let all = list.split(',').map(|name| match device(name.trim())? {
        Device::Uuid(uuid) => Some(uuid),
        Device::Number(_) => None,
    });
    all.collect()
}

/// CUDA's list: it ends before the first that is no device, such as -1; an empty one hides all.
fn devices(list: &str) -> Option<Vec<Device>> {
    let mut all = Vec::new();
    for name in list.split(',').map(str::trim) {
        match device(name) {
            Some(device) => all.push(device),
            None if name.starts_with("MIG-") => return None,
            None => break,
        }
    }
    Some(all)
}

/// `3`, `GPU-<uuid>` or its beginning, or `MIG-GPU-<uuid>/<gi>/<ci>`, which is a part of that GPU.
fn device(name: &str) -> Option<Device> {
    if let Ok(number) = name.parse::<u32>() {
        return Some(Device::Number(number));
    }
    let uuid = name.strip_prefix("MIG-").unwrap_or(name).split('/').next()?;
    uuid.starts_with("GPU-").then(|| Device::Uuid(uuid.to_owned()))
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
