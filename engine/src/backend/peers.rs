//! The other ranks, as a device sees them that brings its values to theirs by itself: what is said before the first step, how far each one's
//! device has come in a step, and who is at fault when it comes no further (E3). The ranks' shared memory is behind it (`ranks::peers`).

use std::fmt::Debug;

use crate::stuck::Stuck;
use crate::waits::Patience;

/// All ranks of a model, seen by one of them.
pub trait Peers: Send + Sync + Debug {
    fn rank(&self) -> usize;

    fn world(&self) -> usize;

    /// Tells all ranks `words`, as many as every other rank does now, and gives what each of them told, by rank. `None`: one did not come, and
    /// no step will.
    fn tell_all(&self, words: &[u32]) -> Option<Vec<Vec<u32>>>;

    /// The next collective of the step, as it is asked of the device: its number, the same on all ranks.
    fn begins(&self) -> u64;

    /// This rank's device has come to a collective, and brings its values.
    fn reached(&self, collective: u64);

    /// A wait for this rank's device begins.
    fn watch(&self) -> Box<dyn Watch + '_>;

    /// This rank gives up. Said before its device leaves the others' ones, for what these are brought from then on is worth nothing.
    fn fails(&self, stuck: &Stuck);

    /// Whether no rank has given up.
    ///
    /// # Errors
    /// Who has, and why.
    fn are_well(&self) -> Result<(), Stuck>;
}

/// What one wait for a device sees of the other ranks.
pub trait Watch {
    /// Looks at them, between two looks at the device; false: it is too soon.
    ///
    /// # Errors
    /// A rank that gave up, that could not compute its part of this step, whose process is gone, or that is stopped for too long: nothing is
    /// waited for any more.
    fn look(&mut self, patience: &mut Patience) -> Result<bool, Stuck>;

    /// Time is up: the ranks whose devices have not come to where this one's is; `None`: there are none, and it is this one's own fault.
    fn blame(&self, patience: &Patience) -> Option<Stuck>;
}
