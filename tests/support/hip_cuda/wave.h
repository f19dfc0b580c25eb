// Replaces ops/hip/wave.h to run its portable part on an NVIDIA GPU: a wave is a warp, and the code checks the bounds
// of buffers.
#pragma once

#define INLINE __device__ __forceinline__
#define KERNEL(THREADS) extern "C" __global__ __launch_bounds__(THREADS)

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;

enum class Element { NONE, BF16, FP16, FP32 };  // NONE, which 0 is too: there is no such tensor

constexpr int WAVE = 32;

using Pair = float2;
using Words = uint4;

struct Bf16 {
    uint16_t bits;
    INLINE explicit Bf16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    INLINE explicit operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
struct Fp16 {
    uint16_t bits;
    INLINE explicit Fp16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    INLINE explicit operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

template <Element KIND>
struct TypeOf {
    using type = float;
};
template <>
struct TypeOf<Element::BF16> {
    using type = Bf16;
};
template <>
struct TypeOf<Element::FP16> {
    using type = Fp16;
};

INLINE int thread_index() { return threadIdx.x; }
INLINE int block_x() { return blockIdx.x; }
INLINE void keep_order() {}
INLINE int uniform(int value) { return value; }

struct Buffer {
    const uint8_t* from;
    uint32_t size;
};
constexpr uint32_t OUTSIDE = 0x80000000;

INLINE Buffer buffer_of(const uint8_t* from, int size) { return {from, uint32_t(size)}; }
INLINE Words load16(Buffer buffer, uint32_t offset) {
    if (offset + 16 > buffer.size) return Words{0, 0, 0, 0};
    return __ldg(reinterpret_cast<const Words*>(buffer.from + offset));
}
INLINE uint32_t load1(Buffer buffer, uint32_t offset) { return offset < buffer.size ? __ldg(buffer.from + offset) : 0; }

template <bool UPPER>
INLINE Pair widened(uint32_t word) {
    const uint16_t two = UPPER ? word >> 16 : word;
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    Pair pair;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(halves));
    return pair;
}
INLINE Pair multiply_add(Pair a, Pair b, Pair c) { return {__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y)}; }
INLINE float scaled(float value, int exponent) { return ldexpf(value, exponent); }
INLINE float not_a_number() { return __uint_as_float(0x7fc00000); }

template <int MASK>
INLINE float exchanged(float value) {
    return __shfl_xor_sync(0xffffffff, value, MASK);
}
template <int MASK>
INLINE float folded(float low, float high) {
    const bool upper = threadIdx.x & MASK;
    return (upper ? high : low) + exchanged<MASK>(upper ? low : high);
}
