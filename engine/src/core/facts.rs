//! What is known of a model once its own files and its tokenizer's are read: each may lack what the other says. Pure but for its log lines.

use crate::codec::TextCodec;
use crate::model::ModelInfo;
use crate::sampling::SamplingDefaults;

/// The model's facts with those of its codec; without `sampling`, nothing of what its makers sample it with.
pub(super) fn facts(model: &ModelInfo, codec: &dyn TextCodec, sampling: bool) -> ModelInfo {
    let mut info = model.clone();
    let has = |id: u32| (id as usize) < model.vocab_size;
    let lacks = |id: u32| !model.eos_token_ids.contains(&id);
    // files of models often leave it out where they name the end of a turn
    info.eos_token_ids.extend(codec.end_token().filter(|id| has(*id) && lacks(*id)));
    if !sampling {
        info.sampling = SamplingDefaults::default();
    }
    if info.sampling != SamplingDefaults::default() {
        tracing::info!(sampling = ?info.sampling, "generation_config.json says how to sample where a request does not");
    }
    oddities(&info, codec).iter().for_each(|oddity| tracing::warn!("{oddity}"));
    info
}

/// What an operator should hear of.
fn oddities(info: &ModelInfo, codec: &dyn TextCodec) -> Vec<String> {
    let mut told = Vec::new();
    if info.eos_token_ids.is_empty() {
        let files = "eos_token_id of config.json or generation_config.json, eos_token of tokenizer_config.json";
        told.push(format!("no token ends an output ({files}): each goes on until its max_tokens or a stop of its own"));
    }
    let vocab = info.vocab_size;
    if let Some(ids) = codec.ids_end().filter(|ids| *ids > vocab) {
        told.push(format!(
            "the tokenizer has tokens up to {}, the model none after {}: prompts with those in between are refused",
            ids - 1,
            vocab.saturating_sub(1)
        ));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::tests::{Bytes, END, info};

    #[test]
    fn the_tokenizers_end_token_ends_outputs_too_where_the_model_has_it() {
        let ends = |model: &ModelInfo| facts(model, &Bytes, true).eos_token_ids;
        assert_eq!(ends(&info(Vec::new())), [END]);
        assert_eq!(ends(&info(vec![7, END])), [7, END], "not twice");
        assert_eq!(ends(&info(vec![7])), [7, END], "the model's own are first");
        assert!(ends(&ModelInfo { vocab_size: 256, ..info(Vec::new()) }).is_empty(), "a token that never comes");
    }

    #[test]
    fn a_model_without_an_end_and_a_tokenizer_with_more_tokens_are_told_of() {
        assert!(oddities(&info(vec![END]), &Bytes).is_empty());
        let told = oddities(&ModelInfo { vocab_size: 100, ..info(Vec::new()) }, &Bytes);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("eos_token"), "{told:?}");
        assert!(told[1].contains("up to 261") && told[1].contains("after 99"), "{told:?}");
    }

    #[test]
    fn what_its_makers_sample_it_with_is_left_out_where_nobody_wants_it() {
        let sampling = SamplingDefaults { temperature: Some(0.6), ..SamplingDefaults::default() };
        let model = ModelInfo { sampling, ..info(vec![END]) };
        assert_eq!(facts(&model, &Bytes, true).sampling, sampling);
        assert_eq!(facts(&model, &Bytes, false).sampling, SamplingDefaults::default());
    }
}
