//! Engine throughput with and without the agent, in interleaved pairs: the same engine under the same clients, which reach it past the
//! gate; without the agent means that its processes are stopped. The order alternates, so that a drift of the machine cancels out.

use std::time::{Duration, Instant};

use super::roles::{Roles, cpu_ns};
use crate::clients::Clients;

const WINDOW: Duration = Duration::from_secs(2);
/// After a change, before the window opens.
const SETTLE: Duration = Duration::from_millis(200);

/// One window: tokens a second, and the engine's CPU time a token.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Window {
    tokens_per_s: f64,
    cpu_ns_per_token: f64,
}

/// Two windows side by side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    with: Window,
    without: Window,
}

impl Pair {
    /// How many times longer a token takes with the agent.
    pub fn slowdown(&self) -> f64 {
        self.without.tokens_per_s / self.with.tokens_per_s
    }

    /// How many times the CPU time a token costs with the agent.
    pub fn cpu_growth(&self) -> f64 {
        self.with.cpu_ns_per_token / self.without.cpu_ns_per_token
    }
}

/// Measures so many pairs.
///
/// # Errors
/// When the engine has gone.
pub async fn measure(roles: &Roles, engine: i32, clients: &Clients, count: u32) -> anyhow::Result<Vec<Pair>> {
    let mut pairs = Vec::new();
    for number in 0..count {
        let first = window(roles, engine, clients, number % 2 == 0).await?;
        let second = window(roles, engine, clients, number % 2 != 0).await?;
        let (with, without) = if number % 2 == 0 { (first, second) } else { (second, first) };
        pairs.push(Pair { with, without });
    }
    Ok(pairs)
}

async fn window(roles: &Roles, engine: i32, clients: &Clients, with_agent: bool) -> anyhow::Result<Window> {
    let _paused = (!with_agent).then(|| roles.pause());
    tokio::time::sleep(SETTLE).await;
    let (began, cpu, tokens) = (Instant::now(), cpu_ns(engine)?, clients.requests().tokens);
    tokio::time::sleep(WINDOW).await;
    let took_s = began.elapsed().as_secs_f64();
    let cpu = cpu_ns(engine)?.saturating_sub(cpu) as f64;
    let tokens = (clients.requests().tokens - tokens) as f64;
    Ok(Window { tokens_per_s: tokens / took_s, cpu_ns_per_token: cpu / tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_more_time_and_more_cpu_a_token() {
        let with = Window { tokens_per_s: 100.0, cpu_ns_per_token: 11.0 };
        let without = Window { tokens_per_s: 200.0, cpu_ns_per_token: 10.0 };
        let pair = Pair { with, without };
        assert_eq!((pair.slowdown(), pair.cpu_growth()), (2.0, 1.1));
    }
}
