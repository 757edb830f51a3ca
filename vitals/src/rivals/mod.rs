//! Everybody else's rule for "this engine hangs", beside ours (V8), so that one command prints latency and false alarms of all of
//! them on the same histories.

pub mod score;
