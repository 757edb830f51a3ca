//! A full disk, one that hangs and a machine without descriptors cost the bundle, never the capture (I6, D8, D10).

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use agent::forensics::bundle::{self, BundleEntry, BundleError};
use agent::forensics::capture;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use tokio::sync::oneshot;

use super::not_run::without_right;
use super::{request, unheard};

/// A file system of a few pages, gone with its value. `None` without the right to mount.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn mounted() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let made = mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64k"));
        if made.is_err() {
            without_right("no right to mount a small file system");
        }
        made.ok().map(|()| Self(dir))
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

/// Does not compress, and differs from call to call.
fn noise(bytes: usize) -> String {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from(b'!' + ((state >> 40) % 90) as u8)
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

#[tokio::test]
async fn h1_a_full_disk_costs_the_bundle_and_leaves_nothing_of_it() {
    let Some(disk) = Tiny::mounted() else { return };
    let entries = vec![BundleEntry { name: "x".to_owned(), text: noise(1 << 20) }];
    let written = bundle::write(disk.0.path(), "a", bundle::manifest("a", "c", "f"), entries, &AtomicBool::new(false));
    assert!(matches!(written, Err(BundleError::Write { .. })), "{written:?}");
    assert_eq!(std::fs::read_dir(disk.0.path()).unwrap().count(), 0, "what was written of it is gone");
    // and as the detector sees it: an answer, with a summary for the termination message
    std::fs::write(disk.0.path().join("full"), noise(60 << 10)).unwrap();
    let mut request = request(disk.0.path(), None);
    request.log_tail = vec![noise(1 << 20)].into();
    request.metrics_before = Some((1, noise(1 << 20)));
    let captured = capture(request, unheard).await;
    assert_eq!(captured.bundle, None);
    assert!(captured.notes.iter().any(|note| note.contains("No space left on device")), "{:?}", captured.notes);
    assert!(captured.summary.contains("bundle: none could be written") && captured.fingerprint.len() == 16);
    assert_eq!(std::fs::read_dir(disk.0.path()).unwrap().count(), 1);
}

/// A kill waits for what it would lose, and no longer for the disk.
#[tokio::test]
async fn d10_a_disk_that_hangs_is_not_waited_for_once_the_evidence_is_gathered() {
    let directory = tempfile::tempdir().unwrap();
    // whoever opens it to write waits until somebody reads, as on a disk that hangs
    let hangs = directory.path().join(".host-7-42.1.tar.zst.partial");
    nix::unistd::mkfifo(&hangs, Mode::S_IRWXU).unwrap();
    let (tell, told) = oneshot::channel();
    let request = request(directory.path(), None);
    let capturing = tokio::spawn(capture(request, |captured| _ = tell.send(captured)));
    let gathered = tokio::time::timeout(Duration::from_secs(60), told).await.unwrap().expect("the disk is waited for");
    assert!(!capturing.is_finished(), "the disk still hangs");
    assert_eq!((gathered.bundle.as_deref(), gathered.fingerprint.len()), (None::<&Path>, 16));
    assert!(gathered.summary.contains("5 requests owed and no byte"), "{}", gathered.summary);
    assert!(gathered.summary.contains("host-7-42.1.tar.zst, if the disk takes it"), "{}", gathered.summary);
    // lets the writer go: the runtime waits for it at its end
    let reader = std::fs::File::open(&hangs).unwrap();
    let captured = capturing.await.unwrap();
    assert_eq!((captured.bundle, captured.fingerprint), (None, gathered.fingerprint), "a pipe is no bundle");
    drop(reader);
}
