//! The detector's ear at the gate: asks it every tick while work stands still; now and then while answers move on, for then its counters
//! are read where it keeps them; and hardly ever while it owes none, for it calls when work comes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::oneshot;
use vitals::observation::{GateObs, Signal};

use crate::gate::control::{GateClient, answers, socket_in};
use crate::gate::counts;
use crate::gate::ledger::{Control, GateReply};
use crate::gate::memory::{kept_beside, recall};
use crate::gate::suspects::Suspect;
use crate::sources::clock::monotonic_ms;

/// A gate that owes nothing, or delivers, is asked once a second, at the tick that comes about then.
const ASK_MS: u64 = 950;
/// What one look without an answer counts for at most.
const BETWEEN_MS_MAX: u64 = 1_000;
/// After so much silence it is asked once, aside, and its answer is waited for: what looks like a hang on a machine that gives it hardly any time
/// is none, and its end would lose what goes through it.
const PATIENT_FROM_MS: u64 = 10_000;
const PATIENT_WAIT: Duration = Duration::from_secs(10);

/// What is known of the gate.
#[derive(Debug)]
pub struct GateEar {
    client: GateClient,
    /// Its counters, growing older while it is silent.
    pub seen: Signal<GateObs>,
    /// Its last answer, unless it was silent since.
    pub reply: Option<GateReply>,
    /// For how long it has been there and has not answered; no more than [`PATIENT_FROM_MS`] before it was waited for in vain.
    pub hangs_ms: u64,
    silent_ms: u64,
    patient: Patient,
    socket: PathBuf,
    /// It has called, and was not asked since.
    called: bool,
    /// When it was asked last, and what of fence, drain and leave it was told.
    asked: Option<(u64, [bool; 3])>,
}

/// The question whose answer is waited for.
#[derive(Debug)]
enum Patient {
    Unasked,
    Waits(oneshot::Receiver<bool>),
    /// In vain, when the silence had lasted for so long.
    InVain(u64),
}

impl GateEar {
    /// Nothing is asked yet.
    pub fn new(agent_dir: &Path) -> Self {
        let socket = socket_in(agent_dir);
        Self {
            client: GateClient::new(socket.clone()),
            seen: Signal::default(),
            reply: None,
            hangs_ms: 0,
            silent_ms: 0,
            patient: Patient::Unasked,
            socket,
            called: false,
            asked: None,
        }
    }

    /// Is it time to ask? No where it is known to be what it shall be, to have been there a moment ago, and either to owe nothing or to
    /// deliver.
    pub fn is_due(&mut self, now_ms: u64, control: &Control) -> bool {
        let calls = self.called || self.client.calls();
        let idle = self.reply.as_ref().is_some_and(|reply| reply.obs.in_flight == 0);
        let told =
            self.asked.is_some_and(|(at_ms, orders)| orders == of(control) && now_ms.saturating_sub(at_ms) < ASK_MS);
        calls || !told || !(idle || self.delivers())
    }

    /// Takes over what the gate has counted since, if chunks are among it: only somebody who lives has counted those. Where they stand still
    /// nobody knows whose silence it is, a client that blocks is known by its own request, and of a gate that owes nothing any more only
    /// its answer says that it will call: then it is asked.
    fn delivers(&mut self) -> bool {
        let Some(reply) = self.reply.as_mut().filter(|reply| reply.obs.client_blocked == 0) else { return false };
        let Some(counts) = self.client.counts() else { return false };
        let now = counts::renewed(&counts, &reply.obs);
        let moved = now.epoch == reply.obs.epoch && now.chunks_delivered > reply.obs.chunks_delivered;
        if !moved || now.in_flight == 0 {
            return false;
        }
        self.seen.at_ms = monotonic_ms();
        self.seen.value.get_or_insert_default().clone_from(&now);
        reply.obs = now;
        true
    }

    /// Returns when the gate calls, or goes.
    pub async fn called(&mut self) {
        self.client.called().await;
        self.called = true;
    }

    /// Tells the gate what it shall be, and takes its counters; `None` where it is silent.
    pub async fn ask(&mut self, control: &Control) -> Option<&GateReply> {
        let answer = self.client.exchange(control).await;
        self.called = false;
        let now_ms = monotonic_ms();
        // a pause of ours, between two looks, is no silence of the gate's
        let between_ms = self.asked.map_or(0, |(before_ms, _)| now_ms.saturating_sub(before_ms).min(BETWEEN_MS_MAX));
        self.silent_ms = if answer.as_ref().is_err_and(hangs) { self.silent_ms + between_ms } else { 0 };
        self.be_patient();
        self.asked = Some((now_ms, of(control)));
        self.reply = match answer {
            Ok(heard) => {
                self.seen.at_ms = heard.at_ms;
                self.seen.value.get_or_insert_default().clone_from(&heard.reply.obs);
                Some(heard.reply)
            }
            Err(error) => {
                tracing::debug!(%error, "the gate did not answer");
                None
            }
        };
        self.reply.as_ref()
    }

    /// Does the silence last for long, is the gate asked as one that is slow; only one that leaves that unanswered, too, hangs for longer.
    fn be_patient(&mut self) {
        let asked = match &mut self.patient {
            Patient::Waits(answer) => answer.try_recv(),
            Patient::Unasked | Patient::InVain(_) => Err(oneshot::error::TryRecvError::Empty),
        };
        match asked {
            Ok(true) => (self.silent_ms, self.patient) = (0, Patient::Unasked),
            Ok(false) | Err(oneshot::error::TryRecvError::Closed) => self.patient = Patient::InVain(self.silent_ms),
            Err(oneshot::error::TryRecvError::Empty) => {}
        }
        // a successor that is silent, too, is asked for itself
        let over = |in_vain_ms: u64| self.silent_ms >= in_vain_ms + PATIENT_FROM_MS;
        if self.silent_ms < PATIENT_FROM_MS || matches!(self.patient, Patient::InVain(at_ms) if over(at_ms)) {
            self.patient = Patient::Unasked;
        }
        if self.silent_ms >= PATIENT_FROM_MS && matches!(self.patient, Patient::Unasked) {
            let (tell, told) = oneshot::channel();
            let socket = self.socket.clone();
            tokio::spawn(async move { tell.send(answers(&socket, PATIENT_WAIT).await) });
            self.patient = Patient::Waits(told);
        }
        let known = matches!(self.patient, Patient::InVain(_));
        self.hangs_ms = if known { self.silent_ms } else { self.silent_ms.min(PATIENT_FROM_MS) };
    }

    /// By its last answer nothing is in flight.
    pub fn owes_nothing(&self) -> bool {
        self.seen.value.as_ref().is_some_and(|gate| gate.in_flight == 0)
    }

    /// By what the gate knows the agent's own question; `None` where it did not answer the last look, empty where it knows it by nothing.
    pub fn own(&self) -> Option<&str> {
        self.reply.as_ref().map(|_| self.client.own().unwrap_or_default())
    }

    /// Who could have stalled the engine, by the gate; `None` where it is silent.
    pub async fn suspects(&mut self) -> Option<Vec<Suspect>> {
        self.client.suspects().await.ok()
    }
}

/// What the gate was told last, by whoever was its detector then.
pub fn told_last(agent_dir: &Path) -> Control {
    recall(&kept_beside(&socket_in(agent_dir)))
}

/// Is there somebody who does not answer? Where nobody is, the supervisor starts a new one anyway.
fn hangs(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

fn of(control: &Control) -> [bool; 3] {
    [control.fenced, control.draining, control.leaving]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::control;
    use crate::gate::ledger::{End, Ledger};
    use crate::gate::work::Asked;
    use heartbeat::counts::CountsWriter;
    use std::sync::Arc;
    use tokio::net::UnixListener;

    const STREAM: Asked = Asked { prompt_tokens: 9, stream: true, print: None };
    /// Bound for anything that should be quick, on a busy machine.
    const SOON: Duration = Duration::from_secs(20);

    /// Asks until the gate answers, which a busy machine may put off for longer than a question waits.
    async fn answered(ear: &mut GateEar, control: &Control) -> GateReply {
        let asked = async {
            while ear.ask(control).await.is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, asked).await.expect("the gate never answers");
        ear.reply.clone().unwrap()
    }

    /// Where a gate of this directory would listen.
    fn socket_of(dir: &tempfile::TempDir) -> std::path::PathBuf {
        let socket = socket_in(dir.path());
        std::fs::create_dir(socket.parent().unwrap()).unwrap();
        socket
    }

    #[tokio::test]
    async fn a_gate_that_delivers_is_read_and_one_that_stands_still_is_asked_at_every_tick() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Arc::new(Ledger::new(1, Control::default()).telling(CountsWriter::create("test").ok()));
        let socket = UnixListener::bind(socket_of(&dir)).unwrap();
        tokio::spawn(control::serve(socket, Arc::clone(&ledger), kept_beside(&socket_in(dir.path()))));
        let (mut ear, open) = (GateEar::new(dir.path()), Control::default());
        let id = ledger.open(monotonic_ms(), STREAM);
        answered(&mut ear, &open).await;
        let (now_ms, _) = ear.asked.unwrap();
        let shut = Control { fenced: true, ..open.clone() };
        assert!(ear.is_due(now_ms, &open), "nothing is delivered yet");
        ledger.delivered(id, now_ms, 5);
        assert!(ear.is_due(now_ms, &shut), "it shall be something else");
        assert!(ear.is_due(now_ms + ASK_MS, &open), "it was not heard for long");
        assert!(!ear.is_due(now_ms, &open), "it delivers");
        let seen = ear.seen.value.clone().unwrap();
        assert_eq!((seen.chunks_delivered, seen.bytes_delivered, seen.awaiting_first_byte), (1, 5, 0));
        assert_eq!(seen, ear.reply.as_ref().unwrap().obs);
        assert!(ear.seen.at_ms >= now_ms);
        assert!(ear.is_due(now_ms, &open), "nothing came since: it may be the gate that hangs");
        ledger.delivered(id, now_ms, 5);
        ledger.close(id, now_ms, End::Completed);
        assert!(ear.is_due(now_ms, &open), "it owes nothing, and must be told to call");
        assert_eq!(answered(&mut ear, &open).await.obs.in_flight, 0);
        assert!(!ear.is_due(now_ms, &open));
    }
    #[tokio::test]
    async fn a_gate_that_is_there_and_does_not_answer_hangs_and_one_that_is_not_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut ear = GateEar::new(dir.path());
        let ask = async |ear: &mut GateEar| {
            for _ in 0..3 {
                ear.ask(&Control::default()).await;
            }
            ear.hangs_ms
        };
        assert_eq!(ask(&mut ear).await, 0, "nobody is there");
        // takes connections until its queue is full, and hears nobody
        let frozen = std::os::unix::net::UnixListener::bind(socket_of(&dir)).unwrap();
        assert!((100..=3 * BETWEEN_MS_MAX).contains(&ask(&mut ear).await), "{}", ear.hangs_ms);
        frozen.set_nonblocking(true).unwrap();
        let ledger = Arc::new(Ledger::new(1, Control::default()));
        let socket = UnixListener::from_std(frozen).unwrap();
        tokio::spawn(control::serve(socket, ledger, kept_beside(&socket_in(dir.path()))));
        // (each look that a busy machine lets it miss is one more)
        let goes_on = async {
            while ask(&mut ear).await > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, goes_on).await.expect("it goes on");
    }

    #[tokio::test]
    async fn a_gate_that_is_slow_is_waited_for_before_it_hangs_for_long() {
        let dir = tempfile::tempdir().unwrap();
        let mut ear = GateEar::new(dir.path());
        let socket = UnixListener::bind(socket_of(&dir)).unwrap();
        ear.silent_ms = 30_000;
        ear.be_patient();
        assert_eq!(ear.hangs_ms, PATIENT_FROM_MS, "nobody knows yet");
        let ledger = Arc::new(Ledger::new(1, Control::default()));
        let slow = tokio::spawn(control::serve(socket, ledger, kept_beside(&socket_in(dir.path()))));
        while ear.silent_ms > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            ear.be_patient();
        }
        assert_eq!(ear.hangs_ms, 0, "it answered in the end");
        slow.abort();
        let _ = slow.await;
        (ear.silent_ms, ear.patient) = (30_000, Patient::InVain(25_000));
        ear.be_patient();
        assert_eq!(ear.hangs_ms, 30_000);
        ear.silent_ms = 35_000;
        ear.be_patient();
        assert!(ear.hangs_ms == PATIENT_FROM_MS && matches!(ear.patient, Patient::Waits(_)), "{ear:?}");
    }
}
