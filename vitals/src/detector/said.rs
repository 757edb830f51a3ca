//! From a judgement to its outcome: words are formatted only where something of substance changed, so that a healthy tick costs no
//! allocation (1f).

use crate::examine::{reason, source_name};
use crate::excuse::Excuse;
use crate::observation::Ms;
use crate::owed::OwedSource;
use crate::policy::Policy;
use crate::verdict::{Action, Outcome, Reason, Verdict};

/// What a tick judged.
#[derive(Debug, Clone)]
pub(super) struct Said {
    pub(super) verdict: Verdict,
    pub(super) words: Words,
    pub(super) actions: &'static [Action],
    /// When the nearest deadline passes.
    pub(super) due_in_ms: Option<Ms>,
    /// Stalled, and `/health` says 200.
    pub(super) health_lies: bool,
}

impl Said {
    pub(super) fn new(verdict: Verdict, words: Words, actions: &'static [Action]) -> Self {
        Self { verdict, words, actions, due_in_ms: None, health_lies: false }
    }
}

/// Its explanation.
#[derive(Debug, Clone)]
pub(super) enum Words {
    List(Vec<Reason>),
    Calm(CalmWords),
}

/// What is said while nothing is held against the engine, not yet in words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CalmWords {
    pub(super) excuse: Option<Excuse>,
    /// Asleep or paused: the excuse says it all.
    pub(super) asleep: bool,
    pub(super) draining: bool,
    pub(super) owed: Option<(OwedSource, u32)>,
    pub(super) stuck_ms: Option<Ms>,
    /// Milliseconds a token and request, and what is usual.
    pub(super) slow: Option<(Ms, Ms)>,
}

impl CalmWords {
    /// The same sentences, if perhaps with other figures?
    fn alike(self, other: Self) -> bool {
        let bare = |words: Self| Self {
            owed: words.owed.map(|(source, _)| (source, 0)),
            stuck_ms: words.stuck_ms.map(|_| 0),
            slow: words.slow.map(|_| (0, 0)),
            ..words
        };
        bare(self) == bare(other)
    }

    fn write(self, reasons: &mut Vec<Reason>) {
        reasons.clear();
        if let Some(excuse) = self.excuse {
            let (source, text) = excuse.sentence();
            reasons.push(reason(source, text.to_owned()));
        }
        if self.asleep {
            return;
        }
        if self.draining {
            reasons.push(reason("policy", "the engine is being drained".to_owned()));
            return;
        }
        let Some((source, requests)) = self.owed else {
            reasons.push(reason("gate", "no work is owed".to_owned()));
            return;
        };
        let how =
            if self.excuse.is_some() { "their silence is excused" } else { "deliveries are within their deadline" };
        reasons.push(reason(source_name(source), format!("{requests} requests owed; {how}")));
        if let Some(ms) = self.stuck_ms {
            let text = format!("one request that had begun to answer is silent for {ms} ms while others are served");
            reasons.push(reason("gate", text));
        }
        if let Some((pace, usual)) = self.slow {
            reasons.push(reason("policy", format!("{pace} ms a token and request; its own usual is {usual} ms")));
        }
    }
}

/// Figures in calm words are written anew this often at most.
const FIGURES_MS: Ms = 1_000;

/// What was said last.
#[derive(Debug, Clone)]
pub(super) struct Spoken {
    verdict: Verdict,
    since_ms: Ms,
    calm: Option<(CalmWords, Ms)>,
}

impl Spoken {
    pub(super) fn since(since_ms: Ms) -> Self {
        Self { verdict: Verdict::Unknown, since_ms, calm: None }
    }

    /// Fills the outcome; returns when to look again.
    pub(super) fn fill(&mut self, now_ms: Ms, said: Said, policy: &Policy, outcome: &mut Outcome) -> Ms {
        if said.verdict != self.verdict {
            self.verdict.clone_from(&said.verdict);
            self.since_ms = now_ms;
        }
        match said.words {
            Words::List(reasons) => {
                self.calm = None;
                outcome.reasons = reasons;
            }
            Words::Calm(words) => {
                let stands = self.calm.is_some_and(|(before, at_ms)| {
                    before == words || (before.alike(words) && now_ms.saturating_sub(at_ms) < FIGURES_MS)
                });
                if !stands || outcome.reasons.is_empty() {
                    words.write(&mut outcome.reasons);
                    self.calm = Some((words, now_ms));
                }
            }
        }
        outcome.actions.clear();
        outcome.actions.extend_from_slice(said.actions);
        outcome.fenced = said.actions.contains(&Action::Fence);
        outcome.health_lies = said.health_lies;
        outcome.verdict = said.verdict;
        outcome.since_ms = self.since_ms;
        // never later than the next deadline, so that a fence is not a whole tick late
        let most = policy.tick_ms.max(20);
        outcome.check_again_in_ms = said.due_in_ms.map_or(policy.tick_ms, |due| due.saturating_add(1).clamp(20, most));
        outcome.check_again_in_ms
    }
}
