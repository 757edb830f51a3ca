#!/usr/bin/env python3
"""Makes a model of 8B's sizes of random weights (16 GB) beside the tokenizer of a small one, to see how long an engine takes to start with it.

  big_model.py SMALL OUT
"""

import json
import os
import shutil
import sys

HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 32, 8, 128, 128256
PIECE = 64 << 20


def tensors():
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (HIDDEN,)
        yield at + "post_attention_layernorm.weight", (HIDDEN,)
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            yield at + f"self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield at + "self_attn.o_proj.weight", (HIDDEN, HEADS * DIM)
        for name, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER))):
            yield at + f"mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (HIDDEN,)


def main():
    small, out = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    for name in os.listdir(small):
        if not name.endswith(".safetensors"):
            shutil.copy(os.path.join(small, name), out)
    with open(os.path.join(small, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config.update(hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    config.update(num_key_value_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCAB, tie_word_embeddings=True)
    config.update(torch_dtype="bfloat16")
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    header, end = {}, 0
    for name, shape in tensors():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    # random signs and mantissas, exponents that keep every value small
    piece = bytearray(os.urandom(PIECE))
    piece[1::2] = piece[1::2].translate(bytes(byte & 0x80 | 0x3C for byte in range(256)))
    with open(os.path.join(out, "model.safetensors"), "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for start in range(0, end, PIECE):
            file.write(piece[: min(PIECE, end - start)])


if __name__ == "__main__":
    main()
