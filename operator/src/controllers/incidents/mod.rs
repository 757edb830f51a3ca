//! Incidents: from the episode that an agent reports on its pod to an `EngineIncident`. Pure; [`read`] judges the
//! agent's text, [`plan`] decides which records to write, close and forget, [`by_hand`] records
//! what people fence, [`listed`] is how they are read, [`poison`] finds requests that stalled two replicas.

pub mod by_hand;
#[cfg(test)]
mod effects;
pub mod listed;
pub mod plan;
pub mod poison;
pub mod read;
