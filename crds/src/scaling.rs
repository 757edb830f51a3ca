//! What holds while an autoscaler (HPA, KEDA) owns the number of replicas through the scale subresource.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Does the number of replicas follow the spec while an incident is open?
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum DuringIncidents {
    #[default]
    Follow,
    NoScaleIn,
    Hold,
}

/// Scaling while engines stall.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Scaling {
    /// Does the number of replicas follow the spec while an incident is open? `Follow`: yes; the stalled ones go first. `NoScaleIn`:
    /// not downwards, for figures that a stall has bent may ask for fewer than the work needs. `Hold`: neither way. A spec of 0
    /// replicas is always obeyed. `ScalingHeld` is `True` meanwhile.
    pub during_incidents: DuringIncidents,
    /// For how long the number is held at most, in seconds: by one incident, and by incidents that follow one another.
    #[schemars(range(min = 1, max = 86400))]
    pub hold_seconds_max: i32,
}

impl Default for Scaling {
    fn default() -> Self {
        Scaling { during_incidents: DuringIncidents::default(), hold_seconds_max: 900 }
    }
}
