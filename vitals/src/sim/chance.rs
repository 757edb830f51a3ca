//! Chance for the simulation: SplitMix64 and the few distributions that the fleet needs. Pure; a seed reproduces every draw.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, no bad seeds, streams by splitting.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A stream of its own: what one part of the world draws never shifts what another draws.
    pub fn split(&mut self) -> Self {
        Self(self.bits())
    }

    /// Uniform in 0.0..1.0.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `low..=high`; `low` where the range is empty.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        let span = high.saturating_sub(low).saturating_add(1);
        low.saturating_add(((self.bits() >> 32).wrapping_mul(span.min(1 << 32))) >> 32)
    }

    /// Even on a logarithmic scale between `low` and `high` (both at least 1).
    pub fn scale(&mut self, low: u64, high: u64) -> u64 {
        let (low, high) = (low.max(1) as f64, high.max(1) as f64);
        (low * (high / low).powf(self.unit())).round() as u64
    }

    /// True with this probability in permille.
    pub fn permille(&mut self, chance: u64) -> bool {
        self.between(0, 999) < chance
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: u64) -> u64 {
        (-(1.0 - self.unit()).ln() * mean as f64) as u64
    }

    /// Pareto from `least` with tail exponent 1.5, cut at `most`: lateness and pauses of real machines.
    pub fn heavy(&mut self, least: u64, most: u64) -> u64 {
        let drawn = least as f64 / (1.0 - self.unit()).powf(1.0 / 1.5);
        (drawn as u64).min(most)
    }

    /// About normal with mean 1 and this deviation in thousandths, never below a fifth (the sum of four uniforms).
    pub fn around_one(&mut self, deviation_milli: u64) -> f64 {
        let sum = self.unit() + self.unit() + self.unit() + self.unit();
        (1.0 + (sum - 2.0) * 1.732 * deviation_milli as f64 / 1000.0).max(0.2)
    }

    /// One of these. An empty slice gives the default.
    pub fn pick<T: Copy + Default>(&mut self, of: &[T]) -> T {
        let index = self.between(0, (of.len() as u64).saturating_sub(1));
        of.get(index as usize).copied().unwrap_or_default()
    }
}

/// The finalizer: also how the driver deals one seed a history.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_sequence_of_seed_zero() {
        let mut chance = Chance::new(0);
        assert_eq!([chance.bits(), chance.bits()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn draws_keep_their_bounds_and_their_means() {
        let mut chance = Chance::new(7);
        let mut sum = 0;
        for _ in 0..20_000 {
            assert!((3..=9).contains(&chance.between(3, 9)));
            assert!((10..=1_000).contains(&chance.scale(10, 1_000)));
            assert!((50..=800).contains(&chance.heavy(50, 800)));
            sum += chance.exponential(1_000);
        }
        assert!((900..1_100).contains(&(sum / 20_000)), "{sum}");
        assert_eq!(chance.between(5, 4), 5);
    }
}
