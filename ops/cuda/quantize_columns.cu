// Quantizes whole columns: x (B, M, N), row-major, to FP8 with one scale for each column of a matrix, or of each group of
// its rows; stored column-major. One read, where a group's rows fit into the shared memory of a cluster; else two.
//
// A cluster of CLUSTER blocks takes a panel of PANEL columns of one matrix or group, and each block of it a share of the
// rows. It loads them, keeps up to KEPT rows in shared memory, and finds each column's largest magnitude; the blocks of the
// cluster look into each other's, and each quantizes its own rows: a thread takes a word, one or two columns, of 16 rows
// that lie at a multiple of 16, and stores 16 bytes a column. Words of a row are the lanes of a warp, so that shared memory
// is read without conflicts.
//
// Macros: INPUT, FP8 and FORMAT, of the enums Input, Fp8 and Format; PANEL, KEPT, CLUSTER, WARPS; RESIDENT, blocks that
// share a multiprocessor; GROUPED, rows are tokens of groups, and those in none are zeros; ALIGNED, 16 bytes of x load at
// once; PARTIAL, N is no multiple of 8.
#include "fp8_block.cuh"
#include "groups.cuh"

enum class Input { BF16, FP16, FP32 };

constexpr int ELEMENT_BYTES = INPUT == Input::FP32 ? 4 : 2;
constexpr int IN_WORD = 4 / ELEMENT_BYTES;        // columns
constexpr int IN_PIECE = 16 / ELEMENT_BYTES;      // columns of 16 bytes
constexpr int WORDS = PANEL / IN_WORD;            // of a row of the panel
constexpr int PIECES = PANEL / IN_PIECE;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16;  // of a store
constexpr int AHEAD = 8;  // pieces in flight a thread
static_assert(KEPT % ROWS == 0 && 32 % PIECES == 0 && 32 % WORDS == 0, "a warp holds whole rows");

using Scale = BlockScale<FORMAT>;
using Stored = StoredScale<FORMAT>::type;

// The float of an element as it lies in a word, and the bits of its magnitude as a float32.
__forceinline__ float element(unsigned word, int place) {
    if constexpr (INPUT == Input::FP32) return __uint_as_float(word);
    if constexpr (INPUT == Input::BF16) return __uint_as_float(place ? word & 0xffff0000u : word << 16);
    return half_to_float(static_cast<unsigned short>(place ? word >> 16 : word));
}

// The larger magnitude of each element of two words; as integers they order as the magnitudes do, NaN last.
__forceinline__ unsigned larger(unsigned a, unsigned b) {
    if constexpr (INPUT == Input::FP32) return max(a, b & 0x7fffffffu);
    return __vmaxu2(a, b & 0x7fff7fffu);
}

struct Shared {
    uint4 kept[KEPT][PIECES];
    unsigned warp_amax[WARPS][WORDS];
    unsigned amax[WORDS];  // of this block's rows: the other blocks of the cluster read it
    float inverse[PANEL];
};

// 16 bytes of a row, zeros outside of the matrix.
__forceinline__ uint4 load_piece(const char* row, int column, int N) {
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (column >= N) return piece;
    if (ALIGNED) piece = load16<Load::PAST_L1>(row + static_cast<long long>(column) * ELEMENT_BYTES);
    if (!ALIGNED || PARTIAL) {
        unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int c = 0; c < IN_PIECE; ++c) {
            const int shift = INPUT == Input::FP32 ? 0 : c % 2 * 16;
            const unsigned mask = INPUT == Input::FP32 ? ~0u : 0xffffu << shift;
            unsigned& word = words[c / IN_WORD];
            if (column + c >= N) {
                word &= ~mask;
            } else if (!ALIGNED) {
                const char* at = row + static_cast<long long>(column + c) * ELEMENT_BYTES;
                const unsigned value = INPUT == Input::FP32 ? __ldg(reinterpret_cast<const unsigned*>(at))
                                                            : __ldg(reinterpret_cast<const unsigned short*>(at));
                word |= value << shift;
            }
        }
        piece = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return piece;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    quantize_columns(const void* x, unsigned char* data, Stored* scale, const int* offsets, int M, int N, int x_m,
                     int data_n, int scale_lead, int groups) {
    DYNAMIC_SHARED(Shared, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x % CLUSTER, panel = blockIdx.x / CLUSTER * PANEL;
    const long long layer = blockIdx.z;  // a matrix of the batch
    const char* matrix = static_cast<const char*>(x) + layer * M * x_m * ELEMENT_BYTES;
    data += layer * N * data_n;
    scale += (GROUPED ? static_cast<long long>(blockIdx.y) : layer) * scale_lead;

    int start = 0, stop = M;
    bool none = false;  // these rows are in no group
    if constexpr (GROUPED) {
        const int group = blockIdx.y;
        none = group == groups;
        start = group == 0 ? 0 : Group::end_of(offsets[group - 1], 0, M);
        stop = none ? M : Group::end_of(offsets[group], start, M);
    }
    // This block's share begins and ends at multiples of 16, but for the group's own ends.
    const int base = start / ROWS * ROWS;
    const int share = ((stop - base + CLUSTER - 1) / CLUSTER + ROWS - 1) / ROWS * ROWS;
    const int origin = base + rank * share;
    const int first = max(start, origin), last = min(stop, origin + share);

    // Load, keep, and find the largest magnitudes.
    unsigned amax[4] = {0, 0, 0, 0};
    {
        const int piece = threadIdx.x % PIECES, column = panel + piece * IN_PIECE;
        constexpr int STEP = THREADS / PIECES;
        for (int row = first + threadIdx.x / PIECES; row < last && !none; row += AHEAD * STEP) {
            uint4 loaded[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = row + i * STEP;
                loaded[i] = make_uint4(0, 0, 0, 0);
                if (at < last) loaded[i] = load_piece(matrix + static_cast<long long>(at) * x_m * ELEMENT_BYTES, column, N);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = row + i * STEP - origin;
                if (at < KEPT && row + i * STEP < last) shared.kept[at][piece] = loaded[i];
                amax[0] = larger(amax[0], loaded[i].x);
                amax[1] = larger(amax[1], loaded[i].y);
                amax[2] = larger(amax[2], loaded[i].z);
                amax[3] = larger(amax[3], loaded[i].w);
            }
        }
#pragma unroll
        for (int mask = PIECES; mask < 32; mask *= 2) {
#pragma unroll
            for (int w = 0; w < 4; ++w) amax[w] = larger(amax[w], __shfl_xor_sync(~0u, amax[w], mask));
        }
        if (lane < PIECES) {
#pragma unroll
            for (int w = 0; w < 4; ++w) shared.warp_amax[warp][4 * piece + w] = amax[w];
        }
    }
    __syncthreads();
    if (threadIdx.x < WORDS) {
        unsigned largest = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = larger(largest, shared.warp_amax[w][threadIdx.x]);
        shared.amax[threadIdx.x] = largest;
    }
    cluster_or_block_sync<CLUSTER>();
    if (threadIdx.x < WORDS) {
        unsigned largest = 0;
#pragma unroll
        for (int other = 0; other < CLUSTER; ++other) {
            largest = larger(largest, load_of_block<CLUSTER>(&shared.amax[threadIdx.x], other));
        }
#pragma unroll
        for (int place = 0; place < IN_WORD; ++place) {
            const int column = IN_WORD * threadIdx.x + place;
            const Scale found = block_scale<FP8, FORMAT>(__float_as_uint(element(largest, place)));
            shared.inverse[column] = found.inverse;
            if (rank == 0 && panel + column < N && !none) scale[panel + column] = found.stored;
        }
    }
    __syncthreads();

    // Quantize and turn around.
    const int word = threadIdx.x % WORDS, column = panel + word * IN_WORD;
    float inverse[IN_WORD];
#pragma unroll
    for (int place = 0; place < IN_WORD; ++place) inverse[place] = shared.inverse[IN_WORD * word + place];
    for (int row = origin + threadIdx.x / WORDS * ROWS; row < last; row += THREADS / WORDS * ROWS) {
        unsigned words[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int at = row + i;
            words[i] = 0;
            if (at < first || at >= last || none) continue;
            if (at - origin < KEPT) {
                words[i] = reinterpret_cast<const unsigned*>(shared.kept[at - origin])[word];
            } else {
                const uint4 piece = load_piece(matrix + static_cast<long long>(at) * x_m * ELEMENT_BYTES,
                                               panel + word / 4 * IN_PIECE, N);
                const unsigned of_piece[4] = {piece.x, piece.y, piece.z, piece.w};
                words[i] = word % 2 ? (word % 4 == 1 ? of_piece[1] : of_piece[3])
                                    : (word % 4 == 0 ? of_piece[0] : of_piece[2]);
            }
        }
#pragma unroll
        for (int place = 0; place < IN_WORD; ++place) {
            if (column + place >= N) continue;
            unsigned packed[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float by = inverse[place];
                packed[w] = pack<FP8>(element(words[4 * w], place) * by, element(words[4 * w + 1], place) * by,
                                      element(words[4 * w + 2], place) * by, element(words[4 * w + 3], place) * by);
            }
            const uint4 out = none ? make_uint4(0, 0, 0, 0) : make_uint4(packed[0], packed[1], packed[2], packed[3]);
            unsigned char* to = data + static_cast<long long>(column + place) * data_n + row;
            if (row >= first && row + ROWS <= last) {
                store16<Store::NORMAL>(to, out);
            } else {
                const unsigned bytes[4] = {out.x, out.y, out.z, out.w};
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (row + i >= first && row + i < last) to[i] = static_cast<unsigned char>(bytes[i / 4] >> 8 * (i % 4));
                }
            }
        }
    }
    // A block must not end while another of its cluster may still read its maxima.
    if constexpr (CLUSTER > 1) cluster_or_block_sync<CLUSTER>();
}
