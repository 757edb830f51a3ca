//! Rotary position embedding: which angle each pair of a head turns by at each position. Pure arithmetic.
//! Angles are made once a step for the positions in it, so that no table grows with the model's context length.

use std::f64::consts::TAU;

/// How the base frequencies are stretched for longer contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a smooth ramp between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        /// Context length in tokens the model was trained with.
        original_len: f64,
    },
    Yarn(Yarn),
}

/// YaRN: pairs up to `first_pair` kept, from `last_pair` on divided by `factor`, a straight ramp between; cosines and sines times
/// `attention_factor`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub attention_factor: f64,
    pub first_pair: f64,
    pub last_pair: f64,
}

/// The frequencies of one model: `head_dim / 2` radians a token.
#[derive(Debug, Clone)]
pub struct Rope {
    frequencies: Vec<f32>,
    /// What cosines and sines are multiplied with.
    size: f32,
}

impl Rope {
    /// Frequencies `theta^(-2i / head_dim)`, scaled.
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling) -> Self {
        let pair = |i: usize| {
            let base = theta.powf(-((2 * i) as f64) / head_dim as f64);
            scale(base, i, scaling) as f32
        };
        let size = if let RopeScaling::Yarn(yarn) = scaling { yarn.attention_factor as f32 } else { 1.0 };
        Self { frequencies: (0..head_dim / 2).map(pair).collect(), size }
    }

    /// With each frequency divided by its factor; `factors` may be empty.
    pub fn divided(mut self, factors: &[f32]) -> Self {
        self.frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        self
    }

    /// Cosines and sines, each `positions.len()` rows of `head_dim / 2`.
    ///
    /// The product is rounded to f32 before the cosine is taken, as the reference does it.
    pub fn angles(&self, positions: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let angles = positions.iter().flat_map(|pos| self.frequencies.iter().map(move |freq| *pos as f32 * freq));
        angles.map(|angle| (angle.cos() * self.size, angle.sin() * self.size)).unzip()
    }
}

fn scale(frequency: f64, pair: usize, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Yarn(Yarn { factor, first_pair, last_pair, .. }) => {
            let last_pair = if last_pair == first_pair { last_pair + 0.001 } else { last_pair };
            let stretched = ((pair as f64 - first_pair) / (last_pair - first_pair)).clamp(0.0, 1.0);
            frequency / factor * stretched + frequency * (1.0 - stretched)
        }
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
            let turns = original_len * frequency / TAU; // full turns within the trained context
            if turns < low_freq_factor {
                frequency / factor
            } else if turns > high_freq_factor {
                frequency
            } else {
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_turns_nothing_and_pair_zero_turns_one_radian() {
        let (cos, sin) = Rope::new(4, 10_000.0, RopeScaling::None).angles(&[0, 1]);
        assert_eq!((&cos[..2], &sin[..2]), (&[1.0, 1.0][..], &[0.0, 0.0][..]));
        assert!((cos[2] - 1f32.cos()).abs() < 1e-6 && (sin[3] - 0.01f32.sin()).abs() < 1e-6);
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let llama3 =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192.0 };
        assert_eq!(scale(1.0, 0, llama3), 1.0);
        assert_eq!(scale(1e-5, 0, llama3), 1e-5 / 8.0);
        let middle = 2.0 * TAU / 8192.0;
        assert!(scale(middle, 0, llama3) < middle && scale(middle, 0, llama3) > middle / 8.0);
    }
}
