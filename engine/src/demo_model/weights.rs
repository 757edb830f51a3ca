//! Random weights in the safetensors layout. The generator is written out here, so that the numbers never change with
//! somebody else's release.

use crate::splitmix::SplitMix64;
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};

use super::{DemoArch, DemoModelError, DemoShape};

/// Width of the random numbers: wide enough that logits differ clearly, so that greedy decoding has no ties.
const SPREAD: f32 = 0.15;

/// A laid-out weights file.
pub struct RandomWeights {
    pub bytes: Vec<u8>,
    pub parameters: usize,
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
    /// Norm weights lie around one, all others around zero.
    center: f32,
}

/// Fills every tensor of `shape` from `seed`: f32 for Llama, bf16 for Qwen3.
pub fn random(shape: &DemoShape, seed: u64) -> Result<RandomWeights, DemoModelError> {
    let failed = |error: safetensors::SafeTensorError| DemoModelError::Weights(error.to_string());
    let tensors = tensors(shape);
    let dtype = match shape.arch {
        DemoArch::Llama => Dtype::F32,
        DemoArch::Qwen3 => Dtype::BF16,
    };
    let mut random = SplitMix64(seed);
    let data: Vec<Vec<u8>> = tensors.iter().map(|tensor| fill(tensor, dtype, &mut random)).collect();
    let views = tensors.iter().zip(&data).map(|(tensor, data)| {
        let view = TensorView::new(dtype, tensor.shape.clone(), data).map_err(failed)?;
        Ok((tensor.name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, DemoModelError>>()?;
    // the key that `transformers` asks for
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let bytes = safetensors::serialize(views, Some(metadata)).map_err(failed)?;
    Ok(RandomWeights { bytes, parameters: tensors.iter().map(Tensor::len).sum() })
}

impl Tensor {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

fn tensors(shape: &DemoShape) -> Vec<Tensor> {
    let DemoShape { hidden, intermediate, head_dim, vocab, .. } = *shape;
    let (q_width, kv_width) = (shape.heads * head_dim, shape.kv_heads * head_dim);
    let matrix = |name: String, rows, cols| Tensor { name, shape: vec![rows, cols], center: 0.0 };
    let norm = |name: String, len| Tensor { name, shape: vec![len], center: 1.0 };
    let mut all = vec![matrix("model.embed_tokens.weight".to_owned(), vocab, hidden)];
    for layer in 0..shape.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        all.push(norm(name("input_layernorm"), hidden));
        all.push(matrix(name("self_attn.q_proj"), q_width, hidden));
        all.push(matrix(name("self_attn.k_proj"), kv_width, hidden));
        all.push(matrix(name("self_attn.v_proj"), kv_width, hidden));
        all.push(matrix(name("self_attn.o_proj"), hidden, q_width));
        if shape.arch == DemoArch::Qwen3 {
            all.push(norm(name("self_attn.q_norm"), head_dim));
            all.push(norm(name("self_attn.k_norm"), head_dim));
        }
        all.push(norm(name("post_attention_layernorm"), hidden));
        all.push(matrix(name("mlp.gate_proj"), intermediate, hidden));
        all.push(matrix(name("mlp.up_proj"), intermediate, hidden));
        all.push(matrix(name("mlp.down_proj"), hidden, intermediate));
    }
    all.push(norm("model.norm.weight".to_owned(), hidden));
    if shape.arch == DemoArch::Llama {
        all.push(matrix("lm_head.weight".to_owned(), vocab, hidden));
    }
    all
}

fn fill(tensor: &Tensor, dtype: Dtype, random: &mut SplitMix64) -> Vec<u8> {
    let values = (0..tensor.len()).map(|_| tensor.center + SPREAD * random.bell());
    match dtype {
        Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64(1234567);
        assert_eq!([random.next(), random.next()], [6457827717110365317, 3203168211198807973]);
    }

    #[test]
    fn the_bell_is_centred_and_of_unit_variance() {
        let mut random = SplitMix64(1);
        let values: Vec<f32> = (0..20_000).map(|_| random.bell()).collect();
        let mean = values.iter().sum::<f32>() / 20_000.0;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
