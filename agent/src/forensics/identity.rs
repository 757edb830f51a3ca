//! Who the engine's processes are and where they run: command lines and environments (redacted), program, kernel, cgroup.
//!
//! `cmdline`, `environ` and `exe` may wait for the process's memory lock, so they are read last and on a thread that may be left
//! behind (see `proc_facts`).

use std::fs;
use std::path::{Path, PathBuf};

use super::proc_facts::{Collection, read_capped};
use super::redact::{redact_command, redact_environment, secrets};
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

/// Adds what there is to the collection.
pub fn collect(proc: &ProcRoot, tree: &[i32], collection: &Collection) {
    kernel(collection);
    if let Some(root) = tree.first() {
        cgroup(proc, *root, collection);
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

fn cgroup(proc: &ProcRoot, pid: i32, collection: &Collection) {
    let Some(own) = read_capped(&proc.path(pid, "cgroup")) else { return };
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::")) else { return };
    // seen from another cgroup namespace it may lie outside of what is mounted here
    let folder: PathBuf = Path::new("/sys/fs/cgroup").join(path.trim_start_matches(['/', '.']));
    let mut text = format!("{path}\n");
    for name in CGROUP_FILES {
        append(&mut text, name, read_capped(&folder.join(name)));
    }
    collection.entry("cgroup.txt".to_owned(), text);
}

fn append(text: &mut String, name: &str, read: Option<String>) {
    if let Some(read) = read {
        text.push_str(&format!("== {name}\n{}\n", read.trim_end()));
    }
}
