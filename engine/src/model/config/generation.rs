//! The sampling parameters of `generation_config.json`. What is nonsense there is told and left out: a model runs without.

use std::fmt::Display;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::read_json;
use crate::sampling::defaults::{MIN_P, REPETITION_PENALTY, SamplingDefaults, TEMPERATURE, TOP_K, TOP_P};

/// As they are written. `do_sample` is not among them: vLLM does not look at it either, and samples what says false as it samples any other.
#[derive(Deserialize)]
struct RawSampling {
    temperature: Option<Value>,
    top_p: Option<Value>,
    top_k: Option<Value>,
    min_p: Option<Value>,
    repetition_penalty: Option<Value>,
}

/// What the makers of the model in `dir` sample it with.
pub fn sampling_defaults(dir: &Path) -> SamplingDefaults {
    let path = dir.join("generation_config.json");
    // whoever reads the configuration reads this file for the ends of a text, and refuses one that is no JSON
    read_json::<RawSampling>(&path).map(|raw| raw.checked(&path)).unwrap_or_default()
}

impl RawSampling {
    fn checked(&self, path: &Path) -> SamplingDefaults {
        let number = |name: &str, value: &Option<Value>, range: (f64, f64)| {
            possible(path, name, value.as_ref()?, range, Value::as_f64)
        };
        let top_k = |value| possible(path, "top_k", value, TOP_K, Value::as_i64);
        SamplingDefaults {
            temperature: number("temperature", &self.temperature, TEMPERATURE),
            top_p: number("top_p", &self.top_p, TOP_P),
            top_k: self.top_k.as_ref().and_then(top_k),
            min_p: number("min_p", &self.min_p, MIN_P),
            repetition_penalty: number("repetition_penalty", &self.repetition_penalty, REPETITION_PENALTY),
        }
    }
}

/// The number, if a request may have it.
fn possible<T: PartialOrd + Display>(
    path: &Path,
    name: &str,
    value: &Value,
    (least, most): (T, T),
    read: fn(&Value) -> Option<T>,
) -> Option<T> {
    let number = read(value).filter(|number| (&least..=&most).contains(&number));
    if number.is_none() {
        let path = path.display();
        tracing::warn!(%path, "`{name}` is {value} and no number from {least} to {most}: it is left out");
    }
    number
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(config: &Value) -> SamplingDefaults {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("generation_config.json"), config.to_string()).unwrap();
        sampling_defaults(dir.path())
    }

    #[test]
    fn possible_numbers_are_read_and_nonsense_is_left_out() {
        let all = json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05,
            "do_sample": false, "eos_token_id": [4], "transformers_version": "4.51.0"});
        let told = SamplingDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: Some(0.0),
            repetition_penalty: Some(1.05),
        };
        assert_eq!(read(&all), told);
        let odd = json!({"temperature": 2.5, "top_p": "0.9", "top_k": 1.5, "min_p": -0.1, "repetition_penalty": 0});
        assert_eq!(read(&odd), SamplingDefaults::default());
        let half = json!({"temperature": null, "top_p": [0.9], "top_k": -2, "min_p": 0.1});
        assert_eq!(read(&half), SamplingDefaults { min_p: Some(0.1), ..SamplingDefaults::default() });
        assert_eq!(sampling_defaults(Path::new("nowhere")), SamplingDefaults::default());
    }
}
