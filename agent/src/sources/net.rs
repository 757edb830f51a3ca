//! Sockets of the engine's port, as its own network namespace counts them: connections that are established, and those that the
//! kernel took and the engine has not accepted. A frozen front end shows a queue that grows while everything else is silent.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use super::procs::ProcRoot;

/// A table of more is not read to its end: then the counts are unknown.
pub(super) const TABLE_BYTES_MAX: u64 = 4 << 20;
const ESTABLISHED: &str = "01";
pub(super) const LISTEN: &str = "0A";

/// What the tables say of one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sockets {
    pub established: u32,
    /// Connections that wait in the accept queues of the port's listeners.
    pub accept_queue: u32,
    /// There is a listener.
    pub listening: bool,
}

/// Counts in `/proc/<pid>/net/tcp` and `tcp6`; `None` where neither can be read, or one is too long.
pub fn sockets(proc: &ProcRoot, pid: i32, port: u16) -> Option<Sockets> {
    let mut found = Sockets::default();
    let mut read = false;
    for table in ["net/tcp", "net/tcp6"] {
        // a kernel without IPv6 has no second table
        let Ok(file) = File::open(proc.path(pid, table)) else { continue };
        let mut lines = BufReader::new(file.take(TABLE_BYTES_MAX));
        let mut line = String::new();
        let mut bytes = 0;
        loop {
            line.clear();
            match lines.read_line(&mut line) {
                Ok(0) => break,
                Ok(more) => bytes += more as u64,
                Err(_) => return None,
            }
            count(&line, port, &mut found);
        }
        if bytes >= TABLE_BYTES_MAX {
            return None;
        }
        read = true;
    }
    read.then_some(found)
}

/// One line: `sl local_address rem_address st tx_queue:rx_queue …`, all hexadecimal.
fn count(line: &str, port: u16, found: &mut Sockets) {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (Some(local), Some(_), Some(state), Some(queues)) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return;
    };
    let of_port = local.rsplit_once(':').and_then(|(_, hex)| u16::from_str_radix(hex, 16).ok()) == Some(port);
    match state {
        ESTABLISHED if of_port => found.established = found.established.saturating_add(1),
        LISTEN if of_port => {
            found.listening = true;
            let waiting = queues.split_once(':').and_then(|(_, rx)| u32::from_str_radix(rx, 16).ok()).unwrap_or(0);
            found.accept_queue = found.accept_queue.saturating_add(waiting);
        }
        _ => {}
    }
}
