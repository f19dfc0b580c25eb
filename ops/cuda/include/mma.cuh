// Instructions for products of few rows, beside `instructions.cuh`: FP8 widened to 16 bits, mma.sync, asynchronous
// copies to shared memory, prefetches, and the shared memory of the cluster's other blocks.
#pragma once
#include "convert.cuh"
#include "instructions.cuh"
#include "overlap.cuh"

// Dynamic shared memory, of as many bytes as the launch asks for.
INLINE char* block_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

// `load16` past L1, which the compiler does not move over waits: weights are loaded before anything is waited for.
INLINE uint4 load_ahead(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// Loads, before `wait_for_launches`, what no launch that may still run writes; `ld.global.nc` could be moved over the
// wait.
INLINE uint32_t load_constant(const uint32_t* address) {
    uint32_t v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

INLINE float load_constant(const float* address) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}

// Loads 16 bytes that an earlier launch may have written, past L1, which may hold stale lines; zeros if not `inside`.
INLINE uint4 load_written(const void* address, bool inside) {
    uint4 v;
    asm volatile(
        "{.reg .pred inside;\n"
        "setp.ne.u32 inside, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@inside ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(address), "r"(uint32_t(inside))
        : "memory");
    return v;
}

INLINE uint32_t load_byte_ahead(const void* address) {
    uint32_t v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

// Starts a copy of the first `bytes` of 16 to shared memory, zeros after them; both addresses are multiples of 16.
INLINE void copy16(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Ends the group of copies that this thread has started; waits until all ended groups have arrived.
INLINE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
INLINE void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Stores to the same address in the shared memory of block `rank` of the cluster.
INLINE void store_to_block(float2* to, uint32_t rank, float2 value) {
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.v2.f32 [remote], {%2, %3};}" ::"r"(shared_address(to)),
        "r"(rank), "f"(value.x), "f"(value.y)
        : "memory");
}

// Prefetches memory to the L2, in multiples of 16 bytes. It may precede the wait: later writes go to the L2 as well.
INLINE void prefetch(const void* address, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// Prefetches at least 32 bytes, from a multiple of 32 on.
INLINE void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Converts four FP8 values to two pairs of float16, the lowest byte first: exactly, NaN and Inf too.
template <Fp8 TYPE>
INLINE void to_halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
    if constexpr (TYPE == Fp8::E4M3) {
        asm("{.reg .b16 low, high;\n"
            " mov.b32 {low, high}, %2;\n"
            " cvt.rn.f16x2.e4m3x2 %0, low;\n"
            " cvt.rn.f16x2.e4m3x2 %1, high;}"
            : "=r"(low), "=r"(high)
            : "r"(bytes));
    } else {  // E5M2 is the upper half of a float16
        low = __byte_perm(bytes, 0, 0x1404);
        high = __byte_perm(bytes, 0, 0x3424);
    }
}

template <typename T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<Bf16> = true;

// Rounds two pairs of float16 to four e4m3 values, the lowest first.
INLINE uint32_t halves_to_e4m3(uint32_t low, uint32_t high) {
    uint32_t bytes;
    asm("{.reg .b16 low, high;\n"
        " cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
        " mov.b32 %0, {low, high};}"
        : "=r"(bytes)
        : "r"(low), "r"(high));
    return bytes;
}

// a - b, for pairs of float16.
INLINE uint32_t difference(uint32_t a, uint32_t b) {
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// (a - b) * 32, for pairs of float16.
INLINE uint32_t difference_times_32(uint32_t a, uint32_t b) {
    asm("sub.rn.f16x2 %0, %0, %1;\n mul.rn.f16x2 %0, %0, %2;" : "+r"(a) : "r"(b), "r"(0x50005000));
    return a;
}

template <typename T>
INLINE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    if constexpr (IS_BF16<T>)
        asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    else
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// Converts a pair of float16, times `scale`, to a pair of bfloat16. It rounds, but FP8 values alone are exact.
INLINE uint32_t halves_to_bf16(uint32_t pair) {
    return pack<Bf16>(float(Fp16{uint16_t(pair)}), float(Fp16{uint16_t(pair >> 16)}));
}
INLINE uint32_t halves_to_bf16(uint32_t pair, float scale) {
    return pack<Bf16>(float(Fp16{uint16_t(pair)}) * scale, float(Fp16{uint16_t(pair >> 16)}) * scale);
}

// Converts four FP8 values to two pairs of T, the lowest byte first.
template <typename T, Fp8 TYPE>
INLINE void widen(uint32_t bytes, uint32_t& low, uint32_t& high) {
    to_halves<TYPE>(bytes, low, high);
    if constexpr (IS_BF16<T>) {
        low = halves_to_bf16(low);
        high = halves_to_bf16(high);
    }
}

// Converts four FP8 values times `scale` to two pairs of bfloat16, the lowest byte first.
template <Fp8 TYPE>
INLINE void widen_scaled(uint32_t bytes, float scale, uint32_t& low, uint32_t& high) {
    to_halves<TYPE>(bytes, low, high);
    low = halves_to_bf16(low, scale);
    high = halves_to_bf16(high, scale);
}

// d (16 x 8) += a (16 x 16) · b (16 x 8) for a warp, in the fragments of PTX's mma.m16n8k16.
template <typename T>
INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (IS_BF16<T>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The descriptor of wgmma's right operand, 32 bytes deep and not swizzled: for every eight rows an 8 x 16-byte matrix,
// as `load_matrices` has them, of the first 16 bytes, and then one of the other 16.
INLINE uint64_t descriptor_of_matrices(const void* first) {
    return uint64_t(256 >> 4) << 32 | uint64_t(128 >> 4) << 16 | (shared_address(first) & 0x3FFFF) >> 4;
}
