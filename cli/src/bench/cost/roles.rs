//! The agent's three processes: found from the engine that they started, their memory and CPU time read from `/proc`, stopped and
//! continued.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use agent::sources::procs::ProcRoot;
use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Pids by role: `supervisor`, `detect`, `gate`.
#[derive(Debug)]
pub struct Roles(BTreeMap<&'static str, i32>);

/// What one process has in memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    pub rss_mib: f64,
    /// With shared pages counted once among their users.
    pub pss_mib: f64,
    /// What no file backs.
    pub anonymous_mib: f64,
    pub threads: usize,
}

/// Cost by role.
#[derive(Debug)]
pub struct Cost {
    pub memory: BTreeMap<&'static str, Memory>,
    pub cpu_ms_per_s: BTreeMap<&'static str, f64>,
    /// How often threads were woken, which other work on the machine does not change.
    pub wakeups_per_s: f64,
    pub length_s: f64,
}

impl Roles {
    /// The processes around this engine, whose parent is the supervisor.
    ///
    /// # Errors
    /// When one of them is not there.
    pub fn beside(engine: i32) -> anyhow::Result<Self> {
        let proc = ProcRoot::live();
        let supervisor = proc.stat(engine).context("the engine has gone")?.ppid;
        let mut roles = BTreeMap::from([("supervisor", supervisor)]);
        for child in proc.all().into_iter().filter(|stat| stat.ppid == supervisor) {
            let line = std::fs::read(proc.path(child.pid, "cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            for role in ["detect", "gate"] {
                if words.get(1..3) == Some(&[b"agent", role.as_bytes()]) {
                    roles.insert(role, child.pid);
                }
            }
        }
        if roles.len() != 3 {
            bail!("there are only {roles:?}");
        }
        Ok(Self(roles))
    }

    /// CPU time over `length`, and memory at its end.
    ///
    /// # Errors
    /// When a process has gone.
    pub async fn cost_over(&self, length: Duration) -> anyhow::Result<Cost> {
        let (before, wakeups) = (self.each(cpu_ns)?, self.each(wakeups)?);
        let began = Instant::now();
        tokio::time::sleep(length).await;
        let (after, wakeups_after) = (self.each(cpu_ns)?, self.each(self::wakeups)?);
        let took_s = began.elapsed().as_secs_f64();
        let cpu = |(role, after): (&&'static str, &u64)| {
            let used_ns = after.saturating_sub(before.get(role).copied().unwrap_or_default());
            (*role, used_ns as f64 / 1e6 / took_s)
        };
        let woken = wakeups_after.values().sum::<u64>().saturating_sub(wakeups.values().sum());
        let wakeups_per_s = woken as f64 / took_s;
        Ok(Cost {
            memory: self.each(memory)?,
            cpu_ms_per_s: after.iter().map(cpu).collect(),
            wakeups_per_s,
            length_s: took_s,
        })
    }

    /// CPU time of all three together, in nanoseconds.
    ///
    /// # Errors
    /// When a process has gone.
    pub fn cpu_ns(&self) -> anyhow::Result<u64> {
        Ok(self.each(cpu_ns)?.values().sum())
    }

    /// Stops all three, the supervisor first and last to go on: it must not find its children silent.
    pub fn pause(&self) -> Paused<'_> {
        self.signal(["supervisor", "detect", "gate"], Signal::SIGSTOP);
        Paused(self)
    }

    fn signal(&self, order: [&str; 3], signal: Signal) {
        for pid in order.iter().filter_map(|role| self.0.get(role)) {
            // one that has gone needs no signal; the figures will tell
            let _ = kill(Pid::from_raw(*pid), signal);
        }
    }

    fn each<T>(&self, read: fn(i32) -> anyhow::Result<T>) -> anyhow::Result<BTreeMap<&'static str, T>> {
        self.0
            .iter()
            .map(|(role, pid)| Ok((*role, read(*pid).with_context(|| format!("{role}, pid {pid}"))?)))
            .collect()
    }
}

/// While this lives the agent's processes are stopped.
#[derive(Debug)]
pub struct Paused<'a>(&'a Roles);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.signal(["detect", "gate", "supervisor"], Signal::SIGCONT);
    }
}

impl Cost {
    /// All roles together.
    pub fn total(&self) -> Memory {
        self.memory.values().fold(Memory::default(), |sum, one| Memory {
            rss_mib: sum.rss_mib + one.rss_mib,
            pss_mib: sum.pss_mib + one.pss_mib,
            anonymous_mib: sum.anonymous_mib + one.anonymous_mib,
            threads: sum.threads + one.threads,
        })
    }

    /// Milliseconds a second of these roles.
    pub fn cpu(&self, roles: &[&str]) -> f64 {
        roles.iter().filter_map(|role| self.cpu_ms_per_s.get(role)).sum()
    }
}

/// CPU time of a process's threads that are there now, in nanoseconds.
///
/// # Errors
/// When the process has gone.
pub fn cpu_ns(pid: i32) -> anyhow::Result<u64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).context("the process has gone")?;
    let used = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    Ok(threads.flatten().filter_map(used).sum())
}

/// How often threads that are there now gave up a core to wait.
fn wakeups(pid: i32) -> anyhow::Result<u64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).context("the process has gone")?;
    let woken = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("status")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    };
    Ok(threads.flatten().filter_map(woken).sum())
}

/// Memory of a process.
///
/// # Errors
/// When the process has gone.
pub fn memory(pid: i32) -> anyhow::Result<Memory> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("the process has gone")?;
    let mib = |name: &str| {
        let value =
            text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<f64>().ok());
        value.map(|kib| kib / 1024.0).with_context(|| format!("its smaps_rollup has no {name}"))
    };
    Ok(Memory {
        rss_mib: mib("Rss:")?,
        pss_mib: mib("Pss:")?,
        anonymous_mib: mib("Anonymous:")?,
        threads: std::fs::read_dir(format!("/proc/{pid}/task"))?.count(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory() {
        let own = memory(std::process::id().cast_signed()).unwrap();
        assert!(own.rss_mib > 0.5 && own.pss_mib <= own.rss_mib && own.threads > 0);
    }
}
