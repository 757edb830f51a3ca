//! The harness that proves the project as a whole: a real Kubernetes in a network namespace of its own (`cluster`), images
//! assembled without a registry (`images`), and what stories need on top: waits on predicates, a watch on endpoints, signals to the
//! processes of a pod. It may touch the machine (namespaces, cgroups, mounts), but only under its own names, and it takes
//! everything away again. Nothing outside `tests` depends on this crate.

pub mod audit;
pub mod cluster;
pub mod custom_metrics;
pub mod endpoints;
pub mod film;
pub mod fleet;
pub mod host;
pub mod images;
pub mod load;
pub mod product;
pub mod queries;
pub mod rbac;
pub mod stories;
pub mod story;
pub mod times;
pub mod wait;

pub use cluster::{Cluster, NotRun, Options};
