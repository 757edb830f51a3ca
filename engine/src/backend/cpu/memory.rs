//! Memory of matrices that are done with, for the next ones of the same thread. Without it each output of each operation of a long step
//! would be asked of the system anew: every page a fault, and cleared.

use std::cell::RefCell;

/// The allocator keeps fewer values than these by itself.
const VALUES_MIN: usize = 1 << 14;
/// More than one layer has at once.
const KEPT_MAX: usize = 12;
/// Values that a thread keeps in all: 128 MiB.
const KEPT_VALUES_MAX: usize = 32 << 20;

thread_local! {
    static KEPT: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// `len` values, whatever they are.
pub fn take(len: usize) -> Vec<f32> {
    let mut values = kept(len).unwrap_or_default();
    values.resize(len, 0.0);
    values
}

/// The smallest that holds as many. Where none does the largest goes: steps that grow replace what earlier ones had.
fn kept(len: usize) -> Option<Vec<f32>> {
    let find = |kept: &RefCell<Vec<Vec<f32>>>| {
        let mut kept = kept.try_borrow_mut().ok()?;
        let fits = kept.iter().enumerate().filter(|(_, values)| values.capacity() >= len);
        if let Some((best, _)) = fits.min_by_key(|(_, values)| values.capacity()) {
            return Some(kept.swap_remove(best));
        }
        let largest = kept.iter().enumerate().max_by_key(|(_, values)| values.capacity()).map(|(at, _)| at)?;
        drop(kept.swap_remove(largest));
        None
    };
    if len >= VALUES_MIN { KEPT.try_with(find).ok().flatten() } else { None }
}

/// Keeps the memory of `values`, if it is worth it: where there is too much, the smallest goes.
pub fn give(values: Vec<f32>) {
    if values.capacity() < VALUES_MIN {
        return;
    }
    let keep = |kept: &RefCell<Vec<Vec<f32>>>| {
        let Ok(mut kept) = kept.try_borrow_mut() else { return };
        kept.push(values);
        let many = |kept: &[Vec<f32>]| {
            kept.len() > KEPT_MAX || kept.iter().map(Vec::capacity).sum::<usize>() > KEPT_VALUES_MAX
        };
        while many(&kept)
            && let Some((smallest, _)) = kept.iter().enumerate().min_by_key(|(_, values)| values.capacity())
        {
            drop(kept.swap_remove(smallest));
        }
    };
    let _ = KEPT.try_with(keep); // a thread that ends keeps nothing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_taken_again_and_the_smallest_that_fits() {
        let (small, large) = (vec![1.0; VALUES_MIN], vec![2.0; 4 * VALUES_MIN]);
        let (small_at, large_at) = (small.as_ptr(), large.as_ptr());
        give(large);
        give(small);
        let (first, second) = (take(VALUES_MIN), take(VALUES_MIN + 1));
        assert_eq!((first.as_ptr(), first.len()), (small_at, VALUES_MIN));
        assert_eq!((second.as_ptr(), second.len()), (large_at, VALUES_MIN + 1));
        assert!(take(VALUES_MIN).iter().all(|value| *value == 0.0), "nothing is left: new memory");
    }

    #[test]
    fn it_is_bounded_and_small_ones_are_not_kept() {
        for n in 0..3 * KEPT_MAX {
            give(vec![0.0; VALUES_MIN + n]);
        }
        give(vec![0.0; VALUES_MIN - 1]);
        let kept = KEPT.with_borrow(|kept| kept.iter().map(Vec::capacity).min());
        assert_eq!((kept, KEPT.with_borrow(Vec::len)), (Some(VALUES_MIN + 2 * KEPT_MAX), KEPT_MAX));
        give(Vec::with_capacity(KEPT_VALUES_MAX));
        assert_eq!(KEPT.with_borrow(Vec::len), 1);
        give(Vec::with_capacity(KEPT_VALUES_MAX + 1));
        assert_eq!(KEPT.with_borrow(Vec::len), 0);
    }

    #[test]
    fn steps_that_grow_keep_no_more_than_the_last_of_them() {
        for rows in 1..40 {
            give(take(rows * VALUES_MIN));
        }
        assert_eq!(KEPT.with_borrow(|kept| kept.iter().map(Vec::len).collect::<Vec<_>>()), [39 * VALUES_MIN]);
    }
}
