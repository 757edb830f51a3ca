//! What a killed engine leaves in `/dev/shm`. After any other end Python's resource tracker removes it; a kill of the whole tree ends that as
//! well, and each recovery would cost the node as much memory as the ranks share (vllm #51579).
//!
//! Reads links of descriptors, for which no process's memory is waited for, and removes files of known names that the engine had open and
//! nobody has any more. Whatever else lies there (a model, say) is somebody's own.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags, openat, statat, unlinkat};

use crate::sources::procs::ProcRoot;
use crate::sources::{EngineProcess, process_tree_members};

const MEMORY: &str = "/dev/shm";
/// Names that nobody gives by hand: Python's `SharedMemory`, torch's and NCCL's segments.
const PREFIXES: [&[u8]; 3] = [b"psm_", b"torch_", b"nccl-"];
/// Memory that is pinned takes seconds to be given back.
const END_WAIT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The segments that one engine's processes have open.
#[derive(Debug)]
pub struct SharedMemory {
    /// `/dev/shm` as the engine sees it, which may be its container's.
    folder: File,
    segments: Vec<Segment>,
}

#[derive(Debug, PartialEq, Eq)]
struct Segment {
    name: OsString,
    id: (u64, u64),
}

impl SharedMemory {
    /// Of a live engine; `None` where it has none, or none can be seen.
    pub fn of(engine: &EngineProcess) -> Option<Self> {
        let proc = ProcRoot::live();
        let mut segments = Vec::new();
        for member in process_tree_members(engine) {
            for segment in open_segments(&proc, member.pid) {
                if !segments.contains(&segment) {
                    segments.push(segment);
                }
            }
        }
        let root = File::open(proc.path(engine.pid, "root")).ok().filter(|_| !segments.is_empty())?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dev = openat(&root, "dev", flags, Mode::empty()).ok()?;
        let folder = openat(&dev, "shm", flags, Mode::empty()).ok()?;
        Some(Self { folder: folder.into(), segments })
    }

    /// Removes them when these processes have ended, unless they do not.
    pub async fn remove_after(self, members: Vec<EngineProcess>) {
        let gone = async {
            while !members.iter().all(EngineProcess::is_gone) {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        if tokio::time::timeout(END_WAIT, gone).await.is_ok() {
            let _ = tokio::task::spawn_blocking(move || self.remove_unused()).await;
        }
    }

    fn remove_unused(&self) {
        let proc = ProcRoot::live();
        let used: Vec<Segment> = proc.pids().flat_map(|pid| open_segments(&proc, pid)).collect();
        let unused = self.segments.iter().filter(|segment| !used.contains(segment));
        let removed = unused.filter(|segment| self.remove(segment)).count();
        if removed > 0 {
            tracing::info!(removed, "segments of shared memory that the killed engine left");
        }
    }

    /// A name may be another file's by now.
    fn remove(&self, segment: &Segment) -> bool {
        let found = statat(&self.folder, &segment.name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == segment.id)
            && unlinkat(&self.folder, &segment.name, AtFlags::empty()).is_ok()
    }
}

fn open_segments(proc: &ProcRoot, pid: i32) -> Vec<Segment> {
    let segment = |(way, target): (PathBuf, PathBuf)| {
        let name = target.strip_prefix(MEMORY).ok().filter(|name| is_segment(name))?;
        let meta = way.metadata().ok().filter(std::fs::Metadata::is_file)?;
        // one whose name is gone already is followed by ` (deleted)`, which no name of these has
        (meta.nlink() > 0).then(|| Segment { name: name.into(), id: (meta.dev(), meta.ino()) })
    };
    proc.open_files(pid).filter_map(segment).collect()
}

fn is_segment(name: &Path) -> bool {
    let bytes = name.as_os_str().as_bytes();
    !bytes.contains(&b'/') && PREFIXES.iter().any(|prefix| bytes.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// A process that has these files open, until it is killed.
    fn holder(files: &[&PathBuf]) -> Child {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        for (at, file) in files.iter().enumerate() {
            let open = File::options().create(true).append(true).open(file).unwrap();
            match at {
                0 => command.stdin(open),
                1 => command.stdout(open),
                _ => command.stderr(open),
            };
        }
        command.spawn().unwrap()
    }

    fn named(name: &str) -> PathBuf {
        Path::new(MEMORY).join(format!("{name}{}", std::process::id()))
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn what_a_killed_engine_shared_goes_and_what_is_somebodys_stays() {
        let (left, shared, model) = (named("psm_left"), named("psm_shared"), named("model.gguf"));
        let engine = holder(&[&left, &shared, &model]);
        let other = holder(&[&shared]);
        let process = EngineProcess::of(engine.id().cast_signed()).unwrap();
        let memory = SharedMemory::of(&process).unwrap();
        assert_eq!(memory.segments.len(), 2, "{memory:?}");
        end(engine);
        memory.remove_after(vec![process]).await;
        assert_eq!([&left, &shared, &model].map(|file| file.exists()), [false, true, true]);
        end(other);
        for file in [shared, model] {
            std::fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn an_engine_without_segments_leaves_none_and_a_name_that_is_anothers_is_left() {
        let (segment, model) = (named("psm_again"), named("other.gguf"));
        let plain = holder(&[&model]);
        assert!(SharedMemory::of(&EngineProcess::of(plain.id().cast_signed()).unwrap()).is_none());
        end(plain);
        std::fs::remove_file(&model).unwrap();
        let engine = holder(&[&segment]);
        let memory = SharedMemory::of(&EngineProcess::of(engine.id().cast_signed()).unwrap()).unwrap();
        let kept = File::open(&segment).unwrap();
        std::fs::remove_file(&segment).unwrap();
        std::fs::write(&segment, "new").unwrap();
        end(engine);
        memory.remove_unused();
        assert!(segment.exists());
        std::fs::remove_file(&segment).unwrap();
        drop(kept);
    }
}
