// The mbarriers and loading copies of ops/cuda/hopper.cuh for the CPU.
#pragma once
#include <stdint.h>

#include "cuda.h"

#define INLINE inline
#define __grid_constant__

// As cuda_emulator.py writes it; sizes in elements, strides in bytes.
struct TensorMap {
    uint64_t start, element, swizzle, size[3], box[3], stride[3], unused[4];
};

// An address of shared memory is its distance from that of the cluster's first block.
inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - memories[0]);
}
inline char* in_block(uint32_t address, uint32_t rank) {
    return memories[0] + address + (static_cast<long>(rank) - cluster_rank()) * BLOCK_MEMORY;
}

struct Barrier {
    uint32_t arrivals : 11, left : 11, phase : 10;
    int32_t bytes;
};
inline Barrier& barrier_at(uint32_t address) { return *reinterpret_cast<Barrier*>(memories[0] + address); }
inline void end_phase(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes == 0) ++barrier.phase, barrier.left = barrier.arrivals;
}
inline void count_bytes(void* barrier, int bytes) {
    static_cast<Barrier*>(barrier)->bytes -= bytes;
    end_phase(*static_cast<Barrier*>(barrier));
}
inline void barrier_init(uint32_t barrier, int arrivals) {
    const auto count = static_cast<uint32_t>(arrivals);
    barrier_at(barrier) = {count, count, 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
    if (barrier_at(barrier).left-- == 0) __builtin_trap();
    end_phase(barrier_at(barrier));
}
inline uint32_t once_loaded(uint32_t barrier, uint32_t, int) { return barrier; }
inline void barrier_expect(uint32_t barrier, int bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}

// A copy is made when a thread waits for its bytes, as late as it may be.
struct BulkCopy {
    uint32_t to, barrier;
    const TensorMap* map;
    int at[3];
};
inline constexpr int MOST_BULK_COPIES = 4096;
inline BulkCopy bulk_copies[MOST_BULK_COPIES];
inline int bulk_copy_count;

inline void prefetch_map(const TensorMap&) {}
inline void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z) {
    if (bulk_copy_count == MOST_BULK_COPIES) __builtin_trap();
    bulk_copies[bulk_copy_count++] = {to, barrier, &map, {x, y, z}};
}
inline void make(const BulkCopy& copy) {
    const TensorMap& map = *copy.map;
    const long bytes = map.element, row_bytes = map.box[0] * bytes;
    for (long z = 0; z < static_cast<long>(map.box[2]); ++z)
        for (long y = 0; y < static_cast<long>(map.box[1]); ++y)
            for (long x = 0; x < static_cast<long>(map.box[0]); ++x) {
                const long at[] = {copy.at[0] + x, copy.at[1] + y, copy.at[2] + z};
                bool inside = true;
                for (int axis = 0; axis < 3; ++axis) inside &= at[axis] >= 0 && at[axis] < static_cast<long>(map.size[axis]);
                uint32_t to = copy.to + (z * map.box[1] + y) * row_bytes + x * bytes;
                if (map.swizzle == 128) to ^= to >> 3 & 0x70;
                const auto* from = reinterpret_cast<const char*>(map.start) + at[0] * bytes + at[1] * map.stride[1] +
                                   at[2] * map.stride[2];
                memset(memories[0] + to, 0, bytes);
                if (inside && allowed("copy", from, bytes, bytes)) memcpy(memories[0] + to, from, bytes);
            }
    count_bytes(&barrier_at(copy.barrier), map.box[0] * map.box[1] * map.box[2] * bytes);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    while ((barrier_at(barrier).phase & 1u) == parity) {
        int left = 0;
        for (int i = 0; i < bulk_copy_count; ++i) {
            if (bulk_copies[i].barrier == barrier) {
                make(bulk_copies[i]);
            } else {
                bulk_copies[left++] = bulk_copies[i];
            }
        }
        bulk_copy_count = left;
        if ((barrier_at(barrier).phase & 1u) == parity) wait_for_others();
    }
}
inline void tma_prefetch(const TensorMap&, int, int, int) {}
inline uint64_t first_out_policy() { return 0; }

// Of branches that are not emulated.
void tma_load_first_out(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z, uint64_t policy);
void tma_load_multicast(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z, uint16_t blocks);
void barrier_arrive_at(uint32_t barrier, uint32_t rank);

template <typename Value>
void store_shared(uint32_t to, Value value) {
    memcpy(memories[0] + to, &value, sizeof value);
}
inline uint32_t load_shared_word(uint32_t from) { return *reinterpret_cast<uint32_t*>(memories[0] + from); }
inline float load_shared(uint32_t from) { return *reinterpret_cast<float*>(memories[0] + from); }
inline float2 load_shared_pair(uint32_t from) { return *reinterpret_cast<float2*>(memories[0] + from); }
inline uint4 load_shared_words(uint32_t from) { return *reinterpret_cast<uint4*>(memories[0] + from); }
template <typename Value>
void send_to_block(uint32_t to, uint32_t barrier, uint32_t rank, Value value) {
    memcpy(in_block(to, rank), &value, sizeof value);
    count_bytes(in_block(barrier, rank), sizeof value);
}

template <bool TURNED>
uint4 load_matrices(uint32_t row) {
    const int lane = current % 32;
    const Warp& warp = warps[current / 32];
    unsigned words[4];
    uint32_t rows[32];
    exchanged(row, 0);
    for (int from = 0; from < 32; ++from) rows[from] = static_cast<uint32_t>(warp.slot[from]);
    for (int i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (int j = 0; j < 2; ++j) {
            const int other = 2 * (lane % 4) + j, of_row = TURNED ? other : lane / 4, column = TURNED ? lane / 4 : other;
            memcpy(&pair[j], memories[0] + rows[8 * i + of_row] + 2 * column, 2);
        }
        memcpy(&words[i], pair, 4);
    }
    __syncwarp();
    return make_uint4(words[0], words[1], words[2], words[3]);
}

inline char* swizzled_memory() { return block_memory(); }
inline bool elect() { return current % 32 == 0; }
inline uint32_t lane_index() { return current % 32; }
template <int REGISTERS>
void take_registers() {}
template <int REGISTERS>
void give_registers() {}

template <int COUNT>
void block_arrive() {
    arrive(block_arrived[cluster_rank()], block_round[cluster_rank()], COUNT);
}
template <int COUNT>
void block_sync() {
    meet(block_arrived[cluster_rank()], block_round[cluster_rank()], COUNT);
}

inline int first_arrived[MOST_BLOCKS];
inline unsigned first_round[MOST_BLOCKS];
template <int COUNT>
void sync_first() {
    meet(first_arrived[cluster_rank()], first_round[cluster_rank()], COUNT);
}

// As of Hopper in what is added to it: 2 for 32 bytes along the rows.
inline uint64_t matrix_descriptor(uint32_t address) { return address >> 4; }
