//! The arithmetic of a bench: quantiles, and an interval for a mean or a median that assumes nothing of how the values lie. Pure.

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

/// A statistic of values, and the middle 95 % of the same of resamples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// The mean; NaN of nothing.
pub fn mean(values: &mut [f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The middle value, or the mean of the two; NaN of nothing. The values change their order.
pub fn median(values: &mut [f64]) -> f64 {
    let (middle, even) = (values.len() / 2, values.len().is_multiple_of(2));
    if middle >= values.len() {
        return f64::NAN;
    }
    let (below, at, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    match below.iter().copied().max_by(f64::total_cmp) {
        Some(below) if even => f64::midpoint(below, *at),
        _ => *at,
    }
}

/// A statistic of `values` with its percentile bootstrap; the same for the same values. NaN of nothing.
pub fn bootstrap(values: &[f64], statistic: fn(&mut [f64]) -> f64) -> Interval {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut draw = || {
        // splitmix64: a resample needs no better
        random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) as usize
    };
    let mut resample = vec![f64::NAN; values.len()];
    let mut one = || {
        resample.fill_with(|| values.get(draw() % values.len()).copied().unwrap_or(f64::NAN));
        statistic(&mut resample)
    };
    let drawn: Sorted = (0..RESAMPLES).map(|_| one()).collect::<Vec<_>>().into();
    Interval { value: statistic(&mut values.to_vec()), low: drawn.quantile(0.025), high: drawn.quantile(0.975) }
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
        assert_eq!(bootstrap(&[3.0; 30], mean), Interval { value: 3.0, low: 3.0, high: 3.0 });
        let values: Vec<f64> = (0..100).map(|n| f64::from(n % 10)).collect();
        let Interval { value, low, high } = bootstrap(&values, mean);
        // of 100 values with deviation 2.87: 4.5 ± 0.56
        assert!((value - 4.5).abs() < 1e-9 && (low - 3.94).abs() < 0.1 && (high - 5.06).abs() < 0.1, "{low} {high}");
        assert!(bootstrap(&[], mean).value.is_nan() && bootstrap(&[], median).value.is_nan());
    }

    #[test]
    fn a_median_does_not_ask_how_far_a_stray_value_lies() {
        assert_eq!((median(&mut [9.0, 1.0, 2.0]), median(&mut [4.0, 1000.0, 1.0, 2.0])), (2.0, 3.0));
        let stray: Vec<f64> = (0..100).map(|n| if n % 25 == 0 { 40.0 } else { f64::from(n % 3) }).collect();
        let Interval { value, low, high } = bootstrap(&stray, median);
        assert!((value, low) == (1.0, 1.0) && high <= 1.5, "{value} {low} {high}");
    }
}
