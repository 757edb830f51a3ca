//! A `/proc` of files, a bounded wait, and children that end with their test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use agent::sources::PageSource;
use agent::sources::pace::Pace;
use agent::sources::procs::ProcRoot;
use vitals::observation::PageObs;

/// One process of a fixture; everything that a test does not say is unremarkable.
pub struct Process<'a> {
    pub pid: i32,
    pub ppid: i32,
    pub session: i32,
    pub comm: &'a str,
    pub state: char,
    pub own_ticks: u64,
    pub reaped_ticks: u64,
    pub start_ticks: u64,
    pub cgroup: &'a str,
    pub environ: &'a str,
    pub tracer: i32,
}

impl Default for Process<'_> {
    fn default() -> Self {
        Self {
            pid: 1,
            ppid: 0,
            session: 0,
            comm: "x",
            state: 'S',
            own_ticks: 0,
            reaped_ticks: 0,
            start_ticks: 1_000,
            cgroup: "0::/\n",
            environ: "",
            tracer: 0,
        }
    }
}

/// A directory of the shape of `/proc`.
pub struct FakeProc {
    pub directory: tempfile::TempDir,
}

impl FakeProc {
    pub fn new(processes: &[Process<'_>]) -> Self {
        let fake = Self { directory: tempfile::tempdir().unwrap() };
        processes.iter().for_each(|process| fake.put(process));
        fake
    }

    pub fn root(&self) -> ProcRoot {
        ProcRoot::at(self.directory.path())
    }

    pub fn put(&self, process: &Process<'_>) {
        let Process { pid, ppid, session, comm, state, own_ticks, reaped_ticks, start_ticks, .. } = process;
        let stat = format!(
            "{pid} ({comm}) {state} {ppid} {pid} {session} 0 -1 4194304 1 0 0 0 {own_ticks} 0 {reaped_ticks} 0 20 0 1 0 \
             {start_ticks} 1 1\n"
        );
        self.file(*pid, "stat", &stat);
        self.file(*pid, "status", &format!("Name:\t{comm}\nTracerPid:\t{}\nUid:\t0\n", process.tracer));
        self.file(*pid, "wchan", "futex_do_wait");
        self.file(*pid, "cgroup", process.cgroup);
        self.file(*pid, "environ", process.environ);
    }

    pub fn remove(&self, pid: i32) {
        std::fs::remove_dir_all(self.directory.path().join(pid.to_string())).unwrap();
    }

    pub fn file(&self, pid: i32, name: &str, text: &str) {
        write(&self.directory.path().join(pid.to_string()).join(name), text);
    }
}

/// Writes a file and the directories above it.
pub fn write(path: &Path, text: &str) -> PathBuf {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
    path.to_owned()
}

/// Waits until `done` says something; a minute without is a failure.
pub fn eventually<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if let Some(value) = done() {
            return value;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("not within a minute: {what}");
}

/// A child that is killed with all its session when the test ends, however it ends.
pub struct Session {
    child: Child,
}

impl Session {
    /// `sh -c script` as the leader of a session of its own.
    pub fn sh(script: &str) -> Self {
        let child = Command::new("setsid").args(["sh", "-c", script]).spawn().unwrap();
        let session = Self { child };
        // `setsid` becomes the leader before it becomes the shell
        eventually("the shell leads its session", || {
            let stat = ProcRoot::live().stat(session.pid())?;
            (stat.session == session.pid() && stat.comm == "sh").then_some(())
        });
        session
    }

    pub fn pid(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// SIGKILL for the leader; it stays a zombie until `reap`.
    pub fn kill_leader(&mut self) {
        self.child.kill().unwrap();
    }

    pub fn reap(&mut self) {
        self.child.wait().unwrap();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let leader = self.pid();
        for stat in ProcRoot::live().all().into_iter().filter(|stat| stat.session == leader) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(stat.pid), nix::sys::signal::Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// The pages that can be believed at a close look.
pub fn pages(source: &mut PageSource) -> Vec<PageObs> {
    let mut pages = Vec::new();
    source.look(0, Pace::Stare, &mut pages);
    pages
}
