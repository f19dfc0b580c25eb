// Who computes which tile: each cluster its own list, every `step`-th tile from its number on. Where the launch has
// counters, a cluster that has done its list takes over tiles of others': one that starts late, because another kernel
// held its processors, finds that they have done its work.
//
// Lists, and not one counter for all: with that, tiles of 128 x 128 took 3 to 12 % longer (H100). Clusters that keep to
// their lists run in step; the L2 may answer neighbours that ask for the same lines together.
//
// In each cluster's first block a warp, the dealer, counts the tiles that it takes, by atomic additions. It hands their
// numbers to the other warps of the cluster that need them through a ring in the shared memory of each block.
//
// Counters: how many dealers have ended, and then, for each cluster, how many tiles of its list are taken. They are 0
// before and after each launch, and no other launch uses them at the same time.
//
// Macros: CLUSTER, and SPLIT (1, or as many blocks as share a tile, where no launch has counters).
#pragma once
#include "hopper.cuh"
#include "ring.cuh"

constexpr int HANDS = 2;  // numbers in the ring
// Bytes of the ring in shared memory: the numbers, an mbarrier that one is there, and, used in the first block only, one
// that all have taken it.
constexpr int DEAL_BYTES = HANDS * (4 + 8 + 8);
constexpr int NO_TILE = 0x7fffffff;

struct Deal {
    uint32_t base;
    int* counters;
    int number;  // of the next tile, where none is handed out, or which the dealer's first thread has drawn
    RingOf<HANDS> ring;

    static INLINE void initialize(uint32_t base) {
        for (int i = 0; i < HANDS; ++i) {
            barrier_init(base + HANDS * 4 + i * 8, 1);
            barrier_init(base + HANDS * 12 + i * 8, 2 * CLUSTER - 1);
        }
    }

    static INLINE int own() { return blockIdx.x / (CLUSTER * SPLIT); }
    static INLINE int step() { return gridDim.x / (CLUSTER * SPLIT); }

    // For one thread: the number of the next tile of the own list.
    static INLINE int draw(int* counters) { return own() + atomicAdd(counters + 1 + own(), 1) * step(); }

    // For a warp: the number of a tile of any list, of `tiles` in all, or NO_TILE. Each lane looks at every 32nd list, and
    // dealers that ask at the same time prefer those of different lanes.
    static INLINE int take_over(int* counters, int tiles) {
        const int first = own() % 32;
        while (true) {
            int list = lane_index();
            while (list < step() && !has_more(counters, list, tiles)) list += 32;
            const uint32_t lanes = __ballot_sync(~0u, list < step());
            if (lanes == 0) return NO_TILE;
            const int finder = (first + __ffs(__funnelshift_r(lanes, lanes, first)) - 1) % 32;
            int found = NO_TILE;
            if (lane_index() == finder) found = list + atomicAdd(counters + 1 + list, 1) * step();
            found = __shfl_sync(~0u, found, finder);
            if (found < tiles) return found;
        }
    }

    // For one thread of each block that is not the dealer: the next number.
    INLINE int next() {
        if (counters == nullptr) {
            const int now = number;
            number += step();
            return now;
        }
        barrier_wait(full(), ring.parity);
        const int handed = load_shared_word(place());
        // As `once_loaded`: numbers are not negative.
        const uint32_t barrier = empty() + (uint32_t(handed) >> 31);
        if constexpr (CLUSTER > 1)
            barrier_arrive_at(barrier, 0);
        else
            barrier_arrive(barrier);
        ring.advance();
        return handed;
    }

    // The same in a block that is not the first, for the thread that has it sent to the block.
    INLINE int receive() {
        barrier_expect(full(), 4);
        return next();
    }

    // For one thread of the dealer.
    INLINE void hand_out(int number) {
        barrier_wait(empty(), ring.parity ^ 1);
        if constexpr (CLUSTER > 1) {
            barrier_expect(full(), 4);
            for (int rank = 0; rank < CLUSTER; ++rank) send_to_block(place(), full(), rank, uint32_t(number));
        } else {
            store_shared(place(), uint32_t(number));
            barrier_arrive(full());
        }
        ring.advance();
    }

    // For the dealer, when it has found no tile: the last one sets the counters back.
    static INLINE void end(int* counters) {
        const int lane = lane_index();
        __syncwarp();
        int ended = 0;
        if (lane == 0) {
            __threadfence();
            ended = atomicAdd(counters, 1) + 1;
            __threadfence();
        }
        if (__shfl_sync(~0u, ended, 0) < step()) return;
        for (int i = lane; i <= step(); i += 32) counters[i] = 0;
    }

private:
    INLINE uint32_t place() const { return base + ring.stage * 4; }
    INLINE uint32_t full() const { return base + HANDS * 4 + ring.stage * 8; }
    INLINE uint32_t empty() const { return base + HANDS * 12 + ring.stage * 8; }

    static INLINE bool has_more(int* counters, int list, int tiles) {
        return list + *reinterpret_cast<volatile int*>(counters + 1 + list) * step() < tiles;
    }
};
