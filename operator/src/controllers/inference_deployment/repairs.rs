//! Who changes a child back each time we apply it, pure: time is an argument.
//!
//! A mutating webhook that writes our fields its own way, another operator of another version, a tool that repairs what it takes for drift: each
//! answers an apply with a change, which is an event, which is a pass, which would apply again, ten times a second and for ever (A5, P7). A hand
//! that was faster is repaired at once, and so is the next one; whoever goes on is answered more and more seldom, until the wish itself is
//! another or they leave it alone for a while. Nothing else of a pass waits for that: recovery goes on.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{build::Child, plan::ANNOTATION_APPLIED};
use crate::controllers::queue::Key;

/// So many times in a row the same is applied without a pause.
const AT_ONCE_MAX: u32 = 2;
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// What was left alone for so long was a matter of its own.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(900);

/// By InferenceDeployment and kind of child: what was applied last, and how often in a row.
#[derive(Debug, Default)]
pub struct Repairs(Mutex<HashMap<Key, HashMap<String, Repair>>>);

#[derive(Debug)]
struct Repair {
    hash: String,
    times: u32,
    at: Instant,
}

impl Repairs {
    /// Takes out of `applies` what was applied too often of late; gives how long until the first of these may be again.
    pub fn hold_back(&self, of: &Key, applies: &mut Vec<Child>, now: Instant) -> Option<Duration> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = known.get(of)?;
        let mut first: Option<Duration> = None;
        applies.retain(|child| {
            let left = of.get(&child.resource.kind).and_then(|repair| repair.pause_left(child, now));
            first = first.into_iter().chain(left).min();
            left.is_none()
        });
        first
    }

    /// The server took `child`.
    pub fn applied(&self, of: &Key, child: &Child, now: Instant) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_it = known.entry(of.clone()).or_default();
        let again = of_it.get(&child.resource.kind).filter(|last| last.is_of(child, now)).map_or(0, |last| last.times);
        let repair = Repair { hash: hash(child).to_owned(), times: again.saturating_add(1), at: now };
        if repair.times == AT_ONCE_MAX + 1 {
            let (namespace, name) = of;
            tracing::warn!(
                namespace,
                name,
                kind = child.resource.kind,
                child = child.name,
                "somebody changes this back whenever it is applied (a webhook, another tool or operator): it will be applied more and more seldom"
            );
        }
        of_it.insert(child.resource.kind.clone(), repair);
    }

    /// There is nothing of this name any more.
    pub fn forget(&self, namespace: &str, name: &str) {
        let of = (namespace.to_owned(), name.to_owned());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&of);
    }
}

impl Repair {
    fn is_of(&self, child: &Child, now: Instant) -> bool {
        self.hash == hash(child) && now.duration_since(self.at) < FORGOTTEN_AFTER
    }

    /// `None`: `child` may be applied now.
    fn pause_left(&self, child: &Child, now: Instant) -> Option<Duration> {
        let more = self.times.checked_sub(AT_ONCE_MAX).filter(|_| self.is_of(child, now))?;
        let pause = PAUSE_MIN.saturating_mul(2_u32.saturating_pow(more)).min(PAUSE_MAX);
        pause.checked_sub(now.duration_since(self.at)).filter(|left| !left.is_zero())
    }
}

/// Of what is wished of it.
fn hash(child: &Child) -> &str {
    child.body["metadata"]["annotations"][ANNOTATION_APPLIED].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::build::kinds;
    use serde_json::json;

    fn child(hash: &str) -> Child {
        let [resource, ..] = kinds();
        Child { resource, name: "chat".into(), body: json!({"metadata": {"annotations": {ANNOTATION_APPLIED: hash}}}) }
    }

    /// How often the same is applied in `span` where somebody changes it back within a tick of 50 ms.
    fn applied_in(repairs: &Repairs, what: impl Fn(u64) -> Child, span: Duration, from: Instant) -> u32 {
        let of = ("serving".to_owned(), "chat".to_owned());
        let ticks = span.as_millis() as u64 / 50;
        let mut count = 0;
        for tick in 0..ticks {
            let (now, mut applies) = (from + Duration::from_millis(50 * tick), vec![what(tick)]);
            let held = repairs.hold_back(&of, &mut applies, now);
            assert_eq!(held.is_some(), applies.is_empty());
            for child in &applies {
                repairs.applied(&of, child, now);
                count += 1;
            }
        }
        count
    }

    #[tokio::test]
    async fn whoever_changes_it_back_each_time_is_answered_more_and_more_seldom() {
        let (repairs, now) = (Repairs::default(), Instant::now());
        let same = |_| child("a");
        assert_eq!(
            applied_in(&repairs, same, Duration::from_millis(100), now),
            2,
            "a hand that was faster, and one more"
        );
        let minute = applied_in(&repairs, same, Duration::from_secs(60), now + Duration::from_millis(100));
        assert!((5..=8).contains(&minute), "{minute}");
        let hour = applied_in(&repairs, same, Duration::from_secs(3600), now + Duration::from_secs(61));
        assert!((11..=16).contains(&hour), "{hour}");
        let later = now + Duration::from_secs(3661) + FORGOTTEN_AFTER + PAUSE_MAX;
        assert_eq!(applied_in(&repairs, same, Duration::from_millis(100), later), 2, "it was left alone for a while");
    }

    #[tokio::test]
    async fn another_wish_is_applied_at_once() {
        let (repairs, now) = (Repairs::default(), Instant::now());
        let scaled = |tick: u64| child(&tick.to_string());
        assert_eq!(applied_in(&repairs, scaled, Duration::from_secs(2), now), 40);
    }
}
