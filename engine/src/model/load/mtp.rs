//! The weights of an MTP head, which a model has beside its own (`model.mtp_layers.0.…`) and nobody needs who does not guess by it.

use std::path::Path;

use super::{ConfigError, DecoderConfig, Loader};
use crate::backend::Backend;
use crate::model::head::Head;
use crate::weights::WeightsError;

/// Names of all heads' tensors begin so.
pub const TENSORS: &str = "model.mtp_layers.";

/// The configuration with the heads that are to be loaded: one, or none.
///
/// # Errors
/// A head is wanted of a model that has none, or several: which of them guesses what is another matter.
pub fn wanted(config: DecoderConfig, head: bool, model: &Path) -> Result<DecoderConfig, ConfigError> {
    if head && config.mtp_heads != 1 {
        let path = if model.is_dir() { model.join("config.json") } else { model.to_owned() };
        let (found, needed) = (config.mtp_heads.to_string(), "1 to guess by an MTP head".to_owned());
        return Err(ConfigError::Unsupported { path, field: "num_nextn_predict_layers", found, needed });
    }
    Ok(DecoderConfig { mtp_heads: usize::from(head), ..config })
}

impl<B: Backend> Loader<'_, '_, B> {
    /// The head, if the configuration says so.
    pub(super) fn head(&mut self) -> Result<Option<Head<B>>, WeightsError> {
        if self.config.mtp_heads == 0 {
            return Ok(None);
        }
        let hidden = self.config.hidden;
        let name = |part: &str| format!("{TENSORS}0.{part}");
        Ok(Some(Head {
            token_norm: self.vector(&name("token_layernorm.weight"), hidden)?,
            hidden_norm: self.vector(&name("hidden_layernorm.weight"), hidden)?,
            input: self.linear(&name("input_proj"), (hidden, 2 * hidden), false, &self.share.gathered(hidden))?,
            layer: self.layer(&format!("{TENSORS}0"), None)?,
            norm: self.vector(&name("final_layernorm.weight"), hidden)?,
        }))
    }
}
