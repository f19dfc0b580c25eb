// Hopper's instructions as functions: mbarriers, TMA, shared memory, clusters, wgmma, and their ordering (PTX ISA 8.0).
#pragma once
#include "l2_hints.cuh"
#include "types.cuh"

struct __align__(64) TensorMap {
    char bytes[128];
};

INLINE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

INLINE uint32_t lane_index() { return threadIdx.x % 32; }

// ---- mbarriers: a phase ends when all expected arrivals and bytes have come -----------------------------------------

INLINE void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

INLINE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

INLINE void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

INLINE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the mbarrier at the same address in block `rank` of the cluster. The release is of CTA scope, since it
// orders reads only: a release of cluster scope takes a fence over the GPU each time (measured: half the speed).
INLINE void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Returns the address of a barrier, available only once what a thread has loaded from shared memory has arrived:
// `loaded` has bits of that value, and `positive` is a positive number that the compiler does not know to be positive.
// An arrival orders loads before the writes of other threads, but not before TMA's: a load that is still in flight when
// the stage is released may return the next contents of the stage (seen in a product whose threads each loaded 32 pairs
// of bytes and arrived).
INLINE uint32_t once_loaded(uint32_t barrier, uint32_t loaded, int positive) {
    return barrier + (loaded & uint32_t(positive >> 31));
}

// Arrives when the cp.async copies that this thread has started have arrived; the barrier's count includes this
// arrival.
INLINE void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

INLINE void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- copies ---------------------------------------------------------------------------------------------------------

INLINE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

INLINE void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Prefetches the box of a load to the L2. It may precede the wait: later writes go to the L2 as well.
INLINE void tma_prefetch(const TensorMap& map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y),
                 "r"(z)
                 : "memory");
}

// A TMA load with one of the eviction policies of l2_hints.cuh.
INLINE void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

// Loads to the same address of every block in `blocks` (a mask); the mbarrier of each of them counts the bytes.
INLINE void tma_load_multicast(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z,
                               uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

INLINE void tma_store(const TensorMap& map, uint32_t from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of bulk stores still read shared memory.
template <int PENDING>
INLINE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Starts a copy of four bytes by cp.async; zeros if `valid` is false.
INLINE void copy_word(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// Makes ordinary stores to shared memory visible to the async proxy: the tensor cores and TMA.
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ldmatrix: four matrices of 8 rows of 16 bytes. Lane i gives the address of row i % 8 of matrix i / 8, and gets word i
// % 4 of row i / 4 of each matrix; if TURNED, the 16-bit values in rows 2 * (i % 4) and 2 * (i % 4) + 1 of column i /
// 4.
template <bool TURNED>
INLINE uint4 load_matrices(uint32_t row) {
    uint4 m;
    if constexpr (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                     : "r"(row));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                     : "r"(row));
    }
    return m;
}

// stmatrix, the inverse of `load_matrices`: lane i gives what it would get there.
template <bool TURNED>
INLINE void store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    if constexpr (TURNED) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0),
                     "r"(m1), "r"(m2), "r"(m3)
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
                     "r"(m2), "r"(m3)
                     : "memory");
    }
}

INLINE void store_shared(uint32_t to, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

INLINE void store_shared(uint32_t to, uint2 values) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(values.x), "r"(values.y) : "memory");
}

INLINE void store_shared(uint32_t to, uint4 values) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(values.x), "r"(values.y), "r"(values.z),
                 "r"(values.w)
                 : "memory");
}

INLINE void store_shared(uint32_t to, float2 values) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(values.x), "f"(values.y) : "memory");
}

INLINE void store_shared(uint32_t to, float4 values) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values.x), "f"(values.y), "f"(values.z),
                 "f"(values.w)
                 : "memory");
}

INLINE uint32_t load_shared_word(uint32_t from) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

INLINE uint4 load_shared_words(uint32_t from) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(from)
                 : "memory");
    return values;
}

INLINE uint32_t load_shared_pair_of_bytes(uint32_t from) {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from));
    return value;
}

INLINE float load_shared(uint32_t from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
    return value;
}

// The compiler does not reorder these loads among themselves: the last one issued arrives last.
INLINE float2 load_shared_pair(uint32_t from) {
    float2 value;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from));
    return value;
}

INLINE float4 load_shared_quad(uint32_t from) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(from));
    return value;
}

// Stores a value to an address of shared memory in block `rank` of the cluster, whose `barrier` counts the bytes. This
// needs no fence over the GPU, as stores followed by a barrier of the cluster do.
INLINE void send_to_block(uint32_t to, uint32_t barrier, uint32_t rank, uint32_t value) {
    asm volatile(
        "{.reg .b32 remote, counter;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, [counter];}" ::"r"(to),
        "r"(barrier), "r"(rank), "r"(value)
        : "memory");
}

INLINE void send_to_block(uint32_t to, uint32_t barrier, uint32_t rank, float2 values) {
    asm volatile(
        "{.reg .b32 remote, counter;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [counter];}" ::"r"(to),
        "r"(barrier), "r"(rank), "f"(values.x), "f"(values.y)
        : "memory");
}

INLINE void send_to_block(uint32_t to, uint32_t barrier, uint32_t rank, float4 values) {
    asm volatile(
        "{.reg .b32 remote, counter;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, [counter];}" ::
            "r"(to),
        "r"(barrier), "r"(rank), "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
        : "memory");
}

// ---- blocks, clusters, warpgroups -----------------------------------------------------------------------------------

// Dynamic shared memory, of as many bytes as the launch asks for, aligned to the period of the 128-byte swizzle.
INLINE char* swizzled_memory() {
    extern __shared__ __align__(1024) char swizzled[];
    return swizzled;
}

// A named barrier of the first `COUNT` threads of a block.
template <int COUNT>
INLINE void sync_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// The two sides of the barrier of all `COUNT` threads of a block, for warps that do not wait and for warps that do.
template <int COUNT>
INLINE void block_arrive() {
    asm volatile("bar.arrive 0, %0;" ::"n"(COUNT) : "memory");
}

template <int COUNT>
INLINE void block_sync() {
    asm volatile("bar.sync 0, %0;" ::"n"(COUNT) : "memory");
}

// The two sides of named barrier `id`, from 1 on, for any `COUNT` threads of a block.
template <int COUNT>
INLINE void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

template <int COUNT>
INLINE void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

INLINE void warpgroup_sync(int id) { named_sync<128>(id); }

INLINE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The two halves of a `cluster_sync` that orders no memory accesses: after it, all blocks of the cluster have begun.
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

INLINE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Whether this lane is the one of a converged warp that is elected to act for it. The compiler knows that one lane is
// elected, and keeps its values in uniform registers, from which TMA takes coordinates.
INLINE bool elect() {
    uint32_t elected;
    asm volatile(
        "{.reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, one;}"
        : "=r"(elected));
    return elected;
}

template <int REGISTERS>
INLINE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
INLINE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma: 64 x N += (64 x 32) · (N x 32)ᵀ of FP8, asynchronous, operands in shared memory -------------------------

// The descriptor of an operand with rows of 128 bytes and the 128-byte swizzle; groups of 8 rows are 1024 bytes apart.
// Adding 2 to the descriptor moves 32 bytes along the rows.
INLINE uint64_t matrix_descriptor(uint32_t address) {
    return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}

// The descriptor of an operand `bytes` further, a multiple of 16. Only the lower half changes.
INLINE uint64_t moved(uint64_t descriptor, int bytes) {
    return descriptor & 0xFFFFFFFF00000000 | uint32_t(descriptor) + uint32_t(bytes / 16);
}

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
INLINE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to the accumulators across asynchronous products.
template <int COUNT>
INLINE void fence_registers(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
