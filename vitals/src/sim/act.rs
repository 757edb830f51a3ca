//! What can happen to a replica, its clients and its host: the words of a history's script.

use super::fault::Fault;
use super::profile::Us;

/// What `recv` and `write` of a model that is fetched burn of a core.
pub const FETCH_PERMILLE: u64 = 25;

/// Something that happens. Spans are lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The whole machine stands still.
    VmPause(Us),
    /// The engine gets no CPU.
    Starve(Us),
    /// The agent gets no CPU.
    Late(Us),
    /// The host is loaded: what its cores do lasts so many thousandths, and both are late often.
    Loaded(Us, u64),
    /// The cgroup's quota holds the engine: steps last so many thousandths.
    Throttle(Us, u64),
    Freeze(Us),
    Debug(Us),
    Jit(Us),
    Sleep(Us),
    Pause(Us),
    Maintenance(Us),
    /// A long step that nobody announced.
    Swap(Us),
    Crawl(Us, u64),
    /// The front end's event loop is busy: slow scrapes, health time-outs, lumps.
    Hot(Us),
    SlowScrapes(Us),
    /// This signal is missing for a while.
    Blind(Us, Missing),
    AgentRestart,
    GateRestart,
    /// The process ends and starts again; the start-up takes this long and burns CPU at this permille.
    Restart(Us, u64),
    /// The same by a process that fetches its model over the network.
    Fetch(Us),
    Burst(u32),
    /// Nobody comes from here on.
    Hush,
    Fault(Fault),
}

/// A signal that can be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Missing {
    #[default]
    Metrics,
    Proc,
    Gate,
    Page,
    Frontend,
}
