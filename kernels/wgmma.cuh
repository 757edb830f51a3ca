// What products by warpgroups need beside mma.cuh: barriers that count bytes, copies by the block, clusters of two blocks, and the product
// itself, which four warps make together. Devices of 9.0a alone have all of it; elsewhere a kernel of wgmma.cu is empty and never launched.
#pragma once

#include "mma.cuh"

#if defined(TRUEBEAT_HOST)
#define CLUSTER(blocks)
#define MEMBER
FN void adders_barrier() { __syncthreads(); }
#elif __CUDA_ARCH__ >= 900
#define CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER(blocks)
#endif

#if !defined(TRUEBEAT_HOST)
#define MEMBER __device__ __forceinline__
// Of the first two warpgroups of a block.
FN void adders_barrier() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

FN uint32_t shared_at(const void *place) { return (uint32_t)__cvta_generic_to_shared(place); }

// A barrier in shared memory: a turn of it ends when `count` have arrived and all bytes that it was told to expect are there.
FN void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Behind it, barriers that were made are seen by the other block of the cluster.
FN void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FN void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier in the same place of block `rank`. What was read is done with, and nothing was written: so no word of memory order
// across the cluster, which would write and forget whole caches.
FN void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
                 " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// Waits for the end of a turn: those of even numbers have parity 0.
FN void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n .reg .pred done;\n WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 " @done bra DONE;\n bra WAIT;\n DONE:\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Arrives when this thread's copies so far (`copy16_soon`) are done.
FN void copies_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// As `copy16` of mma.cuh, and the line of 128 bytes comes to the L2 cache.
FN void copy16_soon(uint32_t to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(real ? 16u : 0u)
                 : "memory");
}

// Begins to copy `bytes`, which `barrier` counts: to this block, or to both of the cluster, to the same place and barrier in each.
FN void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

FN void copy_bulk_to_both(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "h"((uint16_t)3)
                 : "memory");
}

FN uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster; what they wrote is seen behind it.
FN void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Says that this thread has come; who waits sees nothing of what it wrote.
FN void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
FN void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

FN void store_shared(uint32_t at, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

FN void store_shared_of(uint32_t at, uint32_t rank, float value) {
    asm volatile("{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
                 " st.shared::cluster.f32 [there], %2;\n}" ::"r"(at),
                 "r"(rank), "f"(value)
                 : "memory");
}

FN float load_shared(uint32_t at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}

FN Words4 load_shared16(uint32_t at) {
    Words4 got;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.word[0]), "=r"(got.word[1]), "=r"(got.word[2]), "=r"(got.word[3])
                 : "r"(at)
                 : "memory");
    return got;
}

// Registers for each thread of a warpgroup: those who copy give theirs to those who add.
FN void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
FN void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

// Around a warpgroup's products: before the first, behind the last, and until all but the last N such groups are done.
FN void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FN void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> FN void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// How a product finds rows of 128 bytes in shared memory, whose sixteens changed places (`swirl` of wgmma_tile.cuh): eight rows are 1,024 bytes.
FN uint64_t lines_at(uint32_t at) { return (uint64_t)(at >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

#define FOUR(sums, i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(sums, i) FOUR(sums, i), FOUR(sums, i + 4), FOUR(sums, i + 8), FOUR(sums, i + 12)

// sums (64 x 128, or 64 x 64) = a (64 x 16, in registers) * b (16 columns of `lines`), added to what was there if `add`. Who is asked for
// sums must wait. Each sum is the one that `mma_bf16` makes of the same sixteen products: a device test holds that.
FN void product_begin(float (&sums)[64], const uint32_t *a, uint64_t lines, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %69, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"
                 : SIXTEEN(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 32), SIXTEEN(sums, 48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(lines), "r"((uint32_t)add));
}

FN void product_begin(float (&sums)[32], const uint32_t *a, uint64_t lines, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %37, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
                 : SIXTEEN(sums, 0), SIXTEEN(sums, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(lines), "r"((uint32_t)add));
}

// Sums are looked at behind the wait alone: the compiler knows nothing of who writes them meanwhile.
FN void are_there(float (&sums)[64]) {
    asm volatile("" : SIXTEEN(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 32), SIXTEEN(sums, 48)::"memory");
}
FN void are_there(float (&sums)[32]) { asm volatile("" : SIXTEEN(sums, 0), SIXTEEN(sums, 16)::"memory"); }

#endif
