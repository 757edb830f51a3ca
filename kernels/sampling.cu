// From rows of logits to tokens: the likeliest, or one drawn by temperature, min-p, top-k and top-p with the caller's own random number.
// A block has a row. The order of candidates and the meaning of each rule are those of engine/src/sampling.rs, which is the reference;
// weights are f64 as there, so that only sums of another order can differ (in the sixteenth digit).
#include "mma.cuh"

#define NO_TOKEN 0xffffffffu

// Greater for greater numbers, 0 for those that are none or infinite.
FN uint32_t key_of(float logit) {
    uint32_t bits = f32_bits(logit);
    if ((bits & 0x7f800000u) == 0x7f800000u) return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

FN float logit_of(uint32_t key) { return bits_f32(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The sum over all threads of a block, the same in each; `place` has a word for each warp.
FN double block_sum(double x, double *place) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    if (threadIdx.x % WARP == 0) place[threadIdx.x / WARP] = x;
    __syncthreads();
    double all = 0.0;
    for (uint32_t warp = 0; warp < blockDim.x / WARP; warp++) all += place[warp];
    __syncthreads();
    return all;
}

// The greatest finite logit and, among equals, the lowest id.
FN uint64_t best_of(const float *row, uint32_t cols, double *place) {
    uint64_t *words = reinterpret_cast<uint64_t *>(place);
    unsigned long long best = 0;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) {
        uint32_t key = key_of(row[i]);
        unsigned long long mine = key ? (unsigned long long)key << 32 | (NO_TOKEN - i) : 0;
        best = mine > best ? mine : best;
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        unsigned long long other = __shfl_xor_sync(ALL_LANES, best, step);
        best = other > best ? other : best;
    }
    if (threadIdx.x % WARP == 0) words[threadIdx.x / WARP] = best;
    __syncthreads();
    for (uint32_t warp = 0; warp < blockDim.x / WARP; warp++) best = words[warp] > best ? words[warp] : best;
    __syncthreads();
    return best;
}

// What a row is sampled by; 8 words, written by engine/src/backend/cuda/sampling.rs.
struct Rules {
    double scale, unit;
    float top_p, min_p;
    uint32_t top_k, greedy;
};

struct Row {
    const float *logits;
    uint32_t cols;
    double peak, scale, least;
    double *place;
};

FN double weight_of(const Row &row, float logit) { return exp(((double)logit - row.peak) * row.scale); }

// 0 for what is no candidate.
FN double candidate(const Row &row, float logit) {
    if (!key_of(logit)) return 0.0;
    double weight = weight_of(row, logit);
    return weight > 0.0 && weight >= row.least ? weight : 0.0;
}

struct Above {
    double count, sum;
};

// Candidates whose key is at least `key`.
FN Above at_least(const Row &row, uint64_t key) {
    double count = 0.0, sum = 0.0;
    for (uint32_t i = threadIdx.x; i < row.cols; i += blockDim.x) {
        double weight = key_of(row.logits[i]) >= key ? candidate(row, row.logits[i]) : 0.0;
        count += weight > 0.0 ? 1.0 : 0.0;
        sum += weight;
    }
    Above above;
    above.count = block_sum(count, row.place);
    above.sum = block_sum(sum, row.place);
    return above;
}

FN bool reached(Above above, double count, double sum, bool beyond) {
    return above.count >= count || (beyond ? above.sum > sum : above.sum >= sum);
}

// The greatest key from which on so many candidates, or so much weight, are reached; 0: never.
FN uint32_t crossing(const Row &row, double count, double sum, bool beyond) {
    uint64_t low = 0, high = 1ull << 32;
    while (high - low > 1) {
        uint64_t middle = (low + high) / 2;
        if (reached(at_least(row, middle), count, sum, beyond)) low = middle;
        else high = middle;
    }
    return (uint32_t)low;
}

// How many of the candidates of one weight it takes beside those above, at least one and at most `most`.
FN double ties_taken(Above above, double weight, double most, double count, double sum, bool beyond) {
    double taken = 0.0;
    while (taken < most) {
        taken += 1.0;
        above.count += 1.0;
        above.sum += weight;
        if (reached(above, count, sum, beyond)) break;
    }
    return taken;
}

// The id of the `number`-th (from 1) candidate of this key, in the order of ids.
FN uint32_t nth_of_key(const Row &row, uint32_t key, double number) {
    uint32_t *found = reinterpret_cast<uint32_t *>(row.place), share = (row.cols + blockDim.x - 1) / blockDim.x;
    uint32_t *counts = found + 1, first = threadIdx.x * share, mine = 0;
    for (uint32_t i = first; i < first + share && i < row.cols; i++) mine += key_of(row.logits[i]) == key;
    counts[threadIdx.x] = mine;
    if (threadIdx.x == 0) *found = NO_TOKEN;
    __syncthreads();
    double before = 0.0;
    for (uint32_t thread = 0; thread < threadIdx.x; thread++) before += counts[thread];
    for (uint32_t i = first; i < first + share && i < row.cols; i++) {
        if (key_of(row.logits[i]) != key) continue;
        before += 1.0;
        if (before == number) *found = i;
    }
    __syncthreads();
    uint32_t id = *found;
    __syncthreads();
    return id;
}

// The weight of what `top_k` leaves: `top_p` is a share of this.
FN double weight_of_top(const Row &row, double most) {
    uint32_t last = crossing(row, most, INFINITY, false);
    if (!last) return at_least(row, 1).sum;
    Above top = at_least(row, (uint64_t)last + 1);
    double weight = weight_of(row, logit_of(last));
    for (; top.count < most; top.count += 1.0) top.sum += weight;
    return top.sum;
}

// From the likeliest on: no more than `top_k`, no more than it takes to reach `top_p` of these; then a draw in that order.
FN uint32_t draw_of_nucleus(const Row &row, const Rules &rules) {
    double most = rules.top_k ? (double)rules.top_k : INFINITY;
    double wanted = INFINITY;
    if (rules.top_p < 1.0f) wanted = (double)rules.top_p * (rules.top_k ? weight_of_top(row, most) : at_least(row, 1).sum);
    uint32_t last = crossing(row, most, wanted, false);
    Above kept = at_least(row, 1);
    double kept_of_last = INFINITY;
    if (last) {
        kept = at_least(row, (uint64_t)last + 1);
        double ties = at_least(row, last).count - kept.count, weight = weight_of(row, logit_of(last));
        kept_of_last = ties_taken(kept, weight, ties, most, wanted, false);
        for (double i = 0.0; i < kept_of_last; i += 1.0) kept.sum += weight;
    }
    double target = rules.unit * kept.sum;
    uint32_t key = crossing(row, INFINITY, target, true);
    key = key < last || !key ? last : key;
    if (!key) return NO_TOKEN;
    Above above = at_least(row, (uint64_t)key + 1);
    double ties = key == last ? kept_of_last : at_least(row, key).count - above.count;
    return nth_of_key(row, key, ties_taken(above, weight_of(row, logit_of(key)), ties, INFINITY, target, true));
}

// A draw in the order of ids: each thread has a run of them.
FN uint32_t draw_of_all(const Row &row, double unit) {
    uint32_t share = (row.cols + blockDim.x - 1) / blockDim.x, first = threadIdx.x * share;
    double *sums = row.place + 1, sum = 0.0;
    for (uint32_t i = first; i < first + share && i < row.cols; i++) sum += candidate(row, row.logits[i]);
    sums[threadIdx.x] = sum;
    uint32_t *found = reinterpret_cast<uint32_t *>(row.place);
    if (threadIdx.x == 0) *found = NO_TOKEN;
    __syncthreads();
    double total = 0.0, before = 0.0;
    for (uint32_t thread = 0; thread < blockDim.x; thread++) {
        before = thread == threadIdx.x ? total : before;
        total += sums[thread];
    }
    double target = unit * total;
    bool mine = before <= target && target < before + sum;
    for (uint32_t i = first; mine && i < first + share && i < row.cols; i++) {
        before += candidate(row, row.logits[i]);
        if (before <= target) continue;
        *found = i;
        break;
    }
    __syncthreads();
    uint32_t id = *found;
    __syncthreads();
    return id;
}

// The likeliest of a part of a row (blockIdx.x of gridDim.x parts; blockIdx.y is the row), as `best_of` has it.
KERNEL best_part(uint64_t *parts, const float *logits, uint32_t cols) {
    follow();
    SHARED(double, place);
    uint32_t share = (cols + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
    uint32_t count = first >= cols ? 0 : cols - first < share ? cols - first : share;
    uint64_t best = best_of(logits + (uint64_t)blockIdx.y * cols + first, count, place);
    // the id counts from the row's beginning; a lower id is a greater word
    if (threadIdx.x == 0) parts[(uint64_t)blockIdx.y * gridDim.x + blockIdx.x] = best ? best - first : 0;
}

// The likeliest of each row's parts: a warp has a row.
KERNEL best_join(uint32_t *out, const uint64_t *parts, uint32_t rows, uint32_t count) {
    follow();
    uint32_t row = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    unsigned long long best = 0;
    for (uint32_t i = threadIdx.x % WARP; row < rows && i < count; i += WARP) {
        unsigned long long other = parts[(uint64_t)row * count + i];
        best = other > best ? other : best;
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        unsigned long long other = __shfl_xor_sync(ALL_LANES, best, step);
        best = other > best ? other : best;
    }
    if (row < rows && threadIdx.x % WARP == 0) out[row] = best ? NO_TOKEN - (uint32_t)best : NO_TOKEN;
}

// out[row] = the token that `rules[row]` choose, NO_TOKEN where no logit is finite. A block a row.
KERNEL BOUNDS(1024, 1) sample_rows(uint32_t *out, const float *logits, const Rules *rules, uint32_t cols) {
    follow();
    SHARED(double, place);
    Row row = {logits + (uint64_t)blockIdx.x * cols, cols, 0.0, 0.0, 0.0, place};
    Rules mine = rules[blockIdx.x];
    uint64_t best = best_of(row.logits, cols, place);
    uint32_t token = best ? NO_TOKEN - (uint32_t)best : NO_TOKEN;
    if (best && !mine.greedy) {
        row.peak = (double)logit_of((uint32_t)(best >> 32));
        row.scale = mine.scale;
        row.least = (double)mine.min_p;
        bool nucleus = mine.top_p < 1.0f || mine.top_k;
        uint32_t drawn = nucleus ? draw_of_nucleus(row, mine) : draw_of_all(row, mine.unit);
        token = drawn == NO_TOKEN ? token : drawn;
    }
    if (threadIdx.x == 0) out[blockIdx.x] = token;
}
