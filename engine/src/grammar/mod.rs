//! Structured output: a request's schema, regular expression, choices or grammar becomes a mask over the vocabulary for each token.
//!
//! Grammars come from strangers, so nothing about them is trusted. They are compiled before the request is accepted, on a thread of
//! their own with a time limit and a stack that is only theirs; a bad one is an error for its sender. Masks are computed on worker
//! threads while the model runs the next step; the engine thread waits a moment for one, never for long, and a request whose mask
//! takes too long fails alone (E1, EP5). The library's fuel bounds every computation besides.

mod compile;
mod constraint;
mod spec;
mod vocabulary;
mod workers;

use thiserror::Error;

pub use compile::{Grammars, LIVE_MAX};
pub use constraint::{Constraint, MASK_TIME_MAX, MASK_TIME_MAX_ALONE, Mask};
pub use spec::{BYTES_MAX as GRAMMAR_BYTES_MAX, GrammarSpec};
pub(crate) use spec::{lark_json, lark_string};

/// Why a grammar was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    #[error("{0}")]
    Invalid(String),
    #[error("it has {bytes} bytes; at most {bytes_max} are taken")]
    TooLarge { bytes: usize, bytes_max: usize },
    #[error("it is nested {depth} deep; at most {depth_max} are taken")]
    TooDeep { depth: usize, depth_max: usize },
    #[error("it was not compiled within {0} ms")]
    TooSlow(u128),
    /// A defect of this engine or of its library; the log has its words.
    #[error("the thread that compiled it has ended without an answer")]
    Died,
    #[error("this model cannot be constrained: {0}")]
    Vocabulary(String),
    /// Not the grammar's fault.
    #[error("{0}; try again later")]
    Busy(&'static str),
}

/// Why an accepted grammar could not be followed to its end.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConstraintError {
    #[error("the grammar is too complex to follow: {0}")]
    Failed(String),
    #[error("the grammar's next step was not computed within {0} ms")]
    TooSlow(u128),
    #[error("the threads that compute grammars have ended")]
    Gone,
}

#[cfg(test)]
pub(crate) mod tests;
