// Quantizes whole columns of groups of rows as quantize_columns.cu does, of many groups that are small: a block walks down
// a panel of PANEL columns from group to group, and stores whole lines, also where groups meet in them.
//
// The rows come in chunks of 128 through a ring of STAGES chunks in shared memory; chunks begin at multiples of 128 rows,
// wherever groups do. Four warps find the largest magnitudes of group after group, each of its own columns; WARPS warps
// quantize a chunk once the scales of all groups in it are known; one more warp asks for the chunks. A group that the ring
// cannot hold is surveyed for its scales first, and comes a second time to be quantized.
//
// The blocks share the panels' rows evenly; where a share would end inside a group, the block takes the whole group.
//
// Macros: those of panel.cuh, CLUSTER 1; BOX, rows that one copy brings; STAGES; RESIDENT, blocks that share a
// multiprocessor.
#include "chunk.cuh"
#include "groups.cuh"
#include "ring.cuh"

constexpr int FINDERS = 4;  // warps, each of two pieces of every row
constexpr int TURNS = WARPS / PIECES;  // of the warps that quantize, every PIECES take one load in so many
constexpr int SLOTS = 16;  // groups whose scales are kept
static_assert(PIECES == 2 * FINDERS && WARPS % PIECES == 0 && CLUSTER == 1 && CHUNK % BOX == 0);

struct alignas(16) Walk {
    float inverse[SLOTS][PANEL];
    uint64_t full[STAGES], empty[STAGES], found[SLOTS], used[SLOTS];
};

// Groups `first` to `last` of a panel, which hold rows `begin` to `end`; group `groups` is that of the rows in none.
struct Run {
    int first, last, begin, end;

    __forceinline__ int top() const { return begin < end ? begin / CHUNK * CHUNK : end; }  // of its first chunk
};

__forceinline__ int start_of(int group, const int* offsets, int M) {
    return group == 0 ? 0 : Group::end_of(__ldg(offsets + group - 1), 0, M);
}

// The first group that begins at `row` > 0 or after, found by a whole warp.
__forceinline__ int first_from(int row, const int* offsets, int groups, int M) {
    int below = 0, found = groups + 1;  // the first begins below, and what is found does not
    while (found - below > 1) {
        const int step = (found - below + 30) / 32;
        const int group = below + (static_cast<int>(threadIdx.x % 32) + 1) * step;
        const bool less = group < found && start_of(group, offsets, M) < row;
        below += __popc(__ballot_sync(~0u, less)) * step;
        found = min(found, below + step);
    }
    return found;
}

// What is to be done: `visit(panel, run)` for one panel after the other.
template <typename Visit>
__forceinline__ void for_each_run(const int* offsets, int groups, int M, int N, Visit&& visit) {
    const int panels = (N + PANEL - 1) / PANEL;
    const long long rows = static_cast<long long>(panels) * M;
    const long long from = rows * blockIdx.x / gridDim.x, to = rows * (blockIdx.x + 1) / gridDim.x;
    int row = static_cast<int>(from % M);
    int left = static_cast<int>(to - from);
    for (int panel = static_cast<int>(from / M); left > 0; ++panel) {
        Run run;
        run.first = row > 0 ? first_from(row, offsets, groups, M) : 0;
        run.last = left < M - row ? first_from(row + left, offsets, groups, M) : groups + 1;
        left -= M - row;
        row = 0;
        run.begin = run.first > groups ? M : start_of(run.first, offsets, M);
        run.end = run.last > groups ? M : max(run.begin, start_of(run.last, offsets, M));
        visit(panel * PANEL, run);
    }
}

// One group of a run after the other.
struct Cursor {
    int group, start, stop;

    __forceinline__ Cursor(const Run& run, const int* offsets, int groups) : group(run.first - 1), stop(run.begin) {
        advance(run, offsets, groups);
    }
    __forceinline__ void advance(const Run& run, const int* offsets, int groups) {
        ++group;
        start = stop;
        stop = group < groups ? Group::end_of(__ldg(offsets + group), start, run.end) : run.end;
    }
    // On to one that has rows, or past the last row of the run.
    __forceinline__ void advance_to_rows(const Run& run, const int* offsets, int groups) {
        do advance(run, offsets, groups);
        while (start == stop && stop < run.end);
    }
    __forceinline__ bool begins_before(const Run& run, int row) const { return group < run.last && start < row; }
    __forceinline__ bool is_surveyed() const {
        return static_cast<unsigned>(stop - 1) / CHUNK - static_cast<unsigned>(start) / CHUNK >= STAGES;
    }
};

// Where the scales of the groups lie that have any, one after the other.
struct Slots {
    unsigned count = 0;

    __forceinline__ int slot() const { return count % SLOTS; }
    __forceinline__ uint32_t parity() const { return count / SLOTS % 2; }
};

// One of the warps that find scales: the lanes of a half take 16 rows of a piece of 16 bytes.
struct Finder {
    int row, piece;  // of the first 16 rows of a chunk; of a row
    uint4 loaded[CHUNK / 16];

    __forceinline__ Finder(int warp, int lane) : row(lane % 16), piece(2 * warp + lane / 16) {}

    __forceinline__ void load(const char* stage) {
        const char* from = stage + row * ROW_BYTES + (piece ^ row % 8) * 16;
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) loaded[i] = *reinterpret_cast<const uint4*>(from + i * 16 * ROW_BYTES);
    }

    __forceinline__ unsigned any() const {
        unsigned any = 0;
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) any |= loaded[i].x;  // with which the rest of 16 bytes comes
        return any;
    }

    // Takes what rows `low` to `high` of the chunk hold.
    __forceinline__ void take(unsigned (&amax)[4], int low, int high) const {
        if (low <= 0 && high >= CHUNK) {
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) take_larger(amax, loaded[i]);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                if (low >= 16 * i + 16 || high <= 16 * i) continue;
                const unsigned mask = low <= 16 * i + row && 16 * i + row < high ? ~0u : 0u;
                const uint4 v = loaded[i];
                take_larger(amax, make_uint4(v.x & mask, v.y & mask, v.z & mask, v.w & mask));
            }
        }
    }

    // The scale of one column to each of some lanes; the inverse goes to `inverse` where there is one.
    __forceinline__ void find(unsigned (&amax)[4], float* inverse, Stored* scale, int columns) const {
        const bool upper = row & 8, odd = row & 4;
        const unsigned first = larger(upper ? amax[2] : amax[0], __shfl_xor_sync(~0u, upper ? amax[0] : amax[2], 8));
        const unsigned second = larger(upper ? amax[3] : amax[1], __shfl_xor_sync(~0u, upper ? amax[1] : amax[3], 8));
        unsigned largest = larger(odd ? second : first, __shfl_xor_sync(~0u, odd ? first : second, 4));
        largest = larger(largest, __shfl_xor_sync(~0u, largest, 2));
        largest = larger(largest, __shfl_xor_sync(~0u, largest, 1));
        const int place = row % 4, column = (4 * piece + row / 4) * IN_WORD + place;
        if (place < IN_WORD) {
            const Scale found = block_scale<FP8, FORMAT>(__float_as_uint(element(largest, place)));
            if (inverse != nullptr) inverse[column] = found.inverse;
            if (column < columns) scale[column] = found.stored;
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) amax[w] = 0;
    }
};

// All bits of the bytes of a word that stand for rows `low` to `high` of 16, of which the word has those from `first` on.
__forceinline__ unsigned mask_of_rows(int low, int high, int first) {
    const int from = min(max(low - first, 0), 4), to = min(max(high - first, 0), 4);
    const unsigned long long below = (1ull << 8 * to) - 1, before = (1ull << 8 * from) - 1;
    return static_cast<unsigned>(below & ~before);
}

// Of the 16 rows of a lane the first so many, as bits in the order in which the lane reads its rows.
__forceinline__ unsigned first_rows(int count, int group) {
    unsigned rows = (1u << min(max(count, 0), ROWS)) - 1;
    if (group & 1) rows = (rows & 0x5555) << 1 | (rows >> 1 & 0x5555);
    if (group & 2) rows = (rows & 0x3333) << 2 | (rows >> 2 & 0x3333);
    if (group & 4) rows = (rows & 0x0f0f) << 4 | (rows >> 4 & 0x0f0f);
    return rows;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * (FINDERS + 1), RESIDENT)
    walk_columns(const __grid_constant__ TensorMap x, unsigned char* data, Stored* scale, const int* offsets, int M, int N,
                 int data_n, int scale_lead, int groups) {
    char* const stages = swizzled_memory();
    Walk& shared = *reinterpret_cast<Walk*>(stages + STAGES * STAGE_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t full = shared_address(shared.full), empty = shared_address(shared.empty);
    const uint32_t found = shared_address(shared.found), used = shared_address(shared.used);
    constexpr int BARRIER = sizeof(uint64_t);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * BARRIER, 1);
            barrier_init(empty + stage * BARRIER, WARPS + FINDERS);
        }
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(found + slot * BARRIER, 32 * FINDERS);
            barrier_init(used + slot * BARRIER, 32 * WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    Ring ring;
    const auto leave = [&](unsigned loaded, int times = 1) {  // the stage, from which a thread has loaded these bits
        const uint32_t barrier = once_loaded(empty + ring.stage * BARRIER, loaded, M);
        __syncwarp();
        if (lane < times) barrier_arrive(barrier);
    };
    if (warp == WARPS + FINDERS) {
        if (lane == 0) prefetch_map(x);
        for_each_run(offsets, groups, M, N, [&](int panel, const Run& run) {
            const auto load = [&](int top, int low, int high) {  // of rows `low` to `high` what lies in a chunk
                low = max(low - top, 0) / BOX * BOX;
                high = min(high - top, CHUNK);
                const int boxes = max(high - low + BOX - 1, 0) / BOX;
                const uint32_t barrier = full + ring.stage * BARRIER;
                barrier_wait(empty + ring.stage * BARRIER, ring.parity ^ 1);
                barrier_expect(barrier, boxes * BOX * ROW_BYTES);
                for (int box = 0; box < boxes; ++box) {
                    const int row = low + box * BOX;
                    tma_load(shared_address(stages) + ring.stage * STAGE_BYTES + row * ROW_BYTES, x, barrier, panel,
                             top + row, 0);
                }
                ring.advance();
            };
            if (lane == 0) {
                const int loaded = run.last > groups ? Group::end_of(__ldg(offsets + groups - 1), run.begin, run.end) : run.end;
                Cursor at(run, offsets, groups);
                for (int top = run.top(); top < run.end; top += CHUNK) {
                    load(top, run.begin, loaded);
                    for (; at.begins_before(run, top + CHUNK); at.advance(run, offsets, groups)) {
                        if (at.group == groups || at.stop <= top + CHUNK || !at.is_surveyed()) continue;
                        for (int row = top + CHUNK; row < at.stop; row += CHUNK) load(row, at.start, at.stop);
                    }
                }
            }
            __syncwarp();
        });
    } else if (warp >= WARPS) {
        Finder mine(warp - WARPS, lane);
        Slots slots;
        for_each_run(offsets, groups, M, N, [&](int panel, const Run& run) {
            unsigned amax[4] = {0, 0, 0, 0};
            Cursor at(run, offsets, groups);
            const auto load = [&](int arrivals) {
                barrier_wait(full + ring.stage * BARRIER, ring.parity);
                mine.load(stages + ring.stage * STAGE_BYTES);
                leave(mine.any(), arrivals);
                ring.advance();
            };
            const auto publish_scale = [&] {
                Stored* const to = scale + static_cast<long long>(at.group) * scale_lead + panel;
                if (at.start == at.stop) {
                    mine.find(amax, nullptr, to, N - panel);
                } else {
                    const int slot = slots.slot();
                    barrier_wait(used + slot * BARRIER, slots.parity() ^ 1);
                    mine.find(amax, shared.inverse[slot], to, N - panel);
                    barrier_arrive(found + slot * BARRIER);
                    ++slots.count;
                }
            };
            int over = run.end;  // chunks from here on are surveyed, up to the end of the group
            for (int top = run.top(); top < run.end;) {
                const bool surveys = over < at.stop;
                const int first = surveys ? over : top;
                load(surveys ? 1 + WARPS / FINDERS : 1);  // for the others, too
                if (surveys) {
                    mine.take(amax, at.start - first, at.stop - first);
                    over += CHUNK;
                    if (over < at.stop) continue;
                    publish_scale();
                    over = run.end;
                    top += CHUNK;
                    continue;
                }
                for (; at.begins_before(run, top + CHUNK); at.advance(run, offsets, groups)) {
                    if (at.group == groups) break;
                    const bool begins = at.start >= top, ends = at.stop <= top + CHUNK;
                    const bool surveyed = !(begins && ends) && at.is_surveyed();
                    if (begins || !surveyed) mine.take(amax, at.start - top, at.stop - top);
                    if (surveyed && begins) over = top + CHUNK;
                    if (!ends) break;
                    if (!surveyed) publish_scale();
                }
                if (over == run.end) top += CHUNK;
            }
            for (; at.group < min(groups, run.last); at.advance(run, offsets, groups)) publish_scale();
        });
    } else {
        Lane mine(lane / 4, 4 * (warp % PIECES) + lane % 4);
        Slots slots;
        int turn = 0;
        for_each_run(offsets, groups, M, N, [&](int panel, const Run& run) {
            // The group that holds the next row, and the one after it.
            Cursor at(run, offsets, groups);
            if (at.start == at.stop && at.stop < run.end) at.advance_to_rows(run, offsets, groups);
            Cursor next = at;
            next.advance_to_rows(run, offsets, groups);
            const auto pass = [&] {
                at.group = next.group;
                at.start = at.stop;  // what lies between has no rows
                at.stop = next.stop;
                next.advance_to_rows(run, offsets, groups);
            };
            const auto inverse_of = [&](float (&inverse)[IN_WORD], const Slots& of) {
                barrier_wait(found + of.slot() * BARRIER, of.parity());
#pragma unroll
                for (int place = 0; place < IN_WORD; ++place) inverse[place] = shared.inverse[of.slot()][mine.column + place];
            };
            const auto release = [&] {
                barrier_arrive(used + slots.slot() * BARRIER);
                ++slots.count;
            };
            for (int top = run.top(); top < run.end; top += CHUNK) {
                const bool takes = turn == warp / PIECES;
                const int row = top + mine.group * ROWS, limit = min(top + CHUNK, run.end);
                unsigned words[ROWS];
                const auto store = [&](int place, uint4 out) {
                    if (place < N - panel - mine.column) {
                        store_some(data + static_cast<long long>(panel + mine.column + place) * data_n + row, out,
                                   run.begin - row, run.end - row);
                    }
                };
                barrier_wait(full + ring.stage * BARRIER, ring.parity);
                if (takes) mine.load(words, stages + ring.stage * STAGE_BYTES);
                leave(takes ? any_of(words) : 0);
                turn = turn + 1 == TURNS ? 0 : turn + 1;
                ring.advance();

                if (at.stop >= limit && at.group < groups) {
                    inverse_of(mine.inverse, slots);
                    if (takes) {
#pragma unroll
                        for (int place = 0; place < IN_WORD; ++place) {
                            store(place, mine.quantized(words, place, [&](int) { return mine.inverse[place]; }));
                        }
                    }
                } else if (next.stop >= limit && next.group < groups) {
                    const Slots after{slots.count + 1};
                    barrier_wait(found + slots.slot() * BARRIER, slots.parity());
                    barrier_wait(found + after.slot() * BARRIER, after.parity());
                    if (takes) {
                        const unsigned of_first = first_rows(at.stop - row, mine.group);
#pragma unroll
                        for (int place = 0; place < IN_WORD; ++place) {
                            const float first = shared.inverse[slots.slot()][mine.column + place];
                            const float second = shared.inverse[after.slot()][mine.column + place];
                            store(place, mine.quantized(words, place, [&](int i) {
                                return of_first >> i & 1 ? first : second;
                            }));
                        }
                    }
                    release();
                    pass();
                } else {
                    uint4 out[IN_WORD] = {};
#pragma unroll 1
                    for (; at.start < limit && at.group < groups; pass()) {
                        inverse_of(mine.inverse, slots);
                        const int low = at.start - row, high = at.stop - row;
                        if (takes && low < ROWS && high > 0) {
#pragma unroll
                            for (int place = 0; place < IN_WORD; ++place) {
                                const uint4 part = mine.quantized(words, place, [&](int) { return mine.inverse[place]; });
                                out[place].x |= part.x & mask_of_rows(low, high, 0);
                                out[place].y |= part.y & mask_of_rows(low, high, 4);
                                out[place].z |= part.z & mask_of_rows(low, high, 8);
                                out[place].w |= part.w & mask_of_rows(low, high, 12);
                            }
                        }
                        if (at.stop >= limit) break;
                        release();
                    }
                    if (takes) {
#pragma unroll
                        for (int place = 0; place < IN_WORD; ++place) store(place, out[place]);
                    }
                }
                if (at.start >= top && at.stop > top + CHUNK && at.group < groups && at.is_surveyed()) {
                    for (int over = top + CHUNK; over < at.stop; over += CHUNK) ring.advance();
                }
                if (at.stop == limit && at.group < groups) {
                    release();
                    pass();
                }
            }
        });
    }
}
