//! The API server as a service: the store behind a lock, faults on the way in and out, watches as streams, and a log of
//! everything that took effect. One `Wire` per operator process, so that the server knows who asks.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use jiff::Timestamp;
use kube::client::Body;
use serde_json::json;
use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::{Instant, sleep, sleep_until},
};

use super::{
    checks::Checks,
    faults::{Fate, Faults, Side},
    kube::{
        Refusal,
        object::Object,
        store::{Backup, Store, wall},
        wire::Call,
    },
    log::Log,
    passes::{self, Caller},
};

/// The server tells how far a watch has come so long before its time is over.
const MARKED_BEFORE_END: Duration = Duration::from_secs(2);

type Failure = Box<dyn std::error::Error + Send + Sync>;
pub type Answer = Response<UnsyncBoxBody<Bytes, Failure>>;

/// Everything that the API server holds.
pub struct State {
    pub store: Store,
    pub faults: Faults,
    pub log: Log,
    pub checks: Checks,
    /// Writes of operators so far, the Lease not counted.
    pub writes: u64,
    pub backup: Option<Backup>,
}

/// The server.
pub struct Cluster {
    state: Mutex<State>,
    epoch: Instant,
    /// Not a `watch` channel: that one wakes its receivers in an order of chance.
    changed: Notify,
    /// Ids of operator processes that must die now.
    deaths: mpsc::UnboundedSender<u32>,
}

impl Cluster {
    pub fn new(faults: Faults, keep_lines: bool) -> (Arc<Self>, mpsc::UnboundedReceiver<u32>) {
        let (deaths, dead) = mpsc::unbounded_channel();
        let mut store = Store::default();
        store.version = 1000;
        let state =
            State { store, faults, log: Log::new(keep_lines), checks: Checks::default(), writes: 0, backup: None };
        let changed = Notify::new();
        (Arc::new(Cluster { state: Mutex::new(state), epoch: Instant::now(), changed, deaths }), dead)
    }

    /// A server with the same objects and clock, on which nothing else works and nothing fails.
    pub fn twin(&self) -> Arc<Self> {
        let store = self.lock().store.clone();
        let (deaths, _) = mpsc::unbounded_channel();
        let (faults, log) = (Faults::none(1), Log::new(false));
        let state = State { store, faults, log, checks: Checks::default(), writes: 0, backup: None };
        Arc::new(Cluster { state: Mutex::new(state), epoch: self.epoch, changed: Notify::new(), deaths })
    }

    /// Milliseconds of virtual time since the beginning.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The moment `ms` milliseconds after the beginning.
    pub fn at(&self, ms: u64) -> Instant {
        self.epoch + Duration::from_millis(ms)
    }

    /// The wall clock of this world.
    pub fn wall(&self) -> Timestamp {
        wall(self.now_ms())
    }

    /// The state, with its clock set; watches are told by [`Self::tell`].
    pub fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().expect("no test panics with the lock held");
        state.store.now_ms = self.now_ms();
        state
    }

    pub fn tell(&self) {
        self.changed.notify_waiters();
    }

    /// The next change that [`Self::tell`] tells of.
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }

    /// A client of one operator process.
    pub fn client(self: &Arc<Self>, caller: Caller) -> kube::Client {
        let cluster = self.clone();
        let service = tower::service_fn(move |request| cluster.clone().serve(caller.clone(), request));
        kube::Client::new(service, "default")
    }

    async fn serve(self: Arc<Self>, caller: Caller, request: Request<Body>) -> Result<Answer, Failure> {
        let (parts, body) = request.into_parts();
        let header = |name: &str| parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let body = body.collect_bytes().await?;
        let call = match Call::parse(&parts.method, &parts.uri, header("content-type"), &body) {
            Ok(call) => Call { partial: header("accept").contains(";as=PartialObjectMetadata"), ..call },
            Err(refusal) => return Ok(refused(&refusal, 0)),
        };
        let caller = Caller { work: passes::current(), ..caller };
        self.lock().checks.within_scope(&call, self.now_ms());
        let fate = self.lock().faults.fate(self.now_ms(), &call);
        match &fate {
            Fate::Refused { refusal, retry_after_s } => {
                sleep(Duration::from_millis(2)).await;
                return Ok(refused(refusal, *retry_after_s));
            }
            Fate::Silent => return std::future::pending().await,
            Fate::Unreachable => {
                sleep(Duration::from_millis(2)).await;
                return Err("connection refused".into());
            }
            Fate::Panic => panic!("simulated panic in a pass"),
            Fate::Held { ms } => {
                let (id, method, path) = (caller.id, &call.method, &call.path);
                let now_ms = self.now_ms();
                self.lock().log.line(now_ms, format_args!("operator-{id} {method} {path} waits for a webhook"));
                sleep(Duration::from_millis(*ms)).await;
            }
            Fate::Served { .. }
            | Fate::Applied504
            | Fate::AppliedBroken
            | Fate::Repeated
            | Fate::Overtaken
            | Fate::Death => {}
        }
        if call.is_watch() {
            return Ok(self.open_watch(call).await);
        }
        let (effect_ms, answer_ms) = match fate {
            Fate::Served { effect_ms, answer_ms } => (effect_ms, answer_ms),
            _ => (3, 1),
        };
        // What was sent takes effect even if its sender is frozen or gone.
        let (tell, hear) = oneshot::channel();
        let how = fate.clone();
        tokio::spawn(async move {
            sleep(Duration::from_millis(effect_ms)).await;
            let _ = tell.send(self.effect(&caller, call, &how));
        });
        let answer = match hear.await {
            Ok(Some(answer)) => answer,
            Ok(None) | Err(_) => return std::future::pending().await,
        };
        sleep(Duration::from_millis(answer_ms)).await;
        match fate {
            Fate::Applied504 => Ok(refused(&Refusal::new(504, "Timeout", "simulated timeout"), 0)),
            Fate::AppliedBroken => Err("connection reset by peer".into()),
            _ => Ok(answer),
        }
    }

    /// The moment at which a request takes effect; `None`: its writer died of it.
    fn effect(&self, caller: &Caller, call: Call, fate: &Fate) -> Option<Answer> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if *fate == Fate::Overtaken {
            state.store.touch(&call.target.key());
        }
        if !call.is_write() {
            state.checks.read(&call, self.now_ms());
            let result = call.perform(&mut state.store);
            return Some(said(&call, result));
        }
        let counted = call.target.kind.plural != "leases";
        state.writes += u64::from(counted);
        let death = state.faults.crashes.iter().find(|(at, _)| counted && *at == state.writes).map(|(_, side)| *side);
        let death = death.or((*fate == Fate::Death).then_some(Side::After));
        if death == Some(Side::Before) {
            let (id, method, path) = (caller.id, &call.method, &call.path);
            state.log.line(self.now_ms(), format_args!("operator-{id} dies before {method} {path}"));
            let _ = self.deaths.send(id);
            return None;
        }
        let stirred = state.store.stirred;
        let answer = self.write(state, caller, call, *fate == Fate::Repeated);
        if state.store.stirred != stirred {
            self.tell();
        }
        if death == Some(Side::After) {
            state.log.line(self.now_ms(), format_args!("operator-{} dies after its write", caller.id));
            let _ = self.deaths.send(caller.id);
            return None;
        }
        Some(answer)
    }

    /// Does a write, checks it, and does it again: what was done must not be done twice (P12).
    fn write(&self, state: &mut State, caller: &Caller, call: Call, repeated: bool) -> Answer {
        let now_ms = self.now_ms();
        let old = state.store.get(&call.target.key()).cloned();
        let version = state.store.version;
        let result = call.perform(&mut state.store);
        let code = result.as_ref().map_or_else(|refusal| refusal.code, |(code, _)| *code);
        let (id, method, path) = (caller.id, &call.method, &call.path);
        state.log.line(now_ms, format_args!("operator-{id} {method} {path} {code} {}", call.body));
        let effective = state.store.version != version;
        state.checks.write(&state.store, caller, &call, old.as_ref(), (code, effective, now_ms));
        let version = state.store.version;
        let name = format!("{method} {path}");
        let again = call.perform(&mut state.store);
        if state.store.version != version {
            state.checks.broken(now_ms, format!("P12: {name} takes effect again when it is sent twice"));
        }
        said(&call, if repeated { again } else { result })
    }

    async fn open_watch(self: Arc<Self>, call: Call) -> Answer {
        sleep(Duration::from_millis(2)).await;
        let from = call.query.get("resourceVersion").and_then(|v| Store::version_of(v)).unwrap_or(0);
        let seconds = call.query.get("timeoutSeconds").and_then(|v| v.parse().ok()).unwrap_or(290);
        let (cursor, epoch) = {
            let mut state = self.lock();
            if from > state.store.version {
                return refused(&Refusal::new(504, "Timeout", "Too large resource version"), 1);
            }
            let gone = from < state.store.compacted || self.dice(&mut state, |rates| rates.watch_gone);
            if gone {
                return refused(&Refusal::new(410, "Expired", "too old resource version"), 0);
            }
            (state.store.history.partition_point(|change| change.version <= from), state.store.epoch)
        };
        let end = Instant::now() + Duration::from_secs(seconds);
        let lag_ms = {
            let mut state = self.lock();
            let most = if self.now_ms() < state.faults.end_ms { state.faults.rates.watch_lag_ms } else { 0 };
            state.faults.rng.range(1, most + 5)
        };
        let marks = self.lock().faults.bookmarks && call.query.get("allowWatchBookmarks").is_some_and(|v| v == "true");
        let mark_at = end.checked_sub(MARKED_BEFORE_END).filter(|_| marks);
        let stream = Stream { cluster: self, call, cursor, epoch, end, mark_at, lag_ms, again: None };
        let frames = futures::stream::unfold(stream, |mut stream| async move {
            let line = stream.next().await?;
            Some((line.map(Frame::data), stream))
        });
        Response::new(StreamBody::new(frames).boxed_unsync())
    }

    fn dice(&self, state: &mut State, rate: impl Fn(&super::faults::Rates) -> u64) -> bool {
        let chance = rate(&state.faults.rates);
        self.now_ms() < state.faults.end_ms && state.faults.rng.permille(chance)
    }
}

enum EventFate {
    Sent { twice: bool },
    Lost,
    Broken,
    Silence,
}

struct Stream {
    cluster: Arc<Cluster>,
    call: Call,
    cursor: usize,
    epoch: u64,
    end: Instant,
    /// When a bookmark is due, if one is still to come.
    mark_at: Option<Instant>,
    lag_ms: u64,
    /// What is sent once more.
    again: Option<Bytes>,
}

impl Stream {
    /// The next line; `None`: its time is over.
    async fn next(&mut self) -> Option<Result<Bytes, Failure>> {
        if let Some(line) = self.again.take() {
            return Some(Ok(line));
        }
        loop {
            let cluster = self.cluster.clone();
            let mut changed = std::pin::pin!(cluster.changed());
            changed.as_mut().enable(); // before the look, so that nothing falls in between
            let line = if let Some((event, object, at_ms)) = self.find() {
                sleep_until(self.cluster.at(at_ms + self.lag_ms)).await;
                let text = self.call.text_of(&object);
                [format!(r#"{{"type":"{event}","object":"#).as_bytes(), &text, b"}\n"].concat()
            } else if self.mark_at.take_if(|at| *at <= Instant::now()).is_some() {
                self.bookmark()
            } else {
                tokio::select! {
                    biased;
                    () = changed => {}
                    () = sleep_until(self.mark_at.unwrap_or(self.end)) => { self.mark_at?; }
                }
                continue;
            };
            match self.event_fate() {
                EventFate::Silence => return std::future::pending().await,
                EventFate::Broken => return Some(Err("connection reset by peer".into())),
                EventFate::Lost => {}
                EventFate::Sent { twice } => {
                    let line = Bytes::from(line);
                    self.again = twice.then(|| line.clone());
                    return Some(Ok(line));
                }
            }
        }
    }

    /// Up to which version all was told: the object has a kind and a version, and nothing else.
    fn bookmark(&self) -> Vec<u8> {
        let version = self.cluster.lock().store.version_text();
        let object = json!({
            "apiVersion": self.call.target.kind.api_version(), "kind": self.call.target.kind.kind,
            "metadata": {"resourceVersion": version, "creationTimestamp": null},
        });
        format!("{}\n", json!({"type": "BOOKMARK", "object": object})).into_bytes()
    }

    fn event_fate(&self) -> EventFate {
        let mut state = self.cluster.lock();
        let now_ms = self.cluster.now_ms();
        if state.store.epoch != self.epoch {
            return EventFate::Broken;
        }
        match state.faults.outage(now_ms) {
            Some(outage) if outage.black_hole => return EventFate::Silence,
            Some(_) => return EventFate::Broken,
            None => {}
        }
        match state.faults.ruled(now_ms, &self.call) {
            Some(Fate::Silent) => return EventFate::Silence,
            Some(_) => return EventFate::Broken,
            None => {}
        }
        if self.cluster.dice(&mut state, |rates| rates.watch_broken) {
            EventFate::Broken
        } else if self.cluster.dice(&mut state, |rates| rates.watch_elided) {
            EventFate::Lost
        } else {
            EventFate::Sent { twice: self.cluster.dice(&mut state, |rates| rates.watch_doubled) }
        }
    }

    fn find(&mut self) -> Option<(&'static str, Arc<Object>, u64)> {
        let state = self.cluster.lock();
        let target = &self.call.target;
        while let Some(change) = state.store.history.get(self.cursor) {
            self.cursor += 1;
            let ours = change.plural == target.kind.plural
                && (target.namespace.is_empty() || change.value["metadata"]["namespace"] == target.namespace.as_str());
            if ours && self.call.selects(&change.value) {
                return Some((change.event, change.value.clone(), change.at_ms));
            }
        }
        None
    }
}

fn said(call: &Call, result: Result<(u16, Arc<Object>), Refusal>) -> Answer {
    match result {
        Ok((code, object)) => answered(code, call.text_of(&object)),
        Err(refusal) => refused(&refusal, 0),
    }
}

fn answered(code: u16, text: Bytes) -> Answer {
    let body = http_body_util::Full::new(text).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = http::StatusCode::from_u16(code).expect("a status");
    response
}

fn refused(refusal: &Refusal, retry_after_s: u64) -> Answer {
    let mut status = refusal.status();
    if retry_after_s > 0 {
        status["details"]["retryAfterSeconds"] = json!(retry_after_s);
    }
    answered(refusal.code, Bytes::from(status.to_string()))
}
