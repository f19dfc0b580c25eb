// The reduction of a product whose K was split: out = parts[0] + parts[1] + … + bias (N), in this order. It has `total`
// elements, in rows of N.
//
// Macros: OUT and BIAS of the enum Element; PARTS.
#include "wave.h"

constexpr int THREADS = 256;

using Out = TypeOf<OUT>::type;
using Bias = TypeOf<Element(BIAS)>::type;
constexpr bool HAS_BIAS = Element(BIAS) != Element::NONE;

KERNEL(THREADS)
void mxfp8_sum_parts(const float* parts, const Bias* bias, Out* out, int N, int64_t total) {
    const int64_t index = int64_t(block_x()) * THREADS + thread_index();
    if (index >= total) return;
    float sum = parts[index];
#pragma unroll
    for (int part = 1; part < PARTS; ++part) sum += parts[part * total + index];
    if constexpr (HAS_BIAS) sum += float(bias[index % N]);
    out[index] = Out(sum);
}
