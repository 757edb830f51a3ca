//! The fields that say how tokens are chosen.

use serde_json::Value;

use crate::handle::Ready;
use crate::sampling::defaults::{MIN_P, REPETITION_PENALTY, TEMPERATURE, TOP_K, TOP_P};
use crate::sampling::{LogitRules, SamplingParams};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, IDS_MAX};
use crate::server::request::Kind;

const TOP_LOGPROBS_MAX: i64 = 20;

/// The sampling parameters; those that are left out are what the model's makers say, and where they say nothing the ones that change nothing.
///
/// # Errors
/// A field is not what it must be.
pub fn params(kind: Kind, f: &Fields<'_>, ready: &Ready) -> Result<SamplingParams, ApiError> {
    let model = &ready.info.sampling;
    let number = |name: &str, (least, most): (f64, f64)| f.number(name, least, most);
    let top_k = f.int("top_k", TOP_K.0, TOP_K.1)?.or(model.top_k).unwrap_or(0);
    Ok(SamplingParams {
        temperature: number("temperature", TEMPERATURE)?.or(model.temperature).unwrap_or(1.0) as f32,
        top_p: number("top_p", TOP_P)?.or(model.top_p).unwrap_or(1.0) as f32,
        top_k: usize::try_from(top_k).unwrap_or(0),
        min_p: number("min_p", MIN_P)?.or(model.min_p).unwrap_or(0.0) as f32,
        seed: f.int("seed", i64::MIN, i64::MAX)?.map(i64::cast_unsigned),
        logprobs: logprobs(kind, f)?,
        rules: rules(f, ready)?.into(),
    })
}

fn rules(f: &Fields<'_>, ready: &Ready) -> Result<LogitRules, ApiError> {
    let (least, most) = REPETITION_PENALTY;
    let repetition = f.number("repetition_penalty", least, most)?.or(ready.info.sampling.repetition_penalty);
    let min_tokens = f.int("min_tokens", 0, i64::from(u32::MAX))?.unwrap_or(0);
    Ok(LogitRules {
        presence_penalty: f.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0) as f32,
        frequency_penalty: f.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0) as f32,
        repetition_penalty: repetition.unwrap_or(1.0) as f32,
        bias: bias(f, ready.info.vocab_size)?,
        allowed: allowed(f, ready.info.vocab_size)?,
        min_tokens: usize::try_from(min_tokens).unwrap_or(0),
    })
}

/// An empty list allows nothing, and is refused as in vLLM.
fn allowed(f: &Fields<'_>, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let ids = f.few_token_ids("allowed_token_ids", vocab_size)?;
    if ids.is_empty() && f.get("allowed_token_ids").is_some() {
        return Err(f.wrong("allowed_token_ids", "a list of one token id at least"));
    }
    Ok(ids)
}

/// `{"token id": bias}`; −100 all but forbids a token, 100 all but forces it.
fn bias(f: &Fields<'_>, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let wrong = || {
        let last = vocab_size.saturating_sub(1);
        let wanted = format!("an object of at most {IDS_MAX} token ids (0 to {last}) with numbers from -100 to 100");
        f.wrong("logit_bias", &wanted)
    };
    let Some(Value::Object(entries)) = f.get("logit_bias") else {
        return if f.get("logit_bias").is_none() { Ok(Vec::new()) } else { Err(wrong()) };
    };
    let entry = |(id, bias): (&String, &Value)| {
        let id = id.parse::<u32>().ok().filter(|id| (*id as usize) < vocab_size)?;
        let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b))?;
        Some((id, bias as f32))
    };
    let few = Some(entries).filter(|entries| entries.len() <= IDS_MAX);
    few.and_then(|entries| entries.iter().map(entry).collect()).ok_or_else(wrong)
}

fn logprobs(kind: Kind, f: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let count = |n: i64| usize::try_from(n).unwrap_or(0);
    if kind == Kind::Completion {
        return Ok(f.int("logprobs", 0, TOP_LOGPROBS_MAX)?.map(count));
    }
    let wanted = f.bool("logprobs")?.unwrap_or(false);
    let top = f.int("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
    if top.is_some_and(|n| n > 0) && !wanted {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
    }
    Ok(wanted.then(|| count(top.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::grammar::tests::{Bytes, info};
    use crate::model::ModelInfo;
    use crate::sampling::SamplingDefaults;
    use crate::scheduler::Limits;

    #[test]
    fn what_is_left_out_is_as_the_models_makers_say_and_then_changes_nothing() {
        let of = |sampling: SamplingDefaults, body: Value| {
            let info = ModelInfo { sampling, ..info(Vec::new()) };
            let ready = Ready { info, limits: Limits::default(), codec: Arc::new(Bytes), grammars: Arc::default() };
            let params = params(Kind::Completion, &Fields::new(&body).unwrap(), &ready).unwrap();
            (params.temperature, params.top_p, params.top_k, params.min_p, params.rules.repetition_penalty)
        };
        let makers = SamplingDefaults {
            temperature: Some(0.5),
            top_p: Some(0.75),
            top_k: Some(20),
            min_p: Some(0.25),
            repetition_penalty: Some(1.5),
        };
        let all = json!({"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1});
        assert_eq!(of(makers, json!({"temperature": null})), (0.5, 0.75, 20, 0.25, 1.5));
        assert_eq!(of(makers, all), (1.0, 1.0, 0, 0.0, 1.0), "a request has the last word");
        assert_eq!(of(SamplingDefaults::default(), json!({})), (1.0, 1.0, 0, 0.0, 1.0));
    }
}
