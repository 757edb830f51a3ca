//! A Unix socket on which lines are said and heard, for both ends of the detector's line to the gate (2d). The runtime is told only that there
//! is something to read: each line that the other end takes makes room to write, which would wake this end once more for nothing.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Receiver;

const LINE_BYTES_MAX: usize = 64 << 10;
const READ_BYTES: usize = 4 << 10;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct LineSocket {
    /// No pipe: the runtime's one safe form of a descriptor that is awaited to be read and not to be written.
    socket: Receiver,
    /// What was heard and is no whole line yet, or more than one.
    heard: Vec<u8>,
}

impl LineSocket {
    /// On this socket. Needs a runtime.
    ///
    /// # Errors
    /// When the runtime cannot await it.
    pub(super) fn on(socket: UnixStream) -> io::Result<Self> {
        let socket = Receiver::from_owned_fd_unchecked(OwnedFd::from(socket.into_std()?))?;
        Ok(Self { socket, heard: Vec::new() })
    }

    /// Says a line, which ends with its end.
    ///
    /// # Errors
    /// When the other end is gone, or has left so much unread that there is no room for a line.
    pub(super) fn say(&self, line: &[u8]) -> io::Result<()> {
        if rustix::io::write(&self.socket, line)? < line.len() {
            return Err(ErrorKind::WriteZero.into());
        }
        Ok(())
    }

    /// Returns when the next line, without its end, is in the place of what was in `line`. What has come of it is kept when the wait is given up.
    ///
    /// # Errors
    /// When the other end is gone, or its line has no end.
    pub(super) async fn hear(&mut self, line: &mut Vec<u8>) -> io::Result<()> {
        while !self.hear_now(line)? {
            self.socket.readable().await?;
            // readable or read above: only a read can tell, and one that finds nothing waits for news
            _ = self.socket.try_io(|| Err::<(), _>(ErrorKind::WouldBlock.into()));
        }
        Ok(())
    }

    /// The same, if all of it is there; false, and `line` as it was, where it is not.
    ///
    /// # Errors
    /// As [`LineSocket::hear`].
    pub(super) fn hear_now(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        let end = match self.end() {
            None if self.read_all()? => self.end(),
            end => end,
        };
        let Some(end) = end else { return Ok(false) };
        line.clear();
        line.extend_from_slice(&self.heard[..end]);
        self.heard.drain(..=end);
        Ok(true)
    }

    fn end(&self) -> Option<usize> {
        self.heard.iter().position(|byte| *byte == b'\n')
    }

    /// Reads what is there; true where there was anything.
    fn read_all(&mut self) -> io::Result<bool> {
        let before = self.heard.len();
        let mut part = [0; READ_BYTES];
        loop {
            match rustix::io::read(&self.socket, &mut part) {
                // its last words first, also of one that went without a look at ours
                Ok(0) | Err(Errno::CONNRESET) if self.heard.len() > before => return Ok(true),
                Ok(0) | Err(Errno::CONNRESET) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.heard.extend_from_slice(&part[..read]),
                Err(Errno::AGAIN) => return Ok(self.heard.len() > before),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if self.heard.len() > LINE_BYTES_MAX {
                // whoever says many at once is heard all the same
                let whole = self.end().is_some();
                return if whole { Ok(true) } else { Err(io::Error::new(ErrorKind::InvalidData, "a line has no end")) };
            }
        }
    }
}

impl AsFd for LineSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (LineSocket, LineSocket) {
        let (one, other) = UnixStream::pair().unwrap();
        (LineSocket::on(one).unwrap(), LineSocket::on(other).unwrap())
    }

    #[tokio::test]
    async fn lines_are_heard_one_by_one_however_they_come() {
        let (one, mut other) = pair();
        let mut line = b"what was there".to_vec();
        assert!(!other.hear_now(&mut line).unwrap() && line == b"what was there");
        one.say(b"a\nbc").unwrap();
        tokio::time::timeout(LONG, other.hear(&mut line)).await.unwrap().unwrap();
        assert!(line == b"a" && !other.hear_now(&mut line).unwrap());
        let given_up = tokio::time::timeout(Duration::from_millis(1), other.hear(&mut line)).await;
        assert!(given_up.is_err(), "the second has no end yet");
        one.say(b"d\n").unwrap();
        drop(one);
        tokio::time::timeout(LONG, other.hear(&mut line)).await.unwrap().unwrap();
        assert_eq!(line, b"bcd");
        assert_eq!(other.hear(&mut line).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn the_last_words_of_one_that_went_are_heard_also_where_it_had_not_heard_ours() {
        let (one, mut other) = pair();
        other.say(b"unheard\n").unwrap();
        one.say(b"shut\n").unwrap();
        drop(one);
        let mut line = Vec::new();
        other.hear(&mut line).await.unwrap();
        assert_eq!(line, b"shut");
        assert_eq!(other.hear(&mut line).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn many_short_lines_at_once_are_all_heard() {
        let (one, mut other) = pair();
        let lines = LINE_BYTES_MAX / 2 + READ_BYTES;
        one.say("x\n".repeat(lines).as_bytes()).unwrap();
        for _ in 0..lines {
            let mut line = Vec::new();
            other.hear(&mut line).await.unwrap();
            assert_eq!(line, b"x");
        }
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_not_heard_to_its_end() {
        let (one, mut other) = pair();
        one.say(&vec![b'x'; LINE_BYTES_MAX + 1]).unwrap();
        assert_eq!(other.hear(&mut Vec::new()).await.unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn who_is_never_heard_is_told_so() {
        let (one, _other) = pair();
        let line = vec![b'x'; LINE_BYTES_MAX];
        let refused = (0..1_000).find_map(|_| one.say(&line).err()).expect("it cannot say this much");
        assert!([ErrorKind::WouldBlock, ErrorKind::WriteZero].contains(&refused.kind()), "{refused}");
    }
}
