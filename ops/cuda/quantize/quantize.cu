// Quantizes x (B, M, N) to FP8 in one read and one launch: in blocks of 1 x 128 or 128 x 128 into a row-major matrix, in
// blocks of 128 x 1 or 128 x 128 into a column-major one, or both.
//
// Decomposition. A block of threads has a tile of TILE_M x 128. A thread holds 8 columns, 16 bytes of a 16-bit type, of
// ROWS consecutive rows, so that four rows of a column make one 32-bit word of the column-major output. Half a warp
// spans the 128 columns: maxima of rows are reduced by shuffles, those of columns through shared memory.
//
// Stores. Row-major output is stored from registers. Column-major output is transposed in shared memory and stored in
// lines of 128 bytes.
//
// Shared memory: the transposed tile (128, 128) in FP8, the columns' maxima of each warp, their inverse scales, and the
// maximum of each warp.
//
// Macros: INPUT, FP8 and FORMAT, of the enums Element, Fp8 and Format; BY_ROW and BY_COLUMN, the outputs wanted;
// ROW_SQUARE and COLUMN_SQUARE, the output has blocks of 128 x 128; EVEN, M and N are multiples of the tile (else each
// tile finds out whether it is whole); GIVEN, the type of maxima that come with x, whose largest is that of the whole
// matrix: all its squares have one scale;
// PARTIAL, N is not a multiple of 8; ALIGNED, x loads by 16 bytes; WARPS, ROWS; BLOCKS, resident blocks a
// multiprocessor; GROUP, rows of tiles that are walked together; LOAD and STORE, of the enums of instructions.cuh;
// ROW_BYTES, 8 or 16 bytes a store of a row; SOURCE, of the enum of values.cuh; GROUPED, the rows are tokens of groups,
// and the column-major output holds them spread, each group from a multiple of SPREAD_UNIT on: a tile has tokens of one
// group, followed by zeros up to the next group or the end of the tile.
#include "fp8_tile.cuh"
#include "groups.cuh"
#include "row_scatter.cuh"
#include "values.cuh"

constexpr bool ROW_LINES = BY_ROW && !ROW_SQUARE;  // one scale for 128 columns of a row
constexpr bool COLUMN_LINES = BY_COLUMN && !COLUMN_SQUARE;  // one scale for 128 rows of a column
constexpr bool SQUARE = ROW_SQUARE || COLUMN_SQUARE;  // one scale for the tile

static_assert(TILE_M == 128 || (!BY_COLUMN && !SQUARE), "a tile is one block high");
static_assert((BY_ROW || !ROW_SQUARE) && (BY_COLUMN || !COLUMN_SQUARE), "the blocks are those of an output");
static_assert(!GROUPED || (BY_COLUMN && !ROW_SQUARE && !EVEN), "tokens of groups are quantized along the tokens");

// Whether the matrix has one scale, of the largest of the maxima that are given.
constexpr bool ONE_SCALE = GIVEN != Element::NONE;
static_assert(!ONE_SCALE || (SQUARE && !ROW_LINES && !COLUMN_LINES), "the scale of a matrix serves rows and columns");

// Whether whole tiles have code of their own; not where both versions would need more registers than a thread has.
constexpr bool WHOLE_APART = SIXTEEN_BITS || SOURCE != Source::SILU_MUL_GRAD;

using Scale = BlockScale<FORMAT>;
using Stored = StoredScale<FORMAT>::type;

struct Shared {
    uint4 turned[BY_COLUMN ? TILE_N : 1][LINE / PIECE];  // the transposed tile, pieces of a column swizzled
    uint32_t amax[COLUMN_LINES ? WARPS : 1][TILE_N];
    float inverse[TILE_N];
    uint32_t warp_amax[SQUARE ? WARPS : 1];
};

// Orders tiles in bands of GROUP rows of tiles, each walked column by column: blocks that run together read long parts
// of rows and write long parts of columns.
INLINE void place_block(int& block_m, int& block_n) {
    if constexpr (GROUP == 1) {
        block_m = blockIdx.y;
        block_n = blockIdx.x;
        // The gradients of gate and up come from the same tiles: the second block finds them in the L2.
        if (SOURCE == Source::SILU_MUL_GRAD && gridDim.x % 2 == 0) {
            block_n = block_n / 2 + (block_n % 2) * (gridDim.x / 2);
        }
    } else {
        const uint32_t index = blockIdx.y * gridDim.x + blockIdx.x, band = GROUP * gridDim.x;
        const uint32_t first = index / band * GROUP, within = index % band;
        const uint32_t rows = min(gridDim.y - first, uint32_t(GROUP));
        block_m = first + within % rows;
        block_n = within / rows;
    }
    // The launch before has read or written x from its first row on: the last rows are still in the L2.
    if constexpr (ONE_SCALE) block_m = gridDim.y - 1 - block_m;
}

// The rows of x in a tile: from `first` to `stop` or the end of the tile. In the column-major output they begin at row
// `place`, and nothing is written from row `limit` on. `none`: the rows are past the last group.
struct Rows {
    int first, stop, place, limit;
    bool none;
};

#if GROUPED
INLINE Rows rows_of(int block, int lane, const int* offsets, int groups, int M) {
    // Finds the last group that begins in this block or before. The rows past all groups count as one more group where
    // rows are stored. The ends are loaded beside the beginnings: no load depends on another one.
    uint32_t found = 0;
    int start = 0, stop = 0;
    for (int group = lane; group < groups + BY_ROW; group += 32) {
        const int begins = group == 0 ? 0 : Group::end_of(offsets[group - 1], 0, M);
        const int ends = group == groups ? M : Group::end_of(offsets[group], 0, M);
        if (Spread::first_block(begins, group) <= block) found = group, start = begins, stop = ends;
    }
    const int group = __reduce_max_sync(~0u, found);
    start = __shfl_sync(~0u, start, group % 32);
    stop = __shfl_sync(~0u, stop, group % 32);
    const int first = start + TILE_M * (block - Spread::first_block(start, group));
    // Up to the next group's rows; the tiles of the last group write all that is left.
    const int limit = Spread::first_row(group == groups - 1 && !BY_ROW ? M : stop, group + 1);
    return {first, stop, Spread::first_row(first, group), min(limit, Spread::first_row(M, groups)), group == groups};
}
#endif

// Stores the tile column-major, each column scaled by its own inverse scale. All threads call it; `idle` ones have no
// rows. With groups, the first `tokens` rows are the group's, and zeros follow.
template <bool WHOLE, typename Values>
INLINE void store_columns(const Values& values, const float (&inverse)[8], Shared& shared, uint8_t* out, int col_n,
                          Place at, int tile_m, int tile_n, int M, int N, bool idle = false,
                          [[maybe_unused]] int tokens = TILE_M) {
    if (!idle) turn<FP8>(values, inverse, shared.turned, at);
    __syncthreads();
    store_turned<WHOLE, GROUPED>(shared.turned, out, col_n, tile_m, tile_n, M, N, tokens);
}

// The largest of the thread's share of the magnitudes that are given, as the bits of a float32.
INLINE uint32_t given_amax(const void* amax, int64_t first, int count) {
    uint32_t largest = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float value;
        if constexpr (GIVEN == Element::FP32) {
            value = __ldg(static_cast<const float*>(amax) + first + i);
        } else {
            value = Octet::to_float(__ldg(static_cast<const uint16_t*>(amax) + first + i), false);
        }
        largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
    }
    return largest;
}

// The inputs of one matrix of a batch, from row `first_row` on, and its outputs: see the kernel's parameters.
struct In {
    const void *x, *other;
    const float* rstd;
    int64_t first_row;
    int M, N, x_m, other_m;
    const void* amax;
    int64_t first_amax;
    int amax_count;
};
struct Out {
    uint8_t* row_data;
    Stored* row_scale;
    uint8_t* col_data;
    Stored* col_scale;
    int row_m, row_scale_lead, col_n, col_scale_lead;
};

// Quantizes one tile. A WHOLE tile has all its rows and columns in the matrix, and all its rows in one group. In any
// other tile each access checks the edges, which takes 1.7 times the instructions.
template <bool WHOLE>
INLINE void quantize_tile(const In& in, const Out& out, int block_m, int block_n, const Rows& rows, Shared& shared,
                          int height) {
    // The compiler branches as a warp where it knows that a value is the same in all lanes.
    const int lane = threadIdx.x % 32, warp = WHOLE ? threadIdx.x / 32 : __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int tile_m = block_m * TILE_M, tile_n = block_n * TILE_N;
    Place at;
    at.octet = (lane & 7) | (lane & 16) >> 1;
    at.group = 2 * warp + (lane & OTHER_ROWS) / OTHER_ROWS;
    at.row = rows.first + ROWS * at.group;
    at.column = tile_n + 8 * at.octet;
    // In tiles of few tokens, as small groups end with, only the warps that have tokens work.
    const bool idle = !WHOLE && GROUPED && rows.first + 2 * ROWS * warp >= rows.stop;
    const bool none = !WHOLE && rows.none;

    auto values = load_values<WHOLE>(in.x, in.other, in.rstd, in.first_row, at.row, at.column, rows.stop, in.N, in.x_m,
                                     in.other_m);

    // Find the maxima that warps exchange through shared memory.
    if constexpr (SQUARE) {
        uint32_t of_thread;
        if constexpr (ONE_SCALE) {
            of_thread = given_amax(in.amax, in.first_amax, in.amax_count);
        } else {
            of_thread = none ? 0 : values.amax();
        }
        const uint32_t amax = __reduce_max_sync(~0u, of_thread);
        if (lane == 0) shared.warp_amax[warp] = amax;
        if constexpr (ROW_LINES || COLUMN_LINES) values.pack_again();
    }
    if (COLUMN_LINES && !idle) {
        uint32_t amax[8];
        values.column_amax(amax);
        if (none) {
#pragma unroll
            for (int c = 0; c < 8; ++c) amax[c] = 0;
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) amax[c] = max(amax[c], __shfl_xor_sync(~0u, amax[c], OTHER_ROWS));
        const bool upper = lane & OTHER_ROWS;
        *reinterpret_cast<uint4*>(&shared.amax[warp][8 * at.octet + (upper ? 4 : 0)]) =
            upper ? make_uint4(amax[4], amax[5], amax[6], amax[7]) : make_uint4(amax[0], amax[1], amax[2], amax[3]);
        values.pack_again();
    } else if (COLUMN_LINES) {
        *reinterpret_cast<uint4*>(&shared.amax[warp][4 * lane]) = make_uint4(0, 0, 0, 0);
    }

    // Store rows that have scales of their own, while other warps are still reading.
    if (ROW_LINES && !idle) {
        uint32_t amax[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) amax[r] = values.row_amax(r);
        int row;
        const Scale scale = block_scale<FP8, FORMAT>(scatter_max(amax, ROW_LANES, lane, row));
        if (leads_item<ROWS>(lane, ROW_LANES) && (WHOLE || at.row + row < rows.stop)) {
            out.row_scale[int64_t(block_n) * out.row_scale_lead + at.row + row] = scale.stored;
        }
        const auto inverse = [&](int r) {
            return __shfl_sync(~0u, scale.inverse, (lane & OTHER_ROWS) | lane_of_item<ROWS>(r, ROW_LANES));
        };
        store_rows<WHOLE, FP8>(values, inverse, out.row_data, out.row_m, at, rows.stop, in.N);
        values.pack_again();
    }

    // Find the scale of the square, and store rows that have it.
    [[maybe_unused]] Scale of_square{};
    if constexpr (SQUARE) {
        __syncthreads();
        uint32_t largest = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = max(largest, shared.warp_amax[w]);
        of_square = block_scale<FP8, FORMAT>(largest);
        const bool has_scale = ONE_SCALE ? block_m == 0 && block_n == 0 : !GROUPED || tile_m < height;
        if (threadIdx.x == 0 && has_scale) {
            if (ROW_SQUARE) out.row_scale[int64_t(block_m) * out.row_scale_lead + block_n] = of_square.stored;
            if (COLUMN_SQUARE) out.col_scale[int64_t(block_n) * out.col_scale_lead + block_m] = of_square.stored;
        }
        values.pack_again();
        if constexpr (ROW_SQUARE) {
            const auto inverse = [&](int) { return of_square.inverse; };
            store_rows<WHOLE, FP8>(values, inverse, out.row_data, out.row_m, at, rows.stop, in.N);
            values.pack_again();
        }
    }

    if constexpr (BY_COLUMN) {
        float inverse[8];
        if (none) values.clear();
        if constexpr (COLUMN_SQUARE) {
#pragma unroll
            for (int c = 0; c < 8; ++c) inverse[c] = of_square.inverse;
        } else {
            if constexpr (!SQUARE) __syncthreads();
            if (threadIdx.x < TILE_N) {
                uint32_t largest = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) largest = max(largest, shared.amax[w][threadIdx.x]);
                const Scale scale = block_scale<FP8, FORMAT>(largest);
                shared.inverse[threadIdx.x] = scale.inverse;
                if (WHOLE || (tile_n + threadIdx.x < in.N && tile_m < height)) {
                    out.col_scale[int64_t(block_m) * out.col_scale_lead + tile_n + threadIdx.x] = scale.stored;
                }
            }
            __syncthreads();
#pragma unroll
            for (int c = 0; c < 8; ++c) inverse[c] = shared.inverse[8 * at.octet + c];
        }
        store_columns<WHOLE>(values, inverse, shared, out.col_data, out.col_n, at, rows.place, tile_n, rows.limit, in.N,
                             idle, rows.stop - rows.first);
    }
}

// Row-major data has strides (row_m, 1), column-major data (1, col_n). Scales of rows have strides (1, row_scale_lead),
// scales of columns (col_scale_lead, 1); scales of squares those of their data. Matrices of a batch are M * x_m apart,
// and each has `amax_count` of the maxima that are given.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantize(const void* x, const void* other, const float* rstd, uint8_t* row_data, Stored* row_scale,
             uint8_t* col_data, Stored* col_scale, const int* offsets, int M, int N, int x_m, int other_m, int row_m,
             int row_scale_lead, int col_n, int col_scale_lead, int groups, const void* amax, int amax_count) {
    __shared__ Shared shared;
    int block_m, block_n;
    place_block(block_m, block_n);
    Rows rows{block_m * TILE_M, M, block_m * TILE_M, M, false};
    int height = M;  // end of the rows whose columns have scales
#if GROUPED
    rows = rows_of(block_m, threadIdx.x % 32, offsets, groups, M);
    height = TILE_M * Spread::first_block(M, groups);
#endif

    const int64_t batch = blockIdx.z;
    const int64_t blocks_m = ONE_SCALE ? 1 : (M + 127) / 128, blocks_n = ONE_SCALE ? 1 : (N + 127) / 128;
    const In in{x, other, rstd, batch * M, M, N, x_m, other_m, amax, batch * amax_count, amax_count};
    Out out{row_data, row_scale, col_data, col_scale, row_m, row_scale_lead, col_n, col_scale_lead};
    if (BY_ROW) {
        out.row_data += batch * M * row_m;
        out.row_scale += batch * (ROW_SQUARE ? blocks_m : blocks_n) * row_scale_lead;
    }
    if (BY_COLUMN) {
        out.col_data += batch * N * col_n;
        out.col_scale += batch * (COLUMN_SQUARE ? blocks_n : blocks_m) * col_scale_lead;
    }

    const bool whole = !rows.none && rows.stop - rows.first >= TILE_M && block_n < N / TILE_N;
    if (EVEN || (WHOLE_APART && __all_sync(~0u, whole))) {
        quantize_tile<true>(in, out, block_m, block_n, rows, shared, height);
    } else {
        quantize_tile<false>(in, out, block_m, block_n, rows, shared, height);
    }
}
