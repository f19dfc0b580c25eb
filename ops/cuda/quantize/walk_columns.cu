// Quantizes whole columns of many small groups of rows, as quantize_columns.cu does for large ones: a block walks down
// a panel of PANEL columns from group to group, and stores whole lines, also those in which groups meet.
//
// Decomposition. The blocks share the rows of all panels evenly; a share that would end inside a group takes the whole
// group. A block has one producer warp and eight consumers. Each consumer has a piece of 16 bytes of every row, and
// works independently: it finds the largest magnitudes of a group and then quantizes the group's chunks. The chunk in
// which the next group begins waits for the next group's scales.
//
// Pipeline. Rows come in chunks of 128 through a ring of STAGES chunks in shared memory; chunks begin at multiples of
// 128 rows, wherever groups begin. A group that exceeds the ring is surveyed for its scales first, and loaded a second
// time to be quantized. Where three groups meet in a chunk, rows are stored group by group.
//
// Shared memory: the ring (STAGES, 128, 128 bytes), and the mbarriers of its stages, full and empty.
//
// Macros: those of panel.cuh, with CLUSTER 1 and WARPS 8; X_LEAVES, of chunk.cuh; BOX, rows of a TMA load; STAGES;
// RESIDENT, blocks a multiprocessor.
#include "chunk.cuh"
#include "groups.cuh"
#include "ring.cuh"

static_assert(WARPS == PIECES && PIECES == 8 && CLUSTER == 1 && CHUNK_ROWS % BOX == 0 && STAGES >= 2);

constexpr int BARRIER = sizeof(uint64_t);  // bytes of an mbarrier

// Groups `first` to `last` of a panel, with rows `begin` to `end`. Group `groups` has the rows that are in no group.
struct Run {
    int first, last, begin, end;
};

INLINE int start_of(int group, const int* offsets, int M) {
    return group == 0 ? 0 : Group::end_of(__ldg(offsets + group - 1), 0, M);
}

// The first group that begins at `row` > 0 or later; a whole warp searches.
INLINE int first_from(int row, const int* offsets, int groups, int M) {
    int below = 0, found = groups + 1;  // group `below` begins before `row`, and group `found` does not
    while (found - below > 1) {
        const int step = (found - below + 30) / 32;
        const int group = below + (int(threadIdx.x % 32) + 1) * step;
        const bool less = group < found && start_of(group, offsets, M) < row;
        below += __popc(__ballot_sync(~0u, less)) * step;
        found = min(found, below + step);
    }
    return found;
}

// The rows of a block, with all panels one below the other.
struct Share {
    int left, panel, row;  // how many rows; the first one's place

    INLINE Share(int M, int N) {
        const uint32_t panels = (N + PANEL - 1) / PANEL, rows = panels * M, each = rows / gridDim.x,
                       rest = rows % gridDim.x;
        const auto begin_of = [&](uint32_t block) { return block * each + block * rest / gridDim.x; };
        const uint32_t from = begin_of(blockIdx.x);
        left = begin_of(blockIdx.x + 1) - from;
        panel = from / M;
        row = from - panel * M;
    }
};

// Calls `visit(panel, run)` for one panel of the block after the other.
template <typename Visit>
INLINE void for_each_run(const int* offsets, int groups, int M, int N, Visit&& visit) {
    for (auto [left, panel, row] = Share(M, N); left > 0; ++panel) {
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

// One group of a run after the other. The end of the next group is loaded ahead.
struct Cursor {
    const int* offsets;
    int group, last, end, start, stop, ahead;

    INLINE Cursor(const Run& run, const int* offsets, int groups)
        : offsets(offsets), group(run.first - 1), last(min(run.last, groups)), end(run.end), stop(run.begin) {
        ahead = offset_of(run.first);
        advance();
    }
    INLINE int offset_of(int group) const { return group < last ? __ldg(offsets + group) : 0; }
    INLINE void advance() {
        ++group;
        start = stop;
        stop = Group::end_of(ahead, start, end);
        ahead = offset_of(group + 1);
    }
    INLINE int top() const { return start & -CHUNK_ROWS; }  // of the group's first chunk
    INLINE bool is_surveyed() const { return stop - top() > STAGES * CHUNK_ROWS; }
};

// The same address, kept in registers: the compiler would else compute it again where it is used.
template <typename T>
INLINE T* kept(T* address) {
    uint32_t low = uint32_t(reinterpret_cast<uint64_t>(address));
    uint32_t high = uint32_t(reinterpret_cast<uint64_t>(address) >> 32);
    forget(low), forget(high);
    return reinterpret_cast<T*>(low | uint64_t(high) << 32);
}

// A lane's part of its warp's piece of a chunk: one column, of which it stores SETS times 16 rows. ldmatrix transposes
// 16-bit elements, so that a word holds two rows of the lane's column.
struct Mine {
    static constexpr bool WIDE = ELEMENT_BYTES == 4;
    static constexpr int SETS = WIDE ? 1 : 2, SET_STEP = 64;
    static constexpr int PART = WIDE ? 2 : 4;  // rows of a lane where all lanes of a column share a set

    int column, place;  // in the panel; among the lanes of the same column
    uint32_t piece;
    // Addresses in a chunk of the rows that the lane passes to ldmatrix: see `take` and `load`.
    uint32_t survey_at, at, part_at;
    uint32_t turn, turn_next;  // the order of a lane's rows, for byte_perm, in the first and the second of two words

    INLINE Mine(int warp, int lane) : piece(warp) {
        place = WIDE ? lane / 4 : lane % 4;
        column = IN_PIECE * warp + (WIDE ? lane % 4 : lane / 4);
        turn = 0x3210 ^ place * (WIDE ? 0x1111 : 0x2222), turn_next = turn ^ 0x4444;
        survey_at = address_of(lane);
        // Lanes whose rows are 16 apart load them in different orders, so that no two rows of a matrix meet in a bank.
        const int matrix = lane / 8, row = lane % 8;
        at = address_of(WIDE ? ROWS * row + (matrix ^ row) : ROWS * (row / 2) + 2 * (matrix ^ row / 2) + row % 2);
        part_at = address_of(WIDE ? 2 * row + matrix % 2 : 4 * (row / 2) + 2 * (matrix % 2) + row % 2);
        // The compiler would else compute these again where they are used.
        forget(piece), forget(survey_at), forget(at), forget(part_at), forget(turn), forget(turn_next);
    }
    INLINE uint32_t address_of(uint32_t row) const { return row * ROW_BYTES + (piece ^ row % 8) * 16; }
    INLINE int row_of(int set) const { return SET_STEP * set + ROWS * place; }

    // For 16-bit values, keeps the largest as signed integers, which is the largest positive value, and as unsigned
    // integers, which is the largest negative one if there is any: this takes no mask for each value.
    static INLINE void take_two(uint32_t (&amax)[4], uint4 a, uint4 b) {
        if constexpr (WIDE) {
            take_larger(amax, a);
            take_larger(amax, b);
        } else {
            amax[0] = __vmaxs2(__vmaxs2(__vmaxs2(__vmaxs2(amax[0], a.x), a.y), b.x), b.y);
            amax[1] = __vmaxu2(__vmaxu2(__vmaxu2(__vmaxu2(amax[1], a.x), a.y), b.x), b.y);
            amax[2] = __vmaxs2(__vmaxs2(__vmaxs2(__vmaxs2(amax[2], a.z), a.w), b.z), b.w);
            amax[3] = __vmaxu2(__vmaxu2(__vmaxu2(__vmaxu2(amax[3], a.z), a.w), b.z), b.w);
        }
    }

    // Takes the maxima of all rows of a chunk, or of rows `low` to `high`, of which the last may be taken more than
    // once. `amax[0]` depends on each load. `row` is the lane.
    INLINE void take(uint32_t (&amax)[4], uint32_t stage) const {
        uint4 loaded[CHUNK_ROWS / 32];
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS / 32; ++i)
            loaded[i] = load_matrices<!WIDE>(stage + survey_at + i * 32 * ROW_BYTES);
        take_two(amax, loaded[0], loaded[1]);
        take_two(amax, loaded[2], loaded[3]);
    }
    INLINE void take(uint32_t (&amax)[4], uint32_t stage, int row, int low, int high) const {
#pragma unroll 1
        for (row += low; low < high; low += 64, row += 64) {
            const uint4 loaded = load_matrices<!WIDE>(stage + address_of(min(row, high - 1)));
            take_two(amax, loaded, load_matrices<!WIDE>(stage + address_of(min(row + 32, high - 1))));
        }
    }

    // Reduces over the lanes and returns the scale of the lane's column.
    INLINE Scale scale_of(const uint32_t (&amax)[4]) const {
        uint32_t largest;
        if constexpr (WIDE) {
            largest = max(max(amax[0], amax[1]), max(amax[2], amax[3]));
        } else {
            largest = larger(__vmaxs2(amax[0], amax[2]), __vmaxu2(amax[1], amax[3]));
            largest = max(largest & 0xffffu, largest >> 16);
        }
#pragma unroll
        for (int mask = WIDE ? 4 : 1; mask < (WIDE ? 32 : 4); mask *= 2) {
            largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
        }
        return block_scale<FP8, FORMAT>(__float_as_uint(element(largest, 0)));
    }

    INLINE void load(uint4 (&words)[4], uint32_t stage) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t from = WIDE ? (stage + at ^ i % 2 * 4 * (ROW_BYTES + 16)) + i / 2 * 8 * ROW_BYTES
                                       : stage + at + (i / 2 * SET_STEP + i % 2 * 8) * ROW_BYTES;
            words[i] = load_matrices<!WIDE>(from);
        }
    }

    static INLINE uint32_t quantized(uint32_t first, uint32_t second, float by) {
        return pack<FP8>(element(first, 0) * by, element(first, 1) * by, element(second, 0) * by,
                         element(second, 1) * by);
    }
    static INLINE uint32_t quantized(uint4 v, float by) {
        return pack<FP8>(element(v.x, 0) * by, element(v.y, 0) * by, element(v.z, 0) * by, element(v.w, 0) * by);
    }

    // Quantizes 16 rows.
    INLINE uint4 quantized(const uint4 (&words)[4], int set, float by) const {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (WIDE) {
                packed[i] = quantized(words[i], by);
            } else {
                const uint4 v = words[2 * set + i / 2];
                packed[i] = i % 2 ? quantized(v.z, v.w, by) : quantized(v.x, v.y, by);
            }
        }
        return make_uint4(__byte_perm(packed[0], packed[1], turn), __byte_perm(packed[0], packed[1], turn_next),
                          __byte_perm(packed[2], packed[3], turn), __byte_perm(packed[2], packed[3], turn_next));
    }
};

INLINE uint32_t any_of(const uint4 (&words)[4]) { return words[0].x | words[1].x | words[2].x | words[3].x; }

// Quantizes PART rows of a set of 16; row i is scaled by `by(i)`.
template <typename By>
INLINE uint32_t quantized_part(uint4 v, By&& by) {
    float values[4] = {};
#pragma unroll
    for (int i = 0; i < Mine::PART; ++i) {
        values[i] = (Mine::WIDE ? element(i ? v.y : v.x, 0) : element(i < 2 ? v.x : v.y, i % 2)) * by(i);
    }
    return pack<FP8>(values[0], values[1], values[2], values[3]);
}

INLINE void store_part(uint8_t* to, uint32_t part) {
    if constexpr (Mine::WIDE) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(part);
    } else {
        *reinterpret_cast<uint32_t*>(to) = part;
    }
}

// Stores rows `low` to `high` of a chunk, whose row 0 is row `top` of the column. Calls `loaded` with bits of all words
// when they have been loaded.
template <typename Loaded>
INLINE void store_strip(const Mine& mine, uint8_t* column, uint32_t top, bool inside, uint32_t stage, int low, int high,
                        float by, Loaded&& loaded) {
    uint4 words[4];
    mine.load(words, stage);
    uint32_t any = any_of(words);
#pragma unroll
    for (int set = 0; set < Mine::SETS; ++set) {
        const int row = mine.row_of(set);
        const uint4 out = mine.quantized(words, set, by);
        if (inside && low <= row && row + ROWS <= high) store16<Store::NORMAL>(column + (top + row), out);
    }
#pragma unroll 1
    for (int edge = low;; edge = high) {
        if (edge % ROWS != 0) {
            const int set = edge / ROWS, row = set * ROWS + Mine::PART * mine.place;
            const uint4 v = load_matrices<!Mine::WIDE>(stage + mine.part_at + set * ROWS * ROW_BYTES);
            any |= v.x;
            const uint32_t part = quantized_part(v, [&](int) { return by; });
            uint8_t* const to = column + (top + row);
            if (inside && low <= row && row + Mine::PART <= high) {
                store_part(to, part);
            } else if (inside) {
#pragma unroll
                for (int i = 0; i < Mine::PART; ++i) {
                    if (low <= row + i && row + i < high) to[i] = uint8_t(part >> 8 * i);
                }
            }
        }
        if (edge == high) break;
    }
    loaded(any);
}

// Stores a whole chunk in which two groups meet: rows before `split` are scaled by `before`, the others by `after`.
template <typename Loaded>
INLINE void store_meeting(const Mine& mine, uint8_t* column, uint32_t top, bool inside, uint32_t stage, uint32_t split,
                          float before, float after, Loaded&& loaded) {
    uint4 words[4];
    mine.load(words, stage);
    const uint32_t first = split / ROWS * ROWS;  // of the set that has rows of both groups
    const uint4 v = load_matrices<!Mine::WIDE>(stage + mine.part_at + first * ROW_BYTES);
    loaded(any_of(words) | v.x);
#pragma unroll
    for (int set = 0; set < Mine::SETS; ++set) {
        const uint32_t row = mine.row_of(set);
        const uint4 out = mine.quantized(words, set, row < split ? before : after);
        if (inside && row != first)
            store16<Store::NORMAL>(column + (top + ROWS * mine.place) + Mine::SET_STEP * set, out);
    }
    const uint32_t offset = Mine::PART * mine.place;
    const int left = int(split - first - offset);
    const uint32_t part = quantized_part(v, [&](int i) { return i < left ? before : after; });
    if (inside) store_part(column + (top + first + offset), part);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, RESIDENT)
    walk_columns(const __grid_constant__ TensorMap x, uint8_t* data, Stored* scale, const int* offsets, int M, int N,
                 int data_n, int scale_lead, int groups) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t stages_at = shared_address(swizzled_memory());
    forget(stages_at);  // the compiler would else compute it again where it is used
    const uint32_t full = stages_at + STAGES * STAGE_BYTES, empty = full + STAGES * BARRIER;

    // Prologue: initialize the mbarriers.
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * BARRIER, 1);
            barrier_init(empty + stage * BARRIER, WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp == WARPS) {
        // Producer. While the warp searches for its groups, it prefetches the chunk that is its first if groups are
        // alike.
        if (lane == 0) {
            const Share share(M, N);
            const int top = (share.row == 0 ? 0 : share.row + M / groups) & -CHUNK_ROWS;
            for (int row = 0; row < CHUNK_ROWS; row += BOX) tma_prefetch(x, share.panel * PANEL, top + row, 0);
        }
        __syncwarp();
        const Boxes boxes(x);
        Ring ring;
        for_each_run(offsets, groups, M, N, [&](int panel, const Run& run) {
            const auto load = [&](int top, int low, int high) {  // loads the part of a chunk in rows `low` to `high`
                low = max(low - top, 0) / BOX * BOX;
                high = min(high - top, CHUNK_ROWS);
                const int count = max(high - low + BOX - 1, 0) / BOX;
                const uint32_t barrier = full + ring.stage * BARRIER;
                barrier_wait(empty + ring.stage * BARRIER, ring.parity ^ 1);
                barrier_expect(barrier, count * BOX * ROW_BYTES);
                for (int box = 0; box < count; ++box) {
                    const int row = low + box * BOX;
                    boxes.load(stages_at + ring.stage * STAGE_BYTES + row * ROW_BYTES, barrier, panel, top + row, 0);
                }
                ring.advance();
            };
            if (lane == 0) {
                const bool is_last = run.last > groups;
                const int filled = is_last ? Group::end_of(__ldg(offsets + groups - 1), run.begin, run.end) : run.end;
                Cursor at(run, offsets, groups);
                for (int next = at.top(); at.group < at.last; at.advance()) {
                    if (at.start == at.stop) continue;
                    for (int again = at.is_surveyed(); again >= 0; --again) {
                        for (; next < at.stop; next += CHUNK_ROWS) load(next, run.begin, filled);
                        if (again) next = at.top();
                    }
                }
            }
            __syncwarp();
        });
    } else {
        // Consumers.
        const Mine mine(warp, lane);
        Ring ring;
        const auto wait = [&](const Ring& at) { barrier_wait(full + at.stage * BARRIER, at.parity); };
        const auto release = [&](const Ring& at, uint32_t loaded) {  // once `loaded`, bits of the last load, is there
            const uint32_t barrier = once_loaded(empty + at.stage * BARRIER, loaded, M);
            __syncwarp();
            if (lane == 0) barrier_arrive(barrier);
        };
        for_each_run(offsets, groups, M, N, [&](int panel, const Run& run) {
            const bool inside = mine.column < N - panel;
            uint8_t* const column = kept(data + int64_t(panel + mine.column) * data_n);
            Stored* to_scale = scale + int64_t(run.first) * scale_lead + panel + mine.column;
            int top = run.begin & -CHUNK_ROWS;  // row of the next chunk to be quantized
            int written = run.begin;  // its rows up to this one are stored
            float before = 0;  // the inverse scale of its rows before the group
            const auto release_it = [&](uint32_t any) { release(ring, any); };
            const auto stage_of = [&](const Ring& at) { return stages_at + at.stage * STAGE_BYTES; };
            const auto store_waiting = [&](int stop, auto&& loaded) {  // stores the rows up to `stop`
                wait(ring);
                store_strip(mine, column, top, inside, stage_of(ring), max(written - top, 0), stop - top, before,
                            loaded);
                written = stop;
            };
            Cursor at(run, offsets, groups);
            for (; at.group < at.last; at.advance(), to_scale += scale_lead) {
                const bool stores_scale = inside && mine.place == 0;
                if (at.start == at.stop) {
                    if (stores_scale) *to_scale = block_scale<FP8, FORMAT>(0).stored;
                    continue;
                }
                const bool surveyed = at.is_surveyed();
                if (max(written, top) < at.start && (surveyed || written > top || at.stop - top < CHUNK_ROWS)) {
                    store_waiting(at.start, [](uint32_t) {});
                }
                // Find the group's largest magnitudes and its scale.
                Ring reading = ring;
                uint32_t amax[4] = {0, 0, 0, 0};
                int row = at.start;
                do {
                    const int low = row & CHUNK_ROWS - 1, high = min(at.stop - row + low, CHUNK_ROWS);
                    wait(reading);
                    if (high - low == CHUNK_ROWS) {
                        mine.take(amax, stage_of(reading));
                    } else {
                        mine.take(amax, stage_of(reading), lane, low, high);
                    }
                    if (surveyed) release(reading, amax[0]);
                    reading.advance();
                    row += CHUNK_ROWS - low;
                } while (row < at.stop);
                const Scale found = mine.scale_of(amax);
                if (stores_scale) *to_scale = found.stored;

                // Quantize and store all chunks but the one in which the next group begins.
                if (surveyed) ring = reading;
                for (; at.stop - top >= CHUNK_ROWS; top += CHUNK_ROWS) {
                    const uint32_t stage = stage_of(ring);
                    if (surveyed) wait(ring);
                    if (written > top) {
                        store_strip(mine, column, top, inside, stage, written - top, CHUNK_ROWS, found.inverse,
                                    release_it);
                    } else if (at.start > top) {
                        const int split = at.start - top;
                        store_meeting(mine, column, top, inside, stage, split, before, found.inverse, release_it);
                    } else {
                        uint4 words[4];
                        mine.load(words, stage);
                        release_it(any_of(words));
                        if (inside) {
                            uint8_t* const to = column + uint32_t(top + mine.row_of(0));
#pragma unroll
                            for (int set = 0; set < Mine::SETS; ++set) {
                                const uint4 out = mine.quantized(words, set, found.inverse);
                                store16<Store::NORMAL>(to + Mine::SET_STEP * set, out);
                            }
                        }
                    }
                    ring.advance();
                }
                before = found.inverse;
            }
            if (max(written, top) < at.start) {
                store_waiting(at.start, release_it);
                ring.advance();
            }
            if (run.last > groups && inside) {  // zeros, for the rows in no group
                for (top = at.start & -CHUNK_ROWS; top < run.end; top += CHUNK_ROWS) {
#pragma unroll
                    for (int set = 0; set < Mine::SETS; ++set) {
                        const int row = top + mine.row_of(set);
                        store_some(column + row, make_uint4(0, 0, 0, 0), at.start - row, run.end - row);
                    }
                }
            }
        });
    }
}
