// Paged attention over K and V in f32, with grouped queries and a sliding window, for decode and prefill, and the join of what splits gave
// (of those in bf16 as well, attention_mma.cu). Reference: engine/src/backend/cpu/attention.rs.
//
// Positions are cut into splits of SPLIT, counted from 0 of the sequence, and splits into tiles of a warp's width. What a query gets of a
// split (the greatest score, the sum of weights, the weighted sum of values) is computed in one order, and splits are joined in theirs,
// whether by the blocks of one split each (`attention_split`, then `attention_join`: long contexts, few rows) or by one block after
// another (`attention_rows`: prompts). So both give the same bits, whatever blocks, chunks and neighbours there are.
//
// A block has a warp for each query (one head of one row); its queries share a KV head, and so the tiles in shared memory. Tiles of keys and
// of values come in turn, as the cache has them, by copies that run beside the arithmetic: as many are under way as there is room for.
#include "attention.cuh"

#define QUERIES 8
#define ATTENTION_THREADS (QUERIES * WARP)

// What a query has seen so far. Of a head's values lane l has those from l * PARTS on: heads of up to 32 * PARTS values.
template <int PARTS> struct Seen {
    float top, total, sum[PARTS];
};

template <int PARTS> FN void forget(Seen<PARTS> *seen) {
    seen->top = NONE;
    seen->total = 0.0f;
    UNROLL for (int i = 0; i < PARTS; i++) seen->sum[i] = 0.0f;
}

// Joins what came later to what came before. `attention_join` does the same, many splits at once.
template <int PARTS> FN void join(Seen<PARTS> *seen, const Seen<PARTS> &later) {
    if (later.top == NONE) return;
    float most = fmaxf(seen->top, later.top), old_share = expf(seen->top - most), new_share = expf(later.top - most);
    seen->total = fmaf(seen->total, old_share, later.total * new_share);
    UNROLL for (int i = 0; i < PARTS; i++) seen->sum[i] = fmaf(seen->sum[i], old_share, later.sum[i] * new_share);
    seen->top = most;
}

// A warp of a block has a query; blocks of other blockIdx.z have the next ones.
FN Query my_query(const uint32_t *item, const Cache &cache) {
    return query_of(item, cache, item[FIRST_QUERY] + blockIdx.z * (blockDim.x / WARP) + threadIdx.x / WARP);
}

// N words that lie side by side, read at once where that is possible.
template <int N> struct alignas(N < 4 ? 4 * N : 16) Words {
    uint32_t word[N];
};

// N values of a tile.
template <int N> FN void widen(float *to, const float *from) {
    Words<N> got = *reinterpret_cast<const Words<N> *>(from);
    UNROLL for (int i = 0; i < N; i++) to[i] = bits_f32(got.word[i]);
}

// Rows of queries and tiles go up to a multiple of eight values, with zeros: so that no product needs a remainder.
FN uint32_t padded(uint32_t dim) { return (dim + 7) / 8 * 8; }

// How a block brings tiles: keys and values of tile 0, of tile 1, … are loads 0, 1, 2, 3, …
template <int PARTS, int THREADS> struct Loader {
    enum {
        EACH = 4,                                    // values of one copy
        LANES = WARP * PARTS / EACH,                 // threads that bring a position
        AT_ONCE = THREADS / LANES,                   // positions that all threads bring
        TURNS = WARP / AT_ONCE,                      // until a tile is there
        BUFFERS = PARTS == 8 ? 1 : 2,                // as `shared_bytes` of items.rs has room for
    };
    const float *keys, *values;
    const uint32_t *table;
    float *tiles;
    uint32_t kv_head, kv_heads, block_size, dim, stride, first, stop, end;
    bool aligned;
    // where this lane's position of the last tile of keys is in the cache, in heads of `dim`: that of values is there too
    uint32_t line;
};

// `stop`: tiles end before it. The stride is an odd number of 16 bytes, so that lanes which read a row each meet in no bank.
template <int PARTS, int THREADS>
FN Loader<PARTS, THREADS> loader(void *tiles, const uint32_t *item, const Cache &cache, uint32_t first, uint32_t stop) {
    Loader<PARTS, THREADS> l;
    const uint32_t each = Loader<PARTS, THREADS>::EACH;
    l.keys = (const float *)cache.keys;
    l.values = (const float *)cache.values;
    l.table = cache.tables + item[TABLE];
    l.tiles = (float *)tiles;
    l.kv_head = item[KV_HEAD];
    l.kv_heads = cache.kv_heads;
    l.block_size = cache.block_size;
    l.dim = cache.head_dim;
    l.stride = (padded(cache.head_dim) / each | 1) * each;
    l.first = first;
    l.stop = stop;
    l.line = 0;
    l.end = item[FIRST_POS] + item[ROWS];
    l.aligned = cache.head_dim % each == 0 && is_aligned(cache.keys) && is_aligned(cache.values);
    return l;
}

template <int PARTS, int THREADS> FN float *tile_of(const Loader<PARTS, THREADS> &l, uint32_t load) {
    return l.tiles + load % (uint32_t)Loader<PARTS, THREADS>::BUFFERS * WARP * l.stride;
}

// Sixteen bytes of a row, or zeros; widths that are no multiple of them go value by value.
template <int PARTS, int THREADS>
FN void bring(float *to, const float *line, uint32_t at, bool real, const Loader<PARTS, THREADS> &l) {
    if (l.aligned) return copy16(to, line + at, real && at < l.dim);
    for (int i = 0; i < (int)Loader<PARTS, THREADS>::EACH; i++) to[i] = real && at + i < l.dim ? line[at + i] : 0.0f;
}

// Begins a load, where there is such a one; zeros from `end` on. Loads begin in their order.
template <int PARTS, int THREADS> FN void begin(Loader<PARTS, THREADS> &l, uint32_t load) {
    using L = Loader<PARTS, THREADS>;
    uint32_t start = l.first + load / 2 * WARP, at = threadIdx.x % L::LANES * L::EACH, row = threadIdx.x / L::LANES;
    if (start >= l.stop) return;
    if (load % 2 == 0) {
        // each warp looks all positions up, one a lane: a division is dear
        uint32_t pos = start + threadIdx.x % WARP;
        l.line = pos < l.end ? cached_at(l.table, pos, l.kv_head, l.kv_heads, l.block_size) : 0;
    }
    const float *from = load % 2 ? l.values : l.keys;
    float *to = tile_of(l, load) + at;
    UNROLL for (int turn = 0; turn < (int)L::TURNS; turn++, row += L::AT_ONCE) {
        uint64_t line = __shfl_sync(ALL_LANES, l.line, (int)row);
        if (at < padded(l.dim)) bring(to + row * l.stride, from + line * l.dim, at, start + row < l.end, l);
    }
}

template <int PARTS, int THREADS> FN void begin_first(Loader<PARTS, THREADS> &l) {
    UNROLL for (uint32_t load = 0; load < (uint32_t)Loader<PARTS, THREADS>::BUFFERS; load++) {
        // the last one's group is closed by the first `arrive`
        if (load) copies_group();
        begin(l, load);
    }
}

// Waits for a load and begins the one that takes the place of the load before it, which everybody is done with behind the barrier.
template <int PARTS, int THREADS> FN const float *arrive(Loader<PARTS, THREADS> &l, uint32_t load) {
    constexpr int BUFFERS = Loader<PARTS, THREADS>::BUFFERS;
    copies_wait<(BUFFERS > 1 ? BUFFERS - 2 : 0)>();
    __syncthreads();
    if (load) begin(l, load - 1 + BUFFERS);
    copies_group();
    if (BUFFERS == 1) {
        copies_wait<0>();
        __syncthreads();
    }
    return tile_of(l, load);
}

// Four sums, of every fourth product each: none waits long for the one before.
FN float score_of(const float *q, const float *key, uint32_t width) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t i = 0; i < width; i += 8) {
        float k[8], mine[8];
        widen<8>(k, key + i);
        widen<8>(mine, q + i);
        UNROLL for (int j = 0; j < 8; j++) sum[j % 4] = fmaf(mine[j], k[j], sum[j % 4]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One tile for one query: lane l has the score of its position l, then the warp adds the values.
template <int PARTS> FN float add_scores(Seen<PARTS> *seen, float score) {
    float most = fmaxf(seen->top, warp_max(score));
    float old_share = most == NONE ? 1.0f : expf(seen->top - most);
    float share = score == NONE || most == NONE ? 0.0f : expf(score - most);
    seen->total = fmaf(seen->total, old_share, warp_sum(share));
    UNROLL for (int i = 0; i < PARTS; i++) seen->sum[i] *= old_share;
    seen->top = most;
    return share;
}

template <int PARTS> FN void add_value(Seen<PARTS> *seen, float share, const float *value) {
    float v[PARTS];
    widen<PARTS>(v, value);
    UNROLL for (int i = 0; i < PARTS; i++) seen->sum[i] = fmaf(share, v[i], seen->sum[i]);
}

// A position that is not seen must not be multiplied: what lies there may be no number. All of a tile is the common case.
template <int PARTS>
FN void add_values(Seen<PARTS> *seen, float share, const float *tile, uint32_t stride, uint32_t from, uint32_t to) {
    if (from == 0 && to == WARP) {
        ROLLED for (int at = 0; at < WARP; at += 8, tile += 8 * stride)
            UNROLL for (int i = 0; i < 8; i++) add_value(seen, __shfl_sync(ALL_LANES, share, at + i), tile + i * stride);
    } else {
        ROLLED for (uint32_t at = from; at < to; at++) add_value(seen, __shfl_sync(ALL_LANES, share, (int)at), tile + at * stride);
    }
}

FN void load_query(float *mine, const float *q, const Query &query, const Cache &cache, float scale) {
    const float *from = q + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
    for (uint32_t i = threadIdx.x % WARP; i < padded(cache.head_dim); i += WARP)
        mine[i] = i < cache.head_dim ? from[i] * scale : 0.0f;
    __syncwarp();
}

// What `query` gets of the tiles from the one of position `first` to the one before `stop`; all threads of the block come here together.
// Splits that end before the last tile are joined to `all`, the last is left in `one`.
template <int PARTS, int THREADS>
FN void see(Seen<PARTS> *all, Seen<PARTS> *one, uint32_t first, uint32_t stop, const float *q, const uint32_t *item,
            const Query &query, const Cache &cache, float scale) {
    SHARED(float, shared);
    uint32_t lane = threadIdx.x % WARP, width = padded(cache.head_dim);
    float *mine = shared + threadIdx.x / WARP * width;
    Loader<PARTS, THREADS> l = loader<PARTS, THREADS>(shared + THREADS / WARP * width, item, cache, first, stop);
    begin_first(l);
    load_query(mine, q, query, cache, scale);
    // lanes beyond the head's width read what is there and keep it to themselves
    uint32_t my_values = lane * PARTS < cache.head_dim ? lane * PARTS : 0;
    forget(all);
    forget(one);
    for (uint32_t start = first, load = 0; start < stop; start += WARP, load += 2) {
        if (start % SPLIT == 0) {
            join(all, *one);
            forget(one);
        }
        bool sees = query.real && start <= query.pos && start + WARP > query.first;
        uint32_t pos = start + lane;
        float share = 0.0f;
        const float *keys = arrive(l, load);
        if (sees) {
            float score = score_of(mine, keys + lane * l.stride, width);
            share = add_scores(one, pos >= query.first && pos <= query.pos ? score : NONE);
        }
        const float *values = arrive(l, load + 1);
        if (sees) {
            uint32_t from = query.first > start ? query.first - start : 0, to = query.pos - start + 1;
            add_values(one, share, values + my_values, l.stride, from, to < WARP ? to : WARP);
        }
    }
}

// Every split of each item, one after another.
template <int PARTS, int THREADS>
FN void rows_of(float *out, const float *q, const uint32_t *items, const Cache &cache, float scale) {
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    Query query = my_query(item, cache);
    Seen<PARTS> all, one;
    uint32_t first = first_seen(item, item[FIRST_POS], cache) / WARP * WARP;
    see<PARTS, THREADS>(&all, &one, first, item[FIRST_POS] + item[ROWS], q, item, query, cache, scale);
    join(&all, one);
    if (!query.real) return;
    uint32_t at = threadIdx.x % WARP * PARTS;
    float *to = out + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
    UNROLL for (int i = 0; i < PARTS; i++)
        if (at + i < cache.head_dim) to[at + i] = all.sum[i] / all.total;
}

// One split of each item: blockIdx.y is its number.
template <int PARTS, int THREADS>
FN void split_of(float *parts, const float *q, const uint32_t *items, const Cache &cache, float scale, uint32_t splits) {
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    uint32_t split = blockIdx.y, end = item[FIRST_POS] + item[ROWS], begins = split * SPLIT;
    if (begins >= end) return;
    Query query = my_query(item, cache);
    uint32_t least = first_seen(item, item[FIRST_POS], cache), first = least > begins ? least / WARP * WARP : begins;
    Seen<PARTS> none, seen;
    see<PARTS, THREADS>(&none, &seen, first, end < begins + SPLIT ? end : begins + SPLIT, q, item, query, cache, scale);
    if (!query.real) return;
    uint32_t lane = threadIdx.x % WARP;
    float *to = parts + parts_at(query, cache.heads, cache.head_dim, splits);
    if (lane == 0) to[split] = seen.top;
    if (lane == 0) to[splits + split] = seen.total;
    to += 2ull * splits + (uint64_t)split * cache.head_dim + lane * PARTS;
    UNROLL for (int i = 0; i < PARTS; i++)
        if (lane * PARTS + i < cache.head_dim) to[i] = seen.sum[i];
}

// What a warp joins at once: lane l has the greatest score and the total of split l, and one value of each of the splits' sums.
struct Batch {
    float top, total, value[WARP];
};

FN void read_batch(Batch *batch, const float *from, uint32_t first, uint32_t end, uint32_t splits, uint32_t head_dim, uint32_t col) {
    uint32_t lane = threadIdx.x % WARP;
    batch->top = first + lane < end ? from[first + lane] : NONE;
    batch->total = first + lane < end ? from[splits + first + lane] : 0.0f;
    from += 2ull * splits + (uint64_t)first * head_dim + col;
    UNROLL for (uint32_t i = 0; i < WARP; i++, from += head_dim)
        batch->value[i] = first + i < end && col < head_dim ? *from : 0.0f;
}

// As `join`, split after split. What does not depend on the sums, the greatest scores so far and their exponentials, comes for all first.
FN void join_batch(Seen<1> *seen, const Batch &batch) {
    uint32_t lane = threadIdx.x % WARP;
    float most = fmaxf(seen->top, batch.top);
    for (uint32_t step = 1; step < WARP; step *= 2) {
        float before = __shfl_sync(ALL_LANES, most, (int)(lane - step));
        if (lane >= step) most = fmaxf(most, before);
    }
    float before = __shfl_sync(ALL_LANES, most, (int)(lane - 1));
    float old_share = expf((lane ? before : seen->top) - most), new_share = expf(batch.top - most);
    UNROLL for (int i = 0; i < WARP; i++) {
        float top = __shfl_sync(ALL_LANES, batch.top, i), total = __shfl_sync(ALL_LANES, batch.total, i);
        float old = __shfl_sync(ALL_LANES, old_share, i), fresh = __shfl_sync(ALL_LANES, new_share, i);
        if (top == NONE) continue;
        seen->total = fmaf(seen->total, old, total * fresh);
        seen->sum[0] = fmaf(seen->sum[0], old, batch.value[i] * fresh);
    }
    seen->top = __shfl_sync(ALL_LANES, most, WARP - 1);
}

// Joins the splits of each query, in their order. A lane has one value of the head; blocks of other blockIdx.y have the next 32, as far as
// there are such blocks, and go on where there are not.
KERNEL BOUNDS(ATTENTION_THREADS, 1) attention_join(float *out, const float *parts, const uint32_t *items, uint32_t heads,
                                                   uint32_t kv_heads, uint32_t head_dim, uint32_t splits) {
    follow();
    Cache cache = {0, 0, 0, heads, kv_heads, head_dim, 1, 0};
    Query query = my_query(items + (uint64_t)blockIdx.x * ITEM_WORDS, cache);
    if (!query.real) return;
    const float *from = parts + parts_at(query, heads, head_dim, splits);
    uint32_t end = query.pos / SPLIT + 1;
    for (uint32_t at = blockIdx.y * WARP; at < head_dim; at += gridDim.y * WARP) {
        uint32_t col = at + threadIdx.x % WARP;
        Seen<1> all;
        Batch batch, next;
        forget(&all);
        read_batch(&next, from, 0, end, splits, head_dim, col);
        ROLLED for (uint32_t first = 0; first < end; first += WARP) {
            batch = next;
            read_batch(&next, from, first + WARP, end, splits, head_dim, col);
            join_batch(&all, batch);
        }
        if (col < head_dim) out[((uint64_t)query.row * heads + query.head) * head_dim + col] = all.sum[0] / all.total;
    }
}

// The narrowest form that a head fits in.
#define BY_WIDTH(call, THREADS, ...)                                                                                   \
    if (head_dim <= 64) call<2, THREADS>(__VA_ARGS__);                                                                 \
    else if (head_dim <= 128) call<4, THREADS>(__VA_ARGS__);                                                           \
    else call<8, THREADS>(__VA_ARGS__);

// For items of as many queries as there are warps. So many blocks on a multiprocessor as no register is spilled for.
#define ATTENTION(name, THREADS, BLOCKS)                                                                               \
    KERNEL BOUNDS(THREADS, BLOCKS)                                                                                     \
        attention_rows_##name(float *out, const float *q, const float *keys, const float *values, const uint32_t *items,\
                              const uint32_t *tables, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,            \
                              uint32_t block_size, uint32_t window, float scale) {                                     \
        follow();                                                                                                      \
        Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};                           \
        BY_WIDTH(rows_of, THREADS, out, q, items, cache, scale)                                                        \
    }                                                                                                                  \
    KERNEL BOUNDS(THREADS, BLOCKS)                                                                                     \
        attention_split_##name(float *parts, const float *q, const float *keys, const float *values,                   \
                               const uint32_t *items, const uint32_t *tables, uint32_t heads, uint32_t kv_heads,       \
                               uint32_t head_dim, uint32_t block_size, uint32_t window, float scale, uint32_t splits) {\
        follow();                                                                                                      \
        Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};                           \
        BY_WIDTH(split_of, THREADS, parts, q, items, cache, scale, splits)                                             \
    }
ATTENTION(f32, ATTENTION_THREADS, 2)
// A decode of four query heads a KV head leaves half of those warps without work.
ATTENTION(f32_4, ATTENTION_THREADS / 2, 4)
