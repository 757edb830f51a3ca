//! The detector's end of the line to the gate, as cheap as an exchange can be (2d): the thread itself waits for an answer, which comes within a
//! fraction of a millisecond. The runtime would wake it three times: for its own timer, for room to write, and for the answer.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use heartbeat::counts::CountsReader;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::net::UnixStream;

use super::control::Told;
use super::line_socket::LineSocket;

/// So long the thread itself waits for an answer, which takes a fraction of that; after that the runtime does.
const SOON_MS: u8 = 3;

/// One connection.
#[derive(Debug)]
pub(super) struct Line {
    socket: LineSocket,
    /// What was heard last, kept for its memory.
    words: Vec<u8>,
    /// Lines said.
    said: u64,
    /// The gate's counters, where it lets itself be read.
    pub(super) counts: Option<CountsReader>,
    /// By what it knows the agent's own question.
    pub(super) own: Option<String>,
}

impl Line {
    /// Connects. Needs a runtime.
    ///
    /// # Errors
    /// When nobody listens there.
    pub(super) async fn connect(path: &Path) -> io::Result<Self> {
        let socket = LineSocket::on(UnixStream::connect(path).await?)?;
        Ok(Self { socket, words: Vec::new(), said: 0, counts: None, own: None })
    }

    /// Says a line and returns the answer to it.
    ///
    /// # Errors
    /// When the gate is gone, or has left so much unread that there is no room for a line.
    pub(super) async fn ask(&mut self, line: &[u8]) -> io::Result<Told> {
        self.socket.say(line)?;
        self.said += 1;
        self.wait_a_little();
        loop {
            // what it said before it heard this is old
            let told = self.hear().await?;
            if told.heard >= self.said {
                return Ok(told);
            }
        }
    }

    /// The next line. What has come of it is kept when the wait is given up.
    ///
    /// # Errors
    /// When the gate is gone, or what it says is none of its lines.
    pub(super) async fn hear(&mut self) -> io::Result<Told> {
        self.socket.hear(&mut self.words).await?;
        self.told()
    }

    /// The next line, if all of it is there.
    ///
    /// # Errors
    /// As [`Line::hear`].
    pub(super) fn hear_now(&mut self) -> io::Result<Option<Told>> {
        if self.socket.hear_now(&mut self.words)? { self.told().map(Some) } else { Ok(None) }
    }

    /// What was heard last.
    fn told(&mut self) -> io::Result<Told> {
        let mut told = serde_json::from_slice::<Told>(&self.words)?;
        // the gate's own memory by its own word: neither waits for a disk
        if let Some(path) = &told.counts {
            self.counts = File::open(path).and_then(|file| CountsReader::open(&file)).ok();
        }
        self.own = told.own.take().or(self.own.take());
        Ok(told)
    }

    fn wait_a_little(&self) {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        // whatever comes of it, a read says it better
        _ = poll(&mut fds, PollTimeout::from(SOON_MS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn what_a_gate_said_before_it_went_is_heard() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut line = Line::connect(&path).await.unwrap();
        let gate = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 2]).unwrap();
            let reply = crate::gate::ledger::GateReply::default();
            let told = serde_json::json!({"heard": 1, "at_ms": 5, "reply": reply});
            stream.write_all(format!("{told}\n").as_bytes()).unwrap();
        });
        // both are there when the answer is looked for: the words, and their end
        line.socket.say(b"?\n").unwrap();
        gate.join().unwrap();
        assert_eq!(line.hear().await.unwrap().heard, 1);
        assert_eq!(line.hear().await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
