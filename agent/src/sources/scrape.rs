//! The scrape of the engine's own `/metrics`, once a second, and of `/load` where the engine has it.
//!
//! One deadline over the whole exchange, a cap on the body, no compression, no redirects: the engine may be frozen or mad (I4).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{StatusCode, Uri};
use tokio_util::task::AbortOnDropHandle;
use vitals::exposition::Limits;
use vitals::observation::{MetricsObs, Signal};

use super::clock::monotonic_ms;
use super::get::{Get, with_path};

/// Body of one scrape.
pub const BODY_BYTES_MAX: usize = 4 << 20;
/// What we ask for: the text format that every engine has.
pub const ACCEPT: &str = "text/plain;version=0.0.4";
const SCRAPE_EVERY: Duration = Duration::from_secs(1);
/// Healthy engines short of CPU have taken 3.4 s to answer.
const SCRAPE_DEADLINE: Duration = Duration::from_secs(5);
const LOAD_DEADLINE: Duration = Duration::from_secs(1);

/// What the newest scrapes said.
#[derive(Debug, Clone, Default)]
struct Scraped {
    metrics: Signal<MetricsObs>,
    text: Option<(u64, String)>,
}

/// The scraper of one engine process; it ends when dropped.
#[derive(Debug)]
pub struct Scraper {
    scraped: Arc<Mutex<Scraped>>,
    _task: AbortOnDropHandle<()>,
}

impl Scraper {
    /// Starts scraping. Needs a tokio runtime.
    pub fn spawn(engine_url: &Uri) -> Self {
        let scraped = Arc::new(Mutex::new(Scraped::default()));
        let task = AbortOnDropHandle::new(tokio::spawn(scrape_forever(engine_url.clone(), Arc::clone(&scraped))));
        Self { scraped, _task: task }
    }

    /// The newest meanings, with the moment they were asked for.
    pub fn latest(&self) -> Signal<MetricsObs> {
        self.lock().metrics.clone()
    }

    /// The newest text, with the moment it was asked for.
    pub fn text(&self) -> Option<(u64, String)> {
        self.lock().text.clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Scraped> {
        self.scraped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One scrape's text, for whoever wants it outside the rhythm (forensics). The error is for people.
pub async fn scrape_once(engine_url: &Uri, deadline: Duration) -> Result<String, String> {
    let get = Get { uri: with_path(engine_url, "/metrics"), accept: ACCEPT, deadline, body_bytes_max: BODY_BYTES_MAX };
    let answer = get.fetch().await.map_err(|error| error.to_string())?;
    if answer.status != StatusCode::OK {
        return Err(format!("{} answered {}", get.uri, answer.status));
    }
    Ok(String::from_utf8_lossy(&answer.body).into_owned())
}

async fn scrape_forever(engine_url: Uri, scraped: Arc<Mutex<Scraped>>) {
    let mut has_load = Availability::Untried;
    let mut failing = false;
    let mut ticks = tokio::time::interval(SCRAPE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let asked_ms = monotonic_ms();
        match scrape_once(&engine_url, SCRAPE_DEADLINE).await {
            Ok(text) => {
                failing = false;
                let mut metrics = meanings(&text);
                metrics.server_load = has_load.ask(&engine_url).await;
                *scraped.lock().unwrap_or_else(PoisonError::into_inner) =
                    Scraped { metrics: Signal::at(asked_ms, metrics), text: Some((asked_ms, text)) };
            }
            // said once a streak; the old value stays and ages
            Err(error) if !failing => {
                failing = true;
                tracing::info!(%error, "no engine metrics");
            }
            Err(_) => {}
        }
    }
}

/// Whether the engine has `/load`; one that said 404 is not asked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Availability {
    Untried,
    Present,
    Absent,
}

impl Availability {
    async fn ask(&mut self, engine_url: &Uri) -> Option<f64> {
        if *self == Self::Absent {
            return None;
        }
        let get = Get {
            uri: with_path(engine_url, "/load"),
            accept: "application/json",
            deadline: LOAD_DEADLINE,
            body_bytes_max: 64 << 10,
        };
        let answer = get.fetch().await.ok()?;
        let load = serde_json::from_slice::<serde_json::Value>(&answer.body)
            .ok()
            .filter(|_| answer.status == StatusCode::OK)
            .and_then(|body| body.get("server_load").and_then(serde_json::Value::as_f64));
        *self = if load.is_some() { Self::Present } else { Self::Absent };
        load
    }
}

/// What the text means; a text that is no exposition means nothing.
fn meanings(text: &str) -> MetricsObs {
    vitals::engine_metrics::map(&vitals::exposition::parse(text, Limits::default()))
}
