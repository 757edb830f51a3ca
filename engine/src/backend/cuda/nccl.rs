//! NCCL, loaded at run time: the few calls that a link of devices needs, none of which waits. A communicator is made that blocks in no call
//! (`blocking = 0`): each may answer "in progress", and `ncclCommGetAsyncError` is asked until it is not (`ncclCommInitRankConfig` and
//! "Fault Tolerance" in NVIDIA's user guide). What the sum of several ranks is, is not left to it: its order would depend on how many rows
//! go together (EP4). It brings bytes, and `sum_ranks` adds.
#![allow(unsafe_code, reason = "a foreign library has no safe form; each block argues for itself")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

use super::driver::{Address, DriverError, LINK_NAME_BYTES, LinkName};

/// What a machine calls it: with the version of its interface where only programs are run, without where they are built.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The oldest one whose communicators can be made not to block in any call: 2.18, as NCCL writes it.
const VERSION_MIN: c_int = 21_800;
/// `ncclSuccess`, `ncclInProgress`, `ncclInt8`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const BYTES: c_int = 0;
/// `NCCL_API_MAGIC`, and what a setting is that nobody makes.
const MAGIC: c_uint = 0xcafe_beef;
const UNSET: c_int = c_int::MIN;

type Comm = *mut c_void;

/// `ncclConfig_t` as of 2.18; later versions read no more than `size` of it.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `ncclUniqueId`, which goes by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; LINK_NAME_BYTES]);

/// The library's functions. It is never unloaded: threads of its own run in it.
#[derive(Clone, Copy)]
pub struct Nccl {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    comm_init_rank_config: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    comm_abort: unsafe extern "C" fn(Comm) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error: unsafe extern "C" fn(Comm) -> *const c_char,
}

/// One rank's communicator.
pub struct Link {
    nccl: Nccl,
    comm: Comm,
}

// SAFETY: a communicator may be used by any thread, one at a time; a link is owned by one.
unsafe impl Send for Link {}

impl Nccl {
    /// This machine's.
    ///
    /// # Errors
    /// [`DriverError`]: there is none, or it is older than 2.18.
    pub fn load() -> Result<Self, DriverError> {
        let [run, built] = NAMES.map(Path::new);
        Self::load_from(run).or_else(|error| Self::load_from(built).map_err(|_| error))
    }

    /// The one of this file.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_from(path: &Path) -> Result<Self, DriverError> {
        // SAFETY: a library of that name is NCCL, which may be loaded by any program; it is not unloaded below.
        let library = unsafe { Library::new(path) }.map_err(|error| refused("NCCL cannot be loaded", &error))?;
        let mut version = 0;
        // SAFETY: the function has this type since NCCL 2.3; the answer's place outlives the call.
        let told = unsafe {
            symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(&library, c"ncclGetVersion")?(&raw mut version)
        };
        if told != SUCCESS || version < VERSION_MIN {
            return Err(refused("ncclGetVersion", &format!("{version} is older than {VERSION_MIN}")));
        }
        // SAFETY: each function has the type that nccl.h gives it, of which none has changed since that version.
        let nccl = unsafe {
            Self {
                get_unique_id: symbol(&library, c"ncclGetUniqueId")?,
                comm_init_rank_config: symbol(&library, c"ncclCommInitRankConfig")?,
                comm_get_async_error: symbol(&library, c"ncclCommGetAsyncError")?,
                comm_abort: symbol(&library, c"ncclCommAbort")?,
                all_gather: symbol(&library, c"ncclAllGather")?,
                get_error_string: symbol(&library, c"ncclGetErrorString")?,
                get_last_error: symbol(&library, c"ncclGetLastError")?,
            }
        };
        std::mem::forget(library);
        Ok(nccl)
    }

    /// A name for a new link; the process that asks for it answers those who come to it.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn link_name(&self) -> Result<LinkName, DriverError> {
        let mut id = UniqueId([0; LINK_NAME_BYTES]);
        // SAFETY: the answer's place outlives the call.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) }, ptr::null_mut())?;
        Ok(LinkName(id.0))
    }

    /// Begins to make `rank`'s end of a link between `world` devices, for the device whose context is this thread's.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn link(&self, name: &LinkName, rank: usize, world: usize) -> Result<Link, DriverError> {
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: VERSION_MIN.unsigned_abs(),
            blocking: 0,
            cga_cluster_size: UNSET,
            ctas_min: UNSET,
            ctas_max: UNSET,
            net_name: ptr::null(),
            split_share: UNSET,
        };
        let number = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
        let mut comm = ptr::null_mut();
        // SAFETY: both places outlive the call, which copies the settings before it returns.
        let begun = unsafe {
            (self.comm_init_rank_config)(&raw mut comm, number(world), UniqueId(name.0), number(rank), &raw mut config)
        };
        let link = Link { nccl: *self, comm };
        if let Err(error) = self.check("ncclCommInitRankConfig", begun, comm) {
            if !comm.is_null() {
                link.part();
            }
            return Err(error);
        }
        Ok(link)
    }

    /// True: it is done; false: it is in progress.
    fn check(&self, call: &'static str, result: c_int, comm: Comm) -> Result<bool, DriverError> {
        if result == SUCCESS || result == IN_PROGRESS {
            return Ok(result == SUCCESS);
        }
        // SAFETY: NCCL answers both with a text that ends and that lives until the next call, or with none.
        let [name, last] = unsafe { [text_at((self.get_error_string)(result)), text_at((self.get_last_error)(comm))] };
        let reason = if last.is_empty() { format!("{name} ({result})") } else { format!("{name} ({result}): {last}") };
        Err(DriverError { call, reason })
    }
}

impl Link {
    /// Whether it has begun all that it was asked for.
    ///
    /// # Errors
    /// What went wrong in it since, here or at another rank.
    pub fn is_linked(&self) -> Result<bool, DriverError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive: it ends with this value. The answer's place outlives the call.
        let asked = unsafe { (self.nccl.comm_get_async_error)(self.comm, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", asked, self.comm)?;
        self.nccl.check("a collective of NCCL", state, self.comm)
    }

    /// Begins to bring `len_bytes` of every rank's `from` to `to`, behind what `stream` (a `cudaStream_t`) was asked for.
    ///
    /// # Errors
    /// What NCCL says.
    ///
    /// # Safety
    /// `from` and `to` are memory of the link's device, `to` of so many bytes a rank, until all that `stream` was asked for is done.
    pub unsafe fn all_gather(
        &self,
        from: Address,
        to: Address,
        len_bytes: u64,
        stream: *mut c_void,
    ) -> Result<(), DriverError> {
        let count = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        // SAFETY: the communicator is alive; of the memory the caller says so.
        let begun = unsafe {
            (self.nccl.all_gather)(from.0 as *const c_void, to.0 as *mut c_void, count, BYTES, self.comm, stream)
        };
        self.nccl.check("ncclAllGather", begun, self.comm).map(drop)
    }

    /// Gives it up: its kernels end, whatever they wait for. That may take a while, and nobody waits for it.
    pub fn part(self) {
        let begun = std::thread::Builder::new().name("nccl-abort".into()).spawn(move || {
            let link = self;
            // SAFETY: the communicator is alive, and nobody has it any more.
            let _ = unsafe { (link.nccl.comm_abort)(link.comm) };
        });
        if let Err(error) = begun {
            tracing::warn!(%error, "a link of devices could not be given up; it ends with this process");
        }
    }
}

/// A function of the library.
///
/// # Safety
/// It has that type.
unsafe fn symbol<F: Copy>(library: &Library, name: &CStr) -> Result<F, DriverError> {
    // SAFETY: of the type the caller says so.
    let found = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    found.map(|function| *function).map_err(|error| refused("NCCL lacks a function", &error))
}

/// # Safety
/// It is a text that ends with a zero, or null.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller says so.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn refused(call: &'static str, reason: &dyn std::fmt::Display) -> DriverError {
    DriverError { call, reason: reason.to_string() }
}

#[cfg(test)]
#[path = "nccl_tests.rs"]
mod tests;
