//! Prefill's progress: has a native page's prefill taken what there was to take, or the same again and again?

use crate::observation::{PageObs, PagePhase};

/// Prefill that took this many times what there was to take without one token is no progress.
pub(crate) const TIMES_MAX: u64 = 2;

/// Prompt tokens since tokens were last handed out.
#[derive(Debug, Clone, Default)]
pub struct PrefillSign {
    /// What prefill steps took.
    done: u64,
    /// What was owed then or has come since, by the page: one who comes while another leaves is not told from one who is preempted.
    offered: u64,
    /// The same by the gate, which knows who came, and how long prompts are only roughly.
    offered_at_gate: u64,
    /// What the other data-parallel engines took of that.
    elsewhere: u64,
    /// What the steps since the look before took.
    took: u64,
}

/// Prompt tokens since the look before: those that came to the gate, and those that other data-parallel engines took in.
#[derive(Debug, Clone, Copy)]
pub struct Came {
    pub to_gate: u64,
    pub elsewhere: u64,
}

impl PrefillSign {
    /// Steps that turned and took prompt tokens, so that not the same are owed as at the look before (`last`). The same prompts again and
    /// again (preemption) are no progress, nor are prompts that come and go in the queue of a loop that only decodes.
    pub fn advances(
        &mut self,
        page: &PageObs,
        last: &PageObs,
        delivered: bool,
        steps_done: u64,
        came_now: Came,
    ) -> bool {
        self.took = 0;
        if delivered {
            // whatever was taken before a token came was not in vain
            let owed = page.prompt_tokens_owed;
            *self = Self { offered: owed, offered_at_gate: owed, ..Self::default() };
        }
        let came = page.owed() > last.owed();
        let more = page.prompt_tokens_owed.saturating_sub(last.prompt_tokens_owed);
        self.offered = last.prompt_tokens_owed.max(self.offered.saturating_add(if came { more } else { 0 }));
        self.offered_at_gate = self.offered_at_gate.saturating_add(came_now.to_gate);
        self.elsewhere = self.elsewhere.saturating_add(came_now.elsewhere);
        if steps_done == 0 {
            // a fall without a step is a client that left
            return false;
        }
        let took = match last.phase {
            PagePhase::Prefill => u64::from(last.phase_tokens).saturating_mul(steps_done),
            _ => last.prompt_tokens_owed.saturating_sub(page.prompt_tokens_owed),
        };
        self.took = took;
        self.done = self.done.saturating_add(if delivered { 0 } else { took });
        let prefills = last.phase == PagePhase::Prefill || page.phase == PagePhase::Prefill;
        // one who leaves while another comes may make it rise
        let moved =
            (prefills || page.running > last.running) && (came || page.prompt_tokens_owed != last.prompt_tokens_owed);
        let by_gate = self.offered_at_gate.saturating_sub(self.elsewhere);
        moved && self.done <= self.offered.max(by_gate).saturating_mul(TIMES_MAX)
    }

    /// What its steps since the look before took of prompts.
    pub fn took(&self) -> u64 {
        self.took
    }
}
