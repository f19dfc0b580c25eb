// The functions of ops/cuda/cluster.cuh for the CPU.
#pragma once
#include "hopper.cuh"

// A barrier of a cluster in two halves: the round in which each thread has arrived.
inline unsigned cluster_promised[MOST_THREADS];
inline void cluster_join() {
    if (++cluster_arrived == thread_count * block_count) cluster_arrived = 0, ++cluster_round;
}

template <int TOGETHER>
void cluster_arrive(bool) {
    if constexpr (TOGETHER > 1) cluster_promised[current] = cluster_round, cluster_join();
}
template <int TOGETHER>
void cluster_wait() {
    if constexpr (TOGETHER > 1) while (cluster_round == cluster_promised[current]) wait_for_others();
}
inline unsigned load_of_block(const unsigned* address, unsigned rank) {
    const auto offset = reinterpret_cast<const char*>(address) - block_memory();
    return *reinterpret_cast<const unsigned*>(memories[rank] + offset);
}
