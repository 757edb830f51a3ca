//! Tensor names of GGUF as a Hugging Face folder has them; stacked experts become one tensor each.

use std::collections::BTreeMap;

use super::TensorInfo;

const TOP: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

const IN_LAYER: [(&str, &str); 12] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];

const STACKED: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

/// Experts that a file may stack.
const EXPERTS_MAX: usize = 1 << 14;

/// Enters a tensor under the name, or the names, it has in a folder.
pub fn place(name: &str, info: TensorInfo, tensors: &mut BTreeMap<String, TensorInfo>) {
    let Some((stem, end)) = name.rsplit_once('.') else {
        tensors.insert(name.to_owned(), info);
        return;
    };
    let Some((layer, part)) = stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        let top = TOP.iter().find(|(gguf, _)| *gguf == stem).map_or(stem, |(_, folder)| folder);
        tensors.insert(format!("{top}.{end}"), info);
        return;
    };
    if let Some((_, part)) = STACKED.iter().find(|(gguf, _)| *gguf == part) {
        for (expert, info) in unstack(&info) {
            tensors.insert(format!("model.layers.{layer}.mlp.experts.{expert}.{part}.{end}"), info);
        }
        return;
    }
    let part = IN_LAYER.iter().find(|(gguf, _)| *gguf == part).map_or(part, |(_, folder)| folder);
    tensors.insert(format!("model.layers.{layer}.{part}.{end}"), info);
}

/// What a tensor of a folder is called in a file; `None` for one that has no name there.
pub fn name_in_file(tensor: &str) -> Option<String> {
    let (stem, end) = tensor.rsplit_once('.')?;
    match stem.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => {
            let (name, _) = IN_LAYER.iter().find(|(_, folder)| *folder == part)?;
            Some(format!("blk.{layer}.{name}.{end}"))
        }
        None => {
            let (name, _) = TOP.iter().find(|(_, folder)| *folder == stem)?;
            Some(format!("{name}.{end}"))
        }
    }
}

/// The slices of a tensor of three dimensions; its length was checked to be that of its shape.
fn unstack(info: &TensorInfo) -> Vec<(usize, TensorInfo)> {
    let [count, rows, cols] = info.shape[..] else { return Vec::new() };
    if count == 0 || count > EXPERTS_MAX {
        return Vec::new();
    }
    let len_bytes = info.len_bytes / count as u64;
    let slice = |expert: usize| TensorInfo {
        shape: vec![rows, cols],
        offset: info.offset + expert as u64 * len_bytes,
        len_bytes,
        ..info.clone()
    };
    (0..count).map(|expert| (expert, slice(expert))).collect()
}
