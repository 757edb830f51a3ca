//! `truebeat run` around a server of the test's own.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

#[path = "end_run.rs"]
mod end_run;
#[path = "free_addresses.rs"]
pub mod free_addresses;

use end_run::end_run;
use free_addresses::free_addresses;

/// The program whose `run` is begun.
pub const AGENT: &str = env!("CARGO_BIN_EXE_truebeat-agent");

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
    /// Starts `agent` (the program, or what comes before its arguments) and waits for nothing. `server`: the engine's command line, for a
    /// folder of its own and the address where it shall serve.
    pub fn begin(
        agent: &mut Command,
        options: &[&str],
        server: impl FnOnce(&Path, SocketAddr) -> Vec<OsString>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [gate_at, agent_at, engine_at] = free_addresses();
        let supervisor = agent
            .args(["run", "--no-nvml", "--listen", &gate_at.to_string(), "--agent-listen", &agent_at.to_string()])
            .args(["--engine-url", &format!("http://{engine_at}"), "--agent-dir"])
            .arg(dir.path().join("agent"))
            .arg("--bundle-dir")
            .arg(dir.path().join("bundles"))
            .args(options)
            .arg("--")
            .args(server(dir.path(), engine_at))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { supervisor, agent: agent_at.to_string(), gate: gate_at.to_string(), dir }
    }
}
