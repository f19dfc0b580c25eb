// Quantizes silu(gate) * up, gate and up `(B, M, N)` in blocks of 1 x 128, in one read and one launch: the product as
// `quantize.cu` does, gate and up to e4m3 with float32 scales, as they are kept for the backward.
//
// Decomposition. A block of threads has a tile of TILE_M x 128. A thread holds 8 columns of ROWS consecutive rows of
// gate and of up, and then of the product. No thread waits for another warp.
//
// Macros: INPUT, of 16 bits; FP8 and FORMAT of the product; EVEN, WARPS, ROWS, BLOCKS, LOAD, STORE and ROW_BYTES as in
// quantize.cu. N is a multiple of 8, and rows begin at multiples of 16 bytes: PARTIAL is 0 and ALIGNED 1.
#include "gated_tile.cuh"

using Stored = StoredScale<FORMAT>::type;

template <bool WHOLE>
INLINE void quantize_product(const PackedValues& gate, const PackedValues& up, uint8_t* data, Stored* scales, int row_m,
                             int64_t scale_block, Place at, int M, int N) {
    const int lane = threadIdx.x % 32;
    FloatValues values;
    uint32_t amax[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) values.row[r][c] = silu(gate.at(r, c)) * up.at(r, c);
        amax[r] = values.row_amax(r);
    }
    int row;
    const auto scale = block_scale<FP8, FORMAT>(scatter_max(amax, ROW_LANES, lane, row));
    if (leads_item<ROWS>(lane, ROW_LANES) && (WHOLE || at.row + row < M)) {
        scales[scale_block + at.row + row] = scale.stored;
    }
    const auto inverse = [&](int r) {
        return __shfl_sync(~0u, scale.inverse, (lane & OTHER_ROWS) | lane_of_item<ROWS>(r, ROW_LANES));
    };
    store_rows<WHOLE, FP8>(values, inverse, data, row_m, at, M, N);
}

struct In {
    const void *gate, *up;
    int64_t first_row;
    int gate_m, up_m;
};
struct Out {
    uint8_t* data;
    Stored* scale;
    uint8_t* saved[2];
    float* saved_scale[2];
    int row_m, scale_lead, saved_lead;
};

template <bool WHOLE>
INLINE void quantize_tile(const In& in, const Out& out, Place at, int M, int N) {
    PackedValues gate, up;
    load_octets<LOAD, WHOLE>(gate.row, in.gate, in.first_row, at.row, at.column, M, N, in.gate_m);
    load_octets<LOAD, WHOLE>(up.row, in.up, in.first_row, at.row, at.column, M, N, in.up_m);
    const int64_t block_n = blockIdx.x;
    store_pair_of_rows<WHOLE, Fp8::E4M3, Format::FP32>(gate, up, out.saved, out.saved_scale, out.row_m,
                                                       block_n * out.saved_lead, at, M, N);
    quantize_product<WHOLE>(gate, up, out.data, out.scale, out.row_m, block_n * out.scale_lead, at, M, N);
}

// Data has strides (row_m, 1), scales (1, scale_lead), those of gate and up (1, saved_lead). Matrices of a batch are
// M * gate_m and M * up_m apart.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    silu_mul_saved(const void* gate, const void* up, uint8_t* data, Stored* scale, uint8_t* gate_data,
                   float* gate_scale, uint8_t* up_data, float* up_scale, int M, int N, int gate_m, int up_m, int row_m,
                   int scale_lead, int saved_lead) {
    const int lane = threadIdx.x % 32;
    Place at;
    at.octet = (lane & 7) | (lane & 16) >> 1;
    at.group = 2 * (threadIdx.x / 32) + (lane & OTHER_ROWS) / OTHER_ROWS;
    at.row = blockIdx.y * TILE_M + ROWS * at.group;
    at.column = blockIdx.x * TILE_N + 8 * at.octet;

    const int64_t batch = blockIdx.z, blocks_n = (N + 127) / 128;
    const int64_t of_data = batch * M * row_m, of_saved = batch * blocks_n * saved_lead;
    const In in{gate, up, batch * M, gate_m, up_m};
    const Out out{
        data + of_data,
        scale + batch * blocks_n * scale_lead,
        {gate_data + of_data, up_data + of_data},
        {gate_scale + of_saved, up_scale + of_saved},
        row_m,
        scale_lead,
        saved_lead,
    };
    const bool whole = (int(blockIdx.y) + 1) * TILE_M <= M && int(blockIdx.x) < N / TILE_N;
    if (EVEN || whole) {
        quantize_tile<true>(in, out, at, M, N);
    } else {
        quantize_tile<false>(in, out, at, M, N);
    }
}
