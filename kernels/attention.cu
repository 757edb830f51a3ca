// Paged attention with grouped queries and a sliding window, for decode and prefill. Reference: engine/src/backend/cpu/attention.rs.
//
// Positions are cut into splits of SPLIT, counted from 0 of the sequence, and splits into tiles of a warp's width. What a query gets of a
// split (the greatest score, the sum of weights, the weighted sum of values) is computed in one order, and splits are joined in theirs,
// whether by the blocks of one split each (`attention_split`, then `attention_join`: long contexts, few rows) or by one block after
// another (`attention_rows`: prompts). So both give the same bits, whatever blocks, chunks and neighbours there are.
//
// A block has a warp for each query (one head of one row); its queries share a KV head, and so the tile in shared memory.
#include "common.cuh"

#define SPLIT 256
#define QUERIES 8
#define PARTS_MAX 8 // head_dim is at most 256
#define NONE (-INFINITY)

// Words of a work item, made by engine/src/backend/cuda/attention.rs.
enum { FIRST_ROW, ROWS, FIRST_POS, KV_HEAD, TABLE, FIRST_QUERY, SINCE, ITEM_WORDS = 8 };

struct Cache {
    const void *keys, *values;
    const uint32_t *tables;
    uint32_t heads, kv_heads, head_dim, block_size, window;
};

// What a query has seen so far. Lane l has the values l, l + 32, … of the weighted sum.
struct Seen {
    float top, total, sum[PARTS_MAX];
};

FN void forget(Seen *seen) {
    seen->top = NONE;
    seen->total = 0.0f;
    for (int i = 0; i < PARTS_MAX; i++) seen->sum[i] = 0.0f;
}

// Joins what came later to what came before; the one place that does, so that all ways round alike.
FN void join(Seen *seen, float top, float total, const float *sum) {
    if (top == NONE) return;
    float most = fmaxf(seen->top, top), old_share = expf(seen->top - most), new_share = expf(top - most);
    seen->total = fmaf(seen->total, old_share, total * new_share);
    for (int i = 0; i < PARTS_MAX; i++) seen->sum[i] = fmaf(seen->sum[i], old_share, sum[i] * new_share);
    seen->top = most;
}

FN float cached(const float *values, uint64_t at) { return values[at]; }
FN float cached(const uint16_t *values, uint64_t at) { return bf16_to_f32(values[at]); }

struct Query {
    uint32_t row, head, pos, first;
    bool real;
};

// The first position that the one at `pos` sees.
FN uint32_t first_seen(const uint32_t *item, uint32_t pos, const Cache &cache) {
    uint32_t first = cache.window && pos + 1 > cache.window ? pos + 1 - cache.window : 0;
    if (first < item[SINCE]) first = item[SINCE];
    return first < pos ? first : pos;
}

FN Query my_query(const uint32_t *item, const Cache &cache) {
    uint32_t group = cache.heads / cache.kv_heads, number = item[FIRST_QUERY] + threadIdx.x / WARP;
    Query query;
    query.real = number < item[ROWS] * group;
    uint32_t row = query.real ? number / group : 0;
    query.row = item[FIRST_ROW] + row;
    query.head = item[KV_HEAD] * group + (query.real ? number % group : 0);
    query.pos = item[FIRST_POS] + row;
    query.first = first_seen(item, query.pos, cache);
    return query;
}

// Brings positions start … start + 31 of a KV head into `tile`, rows of head_dim + 1; zeros from `end` on.
template <class T>
FN void load_tile(float *tile, const T *from, const uint32_t *table, uint32_t start, uint32_t end, uint32_t kv_head,
                  const Cache &cache) {
    uint32_t dim = cache.head_dim;
    for (uint32_t i = threadIdx.x; i < WARP * dim; i += blockDim.x) {
        uint32_t at = i / dim, within = i % dim, pos = start + at;
        float value = 0.0f;
        if (pos < end) {
            uint64_t block = table[pos / cache.block_size];
            uint64_t line = (block * cache.kv_heads + kv_head) * cache.block_size + pos % cache.block_size;
            value = cached(from, line * dim + within);
        }
        tile[at * (dim + 1) + within] = value;
    }
}

// One tile for one query: lane l scores position start + l, then the warp adds the values.
FN void add_scores(Seen *seen, float score, float *share) {
    float most = fmaxf(seen->top, warp_max(score));
    float old_share = most == NONE ? 1.0f : expf(seen->top - most);
    *share = score == NONE || most == NONE ? 0.0f : expf(score - most);
    seen->total = fmaf(seen->total, old_share, warp_sum(*share));
    for (int i = 0; i < PARTS_MAX; i++) seen->sum[i] *= old_share;
    seen->top = most;
}

FN void add_values(Seen *seen, float share, const float *tile, uint32_t dim) {
    uint32_t lane = threadIdx.x % WARP;
    for (int at = 0; at < WARP; at++) {
        float mine = __shfl_sync(ALL_LANES, share, at);
        // a position that is not seen must not be multiplied: what lies there may be no number
        if (mine == 0.0f) continue;
        for (int i = 0; i < PARTS_MAX; i++)
            if (lane + i * WARP < dim) seen->sum[i] = fmaf(mine, tile[at * (dim + 1) + lane + i * WARP], seen->sum[i]);
    }
}

// What `query` gets of split `split`; all threads of the block come here together. `q` is the block's, scaled, a row of head_dim a warp.
template <class T>
FN void see_split(Seen *seen, uint32_t split, const uint32_t *item, const Query &query, const Cache &cache,
                  const float *q, float *tile) {
    const uint32_t *table = cache.tables + item[TABLE];
    uint32_t end = item[FIRST_POS] + item[ROWS], dim = cache.head_dim, lane = threadIdx.x % WARP;
    uint32_t stop = end < (split + 1) * SPLIT ? end : (split + 1) * SPLIT;
    uint32_t least = first_seen(item, item[FIRST_POS], cache);
    uint32_t start = least > split * SPLIT ? least / WARP * WARP : split * SPLIT;
    forget(seen);
    for (; start < stop; start += WARP) {
        load_tile(tile, (const T *)cache.keys, table, start, end, item[KV_HEAD], cache);
        __syncthreads();
        float score = 0.0f, share;
        for (uint32_t i = 0; i < dim; i++) score = fmaf(q[i], tile[lane * (dim + 1) + i], score);
        uint32_t pos = start + lane;
        add_scores(seen, query.real && pos >= query.first && pos <= query.pos ? score : NONE, &share);
        __syncthreads();
        load_tile(tile, (const T *)cache.values, table, start, end, item[KV_HEAD], cache);
        __syncthreads();
        add_values(seen, share, tile, dim);
        __syncthreads();
    }
}

FN float *load_query(float *shared, const float *q, const Query &query, const Cache &cache, float scale) {
    float *mine = shared + threadIdx.x / WARP * cache.head_dim;
    const float *from = q + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
    for (uint32_t i = threadIdx.x % WARP; i < cache.head_dim; i += WARP) mine[i] = from[i] * scale;
    __syncwarp();
    return mine;
}

FN void finish(float *out, const Seen *seen, const Query &query, const Cache &cache) {
    uint32_t lane = threadIdx.x % WARP;
    float *to = out + ((uint64_t)query.row * cache.heads + query.head) * cache.head_dim;
    for (int i = 0; i < PARTS_MAX; i++)
        if (lane + i * WARP < cache.head_dim) to[lane + i * WARP] = seen->sum[i] / seen->total;
}

// Every split of each item, one after another.
template <class T>
FN void rows_of(float *out, const float *q, const uint32_t *items, const Cache &cache, float scale) {
    SHARED(float, shared);
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    Query query = my_query(item, cache);
    float *mine = load_query(shared, q, query, cache, scale), *tile = shared + QUERIES * cache.head_dim;
    uint32_t end = item[FIRST_POS] + item[ROWS];
    Seen all, one;
    forget(&all);
    for (uint32_t split = 0; split * SPLIT < end; split++) {
        see_split<T>(&one, split, item, query, cache, mine, tile);
        join(&all, one.top, one.total, one.sum);
    }
    if (query.real) finish(out, &all, query, cache);
}

// One split of each item: blockIdx.y is its number. `parts`: [row][head][splits][head_dim + 2].
template <class T>
FN void split_of(float *parts, const float *q, const uint32_t *items, const Cache &cache, float scale, uint32_t splits) {
    SHARED(float, shared);
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    uint32_t split = blockIdx.y, lane = threadIdx.x % WARP, dim = cache.head_dim;
    if (split * SPLIT >= item[FIRST_POS] + item[ROWS]) return;
    Query query = my_query(item, cache);
    float *mine = load_query(shared, q, query, cache, scale), *tile = shared + QUERIES * dim;
    Seen seen;
    see_split<T>(&seen, split, item, query, cache, mine, tile);
    if (!query.real) return;
    float *to = parts + (((uint64_t)query.row * cache.heads + query.head) * splits + split) * (dim + 2);
    if (lane == 0) to[0] = seen.top;
    if (lane == 0) to[1] = seen.total;
    for (int i = 0; i < PARTS_MAX; i++)
        if (lane + i * WARP < dim) to[2 + lane + i * WARP] = seen.sum[i];
}

// Joins the splits of each query, in their order.
KERNEL attention_join(float *out, const float *parts, const uint32_t *items, uint32_t heads, uint32_t kv_heads,
                      uint32_t head_dim, uint32_t splits) {
    Cache cache = {0, 0, 0, heads, kv_heads, head_dim, 1, 0};
    const uint32_t *item = items + (uint64_t)blockIdx.x * ITEM_WORDS;
    uint32_t lane = threadIdx.x % WARP, end = item[FIRST_POS] + item[ROWS];
    Query query = my_query(item, cache);
    if (!query.real) return;
    const float *from = parts + ((uint64_t)query.row * heads + query.head) * splits * (head_dim + 2);
    Seen all;
    forget(&all);
    for (uint32_t split = 0; split * SPLIT < end; split++, from += head_dim + 2) {
        float sum[PARTS_MAX];
        for (int i = 0; i < PARTS_MAX; i++) sum[i] = lane + i * WARP < head_dim ? from[2 + lane + i * WARP] : 0.0f;
        join(&all, from[0], from[1], sum);
    }
    finish(out, &all, query, cache);
}

#define ATTENTION(name, T)                                                                                             \
    KERNEL attention_rows_##name(float *out, const float *q, const T *keys, const T *values, const uint32_t *items,    \
                                 const uint32_t *tables, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,         \
                                 uint32_t block_size, uint32_t window, float scale) {                                  \
        Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};                           \
        rows_of<T>(out, q, items, cache, scale);                                                                       \
    }                                                                                                                  \
    KERNEL attention_split_##name(float *parts, const float *q, const T *keys, const T *values, const uint32_t *items, \
                                  const uint32_t *tables, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,        \
                                  uint32_t block_size, uint32_t window, float scale, uint32_t splits) {                \
        Cache cache = {keys, values, tables, heads, kv_heads, head_dim, block_size, window};                           \
        split_of<T>(parts, q, items, cache, scale, splits);                                                            \
    }
ATTENTION(f32, float)
ATTENTION(bf16, uint16_t)
