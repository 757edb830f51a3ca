//! Where each value of the page lies (H1): the one place that turns values into little-endian words and back.
//!
//! Pure: bytes in, values out. Decoding is total (H8): any bytes end in a value that keeps the bounds or in an
//! [`Unknown`]. Every offset here is in the field table of `docs/contracts/heartbeat.md` and held by a golden file.

use crate::page::{Beat, GPUS_MAX, Identity, Phase, RING_LEN, StepOutcome, StepRecord};
use crate::unknown::Unknown;

/// First eight bytes of every page.
pub const MAGIC: [u8; 8] = *b"TRUEBEAT";
/// The layout this code writes, and the only one it reads.
pub const VERSION: u32 = 1;
/// Bytes before the ring.
pub const HEADER_LEN: usize = 4096;
/// Bytes of one ring slot: sequence word, six payload words, one spare.
pub const RECORD_LEN: usize = 64;
/// Bytes of the whole file.
pub const FILE_LEN: usize = HEADER_LEN + RING_LEN * RECORD_LEN;
/// Where the beat's sequence word lies; its payload follows.
pub const BEAT_OFFSET: usize = 256;
/// Bytes of the constant part of the header, which holds the identity.
pub const IDENTITY_LEN: usize = 208;

/// Payload words of the beat and of a step record.
pub(crate) const BEAT_WORDS: usize = 12;
pub(crate) const RECORD_WORDS: usize = 6;

const VERSION_AT: usize = 8;
const HEADER_LEN_AT: usize = 12;
const FILE_LEN_AT: usize = 16;
const RING_LEN_AT: usize = 20;
const RECORD_LEN_AT: usize = 24;
const GPU_COUNT_AT: usize = 28;
const PID_AT: usize = 32;
const RANK_AT: usize = 36;
const WORLD_SIZE_AT: usize = 40;
const ENGINES_AT: usize = 44;
const START_TICKS_AT: usize = 48;
const NONCE_AT: usize = 56;
const BOOT_ID_AT: usize = 64;
const GPU_UUIDS_AT: usize = 80;
const UUID_LEN: usize = 16;

// The table must not overlap itself or leave the header; a wrong edit stops the build.
const _: () = assert!(GPU_UUIDS_AT + GPUS_MAX * UUID_LEN == IDENTITY_LEN && IDENTITY_LEN <= BEAT_OFFSET);
const _: () = assert!(BEAT_OFFSET.is_multiple_of(64) && BEAT_OFFSET + 8 * (1 + BEAT_WORDS) <= HEADER_LEN);
const _: () = assert!(8 * (1 + RECORD_WORDS) <= RECORD_LEN && FILE_LEN <= u32::MAX as usize);

/// Name of a rank's page inside the page directory (H1).
pub fn file_name(rank: u32) -> String {
    format!("rank-{rank}.beat")
}

/// What makes an identity impossible to write, as (field, value); the same rules that the reader applies (H2).
pub(crate) fn identity_fault(identity: &Identity) -> Option<(&'static str, u64)> {
    let gpus = identity.gpu_uuids.len();
    if gpus > GPUS_MAX {
        return Some(("gpu_count", gpus as u64));
    }
    if identity.pid == 0 || identity.pid > i32::MAX as u32 {
        return Some(("pid", u64::from(identity.pid)));
    }
    if identity.world_size == 0 {
        return Some(("world_size", 0));
    }
    if !identity.world_size.is_multiple_of(identity.engines.max(1)) {
        return Some(("engines", u64::from(identity.engines)));
    }
    (identity.rank >= identity.world_size).then_some(("rank", u64::from(identity.rank)))
}

/// The file as it is before the first beat: identity in place, all sequence words 0.
/// The identity must have no [`identity_fault`]; GPUs beyond the eighth are left out.
pub(crate) fn fresh_page(identity: &Identity) -> Vec<u8> {
    let mut page = vec![0; FILE_LEN];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC);
    for (at, value) in geometry() {
        put(at, &value.to_le_bytes());
    }
    let gpus = &identity.gpu_uuids[..identity.gpu_uuids.len().min(GPUS_MAX)];
    put(GPU_COUNT_AT, &(gpus.len() as u32).to_le_bytes());
    put(PID_AT, &identity.pid.to_le_bytes());
    put(RANK_AT, &identity.rank.to_le_bytes());
    put(WORLD_SIZE_AT, &identity.world_size.to_le_bytes());
    put(ENGINES_AT, &identity.engines.to_le_bytes());
    put(START_TICKS_AT, &identity.pid_start_ticks.to_le_bytes());
    put(NONCE_AT, &identity.nonce.to_le_bytes());
    put(BOOT_ID_AT, &identity.boot_id);
    for (i, uuid) in gpus.iter().enumerate() {
        put(GPU_UUIDS_AT + i * UUID_LEN, uuid);
    }
    page
}

/// Reads the constant part of the header.
///
/// # Errors
/// `BadMagic`, `BadVersion`, or `BadField` for a size or an identity that cannot be (H8).
pub(crate) fn identity_of(header: &[u8; IDENTITY_LEN]) -> Result<Identity, Unknown> {
    if header[..MAGIC.len()] != MAGIC {
        return Err(Unknown::BadMagic { found: bytes_at(header, 0) });
    }
    let found = u32_at(header, VERSION_AT);
    if found != VERSION {
        return Err(Unknown::BadVersion { found, expected: VERSION });
    }
    for ((at, want), field) in geometry().into_iter().zip(GEOMETRY_NAMES) {
        let value = u32_at(header, at);
        if value != want {
            return Err(Unknown::BadField { field, value: u64::from(value) });
        }
    }
    let gpu_count = u32_at(header, GPU_COUNT_AT) as usize;
    if gpu_count > GPUS_MAX {
        return Err(Unknown::BadField { field: "gpu_count", value: gpu_count as u64 });
    }
    let identity = Identity {
        pid: u32_at(header, PID_AT),
        pid_start_ticks: u64::from_le_bytes(bytes_at(header, START_TICKS_AT)),
        boot_id: bytes_at(header, BOOT_ID_AT),
        nonce: u64::from_le_bytes(bytes_at(header, NONCE_AT)),
        rank: u32_at(header, RANK_AT),
        world_size: u32_at(header, WORLD_SIZE_AT),
        engines: u32_at(header, ENGINES_AT),
        gpu_uuids: (0..gpu_count).map(|i| bytes_at(header, GPU_UUIDS_AT + i * UUID_LEN)).collect(),
    };
    match identity_fault(&identity) {
        Some((field, value)) => Err(Unknown::BadField { field, value }),
        None => Ok(identity),
    }
}

/// The beat's payload in page order, as numbers; the writer stores each word little-endian.
#[inline]
pub(crate) fn beat_words(beat: &Beat) -> [u64; BEAT_WORDS] {
    [
        beat.steps_completed,
        beat.tokens_delivered,
        beat.requests_finished,
        pair(beat.running, beat.waiting),
        beat.prompt_tokens_owed,
        pair(beat.phase as u32, beat.phase_tokens),
        beat.phase_entered_ns,
        u64::from(beat.lease_ms),
        beat.step_started_ns,
        beat.work_done,
        beat.work_total,
        beat.published_ns,
    ]
}

/// Reads a beat that the seqlock accepted.
///
/// # Errors
/// `BadField` for an unknown phase or for a time after the beat's own publication (H3–H5, H8).
pub(crate) fn beat_of(words: &[u64; BEAT_WORDS]) -> Result<Beat, Unknown> {
    let (running, waiting) = halves(words[3]);
    let (phase, phase_tokens) = halves(words[5]);
    let beat = Beat {
        steps_completed: words[0],
        tokens_delivered: words[1],
        requests_finished: words[2],
        running,
        waiting,
        prompt_tokens_owed: words[4],
        phase: phase_of(phase).ok_or(Unknown::BadField { field: "phase", value: u64::from(phase) })?,
        phase_tokens,
        phase_entered_ns: words[6],
        lease_ms: halves(words[7]).0,
        step_started_ns: words[8],
        work_done: words[9],
        work_total: words[10],
        published_ns: words[11],
    };
    for (field, value) in [("phase_entered_ns", beat.phase_entered_ns), ("step_started_ns", beat.step_started_ns)] {
        if value > beat.published_ns {
            return Err(Unknown::BadField { field, value });
        }
    }
    Ok(beat)
}

/// A step record's payload in page order.
#[inline]
pub(crate) fn record_words(record: &StepRecord) -> [u64; RECORD_WORDS] {
    [
        record.step,
        record.started_ns,
        record.ended_ns,
        pair(record.requests, record.prefill_tokens),
        pair(record.decode_tokens, record.outcome as u32),
        record.graph_key,
    ]
}

/// Reads a step record; `None` for an unknown outcome or an end before the start (H6, H8).
pub(crate) fn record_of(words: &[u64; RECORD_WORDS]) -> Option<StepRecord> {
    let (requests, prefill_tokens) = halves(words[3]);
    let (decode_tokens, outcome) = halves(words[4]);
    let record = StepRecord {
        step: words[0],
        started_ns: words[1],
        ended_ns: words[2],
        requests,
        prefill_tokens,
        decode_tokens,
        graph_key: words[5],
        outcome: outcome_of(outcome)?,
    };
    (record.started_ns <= record.ended_ns).then_some(record)
}

/// The `N` little-endian words that `bytes` begins with; 0 for what is not there (callers pass whole buffers).
pub(crate) fn words_of<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*chunk);
    }
    words
}

/// Sizes that version 1 fixes. They are in the header so that a person with `hexdump` can find the ring.
const GEOMETRY_NAMES: [&str; 5] = ["version", "header_len", "file_len", "ring_len", "record_len"];
fn geometry() -> [(usize, u32); 5] {
    [
        (VERSION_AT, VERSION),
        (HEADER_LEN_AT, HEADER_LEN as u32),
        (FILE_LEN_AT, FILE_LEN as u32),
        (RING_LEN_AT, RING_LEN as u32),
        (RECORD_LEN_AT, RECORD_LEN as u32),
    ]
}

fn phase_of(value: u32) -> Option<Phase> {
    use Phase::{Capture, Compile, Decode, Drain, Idle, Load, Prefill, Sleep, WarmUp};
    [Load, Compile, Capture, WarmUp, Idle, Prefill, Decode, Sleep, Drain].into_iter().find(|p| *p as u32 == value)
}

fn outcome_of(value: u32) -> Option<StepOutcome> {
    use StepOutcome::{DeadlineExceeded, Failed, Ok};
    [Ok, Failed, DeadlineExceeded].into_iter().find(|o| *o as u32 == value)
}

/// Two 32-bit fields in one word: `low` lies at the lower address.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

fn u32_at(header: &[u8; IDENTITY_LEN], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(header, at))
}

fn bytes_at<const N: usize>(header: &[u8; IDENTITY_LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}
