//! The restart budget under every order of events: two operators that race, crash and sleep at each of their steps,
//! agents that stall, clear, grant themselves nothing and are replaced, against a store with resourceVersions.
//!
//! The steps are those of `gather` and `execute`: read the status, read the pods, store the grants under the version that
//! was read, tell the pods. The invariant is about what happens to engines, not about what the status says (I2).

use crds::{Grant, inference_deployment::RecoveryMode};
use proptest::prelude::*;

use super::{
    escalate::Terms,
    grants,
    observed::{EpisodeView, PodView},
    testing::pod,
};

const PODS: usize = 4;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// The operator makes its next step.
    Operator(usize),
    /// The operator dies and starts anew.
    Crash(usize),
    /// The pod's engine stalls, or its stall is confirmed.
    Stall(usize),
    /// The agent acts: kills if it sees its grant, recovers if it has killed.
    Agent(usize),
    /// A suspicion or stall ends by itself.
    Clear(usize),
    /// The pod is deleted and replaced by another with the same name.
    Replace(usize),
    /// The pod's episode condition is not there for a while (and the pod is not ready).
    Silence(usize),
}

/// Where an operator is in its pass.
#[derive(Debug, Clone, Default)]
enum At {
    #[default]
    Idle,
    ReadStatus(u64, Vec<Grant>),
    ReadPods(u64, Vec<Grant>, Vec<PodView>),
    Stored(Vec<Grant>, Vec<PodView>, usize),
}

#[derive(Debug, Clone)]
struct Replica {
    view: PodView,
    silent: bool,
    episodes: u32,
}

#[derive(Debug)]
struct World {
    version: u64,
    grants: Vec<Grant>,
    replicas: Vec<Replica>,
    operators: [At; 2],
    max_unavailable: i32,
    replaced: u32,
}

impl World {
    fn new(max_unavailable: i32) -> Self {
        let replicas = (0..PODS).map(|n| Replica { view: idle(n, 0), silent: false, episodes: 0 }).collect();
        World { version: 1, grants: Vec::new(), replicas, operators: Default::default(), max_unavailable, replaced: 0 }
    }

    /// What the API shows of the pods.
    fn pods(&self) -> Vec<PodView> {
        let shown = |replica: &Replica| {
            let mut view = replica.view.clone();
            if replica.silent {
                view.episode = EpisodeView::None;
            }
            view
        };
        self.replicas.iter().map(shown).collect()
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Operator(i) => self.operator(i),
            Event::Crash(i) => self.operators[i] = At::Idle,
            Event::Stall(n) => self.stall(n),
            Event::Agent(n) => self.agent(n),
            Event::Clear(n) if self.stage(n) == "Suspect" || self.stage(n) == "Stalled" => self.set_stage(n, "Cleared"),
            Event::Clear(_) => {}
            Event::Silence(n) => self.replicas[n].silent = self.stage(n) == "Stalled",
            Event::Replace(n) => {
                self.replaced += 1;
                self.replicas[n] = Replica { view: idle(n, self.replaced), silent: false, episodes: 0 };
            }
        }
    }

    fn operator(&mut self, i: usize) {
        self.operators[i] = match std::mem::take(&mut self.operators[i]) {
            At::Idle => At::ReadStatus(self.version, self.grants.clone()),
            At::ReadStatus(version, held) => At::ReadPods(version, held, self.pods()),
            At::ReadPods(version, held, pods) => {
                let next =
                    grants::next(&held, &pods, &Terms::simple(RecoveryMode::Recover, self.max_unavailable), "now");
                if next == held {
                    At::Stored(next, pods, 0)
                } else if version == self.version {
                    self.version += 1;
                    self.grants.clone_from(&next);
                    At::Stored(next, pods, 0)
                } else {
                    At::Idle // 409: somebody else wrote
                }
            }
            At::Stored(_, pods, n) if n == pods.len() => At::Idle,
            At::Stored(stored, pods, n) => {
                if let Some(grant) = grants::to_announce(&stored, &pods[n]) {
                    let live = self.replicas.iter_mut().find(|r| r.view.uid == pods[n].uid); // UID precondition
                    live.into_iter().for_each(|r| r.view.grant = Some(grant.episode.clone()));
                }
                At::Stored(stored, pods, n + 1)
            }
        };
    }

    fn stage(&self, n: usize) -> String {
        self.replicas[n].view.reported().map(|r| r.episode.stage.clone()).unwrap_or_default()
    }

    fn stall(&mut self, n: usize) {
        match self.stage(n).as_str() {
            "Suspect" => self.set_stage(n, "Stalled"),
            "" | "Recovered" | "Cleared" => {
                self.replicas[n].episodes += 1;
                self.set_stage(n, "Suspect");
            }
            _ => {}
        }
    }

    /// The agent needs no look at silence: it always knows its own episode.
    fn agent(&mut self, n: usize) {
        self.replicas[n].silent = false;
        let view = &self.replicas[n].view;
        let granted = view.open_episode().is_some_and(|e| e.awaits_grant() && view.grant.as_ref() == Some(&e.id));
        match self.stage(n).as_str() {
            "Stalled" if granted => self.set_stage(n, "Killed"),
            "Killed" => self.set_stage(n, "Recovered"),
            _ => {}
        }
    }

    fn set_stage(&mut self, n: usize, stage: &str) {
        let replica = &mut self.replicas[n];
        let uid = replica.view.uid.clone();
        let id = format!("{uid}-{}", replica.episodes);
        let grant = replica.view.grant.take();
        replica.view = PodView { uid, grant, ..pod(&format!("p{n}"), stage, 0) };
        if let EpisodeView::Known(reported) = &mut replica.view.episode {
            reported.episode.id = id;
        }
    }

    /// Engines that were killed by a grant and do not serve yet, or may be killed at any moment.
    fn in_restart(&self) -> usize {
        let granted = |view: &PodView| {
            view.open_episode().is_some_and(|e| e.awaits_grant() && view.grant.as_ref() == Some(&e.id))
        };
        let killed = |view: &PodView| view.open_episode().is_some_and(|e| e.stage == "Killed");
        self.replicas.iter().filter(|r| granted(&r.view) || killed(&r.view)).count()
    }
}

fn idle(n: usize, incarnation: u32) -> PodView {
    PodView {
        uid: format!("u{n}.{incarnation}"),
        episode: EpisodeView::None,
        ready: true,
        ..pod(&format!("p{n}"), "Recovered", 0)
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        10 => (0..2_usize).prop_map(Event::Operator),
        1 => (0..2_usize).prop_map(Event::Crash),
        4 => (0..PODS).prop_map(Event::Stall),
        4 => (0..PODS).prop_map(Event::Agent),
        1 => (0..PODS).prop_map(Event::Clear),
        1 => (0..PODS).prop_map(Event::Replace),
        1 => (0..PODS).prop_map(Event::Silence),
    ];
    proptest::collection::vec(event, 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_budget_holds_at_every_instant(events in events(), max_unavailable in 1..3_i32) {
        let mut world = World::new(max_unavailable);
        let budget = usize::try_from(max_unavailable).unwrap();
        for (at, event) in events.iter().enumerate() {
            world.apply(*event);
            prop_assert!(world.in_restart() <= budget, "{} restarts after event {at} {event:?}: {world:#?}", world.in_restart());
            prop_assert!(world.grants.len() <= budget, "grants: {:?}", world.grants);
        }
    }

    /// ESR (P4): when the faults end, every stall is granted, killed and recovered in turn, and the budget is free again.
    #[test]
    fn every_stall_is_recovered_in_the_end(events in events()) {
        let mut world = World::new(1);
        events.iter().for_each(|event| world.apply(*event));
        for _ in 0..PODS * 40 {
            (0..2).for_each(|i| world.apply(Event::Operator(i)));
            for n in 0..PODS {
                if world.stage(n) == "Suspect" {
                    world.apply(Event::Stall(n));
                }
                world.apply(Event::Agent(n));
            }
        }
        let open = world.replicas.iter().filter(|r| r.view.open_episode().is_some()).count();
        prop_assert_eq!((open, world.grants.len()), (0, 0), "{:#?}", world);
    }
}
