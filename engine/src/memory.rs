//! How much memory is free for this process: the machine's, and that of each control group above it. Reads `/proc` and `/sys/fs/cgroup`.
//! And how much this process holds, by the allocator's own books.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Between two readings of the allocator's books; and for so many times as long as one took.
const READING_EVERY_NS: u64 = 5_000_000_000;
const READING_TIMES: u64 = 100;

/// Bytes that could be taken without anybody being killed over it; `None` where nothing says so.
pub fn free_bytes() -> Option<u64> {
    free_under(Path::new("/"))
}

/// The same, of the files below `root`.
fn free_under(root: &Path) -> Option<u64> {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| number_of(&text, "MemAvailable:"));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let groups = groups.lines().filter_map(|line| Group::of_line(root, line)).filter_map(|group| group.free_bytes());
    groups.chain(machine.map(|kib| kib.saturating_mul(1024))).min()
}

/// When the allocator's books may be read. A reading goes through all that is free, one arena after the other, and whoever allocates there
/// waits: however often somebody asks, it is done seldom, and takes a hundredth of the time at most.
#[derive(Debug, Default)]
pub struct Readings {
    next_ns: AtomicU64,
}

impl Readings {
    /// What `read` says, if it is time for that, and nobody else is at it; `clock_ns` tells how long it took.
    pub fn take<T>(&self, clock_ns: impl Fn() -> u64, read: impl FnOnce() -> T) -> Option<T> {
        let (now, next) = (clock_ns(), self.next_ns.load(Relaxed));
        let mine = now >= next && self.next_ns.compare_exchange(next, u64::MAX, Relaxed, Relaxed).is_ok();
        mine.then(|| {
            let said = read();
            let done = clock_ns();
            let pause = done.saturating_sub(now).saturating_mul(READING_TIMES).max(READING_EVERY_NS);
            self.next_ns.store(done.saturating_add(pause), Relaxed);
            said
        })
    }
}

/// Bytes that were asked of the allocator and not given back, by any thread; `None` where the C library does not tell. What the system
/// calls resident has the allocator's holes in it, which come and go.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "the C library's own call has no safe form")]
pub fn held_bytes() -> Option<u64> {
    // SAFETY: it takes the allocator's own locks one by one, as every allocation does, and reads its books.
    let books = unsafe { nix::libc::mallinfo2() };
    Some(books.uordblks.saturating_add(books.hblkhd) as u64)
}

/// No other C library has such books.
#[cfg(not(target_env = "gnu"))]
pub fn held_bytes() -> Option<u64> {
    None
}

/// A control group that bounds memory, in either of the two versions.
struct Group {
    /// Where the groups are, and which of them this is; a container may see only the last part of its path, or nothing but the root.
    base: PathBuf,
    path: PathBuf,
    files: &'static Files,
}

/// Names of files, and of numbers in `memory.stat`.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// What is used for files, and given back when others want it.
    cached: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};
const V2: Files = Files { limit: "memory.max", used: "memory.current", cached: ["inactive_file", "active_file"] };

impl Group {
    /// Of a line of `/proc/self/cgroup`.
    fn of_line(root: &Path, line: &str) -> Option<Self> {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (base, files) = match controllers {
            "" => ("sys/fs/cgroup", &V2),
            _ if controllers.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", &V1),
            _ => return None,
        };
        Some(Self { base: root.join(base), path: PathBuf::from(path.trim_start_matches('/')), files })
    }

    /// What is left in the one of this group and those above it that has the least.
    fn free_bytes(&self) -> Option<u64> {
        self.path.ancestors().filter_map(|path| self.free_of(&self.base.join(path))).min()
    }

    fn free_of(&self, dir: &Path) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(dir.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.files.limit)?, number(self.files.used)?);
        let stat = read("memory.stat").unwrap_or_default();
        let cached = self.files.cached.iter().filter_map(|name| number_of(&stat, name)).sum();
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// The number after `name` at the beginning of a line.
fn number_of(text: &str, name: &str) -> Option<u64> {
    let mut words =
        text.lines().map(str::split_whitespace).find_map(|mut words| (words.next()? == name).then_some(words))?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(files: &[(&str, &str)]) -> Option<u64> {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        free_under(dir.path())
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal: 9 kB\nMemFree:  1 kB\nMemAvailable:     8 kB\n");

    #[test]
    fn the_machine_or_the_tightest_group_above_bounds_it() {
        assert_eq!(free(&[]), None);
        assert_eq!(free(&[MACHINE]), Some(8192));
        let v2 = [
            MACHINE,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "4000\n"),
            ("sys/fs/cgroup/a/memory.max", "7000\n"),
            ("sys/fs/cgroup/a/memory.current", "5000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 3000\ninactive_file 100\nactive_file 20\n"),
        ];
        assert_eq!(free(&v2), Some(2120));
        assert_eq!(free(&v2[..4]), Some(8192), "a group without a limit");
        // a container sees its own group as the root, under a name that is not there
        let v1 = [
            MACHINE,
            ("proc/self/cgroup", "4:cpu:/x\n3:foo,memory:/pod/y\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "6000"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "6500"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 9999\ntotal_inactive_file 700\n"),
        ];
        assert_eq!(free(&v1), Some(200));
        assert_eq!(free(&v1[..4]), Some(0), "more than its limit, for a moment");
    }

    #[test]
    fn the_books_are_read_seldom_and_the_more_so_the_longer_it_takes() {
        let (readings, clock_ns) = (Readings::default(), AtomicU64::new(0));
        let read_at = |second: &u64, took_ms: u64| {
            clock_ns.fetch_max(second * 1_000_000_000, Relaxed);
            let read = || clock_ns.fetch_add(took_ms * 1_000_000, Relaxed);
            readings.take(|| clock_ns.load(Relaxed), read).is_some()
        };
        let quick: Vec<u64> = (0..20).filter(|second| read_at(second, 1)).collect();
        assert_eq!(quick, [0, 6, 12, 18]);
        let slow: Vec<u64> = (20..400).filter(|second| read_at(second, 1_000)).collect();
        assert_eq!(slow, [24, 125, 226, 327]);
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_is_held_is_seen_while_it_is_and_no_longer() {
        const MANY: usize = 64 << 20;
        let before = held_bytes().unwrap() as usize;
        let kept = vec![1_u8; MANY];
        let during = held_bytes().unwrap() as usize;
        drop(std::hint::black_box(kept));
        let after = held_bytes().unwrap() as usize;
        // other tests of this process hold and give back a little meanwhile
        assert!(during > before + MANY / 2 && after < during - MANY / 2, "{before}, {during}, {after} bytes");
    }

    #[test]
    fn this_machine_says_something() {
        assert!(free_bytes().is_some_and(|bytes| bytes > 0));
    }
}
