// Products of many rows by warpgroups: what becomes of a tile's sums (`wgmma_tile.cuh`).
#include "wgmma_tile.cuh"

// packed = x in bf16; a thread has 32 columns of a row. What is beyond the rows and columns of x is zeros, up to whole tiles.
KERNEL pack_rows(uint16_t *packed, const float *x, uint32_t rows, uint32_t cols) {
    follow();
    uint32_t steps = stages_of(cols) * 2, at = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t row = at / steps, step = at % steps;
    if (row >= (rows + TILE - 1) / TILE * TILE) return;
    const float *from = x + (uint64_t)row * cols + step * STEP;
    Words4 eights[4];
    UNROLL
    for (uint32_t t = 0; t < 4; t++) {
        bool real = row < rows && step * STEP + t * EIGHT < cols;
        eights[t] = rounded(real ? from + t * EIGHT : x, real);
    }
    uint8_t *line = reinterpret_cast<uint8_t *>(packed + packed_from(row, step / 2, cols));
    UNROLL
    for (uint32_t j = 0; j < 4; j++)
        *reinterpret_cast<Words4 *>(line + swirl(row, step % 2 * 4 + j)) = {
            {eights[0].word[j], eights[1].word[j], eights[2].word[j], eights[3].word[j]}};
}

// Where a product goes.
struct Store {
    float *out;
    const float *bias;
    uint32_t rows, first, outputs;

    template <int N, bool HALVES> MEMBER void with_sums(const float (&total)[N / 2], const Tile &its) const {
        uint32_t output = first + my_line(), row = its.row + threadIdx.x % 4 * 2;
        float more[2];
        UNROLL
        for (uint32_t i = 0; i < 2; i++) more[i] = output + i * 8 < outputs ? bias_of(bias, output + i * 8) : 0.0f;
        UNROLL
        for (uint32_t i = 0; i < N / 2; i++) {
            if (HALVES && i / (N / 4) != its.rank) continue;
            uint32_t to = output + i % 4 / 2 * 8, of = row + i / 4 * EIGHT + i % 2;
            if (of < rows && to < outputs) out[(uint64_t)of * outputs + to] = total[i] + more[i % 4 / 2];
        }
    }
    MEMBER void without_sums() const {}
};

// silu(gate) * up, packed for the next product: the first warpgroup has the gate's sums, the second those of what it lets through. Each makes
// half of the rows. The tile's 64 outputs are one stage of columns there.
struct Gate {
    uint16_t *packed;
    uint32_t stage, cols; // of what is made

    template <int N, bool HALVES> MEMBER void with_sums(const float (&total)[N / 2], const Tile &its) const {
        SHARED(float, shared);
        uint32_t me = threadIdx.x % GROUP_THREADS, second = threadIdx.x / GROUP_THREADS;
        // the stages are done with: nobody of the block reads or brings any more
        adders_barrier();
        UNROLL
        for (uint32_t i = 0; i < N / 2; i++)
            if (i / (N / 4) != second) shared[(i * 2 + second) * GROUP_THREADS + me] = total[i];
        adders_barrier();
        float other[N / 2];
        UNROLL
        for (uint32_t i = 0; i < N / 2; i++)
            if (i / (N / 4) == second) other[i] = shared[(i * 2 + 1 - second) * GROUP_THREADS + me];
        adders_barrier();
        uint32_t col = my_line() % (TILE / 2), row = threadIdx.x % 4 * 2;
        uint8_t *lines = reinterpret_cast<uint8_t *>(shared);
        UNROLL
        for (uint32_t i = 0; i < N / 2; i++) {
            if (i / (N / 4) != second) continue;
            float value = second ? silu_times(other[i], total[i]) : silu_times(total[i], other[i]);
            uint32_t at = row + i / 4 * EIGHT + i % 2;
            *reinterpret_cast<uint16_t *>(lines + at * LINE_BYTES + packed_at(at, col + i % 4 / 2 * 8)) = f32_to_bf16(value);
        }
        adders_barrier();
        Words4 *to = reinterpret_cast<Words4 *>(packed + packed_from(its.row, stage, cols));
        if (stage >= stages_of(cols)) return;
        for (uint32_t i = threadIdx.x; i < N * LINE_BYTES / 16; i += ADDERS) to[i] = reinterpret_cast<Words4 *>(shared)[i];
    }
    MEMBER void without_sums() const {
        for (int i = 0; i < 4; i++) adders_barrier();
    }

    // Where a stage's column lies in a packed row.
    FN uint32_t packed_at(uint32_t row, uint32_t col) {
        uint32_t t = col % STEP / EIGHT, product = col % EIGHT / 4, pair = col % 4 / 2;
        return swirl(row, col / STEP * 4 + product * 2 + pair) + t * 4 + col % 2 * 2;
    }
};

FN Tile tile_for(const Product &its, const uint16_t *packed, uint32_t first, uint32_t row, uint32_t cols) {
    Tile tile;
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        tile.real[i] = lines_from(first + i * (TILE / 2), its.outputs);
        tile.lines[i] = its.weight + (tile.real[i] ? (uint64_t)(first + i * (TILE / 2)) * cols : 0);
    }
    tile.packed = packed;
    tile.row = row;
    tile.cols = cols;
    tile.rank = cluster_rank();
    return tile;
}

// Blocks of a cluster are side by side (blockIdx.x); then come other rows of the same outputs, so that weights come from memory once.
template <bool HALVES> FN uint32_t clusters_of(uint32_t outputs) {
    const uint32_t each = HALVES ? TILE : 2 * TILE;
    return (outputs + each - 1) / each;
}

template <int N, bool HALVES>
FN void product_of(const Product &its, const uint16_t *packed, uint32_t cluster, uint32_t rows, uint32_t cols) {
    uint32_t first = (HALVES ? cluster : cluster * 2 + cluster_rank()) * TILE;
    Store end = {its.out, its.bias, rows, first, its.outputs};
    make_tile<N, HALVES>(tile_for(its, packed, first, blockIdx.y * N, cols), end);
}

template <int N, bool HALVES>
FN void three_products(const Product &q, const Product &k, const Product &v, const uint16_t *packed, uint32_t rows,
                       uint32_t cols) {
    uint32_t cluster = blockIdx.z, first = clusters_of<HALVES>(q.outputs), second = clusters_of<HALVES>(k.outputs);
    Product mine = q;
    if (cluster >= first + second) {
        mine = v;
        cluster -= first + second;
    } else if (cluster >= first) {
        mine = k;
        cluster -= first;
    }
    product_of<N, HALVES>(mine, packed, cluster, rows, cols);
}

template <int N>
FN void gate_of(uint16_t *out, const uint16_t *packed, const uint16_t *gate, const uint16_t *up, uint32_t cols, uint32_t outputs) {
    uint32_t number = blockIdx.z * 2 + cluster_rank(), first = number * (TILE / 2);
    Tile its = tile_for({nullptr, gate, nullptr, outputs}, packed, first, blockIdx.y * N, cols);
    its.real[1] = its.real[0];
    its.lines[1] = up + (its.real[0] ? (uint64_t)first * cols : 0);
    Gate end = {out, number, outputs};
    make_tile<N, false>(its, end);
}

#define WGMMA CLUSTER(2) BOUNDS(WGMMA_THREADS, 1)
#define PRODUCTS_OF(name, N, HALVES)                                                                                   \
    KERNEL WGMMA wgmma_##name(float *out, const uint16_t *packed, const uint16_t *weight, const float *bias,           \
                              uint32_t rows, uint32_t cols, uint32_t outputs) {                                        \
        follow();                                                                                                      \
        product_of<N, HALVES>({out, weight, bias, outputs}, packed, blockIdx.z, rows, cols);                           \
    }                                                                                                                  \
    KERNEL WGMMA wgmma_three_##name(float *q_out, float *k_out, float *v_out, const uint16_t *packed,                  \
                                    const uint16_t *q, const uint16_t *k, const uint16_t *v, const float *q_bias,      \
                                    const float *k_bias, const float *v_bias, uint32_t rows, uint32_t cols,            \
                                    uint32_t q_outputs, uint32_t k_outputs, uint32_t v_outputs) {                      \
        follow();                                                                                                      \
        Product of_q = {q_out, q, q_bias, q_outputs}, of_k = {k_out, k, k_bias, k_outputs};                            \
        three_products<N, HALVES>(of_q, of_k, {v_out, v, v_bias, v_outputs}, packed, rows, cols);                      \
    }
#define GATE_OF(N)                                                                                                     \
    KERNEL WGMMA wgmma_gate_##N(uint16_t *out, const uint16_t *packed, const uint16_t *gate, const uint16_t *up,       \
                                uint32_t cols, uint32_t outputs) {                                                     \
        follow();                                                                                                      \
        gate_of<N>(out, packed, gate, up, cols, outputs);                                                              \
    }
PRODUCTS_OF(64, 64, false)
PRODUCTS_OF(128, 128, false)
PRODUCTS_OF(64_halves, 64, true)
PRODUCTS_OF(128_halves, 128, true)
GATE_OF(64)
GATE_OF(128)
