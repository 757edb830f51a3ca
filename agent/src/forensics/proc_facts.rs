//! What `/proc` knows of every process and thread of the engine: states, kernel waits, limits. Who they are is
//! read by `identity`, after all of this.
//!
//! Runs on a thread that may be left behind: each file is added to the collection as it is read, so that a read which never
//! returns costs what comes after it and nothing before.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::bundle::BundleEntry;
use crate::sources::procs::ProcRoot;

const PROCESSES_MAX: usize = 256;
const THREADS_MAX: usize = 512;
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Files of each process. None of them holds arguments or environment.
const FILES: [&str; 8] = ["status", "stat", "wchan", "syscall", "limits", "cgroup", "statm", "sched"];

/// What stands where a file may not be read.
const NO_RIGHT: &str = "(no right to read it)";

/// What has been read so far; a clone sees the same collection.
#[derive(Debug, Clone, Default)]
pub struct Collection {
    inner: Arc<Mutex<Collected>>,
}

/// The facts.
#[derive(Debug, Clone, Default)]
pub struct Collected {
    pub entries: Vec<BundleEntry>,
    /// One line a process: who it is and where its main thread is.
    pub mains: Vec<MainThread>,
    pub notes: Vec<String>,
    /// Values that must not be in any entry, and what names the engine's program (see `identity`).
    pub secrets: Vec<String>,
    pub image: String,
}

/// Where the main thread of one process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MainThread {
    pub pid: i32,
    pub comm: String,
    pub state: char,
    pub wchan: String,
}

impl Collection {
    /// Takes what there is.
    pub fn take(&self) -> Collected {
        std::mem::take(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add(&self, change: impl FnOnce(&mut Collected)) {
        change(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn entry(&self, name: String, text: String) {
        self.add(|collected| collected.entries.push(BundleEntry { name, text }));
    }

    /// Adds to the entry of this name, or begins it.
    pub(super) fn append(&self, name: &str, text: &str) {
        self.add(|collected| match collected.entries.iter_mut().find(|entry| entry.name == name) {
            Some(entry) => entry.text.push_str(text),
            None => collected.entries.push(BundleEntry { name: name.to_owned(), text: text.to_owned() }),
        });
    }
}

/// Reads everything into `collection`. The main threads come first: they are what the summary needs.
pub fn collect(proc: &ProcRoot, tree: &[i32], collection: &Collection) {
    if tree.len() > PROCESSES_MAX {
        collection.add(|c| c.notes.push(format!("{} processes, the first {PROCESSES_MAX} were read", tree.len())));
    }
    let tree = &tree[..tree.len().min(PROCESSES_MAX)];
    for pid in tree {
        let Some(stat) = proc.stat(*pid) else { continue };
        let wchan = proc.wchan(*pid).unwrap_or_else(|| "?".to_owned());
        let main = MainThread { pid: *pid, comm: stat.comm, state: stat.state, wchan };
        collection.add(|collected| collected.mains.push(main));
    }
    for pid in tree {
        for name in FILES {
            // a file may be missing, forbidden or gone with its process
            let Some(text) = read_capped(&proc.path(*pid, name)) else { continue };
            collection.entry(format!("proc/{pid}/{name}"), text);
        }
        collection.entry(format!("proc/{pid}/threads.txt"), threads(&proc.path(*pid, "task")));
    }
    super::identity::collect(proc, tree, collection);
}

/// Every thread: state, kernel wait, system call, and the kernel's stack where we may see it.
fn threads(task: &Path) -> String {
    let Ok(entries) = fs::read_dir(task) else { return "its threads cannot be listed\n".to_owned() };
    let mut tids: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok())).collect();
    tids.sort_unstable();
    let mut text = String::new();
    for tid in tids.iter().take(THREADS_MAX) {
        let file = |name: &str| told(&task.join(tid.to_string()).join(name));
        let state = file("stat").rsplit(')').next().and_then(|rest| rest.trim().chars().next()).unwrap_or('?');
        text.push_str(&format!(
            "{tid} {} {state} wchan={} syscall={}\n",
            file("comm").trim(),
            file("wchan").trim(),
            file("syscall").trim()
        ));
        // the kernel's own stack of it, for whoever has the right (root alone, as a rule)
        for line in file("stack").lines().filter(|line| *line != NO_RIGHT) {
            text.push_str(&format!("    {line}\n"));
        }
    }
    if tids.len() > THREADS_MAX {
        text.push_str(&format!("({} threads, the first {THREADS_MAX} are shown)\n", tids.len()));
    }
    text
}

/// A file's text, or why there is none: a missing right is not the same as nothing.
fn told(path: &Path) -> String {
    match fs::File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => NO_RIGHT.to_owned(),
        _ => read_capped(path).unwrap_or_else(|| match fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => NO_RIGHT.to_owned(),
            _ => String::new(),
        }),
    }
}

pub(super) fn read_capped(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
