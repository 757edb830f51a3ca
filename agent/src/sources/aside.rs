//! Questions beside the metrics page that few engines know: how much is in flight (`/load`), and whether generation is paused
//! (`/is_paused`, vLLM in its development mode; no metric tells of a pause).

use std::time::Duration;

use http::{StatusCode, Uri};
use serde_json::Value;
use vitals::observation::MetricsObs;

use super::get::{Get, with_path};

const DEADLINE: Duration = Duration::from_secs(1);
const BODY_BYTES_MAX: usize = 64 << 10;
/// Rounds without an answer for which a pause is believed to last, and between two questions that may wait for an engine that stands.
const UNANSWERED_MAX: u32 = 30;
const UNANSWERED_REST: u32 = 10;

/// Both questions of one engine process.
#[derive(Debug)]
pub struct Asides {
    load: Question,
    pause: Question,
    pausing: Pausing,
}

impl Default for Asides {
    fn default() -> Self {
        Self {
            load: Question { path: "/load", field: "server_load", unknown: false },
            pause: Question { path: "/is_paused", field: "is_paused", unknown: false },
            pausing: Pausing::default(),
        }
    }
}

impl Asides {
    /// Asks what this engine knows, and lays the answers over its page's meanings.
    pub async fn ask(&mut self, engine_url: &Uri, metrics: &mut MetricsObs) {
        let rests = self.pausing.rests();
        let pause = async { if rests { Heard::Nothing } else { self.pause.ask(engine_url).await } };
        let (load, pause) = tokio::join!(self.load.ask(engine_url), pause);
        if let Heard::Said(load) = load {
            metrics.server_load = load.as_f64().or(metrics.server_load);
        }
        metrics.paused = self.pausing.hear(pause);
    }
}

/// What became of a question.
#[derive(Debug)]
enum Heard {
    Said(Value),
    /// No answer in time, or an error of the server's own.
    Nothing,
    /// This engine does not know the question.
    Unknown,
}

/// One question; an engine that does not know it is not asked again.
#[derive(Debug)]
struct Question {
    path: &'static str,
    field: &'static str,
    unknown: bool,
}

impl Question {
    async fn ask(&mut self, engine_url: &Uri) -> Heard {
        if self.unknown {
            return Heard::Unknown;
        }
        let get = Get {
            uri: with_path(engine_url, self.path),
            accept: "application/json",
            deadline: DEADLINE,
            body_bytes_max: BODY_BYTES_MAX,
        };
        let heard = match get.fetch().await {
            Ok(answer) if answer.status == StatusCode::OK => self.read(&answer.body),
            Ok(answer) if !answer.status.is_server_error() => Heard::Unknown,
            _ => Heard::Nothing,
        };
        self.unknown = matches!(heard, Heard::Unknown);
        heard
    }

    fn read(&self, body: &[u8]) -> Heard {
        let said = serde_json::from_slice::<Value>(body).ok().and_then(|body| body.get(self.field).cloned());
        said.map_or(Heard::Unknown, Heard::Said)
    }
}

/// What is known of a pause. Newer engines ask their scheduler, so that one that hangs does not answer: it is not asked at each round
/// then, and a pause that was told before ends after a while.
#[derive(Debug, Default)]
struct Pausing {
    paused: Option<bool>,
    unanswered: u32,
}

impl Pausing {
    fn rests(&self) -> bool {
        self.paused != Some(true) && !self.unanswered.is_multiple_of(UNANSWERED_REST)
    }

    fn hear(&mut self, heard: Heard) -> Option<bool> {
        match heard {
            Heard::Said(said) => (self.paused, self.unanswered) = (said.as_bool(), 0),
            Heard::Unknown => *self = Self::default(),
            Heard::Nothing => {
                self.unanswered = self.unanswered.saturating_add(1);
                self.paused = self.paused.filter(|paused| *paused && self.unanswered <= UNANSWERED_MAX);
            }
        }
        self.paused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_outlasts_answers_that_are_late_and_no_hang() {
        let mut pausing = Pausing::default();
        assert_eq!(pausing.hear(Heard::Said(true.into())), Some(true));
        for _ in 0..UNANSWERED_MAX {
            assert!(!pausing.rests());
            assert_eq!(pausing.hear(Heard::Nothing), Some(true));
        }
        assert_eq!(pausing.hear(Heard::Nothing), None);
        let asked = (0..100).filter(|_| {
            let asked = !pausing.rests();
            pausing.hear(Heard::Nothing);
            asked
        });
        assert_eq!(asked.count(), 10, "each question may stay in the queue of an engine that stands");
        assert_eq!(pausing.hear(Heard::Said(false.into())), Some(false));
        assert_eq!(pausing.hear(Heard::Nothing), None, "what was not paused may be now");
    }
}
