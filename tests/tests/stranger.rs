//! The stranger's engine lies as the field's engines do: frozen, it says 200, answers its metrics and delivers nothing. The stories
//! that supervise it stand on this.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

#[path = "../../agent/tests/common/free_addresses.rs"]
mod free_addresses;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use free_addresses::free_addresses;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use truebeat_tests::wait::until;

const BOUND: Duration = Duration::from_secs(20);

struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Result<Self> {
        let [address] = free_addresses();
        let port = address.port();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/stranger/server.py");
        let mut command = Command::new("python3");
        command
            .args([script, "--load-seconds", "0", "--port", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let server = Self { child: command.spawn().context("cannot start python3")?, port };
        until("the stranger's port", BOUND, || server.get("/health").map(Some))?;
        Ok(server)
    }

    fn send(&self, request: &str) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(BOUND))?;
        stream.write_all(request.as_bytes())?;
        Ok(stream)
    }

    fn get(&self, path: &str) -> Result<String> {
        let mut text = String::new();
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))?
            .read_to_string(&mut text)?;
        Ok(text)
    }

    fn stream(&self) -> Result<BufReader<TcpStream>> {
        let body = r#"{"prompt": "a b", "max_tokens": 100000, "stream": true}"#;
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        Ok(BufReader::new(self.send(&(head + body))?))
    }

    fn value(&self, series: &str) -> Result<f64> {
        let text = self.get("/metrics")?;
        let line =
            text.lines().find(|line| line.starts_with(series) && !line.starts_with('#')).context("no such series")?;
        Ok(line.rsplit(' ').next().context("no value")?.parse()?)
    }
}

#[test]
fn frozen_it_says_200_and_delivers_nothing() {
    let server = Server::start().unwrap();
    let mut stream = server.stream().unwrap();
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        stream.read_line(&mut line).unwrap();
    }
    let generated = "vllm:generation_tokens_total{";
    until("two moving readings", BOUND, || {
        let first = server.value(generated)?;
        Ok((server.value(generated)? > first).then_some(()))
    })
    .unwrap();

    kill(Pid::from_raw(i32::try_from(server.child.id()).unwrap()), Signal::SIGUSR2).unwrap();
    // drain what was made before the freeze: silence for longer than 50 steps is the freeze
    stream.get_ref().set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut rest = [0; 4096];
    while stream.read(&mut rest).is_ok_and(|count| count > 0) {}

    let stuck = server.value(generated).unwrap();
    assert!(server.get("/health").unwrap().starts_with("HTTP/1.1 200"));
    let _second = server.stream().unwrap();
    assert_eq!(server.value("vllm:num_requests_running{").unwrap(), 1.0, "new requests change nothing");
    assert_eq!(server.value(generated).unwrap(), stuck);
}
