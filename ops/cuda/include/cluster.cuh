// Synchronization and reads between the blocks of a cluster.
#pragma once
#include "types.cuh"

// The two halves of a barrier of a cluster of TOGETHER blocks; nothing for a block that is alone. If a warp `releases`,
// what its threads wrote to shared memory before the barrier is visible after it. The release also waits for the warp's
// stores to global memory, so only the warps that need it release.
template <int TOGETHER>
INLINE void cluster_arrive(bool releases) {
    if constexpr (TOGETHER > 1) {
        if (releases) {
            asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        } else {
            asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        }
    }
}

template <int TOGETHER>
INLINE void cluster_wait() {
    if constexpr (TOGETHER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The waiting half for lanes of a warp that wait at different times.
template <int TOGETHER>
INLINE void cluster_wait_alone() {
    if constexpr (TOGETHER > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Loads from an address of shared memory in block `rank` of the cluster.
INLINE uint32_t load_of_block(const uint32_t* address, uint32_t rank) {
    uint32_t value;
    asm volatile(
        "{.reg .b32 at;\n"
        " mapa.shared::cluster.u32 at, %1, %2;\n"
        " ld.shared::cluster.u32 %0, [at];}"
        : "=r"(value)
        : "r"(uint32_t(__cvta_generic_to_shared(address))), "r"(rank)
        : "memory");
    return value;
}
