//! Which processes are the engine: its tree for `/proc` facts and for the kill, and its root inside a pod.
//!
//! Reads `/proc` only. A process that cannot be shown to be the engine's is left out: this list is what gets SIGKILL.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::procs::{ProcRoot, Stat};

/// An engine's root process. The start time tells it from a later process with the same pid.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EngineProcess {
    pub pid: i32,
    /// Field 22 of `/proc/<pid>/stat`.
    pub start_ticks: u64,
}

impl From<&Stat> for EngineProcess {
    fn from(stat: &Stat) -> Self {
        Self { pid: stat.pid, start_ticks: stat.start_ticks }
    }
}

impl EngineProcess {
    /// The process that has this pid now.
    pub fn of(pid: i32) -> Option<Self> {
        ProcRoot::live().stat(pid).as_ref().map(Self::from)
    }

    /// Is it the same process still, and not a zombie?
    pub fn lives(&self) -> bool {
        ProcRoot::live().stat(self.pid).is_some_and(|stat| self.is(&stat))
    }

    /// Is it known to be gone? Whoever cannot look knows nothing.
    pub fn is_gone(&self) -> bool {
        self.is_gone_in(&ProcRoot::live())
    }

    /// [`Self::is_gone`] over any `/proc`.
    pub(super) fn is_gone_in(&self, proc: &ProcRoot) -> bool {
        proc.find(self.pid).is_ok_and(|found| found.is_none_or(|stat| !self.is(&stat)))
    }

    /// Is that what is said of it, and has it not ended?
    pub(super) fn is(&self, stat: &Stat) -> bool {
        stat.start_ticks == self.start_ticks && !stat.ended()
    }
}

/// The live processes of the engine, the root first: descendants, and orphans that share its session or, in a pod, its container.
/// Zombies, this process and its ancestors are never in it. Empty when nothing is left.
pub fn process_tree(root: &EngineProcess) -> Vec<i32> {
    process_tree_in(&ProcRoot::live(), root, own_pid())
}

/// [`process_tree`] with each process's start time, which tells it from a later one with its pid.
pub fn process_tree_members(root: &EngineProcess) -> Vec<EngineProcess> {
    members_in(&ProcRoot::live(), root, own_pid())
}

/// The engine container's root in a pod with a shared PID namespace: a process whose parent is outside (PPID 0), that is neither
/// the pause process nor in the agent's own container. Who comes into a container after its first process came by another door (a probe, a
/// hook, `kubectl exec`) and is none; nor is whoever is still in the container `ended`, whose engine has ended. Where several are left (other
/// sidecars), those whose environment names the page directory win, then the oldest.
///
/// Reads `environ`, which waits for the process's memory lock: never on a tick (I4).
pub fn find_pod_engine(page_dir: &Path, ended: Option<&str>) -> Option<Found> {
    find_engine_in(&ProcRoot::live(), own_pid(), page_dir, ended)
}

/// What names the container that this process is in, where anything does.
pub fn container_of(process: &EngineProcess) -> Option<String> {
    own_container(&ProcRoot::live(), process.pid, own_pid()).filter(|_| process.lives())
}

/// Who is left of an engine whose end nobody saw: its session's, and whoever is still in its `container`, which has ended with it. Not who came
/// in there by another door (`kubectl exec`), with what they started.
pub fn left_of(engine: &EngineProcess, container: Option<&str>) -> Vec<EngineProcess> {
    left_of_in(&ProcRoot::live(), engine, container, own_pid())
}

/// The process that a search took for the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub process: EngineProcess,
    /// Its environment names our page directory. Without that it is a guess: the oldest that was left.
    pub named: bool,
    /// It is a guess, and what its environment names is not known.
    pub hides: bool,
}

/// [`process_tree`] over any `/proc`, seen by process `me`.
pub fn process_tree_in(proc: &ProcRoot, root: &EngineProcess, me: i32) -> Vec<i32> {
    members_in(proc, root, me).into_iter().map(|member| member.pid).collect()
}

fn members_in(proc: &ProcRoot, root: &EngineProcess, me: i32) -> Vec<EngineProcess> {
    if root.pid <= 1 {
        // session 0 is the kernel's and whoever's is outside of our namespace
        return Vec::new();
    }
    let all = proc.all();
    let spared = ancestors(&all, me);
    let root_now = all.iter().find(|stat| stat.pid == root.pid);
    let root_lives = root_now.is_some_and(|stat| stat.start_ticks == root.start_ticks);
    let mut found: HashSet<i32> = HashSet::new();
    if root_lives {
        found.insert(root.pid);
    }
    // A session's id is not given away while anybody is left in it, so orphans of a dead leader are still the engine's. It is
    // ours to use only where the root led it: else it is the session of whoever started the engine.
    let led = root_now.is_none_or(|stat| root_lives && stat.session == root.pid);
    if led {
        found.extend(all.iter().filter(|stat| stat.session == root.pid).map(|stat| stat.pid));
    }
    // A container has a root that came from outside, and nobody else in it. Any other group that an engine may be in (a slice, one that
    // somebody made for all of a machine's engines) holds strangers.
    let is_container = root_now.is_some_and(|stat| root_lives && stat.ppid == 0);
    if is_container && let Some(container) = own_container(proc, root.pid, me) {
        let inside = |stat: &&Stat| proc.cgroup(stat.pid).is_some_and(|cgroup| cgroup == container);
        found.extend(all.iter().filter(|stat| stat.pid != 1).filter(inside).map(|stat| stat.pid));
    }
    add_descendants(&all, &mut found);
    let mut tree: Vec<EngineProcess> = all
        .iter()
        .filter(|stat| found.contains(&stat.pid) && !stat.ended() && !spared.contains(&stat.pid))
        .map(EngineProcess::from)
        .collect();
    tree.sort_by_key(|member| (member.pid != root.pid, member.pid));
    tree
}

/// [`left_of`] over any `/proc`, seen by process `me`.
pub fn left_of_in(proc: &ProcRoot, engine: &EngineProcess, container: Option<&str>, me: i32) -> Vec<EngineProcess> {
    let mut left = members_in(proc, engine, me);
    let Some(container) = container else { return left };
    let all = proc.all();
    let spared = ancestors(&all, me);
    let inside = |stat: &Stat| !stat.ended() && !spared.contains(&stat.pid) && stat.pid != 1;
    let inside = all.into_iter().filter(inside).filter(|stat| proc.cgroup(stat.pid).as_deref() == Some(container));
    let inside: Vec<Stat> = inside.collect();
    let mut visitors: HashSet<i32> = inside.iter().filter(|stat| stat.ppid == 0).map(|stat| stat.pid).collect();
    add_descendants(&inside, &mut visitors);
    let known: HashSet<i32> = left.iter().map(|process| process.pid).collect();
    let more = inside.iter().filter(|stat| !visitors.contains(&stat.pid) && !known.contains(&stat.pid));
    left.extend(more.map(EngineProcess::from));
    left.sort_by_key(|process| process.pid);
    left
}

/// [`find_pod_engine`] over any `/proc`, seen by process `me`.
pub fn find_engine_in(proc: &ProcRoot, me: i32, page_dir: &Path, ended: Option<&str>) -> Option<Found> {
    let all = proc.all();
    let spared = ancestors(&all, me);
    let outside =
        |stat: &&Stat| stat.ppid == 0 && stat.pid != 1 && stat.pid != 2 && !stat.ended() && !spared.contains(&stat.pid);
    let mut roots: Vec<&Stat> = all.iter().filter(outside).filter(|stat| !same_container(proc, stat.pid, me)).collect();
    roots.sort_by_key(|stat| (stat.start_ticks, stat.pid));
    // all of a container have its environment, and a container never has a second first process: another start is another container
    let mut begun: HashSet<String> = ended.map(str::to_owned).into_iter().collect();
    roots.retain(|stat| own_container(proc, stat.pid, me).is_none_or(|container| begun.insert(container)));
    let named = roots.iter().find(|stat| names_page_dir(proc, stat.pid, page_dir) == Some(true));
    let chosen = named.or(roots.first())?;
    let process = EngineProcess { pid: chosen.pid, start_ticks: chosen.start_ticks };
    let hides = named.is_none() && names_page_dir(proc, chosen.pid, page_dir).is_none();
    Some(Found { process, named: named.is_some(), hides })
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(-1)
}

/// `me` and everything above it: what a kill must never reach.
pub fn ancestors(all: &[Stat], me: i32) -> HashSet<i32> {
    let parents: HashMap<i32, i32> = all.iter().map(|stat| (stat.pid, stat.ppid)).collect();
    let mut chain = HashSet::new();
    let mut pid = me;
    while pid > 0 && chain.insert(pid) {
        pid = parents.get(&pid).copied().unwrap_or(0);
    }
    chain
}

/// Of these the root's own family: its descendants, and its session with theirs where it leads one. Who came into its container by another door
/// (`kubectl exec`) is a member all the same.
pub fn family(members: &[Stat], root: i32) -> HashSet<i32> {
    let led = members.iter().find(|stat| stat.pid == root).is_none_or(|stat| stat.session == root);
    let own = |stat: &&Stat| stat.pid == root || (led && stat.session == root);
    let mut found = members.iter().filter(own).map(|stat| stat.pid).collect();
    add_descendants(members, &mut found);
    found
}

/// Widens `found` by parentage until nothing is added; at most as many rounds as the tree is deep.
pub fn add_descendants(all: &[Stat], found: &mut HashSet<i32>) {
    loop {
        let more: Vec<i32> = all
            .iter()
            .filter(|stat| found.contains(&stat.ppid) && !found.contains(&stat.pid))
            .map(|stat| stat.pid)
            .collect();
        if more.is_empty() {
            return;
        }
        found.extend(more);
    }
}

/// The engine's cgroup text where it names a container of its own: not ours, and not the root of every hierarchy.
fn own_container(proc: &ProcRoot, engine: i32, me: i32) -> Option<String> {
    let theirs = proc.cgroup(engine)?;
    let ours = proc.cgroup(me)?;
    let named = theirs.lines().any(|line| line.rsplit(':').next().is_some_and(|path| path != "/" && !path.is_empty()));
    // A path that ours lies beneath is a slice that holds both, not a container.
    let holds_us = theirs.lines().zip(ours.lines()).all(|(theirs, ours)| ours.starts_with(theirs));
    (named && theirs != ours && !holds_us).then_some(theirs)
}

fn same_container(proc: &ProcRoot, pid: i32, me: i32) -> bool {
    let (Some(theirs), Some(ours)) = (proc.cgroup(pid), proc.cgroup(me)) else { return true };
    if theirs != ours {
        return false;
    }
    // One cgroup seen for both (hidden hierarchies): containers still have mounts of their own.
    match (proc.mount_namespace(pid), proc.mount_namespace(me)) {
        (Some(theirs), Some(ours)) => theirs == ours,
        _ => true,
    }
}

/// Operators set the variable on the engine's container and to our own value. `None`: its environment cannot be read, or is none: whoever
/// writes a title of its own has written it over.
fn names_page_dir(proc: &ProcRoot, pid: i32, page_dir: &Path) -> Option<bool> {
    let environ = std::fs::read(proc.path(pid, "environ")).ok()?;
    let values =
        |name: &'static [u8]| environ.split(|byte| *byte == 0).filter_map(move |entry| entry.strip_prefix(name));
    let names = values(b"TRUEBEAT_PAGE_DIR=").any(|value| Path::new(OsStr::from_bytes(value)) == page_dir);
    (names || values(b"PATH=").next().is_some()).then_some(names)
}
