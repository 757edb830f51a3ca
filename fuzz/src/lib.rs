//! The fuzz targets as plain functions: libFuzzer calls them (`make fuzz`), and so does a short run of every test suite with the
//! committed corpus (`agent/tests/sources_fuzz.rs`). Each takes any bytes and fails only where a promise is broken. Those of a model's files
//! are in `models.rs`.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use heartbeat::page::{Beat, Identity, Phase, StepOutcome, StepRecord};
use heartbeat::{Reader, Writer};
use vitals::engine_metrics::{Meter, is_known, map};
use vitals::exposition::{Limits, parse, parse_where};
use vitals::log_signs::scan;
use vitals::policy::Policy;
use vitals::ras::{Report, Tracker};
use vitals::replay::TraceReplay;

/// Takes any bytes; panics where a promise is broken.
pub type Target = fn(&[u8]);

/// Every target but the canary.
pub const TARGETS: [(&str, Target); 5] =
    [("page", page), ("exposition", exposition), ("ras", ras), ("log_lines", log_lines), ("trace", trace)];

/// A page of this live process with bytes changed (three input bytes a change: place, place, value) and cut where the last two say.
/// Whatever it says is believed or silence, within 64 tries (H7, H8).
pub fn page(data: &[u8]) {
    thread_local! {
        static SITE: RefCell<Option<Site>> = const { RefCell::new(None) };
    }
    SITE.with_borrow_mut(|site| {
        if site.is_none() {
            *site = Site::make();
        }
        let Some(site) = site else { return };
        let mut bytes = site.good.clone();
        let changes = data.chunks_exact(3);
        if let [low, high] = changes.remainder() {
            bytes.truncate(usize::from(u16::from_le_bytes([*low, *high])));
        }
        for change in changes {
            if let [low, high, value] = change
                && let Some(byte) = bytes.get_mut(usize::from(u16::from_le_bytes([*low, *high])))
            {
                *byte = *value;
            }
        }
        if fs::write(&site.path, &bytes).is_err() {
            return;
        }
        let mut reader = Reader::open(&site.directory, 0);
        if let Ok(page) = reader.read() {
            assert_eq!(page.identity.rank, 0, "another rank's page under this name");
        }
        let steps = reader.steps().map_or(0, |steps| steps.len());
        assert!(steps <= 256, "more steps than the ring has");
    });
}

/// A directory of its own with the page as a good writer made it.
struct Site {
    directory: PathBuf,
    path: PathBuf,
    good: Vec<u8>,
}

impl Site {
    /// `None` where this machine has no place for a page; then there is nothing to read either.
    fn make() -> Option<Self> {
        let name = format!("truebeat-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).ok()?;
        let mut writer = Writer::create(&directory, &Identity::of_this_process(0, 1, 0).ok()?).ok()?;
        let now_ns = heartbeat::monotonic_ns();
        writer.publish(&Beat {
            steps_completed: 7,
            tokens_delivered: 70,
            requests_finished: 1,
            running: 2,
            waiting: 3,
            prompt_tokens_owed: 40,
            lease_ms: 500,
            ..Beat::of_phase(Phase::Decode, now_ns)
        });
        for step in 0..300 {
            writer.record(&StepRecord {
                step,
                started_ns: now_ns,
                ended_ns: now_ns,
                requests: 2,
                prefill_tokens: 0,
                decode_tokens: 2,
                graph_key: 0,
                outcome: StepOutcome::Ok,
            });
        }
        let path = directory.join("rank-0.beat");
        Some(Self { good: fs::read(&path).ok()?, directory, path })
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Pages of one engine, one behind the other, a zero byte between them.
pub fn exposition(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let limits = Limits { bytes_max: 1 << 20, samples_max: 1_000 };
    let mut meter = Meter::default();
    let mut moved = 0;
    for (number, page) in text.split('\0').enumerate() {
        let all = parse(page, limits);
        assert!(all.samples.len() <= limits.samples_max);
        let known = parse_where(page, limits, is_known);
        let obs = if all.truncated { map(&known) } else { map(&all) };
        if !all.truncated {
            assert_eq!(obs, map(&known), "what is left out means nothing");
        }
        let counts = [obs.running, obs.waiting, obs.generation_tokens, obs.prompt_tokens, obs.iterations];
        assert!(counts.iter().flatten().all(|count| (0.0..=9_007_199_254_740_992.0).contains(count)), "{obs:?}");
        assert!(obs.kv_usage.is_none_or(|usage| (0.0..=1.001).contains(&usage)));
        let now = meter.map(&known);
        assert!(now.progress_digest >= moved && now.progress_digest <= number as u64, "{now:?}");
        moved = now.progress_digest;
    }
}

/// Two answers of a RAS service, a zero byte between them.
pub fn ras(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut tracker = Tracker::default();
    for answer in text.split('\0').take(4) {
        let report = vitals::ras::parse(answer).unwrap_or_else(|_| Report::default());
        let told = tracker.take(report);
        assert!(told.silent_ranks.len() <= 4_096 && told.silent_ranks.is_sorted() && told.text.chars().count() <= 300);
    }
}

/// Lines of a log; and each of them as a client would quote it.
pub fn log_lines(data: &[u8]) {
    for line in String::from_utf8_lossy(data).lines().take(64) {
        let _ = scan(line);
        assert!(scan(&format!(" {line}")).is_none(), "an indented line has no writer");
        let quoted = format!("(APIServer pid=1) INFO 11-21 01:04:30 [logger.py:40] Received request: {line}");
        assert!(scan(&quoted).is_none(), "a quotation is no signature");
    }
}

/// A recording: every line is taken or refused, and none stops the replay of the next.
pub fn trace(data: &[u8]) {
    let mut replay = TraceReplay::new("fuzz", Policy::default());
    for line in String::from_utf8_lossy(data).lines().take(64) {
        let _ = replay.push(line);
    }
    let _ = replay.finish();
}

/// Must fail: a fuzzer that does not find these two bytes finds nothing else either.
pub fn canary(data: &[u8]) {
    assert!(!data.starts_with(&[0xde, 0xad]), "the canary sang, as it must");
}
