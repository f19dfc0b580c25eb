// Splits 16-bit values into sums of FP8 values, so that an FP8 tensor core multiplies them exactly.
#pragma once
#include "mma.cuh"

// The scale of a row's part, by which it is divided before it is split, so that the largest magnitude is from 128 to
// 256. `bits` is the scale as a float32. The division is by two multiplications, by the pairs of powers of two `once`
// and `again`, for one power may be out of range. If the part has an Inf, Inf stays Inf and all finite values become 0.
struct PartsScale {
    uint32_t bits, once, again;
};

// From the bits of the largest magnitude.
template <typename T>
INLINE PartsScale scale_of_parts(int largest) {
    PartsScale scale;
    if constexpr (IS_BF16<T>) {  // exact to 2 ** -112 of the largest: the exponents fit into the five bits of a float16
        const int exponent = max(largest >> 7, 8);
        scale.once = (max(149 - exponent, 1) << 7) * 0x10001;
        scale.again = (exponent < 255 ? min(275 - exponent, 127) << 7 : 1) * 0x10001;
        scale.bits = exponent < 255 ? (exponent - 7) << 23 : largest << 16;
    } else {
        const int exponent = max(largest >> 10, 1);
        scale.once = (exponent < 31 ? min(37 - exponent, 30) << 10 : 1) * 0x10001;
        scale.again = (exponent < 31 ? max(22 - exponent, 15) << 10 : 1 << 10) * 0x10001;
        scale.bits = exponent < 31 ? (exponent + 105) << 23 : largest << 13 | 0x7f800000;
    }
    return scale;
}

// Divides a pair by the scale; the result is a pair of float16.
template <typename T>
INLINE uint32_t scaled_pair(uint32_t pair, const PartsScale& scale) {
    pair = multiply_pairs<T>(multiply_pairs<T>(pair, scale.once), scale.again);
    // Shift all bits but the signs; the lower value's sign must not reach the upper value.
    return IS_BF16<T> ? (pair << 3 & 0x7ff87ff8) | (pair & 0x80008000) : pair;
}

// Splits four values, the lowest first: v = scale * (parts[0] + parts[1] / 32 + ...), as far as the parts have v's
// bits. Without APART v = scale * (parts[0] + parts[1] + ...), so that all parts may be summed at once; then what is
// smaller than 2 ** -17 of the largest magnitude is left out.
template <typename T, int COUNT, bool APART = true>
INLINE void split(uint32_t low, uint32_t high, const PartsScale& scale, uint32_t (&parts)[COUNT]) {
    low = scaled_pair<T>(low, scale), high = scaled_pair<T>(high, scale);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        parts[i] = halves_to_e4m3(low, high);
        uint32_t low_part, high_part;
        to_halves<Fp8::E4M3>(parts[i], low_part, high_part);
        low = APART ? difference_times_32(low, low_part) : difference(low, low_part);
        high = APART ? difference_times_32(high, high_part) : difference(high, high_part);
    }
}
