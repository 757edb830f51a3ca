// Root-mean-square norms: alone, and fused with rotation and the write to the cache. A warp has a group of values (a row, or one head of a
// row); lane l sums l, l + 32, …, then the warp sums by halves. Reference: engine/src/backend/cpu/kernels.rs.
#include "common.cuh"

FN uint64_t my_warp() { return ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP; }

// What each value of a group is multiplied with besides its weight.
FN float norm_factor(const float *group, uint32_t width, float eps) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % WARP; i < width; i += WARP) sum = fmaf(group[i], group[i], sum);
    return 1.0f / sqrtf(warp_sum(sum) / (float)width + eps);
}

// Each of `groups` groups of `width` values, in place.
KERNEL rms_norm(float *x, const float *weight, uint32_t groups, uint32_t width, float eps) {
    uint64_t group = my_warp();
    if (group >= groups) return;
    float *mine = x + group * width, factor = norm_factor(mine, width, eps);
    for (uint32_t i = threadIdx.x % WARP; i < width; i += WARP) mine[i] = mine[i] * factor * weight[i];
}

// out = the same of x.
KERNEL rms_norm_to(float *out, const float *x, const float *weight, uint32_t groups, uint32_t width, float eps) {
    uint64_t group = my_warp();
    if (group >= groups) return;
    const float *mine = x + group * width;
    float factor = norm_factor(mine, width, eps);
    for (uint32_t i = threadIdx.x % WARP; i < width; i += WARP) out[group * width + i] = mine[i] * factor * weight[i];
}

FN void keep(float *place, float value) { *place = value; }
FN void keep(uint16_t *place, float value) { *place = f32_to_bf16(value); }

struct Place {
    uint32_t rows, heads, kv_heads, head_dim, block_size;
};

// One head of one row of Q, K or V: norm (where there is one) and rotation but for V; Q stays where it is, K and V go to the cache.
template <class T>
FN void place_head(float *q, const float *k, const float *v, const float *q_norm, const float *k_norm, float eps,
                   const float *cosines, const float *sines, T *keys, T *values, const uint32_t *slots, Place shape) {
    SHARED(float, all);
    uint32_t lane = threadIdx.x % WARP, dim = shape.head_dim, half = dim / 2;
    uint32_t jobs = shape.heads + 2 * shape.kv_heads;
    uint64_t job = my_warp(), row = job / jobs;
    if (row >= shape.rows) return;
    uint32_t head = (uint32_t)(job % jobs);
    float *mine = all + threadIdx.x / WARP * dim;
    bool of_q = head < shape.heads, of_k = !of_q && head < shape.heads + shape.kv_heads;
    uint32_t number = of_q ? head : (head - shape.heads) % shape.kv_heads;
    const float *from = of_q ? q : of_k ? k : v;
    from += (row * (of_q ? shape.heads : shape.kv_heads) + number) * dim;
    const float *norm = of_q ? q_norm : of_k ? k_norm : (const float *)0;
    float factor = norm ? norm_factor(from, dim, eps) : 1.0f;
    for (uint32_t i = lane; i < dim; i += WARP) mine[i] = norm ? from[i] * factor * norm[i] : from[i];
    __syncwarp();
    if (of_q || of_k) {
        // a lane has both of its pair: nobody else reads them
        for (uint32_t i = lane; i < half; i += WARP) {
            float c = cosines[row * half + i], s = sines[row * half + i], first = mine[i], second = mine[i + half];
            mine[i] = fmaf(first, c, -(second * s));
            mine[i + half] = fmaf(second, c, first * s);
        }
        __syncwarp();
    }
    uint32_t slot = slots[row];
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
        Place shape = {rows, heads, kv_heads, head_dim, block_size};                                                   \
        place_head<T>(q, k, v, q_norm, k_norm, eps, cosines, sines, keys, values, slots, shape);                       \
    }
PLACE(f32, float)
PLACE(bf16, uint16_t)
