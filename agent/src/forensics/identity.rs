//! Who the engine's processes are and where they run: command lines and environments (redacted), program, kernel, cgroup.
//!
//! `cmdline`, `environ` and `exe` may wait for the process's memory lock, so they are read last and on a thread that may be left
//! behind (see `proc_facts`).

use std::fs;
use std::path::Path;

use super::proc_facts::{Collection, read_capped};
use super::redact::{redact_command, redact_environment, secrets};
use crate::sources::cgroup::place;
use crate::sources::procs::ProcRoot;

/// Names the image in the engine's environment, where whoever starts it says so.
const IMAGE_VARIABLE: &str = "TRUEBEAT_ENGINE_IMAGE";
/// Stands for the name of a program that cannot be read.
pub(super) const UNKNOWN: &str = "unknown";
/// What the machine is and how it fares.
const KERNEL_FILES: [&str; 7] =
    ["version", "loadavg", "uptime", "meminfo", "pressure/cpu", "pressure/memory", "pressure/io"];
/// What the engine's cgroup is allowed, has used, and has suffered (version 2).
const CGROUP_FILES: [&str; 15] = [
    "cgroup.events",
    "cgroup.freeze",
    "cpu.max",
    "cpu.stat",
    "cpu.pressure",
    "cpuset.cpus.effective",
    "memory.current",
    "memory.max",
    "memory.events",
    "memory.pressure",
    "memory.swap.current",
    "pids.current",
    "pids.max",
    "io.stat",
    "io.pressure",
];

/// The same of version 1, where each controller has folders of its own.
const CGROUP_FILES_V1: [(&str, &[&str]); 5] = [
    ("cpu", &["cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.stat"]),
    ("cpuset", &["cpuset.effective_cpus"]),
    ("freezer", &["freezer.state"]),
    (
        "memory",
        &[
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
            "memory.max_usage_in_bytes",
            "memory.failcnt",
            "memory.oom_control",
        ],
    ),
    ("pids", &["pids.current", "pids.max"]),
];
const CGROUP_MOUNTS: &str = "/sys/fs/cgroup";

/// Adds what there is to the collection.
pub fn collect(proc: &ProcRoot, tree: &[i32], collection: &Collection) {
    kernel(collection);
    if let Some(root) = tree.first() {
        if let Some(text) = cgroup(proc, *root, Path::new(CGROUP_MOUNTS)) {
            collection.entry("cgroup.txt".to_owned(), text);
        }
        let image = image(proc, *root);
        collection.add(|collected| collected.image = image);
    }
    // each by itself: one whose memory is locked costs what comes after it, and nothing before
    for pid in tree {
        let (args, variables) = (words(&proc.path(*pid, "cmdline")), words(&proc.path(*pid, "environ")));
        let found = secrets(&args.clone().unwrap_or_default(), &variables.clone().unwrap_or_default());
        collection.add(|collected| collected.secrets.extend(found));
        let command = args.map_or_else(|| "(cannot be read)".to_owned(), |args| redact_command(&args).join(" "));
        collection.append("commands.txt", &format!("{pid} {command}\n"));
        let lines = variables.map_or_else(|| vec!["(cannot be read)".to_owned()], |vars| redact_environment(&vars));
        let lines: String = lines.iter().map(|line| format!("    {line}\n")).collect();
        collection.append("environment.txt", &format!("process {pid}\n{lines}"));
    }
}

/// What names the engine's program: the image if it was told, else the executable's name and length.
pub(super) fn image(proc: &ProcRoot, pid: i32) -> String {
    let told = words(&proc.path(pid, "environ")).unwrap_or_default();
    let told = told.iter().find_map(|variable| variable.strip_prefix(IMAGE_VARIABLE)?.strip_prefix('='));
    if let Some(image) = told.filter(|image| !image.is_empty()) {
        return image.chars().take(300).collect();
    }
    let exe = proc.path(pid, "exe");
    let name = fs::read_link(&exe).ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let bytes = fs::metadata(&exe).map_or(0, |meta| meta.len());
    name.map_or_else(|| UNKNOWN.to_owned(), |name| format!("{name}, {bytes} bytes"))
}

/// Words that end in a zero byte; `None` where the file is not ours to read or the process is gone.
fn words(path: &Path) -> Option<Vec<String>> {
    let text = read_capped(path)?;
    Some(text.split('\0').filter(|word| !word.is_empty()).map(str::to_owned).collect())
}

fn kernel(collection: &Collection) {
    let mut text = String::new();
    for name in KERNEL_FILES {
        append(&mut text, name, read_capped(&Path::new("/proc").join(name)));
    }
    collection.entry("kernel.txt".to_owned(), text);
}

/// In a pod both have cgroup namespaces of their own, and the engine's group lies outside of ours: then its own mount is asked.
fn cgroup(proc: &ProcRoot, pid: i32, mounts: &Path) -> Option<String> {
    let groups = read_capped(&proc.path(pid, "cgroup"))?;
    let of_v2 = CGROUP_FILES.iter().map(|name| (&[][..], name));
    let of_v1 = CGROUP_FILES_V1
        .iter()
        .flat_map(|(controller, names)| names.iter().map(|name| (std::slice::from_ref(controller), name)));
    let mut text = format!("{}\n", groups.trim_end());
    for (controllers, name) in of_v2.chain(of_v1) {
        let path = place((proc, pid), &groups, mounts, controllers, name);
        append(&mut text, name, path.and_then(|path| read_capped(&path)));
    }
    Some(text)
}

fn append(text: &mut String, name: &str, read: Option<String>) {
    if let Some(read) = read {
        text.push_str(&format!("== {name}\n{}\n", read.trim_end()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `/proc/7/cgroup` says, with these files below these mounts; what is told of them.
    fn told(groups: &str, files: &[(&str, &str)]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/7/cgroup", groups);
        files.iter().for_each(|(path, text)| write(path, text));
        cgroup(&ProcRoot::at(&dir.path().join("proc")), 7, &dir.path().join("mounts")).unwrap()
    }

    #[test]
    fn the_engines_cgroup_is_told_wherever_it_is_mounted() {
        let own = "proc/7/root/sys/fs/cgroup/memory.max";
        let neighbours = told("0::/../cri-7.scope\n", &[(own, "4096\n"), ("mounts/memory.max", "max\n")]);
        assert_eq!(neighbours, "0::/../cri-7.scope\n== memory.max\n4096\n", "and not our own");
        assert_eq!(told("0::/a\n", &[("mounts/a/cpu.max", "max 100000")]), "0::/a\n== cpu.max\nmax 100000\n");
        let v1 = [("mounts/cpu,cpuacct/a/cpu.stat", "nr_throttled 3"), ("mounts/memory/b/memory.failcnt", "5")];
        let told = told("4:cpu,cpuacct:/a\n3:memory:/b\n", &v1);
        assert!(told.ends_with("== cpu.stat\nnr_throttled 3\n== memory.failcnt\n5\n"), "{told}");
    }
}
