//! What the operator writes on nodes: the labels by which the pods of a deployment keep away from one, and the condition
//! that tells other tools (node problem detectors, drainers) that engines stall there again and again.

/// Node label, one for each InferenceDeployment that keeps away (`avoid.truebeat.io/<name>-<hash>`); the value is the time
/// until which, for people: what counts is `status.recovery.avoid`. Pods carry an affinity that refuses a node with theirs.
pub const LABEL_AVOID_PREFIX: &str = "avoid.truebeat.io/";
/// Node label: it carries a label of the prefix above, or the condition below is `True`.
pub const LABEL_SUSPECT: &str = "truebeat.io/suspect";
/// Node condition: `True` while recoveries come back on this node (`RepeatedStalls`), an engine there outlives SIGKILL
/// (`UnkillableEngine`), or the driver reported a Xid that no restart of an engine mends (`GpuNeedsReset`, `NodeNeedsRestart`,
/// `NodeNeedsSupport`; the message names Xid and GPU).
pub const CONDITION_ENGINE_STALLS: &str = "truebeat.io/engine-stalls";
