//! The controllers: `inference_deployment` owns the loop, `incidents` is the part of it that keeps the records.

pub mod driver;
pub mod incidents;
pub mod inference_deployment;
pub mod queue;
pub mod watch;
