// What products on tensor cores need beside common.cuh, in both worlds: sixteen bytes at a time, copies to shared
// memory that run beside the arithmetic, and the product itself. The processor's forms of the latter two are the
// shim's.
#pragma once

#include "common.cuh"

#ifdef TRUEBEAT_HOST

#define BOUNDS(threads, blocks)
FN void bring_line(const void *) {}
#define UNROLL
#define ROLLED

FN Words4 read16(const void *at, bool real) { return real ? *static_cast<const Words4 *>(at) : Words4{{0, 0, 0, 0}}; }
FN Words4 stream16(const void *at, bool real) { return read16(at, real); }
FN uint32_t bf16_pair(float low, float high) { return f32_to_bf16(low) | (uint32_t)f32_to_bf16(high) << 16; }
using shim::copies_group;
using shim::copy16;
using shim::mma_bf16;
FN void read_squares(uint32_t *to, const uint16_t *row) { shim::read_squares(to, row, false); }
FN void read_squares_across(uint32_t *to, const uint16_t *row) { shim::read_squares(to, row, true); }
FN float power_of_2(float x) { return exp2f(x); }
template <int N> FN void copies_wait() { shim::copies_wait(N); }

#else

// At most so many threads a block, and at least so many blocks on a multiprocessor.
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

// Sixteen bytes, or zeros without reading: a predicate and no branch, so that many can be under way. `HOW`: what the caches are told. Only
// weights are called constant (`nc`): who wrote the rest may still have run when this kernel began.
#define READ16(name, HOW)                                                                                              \
    FN Words4 name(const void *at, bool real) {                                                                        \
        Words4 got;                                                                                                    \
        asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"                                                     \
                     " mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n mov.u32 %3, 0;\n"                            \
                     " @p ld.global" HOW ".v4.u32 {%0, %1, %2, %3}, [%4];\n}"                                      \
                     : "=r"(got.word[0]), "=r"(got.word[1]), "=r"(got.word[2]), "=r"(got.word[3])                      \
                     : "l"(__cvta_generic_to_global(at)), "r"((uint32_t)real));                                        \
        return got;                                                                                                    \
    }
READ16(read16, "")
READ16(stream16, ".nc.L1::no_allocate") // read once: it must not push out what is read again

// As `f32_to_bf16` of both, but for the bits of what is no number; the first in the low half.
FN uint32_t bf16_pair(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// sums (16 x 8) += a (16 x 16) * b (16 x 8), spread over the lanes of a warp as PTX has it.
FN void mma_bf16(float *sums, const uint32_t *a, const uint32_t *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four squares of eight by eight values of shared memory: lane l says where row l % 8 of square l / 8 begins (at a multiple of 16 bytes), and
// gets values 2t and 2t + 1 of row g of each, as right operands have them whose columns are these rows. `across`: of column g, values 2t
// and 2t + 1.
#define READ_SQUARES(name, HOW)                                                                                        \
    FN void name(uint32_t *to, const uint16_t *row) {                                                                  \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" HOW ".shared.b16 {%0, %1, %2, %3}, [%4];"                         \
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                                              \
                     : "r"((uint32_t)__cvta_generic_to_shared(row))                                                    \
                     : "memory");                                                                                      \
    }
READ_SQUARES(read_squares, "")
READ_SQUARES(read_squares_across, ".trans")

// Within 2^-22 of it; 0 of what is less than 2^-126.
FN float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// Begins to copy sixteen bytes to shared memory, or zeros where there is nothing to read.
FN void copy16(void *to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(real ? 16u : 0u)
                 : "memory");
}

// Asks for a line of 128 bytes to come to the L2 cache, and waits for nothing.
FN void bring_line(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at))); }

// Copies since the last such call are one group.
FN void copies_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the last N are done.
template <int N> FN void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

#endif
