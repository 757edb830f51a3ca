//! Incidents: from the episode that an agent reports on its pod to an `EngineIncident`. Pure; [`read`] judges the
//! agent's text, [`plan`] decides which records to write, close and forget.

pub mod plan;
pub mod read;
