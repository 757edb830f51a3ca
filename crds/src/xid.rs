//! Xids: the faults that NVIDIA's driver reports of a GPU, as an agent tells them with an episode. Which code asks for what is the
//! agent's knowledge (`vitals`, after NVIDIA's public catalogue); the operator acts on the remedy alone.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Xids of one episode that are told.
pub const XIDS_MAX: usize = 8;
const CODE_MAX: i32 = 998;
const GPU_CHARS_MAX: usize = 128;

/// One Xid.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Xid {
    /// Its code, as the driver writes it.
    #[schemars(range(min = 1, max = 998))]
    pub code: i32,
    /// UUID of the GPU, or its PCI address where the agent knows no more; empty: not even that.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128))]
    pub gpu: String,
    /// What brings the GPU back.
    #[serde(default)]
    pub remedy: XidRemedy,
}

/// What brings a GPU back after a Xid.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum XidRemedy {
    /// Nothing need be done.
    Nothing,
    /// The process that was hit must be started anew.
    RestartApplication,
    /// The GPU serves nobody before it is reset.
    ResetGpu,
    /// The node must be drained and restarted.
    RestartNode,
    /// A person must look: cables, power, firmware.
    ContactSupport,
    /// Not known, or a word of a newer agent.
    #[default]
    #[serde(other)]
    Unknown,
}

impl XidRemedy {
    /// Is a restart in place pointless?
    pub fn outlasts_a_restart(self) -> bool {
        matches!(self, Self::ResetGpu | Self::RestartNode | Self::ContactSupport)
    }

    /// The end of a sentence that begins with the Xid.
    pub fn words(self) -> &'static str {
        match self {
            Self::Nothing => "nothing need be done",
            Self::RestartApplication => "the engine must be started anew",
            Self::ResetGpu => "the GPU must be reset",
            Self::RestartNode => "the node must be drained and restarted",
            Self::ContactSupport => "a person must look at the machine",
            Self::Unknown => "what mends it is not known",
        }
    }
}

impl Xid {
    /// For people: `Xid 79 of GPU-1: the node must be drained and restarted`.
    pub fn words(&self) -> String {
        let of = if self.gpu.is_empty() { "" } else { " of " };
        format!("Xid {}{of}{}: {}", self.code, self.gpu, self.remedy.words())
    }
}

/// What is fit to be kept and shown of what an agent says: codes that can be, names that print, no more than [`XIDS_MAX`].
pub fn bounded(xids: Vec<Xid>) -> Vec<Xid> {
    let printable = |gpu: &str| gpu.chars().filter(char::is_ascii_graphic).take(GPU_CHARS_MAX).collect();
    let fit = xids.into_iter().filter(|xid| (1..=CODE_MAX).contains(&xid.code)).take(XIDS_MAX);
    fit.map(|xid| Xid { gpu: printable(&xid.gpu), ..xid }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_agent_says_is_bounded_and_prints() {
        let odd: Vec<Xid> = serde_json::from_str(
            r#"[{"code": 79, "gpu": "GPU-\u001b[31m1\n", "remedy": "RestartNode"}, {"code": 0}, {"code": -5}, {"code": 999},
                {"code": 200, "remedy": "BlowOnIt", "more": 1}]"#,
        )
        .unwrap();
        let fit = bounded([odd, vec![Xid { code: 31, ..Xid::default() }; 20]].concat());
        assert_eq!((fit.len(), fit[0].gpu.as_str(), fit[1].remedy), (XIDS_MAX, "GPU-[31m1", XidRemedy::Unknown));
        assert_eq!(fit[0].words(), "Xid 79 of GPU-[31m1: the node must be drained and restarted");
        assert_eq!(fit[2].words(), "Xid 31: what mends it is not known");
        let long = bounded(vec![Xid { code: 1, gpu: "x".repeat(500), ..Xid::default() }]);
        assert_eq!(long[0].gpu.len(), GPU_CHARS_MAX);
    }
}
