//! The pure brain of Truebeat: observation in, verdict and wanted actions out.
//!
//! Nothing here reads a clock, a file, the environment or the network, and nothing is async: time is an argument (V7). The agent
//! feeds [`detector::Detector`] and [`recovery::Recovery`]; `truebeat replay` feeds the same code from a recording ([`replay`]).

pub mod backlog;
pub mod cache;
pub mod crawl;
pub mod deadlines;
pub mod detector;
pub mod ended;
pub mod engine_metrics;
pub mod examine;
mod excuse;
pub mod exposition;
pub mod gap;
pub mod leaders;
pub mod learned;
pub mod learner;
pub mod leavers;
pub mod log_signs;
pub mod noise;
pub mod observation;
pub mod owed;
pub mod policy;
pub mod prefill;
pub mod ranks;
pub mod ras;
pub mod recovery;
pub mod replay;
pub mod rhythm;
pub mod rivals;
pub mod rounds;
pub mod running;
pub mod schedulers;
pub mod signs;
pub mod sim;
pub mod slow;
pub mod startup;
pub mod verdict;
pub mod witness;
pub mod xid;
