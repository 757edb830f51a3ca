// What products on tensor cores have in common: out = x * weight^T + bias, for weights in bf16; x is rounded to bf16, products are added in f32.
// Weights are the left operand (16 outputs), rows of x the right one (8 rows), so that one row costs no more than
// eight.
//
// One order of sums, fixed by `cols` alone, whichever kernel computes a row and whoever is beside it (EP4): columns are
// cut into SPANS spans; a span is added up by tensor cores from zero, step after step of 32 columns; then the sums of the
// first half of the spans are added in order, from zero, and those of the second; then both; and the bias comes last.
// Steps beyond the end are left out; the columns that its last step lacks are zeros.
//
// A lane (g = lane / 4, t = lane % 4) reads columns 8t … 8t + 7 of a step at once, of row g. A product takes 16
// columns, two pairs a lane: the first four of each eight are those of the first, the rest those of the second. So
// columns change places, in both operands alike.
//
// In all of them cols is a multiple of 8, and x, xb and weights begin on multiples of 16 bytes.
#pragma once

#include "mma.cuh"

#define SPANS 8
#define HALF 4 // spans of a half
#define STEP 32
#define EIGHT 8 // values that a lane reads at once, and rows of a product
#define TALL 16 // outputs of a product
#define TILE 128 // outputs of a block that has many rows
#define MMA_THREADS 256

// A multiple of 64; spans at the end are shorter, or empty.
FN uint32_t span_cols(uint32_t cols) { return (cols + SPANS * 64 - 1) / (SPANS * 64) * 64; }

FN uint32_t span_end(uint32_t begin, uint32_t cols) {
    return begin + span_cols(cols) < cols ? begin + span_cols(cols) : cols;
}

// Columns `at[0]` … of a row, of which this lane may read those before `stop`: none, where there is no such row.
template <class T> struct Line {
    const T *at;
    uint32_t stop;
};

template <class T> FN Line<T> line_of(const T *rows, uint32_t row, uint32_t count, uint32_t cols, uint32_t stop) {
    bool real = row < count;
    return {real ? rows + (uint64_t)row * cols : rows, real ? stop : 0};
}

// A total begins at +0, so it is never -0, and no bias is as good as one of zero.
FN float bias_of(const float *bias, uint32_t output) { return bias ? bias[output] : 0.0f; }

FN Words4 rounded(const float *at, bool real) {
    Words4 four[2] = {read16(at, real), read16(at + 4, real)}, eight;
    UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t *pair = four[i / 2].word + i % 2 * 2;
        eight.word[i] = bf16_pair(bits_f32(pair[0]), bits_f32(pair[1]));
    }
    return eight;
}

// One step: M x N products of both halves. `w`: rows g and g + 8 of each sixteen outputs; `x`: row g of each eight
// rows.
template <int M, int N> FN void add_step(float (*sums)[N][4], const Words4 (*w)[2], const Words4 *x) {
    UNROLL
    for (int half = 0; half < 4; half += 2) {
        UNROLL
        for (int i = 0; i < M * N; i++) {
            const uint32_t *low = w[i / N][0].word + half, *high = w[i / N][1].word + half;
            uint32_t a[4] = {low[0], high[0], low[1], high[1]};
            mma_bf16(sums[i / N][i % N], a, x[i % N].word + half);
        }
    }
}

template <int M, int N> FN void clear(float (*sums)[N][4]) {
    UNROLL
    for (int i = 0; i < M * N * 4; i++) sums[i / 4 / N][i / 4 % N][i % 4] = 0.0f;
}

// One product with its own weights.
struct Product {
    float *out;
    const uint16_t *weight;
    const float *bias;
    uint32_t outputs;
};
