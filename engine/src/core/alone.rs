//! EP5: what goes wrong in one request's part of a step ends that request alone. A model that refuses a batch, or panics in it, is asked
//! again for each sequence by itself; what panics for one sequence is an error of that sequence.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::core::sample::Rows;
use crate::model::{Model, StepBatch};

/// Runs the batch; where that fails, its sequences one by one. One entry a sequence.
pub(super) fn run(model: &mut dyn Model, batch: &StepBatch) -> Vec<Rows> {
    match forward(model, batch) {
        Ok(rows) => return rows.into_iter().map(Ok).collect(),
        Err(error) => {
            tracing::error!(error, requests = batch.seqs.len(), "a step failed; its sequences run one by one")
        }
    }
    let alone = batch.seqs.iter().map(|seq| {
        let rows = forward(model, &StepBatch { seqs: vec![seq.clone()] })?;
        rows.into_iter().next().ok_or_else(|| "no logits".into())
    });
    alone.collect()
}

fn forward(model: &mut dyn Model, batch: &StepBatch) -> Result<Vec<Vec<Vec<f32>>>, String> {
    let count = batch.seqs.len();
    let logits = guarded(|| model.forward(batch).map_err(|e| e.to_string()))?;
    if logits.rows.len() == count {
        Ok(logits.rows)
    } else {
        Err(format!("{} rows of logits for {count} sequences", logits.rows.len()))
    }
}

/// What `part` returns; a panic in it is an error with the panic's words. Only for parts whose state is whole at any time or gone with
/// the request: KV slots that are written again before they are read, a sampler that is dropped.
pub(super) fn guarded<T>(part: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!("the engine panicked: {}", words.unwrap_or_else(|| "no reason was given".into())))
    })
}
