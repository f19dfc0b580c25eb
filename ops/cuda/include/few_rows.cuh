// Functions that the kernels of few rows share: the division of a block into warps, bytes of a weight in registers, and
// sums of warps and of blocks, added in a fixed order.
//
// Macros: ROWS (a multiple of 8), TILES, WARPS_N, WARPS_K and CLUSTER, as in `gemv_a16w8.cu`; COPYING, the number of
// producer warps of a block beside its WARPS consumers (0 where it is not defined).
#pragma once
#include "mma.cuh"

#ifndef COPYING
#define COPYING 0
#endif

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * (WARPS + COPYING);
// Threads that add sums: with a cluster to send to, producer warps help.
constexpr int ADDING = CLUSTER > 1 ? THREADS : 32 * WARPS;
constexpr int COLUMNS = 16 * TILES;  // of the weight, for each warp
constexpr int BN = COLUMNS * WARPS_N;
constexpr int SLICES = ROWS / 8;
// Rows of sums are padded, so that threads with neighbouring rows write to different banks.
constexpr int PITCH = BN + 4;

// The same value, computed now: the compiler would else compute it again where it is used, after a wait.
template <typename T>
INLINE T settled(T value) {
    return T(__shfl_sync(~0u, (uint64_t)(value), threadIdx.x % 32));
}

INLINE uint32_t word(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

// The value of an e8m0 scale, 2 ** (stored - 127), or NaN for 255. The lower 16 bits of the float32 are zeros.
INLINE float scale_of(uint32_t stored) {
    return __uint_as_float(max((stored << 23) + ((stored + 1 & 256) << 14), 0x400000u));
}

// The first `count` bytes of a word, and zeros.
INLINE uint32_t first_bytes(uint32_t word, int count) {
    return count >= 4 ? word : count <= 0 ? 0u : word & ((1u << 8 * count) - 1);
}

// The first `count` bytes of a piece, and zeros.
INLINE uint4 first_bytes(const uint4& piece, int count) {
    return make_uint4(first_bytes(piece.x, count), first_bytes(piece.y, count - 4), first_bytes(piece.z, count - 8),
                      first_bytes(piece.w, count - 12));
}

// Stores a warp's sums into `sums (WARPS_K, rows, PITCH)`; `column(tile, half)` is a thread's column of the matrix.
template <typename Column>
INLINE void put_sums(float* sums, const float (&acc)[TILES][SLICES][4], int rows, int warp_k, int quarter, int tile_n,
                     Column column) {
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int row = 8 * s + 2 * quarter + odd;
            float* to = sums + (warp_k * rows + row) * PITCH - tile_n;
            if (row < rows) {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    to[column(tile, 0)] = acc[tile][s][odd];
                    to[column(tile, 1)] = acc[tile][s][odd + 2];
                }
            }
        }
    }
}

// The pairs of sums that each block of the cluster reduces and stores: as many in each block.
INLINE uint32_t share_of_pairs(int rows) { return (rows * (BN / 2) + CLUSTER - 1) / CLUSTER; }

// Bytes that a block receives for its share, from all blocks.
INLINE int bytes_of_share(int rows, uint32_t rank) {
    const int share = share_of_pairs(rows);
    return CLUSTER > 1 ? min(max(rows * (BN / 2) - int(rank) * share, 0), share) * CLUSTER * 8 : 0;
}

// Initializes the mbarriers of a ring at `at`: `stages` that count one arrival (full), then `stages` that count
// `arrivals` (empty), and, in a cluster, one that expects `bytes`, the sums which the blocks send to this one.
INLINE void init_barriers(uint32_t at, int stages, int bytes, int arrivals = WARPS) {
    for (int stage = 0; stage < stages; ++stage) {
        barrier_init(at + stage * 8, 1);
        barrier_init(at + (stages + stage) * 8, arrivals);
    }
    if constexpr (CLUSTER > 1) {
        barrier_init(at + 2 * stages * 8, 1);
        barrier_expect(at + 2 * stages * 8, bytes);
    }
    barrier_init_fence();
}

// Reduces the sums `(WARPS_K, rows, PITCH)` in `memory` over warps, and over the cluster, whose sums arrive `received`
// bytes from there. Calls `finish` with each pair of columns, counted along the rows of the tile, and its sums.
// `send(to, block, sums)` writes into another block's memory, and `meet()` returns when the other blocks' sums have
// arrived.
template <typename Finish, typename Send, typename Meet>
INLINE void add_sums(char* memory, int rows, int received, uint32_t rank, Finish finish, Send send, Meet meet) {
    float* const sums = reinterpret_cast<float*>(memory);
    auto pair_at = [&](int part, int i) {
        return reinterpret_cast<float2*>(sums + (part * rows + i / (BN / 2)) * PITCH + i % (BN / 2) * 2);
    };
    const int pairs = rows * (BN / 2);
    const uint32_t share = share_of_pairs(rows);
    float2* const arrived = reinterpret_cast<float2*>(memory + received);
    if constexpr (CLUSTER > 1) cluster_wait();  // all blocks have begun
    // The block that reduces a pair, and the pair's place there, are updated: a division takes tens of instructions.
    uint32_t block = threadIdx.x / share, place = threadIdx.x % share;
    const uint32_t blocks_on = ADDING / share, places_on = ADDING % share;
    for (int i = threadIdx.x; i < pairs; i += ADDING) {
        float2 total = *pair_at(0, i);
#pragma unroll
        for (int part = 1; part < WARPS_K; ++part) {
            const float2 sum = *pair_at(part, i);
            total.x += sum.x;
            total.y += sum.y;
        }
        if constexpr (CLUSTER > 1)
            send(arrived + rank * share + place, block, total);
        else
            finish(i, total);
        block += blocks_on, place += places_on;
        if (place >= share) place -= share, ++block;
    }
    if constexpr (CLUSTER > 1) {
        meet();
        for (int i = threadIdx.x; i < share && rank * share + i < pairs; i += ADDING) {
            float2 total = arrived[i];
#pragma unroll
            for (int other = 1; other < CLUSTER; ++other) {
                const float2 sum = arrived[other * share + i];
                total.x += sum.x;
                total.y += sum.y;
            }
            finish(rank * share + i, total);
        }
    }
}

template <typename Finish>
INLINE void add_sums(char* memory, int rows, int received, uint32_t rank, Finish finish) {
    auto send = [](float2* to, uint32_t block, float2 sums) { store_to_block(to, block, sums); };
    add_sums(memory, rows, received, rank, finish, send, [] { cluster_sync(); });
}
