//! How long a thread of the process that steps stood in line for a core since the look before (V5). On a machine that runs much else a
//! step lasts as long as its unluckiest thread waits; that is the machine's silence, not the engine's.
//!
//! Reads a file or two a thread, so it is asked only while work stands still.

use std::collections::HashMap;

use vitals::observation::Ms;

use super::procs::{ProcRoot, SchedStat};

/// Threads that are read; a process with more is read in part, its first ones.
const THREADS_MAX: usize = 64;
/// A look that is longer ago than this says nothing: the wait may belong to a step that is long done.
const BASELINE_MS_MAX: Ms = 400;

/// Follows the threads of one process.
#[derive(Debug)]
pub struct QueueWatch {
    proc: ProcRoot,
    /// The process and moment of the last look.
    last: Option<(i32, Ms)>,
    /// What the threads that could run had waited by then.
    seen: HashMap<i32, SchedStat>,
}

impl QueueWatch {
    /// Over any `/proc`; nothing is known yet.
    pub fn new(proc: ProcRoot) -> Self {
        Self { proc, last: None, seen: HashMap::new() }
    }

    /// Milliseconds that the unluckiest thread of `pid` waited since the look before, of those that could run at both looks: a thread
    /// that slept at either has waited for something else. `None` where that is not known.
    pub fn look(&mut self, now_ms: Ms, pid: i32) -> Option<Ms> {
        let now: HashMap<i32, SchedStat> = self.runnable(pid).collect();
        let before = std::mem::replace(&mut self.seen, now);
        let (known, at_ms) = self.last.replace((pid, now_ms))?;
        let span_ms = now_ms.saturating_sub(at_ms);
        if known != pid || span_ms > BASELINE_MS_MAX {
            return None;
        }
        let waits = self.seen.iter().filter_map(|(tid, now)| Some(now.waited_ms(before.get(tid)?, span_ms)));
        Some(waits.max().unwrap_or(0))
    }

    fn runnable(&self, pid: i32) -> impl Iterator<Item = (i32, SchedStat)> {
        let runs = move |tid: &i32| self.proc.thread_stat(pid, *tid).is_some_and(|stat| stat.state == 'R');
        let tids = self.proc.threads(pid).take(THREADS_MAX).filter(runs);
        tids.filter_map(move |tid| Some((tid, self.proc.schedstat(pid, tid)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A thread with this state and `schedstat`.
    fn thread(root: &Path, tid: i32, state: char, schedstat: &str) {
        let dir = root.join(format!("7/task/{tid}"));
        std::fs::create_dir_all(&dir).unwrap();
        let rest = "1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 9 0 5";
        std::fs::write(dir.join("stat"), format!("{tid} (kernel-1) {state} {rest}\n")).unwrap();
        std::fs::write(dir.join("schedstat"), schedstat).unwrap();
    }

    #[test]
    fn the_unluckiest_thread_that_could_run_at_both_looks_counts() {
        let root = tempfile::tempdir().unwrap();
        let mut watch = QueueWatch::new(ProcRoot::at(root.path()));
        thread(root.path(), 7, 'R', "0 1000000 5");
        thread(root.path(), 8, 'R', "0 1000000 5");
        thread(root.path(), 9, 'S', "0 1000000 5");
        assert_eq!(watch.look(1_000, 7), None, "nothing to compare with");
        thread(root.path(), 7, 'R', "9 31000000 9");
        thread(root.path(), 8, 'S', "9 81000000 9");
        thread(root.path(), 9, 'R', "9 91000000 9");
        assert_eq!(watch.look(1_100, 7), Some(30));
    }

    /// The kernel adds a wait to the sum when it ends.
    #[test]
    fn a_thread_that_was_never_switched_to_waits_still() {
        let root = tempfile::tempdir().unwrap();
        let mut watch = QueueWatch::new(ProcRoot::at(root.path()));
        thread(root.path(), 7, 'R', "50 1000000 5");
        watch.look(1_000, 7);
        assert_eq!(watch.look(1_100, 7), Some(100));
        thread(root.path(), 7, 'R', "90000050 1000000 5");
        assert_eq!(watch.look(1_200, 7), Some(0), "it had a core all the time");
    }

    #[test]
    fn an_old_look_another_process_and_a_kernel_that_does_not_say_are_no_news() {
        let root = tempfile::tempdir().unwrap();
        let mut watch = QueueWatch::new(ProcRoot::at(root.path()));
        thread(root.path(), 7, 'R', "0 1000000 5");
        watch.look(1_000, 7);
        assert_eq!(watch.look(1_401, 7), None);
        assert_eq!(watch.look(1_500, 8), None);
        assert_eq!(watch.look(1_600, 7), None);
        thread(root.path(), 7, 'R', "nothing");
        assert_eq!(watch.look(1_700, 7), Some(0));
    }
}
