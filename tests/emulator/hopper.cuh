// The mbarriers, copies and barriers of ops/cuda/hopper.cuh for the CPU.
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
inline uint32_t address_in(uint32_t rank, uint32_t address) {
    return address + (static_cast<int>(rank) - static_cast<int>(cluster_rank())) * BLOCK_MEMORY;
}

struct Barrier {
    uint32_t arrivals : 11, left : 11, phase : 10;
    int32_t bytes;
};
inline Barrier& barrier_at(uint32_t address) { return *reinterpret_cast<Barrier*>(memories[0] + address); }
inline void end_phase(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes == 0) ++barrier.phase, barrier.left = barrier.arrivals;
}
inline void count_bytes(Barrier& barrier, int bytes) {
    ++events;
    barrier.bytes -= bytes;
    end_phase(barrier);
}
inline void barrier_init(uint32_t barrier, int arrivals) {
    const auto count = static_cast<uint32_t>(arrivals);
    barrier_at(barrier) = {count, count, 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
    ++events;
    if (barrier_at(barrier).left-- == 0) return break_off("a barrier has more arrivals than its count");
    end_phase(barrier_at(barrier));
}
inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) { barrier_arrive(address_in(rank, barrier)); }
// The machine code does not branch between these loads and the arrival: a warp's lanes go on together.
inline uint32_t once_loaded(uint32_t barrier, uint32_t, int) {
    meet_warp();
    return barrier;
}
inline void barrier_expect(uint32_t barrier, int bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}

// A box of a tensor and its place in shared memory; the map outlives the thread that asks.
struct BulkCopy {
    uint32_t at_shared;
    TensorMap map;
    int at[3];
};
// Bytes of the box from or to the tensor; what lies outside of it is zeros, and is not stored.
inline int move(const BulkCopy& copy, bool to_shared) {
    const TensorMap& map = copy.map;
    const long bytes = map.element, row_bytes = map.box[0] * bytes;
    for (long z = 0; z < static_cast<long>(map.box[2]); ++z)
        for (long y = 0; y < static_cast<long>(map.box[1]); ++y)
            for (long x = 0; x < static_cast<long>(map.box[0]); ++x) {
                const long at[] = {copy.at[0] + x, copy.at[1] + y, copy.at[2] + z};
                bool inside = true;
                for (int axis = 0; axis < 3; ++axis) inside &= at[axis] >= 0 && at[axis] < static_cast<long>(map.size[axis]);
                uint32_t shared = copy.at_shared + (z * map.box[1] + y) * row_bytes + x * bytes;
                if (map.swizzle == 128) shared ^= shared >> 3 & 0x70;
                auto* const there = reinterpret_cast<char*>(map.start) + at[0] * bytes + at[1] * map.stride[1] +
                                    at[2] * map.stride[2];
                inside = inside && allowed("copy", there, bytes, bytes);
                if (to_shared) {
                    memset(memories[0] + shared, 0, bytes);
                    if (inside) memcpy(memories[0] + shared, there, bytes);
                } else if (inside) {
                    memcpy(there, memories[0] + shared, bytes);
                }
            }
    return map.box[0] * map.box[1] * map.box[2] * bytes;
}

// A load is made when a thread waits for its bytes, as late as it may be.
struct BulkLoad {
    BulkCopy copy;
    uint32_t barrier;
};
inline constexpr int MOST_BULK_LOADS = 4096;
inline BulkLoad bulk_loads[MOST_BULK_LOADS];
inline int bulk_load_count;

inline void prefetch_map(const TensorMap&) {}
inline void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z) {
    ++events;
    if (bulk_load_count == MOST_BULK_LOADS) return break_off("more loads than the emulator has room for");
    bulk_loads[bulk_load_count++] = {{to, map, {x, y, z}}, barrier};
}
inline void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z, uint64_t) {
    tma_load(to, map, barrier, x, y, z);
}
inline void tma_load_multicast(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z, uint16_t blocks) {
    for (uint32_t rank = 0; rank < 16; ++rank)
        if (blocks >> rank & 1) tma_load(address_in(rank, to), map, address_in(rank, barrier), x, y, z);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    while ((barrier_at(barrier).phase & 1u) == parity) {
        int left = 0;
        for (int i = 0; i < bulk_load_count; ++i) {
            if (bulk_loads[i].barrier == barrier) {
                count_bytes(barrier_at(barrier), move(bulk_loads[i].copy, true));
            } else {
                bulk_loads[left++] = bulk_loads[i];
            }
        }
        bulk_load_count = left;
        if ((barrier_at(barrier).phase & 1u) == parity) wait_for_others();
    }
}
inline void tma_prefetch(const TensorMap&, int, int, int) {}
inline uint64_t first_out_policy() { return 0; }
inline uint64_t last_out_policy() { return 0; }

// A thread's bulk stores, each a group of its own, read shared memory when it waits for that, as late as they may.
inline constexpr int MOST_BULK_STORES = 16;
inline BulkCopy bulk_stores[MOST_THREADS][MOST_BULK_STORES];
inline int bulk_store_count[MOST_THREADS];
inline void tma_store(const TensorMap& map, uint32_t from, int x, int y, int z) {
    if (bulk_store_count[current] == MOST_BULK_STORES) return break_off("more stores than the emulator has room for");
    bulk_stores[current][bulk_store_count[current]++] = {from, map, {x, y, z}};
}
inline void tma_store_commit() {}
template <int PENDING>
void tma_store_wait_read() {
    int& count = bulk_store_count[current];
    const int made = max(count - PENDING, 0);
    for (int i = 0; i < made; ++i) move(bulk_stores[current][i], false);
    for (int i = made; i < count; ++i) bulk_stores[current][i - made] = bulk_stores[current][i];
    count -= made;
}

// A thread's words are copied when it arrives at a barrier for them.
struct Word {
    uint32_t to, value;
};
constexpr int MOST_WORDS = 16;
inline Word words[MOST_THREADS][MOST_WORDS];
inline int word_count[MOST_THREADS];
inline void copy_word(uint32_t to, const void* from, bool valid) {
    if (word_count[current] == MOST_WORDS) return break_off("more words under way than the emulator keeps");
    words[current][word_count[current]++] = {
        to, valid && allowed("copy", from, 4, 4) ? *static_cast<const uint32_t*>(from) : 0};
}
inline void barrier_arrive_after_copies(uint32_t barrier) {
    for (int i = 0; i < word_count[current]; ++i) memcpy(memories[0] + words[current][i].to, &words[current][i].value, 4);
    word_count[current] = 0;
    barrier_arrive(barrier);
}

template <typename Value>
void store_shared(uint32_t to, Value value) {
    memcpy(memories[0] + to, &value, sizeof value);
}
inline uint32_t load_shared_word(uint32_t from) { return *reinterpret_cast<uint32_t*>(memories[0] + from); }
inline float load_shared(uint32_t from) { return *reinterpret_cast<float*>(memories[0] + from); }
inline float2 load_shared_pair(uint32_t from) { return *reinterpret_cast<float2*>(memories[0] + from); }
inline float4 load_shared_quad(uint32_t from) { return *reinterpret_cast<float4*>(memories[0] + from); }
inline uint32_t load_shared_pair_of_bytes(uint32_t from) { return *reinterpret_cast<uint16_t*>(memories[0] + from); }
inline uint4 load_shared_words(uint32_t from) { return *reinterpret_cast<uint4*>(memories[0] + from); }
template <typename Value>
void send_to_block(uint32_t to, uint32_t barrier, uint32_t rank, Value value) {
    memcpy(memories[0] + address_in(rank, to), &value, sizeof value);
    count_bytes(barrier_at(address_in(rank, barrier)), sizeof value);
}

// Four matrices of 16 bits, of which each lane of the warp gives the address of a row.
template <bool TURNED>
struct Matrices {
    uint32_t rows[32];

    explicit Matrices(uint32_t row) {
        exchanged(row, 0);
        for (int from = 0; from < 32; ++from) rows[from] = static_cast<uint32_t>(warps[current / 32].slot[from]);
    }
    // The first or second value of a lane's word of matrix `i`.
    char* value(int i, int second) const {
        const int lane = current % 32, other = 2 * (lane % 4) + second;
        return memories[0] + rows[8 * i + (TURNED ? other : lane / 4)] + 2 * (TURNED ? lane / 4 : other);
    }
};
template <bool TURNED>
uint4 load_matrices(uint32_t row) {
    const Matrices<TURNED> matrices(row);
    uint16_t values[4][2];
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) memcpy(&values[i][j], matrices.value(i, j), 2);
    __syncwarp();
    uint4 words;
    memcpy(&words, values, sizeof words);
    return words;
}
template <bool TURNED>
void store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    const Matrices<TURNED> matrices(row);
    const uint32_t words[] = {m0, m1, m2, m3};
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) memcpy(matrices.value(i, j), reinterpret_cast<const uint16_t*>(&words[i]) + j, 2);
    __syncwarp();
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

inline int named_arrived[MOST_BLOCKS][16];
inline unsigned named_round[MOST_BLOCKS][16];
template <int COUNT>
void named_arrive(int id) {
    arrive(named_arrived[cluster_rank()][id], named_round[cluster_rank()][id], COUNT);
}
template <int COUNT>
void named_sync(int id) {
    meet(named_arrived[cluster_rank()][id], named_round[cluster_rank()][id], COUNT);
}
template <int COUNT>
void sync_first() {
    named_sync<COUNT>(1);
}
inline void warpgroup_sync(int id) { named_sync<128>(id); }

// A barrier of a cluster in two halves: the round in which each thread has arrived.
inline unsigned cluster_promised[MOST_THREADS];
inline void cluster_arrive() {
    cluster_promised[current] = cluster_round;
    arrive(cluster_arrived, cluster_round, thread_count * block_count);
}
inline void cluster_wait() {
    while (cluster_round == cluster_promised[current]) wait_for_others();
}

// As of Hopper in what is added to it: 2 for 32 bytes along the rows.
inline uint64_t matrix_descriptor(uint32_t address) { return address >> 4; }
