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
#include "groups.cuh"
#include "panel.cuh"
#include "ring.cuh"

constexpr int ROW_BYTES = 128;
constexpr int CHUNK = 128;  // rows
constexpr int STAGE_BYTES = CHUNK * ROW_BYTES;
static_assert(PANEL * ELEMENT_BYTES == ROW_BYTES && WARPS % PIECES == 0 && CHUNK % BOX == 0 && CHUNK % BASE == 0);

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

// What a lane writes of a chunk: 16 rows of one word.
struct Lane {
    int group, column;  // of the 16 rows; of the panel
    unsigned at, turn;  // of its first word in a chunk; how its rows are turned around
    float inverse[IN_WORD];

    __forceinline__ Lane(int group, int word) : group(group), column(IN_WORD * word) {
        at = group * ROWS * ROW_BYTES + (group * (ROW_BYTES + 16) ^ word / 4 * 16) + word % 4 * 4;
        turn = 0x3210 ^ group * 0x1111;
    }

    // Lanes whose rows are 16 apart read them in orders of their own, of which no two meet in a bank: at step i the row
    // i ^ group.
    __forceinline__ void load(unsigned (&words)[ROWS], const char* stage) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const char* from = stage + (at ^ i * (ROW_BYTES + 16));
            words[i] = *reinterpret_cast<const unsigned*>(from);
            words[i + 8] = *reinterpret_cast<const unsigned*>(from + 8 * ROW_BYTES);
        }
    }

    __forceinline__ uint4 quantized(const unsigned (&words)[ROWS], int place) const {
        const auto value = [&](int i) { return element(words[i], place) * inverse[place]; };
        unsigned packed[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) packed[w] = pack<FP8>(value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3));
        return make_uint4(__byte_perm(packed[0], packed[1], turn), __byte_perm(packed[0], packed[1], turn ^ 0x4444),
                          __byte_perm(packed[2], packed[3], turn), __byte_perm(packed[2], packed[3], turn ^ 0x4444));
    }
};

// Stores the rows `low` to `high` of 16: words that are whole, then what is left of the first and the last, row by row.
__forceinline__ void store_some(unsigned char* to, uint4 out, int low, int high) {
    if (low <= 0 && high >= ROWS) {
        store16<Store::NORMAL>(to, out);
    } else if (low < ROWS && high > 0) {
        low = max(low, 0);
        high = min(high, ROWS);
        const unsigned words[4] = {out.x, out.y, out.z, out.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (low <= 4 * w && 4 * w + 4 <= high) *reinterpret_cast<unsigned*>(to + 4 * w) = words[w];
        }
        if ((low | high) % 4 != 0) {
#pragma unroll 1
            for (int row = low; row < high; ++row) {
                const int of_word = row / 4 * 4;
                if (low <= of_word && of_word + 4 <= high) continue;
                const unsigned word = row < 8 ? (row < 4 ? out.x : out.y) : (row < 12 ? out.z : out.w);
                to[row] = static_cast<unsigned char>(word >> 8 * (row % 4));
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
        const auto release = [&](int stage) {
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * BARRIER);
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
                if (chunk < again) release(ring.stage);
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
                    release(from.stage);
                    if (inside) store_some(to + top, mine.quantized(words, 0), rows.start - row, rows.stop - row);
                    if (second) {
                        store_some(to + top + data_n, mine.quantized(words, IN_WORD - 1), rows.start - row, rows.stop - row);
                    }
                } else {
                    release(from.stage);
                }
                from.advance();
            }
            ring = from;
        }
    }
    cluster_arrive<CLUSTER>(false);
    cluster_wait<CLUSTER>();  // a block must not end while another may still tell it its maxima
}
