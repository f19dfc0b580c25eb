// The CPU's version of ops/cuda/include/instructions.cuh.
#pragma once
#include "cuda.h"

enum class Fp8 { E4M3, E5M2 };
enum class Load { CACHED, PAST_L1, LINE, FIRST_OUT, LAST_OUT };
enum class Store { NORMAL, FIRST_OUT };

template <Load HOW>
uint4 load16(const void* address) {
    uint4 v{};
    if (may_load(address, 16)) memcpy(&v, address, 16);
    return v;
}
LINKED uint2 load8(const void* address) {
    uint2 v{};
    if (may_load(address, 8)) memcpy(&v, address, 8);
    return v;
}
template <Store HOW>
void store16(void* address, uint4 v) {
    if (may_store(address, 16)) memcpy(address, &v, 16);
}
template <Store HOW>
void store8(void* address, uint2 v) {
    if (may_store(address, 8)) memcpy(address, &v, 8);
}

// Converts to FP8, rounded to nearest even, saturated.
template <Fp8 TYPE>
uint32_t to_fp8(float value) {
    constexpr int MANTISSA = TYPE == Fp8::E4M3 ? 3 : 2, OFFSET = TYPE == Fp8::E4M3 ? 7 : 15;
    constexpr double LARGEST = TYPE == Fp8::E4M3 ? 448 : 57344;
    const uint32_t sign = __float_as_uint(value) >> 31 << 7;
    if (value != value) return sign | 0x7f;
    const double magnitude = __builtin_fmin(__builtin_fabs(value), LARGEST);
    if (magnitude == 0) return sign;
    int exponent;
    __builtin_frexp(magnitude, &exponent);
    exponent = max(exponent - 1, 1 - OFFSET);  // subnormals have the least normal exponent
    const auto steps = uint32_t(__builtin_nearbyint(__builtin_ldexp(magnitude, MANTISSA - exponent)));
    return sign | (steps + (uint32_t(exponent + OFFSET - 1) << MANTISSA));
}
LINKED_TEMPLATE uint32_t to_fp8<Fp8::E4M3>(float);
LINKED_TEMPLATE uint32_t to_fp8<Fp8::E5M2>(float);
template <Fp8 TYPE>
uint32_t pack(float a, float b, float c, float d) {
    return to_fp8<TYPE>(a) | to_fp8<TYPE>(b) << 8 | to_fp8<TYPE>(c) << 16 | to_fp8<TYPE>(d) << 24;
}
#define DYNAMIC_SHARED(TYPE, NAME) TYPE& NAME = *reinterpret_cast<TYPE*>(block_memory())
LINKED float half_to_float(uint16_t half) { return float(bits_of<_Float16>(half)); }
// As inexact as the hardware may be: of the two floats that 1 / x lies between, the one that is farther from it.
LINKED float reciprocal(float x) {
    const float nearest = 1.0f / x, rest = __builtin_fmaf(-x, nearest, 1.0f);
    if (__builtin_fabsf(nearest) < __FLT_MIN__) return 0.0f;
    if (!__builtin_isfinite(nearest) || rest == 0.0f) return nearest;
    return __uint_as_float(__float_as_uint(nearest) + (rest > 0.0f ? 1 : -1));
}
LINKED void forget(uint32_t&) {}
