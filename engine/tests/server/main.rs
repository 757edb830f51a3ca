//! The engine over real HTTP, in this process: a deterministic fake model behind it, a real client in front of it.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's helpers fail the test")]

mod api;
mod bodies;
mod choosing;
mod client;
mod demo_model;
mod faults;
mod forms;
#[path = "../../../agent/tests/common/free_addresses.rs"]
mod free_addresses;
mod guards;
mod load;
mod openai;
mod process;
mod programs;
mod ranks;
mod scheduling;
mod stacks;
mod starting;
mod support;
mod tools;
mod unread;
mod wire;
