// 16-bit floats without CUDA's headers, to which NVRTC would need a path: conversion, packing, and stores of pairs.
#pragma once
#include "hopper.cuh"

struct Bf16 {
    uint16_t bits;
    INLINE explicit operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};

struct Fp16 {
    uint16_t bits;
    INLINE explicit operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

// Packs two values into a word, the first in the low half.
template <typename T>
INLINE uint32_t pack(float low, float high);

template <>
INLINE uint32_t pack<Bf16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <>
INLINE uint32_t pack<Fp16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Stores `left` and `right` side by side, as far as `room` columns exist, in one access if the address is aligned.
template <typename T>
INLINE void store_pair(T* to, float left, float right, int room) {
    const uint32_t word = pack<T>(left, right);
    if (room >= 2 && reinterpret_cast<uint64_t>(to) % 4 == 0) {
        *reinterpret_cast<uint32_t*>(to) = word;
    } else {
        if (room >= 1) to[0].bits = uint16_t(word);
        if (room >= 2) to[1].bits = uint16_t(word >> 16);
    }
}

INLINE void store_pair(float* to, float left, float right, int room) {
    if (room >= 2 && reinterpret_cast<uint64_t>(to) % 8 == 0) {
        *reinterpret_cast<float2*>(to) = make_float2(left, right);
    } else {
        if (room >= 1) to[0] = left;
        if (room >= 2) to[1] = right;
    }
}

#include "out_types.cuh"
