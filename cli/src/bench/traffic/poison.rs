//! A token that makes no numbers (EP5): a row of the model's embedding is spoiled, so whoever has this token in its prompt gets no logits, and
//! nobody else does. No text has it, and whoever draws tokens is told not to draw it.

use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::Value;

/// The demo models' padding: no text is made of it.
pub const TOKEN: u64 = 3;
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Spoils the token in the model in this folder.
///
/// # Errors
/// When it has no such embedding, or the file cannot be read or written.
pub fn spoil(model: &Path) -> anyhow::Result<()> {
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).with_context(|| format!("could not read {}", path.display()))?;
    spoil_row(&mut bytes)?;
    std::fs::write(&path, bytes).with_context(|| format!("could not write {}", path.display()))
}

fn spoil_row(bytes: &mut [u8]) -> anyhow::Result<()> {
    let (length, rest) = bytes.split_first_chunk().context("no header")?;
    let length = usize::try_from(u64::from_le_bytes(*length))?;
    let header: Value = serde_json::from_slice(rest.get(..length).context("no header")?)?;
    let embedding = &header[EMBEDDING];
    ensure!(embedding["dtype"] == "F32", "its embedding is not of f32: {embedding}");
    let (width, offset) = (embedding["shape"][1].as_u64(), embedding["data_offsets"][0].as_u64());
    let (width, offset) = width.zip(offset).context("its embedding has no place")?;
    let from = 8 + length + usize::try_from(offset + TOKEN * width * 4)?;
    let row = bytes.get_mut(from..from + usize::try_from(width * 4)?).context("its embedding is cut short")?;
    row.as_chunks_mut().0.iter_mut().for_each(|value| *value = f32::NAN.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_is_spoiled_and_no_other_byte() {
        let header = r#"{"model.embed_tokens.weight":{"dtype":"F32","shape":[5,2],"data_offsets":[8,48]}}"#;
        let mut bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 60]].concat();
        let before = bytes.clone();
        spoil_row(&mut bytes).unwrap();
        let row = 8 + header.len() + 8 + 3 * 8;
        assert!(bytes[row..row + 8].as_chunks().0.iter().all(|value| f32::from_le_bytes(*value).is_nan()));
        let spoiled: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != before[*at]).collect();
        assert!(spoiled.iter().all(|at| (row..row + 8).contains(at)) && !spoiled.is_empty());
        assert!(spoil_row(&mut [0; 4]).is_err() && spoil_row(&mut bytes[..row]).is_err());
    }
}
