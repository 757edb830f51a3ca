// The shim's scheduler and the one function that the tests call. All kernels are compiled into this file, for this processor.

#define TRUEBEAT_HOST 1

#include "host.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace shim {

enum State { RUNS, AT_BARRIER, AT_SHUFFLE, DONE };

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t THREADS_MAX = 1024;
constexpr uint32_t WARP_LANES = 32;

Thread *current = nullptr;
Dim3 block_index, block_size, grid_size;

static std::vector<Thread> threads;
static std::vector<unsigned char> stacks, shared_memory;
static std::vector<uint64_t> words;
static void *scheduler_stack = nullptr;
static void (*body)(void *) = nullptr;
static void *body_args = nullptr;
static std::string fault;

#if defined(__x86_64__)
// Saves what the calling convention calls the callee's, puts the stack pointer at `from`, takes the one at `to`.
extern "C" void shim_switch(void **from, void *to);
__asm__(".text\n.globl shim_switch\nshim_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr size_t SAVED = 6;
#elif defined(__aarch64__)
extern "C" void shim_switch(void **from, void *to);
__asm__(".text\n.globl shim_switch\nshim_switch:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
        "stp x27, x28, [sp, #64]\nstp d8, d9, [sp, #80]\nstp d10, d11, [sp, #96]\nstp d12, d13, [sp, #112]\n"
        "stp d14, d15, [sp, #128]\nstp x29, x30, [sp, #144]\n"
        "mov x2, sp\nstr x2, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\nldp d8, d9, [sp, #80]\nldp d10, d11, [sp, #96]\nldp d12, d13, [sp, #112]\n"
        "ldp d14, d15, [sp, #128]\nldp x29, x30, [sp, #144]\n"
        "add sp, sp, #160\nret\n");
#else
#error "the shim switches stacks on x86-64 and AArch64"
#endif

static void give_way(int state) {
    current->state = state;
    shim_switch(&current->stack_pointer, scheduler_stack);
}

static void entry() {
    body(body_args);
    give_way(DONE);
    abort();
}

static void prepare(Thread &thread, unsigned char *stack) {
    uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + STACK_BYTES) & ~uintptr_t{15};
    void **place = reinterpret_cast<void **>(top);
#if defined(__x86_64__)
    *--place = nullptr; // where a return address would be: keeps the stack aligned as at a call
    *--place = reinterpret_cast<void *>(&entry);
    place -= SAVED;
    memset(place, 0, SAVED * sizeof(void *));
#else
    place -= 20;
    memset(place, 0, 160);
    place[19] = reinterpret_cast<void *>(&entry);
#endif
    thread.stack_pointer = place;
    thread.state = RUNS;
}

unsigned char *shared() { return shared_memory.data(); }

void block_barrier() { give_way(AT_BARRIER); }

uint64_t exchange(uint64_t word, uint32_t lane) {
    uint32_t me = current->thread.x, first = me / WARP_LANES * WARP_LANES;
    words[me] = word;
    give_way(AT_SHUFFLE);
    uint64_t got = words[std::min(first + lane, (uint32_t)words.size() - 1)];
    // nobody may write the next word before all have read this one
    give_way(AT_SHUFFLE);
    return got;
}

static float widened(uint32_t pair, uint32_t shift) {
    union { uint32_t u; float f; } v;
    v.u = pair >> shift << 16;
    return v.f;
}

// A lane's registers are on its stack: others read them there, so a product costs two turns and no copies.
void mma_bf16(float *sums, const uint32_t *a, const uint32_t *b) {
    struct Operands {
        const uint32_t *a, *b;
    } mine = {a, b};
    uint32_t me = current->thread.x, lane = me % WARP_LANES;
    const uint64_t *warp = words.data() + (me - lane);
    words[me] = reinterpret_cast<uint64_t>(&mine);
    give_way(AT_SHUFFLE);
    float rows[2][16], cols[2][16];
    for (uint32_t i = 0; i < 16; i++) {
        // values 2i and 2i + 1 are lane i's of a quad, in its first register; those eight further on, in its second
        uint32_t quad = i % 8 / 2, high = i / 8, shift = i % 2 * 16;
        for (uint32_t side = 0; side < 2; side++) {
            uint32_t left = reinterpret_cast<const Operands *>(warp[lane / 4 * 4 + quad])->a[high * 2 + side];
            uint32_t right = reinterpret_cast<const Operands *>(warp[(lane % 4 * 2 + side) * 4 + quad])->b[high];
            rows[side][i] = widened(left, shift);
            cols[side][i] = widened(right, shift);
        }
    }
    // the products are exact
    for (uint32_t i = 0; i < 16; i++)
        for (uint32_t at = 0; at < 4; at++) sums[at] += rows[at / 2][i] * cols[at % 2][i];
    // nobody may go on with other registers before all have read these
    give_way(AT_SHUFFLE);
}

void read_squares(uint32_t *to, const uint16_t *row, bool across) {
    uint32_t me = current->thread.x, lane = me % WARP_LANES, got[4];
    const uint64_t *rows = words.data() + (me - lane);
    words[me] = reinterpret_cast<uint64_t>(row);
    if (words[me] % 16) fault = "a row of a square does not begin at a multiple of sixteen bytes", abort();
    give_way(AT_SHUFFLE);
    for (uint32_t square = 0; square < 4; square++) {
        got[square] = 0;
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t low = lane % 4 * 2 + i, of_row = across ? low : lane / 4, col = across ? lane / 4 : low;
            got[square] |= (uint32_t)reinterpret_cast<const uint16_t *>(rows[square * 8 + of_row])[col] << 16 * i;
        }
    }
    // nobody may write there before all have read
    give_way(AT_SHUFFLE);
    for (uint32_t square = 0; square < 4; square++) to[square] = got[square];
}

struct alignas(16) Sixteen {
    uint64_t half[2];
};

struct Copy {
    Sixteen *to;
    const Sixteen *from; // null: zeros
    uint32_t group;
};

// Copies that have begun, a list for each thread, and how many groups each has closed.
static std::vector<std::vector<Copy>> copies;
static std::vector<uint32_t> groups;
static bool copies_late = false;

static void do_copy(const Copy &copy) { *copy.to = copy.from ? *copy.from : Sixteen{{0, 0}}; }

void copy16(void *to, const void *from, bool real) {
    uint32_t me = current->thread.x;
    Copy copy = {static_cast<Sixteen *>(to), real ? static_cast<const Sixteen *>(from) : nullptr, groups[me]};
    if (!copies_late) return do_copy(copy);
    copies[me].push_back(copy);
}

void copies_group() { groups[current->thread.x]++; }

void copies_wait(uint32_t but) {
    uint32_t me = current->thread.x, kept = 0;
    for (const Copy &copy : copies[me]) {
        if (copy.group + but < groups[me])
            do_copy(copy);
        else
            copies[me][kept++] = copy;
    }
    copies[me].resize(kept);
}

// Lets every thread that runs go on until it waits. `order`: 0 as they are numbered, 1 backwards, else shuffled by that seed.
static void turn(uint32_t count, uint32_t order, uint64_t &seed) {
    static std::vector<uint32_t> turns;
    turns.resize(count);
    for (uint32_t i = 0; i < count; i++) turns[i] = order == 1 ? count - 1 - i : i;
    for (uint32_t i = count; order > 1 && i > 1; i--) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(turns[i - 1], turns[(seed >> 33) % i]);
    }
    for (uint32_t i : turns) {
        if (threads[i].state != RUNS) continue;
        current = &threads[i];
        shim_switch(&scheduler_stack, current->stack_pointer);
    }
}

// Frees warps all of whose lanes wait at a shuffle, or else the block if all of it waits at a barrier. False: nobody can go on.
static bool release(uint32_t count) {
    bool any = false;
    for (uint32_t first = 0; first < count; first += WARP_LANES) {
        uint32_t end = std::min(first + WARP_LANES, count);
        bool all = true;
        for (uint32_t i = first; i < end; i++) all &= threads[i].state == AT_SHUFFLE;
        for (uint32_t i = first; all && i < end; i++) threads[i].state = RUNS;
        any |= all;
    }
    if (any) return true;
    for (uint32_t i = 0; i < count; i++)
        if (threads[i].state != AT_BARRIER) return false;
    for (uint32_t i = 0; i < count; i++) threads[i].state = RUNS;
    return true;
}

static bool run_block(uint32_t count, uint32_t order, uint64_t &seed) {
    for (uint32_t i = 0; i < count; i++) {
        threads[i].thread = {i, 0, 0};
        prepare(threads[i], stacks.data() + i * STACK_BYTES);
        copies[i].clear();
        groups[i] = 0;
    }
    for (;;) {
        turn(count, order, seed);
        bool done = true;
        for (uint32_t i = 0; i < count; i++) done &= threads[i].state == DONE;
        if (done) return true;
        if (!release(count)) {
            fault = "a barrier or a shuffle is not reached by all of its threads";
            return false;
        }
    }
}

template <class F> struct Caller;
template <class... A> struct Caller<void (*)(A...)> {
    template <size_t... I> static void call(void (*f)(A...), const uint64_t *args, std::index_sequence<I...>) {
        f(*reinterpret_cast<const std::remove_reference_t<A> *>(args + I)...);
    }
};

template <class... A> constexpr size_t count_of(void (*)(A...)) { return sizeof...(A); }

struct Bound {
    void (*run)(const uint64_t *);
    const uint64_t *args;
};

static void run_bound(void *bound) {
    auto *it = static_cast<Bound *>(bound);
    it->run(it->args);
}

struct Entry {
    const char *name;
    size_t args;
    void (*run)(const uint64_t *);
};

} // namespace shim

#include "../attention.cu"
#include "../attention_mma.cu"
#include "../elementwise.cu"
#include "../matmul.cu"
#include "../mma.cu"
#include "../mma_tile.cu"
#include "../norm.cu"
#include "../sampling.cu"
#include "../spin.cu"
#include "../wgmma.cu"

#define ENTRY(name)                                                                                                    \
    {#name, shim::count_of(&name), [](const uint64_t *args) {                                                          \
         shim::Caller<decltype(&name)>::call(&name, args, std::make_index_sequence<shim::count_of(&name)>());           \
     }},

static const shim::Entry ENTRIES[] = {
#include "../kernels.inc"
};

// Runs a kernel: its name, grid (3), threads of a block, bytes of shared memory, arguments (a word each) and the order of threads.
// Null where all went well, else what did not.
extern "C" const char *truebeat_host_launch(const char *name, const uint32_t *grid, uint32_t block, uint32_t shared_bytes,
                                            const uint64_t *args, size_t args_len, uint32_t order) {
    using namespace shim;
    const Entry *entry = nullptr;
    for (const Entry &one : ENTRIES)
        if (!strcmp(one.name, name)) entry = &one;
    if (!entry) return fault = std::string("no kernel is called ") + name, fault.c_str();
    if (args_len != entry->args) {
        fault = std::string(name) + " takes " + std::to_string(entry->args) + " arguments and got " + std::to_string(args_len);
        return fault.c_str();
    }
    if (block == 0 || block % WARP_LANES || block > THREADS_MAX || !grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535)
        return fault = std::string(name) + ": no device takes this grid or block", fault.c_str();
    // what a kernel gets without asking, and what one of wgmma.cu asks a device of 9.0 for
    if (shared_bytes > (strncmp(name, "wgmma_", 6) ? 48u : 227u) << 10) return fault = std::string(name) + ": more shared memory than every device has", fault.c_str();
    threads.resize(block);
    words.assign(block, 0);
    copies.resize(block);
    groups.resize(block);
    copies_late = order % 2;
    stacks.resize(std::max(stacks.size(), block * STACK_BYTES));
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block, 1, 1};
    static Bound bound;
    bound = {entry->run, args};
    body = run_bound;
    body_args = &bound;
    uint64_t seed = order;
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                shared_memory.assign(shared_bytes + 16, 0xff); // NaN, whichever float it is taken for
                if (!run_block(block, order, seed)) return fault = std::string(name) + ": " + fault, fault.c_str();
            }
    return nullptr;
}
