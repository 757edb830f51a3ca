//! Untrusted input, named after the rows G1–G10 of the fault catalogue. G3 and G4 are in `vitals/tests/engine_metrics.rs`, the memory
//! figure of G1 in `tests/sources_memory.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use agent::sources::clock::monotonic_ms;
use agent::sources::haste::Haste;
use agent::sources::scrape::scrape_once;
use agent::sources::{EngineProcess, PageSource, Scraper, Sources, SourcesConfig};
use axum::Router;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use heartbeat::Writer;
use heartbeat::page::{Beat, Identity, Phase};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::fixture::{Session, pages};
use crate::http::{eventually_async, serve};
use crate::not_run::without_right;

const AMPLE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn g01_a_compressed_bomb_is_no_page_and_stays_compressed() {
    // sent although nobody asked for compression
    let bomb = zstd::encode_all(&vec![0_u8; 8 << 20][..], 19).unwrap();
    assert!(bomb.len() < 8 << 10, "a thousand to one");
    let answer = move || {
        let body = Body::from(bomb.clone());
        async move { Response::builder().header(header::CONTENT_ENCODING, "zstd").body(body).unwrap() }
    };
    let url = serve(Router::new().route("/metrics", get(answer))).await;
    let text = scrape_once(&url, "/metrics", AMPLE).await.unwrap();
    assert!(text.len() < 64 << 10, "{} bytes", text.len());
    let scraper = Scraper::spawn(&url, Haste::default());
    let seen = eventually_async("a scrape", async || scraper.latest().value).await;
    assert_eq!((seen.running, seen.generation_tokens, seen.open_fds), (None, None, None));
}

#[tokio::test]
async fn g02_a_head_that_never_ends_costs_one_deadline_for_the_whole_scrape() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nx: ").await;
                while stream.write_all(b"a").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
        }
    });
    let began = Instant::now();
    let error = scrape_once(&url, "/metrics", Duration::from_millis(500)).await.unwrap_err();
    assert!(error.contains("did not answer in full within 500 ms"), "{error}");
    assert!(began.elapsed() < AMPLE / 6, "each byte does not buy more time");
}

#[tokio::test]
async fn g03_bytes_that_are_no_text_cost_their_own_series_alone() {
    let body: &[u8] = b"vllm:num_requests_running 3\nvllm:num_requests_waiting\xff 2\n\xc3\x28 1\n\
        vllm:generation_tokens_total{model_name=\"\xf0\x9f\"} 7\nvllm:kv_cache_usage_perc \xfe\n";
    let url = serve(Router::new().route("/metrics", get(move || async move { body }))).await;
    let scraper = Scraper::spawn(&url, Haste::default());
    let seen = eventually_async("a scrape", async || scraper.latest().value).await;
    let figures = [seen.running, seen.generation_tokens, seen.waiting, seen.kv_usage];
    assert_eq!(figures, [Some(3.0), Some(7.0), None, None], "a label that is no text is a label all the same");
}

#[tokio::test]
async fn g05_no_redirect_is_followed_and_nothing_behind_the_answer_is_read() {
    let visits = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&visits);
    let elsewhere = serve(Router::new().fallback(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        async { "vllm:num_requests_running 9\n" }
    }))
    .await;
    let target = format!("{elsewhere}metrics");
    let answer = move || {
        let target = target.clone();
        async move { (StatusCode::FOUND, [(header::LOCATION, target)]) }
    };
    let router = Router::new().route("/metrics", get(answer.clone())).route("/prometheus/metrics", get(answer));
    let url = serve(router).await;
    let scraper = Scraper::spawn(&url, Haste::default());
    assert!(scrape_once(&url, "/metrics", AMPLE).await.unwrap_err().contains("answered 302"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((visits.load(Ordering::Relaxed), scraper.latest().value), (0, None));

    // a second answer smuggled behind the first is not anybody's answer
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4_096]).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na 1\nHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nb 2\n").await;
        }
    });
    assert_eq!(scrape_once(&url, "/metrics", AMPLE).await.unwrap(), "a 1\n");
    assert_eq!(
        scrape_once(&url, "/metrics", AMPLE).await.unwrap(),
        "a 1\n",
        "the next question has a connection of its own"
    );
}

#[tokio::test]
async fn a_page_that_is_no_exposition_is_looked_for_where_tensorrt_llm_has_it() {
    let json = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&json);
    let stats = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        async { "[{\"iter\": 1}]" }
    };
    let page = || async { "trtllm_num_requests_running{model_name=\"m\"} 5.0\n" };
    let router = Router::new().route("/metrics", get(stats)).route("/prometheus/metrics", get(page));
    let scraper = Scraper::spawn(&serve(router).await, Haste::default());
    let seen = eventually_async("the page", async || scraper.latest().value).await;
    assert_eq!(seen.running, Some(5.0));
    assert_eq!(scraper.path(), "/prometheus/metrics");
    eventually_async("more of them", async || (scraper.latest().at_ms > 0).then_some(())).await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(json.load(Ordering::Relaxed), 1, "its statistics, which it forgets once told, are left alone then");
}

#[tokio::test]
async fn g06_what_a_liar_counts_reaches_the_detector_apart_from_what_was_delivered() {
    let tokens = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tokens);
    let lie = move || {
        let tokens = counted.fetch_add(1_000, Ordering::Relaxed);
        async move { format!("vllm:generation_tokens_total {tokens}\nvllm:num_requests_running 1\n") }
    };
    let directory = tempfile::tempdir().unwrap();
    let mut sources = Sources::new(SourcesConfig {
        page_dir: directory.path().to_owned(),
        ranks: 1,
        nonce: None,
        engine_url: serve(Router::new().route("/metrics", get(lie))).await,
        log_path: None,
        trim_log: false,
        nvml: false,
        ras_address: None,
    });
    let seen = eventually_async("rising counters", async || {
        let seen = sources.observe(monotonic_ms()).await;
        seen.metrics.value.clone().filter(|metrics| metrics.generation_tokens > Some(0.0)).map(|_| seen)
    })
    .await;
    assert_eq!((seen.gate.value, seen.pages.value), (None, None), "no counter of the engine's passes for the gate's");
}

fn beat(steps: u64) -> Beat {
    let now_ns = heartbeat::monotonic_ns();
    Beat { steps_completed: steps, running: 1, lease_ms: 500, ..Beat::of_phase(Phase::Decode, now_ns) }
}

fn page(directory: &std::path::Path, nonce: u64) -> Writer {
    let mut writer = Writer::create(directory, &Identity::of_this_process(0, 1, nonce).unwrap()).unwrap();
    writer.publish(&beat(7));
    writer
}

#[test]
fn g07_a_page_with_any_byte_wrong_is_read_or_silent_and_never_spun_on() {
    let directory = tempfile::tempdir().unwrap();
    drop(page(directory.path(), 0));
    let path = directory.path().join("rank-0.beat");
    let good = std::fs::read(&path).unwrap();
    let began = Instant::now();
    for at in 0..512.min(good.len()) {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= flip;
            std::fs::write(&path, &bytes).unwrap();
            let pages = pages(&mut PageSource::new(directory.path(), 1, None));
            assert!(pages.len() <= 1 && pages.iter().all(|page| page.rank == 0), "byte {at}");
        }
    }
    // an odd sequence for ever is a writer that died in the middle: at most 64 tries a look
    assert!(began.elapsed() < AMPLE, "1,536 looks took {:?}", began.elapsed());
}

#[test]
fn d04_a_page_of_another_version_is_silence_until_agent_and_engine_match() {
    let directory = tempfile::tempdir().unwrap();
    drop(page(directory.path(), 0));
    let path = directory.path().join("rank-0.beat");
    let good = std::fs::read(&path).unwrap();
    let version = u32::from_le_bytes(good[8..12].try_into().unwrap());
    let mut source = PageSource::new(directory.path(), 1, None);
    for (skew, told) in [(-2, 0), (-1, 0), (1, 0), (2, 0), (0, 1)] {
        let mut bytes = good.clone();
        bytes[8..12].copy_from_slice(&version.wrapping_add_signed(skew).to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(pages(&mut source).len(), told, "{skew} versions apart");
    }
}

#[test]
fn g08_a_page_cut_short_under_the_reader_is_silence_and_no_signal() {
    let directory = tempfile::tempdir().unwrap();
    let _writer = page(directory.path(), 0);
    let path = directory.path().join("rank-0.beat");
    let mut source = PageSource::new(directory.path(), 1, None);
    assert_eq!(pages(&mut source).len(), 1);
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 1, 63, 64, 100, 4_095] {
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
        assert!(pages(&mut source).is_empty(), "{length} bytes");
        assert!(source.steps().is_empty(), "{length} bytes");
    }
    // endless is no better than short
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    pages(&mut source);
    std::fs::write(&path, whole).unwrap();
}

#[test]
fn g09_a_page_of_another_launch_or_rank_or_kind_of_file_is_silence() {
    let directory = tempfile::tempdir().unwrap();
    let _writer = page(directory.path(), 42);
    assert_eq!(pages(&mut PageSource::new(directory.path(), 1, Some(42))).len(), 1);
    assert!(pages(&mut PageSource::new(directory.path(), 1, Some(43))).is_empty(), "another launcher's nonce");
    std::fs::rename(directory.path().join("rank-0.beat"), directory.path().join("rank-1.beat")).unwrap();
    assert!(pages(&mut PageSource::new(directory.path(), 2, Some(42))).is_empty(), "a page under another rank's name");
    let path = directory.path().join("rank-0.beat");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let began = Instant::now();
    assert!(pages(&mut PageSource::new(directory.path(), 1, None)).is_empty(), "a pipe that nobody writes");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(pages(&mut PageSource::new(directory.path(), 1, None)).is_empty());
    std::fs::remove_dir(&path).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    assert!(pages(&mut PageSource::new(directory.path(), 1, None)).is_empty());
    assert!(began.elapsed() < AMPLE);
}

/// With the pid, start and boot of the engine's process, which are no secret.
#[test]
fn g09_a_page_that_another_user_put_in_the_place_of_the_engines_is_silence() {
    if !nix::unistd::geteuid().is_root() {
        return without_right("only root can give a file away");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rank-0.beat");
    let mut source = PageSource::new(directory.path(), 1, None);
    drop(page(directory.path(), 0));
    assert_eq!(pages(&mut source).len(), 1);
    let mut forged = page(directory.path(), 0);
    std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
    forged.publish(&beat(8));
    assert!(pages(&mut source).is_empty(), "it moves on, and is a stranger's");
    assert!(pages(&mut PageSource::new(directory.path(), 1, None)).is_empty());
    std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    assert_eq!(pages(&mut PageSource::new(directory.path(), 1, None)).len(), 1);
}

#[test]
fn g10_the_page_of_a_process_that_is_gone_or_was_another_is_stale() {
    let directory = tempfile::tempdir().unwrap();
    let mut session = Session::sh("sleep 1000; :");
    let engine = EngineProcess::of(session.pid()).unwrap();
    let identity = |pid: i32, start_ticks: u64| {
        let mut identity = Identity::of_this_process(0, 1, 0).unwrap();
        identity.pid = pid.try_into().unwrap();
        identity.pid_start_ticks = start_ticks;
        identity
    };
    let seen = |identity: &Identity| {
        let mut writer = Writer::create(directory.path(), identity).unwrap();
        writer.publish(&beat(1));
        pages(&mut PageSource::new(directory.path(), 1, None)).len()
    };
    assert_eq!(seen(&identity(engine.pid, engine.start_ticks)), 1, "the process lives");
    assert_eq!(seen(&identity(engine.pid, engine.start_ticks + 1)), 0, "a later process with its number");
    let mut other_boot = identity(engine.pid, engine.start_ticks);
    other_boot.boot_id = Default::default();
    assert_eq!(seen(&other_boot), 0, "another boot");
    session.kill_leader();
    session.reap();
    assert_eq!(seen(&identity(engine.pid, engine.start_ticks)), 0, "it is gone");
}
