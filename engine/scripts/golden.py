#!/usr/bin/env python3
"""Makes tiny random models with `transformers` and writes the logits it computes in f32: engine/tests/golden/.

    engine/scripts/golden.py OUT_DIR [--only …] write the models and their golden values
    engine/scripts/golden.py --check-demo DIR   load a folder made by `truebeat demo-model` and show that it works

Each model folder holds config.json, the weights and golden.safetensors:
    tokens           i64 [n]         a sequence of token ids
    prompt_len       i64 [1]         how many of them are the prompt; the rest is the greedy continuation
    logits           f32 [n, vocab]  logits at every position
and, of a model with an MTP head, from a class of this file's own (MtpHead): `transformers` has no such head to be asked,
    head_logits      f32 [n - 1, vocab]  what the head says at every position but the last, given the token after it
    guesses          i64 [g]             the head's greedy guesses of what comes after the last token, each made from the one before
    guess_logits     f32 [g, vocab]      what they were taken from
Versions are pinned in requirements.txt; the output is committed, so the tests need no Python.
"""

import argparse
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM,
    Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

VOCAB, PROMPT_LEN, NEW_TOKENS, GUESSES = 160, 21, 12, 4
BASE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


class MtpHead(Qwen2DecoderLayer):
    """MiMo's head, which `transformers` does not have: a block over the last hidden state of each token and the embedding of the next one."""

    def __init__(self, config):
        super().__init__(config, layer_idx=0)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = Qwen2RMSNorm(size, eps), Qwen2RMSNorm(size, eps)
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(size, eps)

    def states(self, model, before, tokens):
        """`before[i]` goes with `tokens[i]`; the result is what the output head takes."""
        both = torch.cat([self.hidden_layernorm(before), self.token_layernorm(model.model.embed_tokens(tokens))], dim=-1)
        places = torch.arange(len(tokens))[None]
        x = self.input_proj(both)[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        x = super().forward(x, attention_mask=mask, position_embeddings=model.model.rotary_emb(x, places))
        return self.final_layernorm(x)[0]


def mimo():
    rope = dict(rope_type="default", rope_theta=640000.0)
    config = Qwen2Config(**BASE, tie_word_embeddings=False, rope_parameters=rope, attn_implementation="eager")
    model = Qwen2ForCausalLM(config)
    model.model.mtp_layers = torch.nn.ModuleList([MtpHead(config)])
    return model.eval()


def models():
    """Name, model, dtype on disk, shards. Each variant is there for one thing the engine could get wrong."""
    yield "llama", LlamaForCausalLM(LlamaConfig(**BASE, tie_word_embeddings=False)), torch.float32, 1
    yield "llama-tied-bf16", LlamaForCausalLM(LlamaConfig(**BASE, head_dim=16, tie_word_embeddings=True)), torch.bfloat16, 1
    biased = dict(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False)
    yield "llama-rope3-bias", LlamaForCausalLM(LlamaConfig(**BASE, **biased)), torch.float16, 2
    yield "qwen3", Qwen3ForCausalLM(Qwen3Config(**BASE, head_dim=12, tie_word_embeddings=False)), torch.float32, 1
    qwen = dict(head_dim=16, tie_word_embeddings=True, attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=1e6))
    yield "qwen3-tied-bf16", Qwen3ForCausalLM(Qwen3Config(**BASE, **qwen)), torch.bfloat16, 1
    mistral = dict(sliding_window=7, head_dim=16, tie_word_embeddings=False)
    yield "mistral-window", MistralForCausalLM(MistralConfig(**BASE, **mistral)), torch.bfloat16, 1
    yarn = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16)
    qwen2 = dict(tie_word_embeddings=True, rope_parameters=yarn, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    yield "qwen2-yarn-window", Qwen2ForCausalLM(Qwen2Config(**BASE, **qwen2)), torch.float16, 1
    linear = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
    yield "qwen2-linear", Qwen2ForCausalLM(Qwen2Config(**BASE, tie_word_embeddings=False, rope_parameters=linear)), torch.bfloat16, 1
    moe = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, tie_word_embeddings=False)
    yield "qwen3-moe", Qwen3MoeForCausalLM(Qwen3MoeConfig(**BASE, **moe, norm_topk_prob=True)), torch.bfloat16, 2
    mixed = dict(moe, num_experts_per_tok=3, mlp_only_layers=[0], norm_topk_prob=False)
    yield "qwen3-moe-mixed", Qwen3MoeForCausalLM(Qwen3MoeConfig(**BASE, **mixed)), torch.bfloat16, 1
    yield "mimo", mimo(), torch.bfloat16, 1


def randomise(model, generator):
    """Every parameter random, norms and biases too: a weight of one would hide that it is never multiplied."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if "norm" in name else 0.15 * noise)


def golden_values(folder, generator):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return golden_tokens(model, generator, VOCAB)


def mimo_values(folder, generator):
    """As `golden_values`, and what the head says. The folder becomes one of MiMo's."""
    config = json.loads((folder / "config.json").read_text())
    config |= dict(architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model = mimo()
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    values, states = golden_tokens(model, generator, VOCAB), []
    with torch.no_grad():
        hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0]))
        model(values["tokens"][None])
        hook.remove()
        before, tokens, guesses, rows = states[0][:-1], values["tokens"][1:], [], []
        for _ in range(GUESSES):
            made = model.model.mtp_layers[0].states(model, before, tokens)
            rows.append(model.lm_head(made))
            guesses.append(rows[-1][-1].argmax())
            # the next guess stands on this one's state, in place of one that the model has not made yet
            before, tokens = torch.cat([before, made[-1:]]), torch.cat([tokens, guesses[-1][None]])
    head = {"head_logits": rows[0], "guesses": torch.stack(guesses), "guess_logits": torch.stack([row[-1] for row in rows])}
    return values | head


def golden_tokens(model, generator, vocab):
    tokens = torch.randint(3, vocab, (1, PROMPT_LEN), generator=generator)
    with torch.no_grad():
        out = model(tokens, use_cache=True)
        rows = [out.logits[0]]
        for _ in range(NEW_TOKENS):
            token = out.logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], dim=1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
    return {"tokens": tokens[0], "prompt_len": torch.tensor([PROMPT_LEN]), "logits": torch.cat(rows).contiguous()}


def write(out_dir, only):
    for seed, (name, model, dtype, shards) in enumerate(models()):
        if only and name not in only:
            continue
        generator = torch.Generator().manual_seed(seed)
        folder = out_dir / name
        randomise(model, generator)
        bytes_total = sum(p.numel() * dtype.itemsize for p in model.parameters())
        model.to(dtype).save_pretrained(folder, max_shard_size=bytes_total // shards + 1 if shards > 1 else "1GB")
        values = (mimo_values if name == "mimo" else golden_values)(folder, generator)
        save_file(values, folder / "golden.safetensors")
        for path in folder.iterdir():
            path.chmod(0o644)
        print(name, values["tokens"].tolist())


def check_demo(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "count: 1, 2 é 漢"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=16, do_sample=False)
    plain = tokenizer("count: 1, 2 é 漢").input_ids
    result = {"prompt": prompt, "prompt_ids": ids[0].tolist(), "plain_ids": plain, "output_ids": out[0, ids.shape[1]:].tolist()}
    print(json.dumps(result, ensure_ascii=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-demo", action="store_true", help="DIR is a demo model to load")
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", help="names of the models to write; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    check_demo(args.dir) if args.check_demo else write(args.dir, args.only)


if __name__ == "__main__":
    sys.exit(main())
