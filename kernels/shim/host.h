// A block of threads on one thread of this processor: every CUDA thread is a fiber, a barrier or a shuffle gives way to the next. What is
// checked beside the arithmetic: a barrier that not all threads of a block reach, a shuffle that not all lanes reach, shared memory that is
// read before it is written (it is NaN), and results that change with the order in which threads run.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define KERNEL extern "C" void
#define FN static inline
#define SHARED(type, name) type *name = reinterpret_cast<type *>(shim::shared())

struct Dim3 {
    uint32_t x, y, z;
};

namespace shim {

struct Thread {
    Dim3 thread;
    void *stack_pointer;
    int state;
};

extern Thread *current;
extern Dim3 block_index, block_size, grid_size;

// The block's dynamic shared memory.
unsigned char *shared();

// Waits for all threads of the block.
void block_barrier();

// Gives a word to the warp, waits for all of its lanes, and returns that of `lane`.
uint64_t exchange(uint64_t word, uint32_t lane);

// Tensor cores: sums (16 x 8) += a (16 x 16) * b (16 x 8), spread over the lanes as PTX has it. Waits for all lanes,
// twice. The sixteen products of a sum are added in order, each rounded, which is not what a device does.
void mma_bf16(float *sums, const uint32_t *a, const uint32_t *b);

// Four squares of eight by eight values (ldmatrix): lane l says where row l % 8 of square l / 8 begins, and gets two values of row l / 4 of
// each, or of that column (`across`). Waits for all lanes, twice.
void read_squares(uint32_t *to, const uint16_t *row, bool across);

// Copies to shared memory that run beside the arithmetic (cp.async): when is left open, so it is at once in launches of
// an even order of threads, and in those of an odd one as late as may be: when their group is waited for.
void copy16(void *to, const void *from, bool real);
void copies_group();
void copies_wait(uint32_t but);

// Where an atomic addition would be: nothing runs at the same time.
template <class T> T *only(T *place) { return place; }

} // namespace shim

#define threadIdx (shim::current->thread)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)

static inline void __syncthreads() { shim::block_barrier(); }
static inline void __syncwarp() { shim::exchange(0, 0); }

template <class T> static inline T shuffle(T value, uint32_t lane) {
    static_assert(sizeof(T) <= 8, "a shuffle moves a word");
    union { uint64_t word; T value; } v;
    v.word = 0;
    v.value = value;
    v.word = shim::exchange(v.word, lane);
    return v.value;
}

template <class T> static inline T __shfl_xor_sync(uint32_t, T value, int mask) {
    return shuffle(value, (shim::current->thread.x % 32) ^ (uint32_t)mask);
}

template <class T> static inline T __shfl_sync(uint32_t, T value, int lane) { return shuffle(value, (uint32_t)lane % 32); }
