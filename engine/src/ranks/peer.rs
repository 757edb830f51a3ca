//! What the kernel says of another rank's process and thread: gone, stopped and asleep need no deadline to pass, however long the step
//! may last. Reads `/proc`.

use std::io::ErrorKind;
use std::time::Duration;

use nix::libc::ESRCH;

/// A rank's process from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// It has ended, or is a zombie.
    Gone,
    /// SIGSTOP, or a debugger.
    Stopped,
    /// It may run.
    There,
}

impl Peer {
    /// Looks at process `pid`; 0, a rank that has not begun, counts as there.
    pub fn look(pid: u64) -> Self {
        if pid == 0 {
            return Self::There;
        }
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH) => {
                return Self::Gone;
            }
            // too few descriptors or too little memory, here: its deadline will tell
            Err(_) => return Self::There,
        };
        match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
            Some('Z' | 'X') | None => Self::Gone,
            Some('T' | 't') => Self::Stopped,
            Some(_) => Self::There,
        }
    }
}

/// What thread `tid` has run so far, if it is asleep. `None`: it runs, wants to, waits for a disk, or nobody knows.
pub fn asleep(tid: u64) -> Option<Duration> {
    let of_thread = |file: &str| std::fs::read_to_string(format!("/proc/{tid}/{file}")).ok();
    let ran = of_thread("schedstat")?.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)?;
    of_thread("stat")?.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S')).then_some(ran)
}

/// For how long threads have slept without a moment of work. Pure.
#[derive(Debug, Default)]
pub struct Stillness {
    /// For each rank what it had run when it was first seen to have run so much, and when that was.
    ranks: Vec<Option<(Duration, Duration)>>,
}

impl Stillness {
    /// Takes in what [`asleep`] says of a rank at `now`.
    pub fn look(&mut self, rank: usize, asleep: Option<Duration>, now: Duration) -> Duration {
        self.ranks.resize(self.ranks.len().max(rank + 1), None);
        let before = self.ranks[rank].filter(|(ran, _)| Some(*ran) == asleep);
        self.ranks[rank] = before.or(asleep.map(|ran| (ran, now)));
        self.ranks[rank].map_or(Duration::ZERO, |(_, since)| now.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_still_from_the_first_look_that_found_it_asleep_until_it_runs() {
        let mut still = Stillness::default();
        let looks = [(5, None), (10, Some(7)), (20, Some(7)), (30, Some(7)), (40, Some(8)), (50, Some(8)), (60, None)];
        let ms = |(now, ran): (u64, Option<u64>)| {
            still.look(3, ran.map(Duration::from_millis), Duration::from_millis(now)).as_millis()
        };
        assert_eq!(looks.map(ms), [0, 0, 10, 20, 0, 10, 0]);
        let other = still.look(0, Some(Duration::from_millis(8)), Duration::from_millis(90));
        assert_eq!(other, Duration::ZERO, "each rank by itself");
    }

    #[test]
    fn a_thread_that_sleeps_is_asleep_and_has_run_and_one_that_burns_is_not() {
        if !std::path::Path::new("/proc/self/schedstat").exists() {
            return;
        }
        let (tell, told) = std::sync::mpsc::channel();
        let end = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (tell_too, burn) = (tell.clone(), end.clone());
        std::thread::spawn(move || {
            tell_too.send(crate::waits::this_tid()).unwrap();
            std::thread::sleep(Duration::from_secs(600));
        });
        let tid = told.recv_timeout(Duration::from_secs(60)).unwrap();
        let (since, mut seen) = (std::time::Instant::now(), Vec::new());
        while seen.len() < 5 {
            seen.extend(asleep(tid));
            assert!(since.elapsed().as_secs() < 60, "{seen:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(seen[4] > Duration::ZERO && seen[4] == seen[3], "{seen:?}");
        let burning = std::thread::spawn(move || {
            tell.send(crate::waits::this_tid()).unwrap();
            while !burn.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let tid = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!((0..20).all(|_| asleep(tid).is_none()));
        end.store(true, std::sync::atomic::Ordering::Relaxed);
        while !burning.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(asleep(tid), None, "it is gone");
        assert_eq!(asleep(0), None, "a rank that has not begun");
    }

    #[test]
    fn this_process_is_there_and_a_zombie_is_gone() {
        assert_eq!(Peer::look(u64::from(std::process::id())), Peer::There);
        assert_eq!(Peer::look(u64::from(u32::MAX)), Peer::Gone);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let since = std::time::Instant::now();
        while Peer::look(u64::from(child.id())) != Peer::Gone {
            assert!(since.elapsed().as_secs() < 20, "it has ended and is not reaped");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(child.try_wait());
    }
}
