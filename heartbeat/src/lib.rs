//! The heartbeat page: one small file per rank in which an engine says what it is doing, and from which anybody
//! may read it without trusting it.
//!
//! The engine maps the file and stores into it after each step (no lock, no syscall, H7). The reader uses `pread` and
//! believes nothing (H8): it ends with a [`Page`](page::Page) or with an [`Unknown`](unknown::Unknown) that says why.
//! The rules H1–H8 and every offset are in `docs/contracts/heartbeat.md`; the code cites their numbers.
//! No async, no HTTP, no Kubernetes here: any engine can link it. Both sides, in one process for the sake of the example:
//!
//! ```
//! use heartbeat::page::{Beat, Identity, Phase, StepOutcome, StepRecord};
//! use heartbeat::{Reader, Writer, monotonic_ns};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?; // TRUEBEAT_PAGE_DIR, default /run/truebeat
//!
//! // The engine, once at start (nonce: TRUEBEAT_NONCE, or 0) …
//! let identity = Identity::of_this_process(0, 1, 77)?;
//! let mut writer = Writer::create(dir.path(), &identity)?;
//! // … and around each step.
//! let started_ns = monotonic_ns();
//! let mut beat = Beat {
//!     steps_completed: 0, tokens_delivered: 0, requests_finished: 0,
//!     running: 3, waiting: 1, prompt_tokens_owed: 0,
//!     phase: Phase::Decode, phase_tokens: 0, phase_entered_ns: started_ns, lease_ms: 500,
//!     step_started_ns: started_ns, work_done: 0, work_total: 0, published_ns: started_ns,
//! };
//! writer.publish(&beat);
//! let ended_ns = monotonic_ns();
//! writer.record(&StepRecord {
//!     step: 1, started_ns, ended_ns, requests: 3, prefill_tokens: 0, decode_tokens: 3, graph_key: 0,
//!     outcome: StepOutcome::Ok,
//! });
//! beat.steps_completed += 1;
//! beat.tokens_delivered += 3;
//! beat.step_started_ns = 0;
//! beat.published_ns = ended_ns;
//! writer.publish(&beat);
//!
//! // The agent, at each tick: a page, or the reason why there is none.
//! let mut reader = Reader::open(dir.path(), 0).with_nonce(77);
//! match reader.read() {
//!     Ok(page) => assert_eq!(page.beat.tokens_delivered, 3),
//!     Err(unknown) => eprintln!("{}: {unknown}", unknown.reason()),
//! }
//! // For an evidence bundle: the last steps, oldest first, also of a process that is gone.
//! assert_eq!(reader.steps()?.len(), 1);
//! # Ok(())
//! # }
//! ```

pub mod counts;
pub mod layout;
mod map;
pub mod page;
pub mod process;
pub mod reader;
mod seqlock;
pub mod unknown;
pub mod writer;

pub use process::{is_live, monotonic_ns};
pub use reader::Reader;
pub use unknown::{Stale, Unknown};
pub use writer::{Writer, WriterError};
