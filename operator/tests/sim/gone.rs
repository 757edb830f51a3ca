//! Kinds that are gone and come back (A15): the server knows nothing of them, which is told by the code by which it tells of an object that is
//! not there. Whoever takes the one for the other takes back what stands.

use super::{
    act::Act,
    broken::Fault,
    faults::Rule,
    rows::{CRDS, Row, row},
    story::{Story, create, plain},
};

const UNKNOWN: (u16, &str, &str) = (404, "NotFound", "the server could not find the requested resource");

pub fn rows() -> Vec<Row> {
    vec![
        row("a15-crd-gone-and-a-node-marked", marked, |log| vec![log.quiet((110_000, 200_000))]),
        row("a15-crd-deleted-and-made-anew", made_anew, |log| {
            let made = log.changes("deployments/chat 201", (76_000, 100_000));
            vec![log.no_delete(), log.quiet((15_000, 61_000)), made]
        }),
    ]
}

/// A node is known for its broken GPU, and then nobody knows what InferenceDeployments are: there is none that wants it marked, as far as the
/// server tells. The mark stays.
fn marked() -> Story {
    let fault = Fault { code: 79, remedy: "RestartNode" };
    let known = |at_ms| (at_ms, Act::ExpectMarked { node: 0, marked: true });
    let breaks = (20_000, Act::GpuFault { node: 0, fault, dies: false });
    let mut story = plain(vec![create(2), breaks, known(100_000), known(199_000), known(230_000)], Vec::new());
    story.faults.rules.push(Rule::refuse((110_000, 200_000), &[], CRDS, UNKNOWN));
    story
}

/// With the kind went its objects, and their children stand on, for the garbage collector cannot tell whether a kind that it does not know has
/// such an owner. The kind comes back, somebody applies the same file, and what was left goes then.
fn made_anew() -> Story {
    let goes = (16_000, Act::Delete { name: "chat" });
    let again = (60_000, create(2).1);
    let serving = |at_ms| (at_ms, Act::ExpectServing { count: 2 });
    // (it takes a minute each for the Deployment, its ReplicaSet and the pods)
    let acts = vec![create(2), serving(15_500), goes, serving(59_000), again, serving(240_000)];
    let mut story = plain(acts, Vec::new());
    story.garbage_ms = 60_000;
    story.faults.rules.push(Rule::refuse((15_000, 61_000), &[], CRDS, UNKNOWN));
    story
}
