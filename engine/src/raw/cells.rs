//! Numbers as cells that threads fill together, and back: in the same memory, which a loop over them would read and write once more.
#![allow(unsafe_code, reason = "one vector taken for another has no safe form")]

use std::mem::ManuallyDrop;
use std::sync::atomic::AtomicU32;

/// The bits of these numbers as cells.
pub fn cells_of(values: Vec<f32>) -> Vec<AtomicU32> {
    let mut values = ManuallyDrop::new(values);
    // SAFETY: all three parts are those of a vector that is forgotten; both types have one size and alignment, and any bits are both.
    unsafe { Vec::from_raw_parts(values.as_mut_ptr().cast(), values.len(), values.capacity()) }
}

/// The numbers whose bits the cells hold.
pub fn values_of(cells: Vec<AtomicU32>) -> Vec<f32> {
    let mut cells = ManuallyDrop::new(cells);
    // SAFETY: as above; nobody shares cells that are owned.
    unsafe { Vec::from_raw_parts(cells.as_mut_ptr().cast(), cells.len(), cells.capacity()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn numbers_stay_where_they_are_and_what_they_are() {
        let mut values = Vec::with_capacity(9);
        values.extend([1.0, -0.0, f32::NAN]);
        let at = values.as_ptr().addr();
        let cells = cells_of(values);
        cells[0].store(2.0_f32.to_bits(), Ordering::Relaxed);
        let values = values_of(cells);
        assert_eq!((values.as_ptr().addr(), values.capacity()), (at, 9));
        let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, [2.0, -0.0, f32::NAN].map(f32::to_bits));
    }
}
