// Quantizes whole columns, as quantize_columns.cu does, by persistent clusters: TMA loads the rows of the next panels
// while the rows of this panel are quantized.
//
// Decomposition. A cluster of CLUSTER blocks has one panel of PANEL columns after the other, of a matrix or group, and
// each block some of the panel's chunks of 128 rows. A block has one producer warp and WARPS consumers, which work
// independently of each other: each consumer finds the largest magnitudes of one piece, 16 bytes of every row, in the
// chunks of its stages, sends them to the warps of this piece in all blocks, and quantizes its piece when it has
// received theirs.
//
// Pipeline. The chunks come through a ring of STAGES chunks. Of a panel that exceeds the ring, the chunks that were
// released are loaded a second time.
//
// Two launches. Each cluster lies within one GPC, so large clusters leave multiprocessors idle. A second launch, of
// smaller clusters, may quantize the last columns there. It starts beside the first one and ends after it, so that a
// launch after both waits for both.
//
// Shared memory: the ring (STAGES, 128, 128 bytes), mbarriers (full, empty, and `TOLD` for each piece of two panels),
// and the received maxima.
//
// Macros: those of panel.cuh; X_LEAVES, of chunk.cuh; GROUPED, as in quantize_columns.cu; BASE, of which a group's
// first chunk begins at a multiple; BOX, rows of a TMA load; STAGES; RESIDENT, blocks a multiprocessor; HELD, chunks of
// a panel that stay in registers, so that their stages are free while the warps wait for each other's maxima; PART,
// which columns the launch has.
#include "chunk.cuh"
#include "groups.cuh"
#include "overlap.cuh"
#include "ring.cuh"

enum class Part { ALL, FIRST, SECOND };

static_assert(WARPS % PIECES == 0 && CHUNK_ROWS % BOX == 0 && CHUNK_ROWS % BASE == 0);
constexpr int TEAMS = WARPS / PIECES;  // teams, of a warp for each piece, that alternate in taking stages
constexpr int SENDERS = CLUSTER * TEAMS;
static_assert(STAGES >= TEAMS && (HELD == 0 || TEAMS == 1));

// Offsets in shared memory after the ring. `TOLD` are mbarriers for each piece of two panels, and OF_WARPS the maxima
// that they announce, (2, PIECES, SENDERS, 4): those of one panel are read while those of the next arrive.
constexpr int BARRIER = sizeof(uint64_t);
constexpr int FULL = STAGES * STAGE_BYTES, EMPTY = FULL + STAGES * BARRIER, TOLD = EMPTY + STAGES * BARRIER;
constexpr int OF_WARPS = TOLD + 2 * PIECES * BARRIER;

struct Rows {
    int start, stop;
    bool none;  // they are in no group
};

INLINE Rows rows_of(int group, const int* offsets, int groups, int M) {
    if constexpr (!GROUPED) return {0, M, false};
    const int start = group == 0 ? 0 : Group::end_of(__ldg(offsets + group - 1), 0, M);
    const bool none = group == groups;
    return {start, none ? M : Group::end_of(__ldg(offsets + group), start, M), none};
}

// The chunks of a block: `count` of them, from row `top` on.
struct Share {
    int top, count;

    INLINE Share(const Rows& rows, int rank) {
        const int base = rows.start / BASE * BASE;
        const int chunks = rows.start < rows.stop ? (rows.stop - base + CHUNK_ROWS - 1) / CHUNK_ROWS : 0;
        const int first = rank * chunks / CLUSTER;
        top = base + first * CHUNK_ROWS;
        count = (rank + 1) * chunks / CLUSTER - first;
    }
    // The last ones stay in the ring until they are quantized: so many.
    INLINE int kept() const { return min(count, STAGES); }
};

// Calls `visit(panel, which, rows, turn)` for each panel of columns `begin` to `end` that the cluster has, of a matrix,
// of a group, or of the rows in no group. `same` marks values that are the same in all lanes.
template <typename Same, typename Visit>
INLINE void for_each_item(int items, int begin, int end, const int* offsets, int groups, int M, Same&& same,
                          Visit&& visit) {
    const int clusters = gridDim.x / CLUSTER, width = (end - begin + PANEL - 1) / PANEL * PANEL;
    const auto find = [&](int which) {
        const Rows rows = rows_of(which, offsets, groups, M);
        return GROUPED ? Rows{same(rows.start), same(rows.stop), which == groups} : rows;
    };
    int panel = blockIdx.x / CLUSTER * PANEL, which = 0, turn = 0;
    Rows rows = find(0);
    for (int item = blockIdx.x / CLUSTER; item < items; item += clusters, panel += clusters * PANEL, ++turn) {
        if (panel >= width) {
            for (; panel >= width; panel -= width) ++which;
            rows = find(which);
        }
        if (rows.none && rows.start == rows.stop) break;
        visit(begin + panel, which, rows, turn);
    }
}

// A lane's part of a chunk: 16 rows of one word. Lanes whose rows are 16 apart read their rows in different orders, so
// that no two meet in a bank: at step i a lane reads row i ^ group.
struct Lane {
    int group, column;  // which 16 rows; the first column, in the panel
    uint32_t at, turn;  // address of the first word in a chunk; the order of its rows, for byte_perm
    float inverse[IN_WORD];

    INLINE Lane(int group, int word) : group(group), column(IN_WORD * word) {
        at = group * ROWS * ROW_BYTES + (group * (ROW_BYTES + 16) ^ word / 4 * 16) + word % 4 * 4;
        turn = 0x3210 ^ group * 0x1111;
    }

    // Quantizes one column of the words.
    INLINE uint4 quantized(const uint32_t (&words)[ROWS], int place) const {
        const auto value = [&](int i) { return element(words[i], place) * inverse[place]; };
        uint32_t packed[4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
            packed[w] = pack<FP8>(value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3));
        return make_uint4(__byte_perm(packed[0], packed[1], turn), __byte_perm(packed[0], packed[1], turn ^ 0x4444),
                          __byte_perm(packed[2], packed[3], turn), __byte_perm(packed[2], packed[3], turn ^ 0x4444));
    }
};

// Updates the largest magnitudes of a piece by rows `low` to `high` of a chunk. The lane's rows are 32 apart, and the
// first is at `from`.
INLINE void take_some(uint32_t (&amax)[4], uint32_t from, int low, int high) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = lane; row < CHUNK_ROWS; row += 32) {
        if (low <= row && row < high) take_larger(amax, load_shared_words(from + (row - lane) * ROW_BYTES));
    }
}

// The larger of two magnitudes, for each element.
INLINE uint32_t larger_of(uint32_t a, uint32_t b) { return INPUT == Element::FP32 ? max(a, b) : __vmaxu2(a, b); }

// Reduces over the lanes: each lane gets the largest magnitudes of word `lane % 4` of the piece.
INLINE uint32_t largest_of_lanes(const uint32_t (&amax)[4]) {
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    const uint32_t first = larger_of(upper ? amax[2] : amax[0], __shfl_xor_sync(~0u, upper ? amax[0] : amax[2], 2));
    const uint32_t second = larger_of(upper ? amax[3] : amax[1], __shfl_xor_sync(~0u, upper ? amax[1] : amax[3], 2));
    return larger_of(odd ? second : first, __shfl_xor_sync(~0u, odd ? first : second, 1));
}

// Reduces over the lanes that have the same word.
INLINE uint32_t largest_of_word(uint32_t largest) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) largest = larger_of(largest, __shfl_xor_sync(~0u, largest, mask));
    return largest;
}

// The same value, about which the compiler knows only that all lanes have it: it keeps the value in a uniform register.
INLINE int uniform(uint32_t value) {
    forget(value);
    return __shfl_sync(~0u, value, 0);
}

// The position in the ring `stages` stages on.
INLINE Ring after(const Ring& ring, int stages) {
    const uint32_t stage = ring.stage + stages;
    return {int(stage % STAGES), ring.parity ^ (stage / STAGES & 1)};
}

// The chunks that a team takes from the ring, from a position on; `index` counts from 0 there.
struct Cursor {
    int team, stage, index = 0;
    uint32_t parity;

    INLINE Cursor(const Ring& from, int team) : team(team), stage(from.stage), parity(from.parity) {
        if constexpr (TEAMS > 1) go_to(stage + (team + TEAMS - stage % TEAMS) % TEAMS);
    }
    INLINE void advance() { go_to(stage + TEAMS); }

    INLINE void go_to(int next) {
        index += next - stage;
        stage = next;
        if (TEAMS == 1 ? stage == STAGES : stage >= STAGES) {
            if (TEAMS > 1) index += STAGES + team - stage;
            stage = team;
            parity ^= 1;
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + 32, RESIDENT)
    stream_columns(const __grid_constant__ TensorMap x, uint8_t* data, Stored* scale, const int* offsets, int M, int N,
                   int begin, int end, int data_n, int scale_lead, int groups, int items) {
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER;
    const uint32_t stages = uniform(shared_address(swizzled_memory()));
    const uint32_t full = stages + FULL, empty = stages + EMPTY;

    // Prologue: initialize the mbarriers.
    if constexpr (PART == Part::FIRST) let_next_begin();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * BARRIER, 1);
            barrier_init(empty + stage * BARRIER, PIECES);
        }
        if constexpr (SENDERS > 1) {
            for (int i = 0; i < 2 * PIECES; ++i) {
                const uint32_t barrier = stages + TOLD + i * BARRIER;
                barrier_init(barrier, 1);
                barrier_expect(barrier, SENDERS * 16);
            }
        }
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive<CLUSTER>(false);

    Ring ring;
    if (warp == WARPS) {
        // Producer. All lanes wait for the cluster's blocks to begin, as the other warps do; the lane that loads, only
        // before it waits for a stage to be released. The wait is needless there, but sanitizers want a whole block to
        // pass it.
        if (lane == 0) {
            bool begun = false;
            prefetch_map(x);
            const Boxes boxes(x);
            const auto same = [](int value) { return value; };
            const auto load = [&](int panel, int which, const Rows& rows, int turn) {
                if (rows.none) return;
                const Share share(rows, (rank + turn) % CLUSTER);
                for (int copy = 0; copy < 2 * share.count - share.kept(); ++copy) {
                    const int top = share.top + (copy < share.count ? copy : copy - share.count) * CHUNK_ROWS;
                    const int low = max(rows.start - top, 0) / BOX * BOX, high = min(rows.stop - top, CHUNK_ROWS);
                    const uint32_t barrier = full + ring.stage * BARRIER;
                    if (!begun && ring.parity != 0) {
                        cluster_wait_alone<CLUSTER>();
                        begun = true;
                    }
                    barrier_wait(empty + ring.stage * BARRIER, ring.parity ^ 1);
                    barrier_expect(barrier, (high - low + BOX - 1) / BOX * BOX * ROW_BYTES);
                    for (int row = low; row < high; row += BOX) {
                        boxes.load(stages + ring.stage * STAGE_BYTES + row * ROW_BYTES, barrier, panel, top + row,
                                   GROUPED ? 0 : which);
                    }
                    ring.advance();
                }
            };
            for_each_item(items, begin, end, offsets, groups, M, same, load);
            if (!begun) cluster_wait_alone<CLUSTER>();
        } else {
            cluster_wait_alone<CLUSTER>();
        }
        __syncwarp();
    } else {
        // Consumers.
        cluster_wait<CLUSTER>();  // the blocks that receive maxima have begun
        const int piece = warp % PIECES, team = TEAMS == 1 ? 0 : warp / PIECES;
        Lane mine(lane / 4, 4 * piece + lane % 4);
        const int scaled = lane / 4 % IN_WORD;  // the column of its word whose scale the lane finds
        // Addresses in a chunk of the first of the rows whose maxima this lane finds, and of 8 of those that it
        // quantizes, in its order. They are kept in registers: the compiler would compute them again for each chunk.
        uint32_t surveyed = lane * ROW_BYTES + (piece ^ lane % 8) * 16, at_row[8];
        forget(surveyed);
#pragma unroll
        for (int i = 0; i < 8; ++i) forget(at_row[i] = mine.at ^ i * (ROW_BYTES + 16));
        forget(mine.turn);
        const bool stores_scales = uniform(rank == 0 && team == 0);
        const auto load_words = [&](uint32_t (&words)[ROWS], int stage) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t row = stages + stage * STAGE_BYTES + at_row[i];
                words[i] = load_shared_word(row);
                words[i + 8] = load_shared_word(row + 8 * ROW_BYTES);
            }
        };
        const auto release = [&](int stage, uint32_t loaded) {
            const uint32_t barrier = once_loaded(empty + stage * BARRIER, loaded, M);
            __syncwarp();
            if (lane == 0) barrier_arrive(barrier);
        };
        const auto same = [](int value) { return uniform(value); };
        const auto quantize = [&](int panel, int which, const Rows& rows, int turn) {
            const Share share(rows, (rank + turn) % CLUSTER);
            uint8_t* const to = data + share.top + mine.group * ROWS +
                                (int64_t(GROUPED ? 0 : which) * N + panel + mine.column) * data_n;
            // Stores those of the lane's 16 rows of a chunk that are the item's, if the column exists.
            const auto store_inside = [&](int chunk, int place, uint4 out) {
                const int row = share.top + chunk * CHUNK_ROWS + mine.group * ROWS;
                if (panel + mine.column + place >= N) return;
                store_some(to + place * data_n + chunk * CHUNK_ROWS, out, rows.start - row, rows.stop - row);
            };
            if (rows.none) {
#pragma unroll 1
                for (int chunk = team; chunk < share.count; chunk += TEAMS) {
                    for (int place = 0; place < IN_WORD; ++place) store_inside(chunk, place, make_uint4(0, 0, 0, 0));
                }
                return;
            }

            // The first whole chunk, which has no rows of another item; the number of whole chunks; the chunks to be
            // loaded again.
            const int first_whole = share.top < rows.start;
            const uint32_t whole =
                max(share.count - first_whole - (share.top + share.count * CHUNK_ROWS > rows.stop), 0);
            const int again = share.count - share.kept();
            const bool comes_again = uniform(again > 0);

            // Hold the first chunks in registers, in the words that this lane quantizes.
            const int held = first_whole || comes_again ? 0 : min(whole, uint32_t(HELD));
            uint32_t words_held[HELD == 0 ? 1 : HELD][ROWS], largest_held = 0;
            Cursor survey(ring, team);
#pragma unroll
            for (int chunk = 0; chunk < HELD; ++chunk) {
                if (chunk >= held) break;
                barrier_wait(full + survey.stage * BARRIER, survey.parity);
                load_words(words_held[chunk], survey.stage);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) largest_held = larger(largest_held, words_held[chunk][i]);
                release(survey.stage, largest_held);
                survey.advance();
            }
            const Cursor behind_held = survey;

            // Find the largest magnitudes of the other chunks, and release those that are loaded again.
            uint32_t amax[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (; survey.index < share.count; survey.advance()) {
                barrier_wait(full + survey.stage * BARRIER, survey.parity);
                const uint32_t row = stages + survey.stage * STAGE_BYTES + surveyed;
                if (uint32_t(survey.index - first_whole) < whole) {
#pragma unroll
                    for (int i = 0; i < CHUNK_ROWS; i += 32) take_larger(amax, load_shared_words(row + i * ROW_BYTES));
                } else {
                    const int top = share.top + survey.index * CHUNK_ROWS;
                    take_some(amax, row, rows.start - top, rows.stop - top);
                }
                if (survey.index < again) release(survey.stage, amax[0] | amax[1] | amax[2] | amax[3]);
            }
            if (comes_again) ring = after(ring, again);

            // Reduce over the lanes, and over all warps of this piece in the cluster; find the scales.
            uint32_t largest = largest_of_word(larger_of(largest_of_lanes(amax), largest_held));
            if constexpr (SENDERS > 1) {
                // A warp that sends for turn t has received what all warps of its piece sent for t - 1. Each of these
                // had read by then what it received for t - 2, and the warp of team 0 had armed that mbarrier again. So
                // a value sent for t overwrites nothing that is still to be read, and counts for t.
                const uint32_t barrier = stages + TOLD + (turn % 2 * PIECES + piece) * BARRIER;
                const uint32_t of_warps = stages + OF_WARPS + (turn % 2 * PIECES + piece) * SENDERS * 16;
                const auto word = [&](int w) { return __uint_as_float(__shfl_sync(~0u, largest, w)); };
                const float4 words = make_float4(word(0), word(1), word(2), word(3));
                if (lane < CLUSTER) send_to_block(of_warps + (rank * TEAMS + team) * 16, barrier, lane, words);
                barrier_wait(barrier, turn / 2 % 2);
                if (team == 0 && lane == 0) barrier_expect(barrier, SENDERS * 16);
#pragma unroll
                for (int word = lane; word < 4 * SENDERS; word += 32) {
                    largest = larger_of(largest, load_shared_word(of_warps + word * 4));
                }
                largest = largest_of_word(largest);
            }
            const Scale found = block_scale<FP8, FORMAT>(__float_as_uint(element(largest, scaled)));
            const int column = panel + mine.column + scaled;
            if (stores_scales && lane < 4 * IN_WORD && column < N) {
                scale[int64_t(which) * scale_lead + column] = found.stored;
            }
            if constexpr (IN_WORD == 2) {
                const float other = __shfl_xor_sync(~0u, found.inverse, 4);
                mine.inverse[0] = scaled == 0 ? found.inverse : other;
                mine.inverse[1] = scaled == 0 ? other : found.inverse;
            } else {
                mine.inverse[0] = found.inverse;
            }

            // Quantize and store: the chunks held in registers, then those in the ring, then those that come again.
            const uint32_t stored_whole = panel + PANEL <= N ? whole : 0;
            const auto store = [&](uint8_t* first, int chunk, uint4 out, uint4 out_second) {
                if (uint32_t(chunk - first_whole) < stored_whole) {
                    store16<Store::NORMAL>(first, out);
                    if (IN_WORD == 2) store16<Store::NORMAL>(first + data_n, out_second);
                } else {
                    store_inside(chunk, 0, out);
                    if (IN_WORD == 2) store_inside(chunk, 1, out_second);
                }
            };
#pragma unroll
            for (int chunk = 0; chunk < HELD; ++chunk) {
                if (chunk >= held) break;
                const uint32_t (&words)[ROWS] = words_held[chunk];
                store(to + chunk * CHUNK_ROWS, chunk, mine.quantized(words, 0), mine.quantized(words, IN_WORD - 1));
            }
            Cursor at = HELD > 0 && !comes_again ? behind_held : Cursor(ring, team);
            uint8_t* next = to + at.index * CHUNK_ROWS;
#pragma unroll 1
            while (at.index < share.count) {
                int chunk = at.index;
                uint8_t* first = next;
                if (comes_again) {
                    chunk += again;
                    if (chunk >= share.count) {
                        chunk -= share.count;
                        barrier_wait(full + at.stage * BARRIER, after(ring, at.index).parity);
                    }
                    first = to + chunk * CHUNK_ROWS;
                }
                uint32_t words[ROWS];
                load_words(words, at.stage);
                const uint4 out = mine.quantized(words, 0), out_second = mine.quantized(words, IN_WORD - 1);
                release(at.stage, out.x | out.y | out.z | out.w);  // bits of all words
                store(first, chunk, out, out_second);
                const int passed = at.index;
                at.advance();
                next += (at.index - passed) * CHUNK_ROWS;
            }
            ring = after(ring, share.count);
        };
        for_each_item(items, begin, end, offsets, groups, M, same, quantize);
    }
    cluster_arrive<CLUSTER>(false);
    cluster_wait<CLUSTER>();  // a block must not end while another may still send it maxima
    if constexpr (PART == Part::SECOND) wait_for_launches();
}
