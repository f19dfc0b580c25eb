// The tile scheduler: which output tiles a block computes, one after the other, of one matrix, a batch, or groups of
// tokens.
//
// Macros: those of scaled_mm.cu. GROUPED is DENSE; JAGGED_M: rows of a and out are tokens, and the tokens of group g
// are multiplied by matrix g of b; JAGGED_K: the product sums over the tokens, which are spread, and group g gives
// matrix g of out, where a group begins at a multiple of SPREAD_UNIT rows; or MASKED: a batch, of which only the first
// rows of each matrix are multiplied, as many as its count says. With ZEROS the other rows of out are written too.
#pragma once
#include "hopper.cuh"
#include "groups.cuh"

constexpr int PAIR_M = SHARE_B ? CLUSTER : 1, PAIR_N = SHARE_B ? 1 : CLUSTER;
static_assert(GROUPED == DENSE || CLUSTER == 1, "neighbours of a cluster may lie in two groups");

// For JAGGED_M, JAGGED_K and MASKED `batches` is the number of groups; for JAGGED_K, K is the extent of the spread
// tokens.
struct Problem {
    int M, N, K, batches;

    INLINE int tiles_m() const { return (M + BM * PAIR_M - 1) / (BM * PAIR_M); }
    INLINE int tiles_n() const { return (N + BN * PAIR_N - 1) / (BN * PAIR_N); }
    INLINE int tiles() const { return tiles_m() * tiles_n() * batches; }
};

// Bytes of a tile in shared memory.
constexpr int TILE_BYTES = 32;

// An output tile, and the K tiles that a block computes of it.
struct Tile {
    int m, n, batch, k_start, k_stop;

    // What comes after the last tile.
    static INLINE Tile none() {
        Tile tile = {};
        tile.k_stop = -1;
        return tile;
    }
    INLINE bool exists() const { return k_stop >= 0; }
    INLINE bool is_multiplied() const { return k_stop > k_start; }

    // To and from an address in shared memory: all that consumers read. `more` is what only groups of a kind have.
    INLINE void put(uint32_t to) const {
        store_shared(to, make_uint4(m, n, batch, k_start));
        store_shared(to + 16, make_uint2(k_stop, more()));
    }
    static INLINE Tile at(uint32_t from) {
        const uint4 words = load_shared_words(from);
        Tile tile = {};
        tile.m = words.x, tile.n = words.y, tile.batch = words.z, tile.k_start = words.w;
        tile.k_stop = load_shared_word(from + 16);
        tile.set_more(load_shared_word(from + 20));
        return tile;
    }
#if GROUPED == JAGGED_M
    int stop;  // the row after the group's last
    INLINE int row_stop(const Problem&) const { return stop; }
    INLINE int layer() const { return 0; }
    INLINE int more() const { return stop; }
    INLINE void set_more(int value) { stop = value; }
#else
    INLINE int row_stop(const Problem& problem) const { return problem.M; }
    INLINE int layer() const { return batch; }
#endif
#if GROUPED == MASKED
    int count;  // of rows that are multiplied, in the tile's matrix; 0 in a tile of other rows
    INLINE bool keeps(int row) const { return row < count; }
    INLINE int more() const { return count; }
    INLINE void set_more(int value) { count = value; }
#else
    INLINE bool keeps(int) const { return true; }
#endif
#if GROUPED == DENSE
    INLINE int more() const { return 0; }
    INLINE void set_more(int) {}
#endif
#if GROUPED == JAGGED_K
    int shift;  // of the group's first row, from where it would be if all groups filled whole K tiles
    int units;  // parts of 32 rows in a partial last K tile, else 0: after them come zeros or the next group
    INLINE int more() const { return units; }
    INLINE void set_more(int value) { units = value; }
    INLINE int row_of(int k) const { return k * BK + shift; }
    INLINE int whole_stop() const { return k_stop - (units > 0); }
#else
    INLINE int row_of(int k) const { return k * BK; }
    INLINE int whole_stop() const { return k_stop; }
#endif

    // Sets m and n of tile `index` among `tiles_m` x `tiles_n`. Tiles are ordered for reuse in the L2: a band of about
    // GROUP rows of tiles at a time, column by column. All bands are as high, to within a row: a last one of a few rows
    // would read all of b for them.
    INLINE void place(int index, int tiles_m, int tiles_n) {
        if constexpr (B_ONCE) {  // one or two rows of tiles; the first load waits for this
            m = index & tiles_m - 1;
            n = index >> tiles_m - 1;
        } else {
            const int bands = max(1, (tiles_m + GROUP / 2) / GROUP);
            const int low = tiles_m / bands, higher = tiles_m % bands * (low + 1);  // rows of tiles in higher bands
            const bool high = index < higher * tiles_n;
            const int height = low + high, before = high ? 0 : higher;
            index -= before * tiles_n;
            m = before + index / (height * tiles_n) * height;
            index %= height * tiles_n;
            m += index % height;
            n = index / height;
        }
        if constexpr (CLUSTER > 1) {
            m = SHARE_B ? m * CLUSTER + cluster_rank() : m;
            n = SHARE_B ? n : n * CLUSTER + cluster_rank();
        }
        m *= BM;
        n *= BN;
    }
};

#if GROUPED == MASKED
// Rows `start` to `stop` of one expert's matrix. Groups are the experts, each with the rows before its count, and then,
// with ZEROS, the experts again, each with the tiles that hold none of these rows. So the blocks share first the tiles
// that are multiplied, and then those that are only written. Counts below 0 or above `rows` cause no access out of
// bounds.
struct Counted {
    int group, start, stop;

    INLINE Counted(const int* counts, int rows) : group(0), start(0), stop(within(counts[0], rows)) {}

    // Moves to the next group, of twice as many as there are `experts`.
    INLINE void advance(const int* counts, int experts, int rows) {
        ++group;
        const bool multiplied = group < experts;
        const int count = within(counts[multiplied ? group : group - experts], rows);
        start = multiplied ? 0 : min((count + BM - 1) / BM * BM, rows);
        stop = multiplied ? count : rows;
    }

    static INLINE int within(int count, int rows) { return min(max(count, 0), rows); }
};
#endif

#if GROUPED == JAGGED_M || GROUPED == MASKED
struct Walk {
    const Problem& problem;
    const int* offsets;
#if GROUPED == MASKED
    Counted group;
    INLINE int last() const { return (ZEROS ? 2 : 1) * problem.batches - 1; }
#else
    Group group;
    INLINE int last() const { return problem.batches; }
#endif
    int before = 0;  // number of tiles of the groups before
    int all = 0;

    INLINE Walk(const Problem& problem, const int* offsets)
        : problem(problem), offsets(offsets), group(offsets, problem.M) {}

    INLINE int tiles_m() const { return (group.stop - group.start + BM - 1) / BM; }

    // Whether tile `index` exists. Where `index` is less than the one before, the walk may begin anew.
    INLINE bool reaches(int index) {
        if (index < before) {
            before = 0;
#if GROUPED == MASKED
            group = Counted(offsets, problem.M);
#else
            group = Group(offsets, problem.M);
#endif
        }
        for (int tiles; index >= before + (tiles = tiles_m() * problem.tiles_n());) {
            if (group.group == last()) {
                all = before + tiles;
                return false;
            }
            before += tiles;
            group.advance(offsets, problem.batches, problem.M);
        }
        return true;
    }

    // The number of tiles, once one was not reached.
    INLINE int tiles() const { return all; }

    INLINE Tile at(int index) const {
        Tile tile;
        tile.place(index - before, tiles_m(), problem.tiles_n());
        const bool multiplied = group.group < problem.batches;
        tile.m += group.start;
#if GROUPED == MASKED
        tile.count = multiplied ? group.stop : 0;
        tile.batch = multiplied ? group.group : group.group - problem.batches;
#else
        tile.stop = group.stop;
        tile.batch = group.group;
#endif
        tile.k_start = 0;
        tile.k_stop = multiplied ? (problem.K + BK - 1) / BK : 0;
        return tile;
    }
};
#else
struct Walk {
    const Problem& problem;
    const int* offsets;

    INLINE Walk(const Problem& problem, const int* offsets) : problem(problem), offsets(offsets) {}

    INLINE bool reaches(int index) const { return index < problem.tiles(); }
    INLINE int tiles() const { return problem.tiles(); }

    INLINE Tile at(int index) const {
        Tile tile;
        const int tiles_m = problem.tiles_m(), tiles_n = problem.tiles_n();
        tile.batch = B_ONCE && problem.batches == 1 ? 0 : index / (tiles_m * tiles_n);
        tile.place(index - tile.batch * (tiles_m * tiles_n), tiles_m, tiles_n);
#if GROUPED == JAGGED_K
        const int tokens = problem.K - SPREAD_UNIT * (problem.batches - 1) - 1;  // the most tokens that K rows can hold
        const int start = tile.batch ? Group::end_of(offsets[tile.batch - 1], 0, tokens) : 0;
        const int stop = Group::end_of(offsets[tile.batch], start, tokens);
        tile.k_start = Spread::first_block(start, tile.batch);
        tile.k_stop = tile.k_start + (stop - start + BK - 1) / BK;
        tile.shift = Spread::first_row(start, tile.batch) - tile.k_start * BK;
        tile.units = (stop - start + 31) / 32 % (BK / 32);
#else
        const int blocks = (problem.K + BK - 1) / BK;
        const int part = SPLIT > 1 ? cluster_rank() : 0;
        tile.k_start = blocks * part / SPLIT;
        tile.k_stop = blocks * (part + 1) / SPLIT;
#endif
        return tile;
    }
};
#endif
