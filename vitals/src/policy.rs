//! The detector's numbers in one place, with their units in their names and why each is what it is.
//!
//! A policy travels in the API and in flags, so it is plain data. No number here is tuned to a recording: each comes from a
//! period (1 Hz scrape, 100 ms tick), a measured cause, or what the rivals do.

use serde::{Deserialize, Serialize};

use crate::observation::Ms;

/// Deadlines, confirm times and bounds of the detector (V3, V6). All times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// How often the caller means to tick; [`crate::verdict::Outcome::check_again_in_ms`] is never more.
    pub tick_ms: Ms,
    /// No step of a native page is suspect before this age, however fast the engine is: three ticks, and more than the pauses
    /// that a scheduler gives a runnable process on a busy machine.
    pub native_floor_ms: Ms,
    /// The least that this floor comes down to on a machine that makes no noise (see [`crate::noise`]): a look and a half.
    pub native_floor_calm_ms: Ms,
    /// So much decode is seen before the floor may come down.
    pub native_calm_ms: Ms,
    /// For so long the floor stays up after it was too low, doubling each time.
    pub native_calm_penalty_ms: Ms,
    /// The most of a gap of the agent, in which the engine was not seen to run either, that counts as this machine's jitter.
    pub jitter_ms_max: Ms,
    /// A native page's loop that owes work but is between two steps: the front end may be handing work over.
    pub native_between_ms: Ms,
    /// A gate's silence on a foreign engine is not suspect before this: two and a half 1 Hz samples.
    pub foreign_floor_ms: Ms,
    /// The gate owes work and a native page is idle: tokenizing and hand-over take this long at most.
    pub admission_ms: Ms,
    /// Only prefill moves while decode work is owed: the longest pause of decode that prefill may cause (chunked prefill of many
    /// long prompts has kept healthy engines silent for 20 s and more).
    pub decode_starved_ms: Ms,
    /// A lease declared by the page is believed up to this (H5).
    pub lease_cap_ms: Ms,
    /// A start-up lease is believed up to this.
    pub startup_lease_cap_ms: Ms,
    /// Patience where nothing has been learned: what vLLM, SGLang and TensorRT-LLM wait by default.
    pub patience_cap_ms: Ms,
    /// Patience where nothing has been learned and nothing works either: no CPU time, no busy GPU, no bytes read, no byte for the gate. Twice the
    /// longest time-out with which front ends fetch what a client points to (30 s). It fences; nothing is destroyed before the above.
    pub idle_patience_ms: Ms,
    /// A foreign engine that starts and shows no CPU time, no compiler and no page for this long.
    pub startup_silence_ms: Ms,
    /// Native page: learned quantile × this, in tenths: 40 = 4.0.
    pub native_factor_tenths: u32,
    /// Gate: learned quantile × this, in tenths.
    pub foreign_factor_tenths: u32,
    /// Steps seen of this process before a native rhythm counts as learned (warm-up excluded, V3).
    pub native_warm_steps: u64,
    /// Deliveries seen through the gate (chunks) before a foreign rhythm counts as learned.
    pub foreign_warm_chunks: u64,
    /// …and the time with work owed in which they were seen.
    pub foreign_warm_ms: Ms,
    /// Requests that were answered after a silence in which none in flight had begun to answer, before such silences count as learned.
    pub foreign_warm_answers: u64,
    /// So many times slower than its own usual an engine has been seen to turn and live (swap, a card that throttles; 0.28 tokens a second in
    /// the field): while it works for the step, nothing shorter is proof of a hang.
    pub crawl_times: u64,
    /// Prompt tokens owed up to learned maximum × this (in tenths) count as inside what was learned.
    pub prompt_reach_tenths: u32,
    /// So few prompt tokens that an engine that is warm needs no history of prompts for them.
    pub prompt_tokens_free: u64,
    /// Steps that must turn without a delivery before a loop is called a livelock.
    pub livelock_steps: u64,
    /// Confirm time where independent witnesses agree.
    pub confirm_strong_ms: Ms,
    /// Confirm time with one extra witness (process stopped, whole tree without CPU time, log signature, cold busy GPU).
    pub confirm_moderate_ms: Ms,
    /// Confirm time where the gate's silence and flat metrics speak and the engine burns CPU.
    pub confirm_weak_ms: Ms,
    /// Confirm time while the stepping thread sleeps on a timer: such a sleep ends by itself.
    pub confirm_timer_ms: Ms,
    /// A suspect whose work has gone away is let out on trial after this.
    pub trial_after_ms: Ms,
    /// A new suspicion this soon after a trial needs no weak confirm time: it is a relapse.
    pub relapse_ms: Ms,
    /// No suspicion outlives this on the wall: it ends confirmed or on trial.
    pub suspect_ms_max: Ms,
    /// A process that outlives SIGKILL by this is unkillable (I5).
    pub unkillable_ms: Ms,
    /// A pause announced in the log is believed for this long.
    pub pause_ms_max: Ms,
    /// Slow: milliseconds a token and request at least this …
    pub slow_token_ms_min: Ms,
    /// … and this many times the learned median.
    pub slow_factor: u32,
    /// Ages beyond which a source says nothing any more.
    pub fresh_ms: Ms,
    pub metrics_fresh_ms: Ms,
    /// The same of NCCL RAS, which takes longest where a rank is silent: two answers that come just in time (8 s), and the 5 s between.
    pub ras_fresh_ms: Ms,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            tick_ms: 100,
            native_floor_ms: 300,
            native_floor_calm_ms: 150,
            native_calm_ms: 5_000,
            native_calm_penalty_ms: 600_000,
            jitter_ms_max: 500,
            native_between_ms: 600,
            foreign_floor_ms: 2_500,
            admission_ms: 3_000,
            decode_starved_ms: 60_000,
            lease_cap_ms: 300_000,
            startup_lease_cap_ms: 900_000,
            patience_cap_ms: 300_000,
            idle_patience_ms: 60_000,
            startup_silence_ms: 300_000,
            native_factor_tenths: 40,
            foreign_factor_tenths: 30,
            native_warm_steps: 32,
            foreign_warm_chunks: 50,
            foreign_warm_ms: 3_000,
            foreign_warm_answers: 32,
            crawl_times: 150,
            prompt_reach_tenths: 20,
            prompt_tokens_free: 512,
            livelock_steps: 8,
            confirm_strong_ms: 2_000,
            confirm_moderate_ms: 10_000,
            confirm_weak_ms: 20_000,
            confirm_timer_ms: 120_000,
            trial_after_ms: 30_000,
            relapse_ms: 600_000,
            suspect_ms_max: 600_000,
            unkillable_ms: 10_000,
            pause_ms_max: 3_600_000,
            slow_token_ms_min: 1_000,
            slow_factor: 10,
            fresh_ms: 3_000,
            metrics_fresh_ms: 10_000,
            ras_fresh_ms: 22_000,
        }
    }
}

impl Policy {
    /// Three times the rivals' patience: what a silence is given that health explains as well as a hang does.
    pub fn long_patience_ms(&self) -> Ms {
        self.patience_cap_ms.saturating_mul(3)
    }
}
