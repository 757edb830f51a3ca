//! What `truebeat run` tells a person, read by a bench: which process is the engine, and when its end was noticed. The lines are
//! looked for many times a millisecond, so that the reader adds little to what it measures.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

const LOOK_EVERY: Duration = Duration::from_micros(100);

/// The log of one `truebeat run`, read from its beginning.
#[derive(Debug)]
pub struct RunLog {
    file: File,
    text: String,
}

impl RunLog {
    /// The log in a stage's folder.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join("truebeat.log");
        let file = File::open(&path).with_context(|| format!("could not open {}", path.display()))?;
        Ok(Self { file, text: String::new() })
    }

    /// The engine that was started last.
    ///
    /// # Errors
    /// When none was.
    pub fn engine_pid(&mut self) -> anyhow::Result<i32> {
        self.read_on()?;
        engine_pid(&self.text).context("truebeat run has not said that it started an engine")
    }

    /// Blocks until each of `wanted` holds for a line that is written from now on. Returns when each was first seen.
    ///
    /// # Errors
    /// When that takes longer than `at_most`.
    pub fn wait_for<const N: usize>(
        &mut self,
        wanted: [&dyn Fn(&str) -> bool; N],
        at_most: Duration,
    ) -> anyhow::Result<[Instant; N]> {
        let began = Instant::now();
        let from = self.text.len();
        let mut seen = [None; N];
        while began.elapsed() < at_most {
            if self.read_on()? {
                let now = Instant::now();
                let new = self.text.get(from..).unwrap_or_default();
                for (seen, wanted) in seen.iter_mut().zip(wanted) {
                    *seen = seen.or_else(|| new.lines().any(wanted).then_some(now));
                }
                if let Some(all) = seen.iter().copied().collect::<Option<Vec<Instant>>>()
                    && let Ok(all) = all.try_into()
                {
                    return Ok(all);
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        bail!("not within {at_most:?}; its last words: {:?}", self.text.lines().next_back().unwrap_or_default())
    }

    /// True where something came.
    fn read_on(&mut self) -> anyhow::Result<bool> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes).context("could not read the log of truebeat run")?;
        self.text += &String::from_utf8_lossy(&bytes);
        Ok(!bytes.is_empty())
    }
}

fn engine_pid(text: &str) -> Option<i32> {
    let started = text.lines().rev().find_map(|line| line.split_once("engine started, pid "))?;
    started.1.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_last_engine_is_the_engine_and_only_new_lines_count() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = File::create(folder.path().join("truebeat.log")).unwrap();
        writeln!(log, "truebeat: engine started, pid 12, start 1\ntruebeat: engine started, pid 345, start 2").unwrap();
        let mut read = RunLog::open(folder.path()).unwrap();
        assert_eq!(read.engine_pid().unwrap(), 345);
        let ended = |line: &str| line.contains("ended");
        let started = |line: &str| line.contains("started");
        assert!(read.wait_for([&started], Duration::from_millis(2)).is_err(), "that was before");
        writeln!(log, "started\nended").unwrap();
        assert!(read.wait_for([&ended, &started], Duration::from_secs(60)).is_ok());
    }
}
