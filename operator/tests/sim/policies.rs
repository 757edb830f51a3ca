//! What the story of a seed draws of policies: those of specs and of the fleet, a neighbour in another namespace, and what only some policies
//! meet. All of it comes from dice of its own, so that the other acts of a seed are what they would be without.

use serde_json::{Value, json};

use super::{
    act::Act,
    broken::Fault,
    fields::POISON,
    rng::Rng,
    story::{FleetTerms, spec},
};

/// A hold is tried after a minute, what was tried must serve for another, and each of a few replicas may need its turn, with another
/// operator in between.
const HELD_MS: u64 = 900_000;

/// What a seed has drawn, and the dice.
pub struct Policies {
    dice: Rng,
    pub fleet: FleetTerms,
    pub bookmarks: bool,
    holds: bool,
}

impl Policies {
    pub fn new(seed: u64) -> Self {
        let mut dice = Rng::new(seed ^ 0x0901_1c1e);
        let fleet = FleetTerms {
            hold_percent: *dice.pick(&[100, 100, 100, 30]),
            restarts_percent: *dice.pick(&[10, 10, 50, 100]),
            place_max: (*dice.pick(&[2, 2, 1, 0]), *dice.pick(&[0, 0, 1])),
        };
        let bookmarks = !dice.permille(200);
        Policies { dice, holds: fleet.hold_percent < 100, fleet, bookmarks }
    }

    /// Gives this spec policies by chance.
    pub fn vary(&mut self, spec: &mut Value) {
        let dice = &mut self.dice;
        spec["recovery"]["maxUnavailable"] = json!(dice.pick(&[1, 1, 2, 3]));
        spec["recovery"]["lastReplica"] = json!(dice.pick(&["Serve", "Serve", "Fence"]));
        spec["scaling"] = json!({"duringIncidents": dice.pick(&["Follow", "Follow", "NoScaleIn", "Hold"])});
        spec["rollout"] = json!({"onFailure": dice.pick(&["RollBack", "RollBack", "Hold"])});
        if dice.permille(250) {
            self.holds = true;
            spec["recovery"]["holdPercent"] = json!(dice.pick(&[40, 60, 80]));
            spec["recovery"]["trialAfter"] = json!("1m");
        }
    }

    /// Somebody else's deployment of the same name.
    pub fn neighbour(&mut self) -> Option<(u64, Act)> {
        if !self.dice.permille(300) {
            return None;
        }
        let mut spec = spec(self.dice.range(1, 4), "Recover");
        self.vary(&mut spec);
        Some((self.dice.range(0, 10_000), Act::Create { name: "elsewhere/chat", spec }))
    }

    /// A quota for a time; and where stalls are mended, a request that freezes engines and a memory error of a GPU.
    pub fn troubles(&mut self, mode: &str, end_ms: u64) -> Vec<(u64, Act)> {
        let (dice, mut acts) = (&mut self.dice, Vec::new());
        if dice.permille(150) {
            let from_ms = dice.range(10_000, end_ms - 1);
            acts.push((from_ms, Act::Quota { pods: Some(dice.range(1, 6) as usize) }));
            acts.push((dice.range(from_ms, end_ms), Act::Quota { pods: None }));
        }
        if mode != "Recover" {
            return acts;
        }
        for _ in 0..if dice.permille(150) { dice.range(1, 4) } else { 0 } {
            acts.push((dice.range(10_000, end_ms), Act::Poison { nth: dice.range(0, 4) as usize, request: POISON }));
        }
        if dice.permille(100) {
            let fault = Fault { code: 94, remedy: "RestartApplication" };
            let node = dice.range(0, 4) as usize;
            acts.push((dice.range(10_000, end_ms), Act::GpuFault { node, fault, dies: dice.permille(300) }));
        }
        acts
    }

    /// How much longer than without policies it may take until all is in order.
    pub fn patience_ms(&self) -> u64 {
        if self.holds { HELD_MS } else { 0 }
    }
}
