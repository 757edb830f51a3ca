//! The fast part's bound, in virtual time: one source after another never answers, then all of them.

use std::future::{pending, ready};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};

use crds::episode::Episode;
use vitals::observation::{Observation, RasObs, Signal};
use vitals::verdict::Outcome;

use super::*;

/// I6.
const FAST_PART_MAX: Duration = Duration::from_secs(2);
static ENDED: AtomicBool = AtomicBool::new(false);

/// Blocks its thread until the test has ended: the runtime waits for it then.
fn never<T: Default>() -> T {
    while !ENDED.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
    T::default()
}

struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        ENDED.store(true, Ordering::Relaxed);
    }
}

const AT_ONCE: Ways = Ways {
    tree: |_| Vec::new(),
    proc_facts: |_, _| (),
    announced: |_, _, _| announced::Announced::default(),
    pythons: |_, _| Box::pin(ready(PythonStacks::default())),
    last_words: |_, _| Vec::new(),
};
const NEVER: Ways = Ways {
    tree: |_| never(),
    proc_facts: |_, _| never(),
    announced: |_, _, _| never(),
    pythons: |_, _| Box::pin(pending()),
    last_words: |_, _| never(),
};

fn request(engine: Option<EngineProcess>, engine_address: &str) -> CaptureRequest {
    CaptureRequest {
        episode: Episode::default(),
        outcome: Outcome::default(),
        engine,
        steps: Vec::new(),
        metrics_before: None,
        engine_url: format!("http://{engine_address}").parse().unwrap(),
        metrics_path: "/metrics",
        ras_before: None,
        ras_address: None,
        log_tail: Vec::new().into(),
        gpu_note: String::new(),
        observation: None,
        page_dir: PathBuf::new(),
        bundle_dir: PathBuf::new(),
        command_line: Vec::new(),
        image: String::new(),
    }
}

/// What blocks a thread holds virtual time, so the test moves it on by hand: by no more than is asserted.
async fn gathers_in_time(what: &str, ways: Ways, request: &CaptureRequest) {
    let began = tokio::time::Instant::now();
    let mut taken = Taken::default();
    let gathering = taken.fast_part(&ways, request);
    tokio::pin!(gathering);
    loop {
        tokio::select! {
            biased;
            _ = &mut gathering => return,
            () = tokio::task::yield_now() => tokio::time::advance(Duration::from_millis(10)).await,
        }
        assert!(began.elapsed() <= FAST_PART_MAX, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_never_answers_holds_the_fast_part_for_two_seconds_at_most() {
    let _ends = Ends;
    // takes connections, and nobody ever reads from them
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = (silent.local_addr().unwrap().to_string(), silent);
    let lives = request(Some(EngineProcess { pid: i32::MAX, start_ticks: 1 }), "127.0.0.1:1");
    let died = request(None, "127.0.0.1:1");
    for (what, ways) in [
        ("the walk over /proc", Ways { tree: NEVER.tree, ..AT_ONCE }),
        ("what /proc tells of a process", Ways { proc_facts: NEVER.proc_facts, ..AT_ONCE }),
        ("stacks that a process tells", Ways { announced: NEVER.announced, ..AT_ONCE }),
        ("stacks that a helper reads", Ways { pythons: NEVER.pythons, ..AT_ONCE }),
        ("the last words of an engine", Ways { last_words: NEVER.last_words, ..AT_ONCE }),
        ("all of them", NEVER),
    ] {
        gathers_in_time(what, ways, &lives).await;
        gathers_in_time(what, ways, &died).await;
    }
    gathers_in_time("the metrics", AT_ONCE, &request(lives.engine.clone(), &silent.0)).await;
    gathers_in_time("all of them, and the metrics", NEVER, &request(lives.engine.clone(), &silent.0)).await;
    gathers_in_time("all of them, and the metrics", NEVER, &request(None, &silent.0)).await;
}

#[test]
fn whom_the_last_answer_of_ras_has_named_the_service_is_not_asked_for_again() {
    let said = |at_ms, silent_ranks: &[u32], silent_elsewhere| {
        let silent_ranks = silent_ranks.to_vec();
        let ras = Signal::at(at_ms, RasObs { silent_ranks, silent_elsewhere, answered: true, ..RasObs::default() });
        let (ras_before, observation) =
            (Some((at_ms, "ranks".to_owned())), Some(Observation { ras, ..Observation::default() }));
        CaptureRequest { ras_before, observation, ..request(None, "127.0.0.1:1") }
    };
    let now_ms = 50_000;
    for (told, named) in [
        (said(now_ms - RAS_RECENT_MS, &[3], false), true),
        (said(now_ms, &[], true), true),
        (said(now_ms, &[], false), false),
        (said(now_ms - RAS_RECENT_MS - 1, &[3], false), false),
        (CaptureRequest { ras_before: None, ..said(now_ms, &[3], false) }, false),
        (request(None, "127.0.0.1:1"), false),
    ] {
        assert_eq!(has_named_a_silent_rank(&told, now_ms), named, "{:?}", told.observation);
    }
}
