// The second phase of a product whose K was split: out (B, M, N) = Σ over parts of (B, PARTS, M, N) float32, plus bias.
//
// Every element is added up by one thread in the order of the parts, so that the same inputs give the same bits.
// Macros: OUT and BIAS as in scaled_mm.cu.
#include "convert.cuh"

constexpr int THREADS = 256;

extern "C" __global__ __launch_bounds__(THREADS)
void sum_parts(const float* parts, const BiasType* bias, OutType* out, int M, int N, int count, int batches, int out_batch,
               int out_m) {
    const int64_t pairs = (N + 1) / 2, matrix = int64_t(M) * N;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < pairs * M * batches; i += int64_t(gridDim.x) * THREADS) {
        const int n = int(i % pairs) * 2, m = int(i / pairs % M), batch = int(i / pairs / M);
        const bool both = n + 1 < N;
        const float* from = parts + batch * count * matrix + int64_t(m) * N + n;
        float left = 0.0f, right = 0.0f;
        for (int part = 0; part < count; part++, from += matrix) {
            left += from[0];
            right += both ? from[1] : 0.0f;
        }
#if BIAS
        left += float(bias[n]);
        right += both ? float(bias[n + 1]) : 0.0f;
#endif
        store_pair(out + int64_t(batch) * out_batch + int64_t(m) * out_m + n, left, right, N - n);
    }
}
