#!/usr/bin/env python3
"""Names the kernels: FNV-1a over their sources, in the order of SOURCES. The engine does the same (engine/src/backend/cuda/image.rs) and
takes no image of another name, so that it never runs kernels of another tree."""

from pathlib import Path

SOURCES = [
    "all.cu", "attention.cu", "attention.cuh", "attention_mma.cu", "attention_tiles.cuh", "common.cuh", "elementwise.cu", "kernels.inc",
    "matmul.cu", "mma.cu", "mma.cuh", "mma_sums.cuh", "mma_tile.cu", "norm.cu", "sampling.cu", "spin.cu", "wgmma.cu", "wgmma.cuh",
    "wgmma_tile.cuh",
]


def key() -> str:
    """Sixteen hexadecimal digits."""
    value = 0xCBF29CE484222325
    for name in SOURCES:
        for byte in (Path(__file__).parent / name).read_bytes():
            value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


if __name__ == "__main__":
    print(key())
