//! Whoever came into the container by another door. As pid 1 we inherit not only what the engine leaves, but also what a shell of `docker exec` or
//! `kubectl exec` does: a person's `tmux`, or the debugger that was set to work overnight. That is nobody's to kill.
//!
//! Reads `/proc`.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::unistd::getsid;

use crate::sources::EngineProcess;
use crate::sources::procs::{ProcRoot, Stat};

/// An environment is read in microseconds, or never: it waits for its process's memory. (A throttled container may get no time for some hundred
/// milliseconds.)
const ENVIRON_WAIT: Duration = Duration::from_secs(1);
/// Remembered at most: of those that have gone, no more is asked.
const ASKED_MAX: usize = 4096;

/// Who is a guest, as far as was asked. Only pid 1 has any: the children of everybody else are their own.
#[derive(Debug)]
pub struct Guests {
    is_first: bool,
    asked: Mutex<HashSet<EngineProcess>>,
    known: Arc<Mutex<HashSet<EngineProcess>>>,
}

impl Default for Guests {
    fn default() -> Self {
        Self { is_first: std::process::id() == 1, asked: Mutex::default(), known: Arc::default() }
    }
}

impl Guests {
    /// These without the guests among them. Who could not be asked in time is none: the engine's own may be stuck in the driver.
    pub fn leave_out(&self, children: Vec<Stat>) -> Vec<EngineProcess> {
        if self.is_first {
            self.ask(&children);
        }
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        children.iter().map(EngineProcess::from).filter(|child| !known.contains(child)).collect()
    }

    /// Each is asked once, on a thread of its own: what is heard late counts from then on.
    fn ask(&self, children: &[Stat]) {
        let (done, all_done) = channel();
        {
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            if asked.len() > ASKED_MAX {
                let lives =
                    |process: &EngineProcess| children.iter().any(|child| EngineProcess::from(child) == *process);
                asked.retain(lives);
                self.known.lock().unwrap_or_else(PoisonError::into_inner).retain(lives);
            }
            for child in children {
                if asked.insert(EngineProcess::from(child)) {
                    self.ask_one(child.clone(), done.clone());
                }
            }
        }
        drop(done);
        // it ends when the last of them has dropped its end
        let _ = all_done.recv_timeout(ENVIRON_WAIT);
    }

    fn ask_one(&self, child: Stat, done: Sender<()>) {
        let known = Arc::clone(&self.known);
        let ask = move || {
            let ours = getsid(None).map_or(0, nix::unistd::Pid::as_raw);
            let environ = std::fs::read(ProcRoot::live().path(child.pid, "environ")).unwrap_or_default();
            if is_guest(&child, ours, &environ) && !writes_to_us(child.pid) {
                known.lock().unwrap_or_else(PoisonError::into_inner).insert(EngineProcess::from(&child));
            }
            drop(done);
        };
        // without a thread it is asked by nobody, and is no guest
        let _ = std::thread::Builder::new().name("guests".to_owned()).spawn(ask);
    }
}

/// In a session that is not `ours`, with a whole environment (it has a `PATH`; titles are written over it) that lacks what each engine is given. Of
/// what an engine starts only a child that left its session, its parent and its environment behind reads the same.
fn is_guest(child: &Stat, ours: i32, environ: &[u8]) -> bool {
    let has = |name: &[u8]| environ.split(|byte| *byte == 0).any(|variable| variable.starts_with(name));
    child.session != ours && has(b"PATH=") && !has(b"TRUEBEAT_NONCE=")
}

/// Does what it prints come to us, as all that an engine prints does? A service that was started by `su` or `sudo` keeps nothing else of it.
fn writes_to_us(pid: i32) -> bool {
    let proc = ProcRoot::live();
    let me = i32::try_from(std::process::id()).unwrap_or(-1);
    let prints = ["fd/1", "fd/2"].map(|fd| std::fs::read_link(proc.path(pid, fd)).ok());
    let is_printed_to = |file: &PathBuf| prints.iter().flatten().any(|printed| printed == file);
    proc.open_files(me).any(|(_, file)| file.to_string_lossy().starts_with("pipe:") && is_printed_to(&file))
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_guest_has_a_session_and_an_environment_of_its_own() {
        let child = |session: i32| {
            Stat::parse(&format!("9 (tmux) S 1 9 {session} 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 7 0 0")).unwrap()
        };
        for (session, environ, guest) in [
            (9, "TERM=xterm\0PATH=/bin\0", true),
            (1, "TERM=xterm\0PATH=/bin\0", false),       // a helper of ours
            (9, "PATH=/bin\0TRUEBEAT_NONCE=5\0", false), // of an engine
            (9, "VLLM::Worker_TP0\0\0\0", false),        // of an engine, under a title
            (9, "", false),                              // gone, or not ours to read
        ] {
            assert_eq!(is_guest(&child(session), 1, environ.as_bytes()), guest, "{session} {environ:?}");
        }
    }

    #[test]
    fn nobody_but_pid_1_has_guests() {
        let mut sleeper = std::process::Command::new("setsid")
            .args(["sleep", "600"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = i32::try_from(sleeper.id()).unwrap();
        while ProcRoot::live().stat(pid).is_none_or(|stat| stat.session != pid) {
            std::thread::yield_now();
        }
        let stat = || vec![ProcRoot::live().stat(pid).unwrap()];
        let left = |is_first| Guests { is_first, ..Guests::default() }.leave_out(stat());
        assert_eq!(left(false).len(), 1);
        // the tests' own environment has a PATH, or nothing could have been started
        let began = std::time::Instant::now();
        while !left(true).is_empty() && began.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        assert!(left(true).is_empty(), "as pid 1 it has a guest");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
