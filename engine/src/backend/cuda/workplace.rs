//! Room that one kernel after another works in: the parts of sums that are still to be joined, and inputs of products in bf16.

use super::device::Device;
use super::driver::{Address, Driver};
use super::memory::Slice;
use crate::backend::DeviceFault;

/// What kernels need beside their operands, from one to the next. Kernels run in order, so that one place does for all of a step.
#[derive(Debug, Default)]
pub(super) struct Workplace {
    parts: Option<Slice>,
    rounded: Option<Slice>,
    /// Inputs as warpgroups read them, in turn: a kernel that reads one may write the next.
    packed: [Option<Slice>; 2],
    /// The newest lies in the second of them.
    second: bool,
    /// What is rounded or packed there is the input of the product before.
    pub fresh: bool,
}

impl Workplace {
    /// A step begins, with the first of two rooms, so that equal steps make equal launches.
    pub fn begin(&mut self) {
        (self.fresh, self.second) = (false, true);
    }

    fn room<D: Driver>(
        device: &mut Device<D>,
        which: fn(&mut Self) -> &mut Option<Slice>,
        bytes: u64,
    ) -> Result<Address, DeviceFault> {
        let kept = which(&mut device.workplace).as_ref().filter(|slice| slice.len_bytes() >= bytes).map(Slice::at);
        if let Some(at) = kept {
            return Ok(at);
        }
        // the old one is not needed: kernels that use it come before those that use what lies there next
        *which(&mut device.workplace) = None;
        let slice = device.take(bytes)?;
        let at = slice.at();
        *which(&mut device.workplace) = Some(slice);
        Ok(at)
    }
}

impl<D: Driver> Device<D> {
    /// Room for the parts of sums, until the next call.
    pub(super) fn parts(&mut self, bytes: u64) -> Result<Address, DeviceFault> {
        Workplace::room(self, |work| &mut work.parts, bytes)
    }

    /// Room for an input as warpgroups read it, until the next but one; `again`: the same room.
    pub(super) fn packed_room(&mut self, bytes: u64, again: bool) -> Result<Address, DeviceFault> {
        self.workplace.second ^= !again;
        let which: fn(&mut Workplace) -> &mut Option<Slice> =
            if self.workplace.second { |work| &mut work.packed[1] } else { |work| &mut work.packed[0] };
        Workplace::room(self, which, bytes)
    }

    /// Room for an input of products, until the next that has another.
    pub(super) fn rounded_room(&mut self, bytes: u64) -> Result<Address, DeviceFault> {
        Workplace::room(self, |work| &mut work.rounded, bytes)
    }
}
