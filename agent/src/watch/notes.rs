//! What others want of this replica, as files that the kubelet keeps equal to annotations of the pod (downward API): a person's fence
//! (`kubectl truebeat fence`), maintenance that somebody declares, what the operator has refused (I7), and how far
//! recovery goes. So it needs no right and no API
//! server, and it is there again after every restart of the agent. In `truebeat run` people write the files of a fence and of maintenance, and
//! there are no others.
//!
//! Where a person's folder lies on a disk that hangs, a read of it never returns: they are all read beside the tick, and what was read last holds.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crds::fence::Fence;
use crds::maintenance::Maintenance;
use crds::poison::Refused;
use jiff::Timestamp;

use super::aside::Aside;
use super::config::Told;
use crate::files::read_regular;
use crate::text::lossy;

/// A note lies in memory, as a rule; it is read this often all the same, not at every tick.
const LOOK_EVERY_MS: u64 = 500;
/// What the kubelet writes a minute late is read no more often than this.
const SELDOM_MS: u64 = 5_000;
/// All annotations of an object together have half of this.
const NOTE_BYTES_MAX: u64 = 512 << 10;

/// A person's fence.
const FENCE: &str = "fence";
/// Silence that is intended.
const MAINTENANCE: &str = "maintenance";
/// Requests that are refused.
const POISON: &str = "poison";
/// How far recovery goes.
const RECOVERY: &str = "recovery";

/// What the notes say.
#[derive(Debug, Default)]
pub struct Says {
    pub fence: Option<Fence>,
    maintenance: Option<Maintenance>,
    pub refused: Vec<Refused>,
    pub told: Option<Told>,
}

impl Says {
    /// The maintenance that is declared, unless its end has come.
    pub fn maintenance_at(&self, now: Timestamp) -> Option<&Maintenance> {
        self.maintenance.as_ref().filter(|declared| declared.holds(now))
    }
}

/// All notes, read now and then.
#[derive(Debug)]
pub struct Notes {
    dir: Option<PathBuf>,
    by_operator: bool,
    reading: Aside<Vec<(&'static str, io::Result<String>)>>,
    /// When the one was begun to be read that is read seldom.
    seldom_ms: Option<u64>,
    /// Those that could not be read the last time.
    unread: Vec<&'static str>,
    says: Says,
}

impl Notes {
    /// `dir` is where the kubelet puts the annotations, or a person the files; `by_operator`: an operator's are among them. Its options tell a
    /// `truebeat run` how far recovery goes, and a file of that name that happens to lie there must not.
    pub fn new(dir: Option<&Path>, by_operator: bool) -> Self {
        let dir = dir.map(Path::to_owned);
        let (reading, unread, says) = (Aside::default(), Vec::new(), Says::default());
        Self { dir, by_operator, reading, seldom_ms: None, unread, says }
    }

    /// The notes as they were read last. A file that cannot be read changes nothing (I4); one that is not there says nothing.
    pub fn look(&mut self, now_ms: u64) -> &Says {
        if let Some(read) = self.reading.take() {
            read.into_iter().for_each(|(name, text)| self.hear(name, text));
        }
        self.read_on(now_ms);
        &self.says
    }

    /// The first look, for which the files are waited for, so long at most: who comes to a replica that a person has fenced must know.
    pub async fn look_first(&mut self, now_ms: u64, max: Duration) -> &Says {
        self.read_on(now_ms);
        let read = self.reading.take_within(max).await;
        read.into_iter().flatten().for_each(|(name, text)| self.hear(name, text));
        &self.says
    }

    fn read_on(&mut self, now_ms: u64) {
        let due = self.reading.is_due(now_ms, LOOK_EVERY_MS);
        let Some(dir) = self.dir.as_ref().filter(|_| due).cloned() else { return };
        let mut names = vec![FENCE, MAINTENANCE];
        let seldom = self.by_operator && self.seldom_ms.is_none_or(|at| now_ms.saturating_sub(at) >= SELDOM_MS);
        names.extend(self.by_operator.then_some(POISON));
        names.extend(seldom.then_some(RECOVERY));
        if seldom {
            self.seldom_ms = Some(now_ms);
        }
        let read = move || names.into_iter().map(|name| (name, text(&dir.join(name)))).collect();
        self.reading.start(now_ms, LOOK_EVERY_MS, read);
    }

    fn hear(&mut self, name: &'static str, read: io::Result<String>) {
        let text = match read {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return self.misses(name, &error),
        };
        self.unread.retain(|unread| *unread != name);
        let text = text.as_deref();
        match name {
            FENCE => self.says.fence = text.and_then(Fence::read),
            MAINTENANCE => self.says.maintenance = text.and_then(Maintenance::read),
            RECOVERY => self.says.told = text.and_then(Told::read),
            _ => self.says.refused = text.map(crds::poison::read).unwrap_or_default(),
        }
    }

    /// Whoever wrote it waits for what it asks for: that is said, once.
    fn misses(&mut self, name: &'static str, error: &io::Error) {
        if !self.unread.contains(&name) {
            self.unread.push(name);
            let dir = self.dir.as_deref().unwrap_or(Path::new(""));
            tracing::warn!(%error, name, dir = %dir.display(), "a note cannot be read; what was read of it last holds");
        }
    }
}

/// Whatever letters its writer's terminal has, somebody meant it.
fn text(path: &Path) -> io::Result<String> {
    Ok(lossy(read_regular(path, NOTE_BYTES_MAX)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(40);
    const FENCED: &str = r#"{"by":"ann","why":"a look"}"#;

    impl Notes {
        /// Looks, and goes on when what that has begun to read is there.
        async fn look_through(&mut self, now_ms: u64) -> &Says {
            self.look(now_ms);
            self.look_first(now_ms, SOON).await
        }

        async fn fence(&mut self, now_ms: u64) -> Option<String> {
            self.look_through(now_ms).await.fence.as_ref().map(Fence::words)
        }
    }

    #[tokio::test]
    async fn a_fence_is_seen_held_and_taken_off() {
        let dir = tempfile::tempdir().unwrap();
        let mut notes = Notes::new(Some(dir.path()), true);
        assert_eq!(notes.fence(0).await, None, "no file: an older pod");
        let file = dir.path().join(FENCE);
        std::fs::write(&file, FENCED).unwrap();
        assert_eq!(notes.fence(499).await, None, "not every tick");
        assert_eq!(notes.fence(500).await.as_deref(), Some("fenced by ann: a look"));
        std::fs::write(&file, b"M\xfcller: leave it").unwrap();
        assert!(notes.fence(1_000).await.is_some(), "no UTF-8, and meant all the same");
        std::fs::remove_file(&file).unwrap();
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(notes.fence(1_500).await.is_some(), "nobody writes to it, and nobody waits for that");
        assert_eq!(notes.unread, [FENCE]);
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "").unwrap();
        assert_eq!(notes.fence(2_000).await, None);
        assert!(notes.unread.is_empty());
        std::fs::write(&file, b"M\xfcller: leave it").unwrap();
        assert!(notes.fence(2_500).await.is_some(), "nothing was read before it");
        assert_eq!(Notes::new(None, true).fence(0).await, None);
    }

    #[tokio::test]
    async fn maintenance_is_declared_until_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let declared = r#"{"by":"ann","why":"weights","until":"2026-11-29T12:00:00Z"}"#;
        std::fs::write(dir.path().join(MAINTENANCE), declared).unwrap();
        let mut notes = Notes::new(Some(dir.path()), false);
        let says = notes.look_through(0).await;
        let holds = |now: &str| says.maintenance_at(now.parse().unwrap()).is_some();
        assert!(holds("2026-11-29T11:59:59Z") && !holds("2026-11-29T12:00:00Z"));
    }

    #[tokio::test]
    async fn an_operator_is_heard_in_a_pod_alone_and_of_recovery_seldom() {
        let dir = tempfile::tempdir().unwrap();
        let refused = Refused { request: "00000000000000aa".into(), since_ms: 1, until_ms: 2, stalls: 2 };
        std::fs::write(dir.path().join(POISON), crds::poison::write(&[refused]).unwrap()).unwrap();
        std::fs::write(dir.path().join(RECOVERY), "Fence").unwrap();
        let (mut pod, mut run) = (Notes::new(Some(dir.path()), true), Notes::new(Some(dir.path()), false));
        let heard = async |notes: &mut Notes, now_ms| {
            let says = notes.look_through(now_ms).await;
            (says.refused.len(), says.told.is_some())
        };
        assert_eq!((heard(&mut pod, 0).await, heard(&mut run, 0).await), ((1, true), (0, false)));
        for name in [POISON, RECOVERY] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        assert_eq!(heard(&mut pod, 4_500).await, (0, true), "it is not looked at yet");
        assert_eq!(heard(&mut pod, 5_000).await, (0, false));
    }

    #[tokio::test]
    async fn d10_notes_on_a_disk_that_hangs_hold_nobody_and_say_what_they_said() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FENCE), FENCED).unwrap();
        let mut notes = Notes::new(Some(dir.path()), false);
        assert!(notes.fence(0).await.is_some());
        let (free, held) = std::sync::mpsc::channel::<()>();
        notes.reading = Aside::default();
        notes.reading.start(0, 0, move || {
            let _ = held.recv();
            vec![(FENCE, Ok(String::new()))]
        });
        for now_ms in [500, 1_000, 60_000] {
            assert!(notes.look(now_ms).fence.is_some(), "at {now_ms}");
        }
        drop(free);
        assert!(notes.look_first(60_000, SOON).await.fence.is_none(), "the disk goes on");
    }
}
