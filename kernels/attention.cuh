// What attention is made of, whichever way its sums are made: work items, who sees which positions, and how what was seen of a split is
// joined to what was seen before (attention.cu, attention_mma.cu). Reference: engine/src/backend/cpu/attention.rs.
#pragma once

#include "mma.cuh"

#define SPLIT 64 // as in engine/src/backend/cuda/items.rs
#define NONE (-INFINITY)

// Words of a work item, made by engine/src/backend/cuda/items.rs.
enum { FIRST_ROW, ROWS, FIRST_POS, KV_HEAD, TABLE, FIRST_QUERY, SINCE, ITEM_WORDS = 8 };

struct Cache {
    const void *keys, *values;
    const uint32_t *tables;
    uint32_t heads, kv_heads, head_dim, block_size, window;
};

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

// Where a position of the sequence is in the cache, in heads: `table` is the sequence's.
FN uint32_t cached_at(const uint32_t *table, uint32_t pos, uint32_t kv_head, uint32_t kv_heads, uint32_t block_size) {
    return (table[pos / block_size] * kv_heads + kv_head) * block_size + pos % block_size;
}

// Query `number` of an item's rows, row after row; of those beyond the last only `real` and the position mean something.
FN Query query_of(const uint32_t *item, const Cache &cache, uint32_t number) {
    uint32_t group = cache.heads / cache.kv_heads;
    Query query;
    query.real = number < item[ROWS] * group;
    uint32_t row = query.real ? number / group : 0;
    query.row = item[FIRST_ROW] + row;
    query.head = item[KV_HEAD] * group + (query.real ? number % group : 0);
    query.pos = item[FIRST_POS] + row;
    query.first = first_seen(item, query.pos, cache);
    return query;
}

// What splits hand on, for each row and head: the greatest scores of all splits, their totals, then head_dim sums of each.
FN uint64_t parts_at(const Query &query, uint32_t heads, uint32_t head_dim, uint32_t splits) {
    return ((uint64_t)query.row * heads + query.head) * splits * (head_dim + 2);
}
