//! The times of a story as a table: what was seen how many milliseconds after what was done. Pure but for standard output.

use std::fmt::Write;
use std::time::Instant;

/// The table of one story.
#[derive(Debug)]
pub struct Times {
    story: String,
    zero: Instant,
    text: String,
}

impl Times {
    /// An empty table; its zero is now.
    pub fn new(story: &str) -> Self {
        Self { story: story.to_owned(), zero: Instant::now(), text: String::new() }
    }

    /// Something is done now: the zero of the rows that follow. Call it right before doing it.
    pub fn act(&mut self, what: &str) -> Instant {
        self.zero = Instant::now();
        let _ = writeln!(self.text, "        0 ms  {what}");
        self.zero
    }

    /// Something was seen at `at`.
    pub fn seen(&mut self, what: &str, at: Instant) {
        let _ = writeln!(self.text, "{:>9} ms  {what}", at.saturating_duration_since(self.zero).as_millis());
    }

    /// Something was seen now.
    pub fn now(&mut self, what: &str) {
        self.seen(what, Instant::now());
    }

    /// A fact without a time.
    pub fn note(&mut self, what: &str) {
        let _ = writeln!(self.text, "              {what}");
    }

    /// The table as text.
    pub fn table(&self) -> String {
        format!("── {}\n{}", self.story, self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rows_count_from_the_act() {
        let mut times = Times::new("a story");
        let zero = times.act("done");
        times.seen("seen", zero + Duration::from_millis(1500));
        assert_eq!(times.table(), "── a story\n        0 ms  done\n     1500 ms  seen\n");
    }
}
