#!/usr/bin/env python3
"""Writes small GGUF files with the `gguf` package and the logits that `transformers` computes in f32 from the same, dequantised weights.

    engine/scripts/golden_gguf.py OUT_DIR           write them
    engine/scripts/golden_gguf.py --check DIR       read the files in DIR with the reader of `transformers`, which knows nothing of this
                                                    script, and compare what it computes with the golden values

NAME.gguf is the model, NAME.safetensors its golden values as golden.py writes them. Q8_0 is quantised by `gguf`; it cannot quantise
Q4_K and Q6_K, so those blocks are random bits with small scales, and what they mean is what `gguf` dequantises.
"""

import argparse
import pathlib
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
    Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from golden import golden_tokens

VOCAB = 96
TENSORS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}
# as `transformers` keeps the experts of a layer: stacked, gate over up
EXPERTS = {"mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",)}


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
    # Mistral's files say llama, and have a window; Q and K are interleaved as llama's
    mistral = MistralForCausalLM(MistralConfig(**base(64, 96, 2), head_dim=32, sliding_window=7, tie_word_embeddings=False))
    yield "mistral-q8_0", "llama", mistral, lambda name: Type.Q8_0
    # Qwen2's have biases, and rope is not interleaved
    yarn = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=32)
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**base(64, 96, 2), tie_word_embeddings=False, rope_parameters=yarn))
    yield "qwen2-q8_0", "qwen2", qwen2, lambda name: Type.BF16 if name == "output" else Type.Q8_0
    # experts are stacked in one tensor a layer and kind
    moe = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32, tie_word_embeddings=False, norm_topk_prob=True)
    qwen3moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**base(64, 96, 2), **moe))
    yield "qwen3moe-q8_0", "qwen3moe", qwen3moe, lambda name: Type.F32 if name == "ffn_gate_inp" else Type.Q8_0


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
    """What stands before a tensor's name, the name, and what stands after."""
    stem, end = name.rsplit(".", 1)
    if name.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.", TENSORS[part], end
    return "", TENSORS[stem], end


def write_experts(writer, name, parameter, kind_of, generator, rng):
    """All experts of a layer; `parameter` becomes what is written."""
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    stacks = EXPERTS[part]
    stacked = 0.15 * torch.randn(parameter.shape, generator=generator)
    means = []
    for stem, values in zip(stacks, stacked.chunk(len(stacks), dim=1)):
        data, values = quantised(values.contiguous().numpy(), kind_of(stem), rng)
        means.append(torch.from_numpy(values.copy()))
        writer.add_tensor(f"blk.{layer}.{stem}.weight", data, raw_dtype=kind_of(stem))
    parameter.copy_(torch.cat(means, dim=1))


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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if arch != "qwen3moe" and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "llama-q8_0":
        factors = np.linspace(1.0, 8.0, head_dim // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
        model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.split(".", 3)[-1] in EXPERTS:
                write_experts(writer, key, parameter, kind_of, generator, rng)
                continue
            prefix, stem, end = gguf_name(key)
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.15 * noise if end == "bias" else 1.0 + 0.3 * noise)
                writer.add_tensor(f"{prefix}{stem}.{end}", parameter.numpy())
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


def check(folder):
    """What the reader of `transformers` makes of the files: every size that it finds in them, and what it computes, against the golden
    values. It leaves out the factors of rope, and the window, that llama's files may have; these it is told."""
    for name, arch, model, _ in models():
        path, expected = folder / f"{name}.gguf", model.config.to_dict()
        read = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        other = {key: (value, expected[key]) for key, value in read.items() if key in expected and expected[key] != value}
        # a file of Mistral's says that it is llama's, and is read as such
        reader = LlamaForCausalLM if arch == "llama" else type(model)
        config = LlamaConfig(**(expected | dict(model_type="llama"))) if arch == "llama" else model.config
        loaded = reader.from_pretrained(folder, gguf_file=path.name, config=config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.set_attn_implementation("eager")
        model.float().eval()
        if name == "llama-q8_0":
            model.model.rotary_emb.inv_freq /= torch.linspace(1.0, 8.0, model.model.rotary_emb.inv_freq.numel())
        golden = load_file(path.with_suffix(".safetensors"))
        with torch.no_grad():
            logits = model(golden["tokens"][None]).logits[0]
        print(name, "off by", (logits - golden["logits"]).abs().max().item(), "otherwise read", other)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="DIR holds what was written")
    parser.add_argument("dir", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if args.check:
        return check(args.dir)
    out_dir = args.dir
    out_dir.mkdir(parents=True, exist_ok=True)
    for seed, (name, arch, model, kind_of) in enumerate(models()):
        model.set_attn_implementation("eager")
        write(out_dir, name, arch, model.float(), kind_of, seed)
        print(name)


if __name__ == "__main__":
    sys.exit(main())
