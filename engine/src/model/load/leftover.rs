//! Tensors of a folder or file that no part of its model uses. A model that is computed without one of its own tensors is another model,
//! and nobody would see it: they are refused by name, but for those that are known to be unneeded.

use std::collections::BTreeSet;

use super::{DecoderConfig, LM_HEAD, ROPE_FACTORS, mtp};
use crate::weights::{WeightsError, WeightsFolder};

/// Whether all that is there was `used`, or is known to be unneeded.
///
/// # Errors
/// [`WeightsError::Tensor`] naming the first that is left.
pub fn refuse(
    folder: &WeightsFolder,
    used: &BTreeSet<String>,
    config: &DecoderConfig,
    tied: bool,
) -> Result<(), WeightsError> {
    let unneeded = |name: &str| {
        // made of the configuration
        name.ends_with(".rotary_emb.inv_freq")
            || (tied && name == LM_HEAD)
            // a head that nobody asked for
            || (config.mtp_heads == 0 && name.starts_with(mtp::TENSORS))
            // read with the configuration
            || (!config.rope_factors.is_empty() && name == ROPE_FACTORS)
    };
    let left: Vec<&str> = folder.names().filter(|name| !used.contains(*name) && !unneeded(name)).collect();
    let Some(first) = left.first() else { return Ok(()) };
    let more = if left.len() > 1 { format!(" ({} more are left)", left.len() - 1) } else { String::new() };
    let arch = config.arch.name();
    let reason =
        format!("no part of a {arch} model uses it, and computed without it this would be another model{more}");
    Err(folder.unusable(first, reason))
}
