//! Which experts a token goes to. Pure.

use std::cmp::Ordering;

/// The `count` best experts of one row of router scores with their shares: a softmax over all experts, made to sum to one over the
/// chosen where `normalised`. Of equals the lower number wins; a score that is no number loses to all others.
pub fn choose(scores: &[f32], count: usize, normalised: bool) -> Vec<(usize, f32)> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f32 = shares.iter().sum();
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| better(shares[*a], shares[*b]).then(a.cmp(b)));
    let mut chosen: Vec<(usize, f32)> = order.into_iter().take(count).map(|i| (i, shares[i] / total)).collect();
    if normalised {
        let sum: f32 = chosen.iter().map(|(_, share)| share).sum();
        chosen.iter_mut().for_each(|(_, share)| *share /= sum);
    }
    chosen
}

fn better(a: f32, b: f32) -> Ordering {
    a.is_nan().cmp(&b.is_nan()).then(b.partial_cmp(&a).unwrap_or(Ordering::Equal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_chosen_and_equals_by_number() {
        let experts =
            |scores: &[f32], count| choose(scores, count, false).into_iter().map(|(i, _)| i).collect::<Vec<_>>();
        assert_eq!(experts(&[0.0, 2.0, 1.0, 2.0], 3), [1, 3, 2]);
        assert_eq!(experts(&[1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(experts(&[f32::NAN, 1.0, 2.0], 2), [2, 1]);
    }

    #[test]
    fn shares_are_of_all_or_of_the_chosen() {
        let scores = [0.0, 1f32.ln(), 2f32.ln()];
        let all = choose(&scores, 2, false);
        assert!((all[0].1 - 0.5).abs() < 1e-6 && (all[1].1 - 0.25).abs() < 1e-6);
        let chosen = choose(&scores, 2, true);
        assert!((chosen[0].1 - 2.0 / 3.0).abs() < 1e-6 && (chosen[1].1 - 1.0 / 3.0).abs() < 1e-6);
    }
}
