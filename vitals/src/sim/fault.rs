//! What can go wrong inside an engine, and what each looks like from outside (`VLLM.md`'s table of main-thread states).

use super::book::At;
use super::chance::Chance;
use super::engine::Engine;
use super::profile::{EngineKind, Profile, SECOND, Us};
use super::world::Env;
use crate::verdict::StallClass;

/// What the stepping thread looks like while it hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Look {
    /// State R, a core burning; on a GPU busy and cold.
    #[default]
    Spin,
    /// State S in a futex or a poll, no CPU.
    Lock,
    /// State T.
    Stopped,
    /// State D.
    Disk,
}

/// What stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Way {
    /// The step under way, or the next one, never ends.
    #[default]
    Step,
    /// The loop stops where it is, also between two steps.
    Anywhere,
    Admission,
    Livelock,
    Decode,
    /// This rank stops, the others spin in the step.
    Rank(u32),
    Front,
    /// The core's process is gone, the front end lives.
    CoreGone,
    Startup,
    Crash,
}

/// A fault; `ends` after this span where it passes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub way: Way,
    pub look: Look,
    pub ends: Option<Us>,
    /// It outlives SIGKILL.
    pub undead: bool,
    /// All data-parallel engines of the pod have it at once.
    pub whole_pod: bool,
}

impl Fault {
    pub fn new(way: Way, look: Look) -> Self {
        Self { way, look, ends: None, undead: false, whole_pod: false }
    }

    /// Any fault that this engine can have.
    pub fn any(profile: &Profile, chance: &mut Chance) -> Self {
        let look = chance.pick(&[Look::Spin, Look::Spin, Look::Lock, Look::Lock, Look::Stopped, Look::Disk]);
        let way = match chance.between(0, 11) {
            0..=4 => Way::Step,
            5 | 6 => Way::Anywhere,
            7 => Way::Admission,
            8 => Way::Livelock,
            9 => Way::Decode,
            10 if profile.ranks > 1 => Way::Rank(chance.between(0, u64::from(profile.ranks) - 1) as u32),
            10 => Way::CoreGone,
            _ => Way::Front,
        };
        Self::new(way, look)
    }

    /// It happens.
    pub fn strike(&self, now: Us, engine: &mut Engine, env: &mut Env, chance: &mut Chance) {
        if let Some(span) = self.ends {
            engine.hold(now, now + span);
            return;
        }
        match self.way {
            Way::Step | Way::Rank(_) => engine.doom(),
            Way::Anywhere | Way::CoreGone => drop(engine.hold(now, Us::MAX)),
            Way::Admission => engine.mood.shut = true,
            Way::Livelock => engine.mood.mute = true,
            Way::Decode => {
                engine.mood.thrash = true;
                for request in engine.live.change().iter_mut().filter(|request| request.at == At::Decode) {
                    request.at = At::Prefill;
                    request.context = request.prompt + request.generated;
                    request.prefilled = 0;
                }
            }
            Way::Front => engine.mood.front_dead = true,
            Way::Startup => {
                env.ready = Us::MAX;
                engine.free_at = Us::MAX;
            }
            Way::Crash => {
                env.born = Us::MAX;
                env.ready = Us::MAX;
                engine.restart(Us::MAX);
            }
        }
        let multiproc = engine.profile.kind == EngineKind::Vllm && (engine.profile.ranks > 1 || !engine.profile.on_gpu);
        if multiproc && matches!(self.way, Way::Step | Way::Rank(_)) && self.look != Look::Lock
            || matches!(self.way, Way::Rank(_))
        {
            let jitter = chance.exponential(SECOND);
            (1..5).for_each(|minute| env.log.push((now + minute * 60 * SECOND + jitter, "vllm-shm-broadcast")));
        }
    }

    /// May a stall of this fault be called so, with the signals that this engine gives? What cannot be told apart from outside is
    /// accepted under either name.
    pub fn accepts(&self, profile: &Profile, class: &StallClass) -> bool {
        if let (true, StallClass::RankSilent { ranks }) = (profile.engines > 1, class) {
            // one engine of several that stands while another works is named by its ranks
            return self.whole_pod || ranks.iter().all(|rank| rank / self.ranks_named(profile) == profile.place);
        }
        let pages = profile.signals.page;
        let native = profile.kind == EngineKind::Native;
        // these burn, whatever the stuck thread itself does
        let turns = matches!(self.way, Way::Livelock | Way::Decode | Way::Rank(_));
        let plain = |class: &StallClass| match self.look {
            _ if turns => matches!(class, StallClass::DeviceWait | StallClass::StepStalled),
            Look::Spin => matches!(class, StallClass::DeviceWait | StallClass::StepStalled),
            _ => matches!(class, StallClass::StepStalled),
        };
        match (self.way, class) {
            (_, StallClass::Unkillable) => self.undead,
            (way, StallClass::ProcessDied) => {
                way == Way::CoreGone && profile.signals.proc && profile.kind.core_title().is_some()
            }
            (Way::Startup, class) => *class == StallClass::StartupStalled,
            // without its own probe nobody can tell a silent front end from a silent engine, nor one that works on from one that spins
            (Way::Front, StallClass::FrontendStalled) => true,
            (Way::Front, class) => {
                !profile.signals.frontend
                    && matches!(class, StallClass::StepStalled | StallClass::AdmissionStalled | StallClass::DeviceWait)
            }
            // a loop that stands between two steps with people waiting admits nobody: both names are true
            (Way::Anywhere | Way::CoreGone, StallClass::AdmissionStalled) => true,
            // its queue goes on and counts who comes, as that of a loop which lets nobody in
            (Way::Step | Way::Rank(_), StallClass::AdmissionStalled) if profile.kind == EngineKind::Tgi => true,
            // a process of one program that stopped while its loop was idle: its front end is what the work waits for
            (Way::Anywhere, StallClass::FrontendStalled) if native => true,
            (Way::Admission, class) => *class == StallClass::AdmissionStalled || (!native && plain(class)),
            // from outside, a foreign loop that hands nothing out and counts nothing is a step that does not end
            // while it still takes prompts in, prefill moves and decode does not
            (Way::Livelock, class) => {
                matches!(class, StallClass::Livelock | StallClass::DecodeStalled) || (!native && plain(class))
            }
            (Way::Decode, class) => {
                *class == StallClass::DecodeStalled || *class == StallClass::Livelock || (!native && plain(class))
            }
            (Way::Rank(rank), StallClass::RankSilent { ranks }) => !pages || ranks.contains(&rank),
            (Way::Rank(_), class) => !pages && plain(class),
            // stopping every rank at once names none; naming one is wrong only where pages would show it
            (Way::Step | Way::Anywhere | Way::CoreGone, StallClass::RankSilent { .. }) => !pages,
            (Way::Step | Way::Anywhere | Way::CoreGone | Way::Crash, class) => plain(class),
        }
    }

    /// Ranks of one engine, as those that are named count them: pages are one a rank, series of `/metrics` one an engine.
    fn ranks_named(&self, profile: &Profile) -> u32 {
        if profile.signals.page { profile.ranks.max(1) } else { 1 }
    }
}
