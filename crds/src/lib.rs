//! The API of Truebeat: `InferenceDeployment` and `EngineIncident`, and what agent and operator say to each other
//! through a pod. Types, pure helpers and the generator of the committed YAML; no client and no clock.
//!
//! The group is this one constant; the derive macros need it as a literal, and a test holds them to it.

pub mod agent;
pub mod conditions;
pub mod engine_incident;
pub mod episode;
pub mod fence;
pub mod hold;
pub mod inference_deployment;
pub mod known_bad;
pub mod maintenance;
pub mod model;
pub mod node;
pub mod overlay;
pub mod poison;
pub mod recovery;
pub mod recovery_note;
pub mod restart;
pub mod rollout;
pub mod scaling;
pub mod status;
pub mod xid;
pub mod yaml;

pub use engine_incident::{EngineIncident, EngineIncidentSpec, EngineIncidentStatus, Timeline};
pub use hold::{HoldScope, HoldStatus, Trial, TrialOutcome};
pub use inference_deployment::{InferenceDeployment, InferenceDeploymentSpec};
pub use status::{Avoided, AvoidedBecause, Grant, GrantAction, InferenceDeploymentStatus, PastGrant, RecoveryStatus};

/// The API group of every kind here (and the prefix of the labels that Truebeat owns).
pub const GROUP: &str = "inference.truebeat.io";
/// The only version so far; no conversion.
pub const VERSION: &str = "v1alpha1";
/// Label on everything that belongs to one `InferenceDeployment`: its name. The pods' selector is this label alone.
pub const LABEL_DEPLOYMENT: &str = "inference.truebeat.io/deployment";
/// Label on pods: the kind of their engine, for dashboards and selectors.
pub const LABEL_ENGINE_KIND: &str = "inference.truebeat.io/engine-kind";
/// Label on pods: the revision that they run, the hash of their template.
pub const LABEL_REVISION: &str = "inference.truebeat.io/revision";
/// A service account that Truebeat makes for agents ends in this; the admission policy recognises agents by it.
pub const AGENT_SERVICE_ACCOUNT_SUFFIX: &str = "-truebeat-agent";
