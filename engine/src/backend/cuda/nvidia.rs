//! NVIDIA's driver, loaded at run time: the one module that talks to CUDA, by its lowest level. No call of it waits for the device: memory is
//! asked for once and never given back, copies go through pinned memory, events are asked.
#![allow(unsafe_code, reason = "a foreign library has no safe form; each block argues for itself")]

mod graph;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ops::Range;
use std::ptr;
use std::slice;
use std::thread;

use cudarc::driver::sys;

use graph::Graph;

use super::driver::{Address, Driver, DriverError, Launch, LinkName};
use super::image;
use super::nccl::{Link, Nccl};
use super::warpgroups::SHARED_BYTES_MAX;

/// Since this version of the driver's API a kernel can be loaded before it is launched (`cuFuncLoad`).
const VERSION_WITH_LOAD: c_int = 12_040;
/// Threads that copy to pinned memory, and what each copies at least.
const COPY_THREADS: usize = 8;
const COPY_MIN: usize = 1 << 20;
/// Of this generation are the devices that have what `kernels/wgmma.cu` is written for, and no later ones.
const WITH_WARPGROUPS: [c_int; 2] = [9, 0];
/// Devices of this generation on begin a kernel before the one in front of it has ended (`follow` of kernels/common.cuh).
const MAJOR_WITH_OVERLAP: c_int = 9;

thread_local! {
    /// The context that this thread's calls go to.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// One device: its context, one stream, and the kernels.
pub struct Nvidia {
    context: sys::CUcontext,
    stream: sys::CUstream,
    kernels: HashMap<&'static str, sys::CUfunction>,
    /// Kernels of a graph may overlap at their ends.
    overlaps: bool,
    warpgroups: bool,
}

// SAFETY: handles of the driver are names of things that it keeps itself; its API may be called with them from any thread.
unsafe impl Send for Nvidia {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Nvidia {}

/// An event, without a time.
pub struct Event(sys::CUevent);

// SAFETY: as of `Nvidia`.
unsafe impl Send for Event {}

/// Pinned memory; it lives as long as the process, for the device may be writing to it.
pub struct Pinned {
    at: *mut u8,
    len_bytes: usize,
}

// SAFETY: the memory belongs to this value alone, wherever it goes.
unsafe impl Send for Pinned {}

impl Nvidia {
    /// Opens device `ordinal` and loads every kernel of `image`.
    ///
    /// # Errors
    /// [`DriverError`], also where there is no driver or the image has no kernels for the device.
    pub fn open(ordinal: u32, image: &[u8]) -> Result<Self, DriverError> {
        // SAFETY: looks for the library and calls nothing of it.
        if !unsafe { sys::is_culib_present() } {
            let reason = "not found: there is no NVIDIA driver on this machine".to_owned();
            return Err(DriverError { call: "libcuda.so.1", reason });
        }
        let (mut device, mut context, mut stream, mut version) = (0, ptr::null_mut(), ptr::null_mut(), 0);
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: `cuInit` comes first; each call gets places for its answers that outlive it.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, number))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
            check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, flags))?;
        }
        let generation = generation(device)?;
        let kernels = load(image, version)?;
        let overlaps = generation[0] >= MAJOR_WITH_OVERLAP && version >= VERSION_WITH_LOAD;
        let warpgroups = generation == WITH_WARPGROUPS;
        if warpgroups {
            allow_shared_memory(&kernels)?;
        }
        Ok(Self { context, stream, kernels, overlaps, warpgroups })
    }

    /// Makes the device's context that of the calling thread, if it is not.
    fn enter(&self) -> Result<(), DriverError> {
        let mine = self.context as usize;
        if CURRENT.get() != mine {
            // SAFETY: the context was retained and is never released.
            check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })?;
            CURRENT.set(mine);
        }
        Ok(())
    }

    fn function(&self, launch: &Launch) -> Result<sys::CUfunction, DriverError> {
        self.kernels.get(launch.kernel()).copied().ok_or_else(|| DriverError {
            call: "cuLaunchKernel",
            reason: format!("the image has no kernel {}", launch.kernel()),
        })
    }
}

/// Major and minor.
fn generation(device: sys::CUdevice) -> Result<[c_int; 2], DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let mut generation = [0; 2];
    for (place, which) in generation.iter_mut().zip([MAJOR, MINOR]) {
        // SAFETY: the answer's place outlives the call.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(place, which, device) })?;
    }
    Ok(generation)
}

/// Lets warpgroups' kernels have more shared memory than one gets without asking.
fn allow_shared_memory(kernels: &HashMap<&'static str, sys::CUfunction>) -> Result<(), DriverError> {
    let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let bytes = c_int::try_from(SHARED_BYTES_MAX).unwrap_or(c_int::MAX);
    for (name, function) in kernels.iter().filter(|(name, _)| name.starts_with("wgmma_")) {
        // SAFETY: the function is one of a module that is loaded and never unloaded.
        let allowed = unsafe { sys::cuFuncSetAttribute(*function, which, bytes) };
        check("cuFuncSetAttribute", allowed).map_err(|error| named(error, name))?;
    }
    Ok(())
}

/// The functions of an image, loaded now: what is loaded at its first launch may wait for the device.
fn load(image: &[u8], version: c_int) -> Result<HashMap<&'static str, sys::CUfunction>, DriverError> {
    let mut module = ptr::null_mut();
    // SAFETY: the image is whole in memory, and the driver copies what it keeps.
    check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
    let mut kernels = HashMap::new();
    for name in image::names() {
        let text = CString::new(name).unwrap_or_default();
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded and never unloaded, the name ends with a zero.
        unsafe {
            let found = sys::cuModuleGetFunction(&raw mut function, module, text.as_ptr());
            check("cuModuleGetFunction", found).map_err(|error| named(error, name))?;
            if version >= VERSION_WITH_LOAD {
                check("cuFuncLoad", sys::cuFuncLoad(function)).map_err(|error| named(error, name))?;
            }
        }
        kernels.insert(name, function);
    }
    Ok(kernels)
}

impl Driver for Nvidia {
    type Event = Event;
    type Graph = Graph;
    type Pinned = Pinned;
    type Link = Link;

    fn has_warpgroups(&self) -> bool {
        self.warpgroups
    }

    fn allocate(&self, len_bytes: u64) -> Result<Address, DriverError> {
        self.enter()?;
        let (mut at, len) = (0, usize::try_from(len_bytes).unwrap_or(usize::MAX));
        // SAFETY: the answer's place outlives the call.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut at, len) })?;
        Ok(Address(at))
    }

    fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        self.enter()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: the answers' places outlive the call.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut all) })?;
        Ok((free as u64, all as u64))
    }

    fn pin(&self, len_bytes: usize) -> Result<Pinned, DriverError> {
        self.enter()?;
        let mut at = ptr::null_mut();
        // SAFETY: the answer's place outlives the call.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut at, len_bytes, 0) })?;
        let at = at.cast::<u8>();
        // SAFETY: the driver gave these bytes to us alone; zeroed, all of them may be read.
        unsafe { ptr::write_bytes(at, 0, len_bytes) };
        Ok(Pinned { at, len_bytes })
    }

    fn write(&self, pinned: &mut Pinned, at: usize, bytes: &[u8]) {
        let at = at.min(pinned.len_bytes);
        let len = bytes.len().min(pinned.len_bytes - at);
        // SAFETY: within the allocation, which is initialised and this value's alone. What the device still reads is not written: `Halves` turns
        // after its event.
        let to = unsafe { slice::from_raw_parts_mut(pinned.at.add(at), len) };
        copy_by_threads(to, &bytes[..len]);
    }

    fn read(&self, pinned: &Pinned, at: usize, out: &mut [u8]) {
        let at = at.min(pinned.len_bytes);
        let len = out.len().min(pinned.len_bytes - at);
        // SAFETY: within the allocation, which is initialised; the copy that wrote it is done, its event said so.
        unsafe { ptr::copy_nonoverlapping(pinned.at.add(at), out.as_mut_ptr(), len) };
    }

    fn copy_in(&self, to: Address, from: &Pinned, range: Range<usize>) -> Result<(), DriverError> {
        self.enter()?;
        let (start, end) = (range.start.min(from.len_bytes), range.end.min(from.len_bytes));
        let len = end.saturating_sub(start);
        // SAFETY: the source is within pinned memory that lives for ever; the target is a piece of the budget at least as long.
        let done = unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.at.add(start).cast::<c_void>(), len, self.stream) };
        check("cuMemcpyHtoDAsync", done)
    }

    fn copy_out(&self, to: &mut Pinned, from: Address, len_bytes: usize) -> Result<(), DriverError> {
        self.enter()?;
        let len = len_bytes.min(to.len_bytes);
        // SAFETY: the target is pinned memory that lives for ever; the source is a piece of the budget at least as long.
        let done = unsafe { sys::cuMemcpyDtoHAsync_v2(to.at.cast::<c_void>(), from.0, len, self.stream) };
        check("cuMemcpyDtoHAsync", done)
    }

    fn launch(&self, launch: &Launch) -> Result<(), DriverError> {
        self.enter()?;
        let (function, [x, y, z]) = (self.function(launch)?, launch.grid());
        let mut args = pointers(launch);
        let (block, shared) = (launch.block(), launch.shared_bytes());
        // SAFETY: the backend made the arguments in the kernel's order and number (`launches`, checked on the host by the same calls); the
        // driver copies them before it returns.
        let done = unsafe {
            sys::cuLaunchKernel(function, x, y, z, block, 1, 1, shared, self.stream, args.as_mut_ptr(), ptr::null_mut())
        };
        check("cuLaunchKernel", done)
    }

    fn event(&self) -> Result<Event, DriverError> {
        self.enter()?;
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: the answer's place outlives the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Event(event))
    }

    fn record(&self, event: &Event) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: both handles are alive: events and the stream are never destroyed.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, self.stream) })
    }

    fn query(&self, event: &Event) -> Result<bool, DriverError> {
        self.enter()?;
        // SAFETY: the event is alive: none is ever destroyed.
        match unsafe { sys::cuEventQuery(event.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    fn graph(&self, launches: &[Launch]) -> Result<Graph, DriverError> {
        self.enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: the answer's place outlives the call.
        check("cuGraphCreate", unsafe { sys::cuGraphCreate(&raw mut graph, 0) })?;
        let made = self.fill(graph, launches);
        // SAFETY: the template is not needed any more, whether or not it was instantiated.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made
    }

    fn replay(&self, graph: &Graph) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: the graph is instantiated and alive, and so is the stream; one thread launches it.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.0, self.stream) })
    }

    fn can_link(&self) -> Result<(), DriverError> {
        Nccl::load().map(drop)
    }

    fn link_name(&self) -> Result<LinkName, DriverError> {
        self.enter()?;
        Nccl::load()?.link_name()
    }

    fn link(&self, name: &LinkName, rank: usize, world: usize) -> Result<Link, DriverError> {
        self.enter()?;
        Nccl::load()?.link(name, rank, world)
    }

    fn is_linked(&self, link: &Link) -> Result<bool, DriverError> {
        self.enter()?;
        link.is_linked()
    }

    fn all_gather(&self, link: &Link, from: Address, to: Address, len_bytes: u64) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: both are pieces of the budget, at least as long; they are given to others for launches on the same stream alone. A driver's
        // stream is a runtime's as well.
        unsafe { link.all_gather(from, to, len_bytes, self.stream.cast()) }
    }

    fn part(&self, link: Link) {
        link.part();
    }
}

/// One thread copies slower than the device takes: a model's weights come out of mapped files, page after page.
fn copy_by_threads(to: &mut [u8], from: &[u8]) {
    let share = to.len().div_ceil(COPY_THREADS).max(COPY_MIN);
    if to.len() <= share {
        return to.copy_from_slice(from);
    }
    #[allow(
        clippy::disallowed_methods,
        reason = "a copy ends whenever one thread's would: what could hold it is a page of a file"
    )]
    thread::scope(|scope| {
        for (to, from) in to.chunks_mut(share).zip(from.chunks(share)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

/// Where each argument lies, as the driver wants it; it reads as many bytes as the kernel's parameter has, which are the word's low ones.
fn pointers(launch: &Launch) -> Vec<*mut c_void> {
    launch.args().iter().map(|word| ptr::from_ref(word).cast_mut().cast()).collect()
}

fn check(call: &'static str, result: sys::CUresult) -> Result<(), DriverError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the driver answers with a text that lives as long as it, or with none.
    let name = unsafe {
        let _ = sys::cuGetErrorName(result, &raw mut text);
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    Err(DriverError { call, reason: name.unwrap_or_else(|| format!("{result:?}")) })
}

fn named(error: DriverError, kernel: &str) -> DriverError {
    DriverError { reason: format!("{} of {kernel}", error.reason), ..error }
}
