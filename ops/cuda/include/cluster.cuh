// What blocks of a cluster do together.
#pragma once
#include "types.cuh"

// The two halves of a barrier of the blocks of a cluster, none where a block is alone. What the threads of a warp wrote to
// shared memory before it is seen after it where the warp `releases`: a fence that waits for its stores to global memory,
// too, and therefore is for those that need it.
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

// Likewise, by lanes of a warp at times of their own.
template <int TOGETHER>
INLINE void cluster_wait_alone() {
    if constexpr (TOGETHER > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// What lies at an address of shared memory in block `rank` of the cluster.
INLINE uint32_t load_of_block(const uint32_t* address, uint32_t rank) {
    uint32_t value;
    asm volatile(
        "{.reg .b32 at;\n"
        " mapa.shared::cluster.u32 at, %1, %2;\n"
        " ld.shared::cluster.u32 %0, [at];}"
        : "=r"(value)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(rank)
        : "memory");
    return value;
}
