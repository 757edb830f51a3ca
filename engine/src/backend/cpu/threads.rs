//! Splits the rows of one output over threads when the work is worth it. Threads live for one operation and only
//! compute: the join at the end waits for arithmetic of bounded length, never for another process, lock or device (E1).

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Multiply-adds one thread must have before another is worth its start (tens of microseconds).
const WORK_PER_THREAD_MIN: usize = 2_000_000;
/// Pieces a thread: uneven rows (later positions attend to more) even out.
const PIECES_PER_THREAD: usize = 4;

/// Calls `f(first_row, rows)` for pieces of `out` that together cover all of its rows of `row_len` values.
///
/// `work` is the total in multiply-adds. Which thread runs a piece has no influence on its values.
pub fn split_rows<F>(out: &mut [f32], row_len: usize, work: usize, threads: usize, f: F)
where
    F: Fn(usize, &mut [f32]) + Sync,
{
    let rows = out.len() / row_len.max(1);
    let threads = threads.min(work / WORK_PER_THREAD_MIN).min(rows);
    if threads <= 1 {
        f(0, out);
        return;
    }
    let rows_per_piece = rows.div_ceil(threads * PIECES_PER_THREAD);
    let pieces: Vec<_> = out.chunks_mut(rows_per_piece * row_len).map(|piece| Mutex::new(Some(piece))).collect();
    let next = AtomicUsize::new(0);
    let worker = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(cell) = pieces.get(index) else { break };
            // each index is claimed once, so the lock is free: it only hands the piece over
            if let Some(piece) = cell.try_lock().ok().and_then(|mut cell| cell.take()) {
                f(index * rows_per_piece, piece);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // a thread that cannot be had is not an error: the others take its pieces
            let _ = thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
}
