// Enough of CUDA C++ to run kernels on CPU tensors: the threads of a block, or of a cluster of them, are coroutines of
// one CPU thread.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct Index {
    unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

template <typename To, typename From>
To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    memcpy(&bits, &value, sizeof(To));
    return bits;
}
inline unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }

inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long bytes = low | static_cast<unsigned long>(high) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
inline unsigned __vmaxs2(unsigned a, unsigned b) {
    return __vmaxu2(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return __builtin_expf(a); }

// ---- memory: what each tensor of the launch covers, and the first access that is not to be ---------------------------

struct Span {
    unsigned long start, end;
};
inline const Span* tensors;
inline int tensor_count;
inline char fault[200];

// Whether `needed` bytes at an address that is a multiple of `bytes` lie in one tensor; else the access is left out.
inline bool allowed(const char* what, const void* to, unsigned long bytes, unsigned long needed) {
    const auto address = reinterpret_cast<unsigned long>(to);
    bool inside = false;
    for (int i = 0; i < tensor_count; ++i) inside |= address >= tensors[i].start && address + needed <= tensors[i].end;
    const bool aligned = address % bytes == 0;
    if (!(inside && aligned) && fault[0] == 0) {
        snprintf(fault, sizeof(fault), "a %s of %lu bytes at %p is %s; block (%u, %u, %u), thread %u", what, bytes, to,
                 aligned ? "outside of all tensors" : "misaligned", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
    }
    return inside && aligned;
}
// Accesses that begin in a tensor stay in its page, so that a load may go past its end.
inline bool may_load(const void* from, unsigned long bytes) { return allowed("load", from, bytes, 1); }
inline bool may_store(const void* to, unsigned long bytes) { return allowed("store", to, bytes, bytes); }

template <typename T>
T __ldg(const T* address) {
    return may_load(address, sizeof(T)) ? *address : T{};
}

// What no launch can go on after: it ends there, with this as its fault.
inline bool broken;
inline void break_off(const char* why) {
    broken = true;
    if (fault[0] == 0)
        snprintf(fault, sizeof(fault), "%s; block (%u, %u, %u), thread %u", why, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
}

// ---- threads: each runs until it waits for others ------------------------------------------------------------------

struct Thread {
    jmp_buf at;  // where it waits: to jump there takes no system call, as swapcontext does
    bool begun, done;
};
struct Warp {
    unsigned long slot[32];
    int arrived;
    unsigned round;
};
inline constexpr int MOST_BLOCKS = 8, MOST_THREADS = 3072, STACK = 64 << 10, BLOCK_MEMORY = 227 << 10;
inline Thread threads[MOST_THREADS];  // block after block of the cluster
inline Warp warps[MOST_THREADS / 32];
alignas(64) inline char stacks[MOST_THREADS][STACK];
inline jmp_buf scheduler;
inline int thread_count, block_count, current, block_arrived[MOST_BLOCKS], cluster_arrived;
inline unsigned block_round[MOST_BLOCKS], cluster_round;

inline unsigned cluster_rank() { return current / thread_count; }

// Shared memory of the size that a launch asks for; static `__shared__` is one for a whole cluster.
alignas(1024) inline char memories[MOST_BLOCKS][BLOCK_MEMORY];
inline char* block_memory() { return memories[cluster_rank()]; }

inline void wait_for_others() {
    if (_setjmp(threads[current].at) == 0) _longjmp(scheduler, 1);
}

// Of arrivals, copies and ends: while threads wait and none comes, they wait for ever.
inline unsigned long events;

// Whether this one is the last of `count`, with whom the round ends.
inline bool arrive(int& arrived, unsigned& round, int count) {
    ++events;
    if (++arrived < count) return false;
    arrived = 0;
    ++round;
    return true;
}
inline void meet(int& arrived, unsigned& round, int count) {
    const unsigned mine = round;
    if (arrive(arrived, round, count)) return;
    while (round == mine) wait_for_others();
}
inline void __syncthreads() { meet(block_arrived[cluster_rank()], block_round[cluster_rank()], thread_count); }
inline void cluster_sync() { meet(cluster_arrived, cluster_round, thread_count * block_count); }
inline void __syncwarp() { meet(warps[current / 32].arrived, warps[current / 32].round, 32); }
inline void meet_warp() { meet(warps[current / 32].arrived, warps[current / 32].round, 32); }

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
T __shfl_xor_sync(unsigned, T value, int mask) {
    return exchanged(value, (current % 32) ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return exchanged(value, lane % 32);
}
inline unsigned __ballot_sync(unsigned, bool value) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(__shfl_sync(~0u, value, lane)) << lane;
    return votes;
}
inline bool __all_sync(unsigned, bool value) { return __ballot_sync(~0u, value) == ~0u; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    for (int mask = 16; mask > 0; mask /= 2) value = max(value, __shfl_xor_sync(~0u, value, mask));
    return value;
}

// ---- launches ------------------------------------------------------------------------------------------------------

inline void (*kernel)(void*);
inline void* parameters;

inline void run_thread() {
    kernel(parameters);
    threads[current].done = true;
    ++events;
    wait_for_others();
}

// Comes back when the current thread waits or is done.
[[gnu::noinline]] inline void resume() {
    Thread& thread = threads[current];
    if (_setjmp(scheduler) != 0) return;
    if (thread.begun) _longjmp(thread.at, 1);
    thread.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[current];
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

// In which order threads run in each round: as they are numbered, backwards, or, of a seed that is not 0, warps at random
// and in some rounds not all of them.
struct Order {
    bool backwards;
    unsigned seed;
    int warp[MOST_THREADS / 32];

    unsigned draw(unsigned below) {
        seed = seed * 1664525 + 1013904223;
        return (seed >> 8) % below;
    }
    // Of the next round; returns how many of the warps run in it.
    int next(int count) {
        for (int i = 0; i < count; ++i) warp[i] = backwards && seed == 0 ? count - 1 - i : i;
        if (seed == 0) return count;
        for (int i = count - 1; i > 0; --i) {
            const int other = draw(i + 1), kept = warp[i];
            warp[i] = warp[other], warp[other] = kept;
        }
        backwards = draw(2);
        return draw(3) == 0 ? 1 + draw(count) : count;
    }
    int thread(int i) const { return backwards ? warp[i / 32] * 32 + 31 - i % 32 : warp[i / 32] * 32 + i % 32; }
};

// What is right in every order has the barriers that it needs. Returns the first fault, or an empty text.
inline const char* launch(void (*run)(void*), void* with, Index grid, int count, int cluster, bool backwards, unsigned seed) {
    kernel = run;
    parameters = with;
    gridDim = grid;
    thread_count = count;
    block_count = cluster;
    fault[0] = 0;
    broken = false;
    const int all = count * cluster;
    if (cluster > MOST_BLOCKS || all > MOST_THREADS) {
        snprintf(fault, sizeof(fault), "%d blocks of %d threads are a larger cluster than the emulator has room for", cluster, count);
        return fault;
    }
    Order order{backwards, seed};
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; x += cluster) {
                memset(memories, 0xff, sizeof(memories[0]) * cluster);  // NaN
                memset(block_arrived, 0, sizeof(block_arrived));
                cluster_arrived = 0;
                for (Warp& warp : warps) warp.arrived = 0;
                for (int t = 0; t < all; ++t) threads[t].begun = threads[t].done = false;
                for (bool left = true; left && !broken;) {
                    const unsigned long before = events;
                    const int awake = 32 * order.next(all / 32);
                    left = awake < all;
                    for (int i = 0; i < awake; ++i) {
                        current = order.thread(i);
                        if (threads[current].done) continue;
                        left = true;
                        threadIdx = {static_cast<unsigned>(current % count), 0, 0};
                        blockIdx = {x + current / count, y, z};
                        resume();
                        if (broken) return fault;
                    }
                    if (left && awake == all && events == before) break_off("all threads wait");
                }
            }
    return fault;
}
