//! `truebeat run` around a server of the test's own, and how to wait for it and ask it.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "end_run.rs"]
mod end_run;
#[path = "free_addresses.rs"]
mod free_addresses;

use end_run::end_run;
use free_addresses::free_addresses;

pub const SOON: Duration = Duration::from_secs(40);

/// Supervisor, detector, gate and engine. Dropped, all of it ends.
pub struct Run {
    pub supervisor: Child,
    /// Where the agent is asked, and where clients go.
    pub agent: String,
    pub gate: String,
    pub dir: tempfile::TempDir,
}

impl Drop for Run {
    fn drop(&mut self) {
        end_run(&mut self.supervisor, &self.dir.path().join("agent"));
    }
}

impl Run {
    /// Starts it and waits for nothing. `server`: the engine's command line, for a folder of its own and the address where it shall serve.
    pub fn begin(options: &[&str], stderr: Stdio, server: impl FnOnce(&Path, SocketAddr) -> Vec<OsString>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [gate, agent, engine] = free_addresses();
        let (gate, agent) = (gate.to_string(), agent.to_string());
        let supervisor = Command::new(env!("CARGO_BIN_EXE_truebeat-agent"))
            .args(["run", "--no-nvml", "--listen", &gate, "--agent-listen", &agent, "--engine-url"])
            .arg(format!("http://{engine}"))
            .arg("--agent-dir")
            .arg(dir.path().join("agent"))
            .arg("--bundle-dir")
            .arg(dir.path().join("bundles"))
            .args(options)
            .arg("--")
            .args(server(dir.path(), engine))
            .stdin(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        Self { supervisor, agent, gate, dir }
    }
}

pub fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !wanted() {
        assert!(begun.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn get(address: &str, path: &str) -> Option<String> {
    ask(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
}

pub fn ask(address: &str, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}
