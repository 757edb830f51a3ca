//! What is expected of the log of a row of the catalogue of faults: `None` where it is so, else what is wrong.

use std::collections::{BTreeMap, BTreeSet};

use super::report::Report;

const GRANT: &str = "truebeat.io/restart-grant";

/// What was logged.
pub struct Log<'a>(&'a Report);

impl<'a> Log<'a> {
    pub fn of(report: &'a Report) -> Self {
        Log(report)
    }
}

/// A write of an operator.
struct Write<'a> {
    at_ms: u64,
    operator: &'a str,
    what: &'a str,
}

impl Log<'_> {
    fn writes(&self) -> impl Iterator<Item = Write<'_>> {
        let written = |what: &str| ["PATCH", "POST", "PUT", "DELETE"].iter().any(|verb| what.starts_with(verb));
        self.lines().filter(move |line| written(line.what) && !line.what.contains("/leases"))
    }

    /// What operators did and what befell them.
    fn lines(&self) -> impl Iterator<Item = Write<'_>> {
        self.timed().filter_map(|(at_ms, rest)| {
            let (operator, what) = rest.split_once(' ').filter(|(who, _)| who.starts_with("operator-"))?;
            Some(Write { at_ms, operator, what })
        })
    }

    /// All that happened.
    fn timed(&self) -> impl Iterator<Item = (u64, &str)> {
        self.0.lines.iter().filter_map(|line| {
            let (time, rest) = line.trim_start().split_once(' ')?;
            let (seconds, millis) = time.split_once('.')?;
            Some((seconds.parse::<u64>().ok()? * 1000 + millis.parse::<u64>().ok()?, rest))
        })
    }

    /// When something happened that is told with all of these words.
    pub fn times(&self, words: &[&str]) -> Vec<u64> {
        let told = |what: &str| words.iter().all(|word| what.contains(word));
        self.timed().filter(|(_, what)| told(what)).map(|(at_ms, _)| at_ms).collect()
    }

    /// Whoever was asked to end at `at_ms` has ended so soon.
    pub fn ends_within(&self, at_ms: u64, most_ms: u64) -> Option<String> {
        let end = self.lines().find(|line| line.what == "has ended").map(|line| line.at_ms);
        end.is_none_or(|end| !(at_ms..=at_ms + most_ms).contains(&end)).then(|| format!("it ended at {end:?}"))
    }

    /// Somebody else writes at the latest then.
    pub fn succeeded_by(&self, at_ms: u64) -> Option<String> {
        let first = self.writes().next()?.operator;
        let next = self.writes().find(|write| write.operator != first).map(|write| write.at_ms);
        next.is_none_or(|next| next > at_ms).then(|| format!("the successor's first write was at {next:?}"))
    }

    pub fn granted_by(&self, at_ms: u64) -> Option<String> {
        let first = self.writes().find(|w| w.what.contains(GRANT)).map(|w| w.at_ms);
        first.is_none_or(|first| first > at_ms).then(|| format!("the grant came at {first:?}, not by {at_ms} ms"))
    }

    /// When a pod was handed the key to its restart.
    pub fn grants(&self) -> Vec<u64> {
        self.writes().filter(|w| w.what.contains(GRANT) && w.what.contains(" 200 ")).map(|w| w.at_ms).collect()
    }

    pub fn no_grant_before(&self, at_ms: u64) -> Option<String> {
        let first = self.writes().find(|w| w.what.contains(GRANT) && w.at_ms < at_ms)?;
        Some(format!("a grant at {} ms", first.at_ms))
    }

    pub fn no_grant_after(&self, at_ms: u64) -> Option<String> {
        let late =
            self.writes().find(|w| w.at_ms >= at_ms && (w.what.contains(GRANT) || w.what.contains("\"grants\":")))?;
        Some(format!("a grant at {} ms", late.at_ms))
    }

    pub fn grants_at_most(&self, most: usize) -> Option<String> {
        let count = self.writes().filter(|w| w.what.contains(GRANT)).count();
        (count > most).then(|| format!("{count} grants"))
    }

    pub fn no_delete(&self) -> Option<String> {
        self.writes().find(|w| w.what.starts_with("DELETE")).map(|w| format!("at {} ms {}", w.at_ms, w.what))
    }

    /// Nobody writes anything from the first of these moments on and before the second.
    pub fn quiet(&self, (from_ms, to_ms): (u64, u64)) -> Option<String> {
        let write = self.writes().find(|w| (from_ms..to_ms).contains(&w.at_ms))?;
        Some(format!("at {} ms {}", write.at_ms, write.what))
    }

    /// Nobody writes anything, from this moment on, whose name ends so.
    pub fn leaves_alone(&self, from_ms: u64, ends: &[&str]) -> Option<String> {
        let object =
            |what: &str| what.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default().to_owned();
        let ours = |what: &str| ends.iter().any(|end| object(what).trim_end_matches("/status").ends_with(end));
        let write = self.writes().find(|w| w.at_ms >= from_ms && ours(w.what))?;
        Some(format!("at {} ms {}", write.at_ms, write.what))
    }

    /// No more than the client's budget once the API is back.
    pub fn no_burst(&self, at_ms: u64) -> Option<String> {
        let count = self.writes().filter(|w| (at_ms..at_ms + 10_000).contains(&w.at_ms)).count();
        (count > 50).then(|| format!("{count} writes in 10 s after the API came back"))
    }

    /// At most five tries a second at one object.
    pub fn no_hot_loop(&self) -> Option<String> {
        let mut tries = BTreeMap::<(&str, u64), u32>::new();
        for write in self.writes() {
            let object = write.what.split(' ').nth(1).unwrap_or_default();
            *tries.entry((object, write.at_ms / 1000)).or_default() += 1;
        }
        let hot = tries.into_iter().find(|(_, count)| *count > 5)?;
        Some(format!("{} tries at {} in one second", hot.1, hot.0.0))
    }

    /// So many operators write from the first of these moments on and before the second.
    pub fn writers_between(&self, (from_ms, to_ms): (u64, u64), wanted: usize) -> Option<String> {
        let writes = self.writes().filter(|write| (from_ms..to_ms).contains(&write.at_ms));
        let writers: BTreeSet<&str> = writes.map(|write| write.operator).collect();
        (writers.len() != wanted).then(|| format!("{writers:?} wrote from {from_ms} to {to_ms} ms"))
    }

    /// Nothing is written whose text is longer.
    pub fn no_write_above(&self, bytes: usize) -> Option<String> {
        let long = self.writes().find(|write| write.what.len() > bytes)?;
        Some(format!("{} bytes are written at {} ms", long.what.len(), long.at_ms))
    }

    /// The first grant comes between these moments.
    pub fn granted_between(&self, (from_ms, to_ms): (u64, u64)) -> Option<String> {
        let grants = self.grants();
        (!grants.first().is_some_and(|at| (from_ms..to_ms).contains(at))).then(|| format!("grants at {grants:?} ms"))
    }

    pub fn one_writer(&self) -> Option<String> {
        let writers: BTreeSet<&str> = self.writes().map(|w| w.operator).collect();
        (writers.len() > 1).then(|| format!("the Lease was lost: {writers:?} wrote"))
    }

    /// So many were recorded in all. (The end state does not tell: it leaves out what differs from run to run, names as well.)
    pub fn incidents(&self, wanted: usize) -> Option<String> {
        let path = |write: &Write<'_>| write.what.split_once(" 201 ").map(|(call, _)| call.to_owned());
        let made: BTreeSet<String> =
            self.writes().filter_map(|w| path(&w)).filter(|call| call.contains("/engineincidents/")).collect();
        (made.len() != wanted).then(|| format!("{} incidents, not {wanted}", made.len()))
    }

    pub fn has(&self, word: &str) -> Option<String> {
        (!self.0.lines.iter().any(|line| line.contains(word))).then(|| format!("nobody said {word}"))
    }

    /// A write that holds this word takes effect from the first of these moments on and before the second.
    pub fn changes(&self, word: &str, (from_ms, to_ms): (u64, u64)) -> Option<String> {
        let in_time = |write: &Write<'_>| (from_ms..to_ms).contains(&write.at_ms) && write.what.contains(word);
        (!self.writes().any(|write| in_time(&write)))
            .then(|| format!("nothing said {word} from {from_ms} to {to_ms} ms"))
    }

    /// So many writes of this path at most hold this word.
    pub fn says_at_most(&self, most: usize, path: &str, word: &str) -> Option<String> {
        let count = self.writes().filter(|w| w.what.contains(path) && w.what.contains(word)).count();
        (count > most).then(|| format!("{count} writes of {path} say {word}"))
    }
}
