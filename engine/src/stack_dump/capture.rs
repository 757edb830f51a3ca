//! The part of the stack dump that runs inside a signal handler: on the thread whose stack is wanted, wherever that thread stands.
//!
//! Only what is async-signal-safe: no lock, no allocation, no panic. The unwinder is the platform's (`_Unwind_Backtrace`), called once
//! beforehand so that its first-use work is done. The addresses go into one static slot, which is lent to one thread at a time; their
//! names are looked up elsewhere.
#![allow(unsafe_code, reason = "signal handlers and the unwinder have no safe form; each block argues for itself")]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// H10: its default action is to be ignored, so that one that goes astray ends nobody.
pub const SIGNAL: Signal = Signal::SIGURG;
/// Calls of one thread that are kept.
pub const FRAMES_MAX: usize = 96;
/// How often the asker looks whether the thread has answered.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// A thread that has begun to answer gets this much more.
const FINISH_MAX: Duration = Duration::from_millis(500);

/// The write end of the pipe by which the handler wakes the dump thread; -1 before [`install`].
static DOORBELL: AtomicI32 = AtomicI32::new(-1);
/// Whose turn it is: 0 nobody's, a thread id: asked, its negative: it is writing.
static ASKED: AtomicI32 = AtomicI32::new(0);
/// The thread whose frames are complete.
static ANSWERED: AtomicI32 = AtomicI32::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
static FRAMES: [AtomicUsize; FRAMES_MAX] = [const { AtomicUsize::new(0) }; FRAMES_MAX];

unsafe extern "C" {
    fn _Unwind_Backtrace(frame: extern "C" fn(*mut c_void, *mut c_void) -> c_int, argument: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut c_void, before: *mut c_int) -> usize;
}

/// Why there are no frames of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Missed {
    #[error("the thread is gone")]
    Gone,
    #[error("no answer: it sits in the kernel and takes no signal")]
    Silent,
    #[error("its unwinder did not end")]
    Stuck,
}

/// Puts the handler in place. The returned socket holds a byte for each request that arrived since the last read.
pub fn install() -> io::Result<UnixStream> {
    let (bell, listener) = UnixStream::pair()?;
    bell.set_nonblocking(true)?;
    // Its first call may load and allocate: here it may.
    walk(0);
    LEN.store(0, Ordering::Relaxed);
    DOORBELL.store(bell.into_raw_fd(), Ordering::Release);
    let flags = SaFlags::SA_RESTART | SaFlags::SA_SIGINFO;
    let action = SigAction::new(SigHandler::SigAction(handler), flags, SigSet::empty());
    // SAFETY: the handler does only what is async-signal-safe, and statics are all it touches.
    unsafe { sigaction(SIGNAL, &action) }?;
    Ok(listener)
}

/// Would a signal be heard?
pub fn listens() -> bool {
    DOORBELL.load(Ordering::Acquire) >= 0
}

/// The calls of one thread of this process, innermost first: addresses within the calling instruction. Called by one thread alone.
pub fn frames_of(tid: i32, wait_max: Duration) -> Result<Vec<usize>, Missed> {
    if ASKED.compare_exchange(0, tid, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // An earlier one never ended and still owns the slot.
        return Err(Missed::Stuck);
    }
    ANSWERED.store(0, Ordering::Release);
    let pid = std::process::id().cast_signed();
    // SAFETY: tgkill takes three numbers and touches no memory of ours.
    if unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, SIGNAL as c_int) } != 0 {
        ASKED.store(0, Ordering::Release);
        return Err(Missed::Gone);
    }
    if !answered(tid, wait_max) {
        if ASKED.compare_exchange(tid, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return Err(Missed::Silent);
        }
        if !answered(tid, FINISH_MAX) {
            return Err(Missed::Stuck);
        }
    }
    let len = LEN.load(Ordering::Acquire).min(FRAMES_MAX);
    let frames = FRAMES.iter().take(len).map(|frame| frame.load(Ordering::Relaxed)).collect();
    ASKED.store(0, Ordering::Release);
    Ok(frames)
}

fn answered(tid: i32, wait_max: Duration) -> bool {
    let since = Instant::now();
    while ANSWERED.load(Ordering::Acquire) != tid {
        if since.elapsed() >= wait_max {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    true
}

/// From this process for one thread: that thread's frames are wanted. From anybody else: the dump thread is woken.
extern "C" fn handler(_signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a valid siginfo to a handler with SA_SIGINFO; its pid is set for every signal sent by a process.
    // errno is this thread's own and is put back, for the interrupted code may be about to read it.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let own = (*info).si_code == libc::SI_TKILL && (*info).si_pid() == libc::getpid();
        if own {
            answer(interrupted_at(context));
        } else {
            let byte = 1_u8;
            // full: it is awake already
            libc::write(DOORBELL.load(Ordering::Acquire), (&raw const byte).cast(), 1);
        }
        *errno = before;
    }
}

fn answer(interrupted_at: usize) {
    // SAFETY: gettid takes nothing and cannot fail.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) } as i32;
    if ASKED.compare_exchange(tid, -tid, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        walk(interrupted_at);
        ANSWERED.store(tid, Ordering::Release);
    }
}

/// The address at which the signal found the thread; 0 where this platform's context is not known.
fn interrupted_at(context: *mut c_void) -> usize {
    // SAFETY: the third argument of a handler with SA_SIGINFO is a valid ucontext of this platform.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    #[cfg(target_arch = "x86_64")]
    let address = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    #[cfg(target_arch = "aarch64")]
    let address = context.uc_mcontext.pc as usize;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let address = {
        let _ = context;
        0
    };
    address
}

/// What a walk knows; lives on the stack of the thread that walks.
struct Walk {
    /// Frames before this address are the handler's own.
    from: usize,
    begun: bool,
    len: usize,
}

/// This thread's calls from address `from` outwards into [`FRAMES`]. Where `from` is not met, its address alone.
fn walk(from: usize) {
    let mut walk = Walk { from, begun: from == 0, len: 0 };
    // SAFETY: `keep` gets back the pointer to `walk`, which outlives the call; it neither unwinds nor keeps the pointer.
    unsafe { _Unwind_Backtrace(keep, (&raw mut walk).cast()) };
    if walk.len == 0 && from != 0 {
        FRAMES[0].store(from, Ordering::Relaxed);
        walk.len = 1;
    }
    LEN.store(walk.len, Ordering::Release);
}

extern "C" fn keep(context: *mut c_void, argument: *mut c_void) -> c_int {
    const GO_ON: c_int = 0;
    const END: c_int = 5;
    // SAFETY: `argument` is the `Walk` of the call in `walk`, and nobody else has it now.
    let walk = unsafe { &mut *argument.cast::<Walk>() };
    let mut exact: c_int = 0;
    // SAFETY: `context` is the unwinder's own and valid during this call.
    let address = unsafe { _Unwind_GetIPInfo(context, &raw mut exact) };
    walk.begun |= address == walk.from;
    if !walk.begun {
        return GO_ON;
    }
    let Some(place) = FRAMES.get(walk.len) else { return END };
    // A return address is one past the call: the call itself is what has a name and a line.
    let address = if exact == 0 { address.saturating_sub(1) } else { address };
    if address == 0 {
        return END;
    }
    place.store(address, Ordering::Relaxed);
    walk.len += 1;
    GO_ON
}
