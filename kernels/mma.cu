// Products of few rows on tensor cores (`mma_sums.cuh`); 256 threads a block.
#include "mma_sums.cuh"

// Few rows: no shared memory before the end. A block has sixteen outputs of M weights (or M times sixteen of one) and
// 8N rows; its warps have a span each. What limits it is how many reads are under way: DEEP steps are read before the
// first is used.

template <int M> FN uint32_t blocks_of(uint32_t outputs) { return (outputs + M * TALL - 1) / (M * TALL); }

// A row of the spans' sums in shared memory: 4 words more than there are, so that lanes do not wait for each other.
template <int M> FN uint32_t sums_stride() { return M * TALL + 4; }

template <int M, int N, int DEEP>
FN void add_span(float (*sums)[N][4], const Line<uint16_t> (*w)[2], const Line<float> *x, uint32_t begin,
                 uint32_t end) {
    uint32_t lane_at = threadIdx.x % 4 * EIGHT;
    ROLLED
    for (uint32_t first = begin; first < end; first += DEEP * STEP) {
        uint32_t col = first + lane_at;
        Words4 weights[DEEP][M][2];
        UNROLL
        for (int line = 0; line < M * 2; line++) {
            const uint16_t *at = w[line / 2][line % 2].at + col;
            UNROLL
            for (int i = 0; i < DEEP; i++)
                weights[i][line / 2][line % 2] = stream16(at + i * STEP, col + i * STEP < w[line / 2][line % 2].stop);
        }
        UNROLL
        for (int i = 0; i < DEEP; i++) {
            Words4 values[N];
            UNROLL
            for (int n = 0; n < N; n++) values[n] = rounded(x[n].at + col + i * STEP, col + i * STEP < x[n].stop);
            if (first + i * STEP < end) add_step<M, N>(sums, weights[i], values);
        }
    }
}

// Brings the spans' sums of this block to `shared`: of outputs firsts[m] … of weights[m], and of rows from `first_row`
// on.
template <int M, int N, int DEEP>
FN void few_spans(float *shared, const uint16_t *const *weights, const uint32_t *firsts, const float *x,
                  uint32_t first_row, uint32_t rows, uint32_t cols, uint32_t outputs) {
    uint32_t span = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    uint32_t begin = span * span_cols(cols), end = span_end(begin, cols);
    Line<uint16_t> w[M][2];
    Line<float> v[N];
    float sums[M][N][4];
    UNROLL
    for (int m = 0; m < M; m++)
        for (int i = 0; i < 2; i++) w[m][i] = line_of(weights[m], firsts[m] + g + i * 8, outputs, cols, end);
    UNROLL
    for (int n = 0; n < N; n++) v[n] = line_of(x, first_row + n * EIGHT + g, rows, cols, end);
    clear<M, N>(sums);
    add_span<M, N, DEEP>(sums, w, v, begin, end);
    UNROLL
    for (int i = 0; i < M * N * 4; i++) {
        uint32_t row = (span * N + i / 4 % N) * EIGHT + 2 * t + i % 2, output = i / 4 / N * TALL + i % 4 / 2 * 8 + g;
        shared[row * sums_stride<M>() + output] = sums[i / 4 / N][i / 4 % N][i % 4];
    }
    __syncthreads();
}

template <int M, int N> FN float spans_total(const float *shared, uint32_t row, uint32_t output) {
    float half[2] = {0.0f, 0.0f};
    UNROLL
    for (int span = 0; span < SPANS; span++)
        half[span / HALF] += shared[(span * N * EIGHT + row) * sums_stride<M>() + output];
    return half[0] + half[1];
}

// What this block reads of a weight is asked for before the launch in front of this one has ended: weights never change, and the memory has
// little to do while small kernels run. Blocks that come later find it busy.
#define EARLY_BLOCKS 512

FN void soon(const uint16_t *weight, uint32_t first, uint32_t tall, uint32_t cols, uint32_t outputs) {
    if (blockIdx.x >= EARLY_BLOCKS || first >= outputs) return;
    uint64_t bytes = 2ull * (outputs - first < tall ? outputs - first : tall) * cols;
    const uint8_t *at = reinterpret_cast<const uint8_t *>(weight + (uint64_t)first * cols);
    for (uint64_t i = threadIdx.x * 128ull; i < bytes; i += MMA_THREADS * 128) bring_line(at + i);
}

template <int M, int N, int DEEP>
FN void few(const Product &its, const float *x, uint32_t block, uint32_t rows, uint32_t cols) {
    SHARED(float, shared);
    uint32_t first = block * M * TALL, first_row = blockIdx.y * N * EIGHT, firsts[M];
    soon(its.weight, first, M * TALL, cols, its.outputs);
    follow();
    const uint16_t *weights[M];
    UNROLL
    for (int m = 0; m < M; m++) {
        weights[m] = its.weight;
        firsts[m] = first + m * TALL;
    }
    few_spans<M, N, DEEP>(shared, weights, firsts, x, first_row, rows, cols, its.outputs);
    for (uint32_t i = threadIdx.x; i < M * TALL * N * EIGHT; i += MMA_THREADS) {
        uint32_t row = i / (M * TALL), output = first + i % (M * TALL);
        if (first_row + row >= rows || output >= its.outputs) continue;
        float total = spans_total<M, N>(shared, row, i % (M * TALL));
        its.out[(uint64_t)(first_row + row) * its.outputs + output] = total + bias_of(its.bias, output);
    }
}

// Three products of the same x, their blocks one after the other.
template <int M, int N, int DEEP>
FN void three_few(const Product &q, const Product &k, const Product &v, const float *x, uint32_t rows, uint32_t cols) {
    uint32_t block = blockIdx.x, first = blocks_of<M>(q.outputs), second = blocks_of<M>(k.outputs);
    Product mine = q;
    if (block >= first + second) {
        mine = v;
        block -= first + second;
    } else if (block >= first) {
        mine = k;
        block -= first;
    }
    few<M, N, DEEP>(mine, x, block, rows, cols);
}

// out = silu(x * gate^T) * (x * up^T): a block has the same sixteen outputs of both.
template <int N, int DEEP>
FN void pair_few(float *out, const float *x, const uint16_t *gate, const uint16_t *up, uint32_t rows, uint32_t cols,
                 uint32_t outputs) {
    SHARED(float, shared);
    uint32_t first = blockIdx.x * TALL, first_row = blockIdx.y * N * EIGHT, firsts[2] = {first, first};
    const uint16_t *weights[2] = {gate, up};
    for (int m = 0; m < 2; m++) soon(weights[m], first, TALL, cols, outputs);
    follow();
    few_spans<2, N, DEEP>(shared, weights, firsts, x, first_row, rows, cols, outputs);
    for (uint32_t i = threadIdx.x; i < TALL * N * EIGHT; i += MMA_THREADS) {
        uint32_t row = i / TALL, output = first + i % TALL;
        if (first_row + row >= rows || output >= outputs) continue;
        float totals[2];
        for (int m = 0; m < 2; m++) totals[m] = spans_total<2, N>(shared, row, m * TALL + i % TALL);
        out[(uint64_t)(first_row + row) * outputs + output] = silu_times(totals[0], totals[1]);
    }
}

#define FEW(R, M, DEEP, BLOCKS)                                                                                        \
    KERNEL BOUNDS(MMA_THREADS, BLOCKS)                                                                                 \
        mma_few_##R(float *out, const float *x, const uint16_t *weight, const float *bias, uint32_t rows,              \
                    uint32_t cols, uint32_t outputs) {                                                                 \
        few<M, R / EIGHT, DEEP>({out, weight, bias, outputs}, x, blockIdx.x, rows, cols);                              \
    }                                                                                                                  \
    KERNEL BOUNDS(MMA_THREADS, BLOCKS)                                                                                 \
        mma_three_few_##R(float *q_out, float *k_out, float *v_out, const float *x, const uint16_t *q,                 \
                          const uint16_t *k, const uint16_t *v, const float *q_bias, const float *k_bias,              \
                          const float *v_bias, uint32_t rows, uint32_t cols, uint32_t q_outputs, uint32_t k_outputs,   \
                          uint32_t v_outputs) {                                                                        \
        Product of_q = {q_out, q, q_bias, q_outputs}, of_k = {k_out, k, k_bias, k_outputs};                            \
        three_few<M, R / EIGHT, DEEP>(of_q, of_k, {v_out, v, v_bias, v_outputs}, x, rows, cols);                       \
    }
#define PAIR_FEW(R, DEEP, BLOCKS)                                                                                      \
    KERNEL BOUNDS(MMA_THREADS, BLOCKS)                                                                                 \
        mma_pair_few_##R(float *out, const float *x, const uint16_t *gate, const uint16_t *up, uint32_t rows,          \
                         uint32_t cols, uint32_t outputs) {                                                            \
        pair_few<R / EIGHT, DEEP>(out, x, gate, up, rows, cols, outputs);                                              \
    }
// Each block reads all of x: with more rows that would be more than the weights, so these have twice the outputs for
// it. Registers: for all of a turn's reads at once, 32 to 64 KB of weights a multiprocessor.
FEW(8, 1, 4, 2)
FEW(16, 2, 2, 2)
FEW(32, 2, 3, 1)
PAIR_FEW(8, 2, 2)
PAIR_FEW(16, 2, 2)
PAIR_FEW(32, 3, 1)
