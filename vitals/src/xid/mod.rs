//! Xids: the faults that NVIDIA's driver reports of a GPU, and what is to be done about each ([`table`]).
//!
//! They come from NVML's events and from lines of the kernel in the engine's log ([`line`]); both are one fact where code and GPU are
//! the same ([`book`]). A Xid never makes a stall (V4): it is told with the stall or the death that it comes with, and the operator
//! learns from it that a restart in place is pointless.

mod book;
mod line;
mod table;

use serde::{Deserialize, Serialize};

pub use self::book::{LATELY_MS, XIDS_MAX, XidBook};
pub use self::line::{Pci, XidLine, parse};
pub use self::table::{ROWS, Row, look_up};
use crate::observation::Ms;

/// No driver has so many; NVML says 999 where it does not know which.
pub const CODE_MAX: u32 = 998;

/// What brings the GPU back, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// Nothing need be done.
    Nothing,
    /// A process that was hit must be started anew; the GPU goes on.
    RestartApplication,
    /// The GPU serves nobody before it is reset.
    ResetGpu,
    /// The node must be drained and restarted.
    RestartNode,
    /// A person must look: cables, power, firmware.
    ContactSupport,
}

impl Remedy {
    /// Does the GPU stay useless for whatever process is started on it?
    pub fn outlasts_a_restart(self) -> bool {
        self >= Self::ResetGpu
    }

    /// What the driver itself asks for: the number that it writes with Xid 154, and that NVML tells as the recovery action. `None`: a
    /// number that nobody has given a meaning yet.
    pub fn of_recovery_action(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Nothing),
            // reset; quiesce peers, then reset; no new work, then reset: whatever comes next here must wait for a reset
            1 | 3 | 4 => Some(Self::ResetGpu),
            2 => Some(Self::RestartNode),
            _ => None,
        }
    }

    /// The end of a sentence that begins with what happened.
    pub fn words(self) -> &'static str {
        match self {
            Self::Nothing => "nothing need be done",
            Self::RestartApplication => "the engine must be started anew",
            Self::ResetGpu => "the GPU must be reset",
            Self::RestartNode => "the node must be drained and restarted",
            Self::ContactSupport => "a person must look at the machine",
        }
    }
}

/// Whom a Xid speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// The GPU, its driver or its links are at fault: a witness.
    Gpu,
    /// An application did what it must not. On a shared GPU that may be somebody else's, and the driver's event does not say whose: it
    /// is told and weighs nothing.
    Application,
    /// It follows from something else, or was put right: not worth a word.
    Nobody,
}

/// One Xid that may concern the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xid {
    pub code: u32,
    /// The UUID, where it is known.
    pub uuid: Option<String>,
    pub pci: Option<Pci>,
    /// `None`: a code that is not in the table.
    pub remedy: Option<Remedy>,
    /// When it was last reported.
    pub at_ms: Ms,
}

impl Xid {
    /// Whom it speaks of; of a code that is not in the table nothing is known, and nobody is blamed.
    pub fn whose(&self) -> Whose {
        look_up(self.code).map_or(Whose::Application, |row| row.whose)
    }

    /// Is it a witness against whatever runs on that GPU?
    pub fn accuses(&self) -> bool {
        self.whose() == Whose::Gpu && self.remedy.is_some_and(|remedy| remedy >= Remedy::RestartApplication)
    }

    fn is_of(&self, uuid: &str) -> bool {
        self.uuid.as_deref().unwrap_or_default() == uuid
    }

    fn asks_nothing(&self) -> bool {
        self.remedy == Some(Remedy::Nothing)
    }

    /// One sentence for people.
    pub fn words(&self) -> String {
        let place = match (&self.uuid, self.pci) {
            (Some(uuid), _) => format!(" of {uuid}"),
            (None, Some(pci)) => format!(" of the GPU at {pci}"),
            (None, None) => String::new(),
        };
        let Some(row) = look_up(self.code) else {
            return format!("the driver reports Xid {}{place}, of which nothing is known here", self.code);
        };
        let doing = match (row.whose, self.remedy) {
            (Whose::Application, _) => "an application's own fault, perhaps not this engine's",
            (_, Some(remedy)) => remedy.words(),
            (_, None) => "what to do about it is not known here",
        };
        format!("the driver reports Xid {}{place} ({}): {doing}", self.code, row.what)
    }
}
