// silu(gate) * up of pairs of 16-bit values.
#pragma once
#include "convert.cuh"
#include "silu.cuh"

// Eight of them, computed in float32 and rounded once.
template <typename T>
INLINE uint4 gated(const uint4& gate, const uint4& up) {
    auto pair = [](uint32_t g, uint32_t u) {
        auto one = [](uint32_t g, uint32_t u) { return silu(float(T{uint16_t(g)})) * float(T{uint16_t(u)}); };
        return pack<T>(one(g, u), one(g >> 16, u >> 16));
    };
    return make_uint4(pair(gate.x, up.x), pair(gate.y, up.y), pair(gate.z, up.z), pair(gate.w, up.w));
}
