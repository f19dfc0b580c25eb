// Instructions that CUDA C++ has no name for: 16-byte accesses with cache hints, and conversions.
#pragma once
#include "l2_hints.cuh"
#include "types.cuh"

enum class Fp8 { E4M3, E5M2 };

// How data that is read once passes the caches: CACHED, through L1; PAST_L1; LINE, past L1, fetching a whole line into
// the L2; FIRST_OUT and LAST_OUT, past L1, evicted from the L2 first or last.
enum class Load { CACHED, PAST_L1, LINE, FIRST_OUT, LAST_OUT };

// How stored lines are evicted from the L2: in their turn, or first.
enum class Store { NORMAL, FIRST_OUT };

template <Load HOW>
INLINE uint4 load16(const void* address) {
    uint4 v;
    if constexpr (HOW == Load::CACHED) {
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    } else if constexpr (HOW == Load::PAST_L1) {
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
            : "l"(address));
    } else if constexpr (HOW == Load::LINE) {
        asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
            : "l"(address));
    } else {
        asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
            : "l"(address), "l"(HOW == Load::LAST_OUT ? last_out_policy() : first_out_policy()));
    }
    return v;
}

INLINE uint2 load8(const void* address) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

template <Store HOW>
INLINE void store16(void* address, uint4 v) {
    if constexpr (HOW == Store::NORMAL) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    } else {
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                     "r"(v.w)
                     : "memory");
    }
}

template <Store HOW>
INLINE void store8(void* address, uint2 v) {
    if constexpr (HOW == Store::NORMAL) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
    } else {
        asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
    }
}

// Converts four values to FP8, `a` in the lowest byte: rounded to nearest even, saturated, NaN kept.
template <Fp8 TYPE>
INLINE uint32_t pack(float a, float b, float c, float d) {
    uint32_t packed;
    if constexpr (TYPE == Fp8::E4M3) {
        asm("{.reg .b16 low, high;\n"
            " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
            " mov.b32 %0, {low, high};}"
            : "=r"(packed)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    } else {
        asm("{.reg .b16 low, high;\n"
            " cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
            " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
            " mov.b32 %0, {low, high};}"
            : "=r"(packed)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    }
    return packed;
}

INLINE float half_to_float(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// 1 / x within one unit of the last place; 0 for Inf.
INLINE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Dynamic shared memory as an object.
#define DYNAMIC_SHARED(TYPE, NAME)                         \
    extern __shared__ __align__(128) char NAME##_memory[]; \
    TYPE& NAME = *reinterpret_cast<TYPE*>(NAME##_memory)

// The same value, about which the compiler knows nothing: it can neither recompute it nor fold it.
INLINE void forget(uint32_t& value) { asm volatile("" : "+r"(value)); }
