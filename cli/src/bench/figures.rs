//! The arithmetic of a bench: quantiles, and an interval for a mean that assumes nothing of how the values lie. Pure.

use std::fmt::Display;

/// Resamples of a bootstrap: enough for the second digit of its ends.
const RESAMPLES: usize = 10_000;

/// One line of a report, `name value unit goal`.
pub fn line(name: &str, value: impl Display, unit: &str, goal: impl Display) {
    println!("{name} {value} {unit} {goal}");
}

/// Values from least to most.
#[derive(Debug, Clone, Default)]
pub struct Sorted(Vec<f64>);

impl From<Vec<f64>> for Sorted {
    fn from(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }
}

impl Sorted {
    /// The value below which a share `q` of the values lies (nearest rank); NaN of nothing.
    pub fn quantile(&self, q: f64) -> f64 {
        let rank = (self.0.len() as f64 * q).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
    }

    /// The greatest value; NaN of nothing.
    pub fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or(f64::NAN)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// A mean and the middle 95 % of the means of resamples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

/// The mean of `values` with its percentile bootstrap; the same for the same values. NaN of nothing.
pub fn bootstrap(values: &[f64]) -> Interval {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut draw = || {
        // splitmix64: a resample needs no better
        random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) as usize
    };
    let mean = |sum: f64| sum / values.len() as f64;
    let resample = |draw: &mut dyn FnMut() -> usize| {
        let drawn = (0..values.len()).map(|_| values.get(draw() % values.len()).copied().unwrap_or(f64::NAN));
        mean(drawn.sum())
    };
    let means: Sorted = (0..RESAMPLES).map(|_| resample(&mut draw)).collect::<Vec<_>>().into();
    Interval { mean: mean(values.iter().sum()), low: means.quantile(0.025), high: means.quantile(0.975) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_the_nearest_rank() {
        let values: Sorted = (1..=200).rev().map(f64::from).collect::<Vec<_>>().into();
        assert_eq!((values.quantile(0.5), values.quantile(0.99), values.max()), (100.0, 198.0, 200.0));
        assert!(Sorted::default().quantile(0.5).is_nan());
    }

    #[test]
    fn an_interval_is_as_wide_as_the_values_scatter() {
        assert_eq!(bootstrap(&[3.0; 30]), Interval { mean: 3.0, low: 3.0, high: 3.0 });
        let values: Vec<f64> = (0..100).map(|n| f64::from(n % 10)).collect();
        let Interval { mean, low, high } = bootstrap(&values);
        // of 100 values with deviation 2.87: 4.5 ± 0.56
        assert!((mean - 4.5).abs() < 1e-9 && (low - 3.94).abs() < 0.1 && (high - 5.06).abs() < 0.1, "{low} {high}");
        assert!(bootstrap(&[]).mean.is_nan());
    }
}
