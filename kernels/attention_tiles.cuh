// How the blocks of attention_mma.cu bring a split's keys and values to shared memory: tiles of SPLIT positions, by copies that run beside the
// arithmetic.
#pragma once

#include "attention.cuh"

#define TEAM 4   // warps of a block
#define SLICE 16 // positions and queries of a product
#define TEAM_THREADS (TEAM * WARP)
#define NOWHERE 0xffffffffu

// Heads of up to DIM values; narrower ones are filled up with zeros. A load is a tile: a split's keys, then its values, of the widest heads
// in two parts each. Rows are an odd number of 16 bytes, so that eight of them lie in different banks.
template <int DIM> struct Shape {
    enum {
        WIDTH = DIM < 128 ? DIM : 128,
        PARTS = DIM / WIDTH,
        STEPS = WIDTH / SLICE,
        STRIDE = WIDTH + 8,
        LANES = WIDTH / 8,            // that bring a position
        BUFFERS = DIM < 128 ? 4 : 2,  // as `shared_bytes` of items.rs has room for
    };
};

// The queries of an item that this block or warp has, and what they see: all of them from `all_first` to `all_last`, some from `first` on, or
// to `last`.
struct Span {
    uint32_t first, all_first, all_last, last;
    bool any;
};

FN Span span_of(const uint32_t *item, const Cache &cache, uint32_t begin, uint32_t most) {
    uint32_t group = cache.heads / cache.kv_heads, count = item[ROWS] * group;
    Span span;
    span.any = begin < count;
    uint32_t end = begin + most < count ? begin + most : count;
    span.all_last = item[FIRST_POS] + (span.any ? begin / group : 0);
    span.last = item[FIRST_POS] + (span.any ? (end - 1) / group : 0);
    span.first = first_seen(item, span.all_last, cache);
    span.all_first = first_seen(item, span.last, cache);
    return span;
}

// How a block brings tiles. Each warp brings a slice of a split; where its positions are is looked up a split ahead.
struct Tiles {
    const uint16_t *keys, *values;
    const uint32_t *table;
    uint16_t *tiles;
    uint32_t kv_head, kv_heads, block_size, dim, begin, stop, first, end, line, next;
    bool aligned;
};

// Where the position of this lane is in the cache, in heads of `dim`; those of a split that nobody here sees are nowhere.
FN uint32_t line_at(const Tiles &t, uint32_t start) {
    uint32_t pos = start + threadIdx.x / WARP * SLICE + threadIdx.x % SLICE;
    if (pos < t.first || pos >= t.end) return NOWHERE;
    return cached_at(t.table, pos, t.kv_head, t.kv_heads, t.block_size);
}

// Splits from `begin` to the one before `stop`, of which `span` is seen.
FN Tiles tiles_of(void *tiles, const uint32_t *item, const Cache &cache, const Span &span, uint32_t begin, uint32_t stop) {
    Tiles t;
    t.keys = (const uint16_t *)cache.keys;
    t.values = (const uint16_t *)cache.values;
    t.table = cache.tables + item[TABLE];
    t.tiles = (uint16_t *)tiles;
    t.kv_head = item[KV_HEAD];
    t.kv_heads = cache.kv_heads;
    t.block_size = cache.block_size;
    t.dim = cache.head_dim;
    t.begin = begin;
    t.stop = stop;
    t.first = span.first;
    t.end = span.last + 1;
    t.line = NOWHERE;
    t.next = line_at(t, begin);
    t.aligned = cache.head_dim % 8 == 0 && is_aligned(cache.keys) && is_aligned(cache.values);
    return t;
}

template <int DIM> FN uint16_t *tile_of(const Tiles &t, uint32_t load) {
    return t.tiles + load % (uint32_t)Shape<DIM>::BUFFERS * (SPLIT * (uint32_t)Shape<DIM>::STRIDE);
}

// Sixteen bytes of a line, or zeros; widths that are no multiple of them go value by value.
FN void bring(uint16_t *to, const uint16_t *from, uint32_t line, uint32_t col, const Tiles &t) {
    const uint16_t *at = line == NOWHERE ? from : from + (uint64_t)line * t.dim;
    uint32_t dim = line == NOWHERE ? 0 : t.dim;
    if (t.aligned) return copy16(to, col < dim ? at + col : from, col < dim);
    for (uint32_t i = 0; i < 8; i++) to[i] = col + i < dim ? at[col + i] : (uint16_t)0;
}

// Begins a load, where there is such a one. Loads begin in their order.
template <int DIM> FN void begin_tile(Tiles &t, uint32_t load) {
    using S = Shape<DIM>;
    uint32_t part = load % (2 * S::PARTS), start = t.begin + load / (2 * S::PARTS) * SPLIT;
    if (start >= t.stop) return;
    if (part == 0) {
        t.line = t.next;
        t.next = line_at(t, start + SPLIT);
    }
    const uint16_t *from = part < S::PARTS ? t.keys : t.values;
    uint32_t row = threadIdx.x % WARP / S::LANES, at = threadIdx.x % S::LANES * 8, col = part % S::PARTS * S::WIDTH + at;
    uint16_t *to = tile_of<DIM>(t, load) + threadIdx.x / WARP * SLICE * S::STRIDE + at;
    UNROLL for (int i = 0; i < SLICE * (int)S::LANES / WARP; i++, row += WARP / S::LANES)
        bring(to + row * S::STRIDE, from, __shfl_sync(ALL_LANES, t.line, (int)row), col, t);
}

template <int DIM> FN void begin_tiles(Tiles &t) {
    UNROLL for (uint32_t load = 0; load < (uint32_t)Shape<DIM>::BUFFERS; load++) {
        // the last one's group is closed by the first `tile_here`
        if (load) copies_group();
        begin_tile<DIM>(t, load);
    }
}

// Waits for a load and begins the one that takes the place of the load before it, which everybody is done with behind the barrier.
template <int DIM> FN const uint16_t *tile_here(Tiles &t, uint32_t load) {
    copies_wait<Shape<DIM>::BUFFERS - 2>();
    __syncthreads();
    if (load) begin_tile<DIM>(t, load - 1 + Shape<DIM>::BUFFERS);
    copies_group();
    return tile_of<DIM>(t, load);
}
