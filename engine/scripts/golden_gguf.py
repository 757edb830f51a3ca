#!/usr/bin/env python3
"""Writes small GGUF files with the `gguf` package and the logits that `transformers` computes in f32 from the same, dequantised weights.

    engine/scripts/golden_gguf.py OUT_DIR

NAME.gguf is the model, NAME.safetensors its golden values as golden.py writes them. Q8_0 is quantised by `gguf`; it cannot quantise
Q4_K and Q6_K, so those blocks are random bits with small scales, and what they mean is what `gguf` dequantises.
"""

import pathlib
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from golden import golden_tokens

VOCAB = 96
TENSORS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def base(hidden, intermediate, layers):
    return dict(vocab_size=VOCAB, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def models():
    """Name, architecture, model, type of each matrix by its name in the file."""
    llama = LlamaForCausalLM(LlamaConfig(**base(64, 96, 2), tie_word_embeddings=False))
    yield "llama-q8_0", "llama", llama, lambda name: Type.F16 if name == "output" else Type.Q8_0
    qwen = Qwen3ForCausalLM(Qwen3Config(**base(256, 256, 1), head_dim=64, tie_word_embeddings=True))
    kinds = {"token_embd": Type.Q6_K, "attn_v": Type.Q6_K, "ffn_down": Type.BF16, "attn_k": Type.F32}
    yield "qwen3-k", "qwen3", qwen, lambda name: kinds.get(name, Type.Q4_K)


def quantised(values, kind, rng):
    """Bytes in the file, and the values they stand for."""
    if kind in (Type.Q4_K, Type.Q6_K):
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // 256, size), dtype=np.uint8)
        scale = (rng.random(blocks.shape[:2]) * 2e-4 + 1e-4).astype(np.float16)
        places = [0] if kind == Type.Q4_K else [208]
        for place in places:
            blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
        if kind == Type.Q4_K:
            blocks[..., 2:4] = (scale * np.float16(7))[..., None].view(np.uint8)
        data = blocks.reshape(values.shape[0], -1)
    else:
        data = gguf.quants.quantize(values, kind)
    return data, gguf.quants.dequantize(data, kind).reshape(values.shape)


def gguf_name(name):
    parts = name.removeprefix("model.layers.").split(".")
    if name.startswith("model.layers."):
        return f"blk.{parts[0]}.", TENSORS[".".join(parts[1:-1])]
    return "", TENSORS[name.removesuffix(".weight")]


def interleave(values, heads):
    """As converters write Q and K of llama: the halves of each head interleaved."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write(out_dir, name, arch, model, kind_of, seed):
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    config = model.config
    writer = gguf.GGUFWriter(out_dir / f"{name}.gguf", arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if arch == "llama":
        factors = np.linspace(1.0, 8.0, config.head_dim // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
        model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            prefix, stem = gguf_name(key)
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * noise)
                writer.add_tensor(f"{prefix}{stem}.weight", parameter.numpy())
                continue
            kind = kind_of(stem)
            data, values = quantised((0.15 * noise).numpy(), kind, rng)
            parameter.copy_(torch.from_numpy(values.copy()))
            if arch == "llama" and stem in ("attn_q", "attn_k"):
                data = interleave(data, config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads)
            writer.add_tensor(f"{prefix}{stem}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(golden_tokens(model.eval(), generator, VOCAB), out_dir / f"{name}.safetensors")
    for path in out_dir.iterdir():
        path.chmod(0o644)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out_dir = pathlib.Path(sys.argv[1])
    out_dir.mkdir(parents=True, exist_ok=True)
    for seed, (name, arch, model, kind_of) in enumerate(models()):
        model.set_attn_implementation("eager")
        write(out_dir, name, arch, model.float(), kind_of, seed)
        print(name)


if __name__ == "__main__":
    sys.exit(main())
