// The part of gfx950 that the kernels of this folder use: attributes, block indices, loads with bounds, exchanges
// between the lanes of a wave, FP8, and the scaled matrix instruction. No header of HIP is needed.
#pragma once

#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define INLINE __device__ inline __attribute__((always_inline))
// At least two waves a SIMD: 256 registers suffice then, and the matrix instruction accumulates in ordinary registers.
#define KERNEL(THREADS) \
    extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS), amdgpu_waves_per_eu(2)))

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;

enum class Element { NONE, BF16, FP16, FP32 };  // NONE, which 0 is too: there is no such tensor

constexpr int WAVE = 64;

typedef float Pair __attribute__((ext_vector_type(2)));
typedef uint32_t Words __attribute__((ext_vector_type(4)));
typedef float Sums __attribute__((ext_vector_type(4)));

// The type of an element; float if there is no tensor.
template <Element KIND>
struct TypeOf {
    using type = float;
};
template <>
struct TypeOf<Element::BF16> {
    using type = __bf16;
};
template <>
struct TypeOf<Element::FP16> {
    using type = _Float16;
};

INLINE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
INLINE int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
INLINE int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
INLINE void block_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Keeps the compiler from moving instructions across: loads before this point are issued first, many in flight.
INLINE void keep_order() { __builtin_amdgcn_sched_barrier(0); }

// A value that is the same in all lanes of the wave, as a scalar.
INLINE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }

// ---- memory: less than 2 GiB from an address that all lanes share; loads past the end give zeros --------------------

using Buffer = __amdgpu_buffer_rsrc_t;
// The offset to give where nothing is to be loaded.
constexpr uint32_t OUTSIDE = 0x80000000;

INLINE Buffer buffer_of(const uint8_t* from, int size) {
    return __builtin_amdgcn_make_buffer_rsrc(const_cast<uint8_t*>(from), 0, size, 0x00027000);
}
// Loads 16 bytes from a multiple of 16.
INLINE Words load16(Buffer buffer, uint32_t offset) {
    return __builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, 0);
}
INLINE uint32_t load1(Buffer buffer, uint32_t offset) {
    return __builtin_amdgcn_raw_buffer_load_b8(buffer, offset, 0, 0);
}

// ---- e4m3, and scales -----------------------------------------------------------------------------------------------

// Widens two of the four values of a word: the lower or the upper ones.
template <bool UPPER>
INLINE Pair widened(uint32_t word) {
    return __builtin_bit_cast(Pair, __builtin_amdgcn_cvt_pk_f32_fp8(word, UPPER));
}
INLINE Pair multiply_add(Pair a, Pair b, Pair c) { return __builtin_elementwise_fma(a, b, c); }
// value * 2**exponent, rounded once.
INLINE float scaled(float value, int exponent) { return __builtin_amdgcn_ldexpf(value, exponent); }
INLINE float not_a_number() { return __builtin_nanf(""); }

// ---- lanes ----------------------------------------------------------------------------------------------------------

// The value of the lane whose number differs in bit MASK (for 4, also in the lower bits).
template <int MASK>
INLINE float exchanged(float value) {
    static_assert(MASK == 1 || MASK == 2 || MASK == 4 || MASK == 8, "within a row of 16 lanes");
    constexpr int CONTROL = MASK == 1 ? 0xb1 : MASK == 2 ? 0x4e : MASK == 4 ? 0x141 : 0x128;
    int bits = __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, value), CONTROL, 0xf, 0xf, true);
    // Without this an addition in place absorbs the move, and an emulator that adds lane by lane reads what it wrote.
    asm("" : "+v"(bits));
    return __builtin_bit_cast(float, bits);
}

// Lanes without bit MASK get the sum of `low` of theirs and of the lane they exchange with; the others the sum of
// `high`.
template <int MASK>
INLINE float folded(float low, float high) {
    if constexpr (MASK >= 16) {
        const uint32_t a = __builtin_bit_cast(uint32_t, low), b = __builtin_bit_cast(uint32_t, high);
        if constexpr (MASK == 32) {
            const auto halves = __builtin_amdgcn_permlane32_swap(a, b, false, false);
            const uint32_t first = halves[0], second = halves[1];
            return __builtin_bit_cast(float, first) + __builtin_bit_cast(float, second);
        } else {
            const auto halves = __builtin_amdgcn_permlane16_swap(a, b, false, false);
            const uint32_t first = halves[0], second = halves[1];
            return __builtin_bit_cast(float, first) + __builtin_bit_cast(float, second);
        }
    } else {
        const bool upper = thread_index() & MASK;
        return (upper ? high : low) + exchanged<MASK>(upper ? low : high);
    }
}

// ---- the matrix instruction -----------------------------------------------------------------------------------------

// sums (16, 16) += a (16, 128) * b (128, 16), e4m3 with an e8m0 scale for each 32 of K. With row = lane % 16 and group
// = lane / 16, a lane holds elements 16 * group + 0..15 and 64 + 16 * group + 0..15 of row `row` of a and of column
// `row` of b, and the scales of elements 32 * group + 0..31. Of the sums it holds rows 4 * group + 0..3 of column
// `row`.
INLINE Sums multiply_scaled(const Words (&a)[2], const Words (&b)[2], uint32_t a_scale, uint32_t b_scale, Sums sums) {
    typedef int Operand __attribute__((ext_vector_type(8)));
    const Operand left = __builtin_shufflevector(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7);
    const Operand right = __builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(left, right, sums, 0, 0, 0, a_scale, 0, b_scale);
}
