//! The clocks that sources need: `CLOCK_MONOTONIC` in milliseconds and its distance to the kernel's boot clock.
//!
//! May read clocks and `/proc/self/auxv`; nothing else. Every time that leaves the sources is on `CLOCK_MONOTONIC`, the clock of
//! the heartbeat page, so that ages can be compared.

use nix::time::{ClockId, clock_gettime};

/// Milliseconds of `CLOCK_MONOTONIC`. A kernel without that clock does not exist; 0 is the answer there.
pub fn monotonic_ms() -> u64 {
    clock_ms(ClockId::CLOCK_MONOTONIC)
}

/// How `/proc/<pid>/stat` counts time, and where its zero lies on `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TickClock {
    /// Clock ticks a second (`AT_CLKTCK`; 100 on every common kernel).
    pub ticks_per_second: u64,
    /// `CLOCK_BOOTTIME` minus `CLOCK_MONOTONIC`: the time that this machine has slept since boot, in ms.
    pub slept_ms: u64,
}

impl TickClock {
    /// The clock of the running kernel. Take it anew where it matters: a suspend changes `slept_ms`.
    pub fn live() -> Self {
        let slept_ms = clock_ms(ClockId::CLOCK_BOOTTIME).saturating_sub(monotonic_ms());
        Self { ticks_per_second: ticks_per_second(), slept_ms }
    }

    /// Ticks of CPU time in milliseconds.
    pub fn cpu_ms(&self, ticks: u64) -> u64 {
        ticks.saturating_mul(1000) / self.ticks_per_second.max(1)
    }

    /// A start time (field 22 of stat: ticks after boot, sleep included) on `CLOCK_MONOTONIC`, in ms.
    pub fn started_ms(&self, start_ticks: u64) -> u64 {
        self.cpu_ms(start_ticks).saturating_sub(self.slept_ms)
    }

    /// May a process with this start time have begun at `at_ms` or later? It began somewhere in that tick; and `slept_ms` is cut to whole
    /// milliseconds. After a suspend that this clock does not know of the answer is yes too often.
    pub fn may_have_started_since(&self, start_ticks: u64, at_ms: u64) -> bool {
        self.started_ms(start_ticks.saturating_add(1)).saturating_add(1) >= at_ms
    }
}

/// CPU time of the calling thread in microseconds: what something costs, however long it had to wait for a core.
pub fn own_cpu_us() -> u64 {
    clock_us(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

fn clock_ms(clock: ClockId) -> u64 {
    clock_us(clock) / 1000
}

fn clock_us(clock: ClockId) -> u64 {
    let Ok(time) = clock_gettime(clock) else { return 0 };
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec()).unwrap_or(0);
    seconds * 1_000_000 + nanos / 1000
}

/// `AT_CLKTCK` of the auxiliary vector: what `sysconf(_SC_CLK_TCK)` would say, without a foreign call.
fn ticks_per_second() -> u64 {
    const AT_CLKTCK: u64 = 17;
    const USUAL: u64 = 100;
    let Ok(vector) = std::fs::read("/proc/self/auxv") else { return USUAL };
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).unwrap_or(0);
    vector
        .chunks_exact(16)
        .find(|pair| word(&pair[..8]) == AT_CLKTCK)
        .map(|pair| word(&pair[8..]))
        .filter(|ticks| *ticks > 0)
        .unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_this_process_lies_in_the_past() {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let start: u64 = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
        let started_ms = TickClock::live().started_ms(start);
        let now_ms = monotonic_ms();
        assert!(started_ms <= now_ms + 20, "{started_ms} {now_ms}");
        assert!(now_ms - started_ms.min(now_ms) < 600_000, "a test that has run ten minutes: {started_ms} {now_ms}");
    }

    #[test]
    fn sleep_is_taken_off() {
        let clock = TickClock { ticks_per_second: 100, slept_ms: 5_000 };
        assert_eq!(clock.started_ms(1_000), 5_000);
        assert_eq!(clock.started_ms(10), 0, "never before the clock's zero");
        assert!(clock.may_have_started_since(1_000, 5_010) && !clock.may_have_started_since(1_000, 5_012));
    }
}
