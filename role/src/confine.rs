//! A process takes from itself what it never needs (S4): programs, the memory of others, files, the rarer parts of the kernel. Whoever gets to
//! steer it by a bug is left with what it does anyway.
//!
//! Two kinds of the kernel's help. Landlock says which files may be read and where some may be written; a seccomp filter refuses system
//! calls, by a list of what is refused, so that a newer libc or runtime that asks for something new is not killed by it. Both stay for the
//! life of the process. Where a kernel has one of them not, the other holds.

mod calls;

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    path_beneath_rules,
};
use thiserror::Error;

/// What finding a name's address reads: the resolver's files, and the libraries that glibc's loads late.
pub const RESOLVER: [&str; 12] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/run/systemd/resolve",
    "/etc/ld.so.cache",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
];

/// What a process prints of itself in a panic, and asks of itself in passing.
pub const ITSELF: [&str; 2] = ["/proc/self", "/proc/self/exe"];

/// The newest Landlock whose rights are named here; an older kernel holds those of them that it knows.
const LANDLOCK: ABI = ABI::V6;

/// What a process may read from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reads {
    /// Whatever its account may.
    Anything,
    /// These files, and what is in these folders; those that are not there are left out.
    Only(Vec<PathBuf>),
}

/// What a process keeps of what its account may do with files. It executes none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    pub reads: Reads,
    /// The folder in which it makes, reads, writes, renames and removes files; `None`: nowhere.
    pub writes: Option<PathBuf>,
}

/// A part of the confinement could not be had.
#[derive(Debug, Error)]
pub enum ConfineError {
    #[error("restrict files with landlock: {0}")]
    Files(#[from] RulesetError),
    #[error("make the filter of system calls: {0}")]
    Filter(#[from] seccompiler::BackendError),
    #[error("restrict system calls with seccomp: {0}")]
    Calls(#[from] seccompiler::Error),
}

impl Files {
    /// Confines this process as far as its kernel can, and says in the log what became of it: `who` it is, and what it is `left` of the files,
    /// in words. From a process of one thread, or those that are there already go on writing. Never a reason not to start: a program that is
    /// less confined is better than none.
    pub fn confine(&self, who: &str, left: &str) {
        match self.restrict() {
            Ok(true) => tracing::info!(left, "landlock: from now on {who} has these files alone, and executes none"),
            Ok(false) => tracing::warn!("no landlock is to be had here: the filter of system calls alone holds {who}"),
            Err(error) => tracing::warn!(%error, "{who} is not confined by landlock"),
        }
        match self.restrict_calls() {
            Ok(()) => tracing::info!("seccomp: system calls that {who} never needs are refused from now on"),
            Err(error) => tracing::warn!(%error, "{who} is not confined by seccomp, or only in part"),
        }
    }

    /// Nothing else is done with files from now on by this thread and those that it starts, and where the kernel knows of it no process but
    /// this one gets a signal of theirs. `false`: no Landlock is to be had, and nothing was done.
    ///
    /// # Errors
    /// When the kernel has it and refuses.
    pub fn restrict(&self) -> Result<bool, ConfineError> {
        let reading = AccessFs::ReadFile | AccessFs::ReadDir;
        let mut handled = AccessFs::from_all(LANDLOCK);
        if self.reads == Reads::Anything {
            handled.remove(reading);
        }
        let mut rules = Ruleset::default().handle_access(handled)?.scope(Scope::from_all(LANDLOCK))?.create()?;
        if let Reads::Only(paths) = &self.reads {
            rules = rules.add_rules(path_beneath_rules(paths, reading))?;
        }
        let in_its_own: BitFlags<AccessFs> = handled & !AccessFs::Execute;
        rules = rules.add_rules(path_beneath_rules(&self.writes, in_its_own))?;
        Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
    }

    /// No program is started, nobody else's memory touched, nobody else signalled, no file written unless there is a folder for it, and no
    /// part of the kernel asked that none of our programs needs, by any thread of this process: such a call fails with EPERM. The few
    /// whose callers know another way when a kernel lacks them fail with ENOSYS, as if it did.
    ///
    /// # Errors
    /// When the kernel has no seccomp, or refuses.
    pub fn restrict_calls(&self) -> Result<(), ConfineError> {
        for filter in calls::filters(self.writes.is_some())? {
            seccompiler::apply_filter_all_threads(&filter)?;
        }
        Ok(())
    }
}
