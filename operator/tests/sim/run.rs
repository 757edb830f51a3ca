//! One run: the real operator (elector, controllers, client) in two processes of this world, in virtual time, on one
//! thread, with the acts of a story. Ends with what was violated and the hash of all that happened.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use jiff::SignedDuration;
use operator::{
    client::{Calls, FleetPolicy},
    controllers::driver,
    health::Health,
    leader::{Leadership, elector::Elector},
    metrics::Metrics,
    wall::Wall,
};
use tokio::{sync::Notify, task::JoinHandle, time::sleep_until};

use super::{
    act::{self, Act},
    checks,
    clocks::Clock,
    cluster::Cluster,
    end,
    ice::{Freezable, Ice},
    nodes,
    passes::Caller,
    patience,
    report::{Report, by_object},
    story::{FleetTerms, Story},
    told::Told,
    twin,
    world::{World, target},
};

/// The world moves on this grid, and only when there is something to do.
const TICK_MS: u64 = 250;
const OPERATORS: usize = 2;
/// How often it is asked whether all is in order again.
const LOOK_MS: u64 = 12_000;
/// A container starts again after its process has died.
const RESTART_MS: u64 = 1_000;
/// The successor of a pod that was asked to end starts elsewhere.
const ANOTHER_POD_MS: u64 = 30_000;
/// So long after a death or a freeze somebody leads again: the lease of the dead has run out (15 s), and a candidate has looked.
const TAKEOVER_MS: u64 = 20_000;
/// Who stays in order for so long lives to see the end of what is remembered for a time.
const TIMES_END_MS: u64 = 600_000;

/// Runs a story from beginning to end.
pub fn run(story: &Story, keep_lines: bool) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    // all of it inside: outside the runtime the clock is the machine's, and a busy machine would move the world's beginning
    runtime.expect("a runtime").block_on(async { Run::new(story, keep_lines).go(story).await })
}

struct Run {
    cluster: Arc<Cluster>,
    deaths: tokio::sync::mpsc::UnboundedReceiver<u32>,
    world: World,
    /// The one namespace that the operators look after.
    scope: Option<&'static str>,
    operators: Vec<Process>,
    /// When which place gets a new process.
    restarts: Vec<(u64, usize)>,
    thaws: Vec<(u64, usize)>,
    /// By how many milliseconds the wall clock of each place is off.
    clocks: [Arc<AtomicI64>; OPERATORS],
    /// Until when the monotonic clock of a place stands.
    standing: Vec<(u64, usize)>,
    started: u32,
    next_tick_ms: u64,
    /// Passes over a frozen copy of the world, which must come to rest (P12).
    twins: Vec<JoinHandle<Vec<String>>>,
    /// Until when an operator was dead or frozen last. (Whatever came and went meanwhile is told by the next one to lead.)
    absent_ms: u64,
    /// Do acts wait for what they are meant for?
    patient: bool,
    /// Does the status tell the truth meanwhile?
    told: Told,
}

struct Process {
    id: u32,
    task: JoinHandle<()>,
    ice: Arc<Ice>,
    /// Of its elector alone.
    campaign: Arc<Ice>,
    leadership: Arc<Leadership>,
    /// SIGTERM.
    stop: Arc<Notify>,
}

impl Run {
    fn new(story: &Story, keep_lines: bool) -> Self {
        let (cluster, deaths) = Cluster::new(story.faults.clone(), keep_lines);
        let lease = target("leases", "truebeat-system", "truebeat-operator", "user");
        cluster.lock().checks.scope = story.scope;
        nodes::join(&mut cluster.lock().store);
        cluster.lock().store.create(&lease, operator::manifests::lease()).expect("the installation's Lease");
        let mut world = World::new(1);
        (world.garbage_ms, world.fleet) = (story.garbage_ms, story.fleet);
        Run {
            cluster,
            deaths,
            world,
            scope: story.scope,
            operators: Vec::new(),
            restarts: Vec::new(),
            thaws: Vec::new(),
            clocks: Default::default(),
            standing: Vec::new(),
            started: 0,
            next_tick_ms: 0,
            twins: Vec::new(),
            absent_ms: 0,
            patient: story.patient,
            told: Told::of(story),
        }
    }

    async fn go(mut self, story: &Story) -> Report {
        for place in 0..OPERATORS {
            let process = self.start(place);
            self.operators.push(process);
        }
        let last_act = story.acts.iter().map(|(at, _)| *at).max().unwrap_or(0);
        // (an act of the last moment is one as well)
        let over_ms = on_grid(story.faults.over_ms().max(last_act)) + TICK_MS;
        self.until(over_ms, &story.acts).await;
        let over_ms = over_ms.max(on_grid(self.cluster.now_ms()));
        let calm_ms = self.settled(over_ms, story.settle_ms, story.faults.rates.watch_elided > 0).await;
        let mut violations = end::in_order(&self.cluster.lock(), &self.world);
        let before = self.cluster.lock().checks.writes.clone();
        let mut ends = end::ends_by_time(&self.cluster.lock());
        ends.retain(|_, _| story.stay_ms >= TIMES_END_MS);
        self.until(calm_ms + story.stay_ms, &[]).await;
        for twin in std::mem::take(&mut self.twins) {
            let said = twin.await.unwrap_or_else(|_| vec!["P12: the second pass panicked".to_owned()]);
            self.cluster.lock().checks.violations.extend(said);
        }
        let state = self.cluster.lock();
        let more = |(path, n): (&String, &u64)| (path.clone(), n - before.get(path).copied().unwrap_or(0));
        // a node's suspicion ends by its time alone, and once
        let most = |path: &str| {
            let by_time = ends.iter().find(|(object, _)| path.trim_end_matches("/status").ends_with(object.as_str()));
            by_time.map_or(0, |(_, count)| *count).max(u64::from(path.contains("/nodes/")))
        };
        let new: Vec<_> = state.checks.writes.iter().map(more).filter(|(path, n)| *n > most(path)).collect();
        if !new.is_empty() {
            violations.push(format!("P7: writes while nothing happens: {new:?}"));
        }
        violations.extend(end::in_order(&state, &self.world).into_iter().map(|what| format!("after a while: {what}")));
        violations.splice(0..0, state.checks.violations.clone());
        violations.dedup();
        Report {
            hash: state.log.hash(),
            writes: state.writes,
            effective: state.checks.effective,
            written: by_object(&state.checks.writes),
            events: state.log.count,
            virtual_ms: self.cluster.now_ms(),
            end_state: end::state(&state),
            lines: state.log.lines.clone().unwrap_or_default(),
            said: state.checks.said.clone(),
            violations,
        }
    }

    /// P4: lets the world go on until it is in order and nobody writes, and no longer than the bound; when that was. Where
    /// events were lost the bound is waited for: only then has the slow look been there.
    async fn settled(&mut self, over_ms: u64, bound_ms: u64, lossy: bool) -> u64 {
        let mut seen = None;
        for at_ms in (over_ms..over_ms + bound_ms).step_by(LOOK_MS as usize).skip(1) {
            if lossy {
                break;
            }
            self.until(at_ms, &[]).await;
            let state = self.cluster.lock();
            let led = at_ms >= self.absent_ms + TAKEOVER_MS;
            let now = (led && end::in_order(&state, &self.world).is_empty()).then_some(state.writes);
            if now.is_some() && seen == now {
                return at_ms;
            }
            seen = now;
        }
        self.until(over_ms + bound_ms, &[]).await;
        over_ms + bound_ms
    }

    /// Lets the world go on until `end_ms`, with the acts whose time comes.
    async fn until(&mut self, end_ms: u64, acts: &[(u64, Act)]) {
        let mut acts = acts.iter().peekable();
        loop {
            let now_ms = self.cluster.now_ms();
            while let Ok(id) = self.deaths.try_recv() {
                self.kill(id, now_ms);
            }
            if now_ms >= end_ms && acts.peek().is_none_or(|(at, _)| *at > now_ms) {
                return;
            }
            if now_ms >= self.next_tick_ms {
                while let Some((_, act)) = acts.next_if(|next| next.0 <= now_ms && !self.held_back(next, now_ms)) {
                    self.act(act, now_ms);
                }
                self.next_tick_ms = self.tick(now_ms);
            }
            let held = acts.peek().is_some_and(|next| self.held_back(next, now_ms));
            let next_act = acts.peek().filter(|_| !held).map_or(u64::MAX, |(at, _)| on_grid(*at));
            let end_ms = if held { u64::MAX } else { end_ms };
            self.next_tick_ms = self.next_tick_ms.min(next_act);
            let cluster = self.cluster.clone();
            tokio::select! {
                biased;
                Some(id) = self.deaths.recv() => self.kill(id, self.cluster.now_ms()),
                () = cluster.changed() => self.next_tick_ms = self.next_tick_ms.min(on_grid(cluster.now_ms() + 1)),
                () = sleep_until(cluster.at(self.next_tick_ms.min(end_ms))) => {}
            }
        }
    }

    /// Does this act, whose time has come, wait for what it is meant for?
    fn held_back(&self, (at, act): &(u64, Act), now_ms: u64) -> bool {
        let come = *at <= now_ms && now_ms < at + patience::MOST_MS;
        self.patient && come && patience::lacks(act, &self.world, &self.cluster.lock().store)
    }

    /// One step of the world; when the next one is due.
    fn tick(&mut self, now_ms: u64) -> u64 {
        let due = |list: &mut Vec<(u64, usize)>| {
            let (now, later) = list.iter().partition(|(at, _)| *at <= now_ms);
            *list = later;
            let now: Vec<(u64, usize)> = now;
            now.into_iter().map(|(_, place)| place).collect::<Vec<_>>()
        };
        for place in due(&mut self.restarts) {
            self.operators[place] = self.start(place);
        }
        for place in due(&mut self.thaws) {
            self.operators[place].ice.thaw();
        }
        for place in due(&mut self.standing) {
            self.operators[place].campaign.thaw();
        }
        self.standing.iter().for_each(|(_, place)| self.operators[*place].leadership.renewed());
        let led = self.is_led();
        let mut state = self.cluster.lock();
        let stirred = state.store.stirred;
        let reachable = state.faults.outage(now_ms).is_none();
        self.world.tick(&mut state, now_ms, reachable);
        self.told.look(&mut state, &self.world, (led, now_ms));
        let changed = state.store.stirred != stirred;
        drop(state);
        if changed {
            self.cluster.tell();
            return now_ms + TICK_MS;
        }
        let own = self.restarts.iter().chain(&self.thaws).chain(&self.standing).map(|(at, _)| *at);
        on_grid(own.fold(self.world.due_ms(now_ms), u64::min).max(now_ms + 1))
    }

    fn act(&mut self, act: &Act, now_ms: u64) {
        match act {
            Act::Kill { operator } => self.kill(self.operators[self.place(*operator)].id, now_ms),
            Act::Pause { operator, ms } => {
                let place = self.place(*operator);
                self.operators[place].ice.freeze();
                self.thaws.push((now_ms + ms, place));
                self.absent_ms = self.absent_ms.max(now_ms + ms);
            }
            Act::Clock { operator, clock } => self.misset(self.place(*operator), clock, now_ms),
            Act::Terminate { operator } => {
                let place = self.place(*operator);
                self.operators[place].stop.notify_one();
                self.restarts.push((now_ms + ANOTHER_POD_MS, place));
                self.absent_ms = self.absent_ms.max(now_ms);
            }
            Act::PassAgain => {
                self.twins.push(tokio::spawn(twin::settles(self.cluster.twin(), self.world.fleet, now_ms)))
            }
            _ => {}
        }
        let mut state = self.cluster.lock();
        let stirred = state.store.stirred;
        state.log.line(now_ms, format_args!("act {act:?}"));
        act::perform(act, &mut self.world, &mut state, now_ms);
        let changed = state.store.stirred != stirred;
        drop(state);
        if changed {
            self.cluster.tell();
        }
    }

    fn misset(&mut self, place: usize, clock: &Clock, now_ms: u64) {
        match clock {
            Clock::Off { ms } => self.clocks[place].store(*ms, Ordering::Relaxed),
            Clock::Stands { ms } => {
                self.operators[place].campaign.freeze();
                self.standing.push((now_ms + ms, place));
                // (until the last of what it sent has been answered)
                self.cluster.lock().checks.two_lead_until_ms = now_ms + ms + TICK_MS;
            }
        }
    }

    /// Is the process at work that the Lease names?
    fn is_led(&self) -> bool {
        let Some(leads) = checks::leader(&self.cluster.lock().store) else { return false };
        let at_work = |process: &Process| !process.task.is_finished() && !process.ice.holds();
        self.operators.iter().any(|process| leads == format!("operator-{}", process.id) && at_work(process))
    }

    /// Where the `nth` operator is, the one that the Lease names first.
    fn place(&self, nth: usize) -> usize {
        let state = self.cluster.lock();
        let lease = state.store.of("leases").next().map(|(_, entry)| entry.value["spec"]["holderIdentity"].clone());
        let named = |process: &Process| lease.as_ref().is_some_and(|name| *name == format!("operator-{}", process.id));
        (nth + self.operators.iter().position(named).unwrap_or(0)) % self.operators.len()
    }

    fn kill(&mut self, id: u32, now_ms: u64) {
        let Some(place) = self.operators.iter().position(|process| process.id == id) else { return };
        self.operators[place].task.abort();
        self.absent_ms = self.absent_ms.max(now_ms);
        if !self.restarts.iter().any(|(_, other)| *other == place) {
            self.restarts.push((now_ms + RESTART_MS, place));
            self.next_tick_ms = self.next_tick_ms.min(on_grid(now_ms + RESTART_MS));
        }
    }

    fn start(&mut self, place: usize) -> Process {
        self.started += 1;
        let (id, identity) = (self.started, format!("operator-{}", self.started));
        let cluster = self.cluster.clone();
        let (true_wall, off) = (wall_of(&cluster), self.clocks[place].clone());
        let wall = Wall::new(move || true_wall.now() + SignedDuration::from_millis(off.load(Ordering::Relaxed)));
        let client = cluster.client(Caller::new(id, identity.as_str()));
        let namespace = self.scope.map(str::to_owned);
        let calls = calls(client.clone(), wall.clone(), namespace.clone(), self.world.fleet);
        let leadership = calls.leadership.clone();
        let health = Arc::new(Health::new(leadership.clone(), calls.metrics.clone()));
        let mut elector = Elector::new(client, "truebeat-system", &identity, leadership.clone()).with_wall(wall);
        let context = Arc::new(driver::Context { calls, health, namespace });
        let stop = Arc::new(Notify::new());
        let (asked, campaign, held) = (stop.clone(), Arc::new(Ice::default()), leadership.clone());
        let slow = campaign.clone();
        // as `operator::cli` wires them
        let work = async move {
            tokio::select! {
                biased;
                () = (Freezable { ice: slow, inner: Box::pin(elector.run()) }) => {}
                () = driver::lead(context, &leadership) => {}
                () = asked.notified() => {}
            }
            elector.release().await;
            cluster.lock().log.line(cluster.now_ms(), format_args!("operator-{id} has ended"));
        };
        let ice = Arc::new(Ice::default());
        let task = tokio::spawn(Freezable { ice: ice.clone(), inner: Box::pin(work) });
        Process { id, task, ice, campaign, leadership: held, stop }
    }
}

/// What an operator calls the API with.
pub fn calls(client: kube::Client, wall: Wall, namespace: Option<String>, fleet: FleetTerms) -> Calls {
    let mut calls = Calls::new(client, Arc::default(), Arc::new(Metrics::new().expect("metrics")));
    calls.wall = wall;
    let FleetTerms { hold_percent, restarts_percent, place_max: (node_restarts_max, domain_restarts_max) } = fleet;
    let policy = FleetPolicy { namespace, hold_percent, restarts_percent, ..FleetPolicy::default() };
    calls.fleet = Arc::new(FleetPolicy { node_restarts_max, domain_restarts_max, ..policy });
    calls
}

pub fn wall_of(cluster: &Arc<Cluster>) -> Wall {
    let cluster = cluster.clone();
    Wall::new(move || cluster.wall())
}

fn on_grid(at_ms: u64) -> u64 {
    at_ms.div_ceil(TICK_MS) * TICK_MS
}
