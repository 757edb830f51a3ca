//! The scrape of the engine's own `/metrics`, and of what few engines tell beside it ([`super::aside`]): once a second, or every five where nothing is
//! owed, or the engine's own page tells the same better.
//!
//! One deadline over the whole exchange, a cap on the body, no compression, no redirects: the engine may be frozen or mad (I4).

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use http::{StatusCode, Uri};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use vitals::engine_metrics::{EngineKind, Meter, detect_engine, is_known};
use vitals::exposition::{Exposition, Limits, parse_where};
use vitals::observation::{MetricsObs, Signal};

use super::aside::Asides;
use super::clock::monotonic_ms;
use super::get::{Get, with_path};
use super::haste::{Haste, Rounds};
use super::renew;
use crate::text::lossy;
use crate::ticker::Timer;

/// Body of one scrape.
pub const BODY_BYTES_MAX: usize = 4 << 20;
/// What we ask for: the text format that every engine has.
pub const ACCEPT: &str = "text/plain;version=0.0.4";
/// Where engines have it: TensorRT-LLM's `/metrics` is JSON, which it forgets once told, and its Prometheus text is elsewhere.
pub(super) const PATHS: [&str; 2] = ["/metrics", "/prometheus/metrics"];
/// Scrapes on a path that says nothing before another is tried again.
const TRIES: u32 = 30;
/// Samples that mean something: six engines' worth of series for hundreds of ranks.
const SAMPLES_MAX: usize = 8_192;
/// What is kept of a page for the bundle.
const TEXT_BYTES_MAX: usize = 1 << 20;
const SCRAPES: Rounds = Rounds { calm: Duration::from_secs(5), hurried: Duration::from_secs(1) };
/// Healthy engines short of CPU have taken 3.4 s to answer.
const SCRAPE_DEADLINE: Duration = Duration::from_secs(5);

/// Whose engine it is, once a page of its has told.
pub type KnownEngine = Arc<OnceLock<EngineKind>>;

/// What the newest scrapes said.
#[derive(Debug, Clone, Default)]
struct Scraped {
    metrics: Signal<MetricsObs>,
    text: Option<(u64, String)>,
    path: Option<&'static str>,
}

/// The scraper of one engine process; it ends when dropped.
#[derive(Debug)]
pub struct Scraper {
    scraped: Arc<Mutex<Scraped>>,
    kind: KnownEngine,
    _task: AbortOnDropHandle<()>,
}

impl Scraper {
    /// Starts scraping. Needs a tokio runtime.
    pub fn spawn(engine_url: &Uri, haste: Haste) -> Self {
        let scraped = Arc::new(Mutex::new(Scraped::default()));
        let kind = KnownEngine::default();
        let into = (Arc::clone(&scraped), Arc::clone(&kind));
        let task = AbortOnDropHandle::new(tokio::spawn(scrape_forever(engine_url.clone(), into, haste)));
        Self { scraped, kind, _task: task }
    }

    /// Whose engine it is, as soon as a page tells.
    pub fn kind(&self) -> KnownEngine {
        Arc::clone(&self.kind)
    }

    /// The newest meanings, with the moment they were asked for.
    pub fn latest(&self) -> Signal<MetricsObs> {
        self.lock().metrics.clone()
    }

    /// The same into what was seen before; copies only what is new.
    pub fn renew(&self, seen: &mut Signal<MetricsObs>) {
        renew(&self.lock().metrics, seen);
    }

    /// The newest text, with the moment it was asked for.
    pub fn text(&self) -> Option<(u64, String)> {
        self.lock().text.clone()
    }

    /// Where the page is, as far as is known.
    pub fn path(&self) -> &'static str {
        self.lock().path.unwrap_or(PATHS[0])
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Scraped> {
        self.scraped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One scrape's text, for whoever wants it outside the rhythm as well (forensics). The error is for people.
pub async fn scrape_once(engine_url: &Uri, path: &str, deadline: Duration) -> Result<String, String> {
    let get = Get { uri: with_path(engine_url, path), accept: ACCEPT, deadline, body_bytes_max: BODY_BYTES_MAX };
    let answer = get.fetch().await.map_err(|error| error.to_string())?;
    if answer.status != StatusCode::OK {
        return Err(format!("{} answered {}", get.uri, answer.status));
    }
    Ok(lossy(answer.body.into()))
}

async fn scrape_forever(engine_url: Uri, (scraped, kind): (Arc<Mutex<Scraped>>, KnownEngine), haste: Haste) {
    let mut asides = Asides::default();
    let mut place = Place::default();
    let mut meter = Meter::default();
    let (mut failing, mut faulty) = (false, false);
    let mut timer = Timer::start();
    loop {
        let began = Instant::now();
        let asked_ms = monotonic_ms();
        match place.scrape(&engine_url).await {
            Ok((mut text, page)) => {
                failing = false;
                let fault = page.fault();
                if let Some(fault) = fault.as_ref().filter(|_| !faulty) {
                    tracing::info!(fault, "engine metrics are not read in full");
                }
                faulty = fault.is_some();
                if let Some(found) = detect_engine(&page) {
                    kind.get_or_init(|| found);
                }
                let mut metrics = meter.map(&page);
                drop(page);
                asides.ask(&engine_url, &mut metrics).await;
                cut(&mut text, TEXT_BYTES_MAX);
                *scraped.lock().unwrap_or_else(PoisonError::into_inner) = Scraped {
                    metrics: Signal::at(asked_ms, metrics),
                    text: Some((asked_ms, text)),
                    path: Some(place.path()),
                };
            }
            // said once a streak; the old value stays and ages
            Err(error) if !failing => {
                failing = true;
                tracing::info!(%error, "no engine metrics");
            }
            Err(_) => {}
        }
        haste.rest(began, SCRAPES, &mut timer).await;
    }
}

/// Which of the paths has the page.
#[derive(Debug, Default)]
struct Place {
    path: usize,
    /// Scrapes in a row that found nothing known here.
    barren: u32,
}

impl Place {
    fn path(&self) -> &'static str {
        PATHS.get(self.path).copied().unwrap_or(PATHS[0])
    }

    /// One scrape; where it brings nothing that any engine writes, the next path is tried, now and then.
    async fn scrape(&mut self, engine_url: &Uri) -> Result<(String, Exposition), String> {
        let scraped = scrape_once(engine_url, self.path(), SCRAPE_DEADLINE).await.map(parsed);
        let barren = match &scraped {
            Ok((_, page)) => page.samples.is_empty(),
            // an engine that does not answer at all is no reason to look elsewhere
            Err(error) => error.contains(" answered "),
        };
        if !barren {
            self.barren = 0;
            return scraped;
        }
        if self.barren.is_multiple_of(TRIES) {
            let other = (self.path + 1) % PATHS.len();
            let elsewhere = scrape_once(engine_url, PATHS[other], SCRAPE_DEADLINE).await.map(parsed);
            if elsewhere.as_ref().is_ok_and(|(_, page)| !page.samples.is_empty()) {
                (self.path, self.barren) = (other, 0);
                return elsewhere;
            }
        }
        self.barren = self.barren.saturating_add(1);
        scraped
    }
}

/// A text with what it means; one that is no exposition means nothing.
fn parsed(text: String) -> (String, Exposition) {
    let mut page = parse_where(&text, Limits { bytes_max: BODY_BYTES_MAX, samples_max: SAMPLES_MAX }, is_known);
    if page.truncated {
        keep_whole_series(&mut page);
    }
    (text, page)
}

/// Of a page that was cut, only what can have no more samples beyond the cut. The sum of a part grows and shrinks with what stands before it:
/// false progress, or a restart that was none. Samples of one name stand together; a name that comes in several places may come once more.
fn keep_whole_series(page: &mut Exposition) {
    let mut runs = page.samples.chunk_by(|a, b| a.name == b.name).filter_map(|run| run.first()).peekable();
    let (mut seen, mut parts) = (HashSet::new(), HashSet::new());
    while let Some(first) = runs.next() {
        if !seen.insert(first.name.as_str()) || runs.peek().is_none() {
            parts.insert(first.name.clone());
        }
    }
    page.samples.retain(|sample| !parts.contains(&sample.name));
}

/// Cuts at the last whole line below the cap, and gives the memory back.
fn cut(text: &mut String, bytes_max: usize) {
    if text.len() > bytes_max {
        let head = text.as_bytes().get(..bytes_max).unwrap_or_default();
        let end = head.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        text.truncate(end);
    }
    text.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `others` samples of another name stand before more adapters than are read.
    fn cut_page(others: usize) -> Exposition {
        let other = (0..others).map(|n| format!("process_open_fds{{n=\"{n}\"}} 1\n"));
        let tokens =
            (0..=SAMPLES_MAX).map(|n| format!("vllm:generation_tokens_total{{engine=\"0\",adapter=\"{n}\"}} 7\n"));
        let (_, page) = parsed(other.chain(tokens).collect());
        assert!(page.truncated);
        page
    }

    #[test]
    fn a_sum_over_a_part_of_a_page_is_no_sum() {
        let mut meter = Meter::default();
        let told = [20, 20, 10, 30].map(|others| meter.map(&cut_page(others)));
        for one in &told {
            assert_eq!((one.generation_tokens, one.open_fds), (None, Some(1.0)));
            assert_eq!((one.progress_digest, one.resets), (0, 0), "the place of the cut alone has moved");
        }
    }

    #[test]
    fn of_a_cut_page_a_name_that_comes_in_several_places_is_not_whole() {
        let sample = |name: &str| vitals::exposition::Sample { name: name.into(), labels: Vec::new(), value: 1.0 };
        let samples = ["a", "a", "b", "c", "b", "d", "e"].map(sample).to_vec();
        let mut page = Exposition { samples, truncated: true, ..Exposition::default() };
        keep_whole_series(&mut page);
        let names: Vec<_> = page.samples.iter().map(|sample| sample.name.as_str()).collect();
        assert_eq!(names, ["a", "a", "c", "d"]);
    }
}
