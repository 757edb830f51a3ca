#!/usr/bin/env python3
"""The same sizes by PyTorch: a decoder of Llama's shape in bf16, its products by cuBLAS, attention by `scaled_dot_product_attention`, decode
steps by CUDA graphs, as engines of the field run them. Same names and units as `gpu bench`; logits stay on the device, where the greedy token
is taken, which is to the peer's advantage."""

import argparse
import time

import torch
import torch.nn.functional as F

SIZES = {
    "1b": dict(hidden=2048, inter=8192, layers=16, heads=32, kv_heads=8, dim=64, vocab=128256),
    "8b": dict(hidden=4096, inter=14336, layers=32, heads=32, kv_heads=8, dim=128, vocab=128256),
}
ROOM = 1024
CONTEXT = 640  # `gpu bench` decodes from 512 to 767


class Decoder:
    def __init__(self, s):
        self.s = s
        new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
        q, kv = s["heads"] * s["dim"], s["kv_heads"] * s["dim"]
        # one product for Q, K and V and one for gate and up, as vLLM and SGLang have it
        self.layers = [
            (new(q + 2 * kv, s["hidden"]), new(s["hidden"], q), new(2 * s["inter"], s["hidden"]), new(s["hidden"], s["inter"]))
            for _ in range(s["layers"])
        ]
        self.embed = new(s["vocab"], s["hidden"])
        self.one = torch.ones(s["hidden"], device="cuda", dtype=torch.bfloat16)
        self.head_one = torch.ones(s["dim"], device="cuda", dtype=torch.bfloat16)

    def rope(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, tokens, cos, sin, cache, pos):
        s = self.s
        batch, rows = tokens.shape
        x = F.embedding(tokens, self.embed)
        for i, (qkv, o, gate_up, down) in enumerate(self.layers):
            n = F.rms_norm(x, (s["hidden"],), self.one, 1e-6)
            q, k, v = F.linear(n, qkv).view(batch, rows, -1, s["dim"]).split((s["heads"], s["kv_heads"], s["kv_heads"]), 2)
            q = self.rope(F.rms_norm(q, (s["dim"],), self.head_one, 1e-6), cos, sin).transpose(1, 2)
            k = self.rope(F.rms_norm(k, (s["dim"],), self.head_one, 1e-6), cos, sin).transpose(1, 2)
            v = v.transpose(1, 2)
            if cache is not None:
                cache[i][0][:, :, pos : pos + rows] = k
                cache[i][1][:, :, pos : pos + rows] = v
                k, v = (c[:, :, : pos + rows] for c in cache[i])
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(batch, rows, -1), o)
            g, u = F.linear(F.rms_norm(x, (s["hidden"],), self.one, 1e-6), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(g) * u, down)
        x = F.rms_norm(x[:, -1], (s["hidden"],), self.one, 1e-6)
        return F.linear(x, self.embed).argmax(-1)


def timed(run, seconds):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    rates = []
    for _ in range(5):
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds / 5:
            for _ in range(5):
                run()
            torch.cuda.synchronize()
            steps += 5
        rates.append(steps / (time.perf_counter() - began))
    rates.sort()
    return rates[2], (rates[4] - rates[0]) / rates[2] * 100


def tell(name, rate, tokens):
    print(f"{name} {rate[0] * tokens:.1f} tok/s - (runs differ by {rate[1]:.1f} %)", flush=True)


@torch.inference_mode()
def main():
    words = argparse.ArgumentParser()
    words.add_argument("--seconds", type=float, default=5)
    words.add_argument("--sizes", nargs="*", default=list(SIZES))
    args = words.parse_args()
    a, b = torch.rand(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    rate = timed(lambda: b.copy_(a), args.seconds / 2)
    print(f"peer.copy.bandwidth {rate[0] * 2 * 4 * (1 << 28) / 1e9:.0f} GB/s -")
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = timed(lambda: m @ m, args.seconds / 2)
    print(f"peer.matmul {rate[0] * 2 * 8192**3 / 1e12:.0f} TFLOP/s -")
    del a, b, m
    for name in args.sizes:
        s = SIZES[name]
        model = Decoder(s)
        turn = lambda rows: tuple(torch.rand(rows, 1, s["dim"] // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for batch in (1, 8, 32, 128, 256):
            cache = [tuple(torch.zeros(batch, s["kv_heads"], ROOM, s["dim"], device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(s["layers"])]
            tokens, (cos, sin) = torch.zeros(batch, 1, device="cuda", dtype=torch.long), turn(1)
            step = lambda: model.forward(tokens, cos, sin, cache, CONTEXT - 1)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                step(), step()
            torch.cuda.synchronize()
            # the token comes back each step, as an engine needs it
            out = torch.empty(batch, dtype=torch.long, pin_memory=True)
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                out_on_device = step()
            def run():
                graph.replay()
                out.copy_(out_on_device, non_blocking=True)
                torch.cuda.current_stream().synchronize()
            tell(f"peer.{name}.decode.graphs.batch{batch}", timed(run, args.seconds), batch)
            del graph, cache
        for seqs in (1, 4):
            tokens, (cos, sin) = torch.zeros(seqs, 512, device="cuda", dtype=torch.long), turn(512)
            tell(f"peer.{name}.prefill.eager.{seqs * 512}", timed(lambda: model.forward(tokens, cos, sin, None, 0), args.seconds), seqs * 512)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
