// Operations on single values or whole rows: copy, sum, SwiGLU, rows by index, embedding, rotation, and the cache's slots.
// Reference: engine/src/backend/cpu. One thread a value, or four or sixteen where nothing but the memory's speed counts; nothing is shared.
#include "common.cuh"

FN uint64_t my_index() { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }

FN Floats4 *fours(float *at) { return reinterpret_cast<Floats4 *>(at); }
FN const Floats4 *fours(const float *at) { return reinterpret_cast<const Floats4 *>(at); }

// out = x, `count` values. A thread has 16, four at a time and a block's width apart: all are read before the first is written.
KERNEL copy_f32(float *out, const float *x, uint64_t count) {
    follow();
    uint64_t first = (uint64_t)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    if (is_aligned(out) && is_aligned(x) && (first + 3 * blockDim.x + 1) * 4 <= count) {
        Floats4 got[4];
        for (uint32_t i = 0; i < 4; i++) got[i] = fours(x)[first + i * blockDim.x];
        for (uint32_t i = 0; i < 4; i++) fours(out)[first + i * blockDim.x] = got[i];
        return;
    }
    for (uint32_t i = 0; i < 16; i++) {
        uint64_t at = (first + i / 4 * blockDim.x) * 4 + i % 4;
        if (at < count) out[at] = x[at];
    }
}

// x += y, `count` values, four a thread.
KERNEL add_f32(float *x, const float *y, uint64_t count) {
    follow();
    uint64_t first = my_index() * 4;
    if (is_aligned(x) && is_aligned(y) && first + 4 <= count) {
        Floats4 sum = *fours(x + first), more = *fours(y + first);
        for (int i = 0; i < 4; i++) sum.at[i] = sum.at[i] + more.at[i];
        *fours(x + first) = sum;
        return;
    }
    for (uint64_t i = first; i < first + 4 && i < count; i++) x[i] = x[i] + y[i];
}

// x = the sum over ranks of what each brought, `count` values of one rank behind those of another, in the order of the ranks and from zero.
KERNEL sum_ranks(float *x, const float *parts, uint32_t world, uint64_t count) {
    follow();
    uint64_t i = my_index();
    if (i >= count) return;
    float sum = 0;
    for (uint32_t rank = 0; rank < world; rank++) sum = sum + parts[rank * count + i];
    x[i] = sum;
}

// The columns of all ranks side by side: rank r has those before ends[r], and brought `rows` rows of them at the beginning of rows * widest.
KERNEL join_ranks(float *out, const float *parts, const uint32_t *ends, uint32_t world, uint32_t rows, uint32_t widest) {
    follow();
    uint64_t i = my_index();
    uint32_t cols = ends[world - 1];
    if (i >= (uint64_t)rows * cols) return;
    uint32_t col = (uint32_t)(i % cols), rank = 0;
    while (col >= ends[rank]) rank++;
    uint32_t start = rank == 0 ? 0 : ends[rank - 1];
    const float *part = parts + (uint64_t)rank * rows * widest;
    out[i] = part[i / cols * (ends[rank] - start) + (col - start)];
}

// gate = silu(gate) * up, `count` values, four a thread.
KERNEL silu_mul(float *gate, const float *up, uint64_t count) {
    follow();
    uint64_t first = my_index() * 4;
    if (is_aligned(gate) && is_aligned(up) && first + 4 <= count) {
        Floats4 product = *fours(gate + first), more = *fours(up + first);
        for (int i = 0; i < 4; i++) product.at[i] = silu_times(product.at[i], more.at[i]);
        *fours(gate + first) = product;
        return;
    }
    for (uint64_t i = first; i < first + 4 && i < count; i++) gate[i] = silu_times(gate[i], up[i]);
}

// out[i] = x[rows[i]], `count` rows of `cols`.
KERNEL gather_rows(float *out, const float *x, const uint32_t *rows, uint32_t count, uint32_t cols) {
    follow();
    uint64_t i = my_index();
    if (i < (uint64_t)count * cols) out[i] = x[(uint64_t)rows[i / cols] * cols + i % cols];
}

// x[rows[i]] += weights[i] * y[i], in the order of i: a thread has a column.
KERNEL scatter_add(float *x, const uint32_t *rows, const float *y, const float *weights, uint32_t count, uint32_t cols) {
    follow();
    uint64_t col = my_index();
    if (col >= cols) return;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)rows[i] * cols + col;
        x[at] = fmaf(weights[i], y[(uint64_t)i * cols + col], x[at]);
    }
}

// Turns the pairs (i, i + head_dim / 2) of each of `heads` heads by the row's angles, `head_dim / 2` cosines and sines a row.
KERNEL rope(float *x, const float *cosines, const float *sines, uint32_t rows, uint32_t heads, uint32_t head_dim) {
    follow();
    uint64_t i = my_index();
    uint32_t half = head_dim / 2;
    if (i >= (uint64_t)rows * heads * half) return;
    uint32_t pair = (uint32_t)(i % half);
    uint64_t head = i / half, row = head / heads;
    float c = cosines[row * half + pair], s = sines[row * half + pair];
    float *at = x + head * head_dim + pair;
    float first = at[0], second = at[half];
    at[0] = fmaf(first, c, -(second * s));
    at[half] = fmaf(second, c, first * s);
}

FN void put(float *place, float value) { *place = value; }
FN void put(uint16_t *place, float value) { *place = f32_to_bf16(value); }

// The cache of a layer, keys and values alike: [block][kv_head][slot of the block][head_dim].
FN uint64_t cache_at(uint32_t slot, uint32_t head, uint32_t kv_heads, uint32_t head_dim, uint32_t block_size) {
    uint64_t block = slot / block_size;
    return ((block * kv_heads + head) * block_size + slot % block_size) * head_dim;
}

template <class T>
FN void store_row(T *keys, T *values, const float *k, const float *v, const uint32_t *slots, uint32_t rows,
                  uint32_t kv_heads, uint32_t head_dim, uint32_t block_size) {
    uint64_t i = my_index();
    if (i >= (uint64_t)rows * kv_heads * head_dim) return;
    uint32_t at = (uint32_t)(i % head_dim), head = (uint32_t)(i / head_dim % kv_heads);
    uint64_t place = cache_at(slots[i / head_dim / kv_heads], head, kv_heads, head_dim, block_size) + at;
    put(keys + place, k[i]);
    put(values + place, v[i]);
}

// Row i of k and v goes to slot slots[i].
KERNEL store_kv_f32(float *keys, float *values, const float *k, const float *v, const uint32_t *slots, uint32_t rows,
                    uint32_t kv_heads, uint32_t head_dim, uint32_t block_size) {
    follow();
    store_row(keys, values, k, v, slots, rows, kv_heads, head_dim, block_size);
}

KERNEL store_kv_bf16(uint16_t *keys, uint16_t *values, const float *k, const float *v, const uint32_t *slots,
                     uint32_t rows, uint32_t kv_heads, uint32_t head_dim, uint32_t block_size) {
    follow();
    store_row(keys, values, k, v, slots, rows, kv_heads, head_dim, block_size);
}

template <class W>
FN void embed_row(float *out, const uint8_t *table, const uint32_t *tokens, uint32_t rows, uint32_t cols) {
    uint64_t i = my_index();
    if (i < (uint64_t)rows * cols) out[i] = W::value(table + W::row_bytes(cols) * tokens[i / cols], (uint32_t)(i % cols));
}

#define EMBED(name, W)                                                                                                 \
    KERNEL embed_##name(float *out, const uint8_t *table, const uint32_t *tokens, uint32_t rows, uint32_t cols) {      \
        follow();                                                                                                      \
        embed_row<W>(out, table, tokens, rows, cols);                                                                  \
    }
EMBED(f32, F32)
EMBED(f16, F16)
EMBED(bf16, Bf16)
EMBED(q8_0, Q80)
EMBED(q4_k, Q4K)
EMBED(q6_k, Q6K)

// The scale of a row comes on top.
KERNEL embed_e4m3(float *out, const uint8_t *table, const uint32_t *tokens, uint32_t rows, uint32_t cols) {
    follow();
    uint64_t i = my_index();
    if (i >= (uint64_t)rows * cols) return;
    const uint8_t *row = table + E4m3::row_bytes(cols) * tokens[i / cols];
    out[i] = E4m3::value(row, (uint32_t)(i % cols)) * E4m3::scale(row, cols);
}
