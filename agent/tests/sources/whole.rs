//! All sources at once around one real process with a real page and a real server.

use std::path::Path;
use std::time::{Duration, Instant};

use agent::sources::clock::monotonic_ms;
use agent::sources::pace::Pace;
use agent::sources::{EngineProcess, PageSource, Sources, SourcesConfig};
use axum::Router;
use axum::routing::get;
use heartbeat::Writer;
use heartbeat::page::{Beat, Identity, Phase, StepOutcome, StepRecord};
use vitals::observation::PagePhase;

use crate::fixture::{Session, pages};
use crate::http::{eventually_async, serve};

fn page(directory: &Path, nonce: u64) -> Writer {
    let mut writer = Writer::create(directory, &Identity::of_this_process(0, 1, nonce).unwrap()).unwrap();
    let now_ns = heartbeat::monotonic_ns();
    writer.publish(&Beat {
        steps_completed: 7,
        tokens_delivered: 70,
        requests_finished: 1,
        running: 2,
        waiting: 3,
        prompt_tokens_owed: 40,
        phase_entered_ns: now_ns - 9_000_000,
        lease_ms: 500,
        ..Beat::of_phase(Phase::Decode, now_ns)
    });
    let (started_ns, ended_ns) = (now_ns - 5_000_000, now_ns - 4_000_000);
    writer.record(&StepRecord {
        step: 7,
        started_ns,
        ended_ns,
        requests: 2,
        prefill_tokens: 0,
        decode_tokens: 2,
        graph_key: 0,
        outcome: StepOutcome::Ok,
    });
    writer
}

#[test]
fn a_page_is_told_in_milliseconds_and_a_wrong_nonce_is_silence() {
    let directory = tempfile::tempdir().unwrap();
    let mut source = PageSource::new(directory.path(), 2, Some(9));
    assert!(pages(&mut source).is_empty());
    let _writer = page(directory.path(), 9);
    let mut look = Vec::new();
    assert_eq!(source.look(monotonic_ms(), Pace::Stare, &mut look), i32::try_from(std::process::id()).ok());
    assert_eq!(look.len(), 1, "rank 1 has no page");
    let seen = &look[0];
    assert_eq!((seen.steps_completed, seen.tokens_delivered, seen.running, seen.waiting), (7, 70, 2, 3));
    assert_eq!((seen.phase, seen.lease_ms, seen.step_started_ms), (PagePhase::Decode, 500, None));
    let now_ms = monotonic_ms();
    assert!(
        seen.published_ms <= now_ms && seen.phase_entered_ms < seen.published_ms && now_ms - seen.published_ms < 60_000
    );
    assert_eq!(source.steps().len(), 1);
    assert!(pages(&mut PageSource::new(directory.path(), 1, Some(8))).is_empty());
}

fn idle(published_ns: u64) -> Beat {
    let beat = Beat::of_phase(Phase::Idle, published_ns);
    Beat { steps_completed: 7, tokens_delivered: 70, requests_finished: 1, phase_entered_ns: 1, ..beat }
}

/// How many times `look` reads anything.
fn reads(look: impl FnOnce()) -> u64 {
    let count = || {
        let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        io.lines().find_map(|line| line.strip_prefix("syscr: ")).unwrap().parse::<u64>().unwrap()
    };
    // the kernel counts what ended before
    let (own, before) = (count(), count());
    look();
    count() - before - (before - own)
}

#[test]
fn a_glance_at_a_page_that_was_believed_is_three_reads_and_the_path_is_asked_now_and_then() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(directory.path(), &Identity::of_this_process(0, 1, 0).unwrap()).unwrap();
    writer.publish(&idle(1));
    let mut source = PageSource::new(directory.path(), 16, None);
    let mut seen = Vec::new();
    assert!(reads(|| _ = source.look(0, Pace::Glance, &mut seen)) > 3, "a first look asks /proc who writes");
    writer.publish(&idle(2));
    assert_eq!((reads(|| _ = source.look(100, Pace::Glance, &mut seen)), seen.len()), (3, 1));
    std::fs::remove_file(writer.path()).unwrap();
    assert_eq!((reads(|| _ = source.look(900, Pace::Glance, &mut seen)), seen.len()), (3, 1));
    source.look(1_000, Pace::Glance, &mut seen);
    assert!(seen.is_empty(), "its name is gone");
}

#[test]
fn pages_tell_of_which_data_parallel_engine_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let identity = Identity { engines: 2, ..Identity::of_this_process(1, 2, 0).unwrap() };
    Writer::create(directory.path(), &identity).unwrap().publish(&idle(1));
    let mut seen = Vec::new();
    PageSource::new(directory.path(), 2, None).look(0, Pace::Stare, &mut seen);
    assert_eq!(seen.iter().map(|page| page.engine()).collect::<Vec<_>>(), [1]);
}

/// vLLM with eight tensor-parallel ranks and two engines: two cores and sixteen workers.
#[test]
fn all_pages_of_a_machine_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let mut source = PageSource::new(directory.path(), 64, None);
    assert!(pages(&mut source).is_empty());
    let writers: Vec<Writer> = (0..18)
        .map(|rank| {
            let identity = Identity { engines: 2, ..Identity::of_this_process(rank, 18, 0).unwrap() };
            let mut writer = Writer::create(directory.path(), &identity).unwrap();
            writer.publish(&idle(1));
            writer
        })
        .collect();
    let seen = pages(&mut source);
    assert_eq!(seen.iter().map(|page| page.rank).collect::<Vec<_>>(), (0..18).collect::<Vec<_>>());
    assert_eq!(seen.iter().filter(|page| page.engine() == 1).count(), 9, "half of them are the second engine's");
    drop(writers);
}

#[test]
fn a_short_look_sees_whatever_could_be_work() {
    let directory = tempfile::tempdir().unwrap();
    let write = |rank| Writer::create(directory.path(), &Identity::of_this_process(rank, 2, 0).unwrap()).unwrap();
    let (mut first, mut second) = (write(0), write(1));
    let mut source = PageSource::new(directory.path(), 4, None);
    let (mut seen, mut now) = (Vec::new(), 0);
    let mut rests = |beat: &Beat| {
        now += 100;
        first.publish(&idle(now));
        second.publish(&idle(now));
        source.look(now, Pace::Stare, &mut seen);
        assert_eq!(seen.len(), 2);
        second.publish(&Beat { published_ns: now + 1, ..*beat });
        let mut still = false;
        assert!(reads(|| still = source.rest_still(&seen)) <= 6);
        // what is counted does not go back
        second = write(1);
        still
    };
    assert!(rests(&idle(0)), "it lives and has nothing to do");
    for beat in [
        Beat { running: 1, ..idle(0) },
        Beat { waiting: 1, ..idle(0) },
        Beat { steps_completed: 8, ..idle(0) },
        Beat { tokens_delivered: 71, ..idle(0) },
        Beat { requests_finished: 2, ..idle(0) },
        Beat { phase: Phase::Sleep, ..idle(0) },
    ] {
        assert!(!rests(&beat), "{beat:?}");
    }
    assert!(!source.rest_still(&seen[..1]), "a rank more than was told");
}

#[test]
fn a_short_look_tells_tokens_that_come_from_whatever_may_be_late() {
    const MS: u64 = 1_000_000;
    let decode = |begun_ms: u64, tokens_delivered| {
        let at_ns = begun_ms * MS;
        let beat = Beat { running: 1, phase: Phase::Decode, tokens_delivered, ..idle(at_ns) };
        Beat { step_started_ns: at_ns, ..beat }
    };
    // what rank 1 says at the second look, at 1100 ms; it had handed out 71 tokens at the first, at 1000 ms
    for (what, beat, on) in [
        ("tokens come, and the step is young", decode(1_075, 72), true),
        ("tokens come, between two steps", Beat { step_started_ns: 0, ..decode(1_075, 72) }, true),
        ("no token came", decode(1_075, 71), false),
        ("the step lasts", decode(1_074, 72), false),
        ("no step was begun for long", Beat { step_started_ns: 0, ..decode(1_074, 72) }, false),
        ("prefill, as young", Beat { phase: Phase::Prefill, ..decode(1_075, 72) }, true),
        ("it idles", Beat { running: 0, phase: Phase::Idle, ..decode(1_075, 72) }, false),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let [mut first, mut second] = [0, 1]
            .map(|rank| Writer::create(directory.path(), &Identity::of_this_process(rank, 2, 0).unwrap()).unwrap());
        let mut source = PageSource::new(directory.path(), 4, None);
        assert!(!source.deliver_still(900, 25), "nothing was seen yet");
        first.publish(&decode(1_000, 71));
        second.publish(&decode(1_000, 71));
        source.look(1_000, Pace::Glance, &mut Vec::new());
        first.publish(&decode(1_100, 72));
        second.publish(&beat);
        let mut delivers = false;
        assert!(reads(|| delivers = source.deliver_still(1_100, 25)) <= 6);
        assert_eq!(delivers, on, "{what}");
    }
}

#[test]
fn a_glance_checks_who_writes_where_work_stands_still_and_soon_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let mut source = PageSource::new(directory.path(), 1, None);
    let mut seen = Vec::new();
    let mut glance = |now_ms| {
        source.look(now_ms, Pace::Glance, &mut seen);
        seen.len()
    };
    assert_eq!(glance(0), 0);
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let engine = EngineProcess::of(child.id().cast_signed()).unwrap();
    let mut identity = Identity::of_this_process(0, 1, 0).unwrap();
    (identity.pid, identity.pid_start_ticks) = (child.id(), engine.start_ticks);
    let mut writer = Writer::create(directory.path(), &identity).unwrap();
    let beat = |running, published_ns| Beat {
        steps_completed: published_ns,
        tokens_delivered: published_ns,
        running,
        phase_entered_ns: 1,
        lease_ms: 500,
        ..Beat::of_phase(Phase::Decode, published_ns)
    };
    writer.publish(&beat(0, 1));
    assert_eq!(glance(900), 0, "a rank without a page is looked for once a second");
    assert_eq!(glance(1_000), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(glance(1_900), 1, "a page that owes nothing can wait");
    writer.publish(&beat(1, 2));
    assert_eq!(glance(1_950), 1, "somebody wrote it");
    assert_eq!(glance(1_999), 0, "it owes work and stands still: its writer is dead");
    writer.publish(&beat(0, 3));
    assert_eq!(glance(3_000), 0, "and it stays so");
}

#[tokio::test]
async fn every_source_arrives_in_the_observation_and_no_tick_waits() {
    let directory = tempfile::tempdir().unwrap();
    let log_path = directory.path().join("engine.log");
    std::fs::write(&log_path, "hello\n").unwrap();
    let router = Router::new()
        .route("/metrics", get(|| async { "vllm:num_requests_running{engine=\"0\"} 3.0\n" }))
        .route("/load", get(|| async { "{\"server_load\": 4}" }))
        .route("/health", get(|| async { "" }));
    let mut sources = Sources::new(SourcesConfig {
        page_dir: directory.path().to_owned(),
        ranks: 1,
        nonce: None,
        engine_url: serve(router).await,
        log_path: Some(log_path),
        trim_log: false,
        nvml: false,
        ras_address: None,
    });
    assert_eq!(sources.observe(monotonic_ms()).await.proc.value, None, "no engine, no facts");
    let _writer = page(directory.path(), 0);
    let session = Session::sh("sleep 1000; :");
    sources.set_engine(EngineProcess::of(session.pid()));
    let mut slowest = Duration::ZERO;
    let seen = eventually_async("everything", async || {
        let began = Instant::now();
        let seen = sources.observe(monotonic_ms()).await;
        slowest = slowest.max(began.elapsed());
        let complete =
            seen.metrics.value.is_some() && seen.frontend.value.is_some() && !sources.log_tail().lines().is_empty();
        complete.then_some(seen)
    })
    .await;
    let metrics = seen.metrics.value.unwrap();
    assert_eq!((metrics.running, metrics.server_load), (Some(3.0), Some(4.0)));
    assert!(seen.proc.value.unwrap().alive);
    assert_eq!(seen.pages.value.unwrap()[0].steps_completed, 7);
    assert!(seen.frontend.value.unwrap().answers);
    assert_eq!(sources.page_steps().len(), 1);
    assert_eq!(sources.gpu_note(), "NVML is not asked");
    assert!(sources.last_metrics_text().unwrap().1.contains("num_requests_running"));
    assert!(slowest < Duration::from_secs(5), "a tick took {slowest:?}");
    sources.set_nonce(Some(1));
    assert_eq!(sources.observe(monotonic_ms()).await.pages.value, None, "another launcher's page");
    sources.set_nonce(Some(0));
    assert!(sources.observe(monotonic_ms()).await.pages.value.is_some());
}

#[tokio::test]
async fn a_silent_engine_delays_no_tick_and_leaves_its_signals_missing() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut sources = Sources::new(SourcesConfig {
        page_dir: directory.path().to_owned(),
        ranks: 1,
        nonce: None,
        engine_url: format!("http://{}", listener.local_addr().unwrap()).parse().unwrap(),
        log_path: None,
        trim_log: false,
        nvml: false,
        ras_address: None,
    });
    let began = Instant::now();
    for _ in 0..10 {
        let seen = sources.observe(monotonic_ms()).await;
        assert_eq!((seen.metrics.value, seen.pages.value), (None, None));
    }
    // ten scrapes in sequence would have waited for ten deadlines of 5 s
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}
