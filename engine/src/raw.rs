//! Vectors, mappings and lent closures: all that has no safe form, behind a face that is safe; the only `unsafe` of this crate.
//!
//! An instruction set is a token ([`Avx512`], [`Avx2`]) that exists only where the CPU has it, so its methods need no further
//! check. Kernels are written once over [`Simd`] and run through [`Simd::run`], which compiles them for that set.
//! Sixteen lanes everywhere and one order of folding them: AVX2 and AVX-512 give the same bits, but for bf16 times bf16.
#![allow(unsafe_code, reason = "intrinsics, mmap and a lent closure have no safe form; each block argues for itself")]
#![allow(clippy::inline_always, reason = "a kernel must be inlined into the function that enables its instructions")]

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cells;
pub mod large;
mod portable;
pub mod shared;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use cells::{cells_of, values_of};
pub use portable::{Portable, pair_of, to_bf16};

/// A computation that is compiled anew for each instruction set.
pub trait Op {
    type Out;
    /// Must be `#[inline(always)]`, so that it is compiled with the instructions of `S`.
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Sixteen lanes of f32 or i32, or 64 bytes.
pub trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;
    type I: Copy;
    type B: Copy;
    /// Enough registers for 24 accumulators.
    const WIDE: bool;
    /// [`Self::dot_bf16`] is one instruction, which wants nothing unpacked.
    const PAIRS: bool = false;

    fn run<O: Op>(self, op: O) -> O::Out;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; 16]) -> Self::V;
    /// Sixteen f32, little endian.
    fn load_f32(self, x: &[u8; 64]) -> Self::V;
    fn store(self, x: Self::V, out: &mut [f32; 16]);
    /// Into cells that other threads may look at, as their bits; relaxed.
    #[inline(always)]
    fn store_cells(self, x: Self::V, cells: &[AtomicU32; 16]) {
        let mut values = [0.0; 16];
        self.store(x, &mut values);
        cells.iter().zip(values).for_each(|(cell, value)| cell.store(value.to_bits(), Ordering::Relaxed));
    }
    /// Sixteen bf16, little endian.
    fn load_bf16(self, x: &[u8; 32]) -> Self::V;
    /// One of each of sixteen pairs of bf16, little endian: the first or the second.
    fn load_bf16_of_pairs(self, x: &[u8; 64], second: bool) -> Self::V;
    /// Sixteen f16, little endian.
    fn load_f16(self, x: &[u8; 32]) -> Self::V;
    fn load_u8(self, x: &[u8; 16]) -> Self::V;
    fn load_i8(self, x: &[u8; 16]) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`; rounded once where the CPU can, twice on the portable path.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `x · 2^n` by whole numbers, where `bits` is `n << 23`: of lanes that are neither zero nor made too small by it.
    fn shift_exponent(self, x: Self::V, bits: i32) -> Self::V;
    /// Sum of the lanes, by halves.
    fn fold(self, x: Self::V) -> f32;
    /// The sums of four, each as by [`Self::fold`], into cells that other threads may look at.
    #[inline(always)]
    fn fold_into(self, x: [Self::V; 4], cells: &[AtomicU32; 4]) {
        for (cell, x) in cells.iter().zip(x) {
            cell.store(self.fold(x).to_bits(), Ordering::Relaxed);
        }
    }
    /// Rounded to bf16 as by [`to_bf16`], two in a pair as they come, the first in the low half. Where an instruction does it, numbers too
    /// small for a full mantissa become zero, as they are to [`Self::dot_bf16`] there.
    #[inline(always)]
    fn to_pairs(self, x: Self::V) -> [i32; 8] {
        pairs_by_loop(self, x)
    }
    /// Each lane gains the products of its two bf16 of `a` and `b`.
    #[inline(always)]
    fn dot_bf16(self, acc: Self::V, a: &[u8; 64], b: &[u8; 64]) -> Self::V {
        dot_by_halves(self, acc, a, b)
    }
    /// The same with one pair for all lanes, its first in the low half.
    #[inline(always)]
    fn dot_bf16_pair(self, acc: Self::V, a: &[u8; 64], pair: i32) -> Self::V {
        self.dot_bf16(acc, a, &sixteen_times(pair))
    }

    fn splat_i32(self, x: i32) -> Self::I;
    fn load_i32(self, x: &[i32; 16]) -> Self::I;
    fn to_f32(self, x: Self::I) -> Self::V;
    fn load_bytes(self, x: &[u8; 64]) -> Self::B;
    /// Asks for the line that lies `ahead` bytes after `x`, wherever that is: a wish.
    #[inline(always)]
    fn prefetch(self, _x: &[u8], _ahead: usize) {}
    /// The same for the second-level cache: more of these can be under way at a time.
    #[inline(always)]
    fn prefetch_far(self, _x: &[u8], _ahead: usize) {}
    /// Each lane gains the products of its four unsigned bytes of `w` with the four signed bytes of `x`.
    fn dot_u8_i8(self, acc: Self::I, w: Self::B, x: i32) -> Self::I;
    /// What sums of [`Self::dot_high`] begin with: 128 times the sum of all inputs to come, negative.
    #[inline(always)]
    fn begin_high(self, too_high: i32) -> Self::I {
        self.splat_i32(too_high)
    }
    /// As [`Self::dot_u8_i8`], of weights that are stored 128 too high. No input is -128.
    #[inline(always)]
    fn dot_high(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        self.dot_u8_i8(acc, w, x)
    }
    /// A few products that `sums` shall gain by [`Self::end_few`]: in halves of lanes, where a set has no quicker way.
    #[inline(always)]
    fn begin_few(self, sums: Self::I) -> Self::I {
        sums
    }
    /// As [`Self::dot_u8_i8`], up to eight times with weights below 16, or twice with weights below 64. No input is -128.
    #[inline(always)]
    fn dot_few(self, few: Self::I, w: Self::B, x: i32) -> Self::I {
        self.dot_u8_i8(few, w, x)
    }
    #[inline(always)]
    fn end_few(self, _sums: Self::I, few: Self::I) -> Self::I {
        few
    }
    /// Bytes of `first` and `second` side by side in each lane, as halves of 16 bits.
    fn load_u8_pairs(self, first: &[u8; 16], second: &[u8; 16]) -> Self::I;
    /// Each lane gains the products of its two signed halves of `w` with the two of `x`.
    fn dot_i16(self, acc: Self::I, w: Self::I, x: i32) -> Self::I;
    /// Low four bits of each byte.
    fn low(self, x: Self::B) -> Self::B;
    /// High four bits of each byte.
    fn high(self, x: Self::B) -> Self::B;
    /// `nibbles + 16 · (two bits of hi at 2 × pair)` in each byte.
    fn with_two_bits(self, nibbles: Self::B, hi: Self::B, pair: usize) -> Self::B;
}

/// [`Simd::to_pairs`] where no instruction does it.
#[inline(always)]
fn pairs_by_loop<S: Simd>(s: S, x: S::V) -> [i32; 8] {
    let mut values = [0.0; 16];
    s.store(x, &mut values);
    let mut pairs = [0; 8];
    for (pair, [first, second]) in pairs.iter_mut().zip(values.as_chunks().0) {
        *pair = pair_of(*first, *second);
    }
    pairs
}

/// [`Simd::dot_bf16`] where no instruction does it: two products in f32, the second of each pair first.
#[inline(always)]
fn dot_by_halves<S: Simd>(s: S, acc: S::V, a: &[u8; 64], b: &[u8; 64]) -> S::V {
    let second = s.fma(s.load_bf16_of_pairs(a, true), s.load_bf16_of_pairs(b, true), acc);
    s.fma(s.load_bf16_of_pairs(a, false), s.load_bf16_of_pairs(b, false), second)
}

#[inline(always)]
fn sixteen_times(pair: i32) -> [u8; 64] {
    let mut pairs = [0; 64];
    pairs.as_chunks_mut().0.iter_mut().for_each(|place| *place = pair.to_le_bytes());
    pairs
}

/// 64 bytes on one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct Line(pub [u8; 64]);

/// A whole file, mapped for reading.
///
/// Whoever truncates a model's file while it is served kills the engine (SIGBUS): the price of weights that are shared by
/// all processes and need no second copy.
#[derive(Debug)]
pub struct FileMap(memmap2::Mmap);

impl FileMap {
    /// Maps `file`.
    ///
    /// # Errors
    /// What mmap says.
    pub fn new(file: &File) -> std::io::Result<Self> {
        // SAFETY: the mapping is private and read-only. Another process that writes to the file can change the numbers seen
        // here; they are only ever read as plain bytes, for which every value is valid and none is checked twice.
        let map = unsafe { memmap2::Mmap::map(file)? };
        // large pages where the file system has them: a wish, not a need
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self(map))
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A closure lent to other threads for `total` calls, each with its own index.
#[derive(Debug)]
pub struct Task {
    f: Lent,
    total: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    panicked: AtomicBool,
}

#[derive(Clone, Copy)]
struct Lent(*const (dyn Fn(usize) + Sync));

// SAFETY: the closure is `Sync`, so a reference to it may be used from any thread; that it is still alive is `lend`'s duty.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lent")
    }
}

impl Task {
    /// Makes calls until none is left to begin.
    pub fn help(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::AcqRel);
            if index >= self.total {
                return;
            }
            // counted even when the call panics: nobody may wait for it for ever
            let _counted = Counted(self);
            // SAFETY: `index` was claimed and is not yet counted as done, and `lend` does not return before all that were
            // claimed are counted: the closure is alive.
            unsafe { (*self.f.0)(index) };
        }
    }

    /// Whether every call has ended.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) >= self.total
    }
}

struct Counted<'a>(&'a Task);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked.store(true, Ordering::Relaxed);
        }
        self.0.done.fetch_add(1, Ordering::AcqRel);
    }
}

/// Calls `f(0)` to `f(total - 1)`: here and by whoever `publish` hands the task to. `wait` is called again and again while
/// others are still at it; it must not block without a time limit (E1).
pub fn lend(f: &(dyn Fn(usize) + Sync), total: usize, publish: impl FnOnce(&Arc<Task>), wait: impl Fn()) {
    // SAFETY: only the lifetime is forgotten; `help` says why no call outlives the closure.
    let forever: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(f) };
    let counters = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (f, panicked) = (Lent(std::ptr::from_ref(forever)), AtomicBool::new(false));
    let task = Arc::new(Task { f, total, next: counters.0, done: counters.1, panicked });
    {
        // waits on every way out of here, a panic included
        let _ended = Ended { task: &task, wait: &wait };
        publish(&task);
        task.help();
    }
    if task.panicked.load(Ordering::Relaxed) {
        // as a scoped thread's join does: a kernel's bug must not pass for a result
        std::panic::resume_unwind(Box::new("a part of a parallel computation failed"));
    }
}

/// The one wait of the engine that no time limit may end: whoever is waited for computes on what the caller lent, and to return before would leave
/// it memory that is gone. It ends all the same. What is counted is calls of `f` on threads of this process, which are arithmetic of bounded
/// length, or panic, which counts too ([`Counted`]); a thread that never gets to its end is the guard's affair (`guard.rs`) and that of whoever
/// waits for the step: both have deadlines, wait for nothing of this, and end the process, which ends its threads and this wait with it.
struct Ended<'a, W: Fn()> {
    task: &'a Task,
    wait: &'a W,
}

impl<W: Fn()> Drop for Ended<'_, W> {
    fn drop(&mut self) {
        // nothing more is begun; what nobody has claimed counts as done
        let claimed = self.task.next.fetch_add(self.task.total, Ordering::AcqRel).min(self.task.total);
        self.task.done.fetch_add(self.task.total - claimed, Ordering::AcqRel);
        // not bounded, for memory's sake: see above
        while !self.task.is_done() {
            (self.wait)();
        }
    }
}
