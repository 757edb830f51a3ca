//! What a model's makers want it sampled with, where a request says nothing; and the numbers that either may say. Pure.

/// Least and most of each parameter.
pub const TEMPERATURE: (f64, f64) = (0.0, 2.0);
pub const TOP_P: (f64, f64) = (0.0, 1.0);
pub const MIN_P: (f64, f64) = (0.0, 1.0);
pub const REPETITION_PENALTY: (f64, f64) = (0.01, 10.0);
/// −1 and 0: no limit.
pub const TOP_K: (i64, i64) = (-1, i32::MAX as i64);

/// Numbers of a model's `generation_config.json`, all of them possible ones; `None`: it does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
}
