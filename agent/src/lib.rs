//! Truebeat's agent: it watches one engine, judges it by `vitals`, and acts on the verdict: fence, evidence, restart, report.
//!
//! Three processes of one program: a supervisor that never exits (`supervisor`), a detector (`watch`) and a gate (`gate`). See
//! `docs/ARCHITECTURE.md`; hazards and invariants (I1–I7) in `docs/hazards.md`.

pub mod cli;
mod files;
pub mod footprint;
pub mod forensics;
pub mod gate;
mod gate_role;
pub mod http;
pub mod incidents;
pub mod kill;
pub mod launch;
pub mod metrics;
mod never;
#[cfg(test)]
#[path = "../tests/common/not_run.rs"]
mod not_run;
mod options;
mod own_program;
mod policy;
pub mod record;
pub mod report;
mod shared_memory;
pub mod short_slice;
mod signals;
pub mod sources;
mod spare_thread;
pub mod status;
pub mod stderr;
pub mod supervisor;
pub mod text;
mod ticker;
pub mod watch;
