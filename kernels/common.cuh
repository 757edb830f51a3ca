// What every kernel shares: the two worlds it is compiled for (a device, and this processor through shim/host.h), the number formats of
// weights, and sums over a warp in one fixed order.
//
// Rules of all kernels: a row's result depends on that row and its own sequence alone, so each sum has an order that the shape of one row
// fixes (EP4); products that are added are one `fmaf`, so that no compiler may choose; shared memory is dynamic (the shim fills it with
// NaN); every thread of a block reaches every barrier.
#pragma once

#include <stdint.h>

#ifdef TRUEBEAT_HOST
#include "shim/host.h"
#else
#define KERNEL extern "C" __global__ void
extern __shared__ __align__(16) unsigned char truebeat_shared[];
#define SHARED(type, name) type *name = reinterpret_cast<type *>(truebeat_shared)
#define FN static __device__ __forceinline__
#endif

// First in every kernel, before it touches memory. In a graph a kernel may begin while the one before it still runs: its blocks are placed,
// and wait here until all that came before has ended and is written. Where nothing was begun early it does nothing.
FN void follow() {
#if !defined(TRUEBEAT_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#define WARP 32
#define ALL_LANES 0xffffffffu

FN float bits_f32(uint32_t bits) {
    union { uint32_t u; float f; } v;
    v.u = bits;
    return v.f;
}

FN uint32_t f32_bits(float value) {
    union { uint32_t u; float f; } v;
    v.f = value;
    return v.u;
}

FN float bf16_to_f32(uint16_t x) { return bits_f32((uint32_t)x << 16); }

// To the nearest, ties to even; what is no number stays so.
FN uint16_t f32_to_bf16(float x) {
    uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact, subnormals included.
FN float f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = x & 0x7fffu;
    if (rest >= 0x7c00u) return bits_f32(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    // the exponent's bias is 112 too small; a product with a power of two is exact and sets subnormals right
    float value = bits_f32(rest << 13) * bits_f32((uint32_t)(127 + 112) << 23);
    return bits_f32(sign | f32_bits(value));
}

// e4m3 as of OCP: no infinities, 0x7f is none.
FN float e4m3_to_f32(uint8_t x) {
    uint32_t sign = (uint32_t)(x & 0x80u) << 24, rest = x & 0x7fu;
    if (rest == 0x7fu) return bits_f32(0x7fc00000u);
    float value = bits_f32(rest << 20) * bits_f32((uint32_t)(127 + 120) << 23);
    return bits_f32(sign | f32_bits(value));
}

// Four words that are read at once, from a place that is a multiple of 16.
struct alignas(16) Words4 {
    uint32_t word[4];
};

struct alignas(16) Floats4 {
    float at[4];
};

struct alignas(8) Floats2 {
    float at[2];
};

#define LOG2_E 1.4426950408889634f

FN bool is_aligned(const void *place) { return ((uintptr_t)place & 15u) == 0; }

FN uint16_t u16_at(const uint8_t *p) { return (uint16_t)(p[0] | (uint16_t)p[1] << 8); }

// silu(gate) * up, wherever it is done.
FN float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// The sum over the lanes of a warp, by halves: the same order whoever calls.
FN float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

FN float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Formats of weights. Each has `value(row, i)`, the plain meaning of a byte string, as `decode_row` of engine/src/weights has it.

struct F32 {
    FN float value(const uint8_t *row, uint32_t i) {
        const uint8_t *p = row + 4ull * i;
        return bits_f32(p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    }
    FN uint64_t row_bytes(uint32_t cols) { return 4ull * cols; }
};

struct F16 {
    FN float value(const uint8_t *row, uint32_t i) { return f16_to_f32(u16_at(row + 2ull * i)); }
    FN uint64_t row_bytes(uint32_t cols) { return 2ull * cols; }
};

struct Bf16 {
    FN float value(const uint8_t *row, uint32_t i) { return bf16_to_f32(u16_at(row + 2ull * i)); }
    FN uint64_t row_bytes(uint32_t cols) { return 2ull * cols; }
};

// Bytes of the row's values, then its scale (f32) on the next multiple of four.
struct E4m3 {
    FN float value(const uint8_t *row, uint32_t i) { return e4m3_to_f32(row[i]); }
    FN uint64_t row_bytes(uint32_t cols) { return ((uint64_t)cols + 3) / 4 * 4 + 4; }
    FN float scale(const uint8_t *row, uint32_t cols) { return F32::value(row + (((uint64_t)cols + 3) / 4 * 4), 0); }
};

// 32 values: a scale (f16) and 32 signed bytes.
struct Q80 {
    FN float value(const uint8_t *row, uint32_t i) {
        const uint8_t *block = row + 34ull * (i / 32);
        return f16_to_f32(u16_at(block)) * (float)(int8_t)block[2 + i % 32];
    }
    FN uint64_t row_bytes(uint32_t cols) { return 34ull * (cols / 32); }
};

// 256 values: scale and offset of scales (f16), 8 scales and 8 offsets of 6 bits, 256 x 4 bits.
struct Q4K {
    FN uint32_t scale(const uint8_t *block, uint32_t group) {
        const uint8_t *packed = block + 4;
        return group < 4 ? packed[group] & 63u : (packed[group + 4] & 15u) | (uint32_t)(packed[group - 4] >> 6) << 4;
    }
    FN uint32_t offset(const uint8_t *block, uint32_t group) {
        const uint8_t *packed = block + 4;
        return group < 4 ? packed[group + 4] & 63u : (uint32_t)(packed[group + 4] >> 4) | (uint32_t)(packed[group] >> 6) << 4;
    }
    // 64 values share 32 bytes: the first 32 in the low halves, the next in the high
    FN uint32_t bits(const uint8_t *block, uint32_t i) {
        uint32_t byte = block[16 + i / 64 * 32 + i % 32];
        return i % 64 < 32 ? byte & 15u : byte >> 4;
    }
    FN float value(const uint8_t *row, uint32_t i) {
        const uint8_t *block = row + 144ull * (i / 256);
        uint32_t within = i % 256, group = within / 32;
        float d = f16_to_f32(u16_at(block)), d_offset = f16_to_f32(u16_at(block + 2));
        // each product is rounded, as on the processor
        float scaled = d * (float)scale(block, group);
        return fmaf(scaled, (float)bits(block, within), -(d_offset * (float)offset(block, group)));
    }
    FN uint64_t row_bytes(uint32_t cols) { return 144ull * (cols / 256); }
};

// 256 values: 256 x 4 low bits, 256 x 2 high bits, 16 signed scales, the scale of scales (f16).
struct Q6K {
    FN int bits(const uint8_t *block, uint32_t i) {
        uint32_t half = i / 128, within = i % 128;
        uint32_t low = block[half * 64 + within % 64] >> (within / 64 * 4) & 15u;
        uint32_t high = block[128 + half * 32 + within % 32] >> (within / 32 * 2) & 3u;
        return (int)(low | high << 4) - 32;
    }
    FN float value(const uint8_t *row, uint32_t i) {
        const uint8_t *block = row + 210ull * (i / 256);
        uint32_t within = i % 256;
        return f16_to_f32(u16_at(block + 208)) * (float)(int8_t)block[192 + within / 16] * (float)bits(block, within);
    }
    FN uint64_t row_bytes(uint32_t cols) { return 210ull * (cols / 256); }
};
