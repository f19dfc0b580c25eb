// The CPU's version of ops/cuda/include/hopper.cuh: mbarriers, TMA, other copies, and barriers.
#pragma once
#include "cuda.h"
#include "types.cuh"

#define __grid_constant__

// A tensor map as cuda_emulator.py writes it: sizes in elements, strides in bytes.
struct TensorMap {
    uint64_t start, element, swizzle, size[3], box[3], stride[3], unused[4];
};

// An address of shared memory is its distance from the shared memory of the cluster's first block.
LINKED uint32_t shared_address(const void* pointer) {
    return uint32_t(static_cast<const char*>(pointer) - memories[0]);
}
LINKED uint32_t address_in(uint32_t rank, uint32_t address) {
    if (rank != cluster_rank()) reach_block(rank);
    return address + (int(rank) - int(cluster_rank())) * BLOCK_MEMORY;
}

// ---- the two proxies: threads, and the async proxy of TMA and the tensor cores --------------------------------------

// How often the emulator has seen each KiB of shared memory written.
inline uint32_t writings[MOST_BLOCKS * BLOCK_MEMORY / 1024];
LINKED void written(uint32_t address, int bytes) {
    for (uint32_t i = address / 1024; i <= (address + bytes - 1) / 1024; ++i) ++writings[i];
}
LINKED void poison(uint32_t address, int bytes) {
    memset(memories[0] + address, 0xff, bytes);
    written(address, bytes);
}

// For each 16 bytes, the thread, counted from 1, that wrote there and has executed no fence since; for each KiB, how
// many such pieces it has.
inline uint16_t unfenced[MOST_BLOCKS * BLOCK_MEMORY / 16], unfenced_count[MOST_BLOCKS * BLOCK_MEMORY / 1024];
inline List<uint32_t> unfenced_of[MOST_THREADS];
LINKED void written_by_thread(uint32_t address, int bytes) {
    written(address, bytes);
    for (uint32_t i = address / 16; i <= (address + bytes - 1) / 16; ++i) {
        if (unfenced[i] == current + 1) continue;
        if (unfenced[i] == 0) ++unfenced_count[i / 64];
        unfenced[i] = current + 1;
        unfenced_of[current].add(i);
    }
}
inline int fences[MOST_THREADS];  // the round of the block's barrier in which a thread executed its last fence
LINKED void fence_async() {
    for (const uint32_t i : unfenced_of[current])
        if (unfenced[i] == current + 1) unfenced[i] = 0, --unfenced_count[i / 64];
    unfenced_of[current].count = 0;
    fences[current] = int(block_round[cluster_rank()]);
}
// The async proxy reads `bytes` from a multiple of 16 on.
LINKED void read_by_engine(const char* who, uint32_t address, int bytes) {
    for (uint32_t k = address / 1024; k <= (address + bytes - 1) / 1024; ++k) {
        if (unfenced_count[k] == 0) continue;
        for (uint32_t i = max(k * 64, address / 16); i < min(k * 64 + 64, (address + bytes) / 16); ++i)
            if (unfenced[i])
                break_off("%s reads what thread %d wrote without fence_async", who, (unfenced[i] - 1) % thread_count);
    }
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

// Data in flight lands at the wait for its mbarrier, one landing after the other until the phase ends; until then its
// place holds poison.
struct BulkCopy {
    uint32_t at_shared;
    TensorMap map;
    int at[3];
};
struct Word {
    uint32_t to, value;
};
constexpr int MOST_WORDS = 16;
struct Landing {
    enum { of_box, of_value, of_words } kind;  // in lower case, since macros of kernels are in capitals
    int next;  // the next landing of the same mbarrier, or the next free place
    BulkCopy box;
    Word words[MOST_WORDS];
    int count;  // number of words
    uint32_t to;
    char value[16];
    int bytes;
};
inline constexpr int MOST_LANDINGS = 16384;
inline Landing landings[MOST_LANDINGS];
inline int free_landing = -1, used_landings, under_way;

struct Barrier {
    int arrivals, left, bytes;
    uint32_t phase, changes;
    int first, last;  // landings in flight
    bool fenced;
};
// mbarriers are kept here; their place in shared memory holds a mark.
inline Barrier barriers[MOST_BLOCKS * BLOCK_MEMORY / 8];
inline constexpr uint64_t IS_BARRIER = 0x7265697272616220;
inline List<uint32_t> made_barriers[MOST_THREADS];

LINKED Barrier& barrier_at(uint32_t address) {
    uint64_t there;
    memcpy(&there, memories[0] + address, 8);
    if (there != IS_BARRIER) break_off("where a barrier is used there is none, not yet or no longer");
    return barriers[address / 8];
}
LINKED void end_phase(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes == 0) ++barrier.phase, ++barrier.changes, barrier.left = barrier.arrivals;
}
LINKED void count_bytes(Barrier& barrier, int bytes) {
    barrier.bytes -= bytes;
    end_phase(barrier);
}
LINKED void barrier_init(uint32_t barrier, int arrivals) {
    memcpy(memories[0] + barrier, &IS_BARRIER, 8);
    barriers[barrier / 8] = {arrivals, arrivals, 0, 0, barriers[barrier / 8].changes + 1, -1, -1, false};
    made_barriers[current].add(barrier);
}
LINKED void barrier_init_fence() {
    for (const uint32_t barrier : made_barriers[current]) barrier_at(barrier).fenced = true;
    made_barriers[current].count = 0;
}
// An mbarrier at which another block or TMA arrives.
LINKED Barrier& barrier_of_others(uint32_t address) {
    Barrier& barrier = barrier_at(address);
    if (!barrier.fenced) break_off("a barrier is used from outside of its block without barrier_init_fence");
    return barrier;
}
LINKED void arrive_at(Barrier& barrier) {
    if (barrier.left-- == 0) return break_off("a barrier has more arrivals than its count");
    end_phase(barrier);
}
LINKED void barrier_arrive(uint32_t barrier) {
    arrive_at(barrier_at(barrier));
    step_back();
}
LINKED void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    arrive_at(barrier_of_others(address_in(rank, barrier)));
    step_back();
}
// The machine code does not branch between these loads and the arrival, so a warp's lanes go on together.
LINKED uint32_t once_loaded(uint32_t barrier, uint32_t, int) {
    meet_warp();
    return barrier;
}
LINKED void barrier_expect(uint32_t barrier, int bytes) {
    barrier_at(barrier).bytes += bytes;
    arrive_at(barrier_at(barrier));
}

#pragma GCC push_options
#pragma GCC optimize("O2")
// Moves the box between the tensor and shared memory, 16 bytes at a time. Outside of the tensor are zeros, which are
// not stored.
LINKED int move(const BulkCopy& copy, bool to_shared) {
    const TensorMap& map = copy.map;
    const int64_t bytes = map.element, row_bytes = map.box[0] * bytes, of_piece = 16 / bytes;
    if (row_bytes % 16 != 0) break_off("a bulk copy moves rows of %ld bytes", row_bytes);
    for (int64_t z = 0; z < int64_t(map.box[2]); ++z)
        for (int64_t y = 0; y < int64_t(map.box[1]); ++y) {
            const int64_t in_y = copy.at[1] + y, in_z = copy.at[2] + z;
            const bool row_inside =
                in_y >= 0 && in_y < int64_t(map.size[1]) && in_z >= 0 && in_z < int64_t(map.size[2]);
            for (int64_t x = 0; x < int64_t(map.box[0]); x += of_piece) {
                const int64_t in_x = copy.at[0] + x, first = in_x < 0 ? -in_x : 0;
                const int64_t stop = int64_t(map.size[0]) - in_x < of_piece ? map.size[0] - in_x : of_piece;
                uint32_t shared = copy.at_shared + (z * map.box[1] + y) * row_bytes + x * bytes;
                if (map.swizzle == 128) shared ^= shared >> 3 & 0x70;
                if (to_shared) memset(memories[0] + shared, 0, 16);
                if (!row_inside || first >= stop) continue;
                const int64_t count = (stop - first) * bytes;
                auto* const there = reinterpret_cast<char*>(map.start) + (in_x + first) * bytes + in_y * map.stride[1] +
                                    in_z * map.stride[2];
                if (!allowed("copy", there, bytes, count)) continue;
                char* const here = memories[0] + shared + first * bytes;
                memcpy(to_shared ? here : there, to_shared ? there : here, count);
            }
        }
    return map.box[0] * map.box[1] * map.box[2] * bytes;
}
#pragma GCC pop_options
LINKED int bytes_of(const TensorMap& map) { return map.box[0] * map.box[1] * map.box[2] * map.element; }

LINKED void land(Barrier& barrier, const Landing& landing) {
    if (landing.kind == Landing::of_box) {
        written(landing.box.at_shared, bytes_of(landing.box.map));
        count_bytes(barrier, move(landing.box, true));
    } else if (landing.kind == Landing::of_value) {
        written(landing.to, landing.bytes);
        memcpy(memories[0] + landing.to, landing.value, landing.bytes);
        count_bytes(barrier, landing.bytes);
    } else {
        for (int i = 0; i < landing.count; ++i) memcpy(memories[0] + landing.words[i].to, &landing.words[i].value, 4);
        arrive_at(barrier);
    }
}
LINKED void send(Barrier& barrier, const Landing& landing) {
    if (early) return land(barrier, landing);
    if (free_landing < 0 && used_landings == MOST_LANDINGS)
        return break_off("more copies under way than the emulator has room for");
    const int place = free_landing < 0 ? used_landings++ : free_landing;
    if (place == free_landing) free_landing = landings[place].next;
    landings[place] = landing;
    landings[place].next = -1;
    (barrier.first < 0 ? barrier.first : landings[barrier.last].next) = place;
    barrier.last = place;
    ++under_way, ++barrier.changes;
}
LINKED void barrier_wait(uint32_t address, uint32_t parity) {
    Barrier& barrier = barrier_at(address);
    while ((barrier.phase & 1u) == parity) {
        if (const int place = barrier.first; place >= 0) {
            barrier.first = landings[place].next;
            land(barrier, landings[place]);
            landings[place].next = free_landing;
            free_landing = place;
            --under_way;
        } else {
            wait_for_change(barrier.changes);
        }
    }
}

// ---- copies ---------------------------------------------------------------------------------------------------------

LINKED void prefetch_map(const TensorMap&) {}
LINKED void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z) {
    read_ahead(reinterpret_cast<const void*>(map.start));
    if (!early) poison(to, bytes_of(map));
    send(barrier_of_others(barrier), {.kind = Landing::of_box, .box = {to, map, {x, y, z}}});
}
LINKED void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z, uint64_t) {
    tma_load(to, map, barrier, x, y, z);
}
LINKED void tma_load_multicast(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z,
                               uint16_t blocks) {
    for (uint32_t rank = 0; rank < 16; ++rank)
        if (blocks >> rank & 1) tma_load(address_in(rank, to), map, address_in(rank, barrier), x, y, z);
}
LINKED void tma_prefetch(const TensorMap&, int, int, int) {}
LINKED uint64_t first_out_policy() { return 0; }
LINKED uint64_t last_out_policy() { return 0; }

// A thread's bulk stores read shared memory when the thread waits for them, as late as they may, or at once if `early`.
// The memory that they read must not change in between. Groups of stores are waited for together.
struct BulkStore {
    BulkCopy copy;
    int group;
    char* seen;
};
inline List<BulkStore> bulk_stores[MOST_THREADS];
inline int store_groups[MOST_THREADS];  // number of groups that a thread has begun
LINKED void tma_store(const TensorMap& map, uint32_t from, int x, int y, int z) {
    const int bytes = bytes_of(map);
    if (is_hidden(reinterpret_cast<const void*>(map.start))) break_off("a bulk store without wait_for_launches");
    read_by_engine("a bulk store", from, bytes);
    const BulkStore store = {{from, map, {x, y, z}}, store_groups[current], static_cast<char*>(malloc(bytes))};
    memcpy(store.seen, memories[0] + from, bytes);
    bulk_stores[current].add(store);
    if (early) move(store.copy, false);
}
LINKED void tma_store_commit() { ++store_groups[current]; }
template <int PENDING>
void tma_store_wait_read() {
    bulk_stores[current].take_out([](const BulkStore& store) {
        if (store.group >= store_groups[current] - PENDING) return false;
        if (memcmp(store.seen, memories[0] + store.copy.at_shared, bytes_of(store.copy.map)) != 0)
            break_off("shared memory changes while a bulk store reads it");
        move(store.copy, false);
        free(store.seen);
        return true;
    });
}

// A thread's words are copied when their mbarrier is waited for.
inline Word words[MOST_THREADS][MOST_WORDS];
inline int word_count[MOST_THREADS];
LINKED void copy_word(uint32_t to, const void* from, bool valid) {
    if (word_count[current] == MOST_WORDS) return break_off("more words under way than the emulator keeps");
    if (valid) read_ahead(from);
    if (!early) poison(to, 4);
    words[current][word_count[current]++] = {
        to, valid && allowed("copy", from, 4, 4) ? *static_cast<const uint32_t*>(from) : 0};
}
LINKED void barrier_arrive_after_copies(uint32_t barrier) {
    Landing landing = {.kind = Landing::of_words, .count = word_count[current]};
    memcpy(landing.words, words[current], sizeof(landing.words));
    word_count[current] = 0;
    send(barrier_at(barrier), landing);
}

template <typename Value>
void store_shared(uint32_t to, Value value) {
    written_by_thread(to, sizeof value);
    memcpy(memories[0] + to, &value, sizeof value);
}
LINKED uint32_t load_shared_word(uint32_t from) { return *reinterpret_cast<uint32_t*>(memories[0] + from); }
LINKED float load_shared(uint32_t from) { return *reinterpret_cast<float*>(memories[0] + from); }
LINKED float2 load_shared_pair(uint32_t from) { return *reinterpret_cast<float2*>(memories[0] + from); }
LINKED float4 load_shared_quad(uint32_t from) { return *reinterpret_cast<float4*>(memories[0] + from); }
LINKED uint32_t load_shared_pair_of_bytes(uint32_t from) { return *reinterpret_cast<uint16_t*>(memories[0] + from); }
LINKED uint4 load_shared_words(uint32_t from) { return *reinterpret_cast<uint4*>(memories[0] + from); }
template <typename Value>
void send_to_block(uint32_t to, uint32_t barrier, uint32_t rank, Value value) {
    Landing landing = {.kind = Landing::of_value, .to = address_in(rank, to), .bytes = sizeof value};
    memcpy(landing.value, &value, sizeof value);
    if (!early) poison(landing.to, sizeof value);
    send(barrier_of_others(address_in(rank, barrier)), landing);
}

// Four matrices of 16-bit values; each lane of the warp gives the address of a row.
template <bool TURNED>
struct Matrices {
    uint32_t rows[32];

    explicit Matrices(uint32_t row) {
        exchanged(row, 0);
        for (int from = 0; from < 32; ++from) rows[from] = uint32_t(warps[current / 32].slot[from]);
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
        for (int j = 0; j < 2; ++j) {
            written_by_thread(shared_address(matrices.value(i, j)), 2);
            memcpy(matrices.value(i, j), reinterpret_cast<const uint16_t*>(&words[i]) + j, 2);
        }
    __syncwarp();
}

LINKED char* swizzled_memory() { return block_memory(); }
LINKED bool elect() { return current % 32 == 0; }
LINKED uint32_t lane_index() { return current % 32; }
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

inline int named_arrived[MOST_BLOCKS][16], named_count[MOST_BLOCKS][16];
inline uint32_t named_round[MOST_BLOCKS][16];
LINKED void check_named(int id, int count) {
    if (id < 1 || id > 15) return break_off("there is no named barrier %d", id);
    int& expected = named_count[cluster_rank()][id];
    if (named_arrived[cluster_rank()][id] > 0 && expected != count)
        return break_off("named barrier %d is of %d threads, and of %d", id, expected, count);
    expected = count;
}
template <int COUNT>
void named_arrive(int id) {
    check_named(id, COUNT);
    arrive(named_arrived[cluster_rank()][id], named_round[cluster_rank()][id], COUNT);
}
template <int COUNT>
void named_sync(int id) {
    check_named(id, COUNT);
    meet(named_arrived[cluster_rank()][id], named_round[cluster_rank()][id], COUNT);
}
template <int COUNT>
void sync_first() {
    named_sync<COUNT>(1);
}
LINKED void warpgroup_sync(int id) { named_sync<128>(id); }

// The two halves of a cluster's barrier: the round in which each thread has arrived.
inline uint32_t cluster_promised[MOST_THREADS];
inline bool has_promised[MOST_THREADS];
LINKED void cluster_arrive() {
    if (has_promised[current]) break_off("a thread arrives at the cluster's barrier, and had not waited before");
    has_promised[current] = true;
    cluster_promised[current] = cluster_round;
    arrive(cluster_arrived, cluster_round, thread_count * block_count);
}
LINKED void cluster_wait() {
    if (!has_promised[current]) break_off("a thread waits at the cluster's barrier, and has not arrived");
    has_promised[current] = false;
    while (cluster_round == cluster_promised[current]) wait_for_change(cluster_round);
}

inline const bool watches_hopper = watch({
    [] {
        memset(named_arrived, 0, sizeof(named_arrived));
        memset(has_promised, 0, sizeof(has_promised));
        memset(word_count, 0, sizeof(word_count));
        memset(unfenced, 0, sizeof(unfenced));
        memset(unfenced_count, 0, sizeof(unfenced_count));
        for (int i = 0; i < thread_count * block_count; ++i) {
            unfenced_of[i].count = made_barriers[i].count = bulk_stores[i].count = 0;
            fences[i] = -1;
        }
        used_landings = under_way = 0;
        free_landing = -1;
    },
    [] {
        if (bulk_stores[current].count > 0)
            break_off("a thread ends while its bulk stores may still read shared memory");
    },
    [] {
        if (under_way > 0) FAULT("a cluster ends while copies to its shared memory are under way");
        for (int block = 0; block < block_count; ++block)
            for (int id = 1; id < 16; ++id)
                if (named_arrived[block][id] > 0) FAULT("a block ends before all have arrived at named barrier %d", id);
    },
});

// As on Hopper, adding 2 to the descriptor moves 32 bytes along the rows.
LINKED uint64_t matrix_descriptor(uint32_t address) { return address >> 4; }
LINKED uint64_t moved(uint64_t descriptor, int bytes) { return descriptor + bytes / 16; }
