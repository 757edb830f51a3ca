//! Reading one process from a `/proc` tree, live or a fixture: only files that never wait for the process's memory lock.
//!
//! `stat`, `status`, `wchan` and `cgroup` answer even for a process in state D; `cmdline`, `environ` and `maps` may not, so the
//! ten-times-a-second path never opens them (I4).

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::text::lossy;

/// What one read takes; files of more are read on.
const READ_BYTES: usize = 4_096;

/// A `/proc` tree.
#[derive(Debug, Clone)]
pub struct ProcRoot {
    root: PathBuf,
}

/// What `/proc/<pid>/stat` says, as far as it is needed. CPU times are in clock ticks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    pub pid: i32,
    /// The kernel's name of the process: at most 15 characters of the file that was executed.
    pub comm: String,
    pub state: char,
    /// It is on its way out: it runs nothing any more, and gives back what it has.
    pub exits: bool,
    pub ppid: i32,
    pub session: i32,
    /// User and system time of the process itself.
    pub own_ticks: u64,
    /// The same of children that it has waited for.
    pub reaped_ticks: u64,
    pub threads: u64,
    /// Clock ticks after boot: with the pid it names one process for ever.
    pub start_ticks: u64,
}

/// What `/proc/<pid>/task/<tid>/schedstat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedStat {
    pub ran_ns: u64,
    /// How long it has stood in line for a core: waits that have ended.
    pub waited_ns: u64,
}

impl SchedStat {
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        Some(Self { ran_ns: numbers.next()?.ok()?, waited_ns: numbers.next()?.ok()? })
    }

    /// How much of the `span_ms` since `before` a thread waited that could run at both ends. One that neither ran nor ended a wait has
    /// waited all the time.
    pub fn waited_ms(&self, before: &Self, span_ms: u64) -> u64 {
        if self == before {
            return span_ms;
        }
        (self.waited_ns.saturating_sub(before.waited_ns) / 1_000_000).min(span_ms)
    }
}

/// Of the kernel's flags of a process (`include/linux/sched.h`; proc(5), field 9).
const PF_EXITING: u64 = 0x4;

impl Stat {
    /// Parses one line; `None` for anything that is not one.
    pub fn parse(text: &str) -> Option<Self> {
        // The name may hold spaces and parentheses, so it ends at the last one.
        let (pid, rest) = text.split_once(" (")?;
        let (comm, fields) = rest.rsplit_once(')')?;
        // Field n of proc(5) is at n - 3, for the state is field 3; none beyond field 22 is needed.
        let mut all = fields.split_ascii_whitespace();
        let fields: [&str; 20] = std::array::from_fn(|_| all.next().unwrap_or(""));
        let number = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<u64>().ok());
        let signed = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<i32>().ok());
        Some(Self {
            pid: pid.trim().parse().ok()?,
            comm: comm.to_owned(),
            state: fields.first()?.chars().next()?,
            exits: number(9)? & PF_EXITING != 0,
            ppid: signed(4)?,
            session: signed(6)?,
            own_ticks: number(14)?.saturating_add(number(15)?),
            reaped_ticks: number(16)?.saturating_add(number(17)?),
            threads: number(20)?,
            start_ticks: number(22)?,
        })
    }

    /// Has it ended? A zombie has, unless its first thread alone has left and others still run.
    pub fn ended(&self) -> bool {
        match self.state {
            'X' | 'x' => true,
            'Z' => self.threads <= 1,
            _ => false,
        }
    }
}

impl ProcRoot {
    /// The running kernel's.
    pub fn live() -> Self {
        Self::at(Path::new("/proc"))
    }

    /// Any directory of the same shape.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// `<root>/<pid>/<name>`.
    pub fn path(&self, pid: i32, name: &str) -> PathBuf {
        self.root.join(pid.to_string()).join(name)
    }

    /// One process; `None` when it is gone, or cannot be read.
    pub fn stat(&self, pid: i32) -> Option<Stat> {
        self.find(pid).ok().flatten()
    }

    /// One process; `None` when there is none.
    ///
    /// # Errors
    /// That could not be found out: who has no descriptor left knows nothing of anybody.
    pub fn find(&self, pid: i32) -> io::Result<Option<Stat>> {
        match read_small(&self.path(pid, "stat")) {
            // A process may give itself a name that is no UTF-8.
            Ok(text) => Stat::parse(&text).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
            // ESRCH: it went away between open and read
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// One thread of a process; the numbers are the thread's own.
    pub fn thread_stat(&self, pid: i32, tid: i32) -> Option<Stat> {
        Stat::parse(&small(&self.path(pid, &format!("task/{tid}/stat")))?)
    }

    /// The numbers of the threads of a process, the first one first.
    pub fn threads(&self, pid: i32) -> impl Iterator<Item = i32> + use<> {
        numbered(&self.path(pid, "task"))
    }

    /// How long a thread has run and waited; `None` where the kernel does not count.
    pub fn schedstat(&self, pid: i32, tid: i32) -> Option<SchedStat> {
        SchedStat::parse(&small(&self.path(pid, &format!("task/{tid}/schedstat")))?)
    }

    /// Every process that can be seen; those that end meanwhile are left out.
    pub fn all(&self) -> Vec<Stat> {
        self.pids().filter_map(|pid| self.stat(pid)).collect()
    }

    /// The number of every process that can be seen.
    pub fn pids(&self) -> impl Iterator<Item = i32> + use<> {
        numbered(&self.root)
    }

    /// Where the main thread waits in the kernel: a symbol, or `0` where it does not wait.
    pub fn wchan(&self, pid: i32) -> Option<String> {
        let text = small(&self.path(pid, "wchan"))?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// The debugger that holds the process, if one does.
    pub fn tracer(&self, pid: i32) -> Option<i32> {
        let text = small(&self.path(pid, "status"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
        line.trim().parse().ok().filter(|tracer| *tracer != 0)
    }

    /// `/proc/<pid>/cgroup` as it is: one line a hierarchy.
    pub fn cgroup(&self, pid: i32) -> Option<String> {
        small(&self.path(pid, "cgroup"))
    }

    /// What a process has open, as far as we may ask: the way to each here, and what the kernel says that it is. No process's memory is waited for.
    pub fn open_files(&self, pid: i32) -> impl Iterator<Item = (PathBuf, PathBuf)> + use<> {
        let entries = std::fs::read_dir(self.path(pid, "fd")).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.path(), std::fs::read_link(entry.path()).ok()?)))
    }

    /// The mount namespace (`mnt:[4026531840]`), where we may ask.
    pub fn mount_namespace(&self, pid: i32) -> Option<PathBuf> {
        std::fs::read_link(self.path(pid, "ns/mnt")).ok()
    }
}

/// The entries of a folder whose names are numbers.
fn numbered(folder: &Path) -> impl Iterator<Item = i32> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()))
}

/// A file that the kernel makes as it is read; `None` where it cannot be read.
pub fn small(path: &Path) -> Option<String> {
    read_small(path).ok()
}

/// In as few calls as can be: ten times a second every call counts. A read that comes back short was the last.
fn read_small(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut whole = Vec::new();
    let mut buffer = [0; READ_BYTES];
    loop {
        let read = file.read(&mut buffer)?;
        whole.extend_from_slice(buffer.get(..read).unwrap_or_default());
        if read < READ_BYTES {
            return Ok(lossy(whole));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let line = "42 (a ) b (c) S 7 42 41 0 -1 4194560 1 2 3 4 11 22 33 44 20 0 9 0 163140 1 2\n";
        let stat = Stat::parse(line).unwrap();
        assert_eq!(stat.comm, "a ) b (c");
        assert_eq!((stat.pid, stat.ppid, stat.session, stat.state), (42, 7, 41, 'S'));
        assert_eq!((stat.own_ticks, stat.reaped_ticks), (33, 77));
        assert_eq!((stat.threads, stat.start_ticks), (9, 163_140));
    }

    #[test]
    fn anything_else_is_no_process() {
        for line in ["", "42", "42 (x", "42 (x) S", "42 (x) S 1 2 3", "x (x) S 1 1 1 0 0 0 0 0 0 0 1 1 1 1 0 0 1 0 1"] {
            assert_eq!(Stat::parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_zombie_with_running_threads_has_not_ended() {
        let stat = |state, threads| {
            Stat::parse(&format!("1 (x) {state} 0 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 {threads} 0 5")).unwrap()
        };
        assert!(stat('Z', 1).ended() && stat('X', 1).ended());
        assert!(!stat('Z', 3).ended() && !stat('T', 1).ended() && !stat('D', 1).ended());
    }
}
