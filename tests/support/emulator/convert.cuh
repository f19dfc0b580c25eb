// The CPU's version of ops/cuda/include/convert.cuh.
#pragma once
#include <stdint.h>

#include "hopper.cuh"
#include "instructions.cuh"

struct Bf16 {
    uint16_t bits;
    explicit operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
struct Fp16 {
    uint16_t bits;
    explicit operator float() const { return half_to_float(bits); }
};

template <typename T>
uint32_t rounded(float value);
template <>
LINKED uint32_t rounded<Bf16>(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <>
LINKED uint32_t rounded<Fp16>(float value) {
    return bits_of<uint16_t>(static_cast<_Float16>(value));
}
template <typename T>
uint32_t pack(float low, float high) {
    return rounded<T>(low) | rounded<T>(high) << 16;
}

template <typename T>
void store_pair(T* to, float left, float right, int room) {
    const float values[] = {left, right};
    for (int i = 0; i < 2 && i < room; ++i) {
        if (!may_store(to + i, sizeof(T))) continue;
        if constexpr (sizeof(T) == 4) {
            to[i] = values[i];
        } else {
            to[i].bits = rounded<T>(values[i]);
        }
    }
}

#include "out_types.cuh"
