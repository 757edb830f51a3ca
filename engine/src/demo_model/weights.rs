//! Random weights in the safetensors layout. The generator is written out here, so that the numbers never change with
//! somebody else's release.

use crate::splitmix::SplitMix64;
use crate::weights::gguf::{Builder, name_in_file};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};

use super::{BOS_ID, DemoArch, DemoModelError, DemoShape, EOS_ID};

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

/// Fills every tensor of `shape` from `seed`: f32 for Llama, bf16 for Qwen3, in the safetensors layout; Q8_0 for what is to be quantised,
/// as a GGUF file.
pub fn random(shape: &DemoShape, seed: u64) -> Result<RandomWeights, DemoModelError> {
    if shape.arch == DemoArch::LlamaQ8 {
        return Ok(quantised(shape, seed));
    }
    let failed = |error: safetensors::SafeTensorError| DemoModelError::Weights(error.to_string());
    let tensors = tensors(shape);
    let dtype = if shape.arch.is_qwen3() { Dtype::BF16 } else { Dtype::F32 };
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

/// GGUF's numbers for what is written.
const GGUF_F32: u32 = 0;
const GGUF_Q8_0: u32 = 8;
const GGUF_FLOAT: u32 = 6;

fn quantised(shape: &DemoShape, seed: u64) -> RandomWeights {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let mut file = Builder::default().string("general.architecture", "llama");
    let sizes = [
        ("embedding_length", shape.hidden),
        ("feed_forward_length", shape.intermediate),
        ("block_count", shape.layers),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head_dim),
        ("context_length", shape.seq_len_max),
    ];
    for (key, size) in sizes {
        file = file.u32(&format!("llama.{key}"), number(size));
    }
    for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-6f32), ("rope.freq_base", 10_000.0)] {
        file = file.pair(&format!("llama.{key}"), GGUF_FLOAT, &value.to_le_bytes());
    }
    file = file.u32("tokenizer.ggml.bos_token_id", BOS_ID).u32("tokenizer.ggml.eos_token_id", EOS_ID);
    let (tensors, mut random) = (tensors(shape), SplitMix64(seed));
    for tensor in &tensors {
        let name = name_in_file(&tensor.name).unwrap_or_else(|| tensor.name.clone());
        let dims: Vec<u64> = tensor.shape.iter().rev().map(|size| *size as u64).collect();
        let values: Vec<f32> = tensor.values(&mut random).collect();
        file = match tensor.shape.len() {
            1 => {
                file.tensor(&name, &dims, GGUF_F32, &values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>())
            }
            _ => file.tensor(&name, &dims, GGUF_Q8_0, &q8_0(&values)),
        };
    }
    RandomWeights { bytes: file.build(), parameters: tensors.iter().map(Tensor::len).sum() }
}

/// Blocks of 32: a scale, and a byte for each value.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let block = |values: &[f32; 32]| {
        let scale = values.iter().fold(0.0f32, |max, value| max.max(value.abs())) / 127.0;
        let quant = |value: &f32| if scale > 0.0 { (value / scale).round() as i8 } else { 0 };
        let quants = values.map(|value| quant(&value).to_le_bytes()[0]);
        f16::from_f32(scale).to_le_bytes().into_iter().chain(quants)
    };
    values.as_chunks().0.iter().flat_map(block).collect()
}

impl Tensor {
    fn values(&self, random: &mut SplitMix64) -> impl Iterator<Item = f32> {
        (0..self.len()).map(|_| self.center + SPREAD * random.bell())
    }

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
        if shape.arch.is_qwen3() {
            all.push(norm(name("self_attn.q_norm"), head_dim));
            all.push(norm(name("self_attn.k_norm"), head_dim));
        }
        all.push(norm(name("post_attention_layernorm"), hidden));
        all.push(matrix(name("mlp.gate_proj"), intermediate, hidden));
        all.push(matrix(name("mlp.up_proj"), intermediate, hidden));
        all.push(matrix(name("mlp.down_proj"), hidden, intermediate));
    }
    all.push(norm("model.norm.weight".to_owned(), hidden));
    if !shape.arch.is_qwen3() {
        all.push(matrix("lm_head.weight".to_owned(), vocab, hidden));
    }
    all
}

fn fill(tensor: &Tensor, dtype: Dtype, random: &mut SplitMix64) -> Vec<u8> {
    let values = tensor.values(random);
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
