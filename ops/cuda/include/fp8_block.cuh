// The scale of a block from its largest magnitude, bit for bit as in fp8fn.ops.reference.quantize; partial stores.
#pragma once
#include "instructions.cuh"

enum class Format { FP32, POW2, E8M0, RCEIL };

template <Format KIND>
struct StoredScale {
    using type = float;
};
template <>
struct StoredScale<Format::E8M0> {
    using type = uint8_t;
};
template <>
struct StoredScale<Format::RCEIL> {
    using type = uint8_t;
};

template <Format KIND>
struct BlockScale {
    typename StoredScale<KIND>::type stored;
    float inverse;
};

// a / LARGEST rounded to nearest, for finite a from 1e-12 on: one Newton step from the product with the reciprocal.
// __fdiv_rn has a slow path for subnormal results, a call that needs more registers than the tile has.
template <Fp8 TYPE>
INLINE float over_largest(float a) {
    constexpr float LARGEST = TYPE == Fp8::E4M3 ? 448.0f : 57344.0f;
    constexpr float RECIPROCAL = 1.0f / LARGEST;
    const float quotient = __fmul_rn(a, RECIPROCAL);
    return __fmaf_rn(__fmaf_rn(-LARGEST, quotient, a), RECIPROCAL, quotient);
}

// The scale of a block whose largest magnitude has these bits in float32. As integers the bits order as the floats do,
// NaN above Inf above all others.
template <Fp8 TYPE, Format KIND>
INLINE BlockScale<KIND> block_scale(uint32_t bits) {
    constexpr int LARGEST_EXPONENT = TYPE == Fp8::E4M3 ? 8 : 15;
    constexpr uint32_t INFINITY_BITS = 0x7f800000u;
    const bool finite = bits < INFINITY_BITS;
    if constexpr (KIND == Format::E8M0 || KIND == Format::RCEIL) {
        // One more if the fraction exceeds that of the largest FP8 value, which is 1.75 in both types.
        constexpr uint32_t ADDEND = KIND == Format::RCEIL ? 0x7fffffu - 0x600000u : 0u;
        const int exponent = max(int((bits + ADDEND) >> 23) - LARGEST_EXPONENT, 0);
        // 2 ** (127 - exponent) without a division: at exponent 0 the scale itself is subnormal.
        const float inverse = __uint_as_float(finite ? (254 - exponent) << 23 : 0x7fc00000u);
        return {uint8_t(finite ? exponent : 255), inverse};
    } else {
        const float amax = __uint_as_float(max(bits, __float_as_uint(1e-12f)));
        float scale = over_largest<TYPE>(amax);
        if constexpr (KIND == Format::POW2) {
            scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & INFINITY_BITS);
        }
        scale = finite ? scale : amax;
        // __frcp_rn without its slow path for subnormals. The inverse of Inf is 0: the Newton step would make it NaN.
        float inverse = reciprocal(scale);
        if (finite) inverse = __fmaf_rn(inverse, __fmaf_rn(-scale, inverse, 1.0f), inverse);
        return {scale, inverse};
    }
}

// Stores the first `count` bytes of 16.
INLINE void store_bytes(uint8_t* to, uint4 piece, int count) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (i < count) to[i] = uint8_t(words[i / 4] >> 8 * (i % 4));
    }
}

// The first `count` bytes of 16, then zeros.
INLINE uint4 first_bytes(uint4 piece, int count) {
    if (count >= 16) return piece;
    uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const int left = count - 4 * w;
        words[w] &= left >= 4 ? ~0u : left > 0 ? (1u << 8 * left) - 1 : 0u;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
