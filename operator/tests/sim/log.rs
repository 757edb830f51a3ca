//! The event log: every write that reached the server and every fact of the world, hashed as it grows. Two runs of one
//! seed must have one hash.

use std::fmt;

/// FNV-1a over all lines; the lines themselves only where somebody wants to read them.
pub struct Log {
    hash: u64,
    pub count: u64,
    pub lines: Option<Vec<String>>,
}

impl Log {
    pub fn new(keep: bool) -> Self {
        Log { hash: 0xcbf2_9ce4_8422_2325, count: 0, lines: keep.then(Vec::new) }
    }

    pub fn line(&mut self, now_ms: u64, what: fmt::Arguments<'_>) {
        let line = format!("{:>8}.{:03} {what}", now_ms / 1000, now_ms % 1000);
        for byte in line.bytes().chain([b'\n']) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self.count += 1;
        if let Some(lines) = &mut self.lines {
            lines.push(line);
        }
    }

    pub fn hash(&self) -> u64 {
        self.hash
    }
}
