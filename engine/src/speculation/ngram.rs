//! Guesses out of the sequence itself: what followed the last time the same few tokens stood there (prompt lookup). Free but for a
//! table; good where output repeats input, as in code, summaries and quotations. Pure.

use std::collections::{HashMap, VecDeque};

/// So many tokens must be the same …
const LEAST: usize = 3;
/// … and of several places the one where most are, up to so many, is taken.
const MOST: usize = 8;
/// The latest places of the same tokens that are compared.
const PLACES: usize = 8;

/// The places of every few tokens of one sequence.
#[derive(Debug, Default)]
pub struct NgramIndex {
    /// What follows them stands there, latest place last.
    followers: HashMap<[u32; LEAST], VecDeque<u32>>,
    /// Followers up to here are in the table.
    read: usize,
}

impl NgramIndex {
    /// What may follow `tokens`, at most `count`. The sequence may have grown since the last call, not changed.
    pub fn guess(&mut self, tokens: &[u32], count: usize) -> Vec<u32> {
        self.read_up(tokens);
        let Some(last) = tokens.last_chunk::<LEAST>() else { return Vec::new() };
        let places = self.followers.get(last).into_iter().flatten();
        let best = places.map(|at| *at as usize).max_by_key(|at| (common(&tokens[..*at], tokens), *at));
        best.map_or_else(Vec::new, |at| tokens[at..].iter().take(count).copied().collect())
    }

    fn read_up(&mut self, tokens: &[u32]) {
        for follower in self.read.max(LEAST)..tokens.len() {
            let Some(before) = tokens[..follower].last_chunk::<LEAST>() else { continue };
            let places = self.followers.entry(*before).or_default();
            if places.len() == PLACES {
                places.pop_front();
            }
            places.push_back(u32::try_from(follower).unwrap_or(u32::MAX));
        }
        self.read = tokens.len();
    }
}

/// How many tokens `a` and `b` have in common at their ends, up to [`MOST`].
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MOST).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_same_tokens_is_guessed() {
        let mut index = NgramIndex::default();
        assert_eq!(index.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 2), [4, 5]);
        assert_eq!(index.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 9), [4, 5, 9, 1, 2, 3]);
        assert_eq!(index.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3, 7], 2), [0; 0]);
    }

    #[test]
    fn the_longest_match_wins_and_among_equals_the_latest() {
        let tokens = [7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3, 70, 7, 1, 2, 3];
        assert_eq!(NgramIndex::default().guess(&tokens, 1), [50]);
        assert_eq!(NgramIndex::default().guess(&[&tokens[..15], &[6, 1, 2, 3]].concat(), 1), [70]);
    }

    #[test]
    fn short_sequences_have_no_guess() {
        for tokens in [&[][..], &[1], &[1, 1], &[1, 1, 1]] {
            assert_eq!(NgramIndex::default().guess(tokens, 4), [0; 0]);
        }
    }

    #[test]
    fn reading_bit_by_bit_is_reading_at_once() {
        let tokens: Vec<u32> = (0..400u32).map(|i| i * i % 7).collect();
        let mut index = NgramIndex::default();
        for end in 0..tokens.len() {
            assert_eq!(index.guess(&tokens[..end], 5), NgramIndex::default().guess(&tokens[..end], 5));
        }
    }
}
