"""Models of known shapes with random weights. For llama.cpp GGUF files: BF16 is written here, the quantised ones are made from it by
llama-quantize. For vLLM the same BF16 weights as a folder of `transformers`. Once each, into a cache folder."""
import json
import random
import struct
import subprocess
import sys
from pathlib import Path

SHAPES = {
    # Qwen3-0.6B and Llama-3.2-1B
    "qwen3": {"arch": "qwen3", "hidden": 1024, "ffn": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151936,
              "theta": 1e6, "norms": True},
    "llama": {"arch": "llama", "hidden": 2048, "ffn": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "vocab": 128256,
              "theta": 5e5, "norms": False},
}
FORMATS = {"bf16": None, "q8_0": "Q8_0", "q4_k_m": "Q4_K_M"}
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
TENSOR_F32, TENSOR_BF16 = 0, 30
ALIGNMENT = 32
# Sign kept, the rest made an exponent: numbers between 2^-7 and 2^-5
HIGH_BYTE = bytes((b & 0x80) | 0x3C for b in range(256))


def file_of(folder, shape, kind, programs):
    """The path of a model; makes it where it is not yet there."""
    path = Path(folder) / f"{shape}-{kind}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    print(f"# making {path.name}", file=sys.stderr)
    if kind == "bf16":
        with open(part, "wb") as out:
            write(out, SHAPES[shape])
    else:
        whole = file_of(folder, shape, "bf16", programs)
        command = [Path(programs) / "llama-quantize", whole, part, FORMATS[kind], "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part.rename(path)
    return path


def write(out, shape):
    """Header, then the tensors in its order."""
    tensors = list(tensors_of(shape))
    out.write(header(shape, tensors))
    chance = random.Random(1)
    for _, dims, kind in tensors:
        out.write(b"\0" * (-out.tell() % ALIGNMENT))
        if kind == TENSOR_F32:
            out.write(struct.pack("<f", 1.0) * dims[0])
        else:
            out.writelines(numbers_of(dims, chance))


def numbers_of(dims, chance):
    """A matrix in BF16, up to 1024 rows at a time."""
    for row in range(0, dims[1], 1024):
        count = dims[0] * min(1024, dims[1] - row)
        values = bytearray(2 * count)
        values[0::2] = chance.randbytes(count)
        values[1::2] = chance.randbytes(count).translate(HIGH_BYTE)
        yield values


def folder_of(folder, shape):
    """The path of a model as `transformers` has it, with the numbers of the BF16 GGUF; makes it where it is not yet there."""
    path = Path(folder) / f"{shape}-bf16"
    if path.exists():
        return path
    part = path.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    print(f"# making {path.name}", file=sys.stderr)
    s = SHAPES[shape]
    for name, value in {"config": config(s), "tokenizer": tokenizer(s["vocab"]), "tokenizer_config": TOKENIZER_CONFIG}.items():
        (part / f"{name}.json").write_text(json.dumps(value))
    with open(part / "model.safetensors", "wb") as out:
        write_safetensors(out, s)
    part.rename(path)
    return path


def write_safetensors(out, shape):
    tensors, table, offset, chance = list(tensors_of(shape)), {}, 0, random.Random(1)
    for name, dims, _ in tensors:
        size = 2 * dims[0] * (dims[1] if len(dims) == 2 else 1)
        table[published(name)] = {"dtype": "BF16", "shape": dims[::-1], "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)
    out.write(struct.pack("<Q", len(head)) + head)
    for _, dims, kind in tensors:
        if kind == TENSOR_F32:
            out.write(struct.pack("<H", 0x3F80) * dims[0])
        else:
            out.writelines(numbers_of(dims, chance))


def published(name):
    """A tensor's name in `transformers`."""
    words = name.split(".")
    if words[0] != "blk":
        return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[words[0]] + ".weight"
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
             "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    return f"model.layers.{words[1]}.{parts[words[2]]}.weight"


def config(s):
    kind = {"qwen3": "Qwen3", "llama": "Llama"}[s["arch"]]
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": s["arch"], "torch_dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": s["hidden"], "intermediate_size": s["ffn"], "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"], "vocab_size": s["vocab"], "rope_theta": s["theta"],
            "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True, "attention_bias": False,
            "eos_token_id": s["vocab"] - 1}


TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 32768}


def tokenizer(size):
    tokens, merges, _ = vocabulary(size)
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": size - 1, "content": tokens[-1], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None, "pre_tokenizer": plain,
            "post_processor": None, "decoder": plain, "model": model}


def tensors_of(s):
    """Name, dimensions (fastest first) and type of each tensor."""
    hidden, q, kv = s["hidden"], s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    yield "token_embd.weight", (hidden, s["vocab"]), TENSOR_BF16
    yield "output_norm.weight", (hidden,), TENSOR_F32
    for layer in range(s["layers"]):
        norms = {"attn_norm": hidden, "ffn_norm": hidden}
        if s["norms"]:
            norms |= {"attn_q_norm": s["head_dim"], "attn_k_norm": s["head_dim"]}
        for name, size in norms.items():
            yield f"blk.{layer}.{name}.weight", (size,), TENSOR_F32
        matrices = {"attn_q": (hidden, q), "attn_k": (hidden, kv), "attn_v": (hidden, kv), "attn_output": (q, hidden),
                    "ffn_gate": (hidden, s["ffn"]), "ffn_up": (hidden, s["ffn"]), "ffn_down": (s["ffn"], hidden)}
        for name, dims in matrices.items():
            yield f"blk.{layer}.{name}.weight", dims, TENSOR_BF16


def header(s, tensors):
    """Metadata and the table of tensors."""
    pairs = list(metadata(s))
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, kind, value in pairs:
        out += text(key) + struct.pack("<I", kind) + value
    offset = 0
    for name, dims, kind in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        size = dims[0] * 4 if kind == TENSOR_F32 else dims[0] * dims[1] * 2
        offset += size + -size % ALIGNMENT
    return out + b"\0" * (-len(out) % ALIGNMENT)


def metadata(s):
    arch = s["arch"]
    yield "general.architecture", STRING, text(arch)
    yield "general.name", STRING, text("random")
    numbers = {"context_length": 32768, "embedding_length": s["hidden"], "block_count": s["layers"], "feed_forward_length": s["ffn"],
               "attention.head_count": s["heads"], "attention.head_count_kv": s["kv_heads"], "attention.key_length": s["head_dim"],
               "attention.value_length": s["head_dim"], "rope.dimension_count": s["head_dim"], "vocab_size": s["vocab"]}
    for key, value in numbers.items():
        yield f"{arch}.{key}", U32, struct.pack("<I", value)
    yield f"{arch}.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-6)
    yield f"{arch}.rope.freq_base", F32, struct.pack("<f", s["theta"])
    tokens, merges, kinds = vocabulary(s["vocab"])
    yield "tokenizer.ggml.model", STRING, text("gpt2")
    yield "tokenizer.ggml.pre", STRING, text("gpt-2")
    yield "tokenizer.ggml.tokens", ARRAY, array(STRING, [text(t) for t in tokens])
    yield "tokenizer.ggml.token_type", ARRAY, array(I32, [struct.pack("<i", k) for k in kinds])
    yield "tokenizer.ggml.merges", ARRAY, array(STRING, [text(m) for m in merges])
    yield "tokenizer.ggml.eos_token_id", U32, struct.pack("<I", s["vocab"] - 1)
    yield "tokenizer.ggml.add_bos_token", BOOL, b"\0"


def vocabulary(size):
    """The 256 bytes, words of two and of three letters, and an end: every token but the bytes is text by itself."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    tokens = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]
    letters = [chr(b) for b in range(33, 127)]
    pairs = [(a, b) for a in letters for b in letters]
    triples = ((a + b, c) for a, b in pairs for c in letters)
    merges = pairs + [next(triples) for _ in range(size - len(tokens) - len(pairs) - 1)]
    tokens += [a + b for a, b in merges] + ["<end>"]
    return tokens, [f"{a} {b}" for a, b in merges], [1] * (size - 1) + [3]


def text(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def array(kind, items):
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)
