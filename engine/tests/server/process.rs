//! The engine as a process of its own: what its threads look like from outside under each fault, and how it ends.

use std::{
    fs,
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::client::{get, open, post};
use crate::support::wait_until;

/// A running engine; killed when the test is done with it.
pub struct Engine {
    pub child: Child,
    pub addr: SocketAddr,
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Engine {
    pub async fn ready(dir: &Path, more: &[&str]) -> Self {
        let engine = Self::launched(dir, more);
        let since = Instant::now();
        let addr = engine.addr;
        while tokio::net::TcpStream::connect(addr).await.is_err() || get(addr, "/health").await.status != 200 {
            assert!(since.elapsed() < Duration::from_secs(120), "not ready");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        engine
    }

    /// Its log is the file `log` in `dir`.
    pub fn launched(dir: &Path, more: &[&str]) -> Self {
        let (model, log) = (dir.join("tiny"), fs::File::create(dir.join("log")).unwrap());
        engine::demo_model::write_demo_model(&model, engine::demo_model::DemoArch::Qwen3, 0).unwrap();
        let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_truebeat-engine"));
        command.args(["engine", "--listen", &addr.to_string(), "--model"]).arg(model).args(more);
        let child = command.env_remove("TRUEBEAT_PAGE_DIR").stderr(log).spawn().unwrap();
        Self { child, addr }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the process ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        })
        .await;
        status.unwrap()
    }

    /// State letter of the process.
    pub fn process_state(&self) -> char {
        state_of(Path::new(&format!("/proc/{}", self.child.id())))
    }

    /// State letter of the engine thread.
    fn thread_state(&self) -> char {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let is_engine = |p: &std::path::PathBuf| fs::read_to_string(p.join("comm")).is_ok_and(|c| c.trim() == "engine");
        let task = tasks.map(|t| t.unwrap().path()).find(is_engine).expect("an engine thread");
        state_of(&task)
    }

    /// Fires the fault with a stream open, and waits until `/health` tells of it.
    pub async fn freeze(&self) {
        let body = json!({"prompt": "abc", "max_tokens": 200, "ignore_eos": true, "stream": true});
        self.signal(Signal::SIGUSR2);
        let since = Instant::now();
        while get(self.addr, "/health").await.status == 200 {
            // Each asks for a step in which the fault can fire; the client leaves at once.
            drop(
                tokio::time::timeout(Duration::from_millis(200), open(self.addr, "/v1/completions", &body, &[])).await,
            );
            assert!(since.elapsed() < Duration::from_secs(60), "healthy all the time");
        }
    }
}

fn state_of(task: &Path) -> char {
    let stat = fs::read_to_string(task.join("stat")).unwrap();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_stall_sleeps_and_a_device_wait_spins() {
    for (fault, state) in [("step-stall@sigusr2", 'S'), ("device-wait@sigusr2", 'R')] {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::ready(dir.path(), &["--fault", fault]).await;
        let answer = post(engine.addr, "/v1/completions", &json!({"prompt": "abc", "max_tokens": 3})).await;
        assert_eq!(answer.status, 200, "armed, not fired: {}", answer.text);
        engine.freeze().await;
        assert_eq!(engine.thread_state(), state, "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_an_abort() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::ready(dir.path(), &["--fault", "crash@sigusr2"]).await;
    engine.signal(Signal::SIGUSR2);
    assert_eq!(engine.ended().await.signal(), Some(Signal::SIGABRT as i32));
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_a_well_engine_with_0_and_a_frozen_one_with_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let mut well = Engine::ready(dir.path(), &[]).await;
    well.signal(Signal::SIGTERM);
    assert_eq!(well.ended().await.code(), Some(0));
    let mut frozen = Engine::ready(dir.path(), &["--fault", "step-stall@sigusr2", "--drain-timeout", "100ms"]).await;
    frozen.freeze().await;
    frozen.signal(Signal::SIGTERM);
    assert_eq!(frozen.ended().await.code(), Some(1));
}
