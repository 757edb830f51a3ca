// Products of many rows by warpgroups (devices of 9.0a): out = x * weight^T + bias, with the sums of mma_sums.cuh, bit for bit.
//
// A block has TILE outputs and N rows (64 or 128). Two warpgroups add: warps 0 … 7 have sixteen outputs each, and all rows. The third brings
// stages of 64 columns: weights by the threads' copies, x by copies of the block. Two blocks are a cluster: they have the same rows
// (each brings half of x to both), or, where tiles are too few for the device, the same tile and half of the columns each (`HALVES`).
//
// x comes packed (`pack_rows`): as it must lie in shared memory, a tile of TILE rows and 64 columns in one piece. A row is eight sixteens of
// bytes, of which sixteen c lies at c ^ (row & 7) (`swirl`: no bank is asked twice). Sixteens 2k and 2k + 1 are what product k of the four
// takes: columns in the order of mma_sums.cuh, where a lane reads eight columns of a weight at once and gives four to each of two products.
#pragma once

#include "mma_sums.cuh"
#include "wgmma.cuh"

#define GROUP_THREADS 128
#define ADDERS 256 // threads that add; the others bring
#define WGMMA_THREADS (ADDERS + GROUP_THREADS)
#define STAGE_COLS 64
#define LINE_BYTES (STAGE_COLS * 2)
#define PRODUCTS 4 // of a stage

FN uint32_t swirl(uint32_t row, uint32_t sixteen) { return (sixteen ^ (row & 7)) * 16; }

FN uint32_t stages_of(uint32_t cols) { return (cols + STAGE_COLS - 1) / STAGE_COLS; }

// Where the columns of a row that belong to `stage` begin in packed rows, in values.
FN uint64_t packed_from(uint32_t row, uint32_t stage, uint32_t cols) {
    return ((uint64_t)(row / TILE) * stages_of(cols) + stage) * TILE * STAGE_COLS + row % TILE * STAGE_COLS;
}

// What a block makes: its tile's outputs in two halves, of one weight or of two.
struct Tile {
    const uint16_t *lines[2]; // each half's first line, and how many there are
    uint32_t real[2];
    const uint16_t *packed;
    uint32_t row, cols, rank;
};

FN uint32_t lines_from(uint32_t first, uint32_t outputs) {
    uint32_t left = first < outputs ? outputs - first : 0;
    return left < TILE / 2 ? left : TILE / 2;
}

FN uint32_t cols_of_half(uint32_t cols) {
    uint32_t half = HALF * span_cols(cols);
    return half < cols ? half : cols;
}

// Which sixteen outputs of the tile a warp has, and of these, which a lane's line g is: lanes that read at once must not meet in a bank.
FN uint32_t my_line() {
    uint32_t g = threadIdx.x % WARP / 4;
    return threadIdx.x / WARP * TALL + g / 2 + g % 2 * 4;
}

// Four products' left operands out of a line's and its eighth neighbour's sixteens t and t + 4.
FN void operands(uint32_t *a, const Words4 *low, const Words4 *high) {
    UNROLL
    for (int product = 0; product < PRODUCTS; product++) {
        int half = product % 2 * 2;
        a[product * 4] = low[product / 2].word[half];
        a[product * 4 + 1] = high[product / 2].word[half];
        a[product * 4 + 2] = low[product / 2].word[half + 1];
        a[product * 4 + 3] = high[product / 2].word[half + 1];
    }
}

template <int N> FN void add_to(float (&total)[N / 2], const float (&sums)[N / 2]) {
    UNROLL
    for (int i = 0; i < N / 2; i++) total[i] += sums[i];
}

#if defined(TRUEBEAT_HOST)

FN uint32_t cluster_rank() { return blockIdx.x % 2; }

// Columns begin … end of a warp's sixteen outputs and of all rows, a span after the other.
template <int N> FN void add_columns(float (&total)[N / 2], const Tile &its, uint32_t begin, uint32_t end) {
    uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, line = my_line(), span = span_cols(its.cols);
    const uint16_t *lines = its.lines[line / (TILE / 2)];
    float sums[N / 2] = {};
    for (uint32_t col = begin; col < end; col += STAGE_COLS) {
        Words4 halves[2][2];
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t mine = line % (TILE / 2) + i % 2 * 8, at = col + i / 2 * STEP + t * EIGHT;
            bool real = mine < its.real[line / (TILE / 2)] && at < its.cols;
            halves[i % 2][i / 2] = read16(lines + (real ? (uint64_t)mine * its.cols + at : 0), real);
        }
        uint32_t a[PRODUCTS * 4];
        operands(a, halves[0], halves[1]);
        for (uint32_t n = 0; n < N / 8; n++)
            for (uint32_t product = 0; product < PRODUCTS; product++) {
                uint32_t row = its.row + n * EIGHT + g, b[2];
                uint64_t from = packed_from(row, col / STAGE_COLS, its.cols);
                const uint8_t *x = reinterpret_cast<const uint8_t *>(its.packed + from);
                for (uint32_t i = 0; i < 2; i++)
                    b[i] = reinterpret_cast<const Words4 *>(x + swirl(row, product * 2 + i))->word[t];
                mma_bf16(sums + n * 4, a + product * 4, b);
            }
        if ((col + STAGE_COLS) % span != 0 && col + STAGE_COLS < end) continue;
        add_to<N>(total, sums);
        for (float &sum : sums) sum = 0.0f;
    }
}

// Blocks of the shim run one after the other: each has all columns, where two of a device share them.
template <int N, bool HALVES, class End> FN void make_tile(const Tile &its, const End &end) {
    if (threadIdx.x >= ADDERS) return end.without_sums();
    float total[N / 2], later[N / 2];
    for (uint32_t i = 0; i < N / 2; i++) total[i] = later[i] = 0.0f;
    add_columns<N>(total, its, 0, cols_of_half(its.cols));
    add_columns<N>(later, its, cols_of_half(its.cols), its.cols);
    add_to<N>(total, later);
    end.template with_sums<N, HALVES>(total, its);
}

#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Shared memory, from a multiple of 1,024 on: stages, as many as there is room for, and their barriers. A stage is the weights' lines and x;
// its barriers say that it is full, and that nobody reads it any more. `shared_bytes` of warpgroups.rs has room for it.
template <int N> struct Room {
    static const uint32_t WEIGHTS = TILE * LINE_BYTES, X = N * LINE_BYTES, STAGE = WEIGHTS + X;
    static const uint32_t DEPTH = N == 128 ? 7 : 9, BARRIERS = DEPTH * STAGE;
};

FN uint32_t room() { return (shared_at(truebeat_shared) + 1023) / 1024 * 1024; }

// The place in the ring of stages, and which turn it is.
template <int N> struct Ring {
    uint32_t slot = 0, parity = 0;
    MEMBER uint32_t stage(uint32_t shared) const { return shared + slot * Room<N>::STAGE; }
    MEMBER uint32_t full(uint32_t shared) const { return shared + Room<N>::BARRIERS + slot * 16; }
    MEMBER void next() {
        if (++slot == Room<N>::DEPTH) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <int N, bool HALVES> FN void bring_stages(const Tile &its, uint32_t begin, uint32_t stages) {
    using R = Room<N>;
    uint32_t me = threadIdx.x - ADDERS, line = me / 8, sixteen = me % 8, shared = room();
    uint32_t to = line * LINE_BYTES + swirl(line, sixteen);
    Ring<N> ring;
    ROLLED
    for (uint32_t i = 0; i < stages; i++, ring.next()) {
        uint32_t full = ring.full(shared), stage = ring.stage(shared), col = begin + i * STAGE_COLS;
        barrier_wait(full + 8, ring.parity ^ 1);
        if (me == 0) {
            barrier_expect(full, R::X);
            const uint16_t *x = its.packed + packed_from(its.row, col / STAGE_COLS, its.cols);
            if (HALVES)
                copy_bulk(stage + R::WEIGHTS, x, R::X, full);
            else
                copy_bulk_to_both(stage + R::WEIGHTS + its.rank * (R::X / 2), x + its.rank * (N / 2 * STAGE_COLS), R::X / 2,
                                  full);
        }
        uint32_t at = col + sixteen * EIGHT;
        UNROLL
        for (uint32_t j = 0; j < 8; j++) {
            uint32_t mine = line + j % 4 * 16;
            bool real = mine < its.real[j / 4] && at < its.cols;
            copy16_soon(stage + to + j * 16 * LINE_BYTES,
                        its.lines[j / 4] + (real ? (uint64_t)mine * its.cols + at : 0), real);
        }
        copies_arrive(full);
    }
    // the other block's last words to these barriers must have come before this one may end
    ROLLED
    for (uint32_t i = 0; i < Room<N>::DEPTH; i++, ring.next()) barrier_wait(ring.full(shared) + 8, ring.parity ^ 1);
}

FN void read_weights(uint32_t *a, uint32_t stage) {
    uint32_t line = my_line(), t = threadIdx.x % 4;
    Words4 low[2], high[2];
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t at = stage + line * LINE_BYTES + swirl(line, i * 4 + t);
        low[i] = load_shared16(at);
        high[i] = load_shared16(at + 8 * LINE_BYTES);
    }
    operands(a, low, high);
}

// Nobody of this warp reads a stage any more: every block that writes to it is told.
template <bool HALVES> FN void release(uint32_t full, uint32_t rank) {
    uint32_t lane = threadIdx.x % WARP;
    if (lane < (HALVES ? 1 : 2)) barrier_arrive_at(full + 8, HALVES ? rank : lane);
}

// A span's stages, of which there is at least one, into `sums`, whatever was there.
template <int N, bool HALVES>
FN void add_span(float (&sums)[N / 2], Ring<N> &ring, uint32_t shared, uint32_t stages, uint32_t rank) {
    ROLLED
    for (uint32_t i = 0; i < stages; i++, ring.next()) {
        uint32_t a[PRODUCTS * 4], stage = ring.stage(shared), full = ring.full(shared);
        uint64_t x = lines_at(stage + Room<N>::WEIGHTS);
        barrier_wait(full, ring.parity);
        read_weights(a, stage);
        products_begin();
        UNROLL
        for (int product = 0; product < PRODUCTS; product++)
            product_begin(sums, a + product * 4, x + product * 2, product > 0 || i > 0);
        products_end();
        products_wait<0>();
        are_there(sums);
        release<HALVES>(full, rank);
    }
}

// The spans of the next half, as many as there are, into `total`; how many stages are left behind them.
template <int N, bool HALVES>
FN uint32_t add_half(float (&total)[N / 2], Ring<N> &ring, uint32_t shared, uint32_t stages, uint32_t span, uint32_t rank) {
    UNROLL
    for (int i = 0; i < N / 2; i++) total[i] = 0.0f;
    ROLLED
    for (uint32_t i = 0; i < HALF && stages; i++) {
        float sums[N / 2];
        uint32_t now = span < stages ? span : stages;
        add_span<N, HALVES>(sums, ring, shared, now, rank);
        add_to<N>(total, sums);
        stages -= now;
    }
    return stages;
}

// Each block of a cluster finishes half of the rows, and gets the other's sums of them.
template <int N> FN void join_halves(float (&total)[N / 2], uint32_t rank) {
    uint32_t kept = room() + threadIdx.x * 4;
    // behind it, no stage of either block is used any more
    cluster_barrier();
    UNROLL
    for (int i = 0; i < N / 2; i++)
        if (i / (N / 4) != (int)rank) store_shared_of(kept + i * ADDERS * 4, rank ^ 1, total[i]);
    cluster_barrier();
    UNROLL
    for (int i = 0; i < N / 2; i++)
        if (i / (N / 4) == (int)rank) total[i] += load_shared(kept + i * ADDERS * 4);
}

// All threads of a cluster come here together. What a thread may do with few registers is in one branch, all else in the other; and no block
// leaves while the other may still write to it.
template <int N, bool HALVES, class End> FN void make_tile(const Tile &its, const End &end) {
    uint32_t shared = room(), middle = cols_of_half(its.cols);
    uint32_t begin = HALVES && its.rank ? middle : 0, stop = HALVES && !its.rank ? middle : its.cols;
    uint32_t stages = stages_of(stop - begin);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < Room<N>::DEPTH; i++) {
            uint32_t full = shared + Room<N>::BARRIERS + i * 16;
            barrier_init(full, GROUP_THREADS + 1);
            barrier_init(full + 8, ADDERS / WARP * (HALVES ? 1 : 2));
        }
        barriers_made();
    }
    cluster_barrier();
    if (threadIdx.x >= ADDERS) {
        fewer_registers();
        bring_stages<N, HALVES>(its, begin, stages);
        cluster_arrive();
        cluster_wait();
        if (HALVES) cluster_barrier();
    } else {
        more_registers();
        Ring<N> ring;
        float total[N / 2];
        uint32_t span = span_cols(its.cols) / STAGE_COLS;
        stages = add_half<N, HALVES>(total, ring, shared, stages, span, its.rank);
        if (HALVES) {
            join_halves<N>(total, its.rank);
        } else {
            if (stages) {
                float later[N / 2];
                add_half<N, HALVES>(later, ring, shared, stages, span, its.rank);
                add_to<N>(total, later);
            }
            cluster_arrive();
            cluster_wait();
        }
        end.template with_sums<N, HALVES>(total, its);
    }
}

#else

FN uint32_t cluster_rank() { return 0; }
template <int N, bool HALVES, class End> FN void make_tile(const Tile &, const End &) {}

#endif
