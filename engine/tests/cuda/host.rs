//! A driver whose device is this processor: memory is memory, a launch runs the kernel at once, through the shim. All memory is NaN before
//! it is written.
#![allow(unsafe_code, reason = "a compiled library has no safe form; each block argues for itself")]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use engine::backend::cuda::driver::{Address, Driver, DriverError, Launch, LinkName};
use engine::backend::cuda::{CudaBackend, CudaOptions};

use crate::wire::{End, Wire};

/// What a backend of a test has of memory.
pub const BUDGET_BYTES: u64 = 48 << 20;
/// How the library is compiled: no product and sum become one where the source does not say so.
const FLAGS: [&str; 7] = ["-O2", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra"];

type LaunchFn = unsafe extern "C" fn(*const c_char, *const u32, u32, u32, *const u64, usize, u32) -> *const c_char;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The shim runs one launch at a time. Which kernels it has run.
static ONE: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Every kernel that was launched so far, by whichever test.
pub fn launched() -> BTreeSet<&'static str> {
    ONE.lock().unwrap().clone()
}

/// What products by warpgroups are on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warpgroups {
    Absent,
    Right,
    /// One bit of each is another.
    OffByABit,
}

pub struct Host {
    launch: LaunchFn,
    /// In which order the threads of a block run.
    order: AtomicU32,
    warpgroups: Warpgroups,
    /// What joins it with other ranks' devices, where there is anything.
    wire: Option<Arc<Wire>>,
    /// What was allocated; it lives as long as the driver.
    memory: Mutex<Vec<Vec<u8>>>,
}

/// The backend on the shim.
pub fn backend(options: CudaOptions) -> CudaBackend<Host> {
    ordered(options, 0)
}

/// The same, whose threads run in another order: 1 backwards, else shuffled.
pub fn ordered(options: CudaOptions, order: u32) -> CudaBackend<Host> {
    made(options, order, Warpgroups::Right)
}

/// As a device before 9.0, or after it.
pub fn without_warpgroups(options: CudaOptions) -> CudaBackend<Host> {
    made(options, 0, Warpgroups::Absent)
}

pub fn made(options: CudaOptions, order: u32, warpgroups: Warpgroups) -> CudaBackend<Host> {
    CudaBackend::new(driver(order, warpgroups, None), BUDGET_BYTES, options).unwrap()
}

/// One of several that are joined by `wire`; `None`: it has nothing to be joined by.
pub fn wired(options: CudaOptions, wire: Option<&Arc<Wire>>) -> CudaBackend<Host> {
    CudaBackend::new(driver(0, Warpgroups::Right, wire.cloned()), BUDGET_BYTES, options).unwrap()
}

fn driver(order: u32, warpgroups: Warpgroups, wire: Option<Arc<Wire>>) -> Host {
    Host { launch: library(), order: AtomicU32::new(order), warpgroups, wire, memory: Mutex::default() }
}

/// The kernels, compiled once a run.
fn library() -> LaunchFn {
    static LIBRARY: OnceLock<LaunchFn> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("libkernels-{}.so", std::process::id()));
        let mut compile = Command::new("g++");
        compile.args(FLAGS).arg("-Wno-unused-function").arg("-I").arg(&kernels);
        let compile = compile.arg(kernels.join("shim/host.cpp")).arg("-o").arg(&file);
        let done = compile.output().expect("g++ compiles the kernels for this processor: install it (package g++)");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success() && said.is_empty(), "g++: {said}");
        let (path, name) = (CString::new(file.to_str().unwrap()).unwrap(), c"truebeat_host_launch");
        // SAFETY: both texts end with a zero; the library has no constructors but those of C++'s own containers.
        let symbol = unsafe {
            let library = dlopen(path.as_ptr(), 2);
            assert!(!library.is_null(), "{} cannot be loaded", file.display());
            dlsym(library, name.as_ptr())
        };
        drop(std::fs::remove_file(&file));
        assert!(!symbol.is_null());
        // SAFETY: the function of that name in kernels/shim/host.cpp has this type.
        unsafe { std::mem::transmute::<*mut c_void, LaunchFn>(symbol) }
    })
}

impl Driver for Host {
    type Event = ();
    type Graph = Vec<Launch>;
    type Pinned = Vec<u8>;
    type Link = End;

    fn has_warpgroups(&self) -> bool {
        self.warpgroups != Warpgroups::Absent
    }

    fn allocate(&self, len_bytes: u64) -> Result<Address, DriverError> {
        // a kernel may count on what every device gives: places on multiples of 256
        let mut all = vec![0xffu8; usize::try_from(len_bytes).unwrap() + 256];
        let at = Address((all.as_mut_ptr() as u64).next_multiple_of(256));
        self.memory.lock().unwrap().push(all);
        Ok(at)
    }

    fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        Ok((BUDGET_BYTES, BUDGET_BYTES))
    }

    fn pin(&self, len_bytes: usize) -> Result<Vec<u8>, DriverError> {
        Ok(vec![0; len_bytes])
    }

    fn write(&self, pinned: &mut Vec<u8>, at: usize, bytes: &[u8]) {
        pinned[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, pinned: &Vec<u8>, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&pinned[at..at + out.len()]);
    }

    fn copy_in(&self, to: Address, from: &Vec<u8>, range: Range<usize>) -> Result<(), DriverError> {
        let bytes = &from[range];
        // SAFETY: the backend copies into pieces of the memory that `allocate` gave, which lives as long as this driver.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.0 as *mut u8, bytes.len()) };
        Ok(())
    }

    fn copy_out(&self, to: &mut Vec<u8>, from: Address, len_bytes: usize) -> Result<(), DriverError> {
        // SAFETY: as of `copy_in`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.0 as *const u8, to[..len_bytes].as_mut_ptr(), len_bytes) };
        Ok(())
    }

    fn launch(&self, launch: &Launch) -> Result<(), DriverError> {
        let (name, grid, args) = (CString::new(launch.kernel()).unwrap(), launch.grid(), launch.args());
        let (block, shared) = (launch.block(), launch.shared_bytes());
        let order = self.order.load(Ordering::Relaxed);
        let mut launched = ONE.lock().unwrap();
        launched.insert(launch.kernel());
        // SAFETY: the shim checks the name and the number of arguments; what they point to is the backend's, as on a device.
        let fault =
            unsafe { (self.launch)(name.as_ptr(), grid.as_ptr(), block, shared, args.as_ptr(), args.len(), order) };
        if fault.is_null() {
            if self.warpgroups == Warpgroups::OffByABit && launch.kernel().starts_with("wgmma_") {
                // SAFETY: the first argument of each is where its first value was just written.
                unsafe { *(args[0] as *mut u32) ^= 1 };
            }
            return Ok(());
        }
        // SAFETY: the shim answers with a text that lives until its next launch.
        let reason = unsafe { CStr::from_ptr(fault) }.to_string_lossy().into_owned();
        Err(DriverError { call: "truebeat_host_launch", reason })
    }

    fn event(&self) -> Result<(), DriverError> {
        Ok(())
    }

    fn record(&self, (): &()) -> Result<(), DriverError> {
        Ok(())
    }

    fn query(&self, (): &()) -> Result<bool, DriverError> {
        Ok(true)
    }

    fn graph(&self, launches: &[Launch]) -> Result<Vec<Launch>, DriverError> {
        Ok(launches.to_vec())
    }

    fn replay(&self, graph: &Vec<Launch>) -> Result<(), DriverError> {
        graph.iter().try_for_each(|launch| self.launch(launch))
    }

    fn can_link(&self) -> Result<(), DriverError> {
        Wire::name(self.wire.as_ref()).map(drop)
    }

    fn link_name(&self) -> Result<LinkName, DriverError> {
        Wire::name(self.wire.as_ref())
    }

    fn link(&self, name: &LinkName, rank: usize, world: usize) -> Result<End, DriverError> {
        Wire::link(self.wire.as_ref(), name, rank, world)
    }

    fn is_linked(&self, link: &End) -> Result<bool, DriverError> {
        link.is_linked()
    }

    /// A launch is done when it returns, and so is this.
    fn all_gather(&self, link: &End, from: Address, to: Address, len_bytes: u64) -> Result<(), DriverError> {
        let len = usize::try_from(len_bytes).unwrap();
        // SAFETY: as of `copy_in`: the backend brings what it has written.
        let mine = unsafe { std::slice::from_raw_parts(from.0 as *const u8, len) }.to_vec();
        let all = link.bring(mine)?;
        // SAFETY: the backend made room for so many bytes of each rank.
        unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), to.0 as *mut u8, all.len()) };
        Ok(())
    }

    fn part(&self, link: End) {
        link.part();
    }
}
