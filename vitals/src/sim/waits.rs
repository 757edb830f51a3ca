//! Requests that owe a byte for minutes while nothing is wrong with the engine: a tool that the front end calls between two generations of one
//! answer, an argument of a tool call that it holds back until it is whole, a grammar that is compiled before the engine may begin.
//!
//! What may be said of them is in `docs/detector.md`, "Where it is blind": a fence is the price, an eviction is none.

use super::book::{At, Request};
use super::chance::Chance;
use super::engine::Engine;
use super::profile::{MINUTE, Profile, SECOND, Us};

/// What a request waits for that no other waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Wait {
    #[default]
    Nothing,
    /// So many calls of a tool are to come, each of this length, with an answer of so many tokens, and followed by another generation.
    Tool { calls: u32, span: Us, tokens: u32 },
    /// Tokens in this range reach the client together, once the last of them is made.
    Argument { from: u32, to: u32 },
    /// A grammar, so long from when the scheduler gets the request.
    Grammar { span: Us },
}

/// Which of these some of the clients ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Asks {
    #[default]
    Nothing,
    Tools,
    Arguments,
    Grammars,
}

/// A fence of one of the first two is foretold from this silence on: the rivals' patience, less what looks are apart.
const SILENCE_FENCED: Us = 299 * SECOND;

impl Asks {
    /// How many tokens the answer has that was to have so many; a file that is written in one argument takes up to ten minutes.
    pub fn length(self, out: u32, profile: &Profile, chance: &mut Chance) -> u32 {
        if self != Self::Arguments || !chance.permille(200) {
            return out;
        }
        out.max((10 * MINUTE / profile.step_us.max(1)).clamp(20, 12_000) as u32)
    }

    /// What a request of so many tokens waits for; draws nothing where nobody asks.
    pub fn draw(self, out: u32, chance: &mut Chance) -> Wait {
        match self {
            Self::Nothing => Wait::Nothing,
            // grammars are compiled once and then kept: seldom enough that nobody's rhythm is theirs
            Self::Grammars if chance.permille(930) => Wait::Nothing,
            Self::Tools | Self::Arguments if chance.permille(400) => Wait::Nothing,
            // longer than a fence takes, and not as long as a kill
            Self::Tools => Wait::Tool {
                calls: chance.between(1, 2) as u32,
                span: chance.scale(2 * SECOND, 800 * SECOND),
                tokens: chance.scale(8, 300) as u32,
            },
            Self::Arguments if out > 8 => {
                let from = chance.between(1, u64::from(out) / 2) as u32;
                Wait::Argument { from, to: chance.between(u64::from(from) + 2, u64::from(out)) as u32 }
            }
            Self::Arguments => Wait::Nothing,
            Self::Grammars => Wait::Grammar { span: chance.scale(SECOND, 280 * SECOND) },
        }
    }
}

impl Request {
    /// Of so many tokens that are made, how many the front end has let out.
    pub fn let_out(&self, made: u32) -> u32 {
        match self.wait {
            Wait::Argument { from, to } if (from..to).contains(&made) => from,
            _ => made,
        }
    }

    /// Its generation has ended: does the front end call a tool now, and come back with what it said?
    pub(super) fn calls_tool(&mut self, now: Us) -> bool {
        let Wait::Tool { calls, span, tokens } = &mut self.wait else { return false };
        if *calls == 0 || self.gone || !self.stream {
            return false;
        }
        *calls -= 1;
        self.at = At::Front(now + *span);
        // what stood before is in the prefix cache
        self.prefilled = self.context + self.generated;
        self.context = self.prefilled + *tokens;
        self.generated = 0;
        true
    }

    /// The scheduler gets it: is a grammar to be compiled first?
    pub(super) fn begins_to_compile(&mut self, now: Us) {
        if let (Wait::Grammar { span }, At::Waiting) = (self.wait, self.at) {
            (self.wait, self.compiled_at) = (Wait::Nothing, now + span);
        }
    }

    /// When it comes to the scheduler by itself, or may be admitted, if that is still to come.
    pub fn comes_at(&self) -> Option<Us> {
        match self.at {
            At::Front(at) => Some(at),
            At::Waiting if self.compiled_at > 0 => Some(self.compiled_at),
            _ => None,
        }
    }

    fn is_held_by_its_front(&self) -> bool {
        let made_more = self.at == At::Decode && self.let_out(self.generated) < self.generated;
        !self.gone && self.answered && (matches!(self.at, At::Front(_)) || made_more)
    }
}

/// Is this a silence whose fence `docs/detector.md` foretells?
pub fn foretold(engine: &Engine, now: Us) -> bool {
    let silent = now.saturating_sub(engine.book.last_delivery.unwrap_or(0)) >= SILENCE_FENCED;
    engine.live.census().compiling > 0 || (silent && engine.live.iter().any(Request::is_held_by_its_front))
}
