//! Memory of one process over time. What it holds is judged where it rests, by its allocator's own books: those have no holes. What is resident
//! has, so of it a line is drawn through everything that was seen, and only what no holes are is called growth. Pure.

use crate::bench::figures::Sorted;

/// A moment in seconds, and what was resident then in MiB.
pub type Sample = (f64, f64);

/// A moment at which nobody asked anything: requests served until then, and bytes held.
pub type Rest = (f64, f64);

/// MiB an hour: the median of the slopes between the samples of the first half and those of the second, each with its fellow half a window
/// later (Theil and Sen, thinned): a burst moves it little. NaN of nothing.
pub fn slope_mib_per_hour(samples: &[Sample]) -> f64 {
    let half = samples.len() / 2;
    let pairs = samples[..half].iter().zip(&samples[half..]);
    let slopes: Vec<f64> = pairs.map(|(early, late)| (late.1 - early.1) / (late.0 - early.0) * 3600.0).collect();
    Sorted::from(slopes).quantile(0.5)
}

/// Bytes that are kept of a request: the median of the slopes between any two rests (Theil and Sen). NaN of fewer than two.
pub fn kept_bytes_per_request(rests: &[Rest]) -> f64 {
    let later = |(at, early): (usize, &Rest)| {
        let early = *early;
        rests[at + 1..].iter().map(move |late| (late.1 - early.1) / (late.0 - early.0))
    };
    Sorted::from(rests.iter().enumerate().flat_map(later).collect::<Vec<f64>>()).quantile(0.5)
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

    #[test]
    fn what_is_kept_of_requests_is_seen_whatever_one_rest_holds() {
        // one rest with a thread's leftovers, and one with less than usual
        let noise = [0.0, 9_000.0, 0.0, 200_000.0, 0.0, -30_000.0, 0.0, 0.0];
        let rests = |kept: f64| -> Vec<Rest> {
            let rest = |(at, noise): (usize, &f64)| (at as f64 * 5_000.0, 5e6 + at as f64 * 5_000.0 * kept + noise);
            noise.iter().enumerate().map(rest).collect()
        };
        assert!(kept_bytes_per_request(&rests(0.0)).abs() < 1.0, "{}", kept_bytes_per_request(&rests(0.0)));
        assert!((kept_bytes_per_request(&rests(24.0)) - 24.0).abs() < 2.0);
        assert!(kept_bytes_per_request(&[]).is_nan());
    }
}
