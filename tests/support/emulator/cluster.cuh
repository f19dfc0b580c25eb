// The CPU's version of ops/cuda/include/cluster.cuh.
#pragma once
#include "hopper.cuh"

template <int TOGETHER>
void cluster_arrive(bool) {
    if constexpr (TOGETHER > 1) cluster_arrive();
}
template <int TOGETHER>
void cluster_wait() {
    if constexpr (TOGETHER > 1) cluster_wait();
}
template <int TOGETHER>
void cluster_wait_alone() {
    cluster_wait<TOGETHER>();
}
LINKED uint32_t load_of_block(const uint32_t* address, uint32_t rank) {
    if (rank != cluster_rank()) reach_block(rank);
    const auto offset = reinterpret_cast<const char*>(address) - block_memory();
    return *reinterpret_cast<const uint32_t*>(memories[rank] + offset);
}
