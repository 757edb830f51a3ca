//! Everybody's replicas, stalls and grants between two looks at the whole fleet, pure: time is an argument.
//!
//! Whoever grants must know what all others hold (I2). A list of every InferenceDeployment for each grant made a burst cost the square of
//! the fleet. But what a budget is counted by stands in their status, which this operator alone writes while it leads: so one list, kept
//! by what is written, says for a moment what another list would say. A write whose answer is not known closes the book, and so does the
//! beginning of a leadership; what others change (replicas, new objects) is seen by the next list.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crds::{HoldStatus, InferenceDeployment, InferenceDeploymentSpec, InferenceDeploymentStatus};
use jiff::Timestamp;
use kube::{Resource, ResourceExt, core::DynamicObject};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use super::{fleet::Fleet, restarts::PATIENCE_MIN, standing::Counts, trials};
use crate::{client::Verb, wall::ahead};

/// For so long a list is taken for another.
const OPEN_MAX: Duration = Duration::from_secs(1);

/// What one InferenceDeployment adds to the fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// Whose it is, as `namespace/name`: who waits for the fleet is told who holds it.
    owner: String,
    /// Those that are there, whatever the spec asks for.
    replicas: usize,
    stalled: usize,
    /// Node and failure domain of each grant.
    grants_at: Vec<(String, String)>,
    /// The hold that stands there.
    hold: Option<HoldStatus>,
}

/// The book, shared by all passes.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    /// When the list was asked for; `None`: the book is closed.
    listed_at: Option<Instant>,
    /// When a list was asked for that is not there yet.
    asked_at: Option<Instant>,
    /// By UID, each with the moment at which it was written by this operator.
    accounts: BTreeMap<String, (Option<Instant>, Account)>,
}

impl Book {
    fn others(&self, own: &str) -> Fleet {
        let mut fleet = Fleet::default();
        let namespace_of = |account: &Account| account.owner.split_once('/').map(|(namespace, _)| namespace.to_owned());
        let namespace = self.accounts.get(own).and_then(|(_, account)| namespace_of(account));
        for (_, (_, account)) in self.accounts.iter().filter(|(uid, _)| *uid != own) {
            fleet.replicas += account.replicas;
            let stalled = account.stalled + account.hold.as_ref().map_or(0, trials::unproven_elsewhere);
            fleet.stalled += stalled;
            fleet.stalls.extend((stalled > 0).then_some((account.replicas, stalled)));
            let beside = namespace_of(account) == namespace;
            fleet.neighbours |= !beside && account.replicas > 0;
            fleet.granted_beside += if beside { account.grants_at.len() } else { 0 };
            fleet.holds.extend(account.hold.clone());
            fleet.grants_at.extend(account.grants_at.iter().cloned());
            fleet.holders.extend(account.grants_at.iter().map(|_| account.owner.clone()));
        }
        fleet.granted = fleet.grants_at.len();
        fleet
    }
}

impl Account {
    /// Read as plain JSON: one object that this version of the operator cannot read whole (a newer one wrote it) must not keep the whole
    /// fleet from its restarts (B7, B8).
    ///
    /// Nobody looks after one that is being deleted, or that cannot be read: what its status says of stalls and grants would stand for as long
    /// as somebody's finalizer keeps it, or for ever. (The replicas of one that is only unreadable serve on.) But the agents to which it
    /// has granted restarts have their keys already, and what they restart is away; so a grant counts for as long as a restart may take, and so
    /// does the hold of one that is only unreadable, under which one is on trial.
    pub fn of(object: &DynamicObject, now: Timestamp) -> Self {
        let status = &object.data["status"];
        let leaves = object.metadata.deletion_timestamp.is_some();
        let told = Counts::of_json(status);
        let unkept = leaves || !is_readable(object, &told);
        let counts = if leaves { Counts::default() } else { told };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let young =
            |at: &str| at.parse().is_ok_and(|at: Timestamp| now.duration_since(at) < PATIENCE_MIN && !ahead(at, now));
        let tries = |hold: &HoldStatus| hold.pending().is_some_and(|trial| trials::lasts(trial, now));
        let grants = status["recovery"]["grants"].as_array().into_iter().flatten();
        let grants = grants.filter(|grant| !unkept || young(grant["grantedAt"].as_str().unwrap_or_default()));
        let hold = serde_json::from_value(status["recovery"]["hold"].clone()).ok();
        Account {
            owner: owner(object),
            replicas: counts.standing(),
            stalled: if unkept { 0 } else { counts.alarmed() },
            grants_at: grants.map(|grant| (text(&grant["node"]), text(&grant["domain"]))).collect(),
            hold: hold.filter(|hold: &HoldStatus| hold.stands() && (!unkept || (!leaves && tries(hold)))),
        }
    }

    fn of_written(infd: &InferenceDeployment) -> Self {
        let status = infd.status.clone().unwrap_or_default();
        let counts = Counts::of(&status);
        Account {
            owner: owner(infd),
            replicas: counts.standing(),
            stalled: counts.alarmed(),
            grants_at: status.recovery.grants.into_iter().map(|grant| (grant.node, grant.domain)).collect(),
            hold: status.recovery.hold.filter(HoldStatus::stands),
        }
    }
}

/// Can this version look after it? One that tells of no stalls, grants or holds is not read for that: nothing of it would stand.
fn is_readable(object: &DynamicObject, told: &Counts) -> bool {
    let status = &object.data["status"];
    let recovery = &status["recovery"];
    let no_grant = recovery["grants"].as_array().is_none_or(Vec::is_empty);
    let silent = no_grant && recovery["hold"].is_null() && told.alarmed() == 0;
    let whole = || {
        InferenceDeploymentSpec::deserialize(&object.data["spec"]).is_ok()
            && InferenceDeploymentStatus::deserialize(status).is_ok()
    };
    silent || whole()
}

/// Closes the book when it goes, unless the answer was heard.
#[derive(Debug)]
pub struct Doubt<'a>(Option<&'a Ledger>);

impl Doubt<'_> {
    /// What the server has stored is known.
    pub fn settled(mut self, stored: &InferenceDeployment, now: Instant) {
        if let Some(ledger) = self.0.take() {
            ledger.written(stored, now);
        }
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        if let Some(ledger) = self.0 {
            ledger.close();
        }
    }
}

fn owner(object: &impl ResourceExt) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

impl Ledger {
    /// What all others than the one of this UID hold; `None`: the book is closed or too old, and a list is due.
    pub fn others(&self, own: &str, now: Instant) -> Option<Fleet> {
        let book = self.book();
        let listed_at = book.listed_at?;
        (now.saturating_duration_since(listed_at) < OPEN_MAX).then(|| book.others(own))
    }

    /// A list is asked for: what is written from now on may be newer than it.
    pub fn ask(&self, now: Instant) {
        self.book().asked_at = Some(now);
    }

    /// A list that was asked for at `asked_at`. What was written since may be newer than it. Gives what all others than `own` hold by it,
    /// however long it took: for its asker it is as good as any list.
    pub fn open(&self, accounts: BTreeMap<String, Account>, asked_at: Instant, own: &str) -> Fleet {
        let mut book = self.book();
        let newer = |written: &Option<Instant>| written.is_some_and(|at| at >= asked_at);
        book.accounts.retain(|uid, (written, _)| accounts.contains_key(uid) && newer(written));
        for (uid, account) in accounts {
            book.accounts.entry(uid).or_insert((None, account));
        }
        (book.listed_at, book.asked_at) = (Some(asked_at), None);
        book.others(own)
    }

    /// This operator has stored the status of `infd`. Where the book is closed or old, and no list is on its way, the next one will tell: it
    /// is not kept, or a fleet that comes and goes and grants nothing would be remembered for ever.
    fn written(&self, infd: &InferenceDeployment, now: Instant) {
        let mut book = self.book();
        let within = |at: Option<Instant>, most| at.is_some_and(|at| now.saturating_duration_since(at) < most);
        if !within(book.listed_at, OPEN_MAX) && !within(book.asked_at, 2 * Verb::List.deadline()) {
            book.accounts.clear();
        } else if let Some(uid) = infd.meta().uid.clone() {
            book.accounts.insert(uid, (Some(now), Account::of_written(infd)));
        }
    }

    /// A write that may be stored is on its way. Whoever ends before it hears of the answer, dropped for instance, leaves the book closed.
    pub fn doubt(&self) -> Doubt<'_> {
        Doubt(Some(self))
    }

    /// Nothing is certain any more.
    pub fn close(&self) {
        let mut book = self.book();
        *book = Book { asked_at: book.asked_at, ..Book::default() };
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::infd;
    use crds::Grant;
    use serde_json::json;

    fn with_grants(uid: &str, count: usize) -> InferenceDeployment {
        let mut infd = infd("chat");
        infd.metadata.uid = Some(uid.to_owned());
        let mut status = InferenceDeploymentStatus::default();
        status.recovery.grants = vec![Grant::default(); count];
        infd.status = Some(status);
        infd
    }

    fn listed(uids: &[&str]) -> BTreeMap<String, Account> {
        uids.iter().map(|uid| ((*uid).to_owned(), Account { replicas: 4, ..Account::default() })).collect()
    }

    fn granted(ledger: &Ledger, own: &str, now: Instant) -> Option<usize> {
        ledger.others(own, now).map(|fleet| fleet.granted)
    }

    #[test]
    fn a_grant_that_was_stored_counts_without_another_list() {
        let (ledger, t) = (Ledger::default(), Instant::now());
        assert_eq!(granted(&ledger, "c", t), None, "nobody has looked");
        assert_eq!(ledger.open(listed(&["a", "b"]), t, "b").replicas, 4, "whoever asks knows its own");
        assert_eq!(ledger.others("c", t).map(|fleet| fleet.replicas), Some(8));
        ledger.written(&with_grants("a", 2), t);
        assert_eq!((granted(&ledger, "b", t), granted(&ledger, "a", t)), (Some(2), Some(0)), "its own it knows itself");
        ledger.written(&with_grants("a", 1), t);
        assert_eq!(granted(&ledger, "b", t), Some(1));
        assert_eq!(ledger.others("b", t).unwrap().holders, ["serving/chat"], "and whose it is");
    }

    #[test]
    fn a_replica_that_stalls_behind_an_open_gate_counts() {
        let listed = |status: Value| {
            let mut object = serde_json::to_value(infd("chat")).unwrap();
            object["status"] = status;
            Account::of(&serde_json::from_value(object).unwrap(), Timestamp::UNIX_EPOCH).stalled
        };
        assert_eq!(listed(json!({"stalledReplicas": 1, "fencedReplicas": 0})), 1, "the last that serves is spared");
        assert_eq!(listed(json!({"fencedReplicas": 1})), 1, "as an older operator wrote it");
        assert_eq!(
            listed(json!({"fencedReplicas": 3, "fencedByPerson": 2})),
            1,
            "whom a person fenced has not stalled"
        );
        let mut infd = with_grants("a", 0);
        infd.status.get_or_insert_default().stalled_replicas = 1;
        assert_eq!(Account::of_written(&infd).stalled, 1);
        let status = infd.status.get_or_insert_default();
        (status.fenced_replicas, status.fenced_by_person) = (2, 2);
        assert_eq!(Account::of_written(&infd).stalled, 1);
    }

    #[test]
    fn one_that_is_kept_after_its_deletion_or_cannot_be_read_holds_what_its_agents_may_still_restart() {
        let granted_at = "2026-01-01T00:00:00Z";
        let trial = Some(crds::Trial { granted_at: granted_at.to_owned(), ..Default::default() });
        let hold = HoldStatus { since: granted_at.to_owned(), trial, ..HoldStatus::default() };
        let account_of = |deleted: Option<&str>, now: &str, readable: bool| {
            let mut grant = serde_json::to_value(Grant::default()).unwrap();
            (grant["grantedAt"], grant["node"], grant["domain"]) = (json!(granted_at), json!("n1"), json!("z1"));
            let status = json!({
                "replicas": 8, "readyReplicas": 5, "stalledReplicas": 3, "fencedReplicas": 3, "recovery": {"grants": [grant]},
            });
            let metadata = json!({"name": "x", "namespace": "ns", "deletionTimestamp": deleted, "finalizers": ["example.com/wait"]});
            let mut object = json!({"metadata": metadata, "spec": infd("x").spec, "status": status});
            object["status"]["recovery"]["hold"] = json!(hold);
            if !readable {
                object["spec"]["rollout"] = json!({"onFailure": "AskSomebody"});
            }
            Account::of(&serde_json::from_value(object).unwrap(), now.parse().unwrap())
        };
        let account = |deleted, now| account_of(deleted, now, true);
        let at = vec![("n1".to_owned(), "z1".to_owned())];
        let (soon, later, much_later) = ("2026-01-01T00:09:59Z", "2026-01-01T00:10:00Z", "2026-01-01T00:32:01Z");
        let nothing = Account { owner: "ns/x".to_owned(), ..Account::default() };
        let tried = Account { grants_at: at, hold: Some(hold.clone()), ..nothing.clone() };
        assert_eq!(account(None, later), Account { replicas: 8, stalled: 3, ..tried.clone() });
        let deleted = Some("2026-01-01T00:00:01Z");
        assert_eq!(account(deleted, soon), Account { hold: None, ..tried.clone() });
        let serves = Account { replicas: 8, ..nothing.clone() };
        assert_eq!(account_of(None, soon, false), Account { replicas: 8, ..tried });
        let tries = Account { hold: Some(hold.clone()), ..serves.clone() };
        assert_eq!(account_of(None, later, false), tries, "its model may load for as long as a trial lasts");
        assert_eq!(account_of(None, much_later, false), serves, "a version that nobody here understands");
        assert_eq!(account(deleted, later), nothing);
        assert_eq!(account(deleted, "2025-12-31T22:00:00Z"), nothing, "by a clock that was two hours ahead");
    }

    #[test]
    fn a_spec_that_asks_for_much_adds_nothing_to_the_fleet() {
        let mut greedy = with_grants("a", 0);
        greedy.spec.replicas = 1000;
        let status = greedy.status.get_or_insert_default();
        (status.replicas, status.ready_replicas) = (1000, 3);
        let object = serde_json::from_value(serde_json::to_value(&greedy).unwrap()).unwrap();
        let (listed, written) = (Account::of(&object, Timestamp::UNIX_EPOCH), Account::of_written(&greedy));
        assert_eq!((listed.replicas, written.replicas), (3, 3));
    }

    #[test]
    fn it_is_closed_by_time_and_by_doubt() {
        let (ledger, t) = (Ledger::default(), Instant::now());
        ledger.open(listed(&["a"]), t, "");
        assert_eq!(granted(&ledger, "b", t + OPEN_MAX), None);
        ledger.close();
        assert_eq!(granted(&ledger, "b", t), None);
    }

    #[test]
    fn what_is_written_while_nobody_asks_is_not_kept() {
        let (ledger, t) = (Ledger::default(), Instant::now());
        let kept = || ledger.book().accounts.len();
        ledger.written(&with_grants("a", 1), t);
        assert_eq!(kept(), 0, "the book is closed");
        ledger.open(listed(&["a", "b"]), t, "");
        ledger.written(&with_grants("c", 1), t);
        assert_eq!(kept(), 3);
        ledger.written(&with_grants("d", 1), t + OPEN_MAX);
        assert_eq!(kept(), 0, "it is old");
        ledger.ask(t + OPEN_MAX);
        let long = t + OPEN_MAX + 2 * Verb::List.deadline();
        ledger.written(&with_grants("e", 1), long - OPEN_MAX);
        assert_eq!(kept(), 1, "a list is on its way");
        ledger.written(&with_grants("f", 1), long);
        assert_eq!(kept(), 0, "it never came");
    }

    #[test]
    fn what_was_written_while_the_list_was_on_its_way_is_the_newer_one() {
        let (ledger, t) = (Ledger::default(), Instant::now());
        ledger.ask(t);
        ledger.close(); // by another pass, to which nobody has answered
        ledger.written(&with_grants("a", 1), t);
        ledger.written(&with_grants("gone", 1), t + OPEN_MAX);
        ledger.open(listed(&["a", "b"]), t, "");
        assert_eq!(
            granted(&ledger, "b", t),
            Some(1),
            "written after the list was asked for; one that is gone holds nothing"
        );
        ledger.open(listed(&["a", "b"]), t + OPEN_MAX, "");
        assert_eq!(granted(&ledger, "b", t + OPEN_MAX), Some(0), "the list is the newer one");
    }
}
