//! The controllers: `inference_deployment` owns the loop, `incidents` is the part of it that keeps the records, `nodes` marks
//! the places that pods keep away from.

pub mod driver;
pub mod first;
pub mod incidents;
pub mod inference_deployment;
pub mod metadata;
pub mod nodes;
pub mod queue;
pub mod waiting;
pub mod watch;
