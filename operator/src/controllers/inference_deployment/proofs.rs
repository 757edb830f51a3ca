//! What waits for a record that the API refuses, pure: time is an argument.
//!
//! Until an episode is recorded its pod alone tells of it. So whatever takes that pod away (a rollback, fewer replicas, its replacement)
//! comes after its record, and where the record is refused it waits and the record is tried again. Not for ever: a webhook of somebody
//! else that is down must not keep a bad revision in place. Clients wait for nobody meanwhile, for who stalls is fenced.

use std::collections::BTreeSet;

use kube::ResourceExt;
use tokio::time::Instant;

use super::{drift::covers, observed::Observed, plan::Plan};
use crate::controllers::{queue::Key, waiting::Waiting};

/// By InferenceDeployment: since when something waits there.
#[derive(Debug, Default)]
pub struct Proofs(Waiting<Key>);

impl Proofs {
    /// Must that wait which would take pods away (`due`: something would)? `untold` are the pods that alone tell of an episode. Who has
    /// waited in vain does not wait again until everything is recorded.
    pub fn wait(&self, observed: &Observed, untold: &BTreeSet<String>, due: bool, now: Instant) -> bool {
        let infd = &observed.infd;
        let key = (infd.namespace().unwrap_or_default(), infd.name_any());
        if untold.is_empty() {
            self.0.settled(&key);
            return false;
        }
        due && self.0.waits(key, now)
    }

    /// There is nothing of this name any more.
    pub fn forget(&self, namespace: &str, name: &str) {
        self.0.settled(&(namespace.to_owned(), name.to_owned()));
    }
}

/// Would the planned change of the Deployment take pods away: another template, or fewer of them?
pub fn pods_would_go(observed: &Observed, plan: &Plan) -> bool {
    let Some(live) = observed.children.get("Deployment").map(|live| &live["spec"]) else { return false };
    let wanted = plan.applies.iter().find(|child| child.resource.kind == "Deployment").map(|child| &child.body["spec"]);
    wanted.is_some_and(|wanted| {
        !covers(&live["template"], &wanted["template"]) || wanted["replicas"].as_i64() < live["replicas"].as_i64()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        build::{Child, kinds},
        testing::{infd, looked},
    };
    use crate::controllers::waiting::PATIENCE;
    use serde_json::{Value, json};

    fn observed(children: impl IntoIterator<Item = (String, Value)>) -> Observed {
        Observed { children: children.into_iter().collect(), ..looked(infd("chat"), Vec::new()) }
    }

    #[test]
    fn what_takes_a_proof_away_waits_once_and_for_a_while() {
        let (proofs, observed, t) = (Proofs::default(), observed([]), Instant::now());
        let untold = BTreeSet::from(["uid-a".to_owned()]);
        assert!(!proofs.wait(&observed, &untold, false, t), "nothing would go");
        assert!(proofs.wait(&observed, &untold, true, t) && proofs.wait(&observed, &untold, true, t + PATIENCE / 2));
        assert!(!proofs.wait(&observed, &untold, true, t + PATIENCE));
        assert!(!proofs.wait(&observed, &untold, true, t + PATIENCE * 9), "in vain is in vain");
        assert!(!proofs.wait(&observed, &BTreeSet::new(), true, t + PATIENCE * 9), "all is recorded");
        assert!(proofs.wait(&observed, &untold, true, t + PATIENCE * 9), "another one");
        proofs.forget("serving", "chat");
        assert!(proofs.wait(&observed, &untold, true, t + PATIENCE * 20), "another of that name");
    }

    #[test]
    fn pods_go_by_another_template_or_a_lower_number_alone() {
        let spec = |image: &str, replicas: i64| json!({"replicas": replicas, "template": {"spec": {"image": image}}});
        let goes = |live: Option<Value>, wanted: Value| {
            let observed = observed(live.map(|spec| ("Deployment".to_owned(), json!({"spec": spec}))));
            let resource = kinds().into_iter().find(|resource| resource.kind == "Deployment").unwrap();
            let child = Child { resource, name: "chat".to_owned(), body: json!({"spec": wanted}) };
            pods_would_go(&observed, &Plan { applies: vec![child], ..Plan::default() })
        };
        assert!(goes(Some(spec("one", 2)), spec("two", 2)) && goes(Some(spec("one", 2)), spec("one", 1)));
        assert!(!goes(Some(spec("one", 2)), spec("one", 3)) && !goes(None, spec("one", 2)));
    }
}
