// Quantizes whole columns as quantize_columns.cu does, by clusters that stay: the copy engine brings the rows of the next
// panels while those of this one are quantized.
//
// A cluster of CLUSTER blocks takes one panel of PANEL columns after the other, of a matrix or group, and each block of it
// some of the panel's chunks of 128 rows. They come through a ring of STAGES chunks in shared memory. WARPS warps find the
// largest magnitudes of a chunk when it is there, and quantize the chunks once the blocks have told each other theirs;
// one more warp asks for the chunks. What the ring cannot hold of a panel comes a second time.
//
// Macros: those of panel.cuh; GROUPED, as in quantize_columns.cu; BASE, a group's chunks begin at a multiple of so many
// rows; BOX, rows that one copy brings; STAGES; RESIDENT, blocks that share a multiprocessor.
#include "chunk.cuh"
#include "groups.cuh"
#include "ring.cuh"

static_assert(WARPS % PIECES == 0 && CHUNK % BOX == 0 && CHUNK % BASE == 0);

struct alignas(16) Stream {
    unsigned warp_amax[WARPS][WORDS];
    unsigned of_blocks[2][CLUSTER][WORDS];  // of one panel are read while those of the next come in
    float inverse[PANEL];
    uint64_t full[STAGES], empty[STAGES], told[2];
};

struct Rows {
    int start, stop;
    bool none;  // they are in no group
};

__forceinline__ Rows rows_of(int group, const int* offsets, int groups, int M) {
    if constexpr (!GROUPED) return {0, M, false};
    const int start = group == 0 ? 0 : Group::end_of(__ldg(offsets + group - 1), 0, M);
    const bool none = group == groups;
    return {start, none ? M : Group::end_of(__ldg(offsets + group), start, M), none};
}

// The chunks of a block.
struct Share {
    int top, count;

    __forceinline__ Share(const Rows& rows, int rank) {
        const int base = rows.start / BASE * BASE;
        const int chunks = rows.start < rows.stop ? (rows.stop - base + CHUNK - 1) / CHUNK : 0;
        const int first = rank * chunks / CLUSTER;
        top = base + first * CHUNK;
        count = (rank + 1) * chunks / CLUSTER - first;
    }
    // Of them the last so many stay in the ring until they are quantized.
    __forceinline__ int kept() const { return min(count, STAGES); }
};

// Takes what rows `low` to `high` of a chunk hold into the largest magnitudes of this thread's piece. A piece of 16 bytes
// lies where the copy engine's swizzle puts it.
__forceinline__ void take_chunk(unsigned (&amax)[4], const char* stage, int low, int high) {
    const int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
    const char* at = stage + first * ROW_BYTES + (piece ^ first % 8) * 16;
    if (low <= 0 && high >= CHUNK) {
#pragma unroll
        for (int row = 0; row < CHUNK; row += STEP) take_larger(amax, *reinterpret_cast<const uint4*>(at + row * ROW_BYTES));
    } else {
#pragma unroll 1
        for (int row = max(low, 0) / STEP * STEP; row < min(high, CHUNK); row += STEP) {
            if (low <= first + row && first + row < high) {
                take_larger(amax, *reinterpret_cast<const uint4*>(at + row * ROW_BYTES));
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + 32, RESIDENT)
    stream_columns(const __grid_constant__ TensorMap x, unsigned char* data, Stored* scale, const int* offsets, int M, int N,
                   int data_n, int scale_lead, int groups, int items) {
    char* const stages = swizzled_memory();
    Stream& shared = *reinterpret_cast<Stream*>(stages + STAGES * STAGE_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER;
    const int panels = (N + PANEL - 1) / PANEL;
    const uint32_t full = shared_address(shared.full), empty = shared_address(shared.empty);
    const uint32_t told = shared_address(shared.told);
    constexpr int BARRIER = sizeof(uint64_t);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * BARRIER, 1);
            barrier_init(empty + stage * BARRIER, WARPS);
        }
        for (int turn = 0; turn < 2; ++turn) barrier_init(told + turn * BARRIER, 1);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive<CLUSTER>(false);
    cluster_wait<CLUSTER>();

    Ring ring;
    int turn = 0;
    if (warp == WARPS) {
        if (lane == 0) {
            prefetch_map(x);
            for (int item = blockIdx.x / CLUSTER; item < items; item += clusters, ++turn) {
                const int panel = item % panels * PANEL, which = item / panels;
                const Rows rows = rows_of(which, offsets, groups, M);
                if (rows.none) continue;
                const Share share(rows, (rank + turn) % CLUSTER);
                for (int copy = 0; copy < 2 * share.count - share.kept(); ++copy) {
                    const int top = share.top + (copy < share.count ? copy : copy - share.count) * CHUNK;
                    const int low = max(rows.start - top, 0) / BOX * BOX, high = min(rows.stop - top, CHUNK);
                    const uint32_t barrier = full + ring.stage * BARRIER;
                    barrier_wait(empty + ring.stage * BARRIER, ring.parity ^ 1);
                    barrier_expect(barrier, (high - low + BOX - 1) / BOX * BOX * ROW_BYTES);
                    for (int row = low; row < high; row += BOX) {
                        tma_load(shared_address(stages) + ring.stage * STAGE_BYTES + row * ROW_BYTES, x, barrier, panel,
                                 top + row, GROUPED ? 0 : which);
                    }
                    ring.advance();
                }
            }
        }
        __syncwarp();
    } else {
        Lane mine(lane / 4, 4 * (warp % PIECES) + lane % 4);
        const auto release = [&](int stage, unsigned loaded) {
            const uint32_t barrier = once_loaded(empty + stage * BARRIER, loaded, M);
            __syncwarp();
            if (lane == 0) barrier_arrive(barrier);
        };
        for (int item = blockIdx.x / CLUSTER; item < items; item += clusters, ++turn) {
            const int panel = item % panels * PANEL, which = item / panels;
            const Rows rows = rows_of(which, offsets, groups, M);
            const Share share(rows, (rank + turn) % CLUSTER);
            const bool inside = panel + mine.column < N, second = IN_WORD == 2 && panel + mine.column + 1 < N;
            unsigned char* const to = data + mine.group * ROWS +
                                      (static_cast<long long>(GROUPED ? 0 : which) * N + panel + mine.column) * data_n;
            if (rows.none) {
                for (int chunk = warp / PIECES; chunk < share.count; chunk += WARPS / PIECES) {
                    const int top = share.top + chunk * CHUNK, row = top + mine.group * ROWS;
                    const uint4 zeros = make_uint4(0, 0, 0, 0);
                    if (inside) store_some(to + top, zeros, rows.start - row, rows.stop - row);
                    if (second) store_some(to + top + data_n, zeros, rows.start - row, rows.stop - row);
                }
                continue;
            }

            const int kept = share.kept(), again = share.count - kept;
            unsigned amax[4] = {0, 0, 0, 0};
            Ring from = ring;
            for (int chunk = 0; chunk < share.count; ++chunk) {
                const int top = share.top + chunk * CHUNK;
                barrier_wait(full + ring.stage * BARRIER, ring.parity);
                take_chunk(amax, stages + ring.stage * STAGE_BYTES, rows.start - top, rows.stop - top);
                if (chunk < again) release(ring.stage, amax[0] | amax[1] | amax[2] | amax[3]);
                ring.advance();
                if (chunk < again) from = ring;
            }
#pragma unroll
            for (int mask = PIECES; mask < 32; mask *= 2) {
#pragma unroll
                for (int w = 0; w < 4; ++w) amax[w] = larger(amax[w], __shfl_xor_sync(~0u, amax[w], mask));
            }
            if (lane < PIECES) {
                *reinterpret_cast<uint4*>(&shared.warp_amax[warp][4 * lane]) = make_uint4(amax[0], amax[1], amax[2], amax[3]);
            }
            sync_first<THREADS>();
            if (warp == 0) {
                unsigned largest = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) largest = larger(largest, shared.warp_amax[w][lane]);
                if constexpr (CLUSTER > 1) {
                    const uint32_t barrier = told + turn % 2 * BARRIER;
                    if (lane == 0) barrier_expect(barrier, CLUSTER * WORDS * 4);
                    unsigned(&of_blocks)[CLUSTER][WORDS] = shared.of_blocks[turn % 2];
#pragma unroll
                    for (int block = 0; block < CLUSTER; ++block) {
                        send_to_block(shared_address(&of_blocks[rank][lane]), barrier, block, largest);
                    }
                    barrier_wait(barrier, turn / 2 % 2);
#pragma unroll
                    for (int block = 0; block < CLUSTER; ++block) largest = larger(largest, of_blocks[block][lane]);
                }
#pragma unroll
                for (int place = 0; place < IN_WORD; ++place) {
                    const int column = IN_WORD * lane + place;
                    const Scale found = block_scale<FP8, FORMAT>(__float_as_uint(element(largest, place)));
                    shared.inverse[column] = found.inverse;
                    if (rank == 0 && panel + column < N) {
                        scale[static_cast<long long>(which) * scale_lead + panel + column] = found.stored;
                    }
                }
            }
            sync_first<THREADS>();
#pragma unroll
            for (int place = 0; place < IN_WORD; ++place) mine.inverse[place] = shared.inverse[mine.column + place];

            for (int i = 0; i < share.count; ++i) {
                const int chunk = i < kept ? again + i : i - kept, top = share.top + chunk * CHUNK;
                const int row = top + mine.group * ROWS;
                if (i >= kept) barrier_wait(full + from.stage * BARRIER, from.parity);
                if (i % (WARPS / PIECES) == warp / PIECES) {
                    unsigned words[ROWS];
                    mine.load(words, stages + from.stage * STAGE_BYTES);
                    release(from.stage, any_of(words));
                    const auto quantized = [&](int place) {
                        return mine.quantized(words, place, [&](int) { return mine.inverse[place]; });
                    };
                    if (inside) store_some(to + top, quantized(0), rows.start - row, rows.stop - row);
                    if (second) store_some(to + top + data_n, quantized(IN_WORD - 1), rows.start - row, rows.stop - row);
                } else {
                    release(from.stage, 0);
                }
                from.advance();
            }
            ring = from;
        }
    }
    cluster_arrive<CLUSTER>(false);
    cluster_wait<CLUSTER>();  // a block must not end while another may still tell it its maxima
}
