//! An engine that lies, from its freeze to its successor.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agent::kill::send;
use crds::episode::Episode;
use nix::sys::signal::Signal;

use crate::asking::{SOON, ask};
use crate::run::Run;
use crate::{STREAM, newest_incident};

#[test]
fn an_engine_that_lies_is_fenced_explained_killed_and_replaced() {
    // as the defaults but for the patience of a person at a terminal
    let quick = "foreign_floor_ms=1000,foreign_warm_ms=1000,confirm_strong_ms=500,confirm_moderate_ms=1000,confirm_weak_ms=2000,confirm_timer_ms=2000";
    let run = Run::with(&["--policy", quick]);
    let over = AtomicBool::new(false);
    let (incident, starts) = std::thread::scope(|scope| {
        let clients = || {
            while !over.load(Ordering::Relaxed) {
                ask(&run.gate, STREAM);
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        (0..4).for_each(|_| _ = scope.spawn(clients));
        std::thread::sleep(Duration::from_secs(4));
        // a busy machine may have made one meanwhile, which is not the one that is meant, and another engine
        let serves = || run.ready() == Some(200) && ask(&run.gate, STREAM).is_some_and(|text| text.contains("[DONE]"));
        let begun = Instant::now();
        while !serves() && begun.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(20));
        }
        let starts = run.engine().starts;
        let earlier = newest_incident(&run.agent).map(|incident| incident.id);
        send(&[run.engine().pid], Signal::SIGUSR2);
        let mut closed = None;
        let begun = Instant::now();
        while closed.is_none() && begun.elapsed() < SOON {
            let of_the_freeze = |incident: &Episode| incident.closed() && Some(&incident.id) != earlier.as_ref();
            closed = newest_incident(&run.agent).filter(of_the_freeze);
            std::thread::sleep(Duration::from_millis(20));
        }
        over.store(true, Ordering::Relaxed);
        (closed.expect("the incident never ended"), starts)
    });
    assert_eq!(incident.stage, "Recovered", "{incident:?}");
    let times = [
        &incident.suspect_at,
        &incident.confirmed_at,
        &incident.evidence_at,
        &incident.granted_at,
        &incident.killed_at,
        &incident.serving_at,
    ];
    let times: Vec<&String> = times.into_iter().flatten().collect();
    assert!(times.len() == 6 && times.is_sorted(), "{incident:?}");
    assert!(
        incident.fenced_at.is_some() && incident.requests_lost > 0 && incident.requests_refused > 0,
        "{incident:?}"
    );
    assert!(Path::new(incident.bundle.as_ref().unwrap()).exists());
    assert_eq!((run.engine().starts, incident.granted_by.as_deref()), (starts + 1, Some("self")));
}
