//! The sums over requests that await their first byte, kept as each comes and goes. Pure.

use vitals::observation::GateObs;

use super::work::Asked;

/// A request was taken, and awaits its first byte.
pub fn begins(obs: &mut GateObs, asked: &Asked) {
    obs.prompt_tokens_taken = obs.prompt_tokens_taken.saturating_add(asked.prompt_tokens);
    obs.prompt_tokens_owed = obs.prompt_tokens_owed.saturating_add(asked.prompt_tokens);
    obs.longest_prompt_owed = obs.longest_prompt_owed.max(Some(asked.prompt_tokens));
    obs.awaiting_first_byte = obs.awaiting_first_byte.saturating_add(1);
    obs.unstreamed = obs.unstreamed.map(|n| n.saturating_add(u32::from(!asked.stream)));
}

/// All of it came, `whole`: that may be more than was known when it was taken, and what streams can begin to from now on.
pub fn grows(obs: &mut GateObs, asked: &mut Asked, whole: &Asked) {
    if whole.stream && !std::mem::replace(&mut asked.stream, true) {
        obs.unstreamed = obs.unstreamed.map(|n| n.saturating_sub(1));
    }
    let more = whole.prompt_tokens.saturating_sub(asked.prompt_tokens);
    asked.prompt_tokens = asked.prompt_tokens.saturating_add(more);
    obs.prompt_tokens_taken = obs.prompt_tokens_taken.saturating_add(more);
    obs.prompt_tokens_owed = obs.prompt_tokens_owed.saturating_add(more);
    obs.longest_prompt_owed = obs.longest_prompt_owed.max(Some(asked.prompt_tokens));
}

/// It had its first byte, or ended without one. `others` are those that still await theirs; they are looked at only where the longest goes.
pub fn awaits_no_more<'a>(obs: &mut GateObs, asked: &Asked, others: impl Iterator<Item = &'a Asked>) {
    obs.prompt_tokens_owed = obs.prompt_tokens_owed.saturating_sub(asked.prompt_tokens);
    obs.awaiting_first_byte = obs.awaiting_first_byte.saturating_sub(1);
    obs.unstreamed = obs.unstreamed.map(|n| n.saturating_sub(u32::from(!asked.stream)));
    if obs.longest_prompt_owed == Some(asked.prompt_tokens) {
        obs.longest_prompt_owed = Some(others.map(|other| other.prompt_tokens).max().unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_of_those_that_wait_is_told() {
        let asked = |prompt_tokens| Asked { prompt_tokens, stream: true, print: None };
        let mut obs = GateObs { longest_prompt_owed: Some(0), ..GateObs::default() };
        let all = [asked(900), asked(7), asked(40)];
        all.iter().for_each(|one| begins(&mut obs, one));
        assert_eq!(obs.longest_prompt_owed, Some(900));
        awaits_no_more(&mut obs, &all[1], [&all[0], &all[2]].into_iter());
        assert_eq!(obs.longest_prompt_owed, Some(900));
        awaits_no_more(&mut obs, &all[0], std::iter::once(&all[2]));
        assert_eq!(obs.longest_prompt_owed, Some(40));
        awaits_no_more(&mut obs, &all[2], std::iter::empty());
        assert_eq!((obs.longest_prompt_owed, obs.prompt_tokens_owed, obs.awaiting_first_byte), (Some(0), 0, 0));
    }
}
