//! In place of NVIDIA's driver in a build without it: the same type, of which there is none.

use std::ops::Range;

use super::driver::{Address, Driver, DriverError, Launch, LinkName};

/// A device that this build cannot have.
#[derive(Debug)]
pub enum Nvidia {}

impl Nvidia {
    /// An error that says how to build otherwise.
    ///
    /// # Errors
    /// Always.
    pub fn open(_ordinal: u32, _image: &[u8]) -> Result<Self, DriverError> {
        let reason = "this program was built without CUDA: build it with --features engine/cuda".to_owned();
        Err(DriverError { call: "opening the device", reason })
    }
}

impl Driver for Nvidia {
    type Event = ();
    type Graph = ();
    type Pinned = ();
    type Link = ();

    fn has_warpgroups(&self) -> bool {
        match *self {}
    }

    fn allocate(&self, _: u64) -> Result<Address, DriverError> {
        match *self {}
    }

    fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        match *self {}
    }

    fn pin(&self, _: usize) -> Result<(), DriverError> {
        match *self {}
    }

    fn write(&self, (): &mut (), _: usize, _: &[u8]) {
        match *self {}
    }

    fn read(&self, (): &(), _: usize, _: &mut [u8]) {
        match *self {}
    }

    fn copy_in(&self, _: Address, (): &(), _: Range<usize>) -> Result<(), DriverError> {
        match *self {}
    }

    fn copy_out(&self, (): &mut (), _: Address, _: usize) -> Result<(), DriverError> {
        match *self {}
    }

    fn launch(&self, _: &Launch) -> Result<(), DriverError> {
        match *self {}
    }

    fn event(&self) -> Result<(), DriverError> {
        match *self {}
    }

    fn record(&self, (): &()) -> Result<(), DriverError> {
        match *self {}
    }

    fn query(&self, (): &()) -> Result<bool, DriverError> {
        match *self {}
    }

    fn graph(&self, _: &[Launch]) -> Result<(), DriverError> {
        match *self {}
    }

    fn replay(&self, (): &()) -> Result<(), DriverError> {
        match *self {}
    }

    fn can_link(&self) -> Result<(), DriverError> {
        match *self {}
    }

    fn link_name(&self) -> Result<LinkName, DriverError> {
        match *self {}
    }

    fn link(&self, _: &LinkName, _: usize, _: usize) -> Result<(), DriverError> {
        match *self {}
    }

    fn is_linked(&self, (): &()) -> Result<bool, DriverError> {
        match *self {}
    }

    fn all_gather(&self, (): &(), _: Address, _: Address, _: u64) -> Result<(), DriverError> {
        match *self {}
    }

    fn part(&self, (): ()) {
        match *self {}
    }
}
