//! P6: an error that a person or the cluster makes and mends again leaves nothing behind, and nobody has to help. While it
//! lasts the status says so, and whatever served goes on serving.

use serde_json::{Value, json};

use super::{
    act::Act,
    faults::{Faults, Rule},
    report::Report,
    run::run,
    story::{Story, create, edit, plain, spec},
};

/// The time in which something is wrong.
const WRONG: (u64, u64) = (20_000, 60_000);

/// One error.
pub struct Error {
    pub name: &'static str,
    kind: Kind,
}

enum Kind {
    /// A spec that cannot be built, as a merge patch.
    Spec(Value),
    /// Somebody else's object has the name of this child.
    Squatted(&'static str),
    /// The API refuses these verbs on these kinds.
    Refused(&'static [&'static str], &'static [&'static str], (u16, &'static str, &'static str)),
}

/// All of them.
pub fn all() -> Vec<Error> {
    let spec = |name, patch: Value| Error { name, kind: Kind::Spec(patch) };
    let children: &[&str] = &["services", "deployments", "roles", "rolebindings", "serviceaccounts"];
    let refused = |name, verbs, plurals, why| Error { name, kind: Kind::Refused(verbs, plurals, why) };
    let gpu = json!({"resources": {"requests": {"nvidia.com/gpu": "1"}}});
    vec![
        spec("unattended-after", json!({"recovery": {"unattendedAfter": "99999999999h"}})),
        spec("unattended-window", json!({"recovery": {"unattendedWindow": "99999999999h"}})),
        spec("stability-window", json!({"recovery": {"stabilityWindow": "99999999999h"}})),
        spec("backoff", json!({"recovery": {"restartBackoff": "10m"}})),
        spec("ports-clash", json!({"gate": {"port": 8000}})),
        spec("agent-port", json!({"engine": {"port": 9400}})),
        spec("no-model", json!({"model": null})),
        spec("two-sources", json!({"model": {"source": {"pvc": {"claimName": "c", "path": "m"}}}})),
        spec("pvc-escapes", json!({"model": {"source": {"file": null, "pvc": {"claimName": "c", "path": "../m"}}}})),
        spec("half-a-gpu", json!({"engine": gpu})),
        Error { name: "service-squatted", kind: Kind::Squatted("services") },
        Error { name: "role-squatted", kind: Kind::Squatted("roles") },
        refused("template-invalid", &["patch"], &["deployments"], (422, "Invalid", "spec.template is invalid")),
        refused("forbidden", &["patch"], children, (403, "Forbidden", "cannot patch")),
        refused("webhook-down", &["patch"], &["deployments"], (500, "InternalError", "failed calling webhook")),
    ]
}

/// The error in mid-life, and from the beginning; both must end as if it had never been.
pub fn mended(error: &Error, keep_lines: bool) -> Report {
    let never = run(&plain(vec![create(2)], Vec::new()), false);
    let mut born_bad = run(&from_the_start(error), false);
    born_bad.compare("P6", "the good spec alone", &never);
    let mut report = run(&in_mid_life(error), keep_lines);
    report.compare("P6", "the good spec alone", &never);
    report.violations.extend(born_bad.violations.into_iter().map(|what| format!("{what} (bad from the start)")));
    // whatever is not in order after the mending has not recovered
    let not_recovered = |what: &String| ["P4", "P7", "P13"].iter().any(|p| what.contains(p));
    for what in report.violations.iter_mut().filter(|what| not_recovered(what)) {
        *what = what.replace("P4:", "P6:").replace("P7:", "P6:").replace("P13:", "P6:");
    }
    report
}

fn in_mid_life(error: &Error) -> Story {
    let mut acts = vec![create(2)];
    acts.extend(begin(error, WRONG.0));
    // a write is wanted, so that the refusal is met
    let image = |at_ms, image: &str| edit(at_ms, json!({"engine": {"image": image}}));
    acts.push(image(WRONG.0 + 500, "engine:2"));
    acts.push((WRONG.1 - 1_000, Act::ExpectServing { count: 2 }));
    acts.push((WRONG.1 - 1_000, trouble(error)));
    acts.extend(end(error, WRONG.1));
    acts.push(image(WRONG.1 + 250, "engine:1"));
    story(error, acts, WRONG.0)
}

fn from_the_start(error: &Error) -> Story {
    let mut acts = begin(error, 0);
    acts.insert(usize::from(matches!(error.kind, Kind::Squatted(_))), create(2));
    acts.push((WRONG.1 - 1_000, trouble(error)));
    acts.extend(end(error, WRONG.1));
    story(error, acts, 0)
}

fn story(error: &Error, acts: Vec<(u64, Act)>, from_ms: u64) -> Story {
    let mut faults = Faults::none(7);
    if let Kind::Refused(verbs, plurals, why) = error.kind {
        faults.rules.push(Rule::refuse((from_ms, WRONG.1), verbs, plurals, why));
    }
    Story { faults, ..plain(acts, Vec::new()) }
}

/// The status must tell of it: `Stalled` where a person is needed, `Reconciling` where time may help.
fn trouble(error: &Error) -> Act {
    let transient = matches!(error.kind, Kind::Refused(_, _, (500.., _, _)));
    Act::Expect { condition: if transient { "Reconciling" } else { "Stalled" }, status: Some("True") }
}

fn begin(error: &Error, at_ms: u64) -> Vec<(u64, Act)> {
    match &error.kind {
        Kind::Spec(patch) => vec![edit(at_ms, patch.clone())],
        Kind::Squatted(plural) => {
            let mut acts = vec![(at_ms, Act::Squat { plural })];
            if at_ms > 0 {
                acts.insert(0, (at_ms, Act::DeleteChild { plural }));
            }
            acts
        }
        Kind::Refused(..) => Vec::new(),
    }
}

fn end(error: &Error, at_ms: u64) -> Vec<(u64, Act)> {
    match &error.kind {
        Kind::Spec(_) => vec![(at_ms, Act::Replace { name: "chat", spec: spec(2, "Recover") })],
        Kind::Squatted(plural) => vec![(at_ms, Act::Unsquat { plural })],
        Kind::Refused(..) => Vec::new(),
    }
}
