//! The sources against fixture trees, real child processes and real servers on loopback.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

#[path = "sources/cores.rs"]
mod cores;
#[path = "sources/facts.rs"]
mod facts;
#[path = "sources/fixture.rs"]
mod fixture;
#[path = "sources/http.rs"]
mod http;
#[path = "sources/log.rs"]
mod log;
#[path = "common/not_run.rs"]
mod not_run;
#[path = "sources/nvml.rs"]
mod nvml;
#[path = "sources/nvml_library.rs"]
mod nvml_library;
#[path = "sources/proc.rs"]
mod proc;
#[path = "sources/ras.rs"]
mod ras;
#[path = "common/ras_server.rs"]
mod ras_server;
#[path = "sources/real.rs"]
mod real;
#[path = "sources/tree.rs"]
mod tree;
#[path = "sources/untrusted.rs"]
mod untrusted;
#[path = "sources/visible.rs"]
mod visible;
#[path = "sources/whole.rs"]
mod whole;
