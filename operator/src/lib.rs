//! The operator: turns InferenceDeployments into pods, keeps the records of stalls, and hands out restart grants under a
//! budget (I1, I2). `cli` wires; `controllers` decide in pure stages; `client` alone talks to the API server, with
//! `leader` saying whether it may write.

pub mod check;
pub mod cli;
pub mod client;
pub mod confine;
pub mod connect;
pub mod controllers;
pub mod digest;
pub mod health;
pub mod http;
pub mod leader;
pub mod manifests;
pub mod metrics;
#[cfg(test)]
#[path = "../../agent/tests/common/not_run.rs"]
mod not_run;
pub mod wall;
