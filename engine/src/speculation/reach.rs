//! How far to guess for one sequence: further while all guesses are right, no further than the last one that was, and for a while not
//! at all when none is. Pure.

/// A sequence without luck rests for at most so many steps.
const REST_STEPS_MAX: u32 = 64;

/// What one sequence's guesses are worth.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    length: usize,
    length_max: usize,
    misses: u32,
    rests: u32,
}

impl Reach {
    pub fn new(length_max: usize) -> Self {
        Self { length: length_max.div_ceil(2), length_max, misses: 0, rests: 0 }
    }

    /// Guesses wanted for the next step.
    pub fn wanted(&mut self) -> usize {
        if self.rests > 0 {
            self.rests -= 1;
            return 0;
        }
        self.length
    }

    /// So many guesses were verified, so many were right.
    pub fn learn(&mut self, verified: usize, right: usize) {
        match right {
            0 => {
                self.misses = (self.misses + 1).min(REST_STEPS_MAX.ilog2());
                // One miss is bad luck.
                self.rests = if self.misses > 1 { 1 << self.misses } else { 0 };
                self.length = 1;
            }
            all if all == verified => (self.length, self.misses) = ((self.length + 2).min(self.length_max), 0),
            some => (self.length, self.misses) = (some, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_with_success_and_shrinks_to_what_was_right() {
        let mut reach = Reach::new(8);
        assert_eq!(reach.wanted(), 4);
        reach.learn(4, 4);
        reach.learn(6, 6);
        reach.learn(8, 8);
        assert_eq!(reach.wanted(), 8);
        reach.learn(8, 3);
        assert_eq!(reach.wanted(), 3);
    }

    #[test]
    fn without_luck_it_rests_longer_and_longer() {
        let mut reach = Reach::new(4);
        let mut guessed = 0;
        for _ in 0..1000 {
            if reach.wanted() > 0 {
                guessed += 1;
                reach.learn(1, 0);
            }
        }
        assert!(guessed < 25, "{guessed}");
        while reach.wanted() == 0 {}
        reach.learn(1, 1);
        assert!(reach.wanted() > 0);
    }
}
