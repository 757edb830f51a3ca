//! A driver that computes nothing and whose events stick when they are told to: the hang of S2, and nothing else.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use engine::backend::cuda::driver::{Address, Driver, DriverError, Launch, LinkName};

use crate::wire::{End, Wire};

/// What a test does to the device, and sees of it.
#[derive(Default)]
pub struct Knobs {
    /// No event is done from now on.
    pub stuck: AtomicBool,
    /// Of the events, only every so many looks one is done (0: at once).
    pub looks: AtomicUsize,
    /// Every call fails.
    pub broken: AtomicBool,
    pub launches: AtomicUsize,
    /// Of those, kernels that never end; nothing behind one is done.
    pub spins: AtomicUsize,
    pub graphs: AtomicUsize,
    pub replays: AtomicUsize,
    /// What joins it with other ranks' devices, where there is anything.
    pub wire: Option<Arc<Wire>>,
    /// Collectives that were asked for.
    pub collectives: AtomicUsize,
    /// Of those, as many are ever done: another rank's device does not come to the next one.
    pub collectives_max: Option<AtomicUsize>,
}

/// A mark: how often it was asked for, and how many collectives are before it.
#[derive(Default)]
pub struct Mark {
    looks: AtomicUsize,
    behind: AtomicUsize,
}

pub struct StuckDriver(pub Arc<Knobs>);

impl StuckDriver {
    fn call(&self, call: &'static str) -> Result<(), DriverError> {
        if self.0.broken.load(Relaxed) {
            return Err(DriverError { call, reason: "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned() });
        }
        Ok(())
    }
}

impl Driver for StuckDriver {
    type Event = Mark;
    type Graph = usize;
    type Pinned = ();
    type Link = End;

    fn has_warpgroups(&self) -> bool {
        false
    }

    fn allocate(&self, _: u64) -> Result<Address, DriverError> {
        self.call("cuMemAlloc").map(|()| Address(256))
    }

    fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        Ok((1 << 30, 1 << 30))
    }

    fn pin(&self, _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    fn write(&self, (): &mut (), _: usize, _: &[u8]) {}

    fn read(&self, (): &(), _: usize, _: &mut [u8]) {}

    fn copy_in(&self, _: Address, (): &(), _: Range<usize>) -> Result<(), DriverError> {
        self.call("cuMemcpyHtoDAsync")
    }

    fn copy_out(&self, (): &mut (), _: Address, _: usize) -> Result<(), DriverError> {
        self.call("cuMemcpyDtoHAsync")
    }

    fn launch(&self, launch: &Launch) -> Result<(), DriverError> {
        self.0.launches.fetch_add(1, Relaxed);
        if launch.kernel() == "spin" {
            self.0.spins.fetch_add(1, Relaxed);
            self.0.stuck.store(true, Relaxed);
        }
        self.call("cuLaunchKernel")
    }

    fn event(&self) -> Result<Mark, DriverError> {
        self.call("cuEventCreate").map(|()| Mark::default())
    }

    fn record(&self, event: &Mark) -> Result<(), DriverError> {
        event.looks.store(0, Relaxed);
        event.behind.store(self.0.collectives.load(Relaxed), Relaxed);
        self.call("cuEventRecord")
    }

    fn query(&self, event: &Mark) -> Result<bool, DriverError> {
        self.call("cuEventQuery")?;
        let done = self.0.collectives_max.as_ref().is_none_or(|max| event.behind.load(Relaxed) <= max.load(Relaxed));
        Ok(done && !self.0.stuck.load(Relaxed) && event.looks.fetch_add(1, Relaxed) >= self.0.looks.load(Relaxed))
    }

    fn graph(&self, launches: &[Launch]) -> Result<usize, DriverError> {
        self.0.graphs.fetch_add(1, Relaxed);
        self.call("cuGraphInstantiate").map(|()| launches.len())
    }

    fn replay(&self, _: &usize) -> Result<(), DriverError> {
        self.0.replays.fetch_add(1, Relaxed);
        self.call("cuGraphLaunch")
    }

    fn can_link(&self) -> Result<(), DriverError> {
        Wire::name(self.0.wire.as_ref()).map(drop)
    }

    fn link_name(&self) -> Result<LinkName, DriverError> {
        Wire::name(self.0.wire.as_ref())
    }

    fn link(&self, name: &LinkName, rank: usize, world: usize) -> Result<End, DriverError> {
        Wire::link(self.0.wire.as_ref(), name, rank, world)
    }

    fn is_linked(&self, link: &End) -> Result<bool, DriverError> {
        link.is_linked()
    }

    fn all_gather(&self, _: &End, _: Address, _: Address, _: u64) -> Result<(), DriverError> {
        self.0.collectives.fetch_add(1, Relaxed);
        self.call("ncclAllGather")
    }

    fn part(&self, link: End) {
        link.part();
    }
}
