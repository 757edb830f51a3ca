//! The detector's end of the line to the gate, as cheap as an exchange can be (2d): the thread itself waits for an answer, which comes within a
//! fraction of a millisecond. The runtime would wake it three times: for its own timer, for room to write, and for the answer.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::Path;

use heartbeat::counts::CountsReader;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::control::{LINE_BYTES_MAX, Told};

/// So long the thread itself waits for an answer, which takes a fraction of that; after that the runtime does.
const SOON_MS: u8 = 3;
const READ_BYTES: usize = 4 << 10;

/// One connection.
#[derive(Debug)]
pub(super) struct Line {
    socket: UnixStream,
    /// What was heard and is no whole line yet, or more than one.
    heard: Vec<u8>,
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
        Ok(Self { socket: UnixStream::connect(path).await?, heard: Vec::new(), said: 0, counts: None, own: None })
    }

    /// Says a line and returns the answer to it.
    ///
    /// # Errors
    /// When the gate is gone, or has left so much unread that there is no room for a line.
    pub(super) async fn ask(&mut self, line: &[u8]) -> io::Result<Told> {
        if rustix::io::write(&self.socket, line)? < line.len() {
            return Err(ErrorKind::WriteZero.into());
        }
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
        loop {
            if let Some(told) = self.hear_now()? {
                return Ok(told);
            }
            self.socket.readable().await?;
            // readable or read above: only a read can tell, and one that finds nothing waits for news
            _ = self.socket.try_io(Interest::READABLE, || Err::<(), _>(ErrorKind::WouldBlock.into()));
        }
    }

    /// The next line, if all of it is there.
    ///
    /// # Errors
    /// As [`Line::hear`].
    pub(super) fn hear_now(&mut self) -> io::Result<Option<Told>> {
        let end = match self.line_end() {
            None if self.read_all()? => self.line_end(),
            end => end,
        };
        let Some(end) = end else { return Ok(None) };
        let told = serde_json::from_slice::<Told>(&self.heard[..end]);
        self.heard.drain(..=end);
        let mut told = told?;
        // the gate's own memory by its own word: neither waits for a disk
        if let Some(path) = &told.counts {
            self.counts = File::open(path).and_then(|file| CountsReader::open(&file)).ok();
        }
        self.own = told.own.take().or(self.own.take());
        Ok(Some(told))
    }

    fn line_end(&self) -> Option<usize> {
        self.heard.iter().position(|byte| *byte == b'\n')
    }

    /// Reads what is there; true where there was anything.
    fn read_all(&mut self) -> io::Result<bool> {
        let before = self.heard.len();
        let mut part = [0; READ_BYTES];
        loop {
            match rustix::io::read(&self.socket, &mut part) {
                // its last words first
                Ok(0) if self.heard.len() > before => return Ok(true),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.heard.extend_from_slice(&part[..read]),
                Err(Errno::AGAIN) => return Ok(self.heard.len() > before),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if self.heard.len() > LINE_BYTES_MAX {
                return Err(io::Error::new(ErrorKind::InvalidData, "the gate's line has no end"));
            }
        }
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
    use std::io::{Read, Write};
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
        line.socket.try_write(b"?\n").unwrap();
        gate.join().unwrap();
        assert_eq!(line.hear().await.unwrap().heard, 1);
        assert_eq!(line.hear().await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
