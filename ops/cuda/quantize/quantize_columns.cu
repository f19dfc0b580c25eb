// Quantizes whole columns: x (B, M, N), row-major, to FP8 with one scale for each column of a matrix, or of each group
// of its rows; the output is column-major. x is read once where a group's rows fit into a cluster's shared memory, else
// twice.
//
// Decomposition. A cluster of CLUSTER blocks has a panel of PANEL columns of one matrix or group, and each block a
// share of its rows. A block loads windows of `kept` rows, finds each column's largest magnitude, and keeps the last
// window in shared memory, which mostly is the only one. The blocks of the cluster read each other's maxima. Then each
// block quantizes its windows from the last to the first, and loads again the ones that it did not keep.
//
// Shared memory: maxima and inverse scales (`Shared`), then the rows of a window.
//
// Macros: those of panel.cuh; RESIDENT, blocks a multiprocessor; LOAD, of the enum of instructions.cuh; GROUPED, rows
// are tokens of groups, and tokens in no group become zeros; ALIGNED, x loads by 16 bytes; PARTIAL, N is not a multiple
// of 8.
#include "groups.cuh"
#include "panel.cuh"

constexpr int AHEAD = 8;  // pieces in flight, for each thread

// Keeps the columns of a piece that lie before N, of which there is at least one; loads them one by one if not ALIGNED.
INLINE uint4 trimmed(uint4 piece, const char* from, int column, int N) {
    uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int c = 0; c < IN_PIECE; ++c) {
        const int shift = INPUT == Element::FP32 ? 0 : c % 2 * 16;
        const uint32_t mask = INPUT == Element::FP32 ? ~0u : 0xffffu << shift;
        uint32_t& word = words[c / IN_WORD];
        if (column + c >= N) {
            word &= ~mask;
        } else if (!ALIGNED) {
            const char* at = from + c * ELEMENT_BYTES;
            const uint32_t value = INPUT == Element::FP32 ? __ldg(reinterpret_cast<const uint32_t*>(at))
                                                          : __ldg(reinterpret_cast<const uint16_t*>(at));
            word |= value << shift;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    quantize_columns(const void* x, uint8_t* data, Stored* scale, const int* offsets, int M, int N, int x_m, int data_n,
                     int scale_lead, int groups, int kept) {
    DYNAMIC_SHARED(Shared, shared);
    char* const rows = reinterpret_cast<char*>(&shared + 1);
    const int rank = blockIdx.x % CLUSTER, panel = blockIdx.x / CLUSTER * PANEL;
    const int64_t layer = blockIdx.z;  // the matrix of the batch
    const char* matrix = static_cast<const char*>(x) + layer * M * x_m * ELEMENT_BYTES;
    data += layer * N * data_n;
    scale += (GROUPED ? int64_t(blockIdx.y) : layer) * scale_lead;

    int start = 0, stop = M;
    bool none = false;  // whether these rows are in no group
    if constexpr (GROUPED) {
        const int group = blockIdx.y;
        none = group == groups;
        start = group == 0 ? 0 : Group::end_of(offsets[group - 1], 0, M);
        stop = none ? M : Group::end_of(offsets[group], start, M);
    }
    const int base = start / SECTOR * SECTOR;
    const int share = ((stop - base + CLUSTER - 1) / CLUSTER + SECTOR - 1) / SECTOR * SECTOR;
    const int origin = base + rank * share;
    const int first = max(start, origin), last = min(stop, origin + share);
    const int windows = (last - origin + kept - 1) / kept;

    // A thread writes the same places of every window, so the next window needs no barrier where nothing was read.
    const auto load = [&](int window, auto&& visit) {
        const int top = origin + window * kept, high = min(last, top + kept);
        const int piece = threadIdx.x % PIECES, column = panel + piece * IN_PIECE;
        const uint32_t count = column < N ? max(high - first, 0) : 0;  // rows to load, from `first` on
        const int64_t step = int64_t(ROWS_AT_ONCE) * x_m * ELEMENT_BYTES;
        const char* from = matrix + (int64_t(top + threadIdx.x / PIECES) * x_m + column) * ELEMENT_BYTES;
        for (int row = threadIdx.x / PIECES; row < high - top; row += AHEAD * ROWS_AT_ONCE, from += AHEAD * step) {
            uint4 loaded[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                loaded[i] = make_uint4(0, 0, 0, 0);
                if (uint32_t(top + row + i * ROWS_AT_ONCE - first) < count) {
                    if constexpr (ALIGNED) loaded[i] = load16<LOAD>(from + i * step);
                    if constexpr (!ALIGNED || PARTIAL) loaded[i] = trimmed(loaded[i], from + i * step, column, N);
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (row + i * ROWS_AT_ONCE < high - top)
                    *reinterpret_cast<uint4*>(rows + place_of(row + i * ROWS_AT_ONCE, piece)) = loaded[i];
                visit(loaded[i]);
            }
        }
    };

    // Find the largest magnitudes and the scales.
    uint32_t amax[4] = {0, 0, 0, 0};
    for (int window = 0; window < windows && !none; ++window) {
        load(window, [&](uint4 piece) { take_larger(amax, piece); });
    }
    publish(amax, shared, 0);
    find_scales(shared, 0, rank, rank == 0 && !none ? scale + panel : nullptr, N - panel);
    cluster_arrive<CLUSTER>(false);  // the other blocks' maxima are read

    // Quantize and store, the window that is in shared memory first.
    for (int window = windows - 1; window >= 0; --window) {
        if (window < windows - 1 && !none) {
            __syncthreads();
            load(window, [](uint4) {});
            __syncthreads();
        }
        const int top = origin + window * kept;
        store_rows(rows, first - top, min(last - top, kept), shared.inverse, data + int64_t(panel) * data_n + top,
                   data_n, N - panel, none);
    }
    cluster_wait<CLUSTER>();  // a block must not end while another may still read its maxima
}
