//! The seam to a driver: the few calls that the backend makes, none of which waits. `nvidia` makes them of CUDA; tests have a driver whose
//! device is this processor, and one whose events stick.

use std::ops::Range;

use thiserror::Error;

/// Arguments that a kernel takes, at most.
const ARGS_MAX: usize = 16;

/// A place in the device's memory, in bytes; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Address(pub u64);

impl Address {
    /// The place so many bytes further on.
    pub fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A call that the driver refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call}: {reason}")]
pub struct DriverError {
    /// The driver's own name of the call.
    pub call: &'static str,
    pub reason: String,
}

/// One kernel with everything that it is launched with: two of them that are equal do the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    kernel: &'static str,
    /// Blocks in each direction.
    grid: [u32; 3],
    /// Threads of a block: a multiple of 32.
    block: u32,
    shared_bytes: u32,
    args: [u64; ARGS_MAX],
    args_len: usize,
}

impl Launch {
    /// `args` are the kernel's, in its order. For this module alone: what they point to is its duty.
    pub(super) fn new(kernel: &'static str, (grid, block, shared_bytes): ([u32; 3], u32, u32), args: &[u64]) -> Self {
        let mut all = [0; ARGS_MAX];
        all.iter_mut().zip(args).for_each(|(place, arg)| *place = *arg);
        Self { kernel, grid, block, shared_bytes, args: all, args_len: args.len().min(ARGS_MAX) }
    }

    /// As in `kernels/kernels.inc`.
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// Blocks in each direction.
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// Threads of a block.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Dynamic shared memory of a block.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// A word an argument, in its low bytes.
    pub fn args(&self) -> &[u64] {
        &self.args[..self.args_len]
    }
}

/// Bytes of a link's name, as NCCL has them.
pub const LINK_NAME_BYTES: usize = 128;

/// What the ends of one link know it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkName(pub [u8; LINK_NAME_BYTES]);

impl Default for LinkName {
    fn default() -> Self {
        Self([0; LINK_NAME_BYTES])
    }
}

/// One device with one stream: what is asked for is done in that order. No call may wait for the device (E1).
pub trait Driver: Send + Sync + 'static {
    /// A mark in the stream.
    type Event: Send;
    /// Launches as one.
    type Graph: Send;
    /// Main memory that the device reads and writes by itself.
    type Pinned: Send;
    /// This device's end of a link with those of other ranks.
    type Link: Send;

    /// Whether the kernels of `kernels/wgmma.cu` run on it: of all that their image is made for, devices of 9.0.
    fn has_warpgroups(&self) -> bool;

    /// Device memory for as long as the process lives.
    ///
    /// # Errors
    /// [`DriverError`], as of every call here.
    fn allocate(&self, len_bytes: u64) -> Result<Address, DriverError>;

    /// Memory of the device that is free now, and all of it, in bytes.
    ///
    /// # Errors
    /// As above.
    fn memory_bytes(&self) -> Result<(u64, u64), DriverError>;

    /// Main memory for copies, for as long as the process lives.
    ///
    /// # Errors
    /// As above.
    fn pin(&self, len_bytes: usize) -> Result<Self::Pinned, DriverError>;

    /// Writes to pinned memory; bytes beyond its end are dropped.
    fn write(&self, pinned: &mut Self::Pinned, at: usize, bytes: &[u8]);

    /// Reads from pinned memory; bytes beyond its end stay as they are.
    fn read(&self, pinned: &Self::Pinned, at: usize, out: &mut [u8]);

    /// Begins a copy to the device.
    ///
    /// # Errors
    /// As above.
    fn copy_in(&self, to: Address, from: &Self::Pinned, range: Range<usize>) -> Result<(), DriverError>;

    /// Begins a copy from the device to the beginning of `to`.
    ///
    /// # Errors
    /// As above.
    fn copy_out(&self, to: &mut Self::Pinned, from: Address, len_bytes: usize) -> Result<(), DriverError>;

    /// Begins a kernel.
    ///
    /// # Errors
    /// As above.
    fn launch(&self, launch: &Launch) -> Result<(), DriverError>;

    /// A new event.
    ///
    /// # Errors
    /// As above.
    fn event(&self) -> Result<Self::Event, DriverError>;

    /// Puts the event behind all that was asked for.
    ///
    /// # Errors
    /// As above.
    fn record(&self, event: &Self::Event) -> Result<(), DriverError>;

    /// Whether all before the event is done (`cuEventQuery`).
    ///
    /// # Errors
    /// As above, and what went wrong on the device before it.
    fn query(&self, event: &Self::Event) -> Result<bool, DriverError>;

    /// Makes launches into a graph, one after another; slow, and on any thread.
    ///
    /// # Errors
    /// As above.
    fn graph(&self, launches: &[Launch]) -> Result<Self::Graph, DriverError>;

    /// Begins all launches of a graph.
    ///
    /// # Errors
    /// As above.
    fn replay(&self, graph: &Self::Graph) -> Result<(), DriverError>;

    /// Whether this device can have a link.
    ///
    /// # Errors
    /// Where it cannot, and why.
    fn can_link(&self) -> Result<(), DriverError>;

    /// A name for a new link; this process answers those who come to it.
    ///
    /// # Errors
    /// As above.
    fn link_name(&self) -> Result<LinkName, DriverError>;

    /// Begins to make `rank`'s end of the link of that name between `world` devices.
    ///
    /// # Errors
    /// As above.
    fn link(&self, name: &LinkName, rank: usize, world: usize) -> Result<Self::Link, DriverError>;

    /// Whether the link is whole, and has begun all that it was asked for; nothing more may be asked of it before.
    ///
    /// # Errors
    /// What went wrong in it, on this device or another.
    fn is_linked(&self, link: &Self::Link) -> Result<bool, DriverError>;

    /// Begins to bring `len_bytes` of each rank's `from` to all, to `to`, one rank's behind the other.
    ///
    /// # Errors
    /// As above.
    fn all_gather(&self, link: &Self::Link, from: Address, to: Address, len_bytes: u64) -> Result<(), DriverError>;

    /// Gives a link up: what it has begun ends, and is worth nothing. Does not wait for that.
    fn part(&self, link: Self::Link);
}
