//! The properties of RELIABILITY §2.2 that every single request can break: P2, P8, P9, P10, P14 and the first invariant,
//! and the counts for P7. What needs the world (P15, P16) is in `world`, what needs the end of a run (P1, P4, P7, P13) in
//! `end`; P5 and P11 are asked of `fields`, P6 of `mend`, P12 of `cluster` and `twin`.

use std::collections::{BTreeMap, BTreeSet};

use crds::episode::{CONDITION_EPISODE, Episode};
use serde_json::Value;

use super::{
    foreign::foreign,
    kube::{
        object::Object,
        store::{Entry, Store},
        wire::Call,
    },
    owners::trespass,
    passes::Caller,
    spoken::{Spoken, hear},
};

const GROUP: &str = "inferencedeployments";

/// What was found, and what was counted.
#[derive(Debug, Default)]
pub struct Checks {
    /// `P8 …`, in the order of their happening.
    pub violations: Vec<String>,
    /// Writes of operators by path (P7).
    pub writes: BTreeMap<String, u64>,
    /// Effective writes of operators, the Lease not counted.
    pub effective: u64,
    /// Whom the Lease named last.
    leader: String,
    /// The only namespace in which operators have rights; `None`: everywhere.
    pub scope: Option<&'static str>,
    /// Until when two may believe that they lead, because the clock of one stands: the preconditions of what they write are all there is.
    pub two_lead_until_ms: u64,
    /// UIDs of the pods that operators have deleted (P15).
    pub replaced: BTreeSet<String>,
    /// The words that operators have written.
    pub said: Spoken,
}

impl Checks {
    pub fn broken(&mut self, now_ms: u64, what: String) {
        if self.violations.len() < 20 {
            self.violations.push(format!("{:.3} s: {what}", now_ms as f64 / 1000.0));
        }
    }

    /// P10, S1: an operator of one namespace asks for nothing beyond it (the Lease apart, which is in its own).
    pub fn within_scope(&mut self, call: &Call, now_ms: u64) {
        let beyond = self.scope.is_some_and(|scope| call.target.namespace != scope);
        if beyond && call.target.kind.plural != "leases" {
            self.broken(now_ms, format!("P10: {} {} is beyond the one namespace", call.method, call.path));
        }
    }

    /// P2: what is decided on is read from the store and not from a cache that may lag.
    pub fn read(&mut self, call: &Call, now_ms: u64) {
        if !call.is_watch() && call.query.contains_key("resourceVersion") {
            self.broken(now_ms, format!("P2: {} is read from a cache", call.path));
        }
    }

    /// A write of an operator reached the server.
    pub fn write(
        &mut self,
        store: &Store,
        caller: &Caller,
        call: &Call,
        before: Option<&Entry>,
        (code, effective, now_ms): (u16, bool, u64),
    ) {
        let (plural, old) = (call.target.kind.plural, before.map(|entry| &*entry.value));
        if plural == "leases" {
            self.leader = leader(store).unwrap_or_else(|| std::mem::take(&mut self.leader));
            return self.lease(call, now_ms);
        }
        let name = format!("{} {}", call.method, call.path);
        if let Some(what) = precondition(call) {
            self.broken(now_ms, format!("P8: {name}: {what}"));
        }
        if call.body["metadata"]["annotations"].as_object().is_some_and(serde_json::Map::is_empty) {
            self.broken(now_ms, format!("P7: {name} sets no annotation"));
        }
        *self.writes.entry(name.clone()).or_default() += 1;
        if !(200..300).contains(&code) {
            return;
        }
        self.fenced(store, caller, &name, now_ms);
        // (an event has its name in what is sent alone)
        let written = store.get(&call.target.key()).map_or(&call.body, |entry| &*entry.value);
        let unlisted = hear(&mut self.said, plural, written);
        unlisted.into_iter().for_each(|what| self.broken(now_ms, format!("P13: {name}: {what}")));
        if let Some(what) = trespass(store, caller.work.as_ref(), call, old) {
            self.broken(now_ms, format!("P10: {name} {what}"));
        }
        if let Some(new) = store.get(&call.target.key()).map(|entry| entry.value.clone()) {
            let faults = foreign(call, before, &new);
            faults.into_iter().for_each(|what| self.broken(now_ms, format!("P9: {name}: {what}")));
        }
        if let Some(what) = old.and_then(|old| unconfirmed(call, old)) {
            self.broken(now_ms, format!("I1: {name}: {what}"));
        }
        if let Some(what) = old.and_then(|old| unasked(call, old)) {
            self.broken(now_ms, format!("I1: {name}: {what}"));
        }
        if let Some(what) = old.and_then(|old| unstored(store, call, old)) {
            self.broken(now_ms, format!("P15: {name}: {what}"));
        }
        if let Some(what) = old.and_then(|old| untried(store, call, old)) {
            self.broken(now_ms, format!("P15: {name}: {what}"));
        }
        if let Some(what) = old.and_then(|old| unremembered(store, call, old)) {
            self.broken(now_ms, format!("P1: {name}: {what}"));
        }
        if call.verb() == "delete" && plural == "pods" {
            self.replaced.extend(old.and_then(|old| old["metadata"]["uid"].as_str()).map(str::to_owned));
        }
        self.effective += u64::from(effective);
    }

    /// P14: whoever writes is the one whom the Lease names, at the moment at which the write takes effect; where it names nobody, is
    /// only claimed, or is gone, the one whom it named last.
    fn fenced(&mut self, store: &Store, caller: &Caller, name: &str, now_ms: u64) {
        if now_ms < self.two_lead_until_ms {
            return;
        }
        let leads = leader(store).unwrap_or_else(|| self.leader.clone());
        if !leads.is_empty() && leads != caller.identity {
            self.broken(now_ms, format!("P14: {name} by {} while {leads} leads", caller.identity));
        }
    }

    fn lease(&mut self, call: &Call, now_ms: u64) {
        let version = call.body["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        if call.method == http::Method::PUT && version.is_empty() {
            self.broken(now_ms, "P14: the Lease was written without its resourceVersion".to_owned());
        }
    }
}

/// Whom the Lease gives the right to write; `None`: nobody.
pub fn leader(store: &Store) -> Option<String> {
    let (_, lease) = store.of("leases").next()?;
    let spec = &lease.value["spec"];
    let holder = spec["holderIdentity"].as_str().filter(|holder| !holder.is_empty())?;
    spec["acquireTime"].is_string().then(|| holder.to_owned())
}

/// P8: what may hit a later incarnation must say which one it means.
fn precondition(call: &Call) -> Option<&'static str> {
    let body = &call.body;
    match (call.method.as_str(), call.target.kind.plural) {
        ("DELETE", _) if !body["preconditions"]["uid"].is_string() => Some("a delete without the UID"),
        ("PATCH", "pods") if !body["metadata"]["uid"].is_string() => Some("a pod patch without the UID"),
        ("PUT", _) if body["metadata"]["resourceVersion"].as_str().is_none_or(str::is_empty) => {
            Some("a replace without the resourceVersion")
        }
        _ => None,
    }
}

/// I1: nothing is granted without evidence. What is confirmed once stays so: a slow operator does no wrong.
fn unconfirmed(call: &Call, pod: &Object) -> Option<String> {
    let granted = call.body["metadata"]["annotations"]["truebeat.io/restart-grant"].as_str()?;
    let unproven = told(pod).is_some_and(|(_, episode)| episode.id == *granted && episode.confirmed_at.is_none());
    unproven.then(|| format!("a grant for {granted}, which is not confirmed"))
}

/// I1: who is deleted stalls at that moment. One that went on by itself is another than the one that was looked at.
fn unasked(call: &Call, pod: &Object) -> Option<String> {
    let (open, episode) = told(pod).unwrap_or_default();
    // (the first end is the kill)
    let ends = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
    let fails = episode.stage == "Restarting" && episode.granted_by.is_some() && ends > 1;
    let asks = open && (episode.awaits_grant() || episode.awaits_replacement() || fails);
    let deleted = call.verb() == "delete" && call.target.kind.plural == "pods";
    (deleted && !asks).then(|| format!("its episode {} is {}, open: {open}", episode.id, episode.stage))
}

/// The episode that a pod tells of, and whether it says that it is open.
fn told(pod: &Object) -> Option<(bool, Episode)> {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let condition = conditions.find(|c| c["type"] == CONDITION_EPISODE)?;
    let episode = serde_json::from_str(condition["message"].as_str()?).ok()?;
    Some((condition["status"] == "True", episode))
}

/// P15, I2: the budget holds what a pod is told before the pod hears of it; a plan that could not be stored is nobody's.
fn unstored(store: &Store, call: &Call, pod: &Object) -> Option<String> {
    let granted = call.body["metadata"]["annotations"]["truebeat.io/restart-grant"].as_str()?;
    let owner = pod["metadata"]["labels"][crds::LABEL_DEPLOYMENT].as_str()?;
    let infd = store.get(&(GROUP, call.target.namespace.clone(), owner.to_owned()))?;
    let grants = infd.value["status"]["recovery"]["grants"].as_array();
    let stored = grants.into_iter().flatten().any(|grant| grant["episode"] == granted);
    (!stored).then(|| format!("a grant for {granted}, which stands in no budget"))
}

/// P15, I2: where a common cause holds restarts whoever is granted one is on trial, is remembered as that, and is so alone.
fn untried(store: &Store, call: &Call, old: &Object) -> Option<String> {
    let new = store.get(&call.target.key()).filter(|_| call.target.kind.plural == GROUP)?.value.clone();
    let hold = |infd: &Object| infd["status"]["recovery"]["hold"].clone();
    let (before, after) = (hold(old), hold(&new));
    let stands = |hold: &Value| hold["since"].is_string() && hold["overAt"].is_null();
    let conditions = old["status"]["conditions"].as_array();
    // elsewhere than in a place that is held restarts are granted
    let whole = |c: &Value| c["type"] == "RestartsHeld" && c["reason"] != "PlaceCommonCause";
    if !stands(&before) || !stands(&after) || !conditions.into_iter().flatten().any(whole) {
        return None;
    }
    let grants = |infd: &Object| infd["status"]["recovery"]["grants"].as_array().cloned().unwrap_or_default();
    let same = |a: &Value, b: &Value| a["episode"] == b["episode"] && a["action"] == b["action"];
    let held = grants(old);
    let fresh: Vec<Value> = grants(&new).into_iter().filter(|grant| !held.iter().any(|old| same(grant, old))).collect();
    let pending = before["trial"]["outcome"] == "Pending" && after["trial"]["episode"] != before["trial"]["episode"];
    let known = |grant: &Value| grant["episode"] == after["trial"]["episode"];
    // what a person has asked for is no trial
    let asked = |grant: &Value| {
        let pods = store.of("pods").map(|(_, entry)| &entry.value["metadata"]["annotations"]["truebeat.io/restart"]);
        let wishes = pods.filter_map(|text| text.as_str().and_then(crds::restart::RestartWish::read));
        wishes.into_iter().any(|wish| grant["episode"] == wish.episode)
    };
    let fresh: Vec<Value> = fresh.into_iter().filter(|grant| !asked(grant)).collect();
    if fresh.len() > 1 || !fresh.iter().all(known) {
        return Some(format!("{fresh:?} under a hold whose trial is {}", after["trial"]));
    }
    let whole_fleet = |c: &Value| c["type"] == "RestartsHeld" && c["reason"] == "FleetCommonCause";
    let of_fleet = || old["status"]["conditions"].as_array().into_iter().flatten().any(whole_fleet);
    let elsewhere = || {
        let others = store.of(GROUP).filter(|(_, entry)| entry.value["metadata"]["uid"] != old["metadata"]["uid"]);
        others.map(|(_, entry)| hold(&entry.value)).find(|hold| stands(hold) && hold["trial"]["outcome"] == "Pending")
    };
    let beside = Some(before["trial"].clone()).filter(|_| pending).or_else(|| elsewhere().filter(|_| of_fleet()));
    beside.filter(|_| !fresh.is_empty()).map(|trial| format!("a trial beside {trial}"))
}

/// P1, B8: what pods are brought to is remembered before they are: an operator of another version may come after a crash.
fn unremembered(store: &Store, call: &Call, old: &Object) -> Option<String> {
    let revision =
        |deployment: &Object| deployment["spec"]["template"]["metadata"]["labels"][crds::LABEL_REVISION].clone();
    let target = &call.target;
    let new = store.get(&target.key()).filter(|_| target.kind.plural == "deployments")?.value.clone();
    let owner = new["metadata"]["labels"][crds::LABEL_DEPLOYMENT].as_str().unwrap_or_default().to_owned();
    let infd = store.get(&(GROUP, target.namespace.clone(), owner))?;
    let memory = &infd.value["status"]["rollout"];
    let known = ["wanted", "target", "stable"].iter().any(|field| memory[*field] == revision(&new));
    let unknown = revision(&new) != revision(old) && !known;
    unknown.then(|| format!("revision {} stands in no status: {memory}", revision(&new)))
}
