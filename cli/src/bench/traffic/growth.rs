//! Resident memory of one process over time: a line through what was seen. Pure.

use crate::bench::figures::Sorted;

/// A moment in seconds, and what was resident then in MiB.
pub type Sample = (f64, f64);

/// MiB an hour: the median of the slopes between the samples of the first half and those of the second, each with its fellow half a window
/// later (Theil and Sen, thinned): a burst moves it little. NaN of nothing.
pub fn slope_mib_per_hour(samples: &[Sample]) -> f64 {
    let half = samples.len() / 2;
    let pairs = samples[..half].iter().zip(&samples[half..]);
    let slopes: Vec<f64> = pairs.map(|(early, late)| (late.1 - early.1) / (late.0 - early.0) * 3600.0).collect();
    Sorted::from(slopes).quantile(0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_no_growth_and_a_leak_is() {
        let flat = |at: u32| (f64::from(at), if at % 40 < 5 { 90.0 } else { 60.0 });
        let leak = |at: u32| (f64::from(at), 60.0 + f64::from(at) / 60.0);
        assert!(slope_mib_per_hour(&(0..300).map(flat).collect::<Vec<_>>()).abs() < 1.0);
        assert!((slope_mib_per_hour(&(0..300).map(leak).collect::<Vec<_>>()) - 60.0).abs() < 1e-6);
    }
}
