//! Short turns of the processor: what wakes up to say that an engine has ended, or stands still, is let in before the turn of whoever runs is
//! over (1a).
//!
//! From Linux 6.12 on a thread may ask for turns of its own length (EEVDF's `sched_runtime`), and one that wakes up to a shorter one than the
//! runner's is let in at once. It gets no more of the processor for it, only sooner. No right is needed; an older kernel makes nothing of it.
//! `docs/decisions/2026-11-22-short-turns.md`
//!
//! May touch how the calling thread is scheduled.

use nix::errno::Errno;
use nix::libc::{SYS_sched_getattr, SYS_sched_setattr, sched_attr, syscall};

/// The shortest that the kernel grants.
const SLICE_NS: u64 = 100_000;
/// Whoever is started from here, the engine above all, has turns of the usual length.
const RESET_ON_FORK: u64 = 0x01;
/// Neither real time nor batch nor idle.
const SCHED_OTHER: u32 = 0;

/// Asks for the calling thread alone. What somebody has set for it (its niceness, another policy) stays.
///
/// # Errors
/// When the kernel refuses; all is as before then, and nothing but sooner is lost.
pub fn ask() -> Result<(), Errno> {
    let attr = current()?;
    // what is reset on fork is a better niceness as well: whoever gave it meant the engine
    if attr.sched_policy != SCHED_OTHER || attr.sched_nice < 0 {
        return Ok(());
    }
    set(&sched_attr { sched_flags: attr.sched_flags | RESET_ON_FORK, sched_runtime: SLICE_NS, ..attr })
}

/// As [`ask`]; a refusal is told in the log.
pub(crate) fn ask_or_log() {
    if let Err(error) = ask() {
        tracing::debug!(%error, "the kernel grants no short turns of the processor");
    }
}

#[allow(unsafe_code, reason = "a raw system call has no safe form")]
fn current() -> Result<sched_attr, Errno> {
    let mut attr = sched_attr {
        size: 0,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most as many bytes into `attr` as it is told that there are; all are integers, and the call keeps no pointer.
    let done = unsafe { syscall(SYS_sched_getattr, 0, &raw mut attr, size_of::<sched_attr>(), 0) };
    Errno::result(done).map(|_| attr)
}

#[allow(unsafe_code, reason = "a raw system call has no safe form")]
fn set(attr: &sched_attr) -> Result<(), Errno> {
    // SAFETY: the kernel reads `attr.size` bytes, which is what it wrote there: at most the length of `attr`. The call keeps no pointer.
    Errno::result(unsafe { syscall(SYS_sched_setattr, 0, attr, 0) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `nice -n -5 truebeat run …`: with what is reset on fork its engine would run at 0. (Only root may ask for it.)
    #[test]
    fn a_better_niceness_is_left_to_those_who_are_started() {
        let asked = std::thread::spawn(|| {
            let before = current().unwrap();
            if before.sched_policy != SCHED_OTHER || set(&sched_attr { sched_nice: -5, ..before }).is_err() {
                return None;
            }
            ask().unwrap();
            Some((current().unwrap().sched_flags, std::thread::spawn(|| current().unwrap().sched_nice).join().unwrap()))
        });
        match asked.join().unwrap() {
            Some((flags, child)) => assert_eq!((flags & RESET_ON_FORK, child), (0, -5)),
            None => crate::not_run::without_right("no right to a better niceness"),
        }
    }

    /// In a thread of its own, for what is asked for stays.
    #[test]
    fn a_thread_asks_for_itself_alone_and_keeps_its_niceness() {
        let asked = std::thread::spawn(|| {
            let before = current().unwrap();
            ask().unwrap();
            let after = current().unwrap();
            let child = std::thread::spawn(|| current().unwrap().sched_runtime).join().unwrap();
            (before, after, child)
        });
        let (before, after, child) = asked.join().unwrap();
        assert_eq!((before.sched_policy, before.sched_nice), (after.sched_policy, after.sched_nice));
        let meant = before.sched_policy == SCHED_OTHER && before.sched_nice >= 0;
        assert_eq!(after.sched_flags & RESET_ON_FORK != 0, meant, "{after:?}");
        // a kernel that knows no turns of one's own length tells none
        if meant && before.sched_runtime != 0 {
            assert_eq!((after.sched_runtime, child), (SLICE_NS, before.sched_runtime));
        }
    }
}
