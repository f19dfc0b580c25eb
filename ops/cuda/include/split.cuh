// Values of 16 bits as sums of FP8: what a tensor core of FP8 needs to multiply them as they are.
#pragma once
#include "mma.cuh"

// What a row's part is divided by before it is split, so that the largest is at least 128 and less than 256: `bits` are
// those of a float32. It is multiplied by `once` and `again`, pairs of the same power of two, for one may be out of range;
// beside Inf, which stays it, all that is finite comes to 0.
struct PartsScale {
    uint32_t bits, once, again;
};

// Of the bits of the largest magnitude.
template <typename T>
INLINE PartsScale scale_of_parts(int largest) {
    PartsScale scale;
    if constexpr (IS_BF16<T>) {  // to 2 ** -112 of it, whose exponent has the five bits of a float16
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

// A pair divided by the scale, as float16.
template <typename T>
INLINE uint32_t scaled_pair(uint32_t pair, const PartsScale& scale) {
    pair = multiply_pairs<T>(multiply_pairs<T>(pair, scale.once), scale.again);
    // All but the signs to their places; that of the lower value must not come into the upper one.
    return IS_BF16<T> ? (pair << 3 & 0x7ff87ff8) | (pair & 0x80008000) : pair;
}

// Four values, the lowest first: v = scale * (parts[0] + parts[1] / 32 + ...), where these have the bits of v.
template <typename T, int PARTS>
INLINE void split(uint32_t low, uint32_t high, const PartsScale& scale, uint32_t (&parts)[PARTS]) {
    low = scaled_pair<T>(low, scale), high = scaled_pair<T>(high, scale);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        parts[i] = halves_to_e4m3(low, high);
        uint32_t low_part, high_part;
        to_halves<Fp8::E4M3>(parts[i], low_part, high_part);
        low = difference_times_32(low, low_part);
        high = difference_times_32(high, high_part);
    }
}
