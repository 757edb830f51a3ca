// out = x * weight^T + bias for every type of weights, without tensor cores. A warp has one output and up to eight rows of x, so that the
// weights, which are what costs, are read once for eight rows. How many rows go together changes no bit: each row has its own sum, in
// the same order. Reference: engine/src/backend/cpu (Precision::Exact).
#include "common.cuh"

#define ROWS_MAX 8
#define CHUNK 8

// Eight (or, at the end of a row, fewer) values of x at `col`, nothing beyond.
FN void load_x(const float *x, uint32_t count, float *out) {
    if (count == CHUNK && is_aligned(x)) {
        const Floats4 *four = reinterpret_cast<const Floats4 *>(x);
        for (int i = 0; i < CHUNK; i++) out[i] = four[i / 4].at[i % 4];
        return;
    }
    for (uint32_t i = 0; i < CHUNK; i++) out[i] = i < count ? x[i] : 0.0f;
}

// A format whose values are read one by one.
template <class W> struct Narrow : W {
    FN void load(const uint8_t *row, uint32_t col, uint32_t count, float *out) {
        for (uint32_t i = 0; i < CHUNK; i++) out[i] = i < count ? W::value(row, col + i) : 0.0f;
    }
};

FN float widened(Bf16, uint16_t bits) { return bf16_to_f32(bits); }
FN float widened(F16, uint16_t bits) { return f16_to_f32(bits); }

// Two bytes a value: eight values at once, where they lie well.
template <class W> struct Wide : W {
    FN void load(const uint8_t *row, uint32_t col, uint32_t count, float *out) {
        const uint8_t *at = row + 2ull * col;
        if (count < CHUNK || !is_aligned(at)) return Narrow<W>::load(row, col, count, out);
        Words4 words = *reinterpret_cast<const Words4 *>(at);
        for (int i = 0; i < CHUNK; i++) out[i] = widened(W(), (uint16_t)(words.word[i / 2] >> (i % 2 * 16)));
    }
};

// Sums of a lane over formats without groups: chunks lane, lane + 32, … of eight values.
template <class W, int R> FN void lane_sums(const uint8_t *row, const float *const *x, uint32_t cols, float *sums) {
    for (uint32_t col = threadIdx.x % WARP * CHUNK; col < cols; col += WARP * CHUNK) {
        uint32_t count = cols - col < CHUNK ? cols - col : CHUNK;
        float w[CHUNK], v[CHUNK];
        W::load(row, col, count, w);
        for (int r = 0; r < R; r++) {
            load_x(x[r] + col, count, v);
            for (int i = 0; i < CHUNK; i++) sums[r] = fmaf(w[i], v[i], sums[r]);
        }
    }
}

// Groups of 32 values with one scale and one offset: `parts(row, group, q)` gives 32 whole numbers and both.
template <class G, int R> FN void group_sums(const uint8_t *row, const float *const *x, uint32_t cols, float *sums) {
    for (uint32_t group = threadIdx.x % WARP; group < cols / 32; group += WARP) {
        float q[32], scale[2], offset;
        G::parts(row, group, q, scale, &offset);
        for (int r = 0; r < R; r++) {
            const float *v = x[r] + group * 32;
            float low = 0.0f, high = 0.0f, plain = 0.0f;
            for (int i = 0; i < 16; i++) low = fmaf(q[i], v[i], low);
            for (int i = 16; i < 32; i++) high = fmaf(q[i], v[i], high);
            sums[r] = fmaf(scale[0], low, sums[r]);
            sums[r] = fmaf(scale[1], high, sums[r]);
            if (G::HAS_OFFSET) {
                for (int i = 0; i < 32; i++) plain += v[i];
                sums[r] = fmaf(-offset, plain, sums[r]);
            }
        }
    }
}

struct Q80Groups {
    static const bool HAS_OFFSET = false;
    FN void parts(const uint8_t *row, uint32_t group, float *q, float *scale, float *) {
        const uint16_t *block = reinterpret_cast<const uint16_t *>(row + 34ull * group);
        scale[0] = scale[1] = f16_to_f32(block[0]);
        for (int i = 0; i < 16; i++) {
            q[2 * i] = (float)(int8_t)(block[1 + i] & 0xffu);
            q[2 * i + 1] = (float)(int8_t)(block[1 + i] >> 8);
        }
    }
};

struct Q4KGroups {
    static const bool HAS_OFFSET = true;
    FN void parts(const uint8_t *row, uint32_t group, float *q, float *scale, float *offset) {
        const uint8_t *block = row + 144ull * (group / 8);
        uint32_t within = group % 8;
        scale[0] = scale[1] = f16_to_f32(u16_at(block)) * (float)Q4K::scale(block, within);
        *offset = f16_to_f32(u16_at(block + 2)) * (float)Q4K::offset(block, within);
        // 144 is a multiple of 16, and so is where a weight begins
        const Words4 *bytes = reinterpret_cast<const Words4 *>(block + 16 + within / 2 * 32);
        uint32_t shift = within % 2 * 4;
        for (int half = 0; half < 2; half++) {
            Words4 words = bytes[half];
            for (int i = 0; i < 16; i++) q[half * 16 + i] = (float)(words.word[i / 4] >> (i % 4 * 8 + shift) & 15u);
        }
    }
};

struct Q6KGroups {
    static const bool HAS_OFFSET = false;
    FN void parts(const uint8_t *row, uint32_t group, float *q, float *scale, float *) {
        const uint8_t *block = row + 210ull * (group / 8);
        uint32_t first = group % 8 * 32;
        float d = f16_to_f32(u16_at(block + 208));
        for (int i = 0; i < 2; i++) scale[i] = d * (float)(int8_t)block[192 + first / 16 + i];
        for (int i = 0; i < 32; i++) q[i] = (float)Q6K::bits(block, first + i);
    }
};

template <class W> struct Sums {
    template <int R> FN void of(const uint8_t *row, const float *const *x, uint32_t cols, float *sums) {
        lane_sums<W, R>(row, x, cols, sums);
    }
    FN float scale(const uint8_t *, uint32_t) { return 1.0f; }
};

// Values whose row has a scale.
struct ScaledSums : Sums<Narrow<E4m3>> {
    FN float scale(const uint8_t *row, uint32_t cols) { return E4m3::scale(row, cols); }
};

template <class G> struct Grouped {
    template <int R> FN void of(const uint8_t *row, const float *const *x, uint32_t cols, float *sums) {
        group_sums<G, R>(row, x, cols, sums);
    }
    FN float scale(const uint8_t *, uint32_t) { return 1.0f; }
};

// Rows blockIdx.y * R … of x; output: the warp's.
template <class S, class F, int R>
FN void product(float *out, const float *x, const uint8_t *weight, const float *bias, uint32_t rows, uint32_t cols,
                uint32_t outputs) {
    uint32_t output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, first = blockIdx.y * R;
    if (output >= outputs) return;
    const uint8_t *row = weight + F::row_bytes(cols) * output;
    const float *in[R];
    float sums[R];
    for (int r = 0; r < R; r++) {
        // rows beyond the end are the last one's again, and told to nobody
        uint32_t mine = first + r < rows ? first + r : rows - 1;
        in[r] = x + (uint64_t)mine * cols;
        sums[r] = 0.0f;
    }
    S::template of<R>(row, in, cols, sums);
    float scale = S::scale(row, cols);
    for (int r = 0; r < R; r++) {
        float sum = warp_sum(sums[r]) * scale;
        if (threadIdx.x % WARP == 0 && first + r < rows)
            out[(uint64_t)(first + r) * outputs + output] = bias ? sum + bias[output] : sum;
    }
}

#define MATMUL(name, S, F, R)                                                                                          \
    KERNEL matmul_##name##_##R(float *out, const float *x, const uint8_t *weight, const float *bias, uint32_t rows,    \
                               uint32_t cols, uint32_t outputs) {                                                      \
        follow();                                                                                                      \
        product<S, F, R>(out, x, weight, bias, rows, cols, outputs);                                                   \
    }
#define MATMULS(name, S, F)                                                                                            \
    MATMUL(name, S, F, 1)                                                                                              \
    MATMUL(name, S, F, 8)
MATMULS(f32, Sums<Narrow<F32>>, F32)
MATMULS(f16, Sums<Wide<F16>>, F16)
MATMULS(bf16, Sums<Wide<Bf16>>, Bf16)
MATMULS(e4m3, ScaledSums, E4m3)
MATMULS(q8_0, Grouped<Q80Groups>, Q80)
MATMULS(q4_k, Grouped<Q4KGroups>, Q4K)
MATMULS(q6_k, Grouped<Q6KGroups>, Q6K)
