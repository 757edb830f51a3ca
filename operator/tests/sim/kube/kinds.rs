//! The kinds that the server knows, and what is peculiar to each.

/// One resource.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    pub group: &'static str,
    pub version: &'static str,
    pub plural: &'static str,
    pub kind: &'static str,
    /// Is `status` a subresource, which the main resource cannot write?
    pub status: bool,
    /// Does the server count changes of the spec?
    pub generation: bool,
    /// May an update leave out the resourceVersion?
    pub unconditional: bool,
}

const fn kind(
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    flags: (bool, bool, bool),
) -> Kind {
    let (status, generation, unconditional) = flags;
    Kind { group, version, plural, kind, status, generation, unconditional }
}

pub static KINDS: [Kind; 14] = [
    kind("", "v1", "pods", "Pod", (true, true, true)),
    kind("", "v1", "services", "Service", (true, false, true)),
    kind("", "v1", "serviceaccounts", "ServiceAccount", (false, false, true)),
    kind("", "v1", "configmaps", "ConfigMap", (false, false, true)),
    kind("", "v1", "nodes", "Node", (true, false, true)),
    kind("apps", "v1", "deployments", "Deployment", (true, true, true)),
    kind("apps", "v1", "replicasets", "ReplicaSet", (true, true, true)),
    kind("rbac.authorization.k8s.io", "v1", "roles", "Role", (false, false, true)),
    kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", (false, false, true)),
    kind("coordination.k8s.io", "v1", "leases", "Lease", (false, false, false)),
    kind("events.k8s.io", "v1", "events", "Event", (false, false, true)),
    kind("inference.truebeat.io", "v1alpha1", "inferencedeployments", "InferenceDeployment", (true, true, false)),
    kind("inference.truebeat.io", "v1alpha1", "engineincidents", "EngineIncident", (true, true, false)),
    kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", (true, true, true)),
];

impl Kind {
    /// `group/version`, or the version alone for the core group.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    /// A kind that a CustomResourceDefinition made.
    pub fn custom(&self) -> bool {
        self.group == "inference.truebeat.io"
    }
}

/// The kind of this plural name.
pub fn of(plural: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.plural == plural).unwrap_or_else(|| panic!("no kind {plural}"))
}
