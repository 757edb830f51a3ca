//! The detector's ear at the gate: asks it every tick while it owes work, and hardly ever while it owes none, for it calls when work comes.

use std::path::Path;

use vitals::observation::{GateObs, Signal};

use crate::gate::control::GateClient;
use crate::gate::ledger::{Control, GateReply};
use crate::gate::suspects::Suspect;
use crate::sources::clock::monotonic_ms;

/// A gate that owes nothing is asked this often.
const ASK_MS: u64 = 1_000;

/// What is known of the gate.
#[derive(Debug)]
pub struct GateEar {
    client: GateClient,
    /// Its counters, growing older while it is silent.
    pub seen: Signal<GateObs>,
    /// Its last answer, unless it was silent since.
    pub reply: Option<GateReply>,
    /// It has called, and was not asked since.
    called: bool,
    /// When it was asked last, and what of fence, drain and leave it was told.
    asked: Option<(u64, [bool; 3])>,
}

impl GateEar {
    /// Nothing is asked yet.
    pub fn new(agent_dir: &Path) -> Self {
        let client = GateClient::new(agent_dir.join("gate.sock"));
        Self { client, seen: Signal::default(), reply: None, called: false, asked: None }
    }

    /// Is it time to ask? No where it is known to owe nothing, to be what it shall be, and to have been there a moment ago.
    pub fn is_due(&mut self, now_ms: u64, control: &Control) -> bool {
        let calls = self.called || self.client.calls();
        let idle = self.reply.as_ref().is_some_and(|reply| reply.obs.in_flight == 0);
        let told =
            self.asked.is_some_and(|(at_ms, orders)| orders == of(control) && now_ms.saturating_sub(at_ms) < ASK_MS);
        calls || !idle || !told
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
        self.asked = Some((monotonic_ms(), of(control)));
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

    /// Who could have stalled the engine, by the gate; `None` where it is silent.
    pub async fn suspects(&mut self) -> Option<Vec<Suspect>> {
        self.client.suspects().await.ok()
    }
}

fn of(control: &Control) -> [bool; 3] {
    [control.fenced, control.draining, control.leaving]
}
