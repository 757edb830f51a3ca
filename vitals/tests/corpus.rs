//! The documented hangs H1–H13 and their healthy look-alikes B1–B9, as made-up histories: 13 of 13 with the right class, no alarm in the
//! others. The table in `docs/detector.md` is this test's output and must be fresh (`make regenerate`).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;
#[path = "corpus/hangs.rs"]
mod hangs;
#[path = "corpus/healthy.rs"]
mod healthy;

use common::{Sim, stalled, suspect};
use vitals::observation::Ms;
use vitals::verdict::Verdict;

/// A hang: number, what it is, which classes are right, the engine before it, and what a tick of it does.
pub struct Hang {
    pub id: &'static str,
    pub what: &'static str,
    pub right: &'static [&'static str],
    pub build: fn() -> Sim,
    pub tick: fn(&mut Sim),
}

/// A healthy look-alike: its whole history; false as soon as a tick alarms.
pub struct Healthy {
    pub id: &'static str,
    pub what: &'static str,
    pub play: fn() -> Vec<Verdict>,
}

fn seconds(ms: Ms) -> String {
    format!("{:.1}", ms as f64 / 1000.0)
}

/// One row of the table for a hang: fenced after, confirmed after, class.
fn row_of(hang: &Hang) -> String {
    let mut sim = (hang.build)();
    let began = sim.now;
    let (mut fenced, mut confirmed, mut class) = (None, None, String::new());
    while confirmed.is_none() && sim.now - began < 400_000 {
        (hang.tick)(&mut sim);
        let outcome = sim.tick(100);
        let judged = suspect(&outcome.verdict) || stalled(&outcome.verdict) || outcome.verdict == Verdict::Dead;
        fenced = fenced.or(judged.then_some(sim.now - began));
        if stalled(&outcome.verdict) || outcome.verdict == Verdict::Dead {
            confirmed = Some(sim.now - began);
            let named = outcome.verdict.class().map(|class| format!("Stalled({})", class.name()));
            class = named.unwrap_or_else(|| "Dead".to_owned());
        }
    }
    assert!(confirmed.is_some(), "{}: never confirmed: {:?}", hang.id, sim.last);
    let (fenced, confirmed) = (fenced.unwrap(), confirmed.unwrap());
    let right = hang.right.iter().any(|right| class.contains(right));
    assert!(right, "{}: {class}, but right is {:?}: {:?}", hang.id, hang.right, sim.last);
    format!("| {} | {} | {class} | {} | {} |\n", hang.id, hang.what, seconds(fenced), seconds(confirmed))
}

fn row_of_healthy(case: &Healthy) -> String {
    let seen = (case.play)();
    let alarms = seen.iter().filter(|v| suspect(v) || stalled(v) || **v == Verdict::Dead).count();
    assert_eq!(alarms, 0, "{}: {:?}", case.id, seen.iter().find(|v| suspect(v) || stalled(v)));
    let mut names: Vec<&str> = seen.iter().map(Verdict::name).collect();
    names.dedup();
    names.truncate(4);
    format!("| {} | {} | {} | no alarm |\n", case.id, case.what, names.join(", "))
}

fn table() -> String {
    let mut text = "| | hang | verdict | fenced after, s | confirmed after, s |\n|---|---|---|---|---|\n".to_owned();
    hangs::ALL.iter().for_each(|hang| text.push_str(&row_of(hang)));
    text.push_str("\n| | healthy look-alike | verdicts seen | |\n|---|---|---|---|\n");
    healthy::ALL.iter().for_each(|case| text.push_str(&row_of_healthy(case)));
    text
}

#[test]
fn every_documented_hang_is_told_with_its_class_and_no_look_alike_is_and_the_docs_say_so() {
    let numbers: std::collections::BTreeSet<&str> =
        hangs::ALL.iter().map(|hang| hang.id.trim_end_matches(char::is_alphabetic)).collect();
    assert_eq!(numbers.len(), 13, "{numbers:?}");
    let kinds: std::collections::BTreeSet<&str> =
        healthy::ALL.iter().map(|case| case.id.trim_end_matches(char::is_alphabetic)).collect();
    assert_eq!(kinds.len(), 9, "{kinds:?}");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/detector.md");
    let docs = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = docs.split_once("<!-- corpus -->\n").unwrap();
    let (old, tail) = rest.split_once("<!-- /corpus -->").unwrap();
    let new = table();
    if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
        std::fs::write(&path, format!("{head}<!-- corpus -->\n{new}<!-- /corpus -->{tail}")).unwrap();
    } else {
        assert_eq!(old, new, "the table in docs/detector.md is stale: make regenerate");
    }
}
