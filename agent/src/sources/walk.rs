//! The engine's tree over time, cheaply: all of `/proc` is read now and then; in between only its list of pids, and the processes that
//! are new in it. A new process that is kin of the engine brings the whole walk at once.

use std::collections::HashSet;

use super::procs::ProcRoot;
use super::tree::{EngineProcess, process_tree_in};

/// Follows one engine's tree.
#[derive(Debug)]
pub struct TreeWatch {
    proc: ProcRoot,
    engine: EngineProcess,
    me: i32,
    known: HashSet<i32>,
    members: Vec<i32>,
    whole_ms: Option<u64>,
}

impl TreeWatch {
    /// Over any `/proc`, seen by process `me`; reads nothing yet.
    pub fn new(proc: ProcRoot, engine: EngineProcess, me: i32) -> Self {
        Self { proc, engine, me, known: HashSet::new(), members: Vec::new(), whole_ms: None }
    }

    /// The live members now, the root first. May take as long as the kernel likes. A whole walk, which finds those that became the
    /// engine's without being its children (its container's, its session's orphans), is made when the last is `whole_every_ms` old.
    pub fn look(&mut self, now_ms: u64, whole_every_ms: u64) -> Vec<i32> {
        let pids: HashSet<i32> = self.proc.pids().collect();
        let due = self.whole_ms.is_none_or(|at| now_ms.saturating_sub(at) >= whole_every_ms);
        if due || pids.difference(&self.known).any(|pid| self.is_kin(*pid)) {
            self.members = process_tree_in(&self.proc, &self.engine, self.me);
            self.whole_ms = Some(now_ms);
        } else {
            self.members.retain(|pid| pids.contains(pid));
        }
        self.known = pids;
        self.members.clone()
    }

    /// A child of a member, or of the root's session.
    fn is_kin(&self, pid: i32) -> bool {
        let stat = self.proc.stat(pid);
        stat.is_some_and(|stat| self.members.contains(&stat.ppid) || stat.session == self.engine.pid)
    }
}
