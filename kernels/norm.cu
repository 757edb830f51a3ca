// Root-mean-square norms: alone, and fused with rotation and the write to the cache. A warp has a group of values (a row, or one head of a
// row); lane l sums l, l + 32, …, then the warp sums by halves. Wide groups have a block each. Reference: engine/src/backend/cpu/kernels.rs.
#include "mma.cuh"

FN uint64_t my_warp() { return ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP; }

FN float factor_of(float squares, uint32_t width, float eps) { return 1.0f / sqrtf(squares / (float)width + eps); }

// What each value of a group is multiplied with besides its weight.
FN float norm_factor(const float *group, uint32_t width, float eps) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % WARP; i < width; i += WARP) sum = fmaf(group[i], group[i], sum);
    return factor_of(warp_sum(sum), width, eps);
}

// Each of `groups` groups of `width` values, in place.
KERNEL rms_norm(float *x, const float *weight, uint32_t groups, uint32_t width, float eps) {
    follow();
    uint64_t group = my_warp();
    if (group >= groups) return;
    float *mine = x + group * width, factor = norm_factor(mine, width, eps);
    for (uint32_t i = threadIdx.x % WARP; i < width; i += WARP) mine[i] = mine[i] * factor * weight[i];
}

// out = the same of x.
KERNEL rms_norm_to(float *out, const float *x, const float *weight, uint32_t groups, uint32_t width, float eps) {
    follow();
    uint64_t group = my_warp();
    if (group >= groups) return;
    const float *mine = x + group * width;
    float factor = norm_factor(mine, width, eps);
    for (uint32_t i = threadIdx.x % WARP; i < width; i += WARP) out[group * width + i] = mine[i] * factor * weight[i];
}

// Wide groups: a block of 256 threads has one. Thread t sums fours t, t + 256, …, a warp by halves, then the warps' sums in their order.
#define WIDE 256
#define KEPT 4 // fours that a thread keeps from the sum to the product: all of a row of up to 4096 values

// What a block reads and writes. `whole`: sixteen bytes at a time.
struct WideRow {
    float *x, *out; // the same place or two
    const float *y, *weight;
    uint32_t width;
    bool whole;
};

FN WideRow wide_row(float *x, const float *y, float *out, const float *weight, uint32_t width) {
    uint64_t at = (uint64_t)blockIdx.x * width;
    bool whole = width % 4 == 0 && is_aligned(x) && is_aligned(y) && is_aligned(out) && is_aligned(weight);
    return {x + at, out + at, y ? y + at : y, weight, width, whole};
}

// Four number `i` of a row; zeros beyond its end, which change no sum.
FN Floats4 four_of(const float *values, uint32_t i, const WideRow &row) {
    Floats4 got = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (i >= (row.width + 3) / 4) return got;
    if (row.whole) return reinterpret_cast<const Floats4 *>(values)[i];
    for (uint32_t j = 0; j < 4; j++)
        if (i * 4 + j < row.width) got.at[j] = values[i * 4 + j];
    return got;
}

FN void put_four(float *values, uint32_t i, const Floats4 &four, const WideRow &row) {
    if (i >= (row.width + 3) / 4) return;
    if (row.whole) {
        reinterpret_cast<Floats4 *>(values)[i] = four;
        return;
    }
    for (uint32_t j = 0; j < 4; j++)
        if (i * 4 + j < row.width) values[i * 4 + j] = four.at[j];
}

FN Floats4 sum_of(Floats4 a, const Floats4 &b) {
    UNROLL for (int j = 0; j < 4; j++) a.at[j] = a.at[j] + b.at[j];
    return a;
}

FN float add_squares(float sum, const Floats4 &four) {
    UNROLL for (int j = 0; j < 4; j++) sum = fmaf(four.at[j], four.at[j], sum);
    return sum;
}

FN Floats4 normed(Floats4 four, float factor, const Floats4 &weight) {
    UNROLL for (int j = 0; j < 4; j++) four.at[j] = four.at[j] * factor * weight.at[j];
    return four;
}

// The factor from every thread's sum of squares.
FN float wide_factor(float sum, uint32_t width, float eps) {
    SHARED(float, sums);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0.0f;
    UNROLL for (int warp = 0; warp < WIDE / WARP; warp++) sum += sums[warp];
    return factor_of(sum, width, eps);
}

// x += y where there is a y, then out = norm of x. All reads come first, those of weights too, so that nobody waits for them later; a
// thread reads again only what it wrote itself.
FN void norm_wide(const WideRow &row, float eps) {
    Floats4 kept[KEPT], more[KEPT], weight[KEPT];
    uint32_t t = threadIdx.x, rest = t + KEPT * WIDE, end = (row.width + 3) / 4;
    UNROLL for (uint32_t i = 0; i < KEPT; i++) kept[i] = four_of(row.x, t + i * WIDE, row);
    UNROLL for (uint32_t i = 0; i < KEPT; i++)
        if (row.y) more[i] = four_of(row.y, t + i * WIDE, row);
    UNROLL for (uint32_t i = 0; i < KEPT; i++) weight[i] = four_of(row.weight, t + i * WIDE, row);
    float sum = 0.0f;
    UNROLL for (uint32_t i = 0; i < KEPT; i++) {
        if (row.y) kept[i] = sum_of(kept[i], more[i]);
        if (row.y) put_four(row.x, t + i * WIDE, kept[i], row);
        sum = add_squares(sum, kept[i]);
    }
    for (uint32_t i = rest; i < end; i += WIDE) {
        Floats4 four = four_of(row.x, i, row);
        if (row.y) four = sum_of(four, four_of(row.y, i, row));
        if (row.y) put_four(row.x, i, four, row);
        sum = add_squares(sum, four);
    }
    float factor = wide_factor(sum, row.width, eps);
    UNROLL for (uint32_t i = 0; i < KEPT; i++) put_four(row.out, t + i * WIDE, normed(kept[i], factor, weight[i]), row);
    for (uint32_t i = rest; i < end; i += WIDE)
        put_four(row.out, i, normed(four_of(row.x, i, row), factor, four_of(row.weight, i, row)), row);
}

// As `rms_norm` and `rms_norm_to`, but for the order of sums.
KERNEL BOUNDS(WIDE, 2) rms_norm_wide(float *x, const float *weight, uint32_t groups, uint32_t width, float eps) {
    follow();
    if (blockIdx.x < groups) norm_wide(wide_row(x, 0, x, weight, width), eps);
}

KERNEL BOUNDS(WIDE, 2) rms_norm_to_wide(float *out, const float *x, const float *weight, uint32_t groups, uint32_t width,
                                        float eps) {
    follow();
    // without a y nothing is written to x
    if (blockIdx.x < groups) norm_wide(wide_row(const_cast<float *>(x), 0, out, weight, width), eps);
}

// The bits of `add_f32` and `rms_norm_to_wide` after it.
KERNEL BOUNDS(WIDE, 2) add_norm_wide(float *x, const float *y, float *out, const float *weight, uint32_t groups,
                                     uint32_t width, float eps) {
    follow();
    if (blockIdx.x < groups) norm_wide(wide_row(x, y, out, weight, width), eps);
}

FN void keep(float *place, float value) { *place = value; }
FN void keep(uint16_t *place, float value) { *place = f32_to_bf16(value); }

struct Place {
    uint32_t rows, heads, kv_heads, head_dim, block_size;
};

// A lane's values of a head, l, l + 32, …, with what they are multiplied with; zeros where there are none.
#define HEAD_PARTS 8 // head_dim is at most 256
struct HeadPart {
    float value[HEAD_PARTS], weight[HEAD_PARTS], cosine[HEAD_PARTS / 2], sine[HEAD_PARTS / 2];
};

FN void read_strided(float *to, int count, const float *from, uint32_t width) {
    uint32_t lane = threadIdx.x % WARP;
    UNROLL for (int i = 0; i < count; i++) to[i] = from && lane + i * WARP < width ? from[lane + i * WARP] : 0.0f;
}

// Norm (where there is one, the bits of `norm_factor`) and rotation (where there are cosines), into `mine`.
FN void turn_head(float *mine, const HeadPart &part, bool with_norm, bool turned, uint32_t dim, float eps) {
    uint32_t lane = threadIdx.x % WARP, half = dim / 2;
    float sum = 0.0f;
    UNROLL for (int i = 0; i < HEAD_PARTS; i++) sum = fmaf(part.value[i], part.value[i], sum);
    float factor = with_norm ? factor_of(warp_sum(sum), dim, eps) : 1.0f;
    UNROLL for (int i = 0; i < HEAD_PARTS; i++)
        if (lane + i * WARP < dim) mine[lane + i * WARP] = with_norm ? part.value[i] * factor * part.weight[i] : part.value[i];
    __syncwarp();
    // a lane has both of its pair: nobody else reads them
    UNROLL for (int i = 0; i < HEAD_PARTS / 2; i++) {
        uint32_t at = lane + i * WARP;
        if (!turned || at >= half) continue;
        float c = part.cosine[i], s = part.sine[i], first = mine[at], second = mine[at + half];
        mine[at] = fmaf(first, c, -(second * s));
        mine[at + half] = fmaf(second, c, first * s);
    }
    __syncwarp();
}

// One head of one row of Q, K or V: norm (where there is one) and rotation but for V; Q stays where it is, K and V go to the cache.
// Everything is asked for before anything is waited for: with one row it is the way to the memory that takes the time.
template <class T>
FN void place_head(float *q, const float *k, const float *v, const float *q_norm, const float *k_norm, float eps,
                   const float *cosines, const float *sines, T *keys, T *values, const uint32_t *slots, Place shape) {
    SHARED(float, all);
    uint32_t lane = threadIdx.x % WARP, dim = shape.head_dim, half = dim / 2;
    uint32_t jobs = shape.heads + 2 * shape.kv_heads;
    uint64_t job = my_warp(), row = job / jobs;
    if (row >= shape.rows) return;
    uint32_t head = (uint32_t)(job % jobs), slot = slots[row];
    float *mine = all + threadIdx.x / WARP * dim;
    bool of_q = head < shape.heads, of_k = !of_q && head < shape.heads + shape.kv_heads, turned = of_q || of_k;
    uint32_t number = of_q ? head : (head - shape.heads) % shape.kv_heads;
    const float *from = of_q ? q : of_k ? k : v;
    const float *norm = of_q ? q_norm : of_k ? k_norm : (const float *)0;
    HeadPart part;
    read_strided(part.value, HEAD_PARTS, from + (row * (of_q ? shape.heads : shape.kv_heads) + number) * dim, dim);
    read_strided(part.weight, HEAD_PARTS, norm, dim);
    read_strided(part.cosine, HEAD_PARTS / 2, turned ? cosines + row * half : (const float *)0, half);
    read_strided(part.sine, HEAD_PARTS / 2, turned ? sines + row * half : (const float *)0, half);
    turn_head(mine, part, norm != (const float *)0, turned, dim, eps);
    uint64_t block = slot / shape.block_size;
    uint64_t at = ((block * shape.kv_heads + number) * shape.block_size + slot % shape.block_size) * dim;
    for (uint32_t i = lane; i < dim; i += WARP) {
        if (of_q) q[(row * shape.heads + number) * dim + i] = mine[i];
        else keep((of_k ? keys : values) + at + i, mine[i]);
    }
}

#define PLACE(name, T)                                                                                                 \
    KERNEL place_##name(float *q, const float *k, const float *v, const float *q_norm, const float *k_norm, float eps, \
                        const float *cosines, const float *sines, T *keys, T *values, const uint32_t *slots,           \
                        uint32_t rows, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t block_size) {    \
        follow();                                                                                                      \
        Place shape = {rows, heads, kv_heads, head_dim, block_size};                                                   \
        place_head<T>(q, k, v, q_norm, k_norm, eps, cosines, sines, keys, values, slots, shape);                       \
    }
PLACE(f32, float)
PLACE(bf16, uint16_t)
