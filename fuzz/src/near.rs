//! Fuzz targets without a fuzzer: the committed corpus, and random damage to it for a moment (`TRUEBEAT_FUZZ_SECONDS` for each target;
//! half a second where nobody says). The tests of the crates whose code the targets call include this file, and so reach what is private to
//! no fuzzer; `make fuzz` runs the same targets under libFuzzer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

const BYTES_MAX: usize = 64 << 10;

/// Takes any bytes; panics where a promise is broken.
type Target = fn(&[u8]);

/// Runs every target on its corpus and near it.
///
/// # Panics
/// A target breaks its promise: its name, and the input.
pub fn hold(targets: &[(&str, Target)]) {
    let seed = std::env::var("TRUEBEAT_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x7bea7);
    for (name, target) in targets {
        let (runs, failed) = run(name, *target, seed);
        println!("{name}: {runs} runs, seed {seed}");
        let input = failed.map(|input| String::from_utf8_lossy(&input).into_owned());
        assert!(input.is_none(), "{name} fails (seed {seed}, run {runs}) on {input:?}");
        assert!(runs > 0);
    }
}

/// The committed inputs of a target.
pub fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
    files.sort();
    let inputs: Vec<Vec<u8>> = files.iter().flat_map(std::fs::read).collect();
    assert!(!inputs.is_empty() && inputs.len() == files.len(), "{} has no corpus to be read", directory.display());
    inputs
}

/// Runs of the target, and the input of the first that fails.
pub fn run(name: &str, target: Target, seed: u64) -> (u64, Option<Vec<u8>>) {
    let inputs = corpus(name);
    inputs.iter().for_each(|input| target(input));
    let (mut chance, mut runs, until) = (Chance(seed), 0, Instant::now() + moment());
    while Instant::now() < until {
        let input = chance.damaged(&inputs);
        runs += 1;
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            return (runs, Some(input));
        }
    }
    (runs, None)
}

fn moment() -> Duration {
    let seconds = std::env::var("TRUEBEAT_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(0.5))
}

/// Chance from a seed (xorshift), so that a failure can be had again.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap_or(0) % bound.max(1)
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap_or(0)
    }

    /// An input of the corpus with one to eight injuries.
    fn damaged(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut input = inputs[self.below(inputs.len())].clone();
        for _ in 0..=self.below(8) {
            let at = self.below(input.len() + 1);
            match self.below(7) {
                0 => input.truncate(at),
                1 => input.insert(at, self.byte()),
                2 if at < input.len() => input[at] = self.byte(),
                3 if at < input.len() => input[at] ^= 1 << self.below(8),
                4 => {
                    let other = &inputs[self.below(inputs.len())];
                    let from = self.below(other.len() + 1);
                    let to = from + self.below(other.len() - from + 1);
                    input.splice(at..at, other[from..to].iter().copied());
                }
                5 => {
                    let to = at + self.below(input.len() - at + 1);
                    input.drain(at..to);
                }
                _ => {
                    let odd: [&[u8]; 6] = [b"\0", b"-1", b"18446744073709551616", b"1e999", b"\xff\xfe", b"\"}{[("];
                    input.splice(at..at, odd[self.below(odd.len())].iter().copied());
                }
            }
        }
        input.truncate(BYTES_MAX);
        input
    }
}
