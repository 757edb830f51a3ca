//! The child's ears: Xids as NVML's events, each GPU's in a thread of its own with an event set of its own, so that the event's own word
//! for the device is not needed (a GPU that fell off the bus has no name any more) and a call that never returns costs that GPU's Xids
//! and nothing else: not the readings, not the other GPUs'.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, Nvml};
use vitals::observation::XidObs;
use vitals::xid::{CODE_MAX, Remedy};

use super::child::{GPUS_MAX, uuid};
use crate::sources::clock::monotonic_ms;
use crate::supervisor::keep::Pause;

/// One wait in the driver.
const WAIT_MS: u32 = 5_000;
/// After a Xid others may follow at once; a line each would be many.
const GATHER: Duration = Duration::from_millis(100);
/// Xids that wait to be told; what comes beyond is dropped.
const WAITING_MAX: usize = 64;
/// So many waits in a row may return at once (a fault comes with companions); after that the driver is not asked more often than this.
const BURST_MAX: u32 = 32;
const PAUSE: Duration = Duration::from_millis(200);
/// A wait that returned sooner did not wait.
const AT_ONCE: Duration = Duration::from_millis(20);
/// Between two waits on a GPU that is lost: it may come back.
const LOST_PAUSE: Duration = Duration::from_secs(1);
/// After any other error the GPU is listened to anew: so soon at first, no more often than this at last, and soon again after a time without.
const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(60);
/// The code with which the driver says what it wants done.
const RECOVERY_ACTION_CHANGED: u32 = 154;

/// What listens, as long as the process lives.
#[derive(Debug)]
pub(super) struct Ears {
    heard: Receiver<XidObs>,
    /// Kept so that a driver without events is no end of hearing: the wait is the child's pause as well.
    _tell: SyncSender<XidObs>,
}

impl Ears {
    /// Starts listening to every GPU. Never waits for the driver.
    pub(super) fn open(nvml: &'static Nvml) -> Self {
        let (tell, heard) = sync_channel(WAITING_MAX);
        let opening = tell.clone();
        // how many there are is asked of the driver too
        let start = move || {
            let count = nvml.device_count().unwrap_or(0).min(GPUS_MAX);
            for index in 0..count {
                let tell = opening.clone();
                let run = move || listen(nvml, index, &tell);
                // a machine without threads has graver worries than this signal
                let _ = std::thread::Builder::new().name(format!("xids-{index}")).spawn(run);
            }
        };
        let _ = std::thread::Builder::new().name("xids".to_owned()).spawn(start);
        Self { heard, _tell: tell }
    }

    /// The Xids that came since the last call; waits for one, but no longer than this.
    pub(super) fn wait(&self, longest: Duration) -> Vec<XidObs> {
        let Ok(first) = self.heard.recv_timeout(longest) else { return Vec::new() };
        std::thread::sleep(GATHER.min(longest));
        std::iter::once(first).chain(self.heard.try_iter().take(WAITING_MAX)).collect()
    }
}

/// Listens to one GPU until the driver says that it has no such events.
fn listen(nvml: &'static Nvml, index: u32, tell: &SyncSender<XidObs>) {
    let mut pause = Pause::new(AGAIN_FIRST, AGAIN_MAX, AGAIN_MAX);
    loop {
        let began = Instant::now();
        let error = register(nvml, index).map_or_else(|error| error, |registered| hear(&registered, tell));
        if has_no_events(&error) {
            return;
        }
        std::thread::sleep(pause.after(began.elapsed()));
    }
}

/// It will not have any later, either.
fn has_no_events(error: &NvmlError) -> bool {
    use NvmlError::{FailedToLoadSymbol, FunctionNotFound, NotSupported, Uninitialized};
    matches!(error, NotSupported | Uninitialized | FunctionNotFound | FailedToLoadSymbol(_))
}

type Registered = (Device<'static>, String, EventSet<'static>);

/// Tells of every Xid until an error that waiting does not end.
fn hear((device, uuid, set): &Registered, tell: &SyncSender<XidObs>) -> NvmlError {
    let mut at_once = 0;
    loop {
        let began = Instant::now();
        let code = match set.wait(WAIT_MS) {
            Ok(event) => event.event_data.as_ref().and_then(code),
            Err(NvmlError::Timeout) => None,
            Err(NvmlError::GpuLost) => {
                std::thread::sleep(LOST_PAUSE);
                None
            }
            Err(error) => return error,
        };
        if let Some(code) = code {
            let remedy = (code == RECOVERY_ACTION_CHANGED).then(|| recovery_action(device)).flatten();
            // one that nobody takes in time is dropped: whoever floods says nothing
            let _ = tell.try_send(XidObs { uuid: uuid.clone(), code, remedy, at_ms: monotonic_ms() });
        }
        at_once = if began.elapsed() < AT_ONCE { at_once + 1 } else { 0 };
        if at_once > BURST_MAX {
            std::thread::sleep(PAUSE);
        }
    }
}

fn register(nvml: &'static Nvml, index: u32) -> Result<Registered, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let uuid = uuid(&device).ok_or(NvmlError::Unknown)?;
    let set = device
        .register_events(EventTypes::CRITICAL_XID_ERROR, nvml.create_event_set()?)
        .map_err(|failed| failed.error)?;
    Ok((device, uuid, set))
}

/// A code that a driver can mean.
fn code(xid: &XidError) -> Option<u32> {
    let XidError::Value(value) = xid else { return None };
    u32::try_from(*value).ok().filter(|code| (1..=CODE_MAX).contains(code))
}

/// What the driver wants done now; only newer ones say.
fn recovery_action(device: &Device<'_>) -> Option<Remedy> {
    let fields = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]).ok()?;
    let number = match fields.into_iter().next()?.ok()?.value.ok()? {
        SampleValue::U32(number) => number.into(),
        SampleValue::U64(number) => number,
        SampleValue::I64(number) => u64::try_from(number).ok()?,
        SampleValue::F64(_) => return None,
    };
    Remedy::of_recovery_action(number)
}
