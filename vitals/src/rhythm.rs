//! What the engine's healthy rhythm has been: histograms with a fixed size, so that learning costs no allocation.
//!
//! Buckets grow by a quarter (an error of at most 25 % upward, which the factor of the deadlines dwarfs); old history fades by
//! halving, so that a rhythm of yesterday does not outvote today's.

use crate::deadlines::reach;
use crate::observation::Ms;
use crate::policy::Policy;
use serde::{Deserialize, Serialize};

const BUCKETS: usize = 80;
/// Above this many samples every bucket is halved.
const SAMPLES_MAX: u32 = 1024;

/// A silence that ended shows a crawl if it was this long, and so many times the median of at least so many.
const CRAWL_GAP_MS_MIN: Ms = 2_000;
const CRAWL_GAP_TIMES: u64 = 25;
const CRAWL_SAMPLES_MIN: u32 = 16;

/// A fading histogram of milliseconds (or of any small number), from 1 to about 45 million. Written as its buckets that are not empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<(usize, u32)>", from = "Vec<(usize, u32)>")]
pub struct Histogram {
    counts: [u32; BUCKETS],
    total: u32,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total: 0 }
    }
}

impl From<Histogram> for Vec<(usize, u32)> {
    fn from(histogram: Histogram) -> Self {
        histogram.counts.into_iter().enumerate().filter(|(_, count)| *count > 0).collect()
    }
}

/// Whatever is written: a bucket that there is none of is left out, and no count outvotes what is seen from now on.
impl From<Vec<(usize, u32)>> for Histogram {
    fn from(written: Vec<(usize, u32)>) -> Self {
        let mut histogram = Self::default();
        for (bucket, count) in written {
            if let Some(place) = histogram.counts.get_mut(bucket) {
                *place = count.min(SAMPLES_MAX);
            }
        }
        histogram.total = histogram.counts.iter().sum();
        while histogram.total > SAMPLES_MAX {
            histogram.fade();
        }
        histogram
    }
}

impl Histogram {
    pub fn record(&mut self, value: Ms) {
        let bucket = bucket_of(value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count = count.saturating_add(1);
            self.total = self.total.saturating_add(1);
        }
        if self.total > SAMPLES_MAX {
            self.fade();
        }
    }

    pub fn samples(&self) -> u32 {
        self.total
    }

    /// The upper edge of the bucket that holds the quantile `permille` / 1000; `None` without samples.
    pub fn quantile(&self, permille: u32) -> Option<Ms> {
        if self.total == 0 {
            return None;
        }
        let rank = u64::from(self.total).saturating_mul(u64::from(permille.min(1000))).div_ceil(1000).max(1);
        let mut seen = 0u64;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen = seen.saturating_add(u64::from(*count));
            if seen >= rank {
                return Some(upper_edge(bucket));
            }
        }
        Some(upper_edge(BUCKETS - 1))
    }

    fn fade(&mut self) {
        self.total = 0;
        for count in &mut self.counts {
            *count /= 2;
            self.total = self.total.saturating_add(*count);
        }
    }
}

fn bucket_of(value: Ms) -> usize {
    (0..BUCKETS).find(|bucket| value <= upper_edge(*bucket)).unwrap_or(BUCKETS - 1)
}

/// Edges 1, 2, 3, 4, 5, 7, 9 … each a quarter more, at least one more.
fn upper_edge(bucket: usize) -> Ms {
    EDGES.get(bucket).copied().unwrap_or(Ms::MAX)
}

const EDGES: [Ms; BUCKETS] = edges();

const fn edges() -> [Ms; BUCKETS] {
    let mut all = [1; BUCKETS];
    let mut i = 1;
    while i < BUCKETS {
        let grown = all[i - 1] + all[i - 1] / 4;
        all[i] = if grown > all[i - 1] { grown } else { all[i - 1] + 1 };
        i += 1;
    }
    all
}

/// Everything that is learned about one engine. Kept over restarts of the process; the `warm` counters begin anew (V3).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rhythm {
    /// Native page: milliseconds a decode step.
    pub decode_step_ms: Histogram,
    /// Native page: microseconds of prefill a token.
    pub prefill_us_per_token: Histogram,
    /// The same at most, of steps that ended among others: what is known where no look ever saw one end.
    pub prefill_bound_us_per_token: Histogram,
    /// The latest prefill step that was timed: how many steps were completed with it, and microseconds a token of it.
    pub prefill_before: Option<(u64, u64)>,
    /// Slowly fading maxima of decode and prefill: a rhythm that slows down (a long context, a loaded machine) is followed at once,
    /// where a quantile would follow after a hundred samples.
    pub decode_recent_ms: Ms,
    pub prefill_recent_us: Ms,
    /// Quick average of decode steps: what is usual of the sequences that run now, which may be longer than any before.
    pub decode_lately_ms: Ms,
    /// Slowly fading maximum of whole prefill steps, whatever was decoded in them.
    pub prefill_step_ms: Ms,
    /// Slowly fading maximum of the running sequences of the decode steps above, in thousandths.
    pub decode_width_milli: u64,
    /// Slow average of the same, about as slow as the histogram of their lengths.
    pub decode_usual_width_milli: u64,
    /// Gate: silences that ended in a delivery while requests that had begun to answer were owed.
    pub gate_gap_ms: Histogram,
    /// Slowly fading maximum of these.
    pub gate_gap_recent_ms: Ms,
    /// Slow average of the requests that had begun, in thousandths.
    pub gate_usual_width_milli: u64,
    /// Counted time at which a silence last ended that was so far beyond the usual that the engine crawls, and lives.
    #[serde(skip)]
    pub crawled_at: Option<Ms>,
    /// Gate: silences that ended in a delivery while no request in flight had begun to answer.
    pub first_byte_ms: Histogram,
    /// Between two movements of anything that is counted, while only answers that do not stream were owed.
    pub whole_gap_ms: Histogram,
    /// Gate: microseconds of silence a prompt token that it ended for, while requests that had begun to answer were owed.
    pub gate_us_per_token: Histogram,
    /// Gate: silences among such requests that ended for none of the long prompts that were owed: a chunk of one of them.
    pub chunk_gap_ms: Histogram,
    /// Slowly fading maximum of these.
    pub chunk_gap_recent_ms: Ms,
    /// Gate: microseconds a prompt token from when prompts were owed, where no request in flight had begun to answer.
    pub first_us_per_token: Histogram,
    /// The most prompt tokens that were owed at once and served, and that a single delivery was for.
    pub prompt_tokens_max: u64,
    pub prompt_served_max: u64,
    /// The longest prompt that was served.
    pub prompt_longest_max: u64,
    /// Of this process: steps seen, chunks (or tokens) seen, time with work owed and deliveries seen.
    pub steps_seen: u64,
    pub chunks_seen: u64,
    pub delivering_ms: Ms,
    /// Of this process: requests that ended a silence of `first_byte_ms`.
    pub first_answers_seen: u64,
}

impl Rhythm {
    /// One interval of decode: milliseconds a step of this many sequences.
    pub fn decoded(&mut self, step_ms: Ms, running: u32) {
        // fades about as fast as the histogram does
        let faded = self.decode_width_milli.saturating_sub(self.decode_width_milli / 512);
        let milli = u64::from(running).saturating_mul(1000);
        self.decode_width_milli = faded.max(milli);
        self.decode_usual_width_milli = slow_average(self.decode_usual_width_milli, milli);
        self.decode_step_ms.record(step_ms.max(1));
        self.decode_recent_ms = step_ms.max(self.decode_recent_ms.saturating_sub(self.decode_recent_ms / 64 + 1));
        self.decode_lately_ms = self.decode_lately_ms.saturating_mul(15).saturating_add(step_ms) / 16;
    }

    /// Is a silence among requests that had begun so far beyond the usual that the engine crawls, if it lives?
    pub fn is_a_crawl(&self, ms: Ms) -> bool {
        let gaps = &self.gate_gap_ms;
        ms >= CRAWL_GAP_MS_MIN
            && gaps.samples() >= CRAWL_SAMPLES_MIN
            && gaps.quantile(500).is_some_and(|usual| ms >= usual.saturating_mul(CRAWL_GAP_TIMES))
    }

    /// One silence of the gate among so many requests that had begun; 0 where nobody counts them.
    pub fn gap(&mut self, ms: Ms, begun: u32) {
        self.gate_gap_ms.record(ms.max(1));
        self.gate_usual_width_milli = slow_average(self.gate_usual_width_milli, u64::from(begun).saturating_mul(1000));
        self.gate_gap_recent_ms = ms.max(self.gate_gap_recent_ms.saturating_sub(self.gate_gap_recent_ms / 64 + 1));
    }

    /// One silence of the gate among requests that had begun, of which a chunk of a long prompt was a part.
    pub fn chunk_gap(&mut self, ms: Ms) {
        self.chunk_gap_ms.record(ms.max(1));
        self.chunk_gap_recent_ms = ms.max(self.chunk_gap_recent_ms.saturating_sub(self.chunk_gap_recent_ms / 16 + 1));
    }

    /// One prefill step: how long, for how many tokens, and how many steps were completed with it.
    pub fn prefilled(&mut self, step_ms: Ms, tokens: u32, steps_completed: u64) {
        let us_per_token = step_ms.saturating_mul(1000) / u64::from(tokens.max(1));
        self.prefill_step_ms = step_ms.max(self.prefill_step_ms.saturating_sub(self.prefill_step_ms / 16 + 1));
        self.prefill_us_per_token.record(us_per_token.max(1));
        self.prefill_before = Some((steps_completed, us_per_token));
        self.prefill_recent_us =
            us_per_token.max(self.prefill_recent_us.saturating_sub(self.prefill_recent_us / 16 + 1));
    }

    /// One prefill step that took no longer than this.
    pub fn prefilled_within(&mut self, step_ms: Ms, tokens: u32) {
        self.prefill_bound_us_per_token.record((step_ms.saturating_mul(1000) / u64::from(tokens.max(1))).max(1));
    }

    /// So many prompt tokens were served by one delivery, of so many that were owed by requests of which the longest asked for so many. A
    /// sum of prompts that are each of a known size is known; one whose size is not, although it waits among others, is not served by an
    /// answer to these.
    pub fn prompt_served(&mut self, served: u64, owed: u64, longest: u64, policy: &Policy) {
        self.prompt_served_max = self.prompt_served_max.max(served);
        // who was served is at most as long as all of them together
        self.prompt_longest_max = self.prompt_longest_max.max(longest.min(served));
        let known = longest <= reach(self.prompt_longest_max, policy);
        self.prompt_tokens_max = self.prompt_tokens_max.max(if known { owed } else { served });
    }

    /// Has this process taken enough steps for what is seen of it to count as usual (V3)?
    pub fn is_warm(&self, policy: &Policy) -> bool {
        self.steps_seen >= policy.native_warm_steps
    }

    /// A fresh process: what was learned stays, the warm-up is done again.
    pub fn restarted(&mut self) {
        self.steps_seen = 0;
        self.chunks_seen = 0;
        self.delivering_ms = 0;
        self.first_answers_seen = 0;
        self.prefill_before = None;
        self.crawled_at = None;
    }
}

/// About as slow as a histogram fades; begins with the first value.
fn slow_average(usual: u64, value: u64) -> u64 {
    if usual == 0 { value } else { usual.saturating_mul(511).saturating_add(value) / 512 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_never_below_the_sample_and_at_most_a_quarter_above() {
        for value in [1, 2, 7, 50, 299, 4_000, 69_000, 1_000_000] {
            let mut histogram = Histogram::default();
            histogram.record(value);
            let read = histogram.quantile(990).unwrap();
            assert!(read >= value && read <= value + value / 4 + 1, "{value} read as {read}");
        }
        assert_eq!(Histogram::default().quantile(500), None);
    }

    #[test]
    fn old_history_fades() {
        let mut histogram = Histogram::default();
        (0..1000).for_each(|_| histogram.record(1000));
        (0..6000).for_each(|_| histogram.record(10));
        assert!(histogram.quantile(950).unwrap() < 20, "the old rhythm still rules");
    }

    #[test]
    fn what_is_written_reads_as_it_was_and_nonsense_does_no_harm() {
        let mut rhythm = Rhythm { steps_seen: 7, prefill_before: Some((3, 4)), ..Rhythm::default() };
        (1..900).for_each(|ms| rhythm.gap(ms, 2));
        let text = serde_json::to_string(&rhythm).unwrap();
        assert_eq!(serde_json::from_str::<Rhythm>(&text).unwrap(), rhythm, "{text}");
        assert_eq!(serde_json::from_str::<Rhythm>("{}").unwrap(), Rhythm::default());
        let nonsense: Histogram = serde_json::from_str("[[79,4294967295],[4000000,1],[3,4294967295]]").unwrap();
        assert!(nonsense.samples() <= SAMPLES_MAX);
        assert_eq!(nonsense.quantile(100), Some(4));
    }

    #[test]
    fn values_beyond_the_last_bucket_are_kept_as_the_last() {
        let mut histogram = Histogram::default();
        histogram.record(Ms::MAX);
        assert!(histogram.quantile(1000).unwrap() > 10_000_000);
    }
}
