"""Models of known shapes with random weights, as GGUF files that both engines read: BF16 is written here, the quantised ones are made
from it by llama-quantize. Once each, into a cache folder."""
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
        for row in range(dims[1] if kind == TENSOR_BF16 else 0):
            if row % 1024 == 0:
                rows = min(1024, dims[1] - row)
                values = bytearray(2 * dims[0] * rows)
                values[0::2] = chance.randbytes(dims[0] * rows)
                values[1::2] = chance.randbytes(dims[0] * rows).translate(HIGH_BYTE)
                out.write(values)


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
