//! What a hostile page costs in memory (G1). A program of its own: the figure is of the whole process.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::time::{Duration, Instant};

use agent::sources::Scraper;
use agent::sources::haste::Haste;
use agent::sources::scrape::BODY_BYTES_MAX;
use axum::Router;
use axum::body::Bytes;
use axum::routing::get;
use tokio::net::TcpListener;

/// Resident memory now, and its peak since the mark was last reset, in KiB.
fn resident() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    (field("VmRSS:"), field("VmHWM:"))
}

async fn scraped(page: &Bytes) -> Option<f64> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let page = page.clone();
    let router = Router::new().route("/metrics", get(move || async move { page }));
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    let scraper = Scraper::spawn(&url, Haste::default());
    let until = Instant::now() + Duration::from_secs(60);
    while scraper.latest().value.is_none() && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.abort();
    scraper.latest().value.unwrap().running
}

#[tokio::test]
async fn g01_a_page_of_four_mebibytes_costs_at_most_eight() {
    let known = "vllm:num_requests_running{engine=\"0\"} 3\n";
    let fill = |line: &str| {
        let mut page = known.to_owned();
        while page.len() + line.len() <= BODY_BYTES_MAX {
            page.push_str(line);
        }
        Bytes::from(page)
    };
    let many = |count: usize| (0..count).map(|i| format!("l{i}=\"\",")).collect::<String>();
    let pages = [
        ("many short lines", fill("a 1\n")),
        ("many labels", fill(&format!("x{{{}}} 1\n", many(100)))),
        ("too many labels", fill(&format!("x{{{}}} 1\n", many(10_000)))),
        ("one series in many forms", fill("vllm:num_requests_waiting{engine=\"1\",a=\"\",b=\"\",c=\"\"} 1\n")),
        ("one long line", fill(&"x".repeat(BODY_BYTES_MAX - 100))),
    ];
    assert_eq!(scraped(&Bytes::from_static(known.as_bytes())).await, Some(3.0));
    for (what, page) in pages {
        // the mark of the highest water is put back to what is resident now
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let (before, _) = resident();
        assert_eq!(scraped(&page).await, Some(3.0), "{what}");
        let (_, peak) = resident();
        let grown = peak.saturating_sub(before);
        assert!(grown <= 8 << 10, "{what}: {grown} KiB");
    }
}
