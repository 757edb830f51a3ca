//! Why a page says nothing (H8). "Unknown" is an answer, never an error to retry in a hurry and never a reason to
//! evict (I4): each variant names what was wrong and, where it can, what to do.

use std::path::PathBuf;

/// A read that ended without a page that may be believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    #[error("no page at {path}: the engine has not created it yet, or the page directory is not the shared one")]
    Missing { path: PathBuf },
    #[error("{op} {path} failed: {message}")]
    Io { op: &'static str, path: PathBuf, message: String },
    #[error("{path} is not a regular file; remove what lies there")]
    NotAFile { path: PathBuf },
    #[error("page has {found} bytes instead of {expected}: truncated, or not a page")]
    TooShort { found: u64, expected: u64 },
    #[error("page begins with {found:02x?} instead of \"TRUEBEAT\"")]
    BadMagic { found: [u8; 8] },
    #[error("page has layout version {found}, this reader knows {expected}: use an agent that matches the engine")]
    BadVersion { found: u32, expected: u32 },
    #[error("page was created but no beat has been published yet")]
    NoBeat,
    /// Odd sequence for ever (writer died in mid-write), or a writer faster than `tries` reads.
    #[error("no consistent beat in {tries} tries: the writer stopped in the middle of one, or never rests")]
    Torn { tries: u32 },
    #[error("page field {field} has the impossible value {value}")]
    BadField { field: &'static str, value: u64 },
    #[error("page field {field} went back from {from} to {to}")]
    WentBack { field: &'static str, from: u64, to: u64 },
    #[error("page is of a process that is not alive here: {0}")]
    Stale(Stale),
    #[error("page has nonce {found}, the launcher gave {expected}: another start of the engine wrote it")]
    WrongNonce { found: u64, expected: u64 },
    #[error(
        "page belongs to user {owner}, and the process {pid} that it names is user {user}'s: somebody else made it"
    )]
    WrongOwner { owner: u32, pid: u32, user: u32 },
}

/// Why a page's process is not the live one (H2).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stale {
    #[error("pid {pid} does not exist")]
    NoProcess { pid: u32 },
    #[error("pid {pid} is a zombie")]
    Zombie { pid: u32 },
    #[error("pid {pid} started at tick {live}, the page's process at tick {page}")]
    OtherProcess { pid: u32, live: u64, page: u64 },
    #[error("the page was written in another boot of this machine")]
    OtherBoot,
}

impl Unknown {
    /// One stable word for a metric label or a condition's reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "Missing",
            Self::Io { .. } => "Io",
            Self::NotAFile { .. } => "NotAFile",
            Self::TooShort { .. } => "TooShort",
            Self::BadMagic { .. } => "BadMagic",
            Self::BadVersion { .. } => "BadVersion",
            Self::NoBeat => "NoBeat",
            Self::Torn { .. } => "Torn",
            Self::BadField { .. } => "BadField",
            Self::WentBack { .. } => "WentBack",
            Self::Stale(_) => "Stale",
            Self::WrongNonce { .. } => "WrongNonce",
            Self::WrongOwner { .. } => "WrongOwner",
        }
    }
}
