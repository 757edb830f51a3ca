//! Scrape and probe against servers that misbehave, in this process on loopback.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use agent::sources::haste::Haste;
use agent::sources::scrape::{BODY_BYTES_MAX, KnownEngine, scrape_once};
use agent::sources::{FrontendProbe, Scraper};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::get;
use futures::StreamExt;
use futures::stream;
use http::Uri;
use tokio::net::TcpListener;

/// Serves until the test's runtime ends.
pub async fn serve(router: Router) -> Uri {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}").parse().unwrap()
}

/// Waits for a predicate inside the runtime; a minute without is a failure.
pub async fn eventually_async<T>(what: &str, mut done: impl AsyncFnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if let Some(value) = done().await {
            return value;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not within a minute: {what}");
}

const AMPLE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_plain_scrape_asks_for_text_and_no_compression() {
    let metrics = |headers: HeaderMap| async move {
        assert!(!headers.contains_key("accept-encoding"));
        format!("accept {}\n", headers["accept"].to_str().unwrap())
    };
    let url = serve(Router::new().route("/metrics", get(metrics))).await;
    assert_eq!(scrape_once(&url, "/metrics", AMPLE).await.unwrap(), "accept text/plain;version=0.0.4\n");
}

#[tokio::test]
async fn g01_an_infinite_body_is_cut() {
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&sent);
    let endless = move || {
        let counted = Arc::clone(&counted);
        async move {
            Body::from_stream(stream::repeat_with(move || {
                counted.fetch_add(1 << 16, Ordering::Relaxed);
                Ok::<_, Infallible>(Bytes::from(vec![b'x'; 1 << 16]))
            }))
        }
    };
    let url = serve(Router::new().route("/metrics", get(endless))).await;
    let error = scrape_once(&url, "/metrics", AMPLE).await.unwrap_err();
    assert!(error.contains("sent more than 4194304 bytes"), "{error}");
    assert!(sent.load(Ordering::Relaxed) > BODY_BYTES_MAX / 2, "it was read up to the cap");
}

#[tokio::test]
async fn g02_a_slow_drip_ends_at_the_deadline() {
    let drip = || async {
        Body::from_stream(stream::repeat(()).then(|()| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok::<_, Infallible>(Bytes::from_static(b"x"))
        }))
    };
    let url = serve(Router::new().route("/metrics", get(drip))).await;
    let error = tokio::time::timeout(AMPLE, scrape_once(&url, "/metrics", Duration::from_millis(300)))
        .await
        .unwrap()
        .unwrap_err();
    assert!(error.contains("did not answer in full within 300 ms"), "{error}");
}

#[tokio::test]
async fn g05_a_redirect_is_an_answer_and_is_not_followed() {
    let followed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&followed);
    let router = Router::new()
        .route("/metrics", get(|| async { (StatusCode::FOUND, [("location", "/secret")], "") }))
        .route("/secret", get(move || async move { count.fetch_add(1, Ordering::Relaxed).to_string() }));
    let error = scrape_once(&serve(router).await, "/metrics", AMPLE).await.unwrap_err();
    assert!(error.contains("answered 302"), "{error}");
    assert_eq!(followed.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_closed_port_is_refused_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    drop(listener);
    let error = scrape_once(&url, "/metrics", AMPLE).await.unwrap_err();
    assert!(error.contains("refused"), "{error}");
}

#[tokio::test]
async fn a_front_end_that_lies_answers_and_one_that_accepts_in_silence_does_not() {
    let url = serve(Router::new().route("/health", get(|| async { "ok" }))).await;
    let probe = FrontendProbe::spawn(&url, Haste::default(), KnownEngine::default(), None);
    let seen = eventually_async("an answer", async || probe.latest().value).await;
    assert_eq!((seen.answers, seen.status, seen.silent_since_ms), (true, Some(200), None));

    // the kernel accepts for a stopped process; nobody reads
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Uri = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
    let probe = FrontendProbe::spawn(&url, Haste::default(), KnownEngine::default(), None);
    let seen = eventually_async("a verdict on silence", async || probe.latest().value).await;
    assert_eq!((seen.answers, seen.status, seen.ever_answered), (false, None, false));
    assert!(seen.silent_since_ms.is_some());
}

/// A front end that answers, and whose `/health` says this status, or for 0 waits for an engine that has stopped. Its questions are counted.
#[derive(Clone, Default)]
struct Front {
    says: Arc<AtomicU16>,
    health: Arc<AtomicUsize>,
    models: Arc<AtomicUsize>,
}

impl Front {
    fn router(&self, page: &'static str) -> Router {
        let (front, models) = (self.clone(), Arc::clone(&self.models));
        let health = async move || {
            front.health.fetch_add(1, Ordering::Relaxed);
            match front.says.load(Ordering::Relaxed) {
                0 => std::future::pending().await,
                status => StatusCode::from_u16(status).unwrap(),
            }
        };
        Router::new()
            .route("/metrics", get(async move || page))
            .route("/health", get(health))
            .route("/v1/models", get(async move || models.fetch_add(1, Ordering::Relaxed).to_string()))
    }

    fn says(&self, status: u16) {
        self.says.store(status, Ordering::Relaxed);
    }

    fn health(&self) -> usize {
        self.health.load(Ordering::Relaxed)
    }

    async fn asked_for_models(&self, times: usize) {
        let enough = async || (self.models.load(Ordering::Relaxed) >= times).then_some(());
        eventually_async("questions for models", enough).await;
    }

    /// A probe of an engine with this page, which has been read.
    async fn probe(&self, page: &'static str) -> (Scraper, FrontendProbe) {
        let url = serve(self.router(page)).await;
        let scraper = Scraper::spawn(&url, Haste::default());
        let kind = scraper.kind();
        eventually_async("a known engine", async || kind.get().copied()).await;
        (scraper, FrontendProbe::spawn(&url, Haste::default(), kind, None))
    }
}

#[tokio::test]
async fn a_health_that_waits_for_the_engine_is_no_silent_front_end_and_is_not_asked_again() {
    let front = Front::default();
    // its metrics are off, so nobody knows whose it is
    let url = serve(front.router("")).await;
    let probe = FrontendProbe::spawn(&url, Haste::default(), KnownEngine::default(), None);
    front.asked_for_models(3).await;
    let seen = probe.latest().value.unwrap();
    assert_eq!((seen.answers, seen.status, seen.silent_since_ms), (true, None, None));
    assert_eq!(front.health(), 1, "each that is given up stays in the engine's queue");
}

#[tokio::test]
async fn sglang_is_asked_whether_it_has_come_up_and_for_no_token_after_that() {
    let front = Front::default();
    front.says(503);
    let (_scraper, probe) = front.probe("sglang:num_running_reqs 0\n").await;
    eventually_async("it starts", async || (front.health() >= 2).then_some(())).await;
    assert_eq!(probe.latest().value.unwrap().status, Some(503));
    front.says(200);
    front.asked_for_models(1).await;
    let asked = front.health();
    front.says(0);
    front.asked_for_models(3).await;
    assert_eq!((front.health(), probe.latest().value.unwrap().answers), (asked, true));
}

#[tokio::test]
async fn a_health_that_is_the_front_ends_own_stays_the_question() {
    let front = Front::default();
    let (_scraper, probe) = front.probe("vllm:num_requests_running 0\n").await;
    eventually_async("it is silent", async || probe.latest().value.filter(|seen| !seen.answers)).await;
    front.says(503);
    let sick = async || probe.latest().value.and_then(|seen| seen.status);
    assert_eq!(eventually_async("what it says", sick).await, 503);
    assert_eq!(front.models.load(Ordering::Relaxed), 0);
}

/// An engine's metrics page over the routes given here.
async fn scraper(beside: Router) -> Scraper {
    let page = get(async || "vllm:num_requests_running 4\n");
    Scraper::spawn(&serve(beside.route("/metrics", page)).await, Haste::default())
}

#[tokio::test]
async fn a_pause_is_asked_for_beside_the_page_and_outlasts_an_answer_that_is_late() {
    // as in `Front`: 0 is no answer
    let (paused, asked) = (Arc::new(AtomicU16::new(1)), Arc::new(AtomicUsize::new(0)));
    let (told, count) = (Arc::clone(&paused), Arc::clone(&asked));
    let answer = async move || {
        count.fetch_add(1, Ordering::Relaxed);
        match told.load(Ordering::Relaxed) {
            0 => std::future::pending().await,
            told => format!("{{\"is_paused\":{}}}", told == 1),
        }
    };
    let scraper = scraper(Router::new().route("/is_paused", get(answer))).await;
    let says = async || scraper.latest().value.and_then(|metrics| metrics.paused);
    assert!(eventually_async("a word on pauses", says).await);
    paused.store(0, Ordering::Relaxed);
    let before = asked.load(Ordering::Relaxed);
    let late = async || (asked.load(Ordering::Relaxed) >= before + 3).then_some(());
    eventually_async("two questions without an answer", late).await;
    assert_eq!(says().await, Some(true));
    paused.store(2, Ordering::Relaxed);
    eventually_async("the end of the pause", async || says().await.filter(|paused| !paused)).await;
}

#[tokio::test]
async fn an_engine_that_knows_no_pause_is_asked_once() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let unknown = get(async move || {
        count.fetch_add(1, Ordering::Relaxed);
        StatusCode::NOT_FOUND
    });
    let scraper = scraper(Router::new().route("/is_paused", unknown)).await;
    let mut last_ms = 0;
    for _ in 0..3 {
        let newer = async || Some(scraper.latest()).filter(|seen| seen.value.is_some() && seen.at_ms > last_ms);
        let seen = eventually_async("the next scrape", newer).await;
        assert_eq!(seen.value.unwrap().paused, None, "unknown is not false");
        last_ms = seen.at_ms;
    }
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}
