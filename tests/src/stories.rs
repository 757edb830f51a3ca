//! A test program of stories, told in one order on one cluster, because starting it is most of the time. It speaks as the standard
//! harness does: words on the command line choose stories, `--list` lists them, the last line counts.

use std::process::ExitCode;

use anyhow::Result;

use crate::cluster::NotRun;
use crate::story;

/// How it went.
#[derive(Debug, Default)]
pub struct Told {
    pub passed: usize,
    pub failed: usize,
    pub not_run: usize,
}

impl Told {
    /// None of `names` could be told here, and that is on record; `program` is the test's name.
    ///
    /// # Errors
    /// When this machine must be able to, or the record cannot be written.
    pub fn none(program: &str, names: &[&str], reason: &NotRun) -> Result<Self> {
        names.iter().try_for_each(|name| story::not_run(&format!("{program}::{name}"), reason))?;
        Ok(Told { not_run: names.len(), ..Told::default() })
    }

    fn report(&self, of: usize) -> ExitCode {
        let Self { passed, failed, not_run } = *self;
        let word = if failed == 0 { "ok" } else { "FAILED" };
        let out = of - passed - failed - not_run;
        println!(
            "\ntest result: {word}. {passed} passed; {failed} failed; {not_run} ignored; 0 measured; {out} filtered out"
        );
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Tells those of `names` that the command line chooses, the first `always` in any case.
pub fn main(names: &[&'static str], always: usize, tell_all: impl FnOnce(&[&'static str]) -> Result<Told>) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--list") {
        names.iter().for_each(|name| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let chosen = |name: &str| {
        let mut filters = words.iter().filter(|word| !word.starts_with('-')).peekable();
        filters.peek().is_none() || filters.any(|filter| name.contains(filter.as_str()))
    };
    let names: Vec<&str> =
        names.iter().enumerate().filter(|(n, name)| *n < always || chosen(name)).map(|(_, name)| *name).collect();
    println!("\nrunning {} stories", names.len());
    match tell_all(&names) {
        Ok(told) => told.report(names.len()),
        Err(error) => {
            println!("\nerror: {error:#}\n\ntest result: FAILED. 0 passed; 1 failed; 0 ignored");
            ExitCode::FAILURE
        }
    }
}
