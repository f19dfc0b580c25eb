// The scaled product on Hopper: out (M, N) = a (M, K) · b (N, K)ᵀ in FP8, promoted to float32 after every K tile.
//
// Decomposition. The grid is persistent: each block, or cluster of blocks, walks over output tiles of BM x BN
// (`tiles.cuh`), and takes over tiles of those that start late (`deal.cuh`). A block has one producer warpgroup and MATH
// consumer warpgroups. A consumer owns SLICES_M x 64 rows of the tile and computes SLICES_N products of WIDTH columns
// for each K tile of BK = 128, one wgmma group each.
//
// Pipeline. The producer keeps STAGES K tiles in flight by TMA: A and B, swizzled as wgmma reads them, and the scales
// of the K tile. Where 128 columns of B, or 128 rows of A, have one scale, one more producer warp copies the scales of
// 32 K tiles at a time. Consumers release a stage when they have read it. A further producer warp finds the tiles for
// the consumers: they would divide six times between two tiles, while the tensor core waits.
//
// Promotion. A product goes into the temporary `d`, and `scale * d` is added to the accumulators: the tensor core's own
// accumulator keeps about 14 bits, and scales change from K tile to K tile. With DEPTH 2 there are two temporaries: one
// is promoted while the other is computed. With DEPTH 0 there is none: where no scale changes along K, all of K may stay
// in the tensor core's accumulator, and nothing is promoted.
//
// Turns. Warpgroups that start their products together also promote together, and the tensor core idles meanwhile. With
// IN_TURNS they start in order, one after the other, so that one promotes while the others' products run.
//
// Early starts. Where a tile has two products, whose epilogue is long, and scales change along K, the next tile's first
// product starts before it.
//
// Parts. With PARTS, A is the sum of so many matrices in FP8, one behind the other: 16-bit rows that `split_rows.cu` has
// split. The launch overlaps with that one: it loads B before it waits. Each part is one more product with the same K
// tile of B, onto the same sums. With BESIDE, further weights are multiplied by the same A, each with its bias, into its
// own output: their tiles come after those of B, and a tile's `batch` is the number of its weight.
//
// Variants. With CLUSTER 2, two blocks share the loads of B by multicast (SHARE_B: one lies above the other in M), or
// the loads of A (the two lie side by side in N). With few rows B is read once (B_ONCE): its lines are evicted from the
// L2 first, before dirty lines, which would have to be written back to make room. With few tiles the SPLIT blocks of a
// cluster share K: each block owns some rows of the tile, receives the other blocks' sums of these rows, adds them in
// the order of K and stores them.
//
// Shared memory: A (STAGES, PARTS, BM, BK), B (STAGES, BN, BK), output buffers or received sums, scales of A, scales of B,
// tiles, the mbarriers, and the ring of tiles' numbers. The AT_... constants are the offsets.
//
// Macros:
//   A_TYPE, B_TYPE    the types of the operands, which only the generated `wgmma` reads
//   MATH, SLICES_M, SLICES_N, BN, DEPTH, STAGES, GROUP (rows of tiles that are walked together)
//   CLUSTER, SHARE_B, SPLIT, B_ONCE, PARTS, BESIDE (0, 1, 2)
//   A_SCALE, B_SCALE  WHOLE, LINE, VECTOR or BLOCK (`scale_kinds.cuh`)
//   PROMOTE           K tiles a promotion, where no scale changes along K
//   TURNS             whether warpgroups may take turns
//   OUT, BIAS         of the enum Element; OUT_VIA: PAIRS, LINES or BULK
//   GROUPED           DENSE, JAGGED_M, JAGGED_K or MASKED (`tiles.cuh`); JAGGED_K needs SPREAD_UNIT, MASKED needs ZEROS
//
// GROUPED and OUT_VIA are numbers of the preprocessor, as A_SCALE and B_SCALE are.
#include "hopper.cuh"
#include "convert.cuh"
#include "groups.cuh"
#include "overlap.cuh"
#include "scale_kinds.cuh"

// How a tile is stored: PAIRS, two values of a thread at a time; LINES, through shared memory, 16 bytes of a row at a
// time; BULK, through shared memory and by TMA, while the next tile is computed.
#define PAIRS 0
#define LINES 1
#define BULK 2

constexpr int BK = 128;
constexpr int WARPGROUP = 128;
constexpr int ROWS = 64 * SLICES_M;  // of the tile, which one warpgroup owns
constexpr int BM = ROWS * MATH;
constexpr int WIDTH = BN / SLICES_N;  // columns of one product
constexpr int PRODUCTS = SLICES_M * SLICES_N;  // of a warpgroup for each K tile
constexpr bool SCALED = A_SCALE >= VECTOR || B_SCALE >= VECTOR;  // scales change along K
static_assert(!B_ONCE || CLUSTER == 1, "loads of a cluster have no policy");
static_assert(SPLIT == 1 || (CLUSTER == 1 && SLICES_M == 1 && OUT_VIA != BULK && !GROUPED),
              "a cluster shares loads or K");
static_assert(GROUPED != JAGGED_K || (A_SCALE >= VECTOR && B_SCALE >= VECTOR),
              "tokens that are summed over are spread");
static_assert(A_SCALE != BLOCK || (SLICES_M == 1 && GROUPED != JAGGED_M),
              "the 64 rows of a warpgroup lie in one block of A");
static_assert(DEPTH < 2 || PRODUCTS == 1, "two temporaries alternate, with one product a K tile");
static_assert(DEPTH > 0 || !SCALED, "a scale that changes along K is applied to a temporary");
static_assert(!BESIDE || (PARTS > 1 && OUT_VIA != BULK), "outputs are addresses");
static_assert(PARTS == 1 || (CLUSTER == 1 && A_SCALE == VECTOR && (GROUPED == DENSE || GROUPED == JAGGED_M)),
              "rows that were split have scales");

// Where turns may be faster: a promotion by scales of rows and of columns lasts too long for them. With three warpgroups
// and scales along K they are on an H100, and slower on an H200: tables say TURNS 0.
constexpr bool IN_TURNS = TURNS && SPLIT == 1 && !B_ONCE && !(A_SCALE == VECTOR && B_SCALE == VECTOR) &&
                          (MATH == 3 || (MATH == 2 && SCALED && DEPTH == 2));

// Where an early start was measured to be faster (H100): 4 to 9 %, and not where three warpgroups take turns. Without
// scales along K it would spill registers, and the compiler would wait for the product before the epilogue.
constexpr bool EARLY =
    DEPTH == 1 && PRODUCTS == 2 && SPLIT == 1 && !B_ONCE && OUT_VIA != PAIRS && SCALED && GROUPED != JAGGED_K;

// Columns that have one scale of B's 128 x 128 blocks: output tiles need not start at a multiple of 128.
constexpr int COLUMN_CHUNK = BN % 128 == 0 ? 128 : BN % 64 == 0 ? 64 : BN % 32 == 0 ? 32 : 16;
constexpr int COLUMN_CHUNKS = BN / COLUMN_CHUNK;

#include "deal.cuh"
#include "tiles.cuh"

constexpr int A_BYTES = PARTS * BM * BK;
constexpr int B_BYTES = BN * BK;
// TMA loads of scales begin at multiples of 16 bytes, while a group of rows may begin anywhere: 4 scales more are
// loaded.
constexpr int A_SCALE_EXTRA = GROUPED == JAGGED_M ? 4 : 0;
constexpr int A_SCALE_BYTES = A_SCALE == VECTOR ? (BM + A_SCALE_EXTRA) * 4 : 0;
constexpr int B_SCALE_BYTES = B_SCALE == VECTOR ? BN * 4 : 0;
// The scales of 128 x 128 blocks have a ring of their own, filled in runs: a run holds, for each column chunk of B and
// for the 64 rows of A of each warpgroup, the scales of as many K tiles as a warp has lanes. Each lane loads one scale
// of the run and then releases the run's place, so that the next run is written after all reads.
constexpr int RUN = 32;
constexpr int RUN_COLUMNS = B_SCALE == BLOCK ? COLUMN_CHUNKS : 0;
constexpr int RUN_LINES = RUN_COLUMNS + (A_SCALE == BLOCK ? MATH : 0);
constexpr int RUNS = RUN_LINES > 0 ? 2 : 0;
constexpr int RUN_BYTES = RUN_LINES * RUN * 4;
// Lines of a run, from the FIRST on, one for each CHUNK of an operand's columns or rows.
struct RunsOfB {
    static constexpr bool IS_A = false;
    static constexpr int FIRST = 0, COUNT = COLUMN_CHUNKS, CHUNK = COLUMN_CHUNK;
};
struct RunsOfA {
    static constexpr bool IS_A = true;
    static constexpr int FIRST = RUN_COLUMNS, COUNT = MATH, CHUNK = ROWS;
};
// Whether a warp shuffles these scales while the product runs or before it starts: whichever was measured to be faster.
constexpr bool EXCHANGE_LATE = DEPTH == 2 || MATH == 3;
// Operands start at multiples of 1024 bytes, as the swizzle asks, and scales at multiples of 128 bytes.
constexpr int A_SCALE_PITCH = (A_SCALE_BYTES + 127) / 128 * 128;
constexpr int B_SCALE_PITCH = (B_SCALE_BYTES + 127) / 128 * 128;
constexpr int OUT_BUFFER = 64 * 128;  // 64 rows of 128 bytes
constexpr int OUT_BUFFERS = OUT_VIA == PAIRS ? 0 : OUT_CHUNKS;
// Whether a warpgroup's whole output has buffers: then its bulk stores start together, after one barrier.
[[maybe_unused]] constexpr bool STORED_AT_ONCE = OUT_VIA == BULK && SLICES_M == 1 && OUT_BUFFERS >= (BN + 63) / 64;
// Bulk stores that may still be reading when a row's first 64 columns are put into their buffer. With an odd number of
// buffers the last store of the row before used the same buffer.
[[maybe_unused]] constexpr int PENDING_AT_FIRST = (BN + 63) / 64 % OUT_CHUNKS == 0 ? OUT_BUFFERS - 1 : 0;

constexpr int AT_B = STAGES * A_BYTES;
constexpr int AT_OUT = AT_B + STAGES * B_BYTES;
// Sums that this block receives from the blocks that share K with it: for each 16 rows, in the order in which the lanes
// of a warp hold them, 16 bytes of a lane for every 8 columns.
constexpr int OWN_ROWS = BM / SPLIT;
constexpr int SUMS_BYTES = (SPLIT - 1) * OWN_ROWS * BN * 4;
static_assert(OWN_ROWS % 16 == 0, "rows of a warp have one owner");
// With SPLIT a warp stages its output where its sums arrived.
constexpr int AT_SUMS = AT_OUT + (SPLIT > 1 ? 0 : MATH * OUT_BUFFERS * OUT_BUFFER);
constexpr int AT_A_SCALE = AT_SUMS + SUMS_BYTES;
constexpr int AT_B_SCALE = AT_A_SCALE + STAGES * A_SCALE_PITCH;
constexpr int AT_RUN = AT_B_SCALE + STAGES * B_SCALE_PITCH;
// A ring of tiles: a tile of one K tile is multiplied before the next one has gone from warp to warp.
constexpr int TILES = 4;
constexpr int AT_TILE = AT_RUN + RUNS * RUN_BYTES;
constexpr int AT_FULL = AT_TILE + TILES * TILE_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_RUN_FULL = AT_EMPTY + STAGES * 8;
constexpr int AT_RUN_EMPTY = AT_RUN_FULL + RUNS * 8;
constexpr int AT_TILE_FULL = AT_RUN_EMPTY + RUNS * 8;
constexpr int AT_TILE_EMPTY = AT_TILE_FULL + TILES * 8;
constexpr int AT_DEAL = AT_TILE_EMPTY + TILES * 8;
constexpr int AT_ARRIVED = AT_DEAL + DEAL_BYTES;

#if A_SCALE == VECTOR
using AScale = TensorMap;
#else
using AScale = const float*;
#endif
#if B_SCALE == VECTOR
using BScale = TensorMap;
#else
using BScale = const float*;
#endif
#if OUT_VIA == BULK
using Out = TensorMap;
#else
using Out = OutType*;
#endif
#if OUT_VIA == BULK
#define OUT_ROWS out_rows
#else
#define OUT_ROWS OF_WEIGHT(out, tile)
#endif
#if GROUPED
using Offsets = const int*;
using OutRows = OutType*;
#define GROUP_PARAMETERS , Offsets offsets, OutRows out_rows
#else
#define GROUP_PARAMETERS
constexpr const int* offsets = nullptr;
#endif

using Bias = const BiasType*;
#define MAP const __grid_constant__ TensorMap
#define SCALES const __grid_constant__ BScale
#if BESIDE > 0
#define SECOND_WEIGHT , MAP b_second, SCALES b_scale_second, Bias bias_second, Out out_second, int columns_second
#else
#define SECOND_WEIGHT
#endif
#if BESIDE > 1
#define THIRD_WEIGHT , MAP b_third, SCALES b_scale_third, Bias bias_third, Out out_third, int columns_third
#else
#define THIRD_WEIGHT
#endif
// The parameter NAME of the weight that a tile multiplies.
#if BESIDE > 1
#define OF_WEIGHT(NAME, TILE) ((TILE).batch == 0 ? NAME : (TILE).batch == 1 ? NAME##_second : NAME##_third)
#elif BESIDE > 0
#define OF_WEIGHT(NAME, TILE) ((TILE).batch == 0 ? NAME : NAME##_second)
#else
#define OF_WEIGHT(NAME, TILE) NAME
#endif

#if A_SCALE == BLOCK
#define BLOCK_PARAMETERS , int as_m, int as_k
#else
#define BLOCK_PARAMETERS
#endif

#define CLUSTER_BLOCKS (CLUSTER * SPLIT)
#if CLUSTER_BLOCKS > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#else
#define CLUSTER_DIMS
#endif

// Whether the launch may have counters (`deal.cuh`). Few rows, or a cluster that shares K, have few tiles; those of some
// groups have few K tiles or none. Before the wait for the rows to be split, nothing is drawn.
constexpr bool DEALT = SPLIT == 1 && !B_ONCE && PARTS == 1 && (GROUPED == DENSE || GROUPED == JAGGED_M);

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__((MATH + 1) * WARPGROUP, 1)
    scaled_mm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ Out out,
              const __grid_constant__ AScale a_scale, const __grid_constant__ BScale b_scale, const BiasType* bias,
              const Problem problem, int* counters, int a_batched, int b_batched, int out_m, int as_batch, int bs_batch,
              int bs_n, int bs_k SECOND_WEIGHT THIRD_WEIGHT BLOCK_PARAMETERS GROUP_PARAMETERS) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    if constexpr (PARTS > 1) let_next_begin();
    auto full = [&](int stage) { return base + AT_FULL + stage * 8; };
    auto empty = [&](int stage) { return base + AT_EMPTY + stage * 8; };
    [[maybe_unused]] auto full_run = [&](int run) { return base + AT_RUN_FULL + run * 8; };
    [[maybe_unused]] auto empty_run = [&](int run) { return base + AT_RUN_EMPTY + run * 8; };
    auto full_tile = [&](int place) { return base + AT_TILE_FULL + place * 8; };
    auto empty_tile = [&](int place) { return base + AT_TILE_EMPTY + place * 8; };

    // Outputs beside each other are contiguous: the step between rows is the number of columns.
    const int columns = BESIDE ? out_m : problem.N;
    auto tile_at = [&](const Walk& walk, int index) {
        Tile tile = walk.at(index);
#if BESIDE > 0
        auto width_of = [](int columns) { return (columns + BN - 1) / BN * BN; };
        if (tile.n >= width_of(columns)) tile.n -= width_of(columns), tile.batch = 1;
#if BESIDE > 1
        if (tile.batch == 1 && tile.n >= width_of(columns_second)) tile.n -= width_of(columns_second), tile.batch = 2;
#endif
#endif
        return tile;
    };

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    const int lane = lane_index();
    if constexpr (!DEALT) counters = nullptr;
    int number = Deal::own();  // of the first tile
    // A draw takes its time, in which the mbarriers are initialized.
    if (counters != nullptr && warpgroup == MATH && warp == 3 && lane == 0 && (CLUSTER == 1 || cluster_rank() == 0))
        number = Deal::draw(counters);

    // Prologue: initialize the mbarriers, and let all blocks of the cluster know.
    const bool copies = warpgroup == MATH && warp == 0;
    if (copies && elect()) {
        prefetch_map(a);
        prefetch_map(b);
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), MATH * 4 * CLUSTER);
        }
        for (int run = 0; run < RUNS; ++run) {
            barrier_init(full_run(run), 32 * ((A_SCALE == BLOCK) + (B_SCALE == BLOCK)));
            barrier_init(empty_run(run), MATH * WARPGROUP);
        }
        for (int place = 0; place < TILES; ++place) {
            barrier_init(full_tile(place), 1);
            barrier_init(empty_tile(place), MATH * WARPGROUP + 32 * ((A_SCALE == BLOCK) + (B_SCALE == BLOCK)));
        }
        if constexpr (DEALT) Deal::initialize(base + AT_DEAL);
        if constexpr (SPLIT > 1) barrier_init(base + AT_ARRIVED, 1);
        barrier_init_fence();
        if constexpr (SPLIT > 1) barrier_expect(base + AT_ARRIVED, SUMS_BYTES);
    }
    __syncwarp();
    if constexpr (SPLIT > 1) cluster_arrive();
    // The producer warp initialized the mbarriers itself: it starts to load without waiting for the other warps.
    if constexpr (CLUSTER > 1)
        cluster_sync();
    else if (copies)
        block_arrive<(MATH + 1) * WARPGROUP>();
    else
        block_sync<(MATH + 1) * WARPGROUP>();

    RingOf<TILES> places;
    auto next_tile = [&]() {
        barrier_wait(full_tile(places.stage), places.parity);
        const Tile tile = Tile::at(base + AT_TILE + places.stage * TILE_BYTES);
        barrier_arrive(empty_tile(places.stage));
        places.advance();
        return tile;
    };

    if (warpgroup == MATH) {
        // Producer: one thread issues the TMA loads of operands and scales. It has few registers: loops are not
        // unrolled.
        if constexpr (MATH > 1) give_registers<MATH == 2 ? 40 : 32>();
        Ring ring;
        Deal deal{base + AT_DEAL, counters, number};
        if (copies && elect()) {
            const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
            [[maybe_unused]] const uint64_t first_out = B_ONCE ? first_out_policy() : 0;
            // TMA takes longer to fill rows past the end with zeros than to load rows, so that a box has no more rows
            // than A. The other rows of the stage are never written, and the products with them are not stored. Rows
            // that were split lie in memory of a multiple of 8 rows, which TMA loads faster than fewer.
            const int rows = PARTS > 1 ? (problem.M + 7) / 8 * 8 : problem.M;
            const int stage_bytes =
                (B_ONCE ? PARTS * min(rows, BM) * BK : A_BYTES) + B_BYTES + A_SCALE_BYTES + B_SCALE_BYTES;
            Walk walk(problem, offsets);
            [[maybe_unused]] int ahead = PARTS > 1 ? STAGES : 0;  // K tiles of B that come before the wait
            for (int index; walk.reaches(index = deal.next());) {
                const Tile tile = tile_at(walk, index);
                const int a_batch = tile.batch * a_batched, b_batch = tile.batch * b_batched;
                [[maybe_unused]] auto expect_with_b = [&](int stage, int along_k) {
                    barrier_expect(full(stage), stage_bytes);
                    const uint32_t to_b = base + AT_B + stage * B_BYTES;
                    if constexpr (B_ONCE)
                        tma_load(to_b, OF_WEIGHT(b, tile), full(stage), along_k, tile.n, b_batch, first_out);
                    else
                        tma_load(to_b, OF_WEIGHT(b, tile), full(stage), along_k, tile.n, b_batch);
                };
                if (PARTS > 1 && ahead == STAGES) {
                    ahead = min(STAGES, tile.k_stop - tile.k_start);
#pragma unroll 1
                    for (int k = 0; k < ahead; ++k) expect_with_b(k, tile.row_of(tile.k_start + k));
                    wait_for_launches();
                }
#pragma unroll 1  // this warpgroup has few registers
                for (int k = tile.k_start; k < tile.k_stop; ++k, ring.advance()) {
                    const int s = ring.stage;
                    const uint32_t to_a = base + s * A_BYTES, to_b = base + AT_B + s * B_BYTES;
                    const int along_k = tile.row_of(k);
                    if constexpr (PARTS > 1) {
                        if (ahead > 0) {
                            --ahead;
                        } else {
                            barrier_wait(empty(s), ring.parity ^ 1);
                            expect_with_b(s, along_k);
                        }
                    } else {
                        barrier_wait(empty(s), ring.parity ^ 1);
                        barrier_expect(full(s), stage_bytes);
                    }
                    if constexpr (PARTS > 1) {
#pragma unroll
                        for (int part = 0; part < PARTS; ++part)
                            tma_load(to_a + part * BM * BK, a, full(s), along_k, tile.m, part);
                    } else if constexpr (CLUSTER > 1 && !SHARE_B) {
                        constexpr int PIECE = BM / CLUSTER;
                        tma_load_multicast(to_a + rank * PIECE * BK, a, full(s), along_k, tile.m + rank * PIECE,
                                           a_batch, (1 << CLUSTER) - 1);
                    } else {
                        tma_load(to_a, a, full(s), along_k, tile.m, a_batch);
                    }
                    if constexpr (PARTS > 1) {
                        // B is on its way.
                    } else if constexpr (CLUSTER > 1 && SHARE_B) {
                        constexpr int PIECE = BN / CLUSTER;
                        tma_load_multicast(to_b + rank * PIECE * BK, b, full(s), along_k, tile.n + rank * PIECE,
                                           b_batch, (1 << CLUSTER) - 1);
                    } else if constexpr (B_ONCE) {
                        tma_load(to_b, b, full(s), along_k, tile.n, b_batch, first_out);
                    } else {
                        tma_load(to_b, b, full(s), along_k, tile.n, b_batch);
                    }
#if A_SCALE == VECTOR
                    tma_load(base + AT_A_SCALE + s * A_SCALE_PITCH, a_scale, full(s), tile.m & ~3, k, a_batch);
#endif
#if B_SCALE == VECTOR
                    tma_load(base + AT_B_SCALE + s * B_SCALE_PITCH, OF_WEIGHT(b_scale, tile), full(s), tile.n, k,
                             b_batch);
#endif
                }
            }
        }
        // Producers of the scales of 128 x 128 blocks: one warp for each operand copies a run of 32 K tiles at a time.
        [[maybe_unused]] auto copy_runs = [&](auto operand, auto scales_of, int batch_step, int line_step, int k_step) {
            using Of = decltype(operand);
            RingOf<RUNS> runs;
            const uint32_t to_lane = base + AT_RUN + lane * 4;
            while (true) {
                const Tile tile = next_tile();
                if (!tile.exists()) break;
                const float* scales = scales_of(tile);
                const float* matrix = scales + int64_t(tile.batch) * batch_step;
                const int begin = Of::IS_A ? tile.m : tile.n;
                const int end = Of::IS_A ? problem.M : OF_WEIGHT(columns, tile);
#pragma unroll 1  // this warpgroup has few registers
                for (int k = tile.k_start; k < tile.k_stop; k += RUN, runs.advance()) {
                    barrier_wait(empty_run(runs.stage), runs.parity ^ 1);
#pragma unroll
                    for (int i = 0; i < Of::COUNT; ++i) {
                        const int line = begin + i * Of::CHUNK;
                        const bool inside = line < end && k + lane < tile.k_stop;
                        const float* from = matrix + int64_t(line / 128) * line_step + int64_t(k + lane) * k_step;
                        copy_word(to_lane + runs.stage * RUN_BYTES + (Of::FIRST + i) * RUN * 4, inside ? from : scales,
                                  inside);
                    }
                    barrier_arrive_after_copies(full_run(runs.stage));
                }
            }
        };
#if B_SCALE == BLOCK
        if (warp == 1)
            copy_runs(
                RunsOfB{}, [&](const Tile& tile) { return OF_WEIGHT(b_scale, tile); }, b_batched * bs_batch, bs_n,
                bs_k);
#endif
#if A_SCALE == BLOCK
        if (warp == 2) copy_runs(RunsOfA{}, [&](const Tile&) { return a_scale; }, a_batched * as_batch, as_m, as_k);
#endif
        if (warp == 3 && (DEALT || elect())) {
            Walk walk(problem, offsets);
            auto put = [&](const Tile& tile) {
                barrier_wait(empty_tile(places.stage), places.parity ^ 1);
                tile.put(base + AT_TILE + places.stage * TILE_BYTES);
                barrier_arrive(full_tile(places.stage));
            };
            const bool deals = DEALT && counters != nullptr && (CLUSTER == 1 || cluster_rank() == 0);
            bool listed = true, multiplied = true;  // of the last tile: whether it is of the own list, and no zeros
            int index;
#pragma unroll 1  // this warpgroup has few registers
            while (true) {
                if (deals) {
                    index = __shfl_sync(~0u, deal.number, 0);
                    listed = listed && walk.reaches(index);
                    // Tiles of other lists come next. With early starts none follows a tile that is only written.
                    if (!listed) index = !EARLY || multiplied ? Deal::take_over(counters, walk.tiles()) : NO_TILE;
                    if (lane == 0) deal.hand_out(index);
                } else if (counters == nullptr) {
                    index = deal.next();
                } else {
                    if (lane == 0) index = deal.receive();
                    index = __shfl_sync(~0u, index, 0);
                }
                if (!walk.reaches(index)) break;
                const Tile tile = tile_at(walk, index);
                multiplied = tile.is_multiplied();
                if (!DEALT || lane == 0) {
                    put(tile);
                    if (deals) {
                        // The next one is drawn when the consumers have begun this one, so that blocks end together.
                        barrier_wait(empty_tile(places.stage), places.parity);
                        if (listed) deal.number = Deal::draw(counters);
                    }
                }
                if constexpr (DEALT) __syncwarp();
                places.advance();
            }
            if (!DEALT || lane == 0) put(Tile::none());
            if (deals) Deal::end(counters);
        }
    } else {
        // Consumer.
        if constexpr (MATH == 2) take_registers<232>();
        if constexpr (MATH == 3) take_registers<160>();
        if constexpr (PARTS > 1) wait_for_launches();
        // The thread's first row of the tile; it also has row + 8, and in each next slice the rows 64 further.
        const int row = warpgroup * ROWS + warp * 16 + lane / 4;
        const uint64_t of_a = matrix_descriptor(base + warpgroup * ROWS * BK), of_b = matrix_descriptor(base + AT_B);
        Ring ring;

        // The scales of one product, held in registers from its start until its promotion.
        struct Scales {
            float row0, row1;
            float chunk[B_SCALE == BLOCK ? COLUMN_CHUNKS : 1];
        };
        [[maybe_unused]] RingOf<RUNS> runs;
        // The scales of K tile `lane` of a run: of B's column chunks, and of A's rows.
        [[maybe_unused]] float of_lanes[COLUMN_CHUNKS], of_lane_rows;

        // Barriers of the turns: the warpgroup before arrives, and the one whose turn it is waits.
        auto turn_of = [](int of) { return 1 + MATH + of; };
        if (IN_TURNS && warpgroup == MATH - 1) named_arrive<2 * WARPGROUP>(turn_of(0));
        auto take_rows = [&](Scales& scales, int stage, int slice, const Tile& of) {
#if A_SCALE == VECTOR
            const int of_row = row + slice * 64 + (A_SCALE_EXTRA ? of.m % 4 : 0);
            const uint32_t at = base + AT_A_SCALE + stage * A_SCALE_PITCH + of_row * 4;
            scales.row0 = load_shared(at);
            scales.row1 = load_shared(at + 32);
#elif A_SCALE != BLOCK
            scales.row0 = scales.row1 = 1.0f;
#endif
        };
        // Issues one product as a wgmma group. `units` counts the parts of 32 of the K tile that are multiplied.
        auto start = [&](float (&d)[WIDTH / 2], int stage, int slice_m, int slice_n, bool onto = false,
                         int units = BK / 32) {
            const uint64_t from_a = moved(of_a, stage * A_BYTES + slice_m * 64 * BK);
            const uint64_t from_b = moved(of_b, stage * B_BYTES + slice_n * WIDTH * BK);
            if constexpr (IN_TURNS) named_sync<2 * WARPGROUP>(turn_of(warpgroup));
            fence_registers(d);
            wgmma_fence();
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const uint64_t from_part = part == 0 ? from_a : moved(from_a, part * BM * BK);
#pragma unroll
                for (int k = 0; k < BK / 32; ++k)
                    if (k < units) wgmma(d, from_part + 2 * k, from_b + 2 * k, onto || part > 0 || k > 0);
            }
            wgmma_commit();
            fence_registers(d);
            if constexpr (IN_TURNS) named_arrive<2 * WARPGROUP>(turn_of((warpgroup + 1) % MATH));
        };
        // Releases a stage. `loaded` has bits of what this thread loaded last from the stage (see `once_loaded`).
        // Scales that were loaded before a product started have arrived by the time the product has ended.
        auto release = [&](int stage, uint32_t loaded = 0) {
            const uint32_t barrier = once_loaded(empty(stage), loaded, problem.M);
            if constexpr (CLUSTER > 1) {
                if (lane < CLUSTER) barrier_arrive_at(barrier, lane);
            } else {
                if (lane == 0) barrier_arrive(barrier);
            }
        };
        // With EARLY, the temporary that holds a tile's first product when the tile begins.
        [[maybe_unused]] float started[WIDTH / 2];
        [[maybe_unused]] Scales started_scales;
        [[maybe_unused]] auto begin = [&](int stage, const Tile& of) {
            take_rows(started_scales, stage, 0, of);
            start(started, stage, 0, 0);
        };

        Tile tile = next_tile();
        if constexpr (EARLY) {
            if (tile.is_multiplied()) {
                barrier_wait(full(0), 0);
                begin(0, tile);
            }
        }
        while (tile.exists()) {
            [[maybe_unused]] Tile after = {};
            int k = tile.k_start;
            float acc[PRODUCTS][WIDTH / 2] = {};
            [[maybe_unused]] uint32_t taken = 0;  // K tiles of this output tile
            // Takes the scales of blocks for the next K tile from the lane that holds them.
            auto take_chunks = [&]([[maybe_unused]] Scales& scales) {
#if A_SCALE == BLOCK || B_SCALE == BLOCK
                if (taken % RUN == 0) {
                    barrier_wait(full_run(runs.stage), runs.parity);
                    const uint32_t from = base + AT_RUN + runs.stage * RUN_BYTES + lane * 4;
#pragma unroll
                    for (int i = 0; i < RUN_COLUMNS; ++i) of_lanes[i] = load_shared(from + i * RUN * 4);
                    if (A_SCALE == BLOCK) of_lane_rows = load_shared(from + (RUN_COLUMNS + warpgroup) * RUN * 4);
                    barrier_arrive(empty_run(runs.stage));
                    runs.advance();
                }
#pragma unroll
                for (int i = 0; i < RUN_COLUMNS; ++i) scales.chunk[i] = __shfl_sync(~0u, of_lanes[i], taken % RUN);
                if (A_SCALE == BLOCK) scales.row0 = scales.row1 = __shfl_sync(~0u, of_lane_rows, taken % RUN);
                ++taken;
#endif
            };
            // Promote: sum += scale * d. Returns bits of the last value loaded: a warp's loads from shared memory are
            // in order.
            auto promote = [&](const float (&d)[WIDTH / 2], const Scales& scales, int stage, int product) {
                float (&sum)[WIDTH / 2] = acc[product];
                [[maybe_unused]] const int slice_n = product % SLICES_N;
                constexpr int AT_ONCE = 8;  // column scales loaded ahead, so that the stage is released sooner
                [[maybe_unused]] float2 pairs[AT_ONCE];
                uint32_t bits = 0;
#pragma unroll
                for (int j = 0; j < WIDTH / 8; ++j) {
                    float s00 = scales.row0, s01 = scales.row0, s10 = scales.row1, s11 = scales.row1;
#if B_SCALE == BLOCK
                    const float chunk = scales.chunk[(slice_n * WIDTH + j * 8) / COLUMN_CHUNK];
                    s00 *= chunk, s01 *= chunk, s10 *= chunk, s11 *= chunk;
#elif B_SCALE == VECTOR
                    if (j % AT_ONCE == 0) {
#pragma unroll
                        for (int i = 0; i < AT_ONCE && j + i < WIDTH / 8; ++i)
                            pairs[i] = load_shared_pair(base + AT_B_SCALE + stage * B_SCALE_PITCH +
                                                        (slice_n * WIDTH + (j + i) * 8 + lane % 4 * 2) * 4);
                    }
                    const float2 pair = pairs[j % AT_ONCE];
                    s00 *= pair.x, s01 *= pair.y, s10 *= pair.x, s11 *= pair.y;
                    bits = __float_as_uint(pair.x);
#endif
                    sum[4 * j + 0] += s00 * d[4 * j + 0];
                    sum[4 * j + 1] += s01 * d[4 * j + 1];
                    sum[4 * j + 2] += s10 * d[4 * j + 2];
                    sum[4 * j + 3] += s11 * d[4 * j + 3];
                }
                return bits;
            };

            if constexpr (DEPTH == 0) {
                // Main loop without temporaries: a K tile's products are added while those of the one before run.
                // Counted from 0, by which the compiler knows that no product runs while accumulators become zeros.
                const int k_tiles = tile.k_stop - k;
                for (int i = 0; i < k_tiles; ++i, ring.advance()) {
                    const int s = ring.stage;
                    barrier_wait(full(s), ring.parity);
#pragma unroll
                    for (int p = 0; p < PRODUCTS; ++p) start(acc[p], s, p / SLICES_N, p % SLICES_N, true);
                    if (i > 0) {
                        wgmma_wait<PRODUCTS>();
                        release(s == 0 ? STAGES - 1 : s - 1);
                    }
                }
                wgmma_wait<0>();
                if (k_tiles > 0) release(ring.stage == 0 ? STAGES - 1 : ring.stage - 1);
#pragma unroll
                for (int p = 0; p < PRODUCTS; ++p) fence_registers(acc[p]);
            } else if constexpr (!SCALED && DEPTH == 2) {
                // Main loop without scales along K: PROMOTE K tiles accumulate in the tensor core, two groups in
                // flight.
                float d[PRODUCTS][WIDTH / 2];
                const Scales one = {1.0f, 1.0f};
                auto run = [&](int blocks) {
#pragma unroll
                    for (int i = 0; i < blocks; ++i) {
                        const int s = ring.stage;
                        barrier_wait(full(s), ring.parity);
#pragma unroll
                        for (int p = 0; p < PRODUCTS; ++p) start(d[p], s, p / SLICES_N, p % SLICES_N, i > 0);
                        if (i > 0) {
                            wgmma_wait<PRODUCTS>();
                            release(s == 0 ? STAGES - 1 : s - 1);
                        }
                        ring.advance();
                    }
                    wgmma_wait<0>();
                    release(ring.stage == 0 ? STAGES - 1 : ring.stage - 1);
#pragma unroll
                    for (int p = 0; p < PRODUCTS; ++p) {
                        fence_registers(d[p]);
                        promote(d[p], one, 0, p);
                    }
                };
                for (; k + PROMOTE <= tile.k_stop; k += PROMOTE) run(PROMOTE);
                for (; k < tile.k_stop; ++k) run(1);
            } else if constexpr (EARLY) {
                // Main loop with one temporary: wait, promote, multiply.
                after = next_tile();
                auto finish = [&] {
                    const int s = ring.stage;
                    take_chunks(started_scales);
#pragma unroll
                    for (int p = 0; p < PRODUCTS; ++p) {
                        if (p > 0) {
                            take_rows(started_scales, s, p / SLICES_N, tile);
                            start(started, s, p / SLICES_N, p % SLICES_N);
                        }
                        wgmma_wait<0>();
                        fence_registers(started);
                        if (B_SCALE != VECTOR && p == PRODUCTS - 1) release(s);
                        const uint32_t bits = promote(started, started_scales, s, p);
                        if (B_SCALE == VECTOR && p == PRODUCTS - 1) release(s, bits);
                    }
                    ring.advance();
                };
                if (tile.is_multiplied()) {
                    for (; k + 1 < tile.k_stop; ++k) {
                        finish();
                        barrier_wait(full(ring.stage), ring.parity);
                        begin(ring.stage, tile);
                    }
                    const int last = ring.stage;
                    finish();
                    // Tiles that are multiplied come first. After the last one the product that starts is one that
                    // nobody reads, of the stage that nothing is loaded into anymore: a branch around it would have the
                    // compiler wait for it before the epilogue.
                    if (after.is_multiplied()) barrier_wait(full(ring.stage), ring.parity);
                    begin(after.is_multiplied() ? ring.stage : last, after);
                }
            } else if constexpr (DEPTH == 1) {
                // Main loop with one temporary: multiply, wait, promote.
                float d[WIDTH / 2];
                for (; k < tile.whole_stop(); ++k, ring.advance()) {
                    const int s = ring.stage;
                    barrier_wait(full(s), ring.parity);
                    Scales scales;
#pragma unroll
                    for (int p = 0; p < PRODUCTS; ++p) {
                        take_rows(scales, s, p / SLICES_N, tile);
                        if (!EXCHANGE_LATE && p == 0) take_chunks(scales);
                        start(d, s, p / SLICES_N, p % SLICES_N);
                        if (EXCHANGE_LATE && p == 0) take_chunks(scales);
                        wgmma_wait<0>();
                        fence_registers(d);
                        if (B_SCALE != VECTOR && p == PRODUCTS - 1) release(s);
                        const uint32_t bits = promote(d, scales, s, p);
                        if (B_SCALE == VECTOR && p == PRODUCTS - 1) release(s, bits);
                    }
                }
            } else {
                // Main loop with two temporaries: one product runs while the one before it is promoted.
                float d0[WIDTH / 2], d1[WIDTH / 2];
                Scales scales0, scales1;
                auto finish = [&](float (&d)[WIDTH / 2], const Scales& scales, int stage) {
                    fence_registers(d);
                    if (B_SCALE != VECTOR) release(stage);
                    const uint32_t bits = promote(d, scales, stage, 0);
                    if (B_SCALE == VECTOR) release(stage, bits);
                };
                auto next = [&](float (&d)[WIDTH / 2], Scales& scales) {
                    const int s = ring.stage;
                    barrier_wait(full(s), ring.parity);
                    take_rows(scales, s, 0, tile);
                    if (!EXCHANGE_LATE) take_chunks(scales);
                    start(d, s, 0, 0);
                    if (EXCHANGE_LATE) take_chunks(scales);
                    ring.advance();
                    return s;
                };
                if (k < tile.whole_stop()) {
                    int s0 = next(d0, scales0), s1;
                    for (; k + 2 < tile.whole_stop(); k += 2) {
                        s1 = next(d1, scales1);
                        wgmma_wait<1>();
                        finish(d0, scales0, s0);
                        s0 = next(d0, scales0);
                        wgmma_wait<1>();
                        finish(d1, scales1, s1);
                    }
                    if (k + 1 < tile.whole_stop()) {
                        s1 = next(d1, scales1);
                        wgmma_wait<1>();
                        finish(d0, scales0, s0);
                        wgmma_wait<0>();
                        finish(d1, scales1, s1);
                    } else {
                        wgmma_wait<0>();
                        finish(d0, scales0, s0);
                    }
                }
            }

#if GROUPED == JAGGED_K
            // The group's last K tile, where it is partial: the rows after the group are the next group's, or zeros.
            if (tile.units > 0) {
                float d[WIDTH / 2];
                const int s = ring.stage;
                barrier_wait(full(s), ring.parity);
                Scales scales;
                take_chunks(scales);
#pragma unroll
                for (int p = 0; p < PRODUCTS; ++p) {
                    take_rows(scales, s, p / SLICES_N, tile);
                    start(d, s, p / SLICES_N, p % SLICES_N, false, tile.units);
                    wgmma_wait<0>();
                    fence_registers(d);
                    const uint32_t bits = promote(d, scales, s, p);
                    if (p == PRODUCTS - 1) release(s, bits);
                }
                ring.advance();
            }
#endif

#if SPLIT > 1
            // Reduce over the cluster: send the rows of other owners to them, and add the others' sums of own rows.
            const int first_row = warpgroup * ROWS + warp * 16, owner = first_row / OWN_ROWS, rank = cluster_rank();
            // The address, at the owner of this warp's rows, of sums `i` to `i + 3` of product `p` from block `from`.
            auto place_of = [&](int from, int p, int i) {
                const int part = from < owner ? from : from - 1,
                          strip = part * (OWN_ROWS / 16) + first_row % OWN_ROWS / 16;
                return base + AT_SUMS + ((strip * PRODUCTS + p) * (WIDTH / 8) + i / 4) * 512 + lane * 16;
            };
            cluster_wait();  // all blocks have begun
            if (rank != owner) {
#pragma unroll
                for (int p = 0; p < PRODUCTS; ++p) {
#pragma unroll
                    for (int i = 0; i < WIDTH / 2; i += 4)
                        send_to_block(place_of(rank, p, i), base + AT_ARRIVED, owner,
                                      make_float4(acc[p][i], acc[p][i + 1], acc[p][i + 2], acc[p][i + 3]));
                }
                break;
            }
            barrier_wait(base + AT_ARRIVED, 0);
#pragma unroll
            for (int p = 0; p < PRODUCTS; ++p) {
#pragma unroll
                for (int i = 0; i < WIDTH / 2; i += 4) {
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    const float4 own = make_float4(acc[p][i], acc[p][i + 1], acc[p][i + 2], acc[p][i + 3]);
#pragma unroll
                    for (int part = 0; part < SPLIT; ++part) {
                        const float4 more = part == rank ? own : load_shared_quad(place_of(part, p, i));
                        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                    }
                    acc[p][i] = sum.x, acc[p][i + 1] = sum.y, acc[p][i + 2] = sum.z, acc[p][i + 3] = sum.w;
                }
            }
#endif

            // Epilogue: apply the scales that hold for all of K, add the bias, cast, store. Tokens in no group become
            // zeros: neither scales nor a bias apply to them. Rows past an expert's count become zeros whatever they
            // are, since their operands may be NaN.
            [[maybe_unused]] const bool grouped = GROUPED != JAGGED_M || tile.batch < problem.batches;
            [[maybe_unused]] const int own_columns = OF_WEIGHT(columns, tile), layer = BESIDE ? 0 : tile.layer();
            [[maybe_unused]] const int out_step = BESIDE ? own_columns : out_m;
            [[maybe_unused]] int buffer = 0;
#pragma unroll
            for (int slice = 0; slice < SLICES_M; ++slice) {
                [[maybe_unused]] const int row0 = tile.m + row + slice * 64, row1 = row0 + 8;
                [[maybe_unused]] const bool keeps0 = tile.keeps(row0), keeps1 = tile.keeps(row1);
                // A bulk store of 64 rows would write into the next group where fewer rows are left of this one.
                const bool staged =
                    OUT_VIA != PAIRS &&
                    (GROUPED != JAGGED_M || tile.m + warpgroup * ROWS + slice * 64 + 64 <= tile.row_stop(problem));
                float whole0 = 1.0f, whole1 = 1.0f;
#if A_SCALE == LINE
                const float* lines = a_scale + int64_t(tile.batch * a_batched) * as_batch;
                whole0 = grouped && row0 < problem.M ? lines[row0] : 0.0f;
                whole1 = grouped && row1 < problem.M ? lines[row1] : 0.0f;
#elif A_SCALE == WHOLE
                whole0 = whole1 = grouped ? a_scale[int64_t(tile.batch * a_batched) * as_batch] : 0.0f;
#endif
#pragma unroll
                for (int column = 0; column < BN; column += 64) {
                    [[maybe_unused]] uint32_t at_buffer = 0;
#if OUT_VIA != PAIRS
                    if (staged) {
#if SPLIT > 1
                        at_buffer = place_of(owner ? 0 : 1, 0, 0) - lane * 16 - warp * 16 * 128;
#else
                        at_buffer = base + AT_OUT + (warpgroup * OUT_BUFFERS + buffer) * OUT_BUFFER;
#endif
                        buffer = buffer + 1 == OUT_BUFFERS ? 0 : buffer + 1;
#if OUT_VIA == BULK
                        if (column == 0 || !STORED_AT_ONCE) {
                            if (threadIdx.x % WARPGROUP == 0) {
                                if (STORED_AT_ONCE)
                                    tma_store_wait_read<0>();
                                else if (column == 0)
                                    tma_store_wait_read<PENDING_AT_FIRST>();
                                else
                                    tma_store_wait_read<OUT_BUFFERS - 1>();
                            }
                            warpgroup_sync(1 + warpgroup);
                        }
#else
                        __syncwarp();  // a warp reads back only what it has put there itself
#endif
                    }
#endif
                    [[maybe_unused]] uint32_t packed[4];
#pragma unroll
                    for (int j = 0; j < 8 && column + j * 8 < BN; ++j) {
                        const int place = column + j * 8;
                        const int product = slice * SLICES_N + place / WIDTH, i = place % WIDTH / 2;
                        [[maybe_unused]] const int n = tile.n + place + lane % 4 * 2;
                        float s00 = whole0, s01 = whole0, s10 = whole1, s11 = whole1;
#if B_SCALE == LINE
                        const float* of_columns = OF_WEIGHT(b_scale, tile) + int64_t(tile.batch * b_batched) * bs_batch;
                        const float left = grouped && n < own_columns ? of_columns[n] : 0.0f;
                        const float right = grouped && n + 1 < own_columns ? of_columns[n + 1] : 0.0f;
                        s00 *= left, s01 *= right, s10 *= left, s11 *= right;
#elif B_SCALE == WHOLE
                        const float of_b =
                            grouped ? OF_WEIGHT(b_scale, tile)[int64_t(tile.batch * b_batched) * bs_batch] : 0.0f;
                        s00 *= of_b, s01 *= of_b, s10 *= of_b, s11 *= of_b;
#endif
                        float v00 = acc[product][i], v01 = acc[product][i + 1];
                        float v10 = acc[product][i + 2], v11 = acc[product][i + 3];
                        if constexpr (HAS_BIAS) {
                            const BiasType* biases =
                                OF_WEIGHT(bias, tile) + (GROUPED ? int64_t(tile.batch) * problem.N : 0);
                            const float bias0 = grouped && n < own_columns ? float(biases[n]) : 0.0f;
                            const float bias1 = grouped && n + 1 < own_columns ? float(biases[n + 1]) : 0.0f;
                            // Written as FMAs: the compiler would contract some of them, others in other tiles.
                            v00 = __fmaf_rn(v00, s00, bias0), v01 = __fmaf_rn(v01, s01, bias1);
                            v10 = __fmaf_rn(v10, s10, bias0), v11 = __fmaf_rn(v11, s11, bias1);
                        } else {
                            v00 *= s00, v01 *= s01, v10 *= s10, v11 *= s11;
                        }
                        if constexpr (GROUPED == MASKED) {
                            v00 = keeps0 ? v00 : 0.0f, v01 = keeps0 ? v01 : 0.0f;
                            v10 = keeps1 ? v10 : 0.0f, v11 = keeps1 ? v11 : 0.0f;
                        }
#if OUT_VIA != PAIRS
                        if (staged) {
                            packed[j % 2 * 2 + 0] = pack<OutType>(v00, v01);
                            packed[j % 2 * 2 + 1] = pack<OutType>(v10, v11);
                            if (j % 2 == 1) {
                                const int matrix = lane / 8, line = warp * 16 + matrix % 2 * 8 + lane % 8;
                                const int piece = (j - 1 + matrix / 2) ^ (line % 8);
                                store_matrices<false>(at_buffer + line * 128 + piece * 16, packed[0], packed[1],
                                                      packed[2], packed[3]);
                            }
                        }
#endif
#if OUT_VIA == PAIRS || GROUPED == JAGGED_M
                        if (!staged) {
                            OutType* to = OUT_ROWS + (int64_t(layer) * problem.M + row0) * int64_t(out_step) + n;
                            store_pair(to, v00, v01, row0 < tile.row_stop(problem) ? own_columns - n : 0);
                            store_pair(to + 8 * int64_t(out_step), v10, v11,
                                       row1 < tile.row_stop(problem) ? own_columns - n : 0);
                        }
#endif
                    }
#if OUT_VIA == BULK
                    if (staged && (column + 64 >= BN || !STORED_AT_ONCE)) {
                        fence_async();
                        warpgroup_sync(1 + warpgroup);
                        if (threadIdx.x % WARPGROUP == 0) {
                            constexpr int TOGETHER = STORED_AT_ONCE ? (BN + 63) / 64 : 1;
#pragma unroll
                            for (int i = TOGETHER - 1; i >= 0; --i)
                                tma_store(out, at_buffer - i * OUT_BUFFER, tile.n + column - i * 64,
                                          tile.m + warpgroup * ROWS + slice * 64, tile.layer());
                            tma_store_commit();
                        }
                    }
#elif OUT_VIA == LINES
                    __syncwarp();
#pragma unroll
                    for (int i = 0; i < 4; ++i) {  // 4 of the warp's 16 rows at a time
                        const int line = warp * 16 + i * 4 + lane / 8, piece = lane % 8;
                        const int m = tile.m + warpgroup * ROWS + slice * 64 + line, n = tile.n + column + piece * 8;
                        const char* from = memory + (at_buffer - base) + line * 128 + (piece ^ line % 8) * 16;
                        OutType* to = OF_WEIGHT(out, tile) + (int64_t(layer) * problem.M + m) * out_step + n;
                        if (m < problem.M && n < own_columns)
                            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
                    }
#endif
                }
            }
            tile = EARLY ? after : next_tile();
        }
        if constexpr (EARLY) {
            wgmma_wait<0>();
            fence_registers(started);
        }
#if OUT_VIA == BULK
        if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<0>();
#endif
        if (IN_TURNS && warpgroup == 0) named_sync<2 * WARPGROUP>(turn_of(0));  // for the last one's arrival
    }
    // A block must not end while another block of the cluster may arrive at its mbarriers or write to its stages.
    if constexpr (CLUSTER > 1) cluster_sync();
    if constexpr (SPLIT > 1) {
        if (warpgroup == MATH) cluster_wait();
    }
}
