//! Bytes that this thread holds, counted by the allocator of these tests: what a scheduler keeps of requests that are gone is seen to the
//! byte, whatever runs beside it. The system's word (resident pages) would not show a map that grows by a few bytes a request.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use engine::demo_model::{DemoArch, write_demo_model};
use engine::tokenizer::Tokenizer;

/// What tables of the tokenizer's own may still grow by.
const TABLES_BYTES_MAX: i64 = 10 << 10;

struct Counting;

thread_local! {
    static HELD_BYTES: Cell<i64> = const { Cell::new(0) };
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has asked for memory: work that grows shows there, however quick the machine.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
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
        let _ = ALLOCATIONS.try_with(|asked| asked.set(asked.get() + 1));
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

/// The words of prompts have no end: of a text that is encoded nothing is left.
#[test]
fn a_tokenizer_remembers_no_words() {
    let dir = tempfile::tempdir().unwrap();
    write_demo_model(dir.path(), DemoArch::Llama, 0).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let encode = |words: std::ops::Range<u64>| {
        words.for_each(|n| drop(tokenizer.encode(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_string(), true).unwrap()));
    };
    encode(1..200);
    let before = held_bytes();
    encode(200..1200);
    let left = held_bytes() - before;
    assert!(left <= TABLES_BYTES_MAX, "{left} bytes of 1,000 words");
}
