//! What the API server was asked by whom: its audit log, and from it the rights that an account has used. Reads one file; pure otherwise.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

/// The policy of a cluster with [`crate::Options::audit`]: every request of the service accounts that are not Kubernetes' own, without bodies.
pub const POLICY: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
"#;

/// One request.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// As RBAC names it.
    pub verb: String,
    user: User,
    object_ref: Option<Object>,
    response_status: Option<Answer>,
    /// What admission had to say.
    #[serde(default)]
    pub annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct User {
    username: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Object {
    resource: String,
    api_group: String,
    subresource: String,
}

#[derive(Debug, Clone, Deserialize)]
struct Answer {
    #[serde(default)]
    code: u16,
}

impl Entry {
    /// HTTP status of the answer; 0 while there is none.
    pub fn code(&self) -> u16 {
        self.response_status.as_ref().map_or(0, |answer| answer.code)
    }

    /// The object asked for, as `resource` or `resource/subresource`.
    pub fn resource(&self) -> String {
        let object = self.object_ref.clone().unwrap_or_default();
        if object.subresource.is_empty() {
            object.resource
        } else {
            format!("{}/{}", object.resource, object.subresource)
        }
    }
}

/// Every finished or begun request of `user`, oldest first.
///
/// # Errors
/// When the log cannot be read, or a whole line of it is no audit event.
pub fn read(log: &Path, user: &str) -> Result<Vec<Entry>> {
    let text = std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]); // the last line may be half written
    let mut entries = Vec::new();
    for line in whole.lines() {
        let entry: Entry = serde_json::from_str(line).with_context(|| format!("no audit event: {line}"))?;
        entries.extend((entry.user.username == user).then_some(entry));
    }
    Ok(entries)
}

/// One verb on one kind of object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    group: String,
    resource: String,
    verb: String,
}

impl Right {
    /// `verb` on `resource` (`pods`, `pods/status`) of API group `group`.
    pub fn new(group: &str, resource: &str, verb: &str) -> Self {
        Right { group: group.to_owned(), resource: resource.to_owned(), verb: verb.to_owned() }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dot = if self.group.is_empty() { "" } else { "." };
        write!(f, "{} {}{dot}{}", self.verb, self.resource, self.group)
    }
}

/// What the rules of a Role or ClusterRole (its JSON) give.
pub fn granted(role: &Value) -> BTreeSet<Right> {
    let words = |rule: &Value, key: &str| -> Vec<String> {
        rule[key].as_array().into_iter().flatten().filter_map(|word| word.as_str().map(str::to_owned)).collect()
    };
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        for group in words(rule, "apiGroups") {
            for resource in words(rule, "resources") {
                rights.extend(words(rule, "verbs").iter().map(|verb| Right::new(&group, &resource, verb)));
            }
        }
    }
    rights
}

/// What these requests needed. A patch that made its object needed `create` as well; a request that was refused used nothing.
pub fn used(entries: &[Entry]) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for entry in entries.iter().filter(|entry| !matches!(entry.code(), 0 | 401 | 403)) {
        let group = entry.object_ref.clone().unwrap_or_default().api_group;
        rights.insert(Right::new(&group, &entry.resource(), &entry.verb));
        if entry.verb == "patch" && entry.code() == 201 {
            rights.insert(Right::new(&group, &entry.resource(), "create"));
        }
    }
    rights
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(verb: &str, resource: &str, subresource: &str, code: u16) -> Entry {
        serde_json::from_value(json!({
            "verb": verb, "user": {"username": "u"}, "responseStatus": {"code": code},
            "objectRef": {"resource": resource, "apiGroup": "apps", "subresource": subresource},
        }))
        .unwrap()
    }

    #[test]
    fn a_role_is_read_as_the_product_of_its_lists() {
        let role =
            json!({"rules": [{"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get", "patch"]}]});
        let shown: Vec<String> = granted(&role).iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["get pods", "patch pods", "get pods/status", "patch pods/status"]);
    }

    #[test]
    fn a_patch_that_creates_needs_both_and_a_refusal_needs_nothing() {
        let seen = [
            entry("patch", "deployments", "", 201),
            entry("update", "x", "status", 200),
            entry("delete", "y", "", 403),
        ];
        let shown: Vec<String> = used(&seen).iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["create deployments.apps", "patch deployments.apps", "update x/status.apps"]);
    }

    #[test]
    fn only_whole_lines_of_one_user_are_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = r#"{"verb":"get","user":{"username":"a"}}"#;
        std::fs::write(file.path(), format!("{line}\n{}\n{{\"verb\"", line.replace("\"a\"", "\"b\""))).unwrap();
        assert_eq!(read(file.path(), "a").unwrap().len(), 1);
        std::fs::write(file.path(), "nonsense\n").unwrap();
        assert!(read(file.path(), "a").is_err());
    }
}
