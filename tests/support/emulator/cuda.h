// Enough of CUDA C++ to run kernels on CPU tensors: the threads of a block, or of a cluster of blocks, are coroutines
// of one CPU thread.
//
// The emulator is an adversary. Each warp runs as far as it can before another one runs, in both orders of the warps.
// Asynchronous operations (copies, products, the end of the launch before) happen as late as they may. Until then their
// destination holds poison: bytes of 0xff, which are NaN in every type of float and -1 in integers. So a
// kernel that waits too little computes NaN, or stops at a fault with a message.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "types.cuh"

// The emulator's own functions are compiled once, with optimization, into an object that the library of each kernel is
// linked with (runtime.cuh). The compilation of a kernel, which is without optimization, leaves them out.
#ifdef RUNTIME
#define LINKED [[gnu::used]] inline
#define LINKED_TEMPLATE template
#else
#define LINKED inline __attribute__((gnu_inline))
#define LINKED_TEMPLATE extern template
#endif

#define __global__
#define __device__
#define __shared__ static __attribute__((section("shared_static")))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct Index {
    uint32_t x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
LINKED float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
LINKED float2 make_float2(float x, float y) { return {x, y}; }
LINKED uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
LINKED uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

template <typename To, typename From>
To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    memcpy(&bits, &value, sizeof(To));
    return bits;
}
LINKED uint32_t __float_as_uint(float value) { return bits_of<uint32_t>(value); }
LINKED float __uint_as_float(uint32_t bits) { return bits_of<float>(bits); }

LINKED uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
LINKED int max(int a, int b) { return a > b ? a : b; }
LINKED uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
LINKED int min(int a, int b) { return a < b ? a : b; }
LINKED uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = low | uint64_t(high) << 32;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
LINKED uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16; }
LINKED uint32_t __vmaxs2(uint32_t a, uint32_t b) { return __vmaxu2(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u; }
LINKED int atomicAdd(int* to, int value) {
    const int before = *to;
    *to += value;
    return before;
}
LINKED void __threadfence() {}
LINKED float __fmul_rn(float a, float b) { return a * b; }
LINKED float __fadd_rn(float a, float b) { return a + b; }
LINKED float __fdiv_rn(float a, float b) { return a / b; }
LINKED float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
LINKED float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LINKED float __fdividef(float a, float b) { return a / b; }
LINKED float __expf(float a) { return __builtin_expf(a); }

// A list that grows. The standard library's takes longer to compile than most kernels.
template <typename T>
struct List {
    T* values;
    int count, room;

    void add(T value) {
        if (count == room) values = static_cast<T*>(realloc(values, (room = room ? 2 * room : 16) * sizeof(T)));
        values[count++] = value;
    }
    T* begin() { return values; }
    T* end() { return values + count; }
    // Removes the values for which `done` is true.
    template <typename Done>
    void take_out(Done done) {
        int left = 0;
        for (int i = 0; i < count; ++i)
            if (!done(values[i])) values[left++] = values[i];
        count = left;
    }
};

// ---- memory: the extent of each tensor of the launch, and the first invalid access ----------------------------------

struct Span {
    uint64_t start, end;
};
inline const Span* tensors;
inline int tensor_count;
inline char fault[300];

// Reports the first fault of the launch; later ones may follow from it.
#define FAULT(...)                                                                                                  \
    do {                                                                                                            \
        if (fault[0] == 0) {                                                                                        \
            const int told = snprintf(fault, sizeof(fault), __VA_ARGS__);                                           \
            snprintf(fault + told, sizeof(fault) - told, "; block (%u, %u, %u), thread %u", blockIdx.x, blockIdx.y, \
                     blockIdx.z, threadIdx.x);                                                                      \
        }                                                                                                           \
    } while (false)

#pragma GCC push_options
#pragma GCC optimize("O2")
// Whether an access at a multiple of `bytes` has `needed` bytes in one tensor; else it is reported and left out.
LINKED bool allowed(const char* what, const void* to, uint64_t bytes, uint64_t needed) {
    const auto address = reinterpret_cast<uint64_t>(to);
    bool inside = false;
    for (int i = 0; i < tensor_count; ++i) inside |= address >= tensors[i].start && address + needed <= tensors[i].end;
    const bool aligned = address % bytes == 0;
    if (!(inside && aligned))
        FAULT("a %s of %lu bytes at %p is %s", what, bytes, to, aligned ? "outside of all tensors" : "misaligned");
    return inside && aligned;
}
#pragma GCC pop_options
// A load that begins in a tensor stays in its page, so it may pass the tensor's end.
LINKED bool may_load(const void* from, uint64_t bytes) { return allowed("load", from, bytes, 1); }
LINKED bool may_store(const void* to, uint64_t bytes) { return allowed("store", to, bytes, bytes); }

template <typename T>
T __ldg(const T* address) {
    return may_load(address, sizeof(T)) ? *address : T{};
}

// ---- threads: each runs until it waits for others -------------------------------------------------------------------

struct Thread {
    jmp_buf at;  // where it waits: a jump there takes no system call, as swapcontext does
    const uint32_t* round;  // it waits until this is no longer `mine`; null if it does not wait
    uint32_t mine;
    bool begun, done;
    uint64_t stepped_back;  // it could go on, but lets all others run first: when it stepped back, counted from 1, or 0
};
struct Warp {
    uint64_t slot[32];
    int arrived;
    uint32_t round;
};
inline constexpr int MOST_BLOCKS = 8, MOST_THREADS = 3072, STACK = 64 << 10, BLOCK_MEMORY = 227 << 10;
inline Thread threads[MOST_THREADS];  // block after block of the cluster
inline Warp warps[MOST_THREADS / 32];
alignas(64) inline char stacks[MOST_THREADS][STACK];
inline jmp_buf scheduler;
inline int thread_count, block_count, current, block_arrived[MOST_BLOCKS], cluster_arrived;
inline int threads_begun[MOST_BLOCKS], threads_done[MOST_BLOCKS];
inline uint32_t block_round[MOST_BLOCKS], cluster_round;
inline bool early;  // whether asynchronous operations happen at once, as early as they may

LINKED uint32_t cluster_rank() { return current / thread_count; }

// Dynamic shared memory.
alignas(1024) inline char memories[MOST_BLOCKS][BLOCK_MEMORY];
LINKED char* block_memory() { return memories[cluster_rank()]; }

LINKED void wait_for_others() {
    if (_setjmp(threads[current].at) == 0) _longjmp(scheduler, 1);
}
// If threads are `polite`, a thread that others waited for lets all of them run first: they take what it released too
// early.
inline bool polite;
inline uint64_t steps_back;
LINKED void step_back() {
    if (!polite) return;
    threads[current].stepped_back = ++steps_back;
    wait_for_others();
}
// Waits until `round` changes.
LINKED void wait_for_change(const uint32_t& round) {
    Thread& thread = threads[current];
    thread.round = &round, thread.mine = round;
    wait_for_others();
}

// Ends the launch with a fault after which it cannot go on.
inline bool broken;
template <typename... Values>
void break_off(const char* why, Values... values) {
    FAULT(why, values...);
    broken = true;
    wait_for_others();
}

// Whether this arrival is the last of `count`, which ends the round.
LINKED bool arrive(int& arrived, uint32_t& round, int count) {
    if (++arrived < count) return false;
    arrived = 0;
    ++round;
    return true;
}
LINKED void meet(int& arrived, uint32_t& round, int count) {
    const uint32_t mine = round;
    if (arrive(arrived, round, count)) return;
    while (round == mine) wait_for_change(round);
}
LINKED void __syncthreads() { meet(block_arrived[cluster_rank()], block_round[cluster_rank()], thread_count); }
LINKED void cluster_sync() { meet(cluster_arrived, cluster_round, thread_count * block_count); }
LINKED void __syncwarp() { meet(warps[current / 32].arrived, warps[current / 32].round, 32); }
LINKED void meet_warp() { meet(warps[current / 32].arrived, warps[current / 32].round, 32); }

// Checks that a block of the cluster runs, so that its shared memory exists.
LINKED void reach_block(uint32_t rank) {
    if (rank >= uint32_t(block_count)) break_off("block %u is none of the cluster's", rank);
    if (threads_begun[rank] == 0)
        break_off("block %u of the cluster, whose shared memory is accessed, may not have begun", rank);
    if (threads_done[rank] == thread_count)
        break_off("block %u of the cluster, whose shared memory is accessed, may have ended", rank);
}

template <typename T>
T exchanged(T value, int from) {
    Warp& warp = warps[current / 32];
    memcpy(&warp.slot[current % 32], &value, sizeof(T));
    meet(warp.arrived, warp.round, 32);
    T received;
    memcpy(&received, &warp.slot[from], sizeof(T));
    meet(warp.arrived, warp.round, 32);
    return received;
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int distance) {
    return exchanged(value, max(current % 32 - distance, 0));
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
    return exchanged(value, (current % 32) ^ mask);
}
template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
    return exchanged(value, lane % 32);
}
LINKED uint32_t __ballot_sync(uint32_t, bool value) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= uint32_t(__shfl_sync(~0u, value, lane)) << lane;
    return votes;
}
LINKED bool __all_sync(uint32_t, bool value) { return __ballot_sync(~0u, value) == ~0u; }
LINKED int __ffs(uint32_t bits) { return __builtin_ffs(bits); }
LINKED uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
    return (uint64_t(high) << 32 | low) >> (by & 31);
}
LINKED int __popc(uint32_t bits) { return __builtin_popcount(bits); }
LINKED uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    for (int mask = 16; mask > 0; mask /= 2) value = max(value, __shfl_xor_sync(~0u, value, mask));
    return value;
}

// ---- the launch before, of a launch that overlaps it ----------------------------------------------------------------

// The launch before ends only when no thread can go on without its end, or, for every third cluster, before the cluster
// begins. Until then all memory that it may write or read holds poison: `hidden` are the spans of memory that are not
// declared constant.
inline const Span* hidden;
inline int hidden_count;
inline char* kept_back;  // the contents of the hidden memory
inline uint32_t launches_ended;
inline bool overlaps;  // whether the launch may start before the launch before has ended
inline bool waited;  // whether a thread of the cluster has waited for that end
inline bool must_settle;  // the next launch starts only when the launch before this one has ended

LINKED bool is_hidden(const void* address) {
    const auto at = reinterpret_cast<uint64_t>(address);
    for (int i = 0; i < hidden_count && launches_ended == 0; ++i)
        if (at >= hidden[i].start && at < hidden[i].end) return true;
    return false;
}
// An asynchronous copy may read its source from here on.
LINKED void read_ahead(const void* address) {
    if (is_hidden(address))
        break_off("a copy reads %p, which a launch before may write, without wait_for_launches", address);
}
LINKED void hide(bool has_ended) {
    launches_ended = has_ended || hidden_count == 0;
    waited = false;
    char* to = kept_back;
    for (int i = 0; i < hidden_count && !launches_ended; ++i) {
        const uint64_t bytes = hidden[i].end - hidden[i].start;
        memcpy(to, reinterpret_cast<void*>(hidden[i].start), bytes);
        memset(reinterpret_cast<void*>(hidden[i].start), 0xff, bytes);
        to += bytes;
    }
}
LINKED void reveal() {
    if (launches_ended) return;
    launches_ended = 1;
    const char* from = kept_back;
    for (int i = 0; i < hidden_count; ++i) {
        auto* const start = reinterpret_cast<char*>(hidden[i].start);
        const uint64_t bytes = hidden[i].end - hidden[i].start;
        // All bytes are 0xff if the first is, and each byte equals the one before.
        if (start[0] != static_cast<char>(0xff) || memcmp(start, start + 1, bytes - 1) != 0)
            FAULT("something was written, of the %lu bytes from %p on, without wait_for_launches", bytes, start);
        memcpy(start, from, bytes);
        from += bytes;
    }
}
LINKED void wait_for_launches() {
    waited = true;
    while (launches_ended == 0) wait_for_change(launches_ended);
}
LINKED void let_next_begin() {
    if (must_settle && launches_ended == 0)
        break_off("a late launch has the next begin before the one before has ended");
}

// ---- launches -------------------------------------------------------------------------------------------------------

LINKED void (*kernel)(void*);
inline void* parameters;

// Static `__shared__` memory of the kernel. Each block has its own; that of block `present` is in place.
extern char __start_shared_static[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_static[] __attribute__((weak, visibility("hidden")));
inline char* static_memories[MOST_BLOCKS];
inline int present;
LINKED int64_t static_bytes() { return __stop_shared_static - __start_shared_static; }
LINKED void have_present(int block) {
    if (block == present) return;
    memcpy(static_memories[present], __start_shared_static, static_bytes());
    memcpy(__start_shared_static, static_memories[block], static_bytes());
    present = block;
}

// Actions of the other headers when a cluster begins, a thread ends, and a cluster ends.
struct Hooks {
    void (*begin_cluster)();
    void (*end_thread)();
    void (*end_cluster)();
};
inline Hooks hooks[4];
inline int hook_count;
LINKED bool watch(Hooks added) { return hooks[hook_count++] = added, true; }

LINKED void run_thread() {
    ++threads_begun[cluster_rank()];
    kernel(parameters);
    for (int i = 0; i < hook_count; ++i) hooks[i].end_thread();
    threads[current].done = true;
    ++threads_done[cluster_rank()];
    wait_for_others();
}

// Returns when the current thread waits or is done.
[[gnu::noinline]] LINKED void resume() {
    Thread& thread = threads[current];
    if (_setjmp(scheduler) != 0) return;
    thread.round = nullptr;
    if (thread.begun) _longjmp(thread.at, 1);
    thread.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[current];
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

// The order in which warps and their lanes run: by number, backwards, or, for a seed other than 0, random.
struct Order {
    bool backwards;
    uint32_t seed;
    int warp[MOST_THREADS / 32];

    uint32_t draw(uint32_t below) {
        seed = seed * 1664525 + 1013904223;
        return (seed >> 8) % below;
    }
    void next(int count) {
        for (int i = 0; i < count; ++i) warp[i] = backwards && seed == 0 ? count - 1 - i : i;
        if (seed == 0) return;
        for (int i = count - 1; i > 0; --i) {
            const int other = draw(i + 1), kept = warp[i];
            warp[i] = warp[other], warp[other] = kept;
        }
        backwards = draw(2);
    }
};

LINKED void stuck() {
    FAULT("all threads wait");
    broken = true;
}

#pragma GCC push_options
#pragma GCC optimize("O2")
LINKED bool is_ready(const Thread& thread) {
    return !thread.done && !thread.stepped_back && (thread.round == nullptr || *thread.round != thread.mine);
}

// Runs a warp as far as it can, and returns whether it advanced.
LINKED bool run_warp(int warp, bool backwards, Index first) {
    bool ran = false;
    for (bool more = true; more && !broken;) {
        more = false;
        for (int i = 0; i < 32 && !broken; ++i) {
            const int thread = warp * 32 + (backwards ? 31 - i : i);
            if (!is_ready(threads[thread])) continue;
            current = thread;
            threadIdx = {uint32_t(thread % thread_count), 0, 0};
            blockIdx = {first.x + thread / thread_count, first.y, first.z};
            have_present(thread / thread_count);
            resume();
            more = ran = true;
        }
    }
    return ran;
}
// The first warp in the order that can advance runs on, so that the others fall behind as far as possible.
LINKED void run_cluster(Order& order, int warp_count, Index first) {
    order.next(warp_count);
    for (bool left = true; left && !broken;) {
        bool ran = false;
        for (int i = 0; i < warp_count && !ran; ++i) ran = run_warp(order.warp[i], order.backwards, first);
        if (ran && order.seed != 0) order.next(warp_count);
        // Who stepped back first goes on first. By number, a producer, whose threads come last, would fall behind its
        // consumers, and would never fill a place that they gave back too early.
        Thread* longest = nullptr;
        for (int t = 0; t < warp_count * 32 && !ran; ++t) {
            Thread& thread = threads[t];
            if (thread.stepped_back && (!longest || thread.stepped_back < longest->stepped_back)) longest = &thread;
        }
        if (longest) longest->stepped_back = 0;
        if (ran || longest || broken) continue;
        left = false;
        for (int t = 0; t < warp_count * 32; ++t) left |= !threads[t].done;
        if (left && launches_ended == 0)
            reveal();
        else if (left)
            stuck();
    }
}
#pragma GCC pop_options

// Runs a launch. A kernel that is right in every order has the barriers that it needs: clusters alternate between
// orders, and for every fourth cluster asynchronous operations happen early. Returns the first fault, or an empty text.
LINKED const char* launch(void (*run)(void*), void* with, Index grid, int count, int cluster, int shared,
                          bool backwards, uint32_t seed) {
    kernel = run;
    parameters = with;
    gridDim = grid;
    thread_count = count;
    block_count = cluster;
    fault[0] = 0;
    broken = false;
    const int all = count * cluster;
    if (cluster > MOST_BLOCKS || all > MOST_THREADS) {
        snprintf(fault, sizeof(fault), "%d blocks of %d threads are a larger cluster than the emulator has room for",
                 cluster, count);
        return fault;
    }
    uint64_t bytes = 0;
    for (int i = 0; i < hidden_count; ++i) bytes += hidden[i].end - hidden[i].start;
    kept_back = static_cast<char*>(malloc(bytes));
    for (int i = 0; i < cluster; ++i) static_memories[i] = static_cast<char*>(malloc(static_bytes()));
    Order order{backwards, seed};
    uint32_t index = 0;
    for (uint32_t z = 0; z < grid.z; ++z)
        for (uint32_t y = 0; y < grid.y; ++y)
            for (uint32_t x = 0; x < grid.x && !broken; x += cluster, ++index) {
                memset(memories, 0xff, sizeof(memories[0]) * cluster);
                if (static_bytes() > 0) memset(__start_shared_static, 0xff, static_bytes());
                for (int i = 0; i < cluster; ++i) memset(static_memories[i], 0xff, static_bytes());
                present = 0;
                memset(block_arrived, 0, sizeof(block_arrived));
                memset(threads_begun, 0, sizeof(threads_begun));
                memset(threads_done, 0, sizeof(threads_done));
                cluster_arrived = 0;
                for (Warp& warp : warps) warp.arrived = 0;
                for (int t = 0; t < all; ++t)
                    threads[t].begun = threads[t].done = false, threads[t].stepped_back = 0, threads[t].round = nullptr;
                for (int i = 0; i < hook_count; ++i) hooks[i].begin_cluster();
                if (seed == 0) order.backwards = backwards != (index % 2 == 1);
                polite = order.backwards;
                early = index % 4 == 2;
                hide(index % 3 == 1);
                run_cluster(order, all / 32, {x, y, z});
                reveal();
                // The launch after this one also takes the launch before for ended.
                if (overlaps && !waited) FAULT("a launch that overlaps ends without wait_for_launches");
                for (int i = 0; i < hook_count && !broken; ++i) hooks[i].end_cluster();
                for (int i = 0; i < cluster; ++i)
                    for (int at = shared; at < BLOCK_MEMORY && !broken; ++at)
                        if (memories[i][at] != char(0xff)) {
                            FAULT("shared memory is written at %d, past the %d bytes of the launch", at, shared);
                            break;
                        }
            }
    free(kept_back);
    for (int i = 0; i < cluster; ++i) free(static_memories[i]);
    return fault;
}
