// Products of many rows on tensor cores (`mma_sums.cuh`), where there are no warpgroups (wgmma.cu); 256 threads a block.
#include "mma_sums.cuh"

// Many rows, already rounded. A block has TILE outputs and ROWS rows; steps go through shared memory, STAGES of them
// under way. A warp has 32 outputs and half of the rows. A stage is TILE + ROWS lines of four times eight values: the
// eight lines that a warp reads at once are in one piece, in the order of its lanes, and so are those that it copies:
// no bank is asked twice.

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
