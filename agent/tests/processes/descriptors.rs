//! A gate whose clients have taken every descriptor: it is full, and it does not hang.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};

use super::run::AGENT;
use super::until;
use crate::asking::SOON;

/// Some of them are the gate's own.
const DESCRIPTORS: usize = 40;

struct Gate(Child);

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Gate {
    /// Those that count: what a parent left open above the limit does not.
    fn open_descriptors(&self) -> usize {
        let all = std::fs::read_dir(format!("/proc/{}/fd", self.0.id())).unwrap();
        let numbers = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        numbers.filter(|number: &usize| *number < DESCRIPTORS).count()
    }
}

/// The gate's word, as one that looks hears it.
fn word(socket: &Path) -> Option<String> {
    let mut line = String::new();
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"{\"look\":true}\n").ok()?;
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.ends_with('\n').then_some(line)
}

#[test]
fn a_gate_without_a_descriptor_left_answers_its_detector() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("gate/gate.sock");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gate = format!(
        "ulimit -n {DESCRIPTORS}; exec {AGENT} agent gate --listen={port} --upstream=http://127.0.0.1:1 --agent-dir={}",
        dir.path().display()
    );
    let gate = Gate(Command::new("sh").args(["-c", &gate]).spawn().unwrap());
    until("the gate's first word", || word(&socket).is_some());
    let mut clients = Vec::new();
    until("no descriptor left", || {
        if let Ok(mut client) = TcpStream::connect(port) {
            // one that is waited for, and takes no other
            let _ = client.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{");
            clients.push(client);
        }
        // with the one that is kept
        clients.len() > DESCRIPTORS && gate.open_descriptors() == DESCRIPTORS
    });
    for n in 0..5 {
        let word = word(&socket);
        assert!(word.is_some_and(|word| word.contains("in_flight")), "question {n}");
        until("it is kept again", || gate.open_descriptors() == DESCRIPTORS);
    }
    let mut heard = String::new();
    clients[0].write_all(b"}").unwrap();
    clients[0].set_read_timeout(Some(SOON)).unwrap();
    let _ = clients[0].read_to_string(&mut heard);
    assert!(heard.starts_with("HTTP/1.1 503") && heard.contains("gate_exhausted"), "{heard}");
}
