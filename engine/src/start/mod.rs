//! What is made once at start-up and kept (E5, S4): weights as the device wants them, in a cache directory that all ranks, and later starts,
//! share. One process prepares them under a lease (`lease`) into one file (`pack`), the others wait and map it.
//!
//! **Invariant:** with guards on nobody waits for ever here: an owner that is gone or silent loses its lease, one that lives and has
//! failed is not waited for, and who cannot have the file prepares his own weights in memory, as without a cache.

mod lease;
mod pack;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub use pack::{PackError, PackFile, PackWriter};

use crate::beat::Heart;
use crate::fault::{Faults, Place};
use crate::model::LoadProgress;
use crate::ranks::Fleet;
use crate::stuck::Stuck;
use crate::weights::sum_of;
use lease::{Glance, Held, Lease, SILENCE_MAX};
use watch::{Turn, Watch};

/// Between two looks at a lease of another.
const LOOK: Duration = Duration::from_millis(15);
/// Workers take a free lease one after the other, so that mostly the first one has it.
const STAGGER: Duration = Duration::from_millis(200);
/// The first rank of several looks after the others: it prepares weights only if none of them does.
const LEADER_LAST: Duration = Duration::from_secs(30);
/// How often one process tries.
const TRIES_MAX: u32 = 3;

/// Whether this process's start-up is at preparing weights, or waits for them: the page's phase (H5).
#[derive(Debug, Clone, Default)]
pub struct Stage(Arc<AtomicBool>);

impl Stage {
    pub fn is_compiling(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Publishes progress under the phase that it belongs to; more is said `within` that time.
    pub fn publish(&self, heart: &mut Heart, done: u64, total: u64, within: Duration) {
        if self.is_compiling() { heart.compiling(done, total, within) } else { heart.loading(done, total, within) }
    }

    fn set(&self, compiling: bool) {
        self.0.store(compiling, Ordering::Relaxed);
    }
}

/// Where prepared weights are kept, and who asks.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    pub dir: PathBuf,
    pub stage: Stage,
    pub faults: Faults,
    /// Waits have ends (E1). Without, this waits for its owner as the field's engines do.
    pub guards: bool,
    /// The worker ranks, on the process that has to look after them.
    pub fleet: Option<Fleet>,
}

/// One file of the cache, seen by one rank.
pub struct Cache<'a> {
    options: &'a CacheOptions,
    path: PathBuf,
    key: String,
    turn: Duration,
}

/// Prepares everything into a file, telling a watcher how far it is; the watcher says whether to go on.
pub type Prepare<'a> = &'a mut dyn FnMut(&mut PackWriter, &mut dyn FnMut(u64, u64) -> bool) -> Result<(), String>;

impl<'a> Cache<'a> {
    /// The file of `key` (model, form, ranks) in the cache, for rank `rank` of `world`.
    pub fn new(options: &'a CacheOptions, key: String, (rank, world): (usize, usize)) -> Self {
        let path = options.dir.join(format!("{:016x}.pack", sum_of(key.as_bytes())));
        let turn = match (world, rank) {
            (1, _) => Duration::ZERO,
            (_, 0) => LEADER_LAST,
            _ => STAGGER * u32::try_from(rank - 1).unwrap_or(0),
        };
        Self { options, path, key, turn }
    }

    /// The file, made by this process or another. `None`: it cannot be had, for a reason that the log tells.
    ///
    /// # Errors
    /// A worker rank that is gone and not to be started again.
    pub fn file(&self, prepare: Prepare<'_>, progress: LoadProgress<'_>) -> Result<Option<PackFile>, Stuck> {
        if let Some(file) = self.open() {
            return Ok(Some(file));
        }
        self.options.stage.set(true);
        progress(0, 0);
        let file = self.made(prepare, progress);
        self.options.stage.set(false);
        file
    }

    fn made(&self, prepare: Prepare<'_>, progress: LoadProgress<'_>) -> Result<Option<PackFile>, Stuck> {
        // a folder that nobody can write to is known at once, and not when this process comes to its turn
        if let Err(error) = std::fs::create_dir_all(&self.options.dir).and_then(|()| self.probe()) {
            return Ok(self.without(&error.to_string()));
        }
        let lease = Lease::at(self.path.with_extension("lease"));
        let mut tries = 0;
        while tries < TRIES_MAX {
            let Some(held) = self.wait(&lease, progress)? else { break };
            if held.generation() > 1 {
                tracing::warn!(
                    generation = held.generation(),
                    "the lease of an owner that is gone or silent is taken over"
                );
            }
            // it may have been made just before this process came to its turn
            if let Some(file) = self.open() {
                return Ok(Some(file));
            }
            tries += 1;
            self.prepare(held, prepare, progress);
        }
        Ok(self.open().or_else(|| self.without("it was not made")))
    }

    /// A file of nothing comes and goes.
    fn probe(&self) -> std::io::Result<()> {
        let (path, _) = lease::temporary(&self.path, "probe")?;
        match std::fs::remove_file(path) {
            // whoever has the lease sweeps
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// The lease; `None`: the file is there, or will not be.
    fn wait(&self, lease: &Lease, progress: LoadProgress<'_>) -> Result<Option<Held>, Stuck> {
        let mut watch = Watch::new(self.turn, self.options.guards);
        let (mut glance, mut last) = (Glance::at(lease), Instant::now());
        let mut locked = Duration::ZERO;
        loop {
            let seen = glance.look();
            if seen.is_none() && self.path.exists() {
                return Ok(None);
            }
            let passed = std::mem::replace(&mut last, Instant::now()).elapsed();
            match watch.look(seen, passed) {
                Turn::Take => match lease.take(seen.map(|(doc, _)| doc)) {
                    Ok(Some(held)) => return Ok(Some(held)),
                    // who holds its lock for the moment between look and write may be stopped in it
                    Ok(None) if locked >= SILENCE_MAX => {
                        self.without("its lease is locked");
                        return Ok(None);
                    }
                    Ok(None) => locked += LOOK,
                    Err(error) => {
                        self.without(&error.to_string());
                        return Ok(None);
                    }
                },
                Turn::GiveUp => return Ok(None),
                Turn::Moved(done, total) => progress(done, total),
                Turn::Wait => (),
            }
            if let Some(fleet) = self.options.fleet.as_ref().filter(|_| self.options.guards) {
                fleet.tend()?;
            }
            thread::sleep(LOOK);
        }
    }

    fn prepare(&self, mut held: Held, prepare: Prepare<'_>, progress: LoadProgress<'_>) {
        let began = Instant::now();
        let first = held.generation() == 1;
        let mut watch = |done: u64, total: u64| {
            // once: who takes over is to live
            if first && done * 2 >= total.max(1) {
                self.options.faults.strike(Place::Compile);
            }
            progress(done, total);
            held.renew(done, total)
        };
        let made =
            PackWriter::create(&self.path, &self.key).map_err(|error| error.to_string()).and_then(|mut writer| {
                prepare(&mut writer, &mut watch)?;
                writer.finish(&self.path).map_err(|error| error.to_string())
            });
        match made {
            Ok(()) => tracing::info!(path = %self.path.display(), took = ?began.elapsed(), "weights are prepared"),
            Err(reason) => {
                tracing::warn!(path = %self.path.display(), reason, "weights could not be prepared for all");
                held.fail(&reason);
            }
        }
    }

    fn open(&self) -> Option<PackFile> {
        PackFile::open(&self.path, &self.key).unwrap_or_else(|error| {
            tracing::warn!(%error, "it is made anew");
            // gone, so that nobody takes it for the one that is awaited
            drop(std::fs::remove_file(&self.path));
            None
        })
    }

    fn without(&self, reason: &str) -> Option<PackFile> {
        let dir = self.options.dir.as_path();
        tracing::warn!(dir = %Path::display(dir), reason, "no prepared weights can be shared: this rank prepares its own");
        None
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
