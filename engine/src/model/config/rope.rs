//! The position part of `config.json`: base and scaling of RoPE, in either spelling.

use std::path::Path;

use serde_json::Value;

use super::raw::{RawConfig, SEQ_LEN_MAX};
use super::{ConfigError, unsupported};
use crate::model::rope::{RopeScaling, Yarn};

impl RawConfig {
    /// Base and scaling, from `rope_theta` + `rope_scaling`, or the nested `rope_parameters`.
    pub(super) fn rope(&self, path: &Path, head_dim: usize) -> Result<(f64, RopeScaling), ConfigError> {
        let parameters = self.parameters();
        let number = |key: &str| parameters.get(key).and_then(Value::as_f64);
        let theta = number("rope_theta").or(self.rope_theta).unwrap_or(10_000.0);
        if !theta.is_finite() || theta <= 1.0 {
            return Err(unsupported(path, "rope_theta", theta.to_string(), "a number above 1"));
        }
        let parts = [number("partial_rotary_factor"), self.partial_rotary_factor];
        if let Some(part) = parts.into_iter().flatten().find(|part| (*part - 1.0).abs() > f64::EPSILON) {
            return Err(unsupported(path, "partial_rotary_factor", part.to_string(), "1.0 (the whole head rotated)"));
        }
        let need = |key: &'static str| {
            number(key)
                .filter(|value| value.is_finite() && *value > 0.0)
                .ok_or_else(|| unsupported(path, key, "missing or not positive".to_owned(), "a positive number"))
        };
        let kind = parameters.get("rope_type").or_else(|| parameters.get("type")).and_then(Value::as_str);
        let scaling = match kind {
            // dynamic scaling changes nothing up to `max_position_embeddings`, and longer sequences are not taken
            None | Some("default" | "dynamic") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: need("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_len: need("original_max_position_embeddings")?,
            },
            Some("yarn") => RopeScaling::Yarn(self.yarn(parameters, need("factor")?, (theta, head_dim))),
            Some(other) => {
                let needed = "`default`, `linear`, `dynamic`, `llama3` or `yarn`";
                return Err(unsupported(path, "rope_type", other.to_owned(), needed));
            }
        };
        Ok((theta, scaling))
    }

    /// The longest sequence. Linear scaling stretches the positions of training where a file names those: without, what it counts may be what came
    /// of it already (deepseek-coder's 16,384, of 4,096 by a factor of 4).
    pub(super) fn seq_len_max(&self, path: &Path, scaling: RopeScaling) -> Result<usize, ConfigError> {
        let original = self.parameters().get("original_max_position_embeddings").and_then(Value::as_u64);
        let (RopeScaling::Linear { factor }, Some(original)) = (scaling, original) else {
            return Ok(self.max_position_embeddings);
        };
        let len = original as f64 * factor;
        if !(1.0..=SEQ_LEN_MAX as f64).contains(&len) {
            let needed = format!("a factor that makes the longest sequence 1 to {SEQ_LEN_MAX} tokens");
            return Err(unsupported(path, "factor", factor.to_string(), &needed));
        }
        Ok(len as usize)
    }

    /// Null where there are none.
    fn parameters(&self) -> &Value {
        let nested = self.rope_parameters.as_ref().filter(|value| !value.is_null());
        // some files keep one set of parameters per kind of layer; these families have the same in all
        let nested = nested.map(|value| value.get("full_attention").unwrap_or(value));
        nested.or(self.rope_scaling.as_ref()).unwrap_or(&Value::Null)
    }

    /// As `transformers` reads it: absent numbers have defaults, zeros count as absent.
    fn yarn(&self, parameters: &Value, factor: f64, (theta, head_dim): (f64, usize)) -> Yarn {
        let number = |key: &str| parameters.get(key).and_then(Value::as_f64).filter(|value| value.is_finite());
        let positive = |key: &str| number(key).filter(|value| *value > 0.0);
        let scale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
        let attention_factor =
            number("attention_factor").unwrap_or_else(|| match (positive("mscale"), positive("mscale_all_dim")) {
                (Some(part), Some(all)) => scale(part) / scale(all),
                _ => scale(1.0),
            });
        let original_len = positive("original_max_position_embeddings").unwrap_or(self.max_position_embeddings as f64);
        let (dim, truncate) = (head_dim as f64, parameters.get("truncate").and_then(Value::as_bool).unwrap_or(true));
        // the pair that makes so many turns within the trained context
        let pair = |turns: f64| dim * (original_len / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
        let (first, last) = (pair(positive("beta_fast").unwrap_or(32.0)), pair(positive("beta_slow").unwrap_or(1.0)));
        let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
        Yarn { factor, attention_factor, first_pair: first.max(0.0), last_pair: last.min(dim - 1.0) }
    }
}
