//! What is kept of a log for the bundle: its last lines, and those around the first that tells of an end. A core that dies takes hundreds of
//! lines to say so, and whoever waits for it hundreds more. Pure.

use std::collections::VecDeque;

/// Lines kept, and bytes of them.
pub const LINES_MAX: usize = 4_000;
const BYTES_MAX: usize = 256 << 10;
/// Of the line that tells of an end: how many before it, and how many after.
const BEFORE: usize = 75;
const AFTER: u64 = 75;
/// Bytes of those.
const AROUND_BYTES_MAX: usize = 128 << 10;

/// The kept lines.
#[derive(Debug, Default)]
pub struct LogMemory {
    last: VecDeque<String>,
    last_bytes: usize,
    /// Lines that ever came.
    came: u64,
    around: Option<Around>,
    /// What was told before is of another engine.
    began_anew: bool,
}

/// Lines around one.
#[derive(Debug)]
struct Around {
    lines: Vec<String>,
    bytes: usize,
    /// How many lines had come with the one that tells, and with the newest of these.
    told_at: u64,
    came: u64,
}

impl LogMemory {
    /// Takes a line in. `grave`: it tells of an end.
    pub fn push(&mut self, line: String, grave: bool) {
        self.came += 1;
        if grave && (self.around.is_none() || self.began_anew) {
            self.begin(line.clone());
        } else if let Some(around) = &mut self.around {
            around.follow(&line, self.came);
        }
        self.last_bytes += line.len();
        self.last.push_back(line);
        while self.last.len() > LINES_MAX || self.last_bytes > BYTES_MAX && self.last.len() > 1 {
            self.last_bytes -= self.last.pop_front().map_or(0, |line| line.len());
        }
    }

    /// Another engine speaks from now on: the first line of its end is what counts.
    pub fn begin_anew(&mut self) {
        self.began_anew = true;
    }

    /// Oldest first; says where lines are left out.
    pub fn lines(&self) -> Vec<String> {
        let first = self.came - self.last.len() as u64 + 1;
        let mut lines = Vec::new();
        if let Some(around) = &self.around {
            let from = around.came + 1 - around.lines.len() as u64;
            let gone = usize::try_from(first.saturating_sub(from)).unwrap_or(usize::MAX).min(around.lines.len());
            lines.extend(around.lines.iter().take(gone).cloned());
            let left_out = first.saturating_sub(around.came + 1);
            lines.extend((left_out > 0).then(|| format!("[truebeat: {left_out} lines left out]")));
        }
        lines.extend(self.last.iter().cloned());
        lines
    }

    fn begin(&mut self, line: String) {
        self.began_anew = false;
        let mut bytes = line.len();
        let fits = |before: &&String| {
            bytes += before.len();
            bytes <= AROUND_BYTES_MAX
        };
        let mut lines: Vec<String> = self.last.iter().rev().take(BEFORE).take_while(fits).cloned().collect();
        lines.reverse();
        lines.push(line);
        let bytes = lines.iter().map(String::len).sum();
        self.around = Some(Around { lines, bytes, told_at: self.came, came: self.came });
    }
}

impl Around {
    fn follow(&mut self, line: &str, came: u64) {
        let next = came == self.came + 1 && came <= self.told_at + AFTER;
        if next && self.bytes + line.len() <= AROUND_BYTES_MAX {
            self.bytes += line.len();
            self.came = came;
            self.lines.push(line.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(memory: &mut LogMemory, lines: std::ops::Range<usize>) {
        lines.for_each(|n| memory.push(format!("line {n}"), false));
    }

    #[test]
    fn what_stands_around_the_first_word_of_an_end_outlives_the_flood_that_follows() {
        let mut memory = LogMemory::default();
        numbered(&mut memory, 0..1_000);
        memory.push("the context is lost".to_owned(), true);
        numbered(&mut memory, 1_001..1_200);
        memory.push("an echo".to_owned(), true);
        let before = memory.lines();
        assert_eq!((before.len(), before[1_000].as_str()), (1_201, "the context is lost"), "nothing is there twice");
        numbered(&mut memory, 1_201..10_000);
        let lines = memory.lines();
        assert_eq!((lines[0].as_str(), lines[75].as_str()), ("line 925", "the context is lost"));
        assert_eq!((lines[150].as_str(), lines[151].as_str()), ("line 1075", "[truebeat: 4924 lines left out]"));
        assert_eq!((lines[152].as_str(), lines.len()), ("line 6000", 152 + LINES_MAX));
        // another engine's end is another
        memory.begin_anew();
        memory.push("again".to_owned(), true);
        numbered(&mut memory, 10_001..20_000);
        assert_eq!(memory.lines()[75], "again");
    }

    #[test]
    fn long_lines_are_bounded_by_their_bytes() {
        let mut memory = LogMemory::default();
        for n in 0..1_000 {
            memory.push(format!("{n} {}", "x".repeat(5_000)), n == 500);
        }
        let bytes: usize = memory.lines().iter().map(String::len).sum();
        assert!((BYTES_MAX..=BYTES_MAX + AROUND_BYTES_MAX + 100).contains(&bytes), "{bytes}");
        assert!(memory.lines().iter().any(|line| line.starts_with("500 ")));
        memory.push("y".repeat(BYTES_MAX + 1), false);
        assert_eq!(memory.last.len(), 1);
    }
}
