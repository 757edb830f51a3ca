//! The Rust inference engine: an OpenAI server in front of one thread that steps a model, built so that it cannot hang in
//! silence. The way of a request: `server` → `handle` → `core` (the thread) → `scheduler` (pure) → `model` → `backend`.
//!
//! **Invariant:** nobody waits for the engine thread without a deadline, and it waits for nobody (E1, E4, E7).
//! **Invariant:** what `/health` says is derived from the beats that the page carries (E6, `beat`).

pub mod backend;
pub mod beat;
pub mod chat_template;
pub mod cli;
pub mod codec;
pub mod core;
pub mod demo_model;
pub mod device;
pub mod fault;
pub mod grammar;
pub mod guard;
pub mod handle;
pub mod log_file;
mod memory;
pub mod metrics;
pub mod model;
mod panics;
pub mod programs;
pub mod ranks;
pub mod raw;
pub mod sampling;
pub mod scheduler;
pub mod server;
pub mod speculation;
mod splitmix;
pub mod stack_dump;
pub mod start;
pub mod stuck;
pub mod tokenizer;
pub mod waits;
pub mod weights;
