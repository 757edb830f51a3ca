//! What the kernel says of another rank's process, for the moment when it is waited for: gone and stopped are known at once, and need no
//! deadline to pass. Reads `/proc`.

use std::io::ErrorKind;

use nix::libc::ESRCH;

/// A rank's process from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// It has ended, or is a zombie.
    Gone,
    /// SIGSTOP, or a debugger.
    Stopped,
    /// It may run.
    There,
}

impl Peer {
    /// Looks at process `pid`; 0, a rank that has not begun, counts as there.
    pub fn look(pid: u64) -> Self {
        if pid == 0 {
            return Self::There;
        }
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH) => {
                return Self::Gone;
            }
            // too few descriptors or too little memory, here: its deadline will tell
            Err(_) => return Self::There,
        };
        match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
            Some('Z' | 'X') | None => Self::Gone,
            Some('T' | 't') => Self::Stopped,
            Some(_) => Self::There,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_there_and_a_zombie_is_gone() {
        assert_eq!(Peer::look(u64::from(std::process::id())), Peer::There);
        assert_eq!(Peer::look(u64::from(u32::MAX)), Peer::Gone);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let since = std::time::Instant::now();
        while Peer::look(u64::from(child.id())) != Peer::Gone {
            assert!(since.elapsed().as_secs() < 20, "it has ended and is not reaped");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(child.try_wait());
    }
}
