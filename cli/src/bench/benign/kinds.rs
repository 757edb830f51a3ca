//! What healthy engines do that looks like a hang, after the table of the field's look-alikes (B1 to B9), and which engine does it here.

use std::path::Path;

use crate::stage::EngineKind;

/// What is done to the engine, or what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Whole answers of seconds, of which no figure tells before their end.
    Lumps,
    /// A compiler at work in the middle of a step, while streams wait.
    Compile,
    /// Long prompts, one after the other, and hardly an answer.
    LongPrompts,
    /// A front end whose event loop is saturated: health and metrics answer late, tokens come.
    BusyFront,
    /// A hundred times slower at once.
    Crawl,
    /// A debugger, a CPU quota, the freezer, or the whole machine stands still: in turn.
    Held,
    /// Nothing at all for long before it serves, and no port.
    SlowStart,
    /// Asleep by its own interface, with requests waiting.
    Asleep,
    /// Nobody wants anything.
    Idle,
}

/// A kind of run.
#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    pub act: Act,
}

pub const KINDS: [Kind; 9] = [
    Kind { name: "B1", act: Act::Lumps },
    Kind { name: "B2", act: Act::Compile },
    Kind { name: "B3", act: Act::LongPrompts },
    Kind { name: "B4", act: Act::BusyFront },
    Kind { name: "B5", act: Act::Crawl },
    Kind { name: "B6", act: Act::Held },
    Kind { name: "B7", act: Act::SlowStart },
    Kind { name: "B8", act: Act::Asleep },
    Kind { name: "B9", act: Act::Idle },
];

/// How long a slow start takes before the port is open.
const SLOW_START_S: &str = "12";

impl Kind {
    /// Our engine where its page is what may mislead; else the stranger, of which nothing but the outside is known.
    pub fn engine(&self, model: &Path, server: &Path) -> EngineKind {
        let stranger = |more: &[&str]| EngineKind::Stranger {
            server: server.to_owned(),
            more: more.iter().map(|word| (*word).to_owned()).collect(),
        };
        match self.act {
            Act::LongPrompts | Act::Held => EngineKind::Truebeat { model: model.to_owned(), fault: None },
            Act::Lumps => stranger(&["--counts", "lumps"]),
            Act::SlowStart => stranger(&["--load-seconds", SLOW_START_S]),
            // so slow that steps of a crawl are longer than any silence that is taken for granted
            Act::Crawl => stranger(&["--rate", "25"]),
            Act::Compile | Act::BusyFront | Act::Asleep | Act::Idle => stranger(&[]),
        }
    }
}
