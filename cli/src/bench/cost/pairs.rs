//! Engine throughput with and without the agent, in interleaved pairs: the same engine does the same work, eight streams from their
//! first token to their last, past the gate; without the agent means that its processes are stopped. The order alternates, so that a
//! drift of the machine cancels out. (Windows of time, over streams that come and go, hold more or fewer prompts and shorter or longer
//! histories: they scattered by a tenth where the same work scatters by a hundredth.) Here and there the machine takes a core away for
//! the whole of a round, which then lasts 1.4 times as long: the median is judged, and the mean told beside it.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::CLIENTS;
use super::roles::{Roles, cpu_ns};
use crate::clients::Clients;
use crate::http::{HttpClient, client};

/// Of each stream: half a second of work or a few, for what disturbs one of two rounds is less the nearer they lie.
const TOKENS: u32 = 100;
/// After a change, before the work begins.
const SETTLE: Duration = Duration::from_millis(50);

/// An engine that is measured.
#[derive(Debug)]
pub struct Subject<'a> {
    pub roles: &'a Roles,
    pub pid: i32,
    /// `http://host:port` of the engine itself.
    pub url: &'a str,
}

/// The work, done once: how long it took, and the CPU time that it took the engine, and the agent beside it, all in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Round {
    wall_s: f64,
    cpu_s: f64,
    agent_cpu_s: f64,
}

/// Two rounds, one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    with: Round,
    without: Round,
}

impl Pair {
    /// How many times longer the work takes with the agent.
    pub fn slowdown(&self) -> f64 {
        self.with.wall_s / self.without.wall_s
    }

    /// How many times the CPU time it costs the engine with the agent.
    pub fn cpu_growth(&self) -> f64 {
        self.with.cpu_s / self.without.cpu_s
    }

    /// How many times the CPU time it costs the engine and the agent together.
    pub fn all_cpu_growth(&self) -> f64 {
        let all = |round: Round| round.cpu_s + round.agent_cpu_s;
        all(self.with) / all(self.without)
    }
}

/// Measures so many pairs.
///
/// # Errors
/// When the engine has gone, or does not do the work.
pub async fn measure(subject: &Subject<'_>, count: u32) -> anyhow::Result<Vec<Pair>> {
    let client = client();
    let mut pairs = Vec::new();
    for number in 0..count {
        let agent_first = number % 2 == 0;
        let first = round(subject, &client, agent_first).await?;
        let second = round(subject, &client, !agent_first).await?;
        let (with, without) = if agent_first { (first, second) } else { (second, first) };
        pairs.push(Pair { with, without });
        if (number + 1) % 100 == 0 {
            eprintln!("{} of {count} pairs", number + 1);
        }
    }
    Ok(pairs)
}

async fn round(subject: &Subject<'_>, client: &HttpClient, with_agent: bool) -> anyhow::Result<Round> {
    let _paused = (!with_agent).then(|| subject.roles.pause());
    tokio::time::sleep(SETTLE).await;
    let (began, cpu, agent_cpu) = (Instant::now(), cpu_ns(subject.pid)?, subject.roles.cpu_ns()?);
    let done = Clients::round(client, subject.url, CLIENTS, TOKENS).await;
    let wall_s = began.elapsed().as_secs_f64();
    let seconds = |before: u64, after: u64| after.saturating_sub(before) as f64 / 1e9;
    let (cpu_s, agent_cpu_s) = (seconds(cpu, cpu_ns(subject.pid)?), seconds(agent_cpu, subject.roles.cpu_ns()?));
    ensure!(done.completed == u64::from(CLIENTS), "of {CLIENTS} streams not all ended as they should: {done:?}");
    Ok(Round { wall_s, cpu_s, agent_cpu_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_more_time_and_more_cpu_for_the_same_work() {
        let with = Round { wall_s: 2.0, cpu_s: 3.3, agent_cpu_s: 0.3 };
        let without = Round { wall_s: 1.0, cpu_s: 3.0, agent_cpu_s: 0.0 };
        let pair = Pair { with, without };
        assert_eq!(pair.slowdown(), 2.0);
        assert!((pair.cpu_growth() - 1.1).abs() < 1e-9 && (pair.all_cpu_growth() - 1.2).abs() < 1e-9);
    }
}
