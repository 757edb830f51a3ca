// out = x * weight^T + bias on tensor cores, for weights in bf16: x is rounded to bf16, products are added in f32.
// Weights are the left operand (16 outputs), rows of x the right one (8 rows), so that one row costs no more than
// eight.
//
// One order of sums, fixed by `cols` alone, whichever kernel computes a row and whoever is beside it (EP4): columns are
// cut into SPANS spans; a span is added up by tensor cores from zero, step after step of 32 columns; then the sums of the
// first half of the spans are added in order, from zero, and those of the second, and both; and the bias comes last. Steps beyond the end are left out; the columns that its
// last step lacks are zeros.
//
// A lane (g = lane / 4, t = lane % 4) reads columns 8t … 8t + 7 of a step at once, of row g. A product takes 16
// columns, two pairs a lane: the first four of each eight are those of the first, the rest those of the second. So
// columns change places, in both operands alike.
//
// All of them: 256 threads a block; cols is a multiple of 8, and x, xb and weights begin on multiples of 16 bytes.
#include "mma.cuh"

#define SPANS 8
#define HALF 4 // spans of a half
#define STEP 32
#define EIGHT 8 // values that a lane reads at once, and rows of a product
#define TALL 16 // outputs of a product
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

// One product with its own weights.
struct Product {
    float *out;
    const uint16_t *weight;
    const float *bias;
    uint32_t outputs;
};

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

// Many rows, already rounded. A block has TILE outputs and ROWS rows; steps go through shared memory, STAGES of them
// under way. A warp has 32 outputs and half of the rows. A stage is TILE + ROWS lines of four times eight values: the
// eight lines that a warp reads at once are in one piece, in the order of its lanes, and so are those that it copies:
// no bank is asked twice.

#define TILE 128
#define STAGES 3
#define STEP_WORDS4 (STEP / EIGHT)

// Where the stages' lines come from: each thread copies the same eight of the columns of a step, of every 64th line.
template <int ROWS> struct Lines {
    static const int COPIES = (TILE + ROWS) * STEP_WORDS4 / MMA_THREADS;
    Line<uint16_t> line[COPIES];
};

template <int ROWS>
FN Lines<ROWS> lines_of(const uint16_t *xb, const uint16_t *weight, uint32_t rows, uint32_t cols, uint32_t outputs,
                        uint32_t stop) {
    Lines<ROWS> lines;
    UNROLL
    for (int i = 0; i < Lines<ROWS>::COPIES; i++) {
        uint32_t at = (i * MMA_THREADS + threadIdx.x) / STEP_WORDS4;
        lines.line[i] = at < TILE ? line_of(weight, blockIdx.y * TILE + at, outputs, cols, stop)
                                  : line_of(xb, blockIdx.x * ROWS + at - TILE, rows, cols, stop);
    }
    return lines;
}

template <int ROWS> FN void begin_stage(Words4 *stage, const Lines<ROWS> &lines, uint32_t first) {
    uint32_t col = first + threadIdx.x % STEP_WORDS4 * EIGHT;
    UNROLL
    for (int i = 0; i < Lines<ROWS>::COPIES; i++)
        copy16(stage + i * MMA_THREADS + threadIdx.x, lines.line[i].at + col, col < lines.line[i].stop);
}

template <int N> FN void add_stage(float (*sums)[N][4], const Words4 *stage) {
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Words4 *lines = stage + warp % 4 * 2 * TALL * STEP_WORDS4 + lane;
    const Words4 *row_lines = stage + (TILE + warp / 4 * N * EIGHT) * STEP_WORDS4 + lane;
    Words4 w[2][2], x[N];
    UNROLL
    for (int i = 0; i < 4; i++) w[i / 2][i % 2] = lines[i * WARP];
    UNROLL
    for (int n = 0; n < N; n++) x[n] = row_lines[n * WARP];
    add_step<2, N>(sums, w, x);
}

// total += sums, which begin anew.
template <int N> FN void end_span(float (*total)[N][4], float (*sums)[N][4]) {
    UNROLL
    for (int i = 0; i < 2 * N * 4; i++) total[i / 4 / N][i / 4 % N][i % 4] += sums[i / 4 / N][i / 4 % N][i % 4];
    clear<2, N>(sums);
}

// Columns begin … end, a span after the other, into `total`.
template <int ROWS>
FN void tile_sums(float (*total)[ROWS / 16][4], const uint16_t *xb, const uint16_t *weight, uint32_t rows,
                  uint32_t cols, uint32_t outputs, uint32_t begin, uint32_t end) {
    SHARED(Words4, shared);
    const uint32_t stage_words4 = (TILE + ROWS) * STEP_WORDS4;
    Lines<ROWS> lines = lines_of<ROWS>(xb, weight, rows, cols, outputs, end);
    float sums[2][ROWS / 16][4];
    clear<2, ROWS / 16>(total);
    clear<2, ROWS / 16>(sums);
    // a group for each step, even where there is no such step: so that what is waited for can be counted
    UNROLL
    for (uint32_t i = 0; i + 1 < STAGES; i++) {
        if (begin + i * STEP < end) begin_stage(shared + i * stage_words4, lines, begin + i * STEP);
        copies_group();
    }
    uint32_t now = 0, next = STAGES - 1, left = span_cols(cols);
    ROLLED
    for (uint32_t first = begin; first < end; first += STEP) {
        copies_wait<STAGES - 2>();
        // all have copied this stage, and have read the one that is written next
        __syncthreads();
        uint32_t ahead = first + (STAGES - 1) * STEP;
        if (ahead < end) begin_stage(shared + next * stage_words4, lines, ahead);
        copies_group();
        add_stage<ROWS / 16>(sums, shared + now * stage_words4);
        left -= STEP;
        if (left == 0) {
            end_span<ROWS / 16>(total, sums);
            left = span_cols(cols);
        }
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    end_span<ROWS / 16>(total, sums);
}

// `AFTER`: what is there comes first.
template <int ROWS, bool AFTER>
FN void store_tile(float *out, const float *bias, const float (*total)[ROWS / 16][4], uint32_t rows, uint32_t outputs) {
    const int N = ROWS / 16;
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t first = blockIdx.y * TILE + warp % 4 * 2 * TALL + lane / 4;
    uint32_t first_row = blockIdx.x * ROWS + warp / 4 * N * EIGHT + lane % 4 * 2;
    float more[4]; // read before the stores, which might be to the same place for all that the compiler knows
    UNROLL
    for (int i = 0; i < 4; i++) more[i] = first + i * 8 < outputs ? bias_of(bias, first + i * 8) : 0.0f;
    UNROLL
    for (int i = 0; i < 2 * N * 4; i++) {
        uint32_t output = first + i / 4 / N * TALL + i % 4 / 2 * 8, row = first_row + i / 4 % N * EIGHT + i % 2;
        if (row >= rows || output >= outputs) continue;
        float *at = out + (uint64_t)row * outputs + output, sum = total[i / 4 / N][i / 4 % N][i % 4];
        *at = (AFTER ? *at + sum : sum) + more[i / 4 / N * 2 + i % 4 / 2];
    }
}

// Blocks side by side have the same outputs and other rows: weights come from memory once.
template <int ROWS>
FN void tile(float *out, const uint16_t *xb, const uint16_t *weight, const float *bias, uint32_t rows, uint32_t cols,
             uint32_t outputs) {
    float total[2][ROWS / 16][4];
    uint32_t middle = HALF * span_cols(cols) < cols ? HALF * span_cols(cols) : cols;
    tile_sums<ROWS>(total, xb, weight, rows, cols, outputs, 0, middle);
    if (middle < cols) {
        // kept where the result will be: registers for both halves there are not
        store_tile<ROWS, false>(out, nullptr, total, rows, outputs);
        __syncthreads();
        tile_sums<ROWS>(total, xb, weight, rows, cols, outputs, middle, cols);
    }
    if (middle < cols)
        store_tile<ROWS, true>(out, bias, total, rows, outputs);
    else
        store_tile<ROWS, false>(out, bias, total, rows, outputs);
}

KERNEL BOUNDS(MMA_THREADS, 1) mma_tile(float *out, const uint16_t *xb, const uint16_t *weight, const float *bias,
                                       uint32_t rows, uint32_t cols, uint32_t outputs) {
    follow();
    tile<128>(out, xb, weight, bias, rows, cols, outputs);
}

KERNEL BOUNDS(MMA_THREADS, 1) mma_tile_64(float *out, const uint16_t *xb, const uint16_t *weight, const float *bias,
                                          uint32_t rows, uint32_t cols, uint32_t outputs) {
    follow();
    tile<64>(out, xb, weight, bias, rows, cols, outputs);
}

// Too few tiles for the device: the spans side by side (blockIdx.z), parts[span][row][output].
KERNEL BOUNDS(MMA_THREADS, 2) mma_part(float *parts, const uint16_t *xb, const uint16_t *weight, uint32_t rows,
                                       uint32_t cols, uint32_t outputs) {
    follow();
    uint32_t begin = blockIdx.z * span_cols(cols), end = span_end(begin, cols);
    float total[2][4][4];
    tile_sums<64>(total, xb, weight, rows, cols, outputs, begin, end);
    store_tile<64, false>(parts + (uint64_t)blockIdx.z * rows * outputs, nullptr, total, rows, outputs);
}

// The spans' parts in order: blockIdx.y is the row, a thread has an output.
KERNEL mma_join(float *out, const float *parts, const float *bias, uint32_t rows, uint32_t outputs) {
    follow();
    uint32_t output = blockIdx.x * blockDim.x + threadIdx.x;
    if (output >= outputs) return;
    uint64_t at = (uint64_t)blockIdx.y * outputs + output;
    float half[2] = {0.0f, 0.0f};
    UNROLL
    for (int span = 0; span < SPANS; span++) half[span / HALF] += parts[(uint64_t)span * rows * outputs + at];
    out[at] = half[0] + half[1] + bias_of(bias, output);
}

// out = x in bf16, `count` values, eight a thread.
KERNEL round_bf16(uint16_t *out, const float *x, uint64_t count) {
    follow();
    uint64_t first = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * EIGHT;
    if (first + EIGHT <= count && is_aligned(out) && is_aligned(x)) {
        *reinterpret_cast<Words4 *>(out + first) = rounded(x + first, true);
        return;
    }
    for (uint64_t i = first; i < count && i < first + EIGHT; i++) out[i] = f32_to_bf16(x[i]);
}
