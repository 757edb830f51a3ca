//! What the API server was asked by whom: its audit log, and from it what its authorizer had to allow. Reads one file; pure otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::rbac::Question;

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
    /// When it came, in RFC 3339.
    #[serde(default)]
    request_received_timestamp: String,
    /// What admission had to say.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct User {
    username: String,
    #[serde(default)]
    extra: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Object {
    namespace: String,
    name: String,
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

    /// Which of the user's tokens it came with.
    pub fn credential(&self) -> &str {
        let ids = self.user.extra.get("authentication.kubernetes.io/credential-id");
        ids.and_then(|ids| ids.first()).map_or("", String::as_str)
    }

    /// Does it ask for a change?
    pub fn writes(&self) -> bool {
        ["create", "update", "patch", "delete", "deletecollection"].contains(&self.verb.as_str())
    }

    /// Namespace of the object asked for; empty where it has none.
    pub fn namespace(&self) -> &str {
        self.object_ref.as_ref().map_or("", |object| &object.namespace)
    }

    /// Namespace, resource and name of the object asked for.
    pub fn object(&self) -> String {
        let name = self.object_ref.as_ref().map_or("", |object| &object.name);
        format!("{} {} {name}", self.namespace(), self.resource())
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

/// The most of what `select` takes that came within one second; one object's alone, where it gives those a name of their own each.
pub fn most_in_a_second(entries: &[Entry], select: impl Fn(&Entry) -> Option<String>) -> (usize, String) {
    let mut counts = BTreeMap::<(String, &str), usize>::new();
    for entry in entries {
        let second = entry.request_received_timestamp.get(..19).unwrap_or_default();
        if let Some(name) = select(entry) {
            *counts.entry((name, second)).or_default() += 1;
        }
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.map_or((0, String::new()), |((name, second), count)| (count, format!("{name} at {second}")))
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

/// What had to be allowed for these requests. A patch that made its object needed `create` as well; what was refused, or has no answer yet,
/// needed nothing, and neither did a path that is no object.
pub fn asked(entries: &[Entry]) -> BTreeSet<Question> {
    let mut questions = BTreeSet::new();
    for entry in entries.iter().filter(|entry| !matches!(entry.code(), 0 | 401 | 403)) {
        let Some(object) = entry.object_ref.clone() else { continue };
        let ask = |verb: &str, name: &str| Question {
            namespace: object.namespace.clone(),
            group: object.api_group.clone(),
            resource: entry.resource(),
            name: name.to_owned(),
            verb: verb.to_owned(),
        };
        // whoever posts names nothing in the path; the log takes the name from the body
        let name = if entry.verb == "create" { "" } else { &object.name };
        questions.insert(ask(&entry.verb, name));
        if entry.verb == "patch" && entry.code() == 201 {
            questions.insert(ask("create", name));
        }
    }
    questions
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(verb: &str, resource: &str, subresource: &str, code: u16) -> Entry {
        serde_json::from_value(json!({
            "verb": verb, "user": {"username": "u"}, "responseStatus": {"code": code},
            "objectRef": {"namespace": "n", "name": "o", "resource": resource, "apiGroup": "apps", "subresource": subresource},
        }))
        .unwrap()
    }

    #[test]
    fn a_patch_that_creates_needs_both_and_a_refusal_needs_nothing() {
        let none: Entry = serde_json::from_value(json!({"verb": "get", "user": {"username": "u"}})).unwrap();
        let seen = [
            entry("patch", "deployments", "", 201),
            entry("update", "x", "status", 200),
            entry("create", "z", "", 201),
            entry("delete", "y", "", 403),
            none,
        ];
        let shown: Vec<String> = asked(&seen).iter().map(ToString::to_string).collect();
        let all = [
            "create deployments of group 'apps' named 'o' in 'n'",
            "patch deployments of group 'apps' named 'o' in 'n'",
            "update x/status of group 'apps' named 'o' in 'n'",
            "create z of group 'apps' named '' in 'n'",
        ];
        assert_eq!(shown, all);
    }

    #[test]
    fn a_second_is_as_full_as_the_fullest_object_of_it() {
        let at = |name: &str, time: &str| {
            serde_json::from_value(json!({
                "verb": "patch", "user": {"username": "u"}, "requestReceivedTimestamp": time,
                "objectRef": {"namespace": "n", "name": name, "resource": "pods"},
            }))
            .unwrap()
        };
        let seen: Vec<Entry> =
            [("a", "2026-01-01T00:00:01.1Z"), ("b", "2026-01-01T00:00:01.2Z"), ("b", "2026-01-01T00:00:01.9Z")]
                .map(|(name, time)| at(name, time))
                .into();
        let each = most_in_a_second(&seen, |entry| entry.writes().then(|| entry.object()));
        assert_eq!(each, (2, "n pods b at 2026-01-01T00:00:01".to_owned()));
        assert_eq!(most_in_a_second(&seen, |_| Some("any".to_owned())).0, 3);
        assert_eq!(most_in_a_second(&seen, |_| None).0, 0);
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
