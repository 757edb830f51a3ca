//! Many rules beside one engine whose truth is known at every moment: how a simulation keeps their accounts as it goes.
//! Pure; for traces with labels see [`super::judge`].

use super::score::RuleScore;
use super::{Alarm, Rule};
use crate::observation::{Ms, Observation};

/// What is true of the engine at one observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truth {
    /// Nothing is wrong: an alarm that begins now is false.
    Benign,
    /// Work is owed since `since_ms` that will not be done. One hang a history.
    Hang { since_ms: Ms },
    /// Neither alarm nor silence is wrong.
    Neutral,
}

/// The rules of one history.
#[derive(Debug)]
pub struct Watchers {
    watched: Vec<Watched>,
    seen_ms: Option<Ms>,
}

#[derive(Debug)]
struct Watched {
    rule: Box<dyn Rule>,
    score: RuleScore,
    before: Alarm,
    hang: Caught,
}

#[derive(Debug, Default)]
struct Caught {
    began: bool,
    alarm: bool,
    evicted: bool,
}

impl Watchers {
    /// One history for these rules.
    pub fn new(rules: Vec<Box<dyn Rule>>) -> Self {
        let watched = |rule: Box<dyn Rule>| Watched {
            score: RuleScore::new(rule.name()),
            rule,
            before: Alarm::Quiet,
            hang: Caught::default(),
        };
        Self { watched: rules.into_iter().map(watched).collect(), seen_ms: None }
    }

    /// One more observation, and what is true at it. The time since the one before counts as healthy where the truth is benign.
    pub fn tick(&mut self, now_ms: Ms, obs: &Observation, truth: Truth) {
        let past_ms = self.seen_ms.replace(now_ms).map_or(0, |seen| now_ms.saturating_sub(seen));
        for watched in &mut self.watched {
            watched.tick(now_ms, obs, truth, past_ms);
        }
    }

    /// The accounts of this history.
    pub fn scores(self) -> Vec<RuleScore> {
        self.watched.into_iter().map(|watched| watched.score).collect()
    }
}

impl Watched {
    fn tick(&mut self, now_ms: Ms, obs: &Observation, truth: Truth, past_ms: Ms) {
        let alarm = self.rule.step(now_ms, obs);
        let before = std::mem::replace(&mut self.before, alarm);
        match truth {
            Truth::Benign => {
                self.score.benign_hours += past_ms as f64 / 3_600_000.0;
                let begins = |height: Alarm| u64::from(alarm >= height && before < height);
                self.score.false_fences += begins(Alarm::Suspect);
                self.score.false_evictions += begins(Alarm::Evict);
            }
            Truth::Hang { since_ms } => self.hang(alarm, now_ms.saturating_sub(since_ms)),
            Truth::Neutral => {}
        }
    }

    fn hang(&mut self, alarm: Alarm, age_ms: Ms) {
        let Self { score, hang, .. } = self;
        score.hangs += u64::from(!std::mem::replace(&mut hang.began, true));
        if alarm >= Alarm::Suspect && !std::mem::replace(&mut hang.alarm, true) {
            score.caught += 1;
            score.latency_ms.push(age_ms);
        }
        if alarm >= Alarm::Evict && !std::mem::replace(&mut hang.evicted, true) {
            score.evict_latency_ms.push(age_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rivals::Acts;

    /// Says what it is told to, one word an observation.
    #[derive(Debug)]
    struct Told(std::vec::IntoIter<Alarm>);

    impl Rule for Told {
        fn name(&self) -> &'static str {
            "told"
        }
        fn about(&self) -> &'static str {
            "says what it is told"
        }
        fn acts(&self) -> Acts {
            Acts::Evicts
        }
        fn step(&mut self, _: Ms, _: &Observation) -> Alarm {
            self.0.next().unwrap_or_default()
        }
    }

    #[test]
    fn an_alarm_counts_where_it_begins_and_a_hang_counts_once() {
        use Alarm::{Evict, Quiet, Suspect};
        let words = vec![Quiet, Suspect, Evict, Evict, Quiet, Quiet, Suspect, Evict, Evict];
        let mut watchers = Watchers::new(vec![Box::new(Told(words.into_iter()))]);
        for second in 0..9 {
            let truth = if second < 5 { Truth::Benign } else { Truth::Hang { since_ms: 5_000 } };
            watchers.tick(second * 1_000, &Observation::default(), truth);
        }
        let score = watchers.scores().remove(0);
        assert_eq!((score.false_fences, score.false_evictions), (1, 1));
        assert_eq!((score.hangs, score.caught), (1, 1));
        assert_eq!((score.latency_ms, score.evict_latency_ms), (vec![1_000], vec![2_000]));
        assert!((score.benign_hours - 4.0 / 3_600.0).abs() < 1e-9);
    }
}
