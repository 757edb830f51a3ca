//! The counters that move with each chunk, as words in memory of the gate's that the detector reads by itself: while answers move on, ten
//! looks a second wake nobody (2d). What needs a look at each request is asked for (`control`).

use heartbeat::counts::COUNTS;
use vitals::observation::{GateObs, Ms};

/// The words of these counters.
pub fn words(obs: &GateObs) -> [u64; COUNTS] {
    let mut words = [0; COUNTS];
    let told = [
        obs.epoch,
        obs.in_flight.into(),
        obs.awaiting_first_byte.into(),
        obs.prompt_tokens_owed,
        obs.prompt_tokens_taken,
        obs.chunks_delivered,
        obs.bytes_delivered,
        obs.requests_done,
        one_more(obs.oldest_in_flight_ms),
        one_more(obs.last_delivery_ms),
        one_more(obs.unstreamed.map(u64::from)),
        one_more(obs.longest_prompt_owed),
        obs.requests_abandoned,
    ];
    words.iter_mut().zip(told).for_each(|(word, told)| *word = told);
    words
}

/// What was asked for before, with these words in place of what they tell.
pub fn renewed(words: &[u64; COUNTS], asked: &GateObs) -> GateObs {
    let small = |word: u64| u32::try_from(word).unwrap_or(u32::MAX);
    let [
        epoch,
        in_flight,
        awaiting,
        owed,
        taken,
        chunks,
        bytes,
        done,
        oldest,
        last,
        unstreamed,
        longest,
        abandoned,
        ..,
    ] = *words;
    GateObs {
        epoch,
        in_flight: small(in_flight),
        awaiting_first_byte: small(awaiting),
        prompt_tokens_owed: owed,
        prompt_tokens_taken: taken,
        chunks_delivered: chunks,
        bytes_delivered: bytes,
        requests_done: done,
        requests_abandoned: abandoned,
        oldest_in_flight_ms: oldest.checked_sub(1),
        last_delivery_ms: last.checked_sub(1),
        unstreamed: unstreamed.checked_sub(1).map(small),
        longest_prompt_owed: longest.checked_sub(1),
        client_blocked: asked.client_blocked,
        quietest_begun_ms: asked.quietest_begun_ms,
    }
}

/// 0 is missing, and never a time or a number.
fn one_more(value: Option<Ms>) -> u64 {
    value.map_or(0, |value| value.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_carry_every_counter_that_needs_no_look_at_each_request() {
        let all = GateObs {
            epoch: 7,
            in_flight: 3,
            awaiting_first_byte: 2,
            prompt_tokens_owed: 50,
            prompt_tokens_taken: 60,
            chunks_delivered: 9,
            bytes_delivered: 900,
            requests_done: 4,
            requests_abandoned: 2,
            client_blocked: 1,
            oldest_in_flight_ms: Some(0),
            last_delivery_ms: Some(99),
            unstreamed: Some(0),
            longest_prompt_owed: Some(30),
            quietest_begun_ms: Some(70),
        };
        let asked = GateObs { client_blocked: 1, quietest_begun_ms: Some(70), ..GateObs::default() };
        assert_eq!(renewed(&words(&all), &asked), all);
        assert_eq!(renewed(&words(&GateObs::default()), &GateObs::default()), GateObs::default());
    }
}
