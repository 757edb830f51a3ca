//! Does the engine's cgroup hold it back? Throttled by its CPU limit or frozen, for cgroup v1 and v2 (V5).
//!
//! Reads `/proc/<pid>/cgroup` and the files below the cgroup mounts; where our own mount does not show the engine's group (each
//! container sees its own), the engine's mount is read through `/proc/<pid>/root`.

use std::path::{Path, PathBuf};

use super::procs::{ProcRoot, small};

/// Looks at most once in this time: limits act in periods of 100 ms, and a share wants several.
const LOOK_EVERY_MS: u64 = 1_000;
/// Which groups a process is in is asked at most once in this time: it hardly ever moves, and the freezer is asked at every look. But who
/// freezes a process by hand makes a group for it, and a stall is confirmed after two seconds.
const GROUPS_EVERY_MS: u64 = 1_000;
/// Where the files of the same groups lie is looked up anew after this, in case something was mounted meanwhile: it is up to a dozen ways
/// through the file system (2d).
const PLACES_EVERY_MS: u64 = 60_000;
const CPU_CONTROLLERS: [&str; 3] = ["cpu", "cpu,cpuacct", "cpuacct,cpu"];
/// Throttled time (summed over CPUs) of one look from which silence is the limit's doing: half the time that passed.
const THROTTLED_SHARE: f64 = 0.5;

/// What the limit did since the last look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CgroupState {
    pub throttled: bool,
    pub frozen: bool,
}

/// Watches one process's cgroup.
#[derive(Debug)]
pub struct CgroupWatch {
    proc: ProcRoot,
    mounts: PathBuf,
    looked: Option<(u64, CpuStat)>,
    state: CgroupState,
    places: Option<Places>,
}

/// Where the files of one process's groups lie; `None` where there is none to read.
#[derive(Debug)]
struct Places {
    pid: i32,
    /// Its `/proc/<pid>/cgroup`, and when that was read.
    groups: String,
    read_ms: u64,
    found_ms: u64,
    cpu_stat: Option<PathBuf>,
    /// v1 has `freezer.state`, v2 a line of `cgroup.events`.
    freezer: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct CpuStat {
    nr_throttled: u64,
    throttled_us: u64,
}

impl CgroupWatch {
    /// `mounts` is `/sys/fs/cgroup` but in tests.
    pub fn new(proc: ProcRoot, mounts: &Path) -> Self {
        Self { proc, mounts: mounts.to_owned(), looked: None, state: CgroupState::default(), places: None }
    }

    /// Where the cgroup hierarchies are mounted.
    pub fn mounts(&self) -> &Path {
        &self.mounts
    }

    /// The state as of now, or of the last look if that is recent. No cgroup or no right to read it: neither.
    pub fn look(&mut self, pid: i32, now_ms: u64) -> CgroupState {
        self.find_places(pid, now_ms);
        if self.looked.is_some_and(|(at_ms, _)| now_ms.saturating_sub(at_ms) < LOOK_EVERY_MS) {
            // Freezing is what a person does by hand; it is cheap to ask for at once.
            self.state.frozen = self.frozen();
            return self.state;
        }
        let now = self.read(|places| places.cpu_stat.as_ref()).map(|text| cpu_stat(&text));
        let before = self.looked.take();
        self.state = CgroupState { throttled: false, frozen: self.frozen() };
        if let Some(now) = now {
            self.state.throttled =
                before.is_some_and(|(at_ms, before)| held_back(before, now, now_ms.saturating_sub(at_ms)));
            self.looked = Some((now_ms, now));
        }
        self.state
    }

    fn frozen(&self) -> bool {
        let text = self.read(|places| places.freezer.as_ref()).unwrap_or_default();
        matches!(text.trim(), "FROZEN" | "FREEZING") || text.lines().any(|line| line.trim() == "frozen 1")
    }

    fn read(&self, file: fn(&Places) -> Option<&PathBuf>) -> Option<String> {
        small(self.places.as_ref().and_then(file)?)
    }

    fn find_places(&mut self, pid: i32, now_ms: u64) {
        let since = |at_ms: u64| now_ms.saturating_sub(at_ms);
        let known = self.places.take().filter(|places| places.pid == pid);
        if known.as_ref().is_some_and(|places| since(places.read_ms) < GROUPS_EVERY_MS) {
            self.places = known;
            return;
        }
        let groups = self.proc.cgroup(pid).unwrap_or_default();
        let same = known.filter(|places| places.groups == groups && since(places.found_ms) < PLACES_EVERY_MS);
        self.places = Some(match same {
            Some(places) => Places { read_ms: now_ms, ..places },
            None => Places {
                pid,
                read_ms: now_ms,
                found_ms: now_ms,
                cpu_stat: self.place(pid, &groups, &CPU_CONTROLLERS, "cpu.stat"),
                freezer: self
                    .place(pid, &groups, &["freezer"], "freezer.state")
                    .or_else(|| self.place(pid, &groups, &[], "cgroup.events")),
                groups,
            },
        });
    }

    fn place(&self, pid: i32, groups: &str, controllers: &[&str], file: &str) -> Option<PathBuf> {
        place((&self.proc, pid), groups, &self.mounts, controllers, file)
    }
}

/// Where a file of these groups of a process lies: v1 under one of `controllers` (empty: v2 only), else v2.
pub fn place(
    (proc, pid): (&ProcRoot, i32),
    groups: &str,
    mounts: &Path,
    controllers: &[&str],
    file: &str,
) -> Option<PathBuf> {
    let theirs = proc.path(pid, "root/sys/fs/cgroup");
    let places = candidates(groups, controllers, mounts, &theirs);
    places.into_iter().map(|directory| directory.join(file)).find(|path| path.is_file())
}

/// Directories where the group's files may lie, the likeliest first.
fn candidates(groups: &str, controllers: &[&str], ours: &Path, theirs: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(names), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let v2 = names.is_empty();
        let wanted = controllers.iter().any(|wanted| names == *wanted || names.split(',').any(|name| name == *wanted));
        let mounts: Vec<&str> = match (v2, wanted) {
            (true, _) => vec![""],
            (false, true) => std::iter::once(names).chain(controllers.iter().copied()).collect(),
            (false, false) => continue,
        };
        let below = path.trim_start_matches('/');
        // A path with `..` lies outside our cgroup namespace: our mount cannot show it, theirs shows it as its root.
        let visible = !below.split('/').any(|part| part == "..");
        for mount in &mounts {
            if visible {
                found.push(ours.join(mount).join(below));
                found.push(theirs.join(mount).join(below));
            }
        }
        found.extend(mounts.iter().filter(|_| !below.is_empty()).map(|mount| theirs.join(mount)));
    }
    found
}

fn cpu_stat(text: &str) -> CpuStat {
    let mut stat = CpuStat::default();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let value: u64 = value.trim().parse().unwrap_or(0);
        match name {
            "nr_throttled" => stat.nr_throttled = value,
            "throttled_usec" => stat.throttled_us = value,
            // v1 counts in nanoseconds
            "throttled_time" => stat.throttled_us = value / 1_000,
            _ => {}
        }
    }
    stat
}

/// A limit that bites now and then is normal life; an excuse is one that takes a good part of the time.
fn held_back(before: CpuStat, now: CpuStat, elapsed_ms: u64) -> bool {
    let throttled_us = now.throttled_us.saturating_sub(before.throttled_us);
    now.nr_throttled > before.nr_throttled && throttled_us as f64 >= THROTTLED_SHARE * elapsed_ms as f64 * 1_000.0
}
