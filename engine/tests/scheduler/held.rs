//! Bytes that this thread holds, counted by the allocator of these tests: what a scheduler keeps of requests that are gone is seen to the
//! byte, whatever runs beside it. The system's word (resident pages) would not show a map that grows by a few bytes a request.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static HELD_BYTES: Cell<i64> = const { Cell::new(0) };
}

/// What this thread has asked for and not given back. Means something where one thread does both.
pub fn held_bytes() -> i64 {
    HELD_BYTES.get()
}

fn count(bytes: i64) {
    // a thread that ends may have lost its cell already
    let _ = HELD_BYTES.try_with(|held| held.set(held.get() + bytes));
}

// SAFETY: every call is passed on to the system's allocator as it came; counting touches a plain cell of this thread.
#[allow(unsafe_code, reason = "an allocator cannot be written otherwise")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are the ones asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn what_is_kept_is_seen_to_the_byte() {
    let before = held_bytes();
    let kept = vec![0_u64; 1000];
    assert_eq!(held_bytes() - before, 8000);
    drop(kept);
    assert_eq!(held_bytes(), before);
}
