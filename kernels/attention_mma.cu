// Paged attention over K and V in bf16, on tensor cores: scores and weighted sums are products of queries and of shares in bf16, added up in
// f32. Splits, items and what the join takes are those of attention.cu.
//
// One order of sums, of each row by itself (EP4). A split begins at a multiple of SPLIT, whatever of it is seen. A score is added up from
// zero, sixteen values of the head after the other. The share of a position is 2^((score - top) / ln 2), rounded to bf16, with the greatest
// score of the split as top; where nothing is seen it is 0. The total is that of the rounded shares, so that they weigh 1 together: what
// rounding does to a share then counts by how far its value is from the mean, not by the value. It is added up lane by lane, slice (of sixteen
// positions) after slice, then over the four lanes of a row. A weighted sum is added up from zero, slice after slice, and joined to the
// splits before by the arithmetic of `attention_join`.
//
// Two ways to the same bits, since rows of a product know nothing of each other:
// - alone: each warp has sixteen queries and goes through all positions of a tile (prompts);
// - together: all warps have the same sixteen queries, each the scores of a slice and the sums of a quarter of the head (decodes: what
//   counts there is how much is under way, and how long a split takes).
//
// What is not seen must not be multiplied, not even by zero: tiles have zeros from the last position that the item's queries see on, and
// before the first. What lies between is of that sequence, and was written: a row's share of a later row of its chunk is zero, and zero of what
// is no number is none, which is let be.
#include "attention_tiles.cuh"

// What the warps of a team tell each other, each lane what its like needs; `queries` are left operands.
template <int DIM> struct Exchange {
    Words4 queries[DIM / SLICE][WARP], shares[TEAM][WARP];
    Floats2 tops[TEAM][WARP], totals[TEAM][WARP];
};

// The two queries that a lane has parts of: rows g and g + 8 of a product, g = lane / 4. They are looked up again where they are written: what
// is kept in between is dear.
struct Two {
    Query at[2];
};

FN Two two_of(const uint32_t *item, const Cache &cache, uint32_t begin) {
    uint32_t number = begin + threadIdx.x % WARP / 4;
    return {{query_of(item, cache, number), query_of(item, cache, number + 8)}};
}

// Two values side by side of a row of `dim`, as far as it has them.
FN Floats2 read_two(const float *row, uint32_t col, uint32_t dim) {
    if (dim % 2 == 0) return col < dim ? *reinterpret_cast<const Floats2 *>(row + col) : Floats2{{0.0f, 0.0f}};
    return {{col < dim ? row[col] : 0.0f, col + 1 < dim ? row[col + 1] : 0.0f}};
}

FN void write_two(float *row, uint32_t col, uint32_t dim, Floats2 two) {
    if (dim % 2 == 0 && col < dim) *reinterpret_cast<Floats2 *>(row + col) = two;
    if (dim % 2 && col < dim) row[col] = two.at[0];
    if (dim % 2 && col + 1 < dim) row[col + 1] = two.at[1];
}

// Sixteen queries as the left operand of product `step`; those that are not real are zeros.
FN void read_queries(uint32_t *to, int step, const float *q, const Two &two, const Cache &cache, float scale) {
    UNROLL for (int i = 0; i < 4; i++) {
        const Query &query = two.at[i % 2];
        const float *row = q + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
        uint32_t col = step * SLICE + i / 2 * 8 + threadIdx.x % 4 * 2;
        Floats2 got = read_two(row, col, query.real ? cache.head_dim : 0);
        to[i] = bf16_pair(got.at[0] * scale, got.at[1] * scale);
    }
}

// Adds to the scores of sixteen queries and SLICES slices of positions, the first of which is at `keys`; the slices' sums wait for each other
// as little as they may. The queries' first KEPT operands are in `mine`, the others in shared memory.
template <int DIM, int SLICES, int KEPT>
FN void add_keys(float (*scores)[4], const Words4 *mine, const Words4 (*others)[WARP], const uint16_t *keys) {
    uint32_t lane = threadIdx.x % WARP;
    keys += (lane / 16 * 8 + lane % 8) * Shape<DIM>::STRIDE + lane / 8 % 2 * 8;
    UNROLL for (int step = 0; step < (int)Shape<DIM>::STEPS; step++) {
        Words4 a = step < KEPT ? mine[step] : others[step - KEPT][lane];
        UNROLL for (int slice = 0; slice < SLICES; slice++) {
            uint32_t b[4];
            read_squares(b, keys + slice * SLICE * Shape<DIM>::STRIDE + step * SLICE);
            mma_bf16(scores[2 * slice], a.word, b);
            mma_bf16(scores[2 * slice + 1], a.word, b + 2);
        }
    }
}

// Takes out what a query does not see; `at`: the position of this lane's first score.
template <int SLICES> FN void hide(float (*scores)[4], const Two &two, uint32_t at) {
    UNROLL for (int i = 0; i < 8 * SLICES; i++) {
        const Query &query = two.at[i % 4 / 2];
        uint32_t pos = at + i / 4 * 8 + i % 2;
        if (pos < query.first || pos > query.pos) scores[i / 4][i % 4] = NONE;
    }
}

// The greatest score of each of the two queries.
template <int SLICES> FN Floats2 tops_of(const float (*scores)[4]) {
    Floats2 tops = {{NONE, NONE}};
    UNROLL for (int i = 0; i < 8 * SLICES; i++) tops.at[i % 4 / 2] = fmaxf(tops.at[i % 4 / 2], scores[i / 4][i % 4]);
    UNROLL for (int i = 0; i < 4; i++)
        tops.at[i / 2] = fmaxf(tops.at[i / 2], __shfl_xor_sync(ALL_LANES, tops.at[i / 2], i % 2 + 1));
    return tops;
}

// Shares of one slice as the left operand of the product with its values, and this lane's part of their totals.
FN Words4 shares_of(const float (*scores)[4], const Floats2 &tops, Floats2 *totals) {
    Words4 shares;
    UNROLL for (int i = 0; i < 4; i++) {
        float top = tops.at[i % 2], from = top == NONE ? 0.0f : top * LOG2_E;
        const float *two = scores[i / 2] + i % 2 * 2;
        shares.word[i] = bf16_pair(power_of_2(fmaf(two[0], LOG2_E, -from)), power_of_2(fmaf(two[1], LOG2_E, -from)));
        float sum = bits_f32(shares.word[i] << 16) + bits_f32(shares.word[i] & 0xffff0000u);
        totals->at[i % 2] = i < 2 ? sum : totals->at[i % 2] + sum;
    }
    return shares;
}

// Over the four lanes of a row.
FN float row_total(float total) {
    total += __shfl_xor_sync(ALL_LANES, total, 1);
    return total + __shfl_xor_sync(ALL_LANES, total, 2);
}

// What the two queries have seen so far, but for the sums.
struct SoFar {
    Floats2 tops, totals;
};

// With which shares old and new sums are joined.
struct Shares {
    float old[2], fresh[2];
};

// As `join` of attention.cu.
FN Shares join_tops(SoFar *all, const Floats2 &tops, const Floats2 &totals) {
    Shares shares;
    UNROLL for (int i = 0; i < 2; i++) {
        bool none = tops.at[i] == NONE;
        float most = fmaxf(all->tops.at[i], tops.at[i]);
        shares.old[i] = none ? 1.0f : expf(all->tops.at[i] - most);
        shares.fresh[i] = none ? 0.0f : expf(tops.at[i] - most);
        all->totals.at[i] = fmaf(all->totals.at[i], shares.old[i], totals.at[i] * shares.fresh[i]);
        all->tops.at[i] = most;
    }
    return shares;
}

// Sums of 16 * PAIRS values of the head over a split, the first of which is at `values`, joined to those before; four chains run beside
// each other.
template <int DIM, int PAIRS> FN void add_split(float (*sums)[4], const Words4 *p, const uint16_t *values, const Shares &shares) {
    constexpr int AT_ONCE = PAIRS < 2 ? PAIRS : 2;
    values += threadIdx.x % 16 * Shape<DIM>::STRIDE + threadIdx.x % WARP / 16 * 8;
    UNROLL for (int first = 0; first < PAIRS; first += AT_ONCE) {
        float one[2 * AT_ONCE][4];
        UNROLL for (int i = 0; i < 8 * AT_ONCE; i++) one[i / 4][i % 4] = 0.0f;
        UNROLL for (int i = 0; i < SPLIT / SLICE * AT_ONCE; i++) {
            int slice = i / AT_ONCE, pair = i % AT_ONCE;
            uint32_t b[4];
            read_squares_across(b, values + slice * SLICE * Shape<DIM>::STRIDE + (first + pair) * 16);
            mma_bf16(one[2 * pair], p[slice].word, b);
            mma_bf16(one[2 * pair + 1], p[slice].word, b + 2);
        }
        UNROLL for (int i = 0; i < 8 * AT_ONCE; i++) {
            float *sum = &sums[2 * first + i / 4][i % 4];
            *sum = fmaf(*sum, shares.old[i % 4 / 2], one[i / 4][i % 4] * shares.fresh[i % 4 / 2]);
        }
    }
}

template <int N> FN void forget_all(SoFar *all, float (*sums)[4]) {
    all->tops = {{NONE, NONE}};
    all->totals = {{0.0f, 0.0f}};
    UNROLL for (int i = 0; i < 4 * N; i++) sums[i / 4][i % 4] = 0.0f;
}

// The warps of a block together: all have the same queries, and what those see of the splits from `begin` to the one before `stop`; each
// has the sums of its quarter of each part of a head.
template <int DIM>
FN void see_together(SoFar *all, float (*sums)[4], const float *q, const uint32_t *item, const Cache &cache, float scale, uint32_t begin,
                     uint32_t stop) {
    using S = Shape<DIM>;
    SHARED(Exchange<DIM>, its);
    uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Tiles t = tiles_of(its + 1, item, cache, span_of(item, cache, item[FIRST_QUERY], SLICE), begin, stop);
    Two two = two_of(item, cache, item[FIRST_QUERY]);
    begin_tiles<DIM>(t);
    for (uint32_t i = warp; i < DIM / SLICE; i += TEAM) read_queries(its->queries[i][lane].word, i, q, two, cache, scale);
    forget_all<DIM / 32>(all, sums);
    ROLLED for (uint32_t start = begin, load = 0; start < stop; start += SPLIT, load += 2 * S::PARTS) {
        float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        UNROLL for (int part = 0; part < (int)S::PARTS; part++) {
            const uint16_t *keys = tile_here<DIM>(t, load + part) + warp * SLICE * S::STRIDE;
            add_keys<DIM, 1, 0>(scores, nullptr, its->queries + part * S::STEPS, keys);
        }
        hide<1>(scores, two, start + warp * SLICE + lane % 4 * 2);
        its->tops[warp][lane] = tops_of<1>(scores);
        __syncthreads();
        Floats2 tops = its->tops[0][lane], totals;
        UNROLL for (int i = 2; i < 2 * TEAM; i++) tops.at[i % 2] = fmaxf(tops.at[i % 2], its->tops[i / 2][lane].at[i % 2]);
        its->shares[warp][lane] = shares_of(scores, tops, &totals);
        its->totals[warp][lane] = totals;
        const uint16_t *values = tile_here<DIM>(t, load + S::PARTS);
        Words4 p[TEAM];
        UNROLL for (int i = 0; i < TEAM; i++) p[i] = its->shares[i][lane];
        totals = {{0.0f, 0.0f}};
        UNROLL for (int i = 0; i < 2 * TEAM; i++) totals.at[i % 2] += its->totals[i / 2][lane].at[i % 2];
        Shares shares = join_tops(all, tops, {{row_total(totals.at[0]), row_total(totals.at[1])}});
        UNROLL for (int part = 0; part < (int)S::PARTS; part++) {
            if (part) values = tile_here<DIM>(t, load + S::PARTS + part);
            add_split<DIM, S::WIDTH / 64>(sums + part * S::WIDTH / 32, p, values + warp * S::WIDTH / TEAM, shares);
        }
    }
}

// The column of sum `i` of a lane whose warp has a quarter.
template <int DIM> FN uint32_t col_together(int i) {
    constexpr int EACH = Shape<DIM>::WIDTH / 32;
    return i / EACH * Shape<DIM>::WIDTH + threadIdx.x / WARP * (EACH * 8) + i % EACH * 8 + threadIdx.x % 4 * 2;
}

// Each warp alone with sixteen queries. Half of their operands are in shared memory: there are not registers enough for all.
template <int DIM> FN void rows_alone(float *out, const float *q, const uint32_t *item, const Cache &cache, float scale) {
    using S = Shape<DIM>;
    constexpr int KEPT = S::STEPS / 2;
    SHARED(Words4, shared);
    Words4 mine[KEPT], (*others)[WARP] = reinterpret_cast<Words4(*)[WARP]>(shared) + threadIdx.x / WARP * KEPT;
    uint32_t lane = threadIdx.x % WARP, begins = item[FIRST_QUERY] + threadIdx.x / WARP * SLICE;
    Span block = span_of(item, cache, item[FIRST_QUERY], TEAM * SLICE), span = span_of(item, cache, begins, SLICE);
    uint32_t begin = block.first / SPLIT * SPLIT, stop = block.last + 1;
    Tiles t = tiles_of(shared + TEAM * KEPT * WARP, item, cache, block, begin, stop);
    begin_tiles<DIM>(t);
    UNROLL for (int i = 0; i < 2 * KEPT; i++)
        read_queries((i < KEPT ? mine[i] : others[i - KEPT][lane]).word, i, q, two_of(item, cache, begins), cache, scale);
    SoFar all;
    float sums[DIM / 8][4];
    forget_all<DIM / 8>(&all, sums);
    ROLLED for (uint32_t start = begin, load = 0; start < stop; start += SPLIT, load += 2) {
        bool sees = span.any && start <= span.last && start + SPLIT > span.first;
        const uint16_t *keys = tile_here<DIM>(t, load);
        Words4 p[SPLIT / SLICE];
        Floats2 tops, totals = {{0.0f, 0.0f}};
        if (sees) {
            float scores[SPLIT / 8][4];
            UNROLL for (int i = 0; i < SPLIT / 2; i++) scores[i / 4][i % 4] = 0.0f;
            add_keys<DIM, SPLIT / SLICE, KEPT>(scores, mine, others, keys);
            if (start < span.all_first || start + SPLIT > span.all_last + 1)
                hide<SPLIT / SLICE>(scores, two_of(item, cache, begins), start + lane % 4 * 2);
            tops = tops_of<SPLIT / SLICE>(scores);
            UNROLL for (int i = 0; i < SPLIT / SLICE; i++) {
                Floats2 part;
                p[i] = shares_of(scores + 2 * i, tops, &part);
                UNROLL for (int j = 0; j < 2; j++) totals.at[j] += part.at[j];
            }
        }
        const uint16_t *values = tile_here<DIM>(t, load + 1);
        if (sees) {
            Shares shares = join_tops(&all, tops, {{row_total(totals.at[0]), row_total(totals.at[1])}});
            add_split<DIM, DIM / 16>(sums, p, values, shares);
        }
    }
    Two two = two_of(item, cache, begins);
    UNROLL for (int i = 0; i < DIM / 4; i++) {
        const Query &query = two.at[i % 2];
        float total = all.totals.at[i % 2], *sum = sums[i / 2] + i % 2 * 2;
        float *to = out + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
        if (query.real) write_two(to, i / 2 * 8 + lane % 4 * 2, cache.head_dim, {{sum[0] / total, sum[1] / total}});
    }
}

// Every split of an item of up to sixteen queries, one after another.
template <int DIM> FN void rows_together(float *out, const float *q, const uint32_t *item, const Cache &cache, float scale) {
    Span span = span_of(item, cache, item[FIRST_QUERY], SLICE);
    SoFar all;
    float sums[DIM / 32][4];
    see_together<DIM>(&all, sums, q, item, cache, scale, span.first / SPLIT * SPLIT, span.last + 1);
    Two two = two_of(item, cache, item[FIRST_QUERY]);
    UNROLL for (int i = 0; i < DIM / 16; i++) {
        const Query &query = two.at[i % 2];
        float total = all.totals.at[i % 2], *sum = sums[i / 2] + i % 2 * 2;
        float *to = out + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
        if (query.real) write_two(to, col_together<DIM>(i / 2), cache.head_dim, {{sum[0] / total, sum[1] / total}});
    }
}

// One split of an item of up to sixteen queries: blockIdx.y is its number.
template <int DIM>
FN void split_together(float *parts, const float *q, const uint32_t *item, const Cache &cache, float scale, uint32_t splits) {
    Span span = span_of(item, cache, item[FIRST_QUERY], SLICE);
    uint32_t split = blockIdx.y, begin = split * SPLIT, stop = span.last + 1 < begin + SPLIT ? span.last + 1 : begin + SPLIT;
    if (begin > span.last) return;
    SoFar all;
    float sums[DIM / 32][4];
    see_together<DIM>(&all, sums, q, item, cache, scale, begin, span.first < stop ? stop : begin);
    Two two = two_of(item, cache, item[FIRST_QUERY]);
    UNROLL for (int i = 0; i < DIM / 16; i++) {
        const Query &query = two.at[i % 2];
        float *to = parts + parts_at(query, cache.heads, cache.head_dim, splits), *sum = sums[i / 2] + i % 2 * 2;
        if (!query.real) continue;
        if (threadIdx.x % 4 == 0 && threadIdx.x < WARP && i < 2) {
            to[split] = all.tops.at[i];
            to[splits + split] = all.totals.at[i];
        }
        to += 2ull * splits + (uint64_t)split * cache.head_dim;
        write_two(to, col_together<DIM>(i / 2), cache.head_dim, {{sum[0], sum[1]}});
    }
}

// So many blocks on a multiprocessor as no register is spilled for: what is compiled for other devices wants more of them for the same.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define ALONE_BLOCKS 3
#else
#define ALONE_BLOCKS 2
#endif

// All kernels: blocks of four warps. Items have up to 64 queries here, or sixteen where heads are wider than 128. The longest ones of a prompt
// come last in the list, and are begun first: what ends late should be short.
KERNEL BOUNDS(TEAM_THREADS, ALONE_BLOCKS)
    attention_rows_bf16(float *out, const float *q, const uint16_t *keys, const uint16_t *values, const uint32_t *items,
                        const uint32_t *tables, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t block_size,
                        uint32_t window, float scale) {
    follow();
    Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};
    const uint32_t *item = items + (uint64_t)(gridDim.x - 1 - blockIdx.x) * ITEM_WORDS;
    bool few = item[ROWS] * (heads / kv_heads) <= item[FIRST_QUERY] + SLICE;
    if (head_dim > 128) rows_together<256>(out, q, item, cache, scale);
    else if (head_dim > 64 && few) rows_together<128>(out, q, item, cache, scale);
    else if (head_dim > 64) rows_alone<128>(out, q, item, cache, scale);
    else if (few) rows_together<64>(out, q, item, cache, scale);
    else rows_alone<64>(out, q, item, cache, scale);
}

// Where no item has more than sixteen queries: more blocks have room, and more of the cache is under way.
KERNEL BOUNDS(TEAM_THREADS, 4)
    attention_few_bf16(float *out, const float *q, const uint16_t *keys, const uint16_t *values, const uint32_t *items,
                       const uint32_t *tables, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t block_size,
                       uint32_t window, float scale) {
    follow();
    Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    if (head_dim > 128) rows_together<256>(out, q, item, cache, scale);
    else if (head_dim > 64) rows_together<128>(out, q, item, cache, scale);
    else rows_together<64>(out, q, item, cache, scale);
}

// Likewise, one split of each item.
KERNEL BOUNDS(TEAM_THREADS, 4)
    attention_split_bf16(float *parts, const float *q, const uint16_t *keys, const uint16_t *values, const uint32_t *items,
                         const uint32_t *tables, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t block_size,
                         uint32_t window, float scale, uint32_t splits) {
    follow();
    Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    if (head_dim > 128) split_together<256>(parts, q, item, cache, scale, splits);
    else if (head_dim > 64) split_together<128>(parts, q, item, cache, scale, splits);
    else split_together<64>(parts, q, item, cache, scale, splits);
}
