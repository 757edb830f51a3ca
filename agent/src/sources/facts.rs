//! What `/proc` tells more slowly: bytes read and written by the tree (start-up progress, S4), threads of the process that steps, sockets
//! of the port. Gathered off the tick, for some of these files wait for locks of the process that they tell of, and seldom enough that
//! they cost no more than one part in a thousand of a core.

use std::collections::HashMap;
use std::time::Instant;

use vitals::observation::{ProcObs, ThreadObs};

use super::clock::{TickClock, own_cpu_us};
use super::net::{Sockets, sockets};
use super::nvml::VisibleGpus;
use super::procs::ProcRoot;

/// Members whose bytes are counted, threads that are read, threads that are told.
const MEMBERS_MAX: usize = 256;
const THREADS_MAX: usize = 512;
const TOLD_MAX: usize = 4;

/// Gathers the facts of one engine; moves to a blocking thread and back.
#[derive(Debug)]
pub struct FactsReader {
    proc: ProcRoot,
    clock: TickClock,
    /// What was last seen of each member and thread, and when threads were read.
    io: HashMap<i32, Io>,
    seen: HashMap<i32, Seen>,
    seen_at: Option<Instant>,
    total: Option<Io>,
    /// What the engine's environment said when it was first read.
    visible: Option<Option<VisibleGpus>>,
}

/// One thread at the last look: its CPU time, and how long it has stood in line for a core, where that was asked.
#[derive(Debug, Clone, Copy)]
struct Seen {
    ticks: u64,
    waited_ns: Option<u64>,
}

/// What to look at.
#[derive(Debug, Clone, Default)]
pub struct Look {
    pub members: Vec<i32>,
    pub stepping: Option<i32>,
    pub engine: i32,
    /// Whose sockets are counted. `None` where nobody asks: the kernel goes through all connections there could be, for one port's.
    pub port: Option<u16>,
    pub now_ms: u64,
}

/// The facts, ready to be laid over an observation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    pub io: Option<Io>,
    pub sockets: Option<Sockets>,
    pub threads: Vec<ThreadObs>,
    /// The engine's GPUs, where its environment tells them.
    pub visible: Option<VisibleGpus>,
    /// When they were asked for.
    pub at_ms: u64,
    /// The CPU time that it took to gather them.
    pub cost_us: u64,
}

/// Bytes read, from anywhere and from storage; and written, by calls and to storage, as one sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Io {
    pub chars: u64,
    pub bytes: u64,
    pub written: u64,
}

impl FactsReader {
    /// Over any `/proc`; nothing is known yet.
    pub fn new(proc: ProcRoot, clock: TickClock) -> Self {
        Self { proc, clock, io: HashMap::new(), seen: HashMap::new(), seen_at: None, total: None, visible: None }
    }

    /// One look. May take as long as the kernel likes.
    pub fn gather(&mut self, look: &Look) -> Facts {
        let began_us = own_cpu_us();
        self.count_io(&look.members);
        Facts {
            io: self.total,
            sockets: look.port.and_then(|port| sockets(&self.proc, look.engine, port)),
            threads: look.stepping.map(|pid| self.threads(pid)).unwrap_or_default(),
            visible: self.visible(look.engine),
            at_ms: look.now_ms,
            cost_us: own_cpu_us().saturating_sub(began_us),
        }
    }

    /// A process is given its environment once.
    fn visible(&mut self, engine: i32) -> Option<VisibleGpus> {
        let proc = &self.proc;
        let read = || {
            let environ = std::fs::read(proc.path(engine, "environ")).ok()?;
            let ours = i32::try_from(std::process::id()).ok().and_then(|me| proc.mount_namespace(me));
            VisibleGpus::of_environ(&environ, ours.is_some() && ours == proc.mount_namespace(engine))
        };
        self.visible.get_or_insert_with(read).clone()
    }

    /// Adds what was read and written since the last look, so that a member that ends takes nothing away.
    fn count_io(&mut self, members: &[i32]) {
        let mut seen = HashMap::with_capacity(members.len());
        for pid in members.iter().take(MEMBERS_MAX) {
            let Some(now) = self.io_of(*pid) else { continue };
            let before = self.io.get(pid).copied().unwrap_or_default();
            // fewer than before: another process with its number
            let before = if now.chars < before.chars { Io::default() } else { before };
            let total = self.total.get_or_insert_default();
            total.chars = total.chars.saturating_add(now.chars - before.chars);
            total.bytes = total.bytes.saturating_add(now.bytes.saturating_sub(before.bytes));
            total.written = total.written.saturating_add(now.written.saturating_sub(before.written));
            seen.insert(*pid, now);
        }
        self.io = seen;
    }

    fn io_of(&self, pid: i32) -> Option<Io> {
        let text = std::fs::read_to_string(self.proc.path(pid, "io")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse::<u64>().ok()
        };
        let written = field("wchar:")?.saturating_add(field("write_bytes:")?);
        Some(Io { chars: field("rchar:")?, bytes: field("read_bytes:")?, written })
    }

    /// The main thread, then the busiest of the others.
    fn threads(&mut self, pid: i32) -> Vec<ThreadObs> {
        let now = Instant::now();
        let span = self.seen_at.replace(now).map_or(0, |at| now.duration_since(at).as_millis());
        let mut told = Vec::new();
        let mut all = HashMap::new();
        for tid in self.proc.threads(pid).take(THREADS_MAX) {
            let Some(stat) = self.proc.thread_stat(pid, tid) else { continue };
            // one that sleeps stands in no line
            let waits = if stat.state == 'R' { self.proc.schedstat(pid, tid) } else { None };
            let waited_ns = waits.map(|waits| waits.waited_ns);
            let before = self.seen.get(&tid).copied();
            all.insert(tid, Seen { ticks: stat.own_ticks, waited_ns });
            told.push(ThreadObs {
                tid,
                name: stat.comm,
                state: stat.state,
                cpu_ms: self.clock.cpu_ms(stat.own_ticks),
                burned_ms: before.map_or(0, |before| self.clock.cpu_ms(stat.own_ticks.saturating_sub(before.ticks))),
                span_ms: before.map_or(0, |_| u64::try_from(span).unwrap_or(u64::MAX)),
                runnable_ms: waited_ns
                    .zip(before.and_then(|before| before.waited_ns))
                    .map(|(now, before)| now.saturating_sub(before) / 1_000_000),
            });
        }
        self.seen = all;
        told.sort_by_key(|thread| (thread.tid != pid, std::cmp::Reverse(thread.burned_ms), thread.tid));
        told.truncate(TOLD_MAX);
        told
    }
}

impl Facts {
    /// Lays the facts over what the tick read itself; connections only where the count is current: an old one is missing, not zero.
    pub fn lay_over(&self, obs: &mut ProcObs, current: bool) {
        let sockets = self.sockets.filter(|_| current);
        obs.read_chars = self.io.map(|io| io.chars);
        obs.read_bytes = self.io.map(|io| io.bytes);
        obs.written = self.io.map(|io| io.written);
        obs.connections = sockets.map(|sockets| sockets.established);
        obs.accept_queue = sockets.map(|sockets| sockets.accept_queue);
        obs.listening = sockets.map(|sockets| sockets.listening);
        obs.threads.clone_from(&self.threads);
        obs.threads_at_ms = Some(self.at_ms);
    }
}
