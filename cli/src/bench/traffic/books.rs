//! The engine's own numbers, held against what its clients saw, when nobody is in it any more. [`judge`] is pure.

use anyhow::ensure;
use vitals::exposition::{Exposition, Sample};

use super::Checks;
use super::ask;
use super::crowd::Counts;
use super::outcome::Outcome;
use crate::bench::figures::line;

/// The agent asks a question of its own now and then, of a few tokens.
const OTHERS_MAX: f64 = 8.0;
const OTHERS_TOKENS_MAX: f64 = 64.0;

/// What the engine says.
#[derive(Debug, Clone, Copy, Default)]
pub struct Books {
    in_flight: f64,
    kv_usage: f64,
    ended: f64,
    finished: f64,
    errors: f64,
    generated: f64,
    /// Tokens that its heartbeat counts as delivered.
    delivered: f64,
}

impl Books {
    /// # Errors
    /// A series that is not there: nothing would be seen in it.
    pub fn of(page: &Exposition, delivered: u64) -> anyhow::Result<Self> {
        let of_reason = |reason| sum(page, "vllm:request_success_total", Some(("finished_reason", reason)));
        Ok(Self {
            in_flight: sum(page, "truebeat:requests_in_flight", None)?,
            kv_usage: sum(page, "vllm:kv_cache_usage_perc", None)?,
            ended: sum(page, "truebeat:requests_ended_total", None)?,
            finished: of_reason("stop")? + of_reason("length")?,
            errors: sum(page, "truebeat:requests_ended_total", Some(("end", "error")))?,
            generated: sum(page, "vllm:generation_tokens_total", None)?,
            delivered: delivered as f64,
        })
    }
}

/// Nobody is left in the engine, all blocks are back, it has counted an end for each request that it took and no other, a failure for who was
/// poisoned and nobody else, and its heartbeat the tokens that came to clients and no other.
pub fn judge(books: &Books, counts: &Counts, checks: &mut Checks) {
    let Books { in_flight, kv_usage, ended, finished, errors, generated, delivered } = *books;
    checks.check(in_flight == 0.0, "nobody is left in the engine");
    checks.check(kv_usage == 0.0, "EP3: all blocks are back");
    // Twice the references, asked alone. Whoever left may have left before the engine heard of it.
    let own = 2.0 * ask::REFERENCES as f64;
    let own_tokens: u64 = (0..ask::REFERENCES).map(|index| 2 * ask::reference(index, false).tokens_max).sum();
    let (least, most) = (counts.of(&Outcome::Completed) as f64 + own, counts.posted() as f64 + own + OTHERS_MAX);
    line("traffic_engine_ended", ended, "count", format_args!("{least}..{most}"));
    checks.check(finished >= least && ended <= most, "EP2: the engine's ends are those of its clients");
    let (failed, poisoned) = (counts.of(&Outcome::Failed) as f64, counts.poisoned as f64);
    line("traffic_engine_failed", errors, "count", format_args!("{failed}..{poisoned}"));
    checks.check(failed > 0.0 && (failed..=poisoned).contains(&errors), "EP5: who is poisoned fails, and nobody else");
    let heard = (counts.tokens_heard + own_tokens) as f64;
    let asked = (counts.tokens_asked + own_tokens) as f64 + OTHERS_MAX * OTHERS_TOKENS_MAX;
    line("traffic_tokens_delivered", delivered, "count", format_args!("{heard}..{}", asked.min(generated)));
    let told = heard > 0.0 && (heard..=asked.min(generated)).contains(&delivered);
    checks.check(told, "EP6: what the heart counts is what clients heard");
}

/// The sum over a series, or over those of its samples with this label.
///
/// # Errors
/// A series that is not there: nothing is seen in it.
pub fn sum(page: &Exposition, name: &str, wanted: Option<(&str, &str)>) -> anyhow::Result<f64> {
    ensure!(page.named(name).next().is_some(), "the engine's metrics have no {name}");
    let is_wanted = |sample: &&Sample| wanted.is_none_or(|(label, value)| sample.label(label) == Some(value));
    Ok(page.named(name).filter(is_wanted).map(|sample| sample.value).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that fail of an engine that served 100 requests of 1,000 tokens in all, two poisoned ones among them, after an edit of its books.
    fn failed(edit: impl FnOnce(&mut Books)) -> usize {
        let (mut counts, own) = (Counts::default(), 2.0 * ask::REFERENCES as f64);
        (0..98).for_each(|_| counts.end(Outcome::Completed));
        (0..2).for_each(|_| counts.end(Outcome::Failed));
        (counts.poisoned, counts.tokens_heard, counts.tokens_asked) = (2, 1_000, 1_200);
        let own_tokens: u64 = (0..ask::REFERENCES).map(|index| 2 * ask::reference(index, false).tokens_max).sum();
        let (ended, finished, errors) = (100.0 + own, 98.0 + own, 2.0);
        let (delivered, generated) = (1_050.0 + own_tokens as f64, 1_100.0 + own_tokens as f64);
        let mut books = Books { ended, finished, errors, generated, delivered, ..Books::default() };
        edit(&mut books);
        let mut checks = Checks::default();
        judge(&books, &counts, &mut checks);
        checks.failed
    }

    #[test]
    fn books_that_are_wrong_in_one_place_fail_there() {
        assert_eq!(failed(|_| ()), 0);
        let wrong: [fn(&mut Books); 8] = [
            |books| books.in_flight = 1.0,
            |books| books.kv_usage = 0.01,
            |books| books.finished -= 1.0,
            |books| books.ended += 20.0,
            |books| books.errors = 3.0,
            |books| books.errors = 1.0,
            |books| books.delivered -= 100.0,
            |books| books.delivered = books.generated + 1.0,
        ];
        for (place, edit) in wrong.into_iter().enumerate() {
            assert_eq!(failed(edit), 1, "{place}");
        }
    }
}
