//! RBAC by its own arithmetic: what the rules of a role allow, and which of them nobody would miss. Pure.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::Value;

/// What one request asks of RBAC. Empty: it names none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    pub namespace: String,
    pub group: String,
    /// `pods`, `pods/status`.
    pub resource: String,
    pub name: String,
    pub verb: String,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, group, resource, name, verb } = self;
        write!(f, "{verb} {resource} of group '{group}' named '{name}' in '{namespace}'")
    }
}

/// The least that can be taken away of a role: one verb on one kind of object in one of its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Where it is written.
    rule: String,
    /// Where it holds; `None`: everywhere.
    namespace: Option<String>,
    group: String,
    resource: String,
    name: Option<String>,
    verb: String,
}

impl Grant {
    /// As the API server's authorizer would say it.
    pub fn allows(&self, question: &Question) -> bool {
        let any_or = |word: &str, asked: &str| word == "*" || word == asked;
        let subresource = |word: &str| {
            let wanted = word.strip_prefix("*/");
            wanted.is_some() && wanted == question.resource.split_once('/').map(|(_, subresource)| subresource)
        };
        self.namespace.as_ref().is_none_or(|namespace| *namespace == question.namespace)
            && any_or(&self.group, &question.group)
            && (any_or(&self.resource, &question.resource) || subresource(&self.resource))
            && self.name.as_ref().is_none_or(|name| *name == question.name)
            && any_or(&self.verb, &question.verb)
    }

    /// Is it this verb on this kind, whichever rule it stands in?
    pub fn is(&self, group: &str, resource: &str, verb: &str) -> bool {
        (self.group.as_str(), self.resource.as_str(), self.verb.as_str()) == (group, resource, verb)
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dot = if self.group.is_empty() { "" } else { "." };
        write!(f, "{} {}{dot}{} ({})", self.verb, self.resource, self.group, self.rule)
    }
}

/// What a Role or ClusterRole (its JSON) gives where it is bound: in one namespace or everywhere. As written, so that what stands there
/// twice is there twice. (Rules about paths that are no objects give nothing here.)
pub fn granted(role: &Value, namespace: Option<&str>) -> Vec<Grant> {
    let words = |rule: &Value, key: &str| -> Vec<String> {
        rule[key].as_array().into_iter().flatten().filter_map(|word| word.as_str().map(str::to_owned)).collect()
    };
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut grants = Vec::new();
    for (nth, rule) in role["rules"].as_array().into_iter().flatten().enumerate() {
        let named: Vec<Option<String>> = match words(rule, "resourceNames") {
            names if names.is_empty() => vec![None],
            names => names.into_iter().map(Some).collect(),
        };
        let place = format!("rule {} of {} {}", nth + 1, word(&role["kind"]), word(&role["metadata"]["name"]));
        for group in words(rule, "apiGroups") {
            for resource in words(rule, "resources") {
                for verb in words(rule, "verbs") {
                    let grant = |name: &Option<String>| Grant {
                        rule: place.clone(),
                        namespace: namespace.map(str::to_owned),
                        group: group.clone(),
                        resource: resource.clone(),
                        name: name.clone(),
                        verb: verb.clone(),
                    };
                    grants.extend(named.iter().map(grant));
                }
            }
        }
    }
    grants
}

/// Those of `ours` that could be taken away, each alone, and nothing that was asked would be refused: no question needs just this one.
pub fn idle<'a>(ours: &'a [Grant], others: &[Grant], asked: &BTreeSet<Question>) -> Vec<&'a Grant> {
    let mut needed = vec![false; ours.len()];
    for question in asked.iter().filter(|question| !others.iter().any(|grant| grant.allows(question))) {
        let mut able = ours.iter().zip(&mut needed).filter(|(grant, _)| grant.allows(question));
        if let (Some((_, needed)), None) = (able.next(), able.next()) {
            *needed = true;
        }
    }
    ours.iter().zip(needed).filter(|(_, needed)| !needed).map(|(grant, _)| grant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn question(words: [&str; 5]) -> Question {
        let [namespace, group, resource, name, verb] = words.map(str::to_owned);
        Question { namespace, group, resource, name, verb }
    }

    fn role(rules: Value) -> Value {
        json!({"kind": "Role", "metadata": {"name": "r"}, "rules": rules})
    }

    fn shown(grants: &[&Grant]) -> Vec<String> {
        grants.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_role_is_read_as_the_product_of_its_lists() {
        let role = role(json!([{"apiGroups": ["apps"], "resources": ["a", "a/status"], "verbs": ["get", "patch"]}]));
        let grants = granted(&role, None);
        let words = ["get a.apps", "patch a.apps", "get a/status.apps", "patch a/status.apps"];
        let wanted = words.map(|word| format!("{word} (rule 1 of Role r)"));
        assert_eq!(shown(&grants.iter().collect::<Vec<_>>()), wanted);
        assert!(grants[1].is("apps", "a", "patch") && !grants[1].is("", "a", "patch"));
    }

    #[test]
    fn a_grant_holds_in_its_namespace_for_its_name_and_its_words() {
        let rules = json!([{"apiGroups": [""], "resources": ["pods"], "resourceNames": ["p"], "verbs": ["get"]}]);
        let [grant] = granted(&role(rules), Some("n")).try_into().unwrap();
        assert!(grant.allows(&question(["n", "", "pods", "p", "get"])));
        let others = [["m", "", "pods", "p", "get"], ["n", "x", "pods", "p", "get"], ["n", "", "pods/log", "p", "get"]];
        for other in others.into_iter().chain([["n", "", "pods", "", "get"], ["n", "", "pods", "p", "list"]]) {
            assert!(!grant.allows(&question(other)), "{other:?}");
        }
    }

    #[test]
    fn stars_stand_for_all_and_before_a_slash_for_every_kind() {
        let rules = json!([{"apiGroups": ["*"], "resources": ["*/scale"], "verbs": ["*"]}]);
        let [grant] = granted(&role(rules), None).try_into().unwrap();
        assert!(grant.allows(&question(["n", "apps", "deployments/scale", "d", "patch"])));
        assert!(!grant.allows(&question(["n", "apps", "deployments", "d", "patch"])));
        let rules = json!([{"apiGroups": ["apps"], "resources": ["*"], "verbs": ["get"]}]);
        let [grant] = granted(&role(rules), None).try_into().unwrap();
        assert!(grant.allows(&question(["n", "apps", "deployments/scale", "d", "get"])));
    }

    #[test]
    fn what_stands_there_twice_or_is_everybodys_is_idle() {
        let rule = |verbs: &[&str]| json!({"apiGroups": [""], "resources": ["pods"], "verbs": verbs});
        let twice = granted(&role(json!([rule(&["get", "list"]), rule(&["list", "watch"])])), None);
        let asked = ["get", "list", "watch"].map(|verb| question(["n", "", "pods", "p", verb]));
        let asked = BTreeSet::from(asked);
        let list = ["list pods (rule 1 of Role r)", "list pods (rule 2 of Role r)"];
        assert_eq!(shown(&idle(&twice, &[], &asked)), list);
        let everybodys = granted(&role(json!([rule(&["get"])])), Some("n"));
        let get = ["get pods (rule 1 of Role r)"];
        assert_eq!(shown(&idle(&twice, &everybodys, &asked)), [&get[..], &list[..]].concat());
        let once = granted(&role(json!([rule(&["get", "list", "watch"])])), None);
        assert!(idle(&once, &[], &asked).is_empty());
        assert_eq!(idle(&once, &[], &BTreeSet::new()).len(), 3);
    }
}
