// The functions of ops/cuda/mma.cuh for the CPU.
#pragma once
#include "convert.cuh"
#include "overlap.cuh"

inline uint4 load_ahead(const void* address) { return load16<Load::PAST_L1>(address); }

inline uint32_t load_constant(const uint32_t* address) { return __ldg(address); }
inline float load_constant(const float* address) { return __ldg(address); }

inline uint4 load_written(const void* address, bool inside) {
    return inside ? *static_cast<const uint4*>(address) : make_uint4(0, 0, 0, 0);
}

inline uint32_t load_byte_ahead(const void* address) { return __ldg(static_cast<const uint8_t*>(address)); }

// A thread's copies are made when it waits for them, as late as they may be.
struct Copy {
    char* to;
    const char* from;
    int bytes, whole;  // the rest of the whole is zeros
};
inline constexpr int MOST_COPIES = 512;
inline Copy copies[MOST_THREADS][MOST_COPIES];
inline int copy_count[MOST_THREADS];

inline void copy16(void* to, const void* from, int bytes) {
    if (bytes > 0 && !allowed("copy", from, 16, bytes)) return;
    if (copy_count[current] == MOST_COPIES) return break_off("more copies than the emulator has room for");
    copies[current][copy_count[current]++] = {static_cast<char*>(to), static_cast<const char*>(from), bytes, 16};
}
inline void wait_for_copies() {
    for (int i = 0; i < copy_count[current]; ++i) {
        const Copy& copy = copies[current][i];
        memset(copy.to, 0, copy.whole);
        memcpy(copy.to, copy.from, copy.bytes);
    }
    copy_count[current] = 0;
}

inline void store_to_block(float2* to, uint32_t rank, float2 value) {
    const long blocks = static_cast<long>(rank) - cluster_rank();
    *reinterpret_cast<float2*>(reinterpret_cast<char*>(to) + blocks * BLOCK_MEMORY) = value;
}
inline void end_copies() {}
inline void prefetch(const void* address, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i += 16) may_load(static_cast<const char*>(address) + i, 16);
}
inline void prefetch_line(const void* address) { may_load(address, 1); }

template <Fp8 TYPE>
float of_fp8(uint8_t bits) {
    constexpr int MANTISSA = TYPE == Fp8::E4M3 ? 3 : 2, OFFSET = TYPE == Fp8::E4M3 ? 7 : 15;
    const int magnitude = bits & 0x7f, exponent = magnitude >> MANTISSA, fraction = magnitude & ((1 << MANTISSA) - 1);
    float value = exponent == 0 ? __builtin_ldexpf(fraction, 1 - OFFSET - MANTISSA)
                                : __builtin_ldexpf(fraction + (1 << MANTISSA), exponent - OFFSET - MANTISSA);
    if (TYPE == Fp8::E4M3 ? magnitude == 0x7f : magnitude > 0x7c) value = __builtin_nanf("");
    if (TYPE == Fp8::E5M2 && magnitude == 0x7c) value = __builtin_inff();
    return bits & 0x80 ? -value : value;
}
template <typename T, Fp8 TYPE>
void widen(uint32_t bytes, uint32_t& low, uint32_t& high) {
    float value[4];
    for (int i = 0; i < 4; ++i) value[i] = of_fp8<TYPE>(bytes >> 8 * i);
    low = pack<T>(value[0], value[1]);
    high = pack<T>(value[2], value[3]);
}

template <typename T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<Bf16> = true;

template <typename T>
float of_pair(uint32_t pair, int upper) {
    return static_cast<float>(T{static_cast<uint16_t>(pair >> 16 * upper)});
}
template <Fp8 TYPE>
void to_halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
    widen<Fp16, TYPE>(bytes, low, high);
}
inline uint32_t halves_to_e4m3(uint32_t low, uint32_t high) {
    return pack<Fp8::E4M3>(of_pair<Fp16>(low, 0), of_pair<Fp16>(low, 1), of_pair<Fp16>(high, 0), of_pair<Fp16>(high, 1));
}
inline uint32_t difference_times_32(uint32_t a, uint32_t b) {
    auto of = [&](int i) { return (of_pair<Fp16>(a, i) - of_pair<Fp16>(b, i)) * 32.0f; };
    return pack<Fp16>(of(0), of(1));
}
template <typename T>
uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    return pack<T>(of_pair<T>(a, 0) * of_pair<T>(b, 0), of_pair<T>(a, 1) * of_pair<T>(b, 1));
}

// The fragments of a warp's lanes, where all of them can read.
struct Fragments {
    uint32_t a[4], b[2];
};
inline Fragments fragments[MOST_THREADS];

template <typename T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    fragments[current] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    meet_warp();
    const Fragments* warp = fragments + current / 32 * 32;
    const int lane = current % 32;
    auto half = [](uint32_t pair, int upper) { return static_cast<float>(T{static_cast<uint16_t>(pair >> 16 * upper)}); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const int pair = k % 8 / 2;
            sum += static_cast<double>(half(warp[row % 8 * 4 + pair].a[row / 8 + k / 8 * 2], k % 2)) *
                   half(warp[column * 4 + pair].b[k / 8], k % 2);
        }
        d[i] = static_cast<float>(sum);
    }
    meet_warp();
}

// What a thread asks of wgmma is there at once, and of its warp's others when it has waited; a descriptor is an address.
inline void fence_async() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
void wgmma_wait() {
    meet_warp();
}
template <int COUNT>
void fence_registers(float (&)[COUNT]) {}
inline uint64_t descriptor_of_matrices(const void* first) { return reinterpret_cast<uint64_t>(first); }

#pragma GCC push_options
#pragma GCC optimize("O2")
struct Warpgroup {
    int arrived;
    unsigned round;
};
inline Warpgroup warpgroups[MOST_BLOCKS][MOST_THREADS / 128];
inline void meet_group() {
    Warpgroup& group = warpgroups[cluster_rank()][current % thread_count / 128];
    meet(group.arrived, group.round, 128);
}

// Of operands that bulk copies have put into shared memory, swizzled, in rows of 128 bytes.
inline const uint8_t* swizzled(uint64_t descriptor, int row, int byte) {
    const uint32_t address = static_cast<uint32_t>(descriptor) * 16, within = address % 128 + byte;
    return reinterpret_cast<const uint8_t*>(memories[0]) + address / 128 * 128 + row * 128 + (within ^ row % 8 * 16);
}

// The fragments of the warp's lanes, once all of the warpgroup have come.
inline const Fragments* shown(const uint32_t (&a)[4]) {
    fragments[current] = {{a[0], a[1], a[2], a[3]}, {}};
    meet_group();
    return fragments + current / 32 * 32;
}
// Of a warp's 16 rows and all columns those elements that a thread has; `product` of row, column and k.
template <int OF_K, int COUNT, typename Product>
void multiply(float (&d)[COUNT], int onto, Product product) {
    const int lane = current % 32;
    for (int i = 0; i < COUNT; ++i) {
        const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = onto ? d[i] : 0.0;
        for (int k = 0; k < OF_K; ++k) sum += product(row, column, k);
        d[i] = static_cast<float>(sum);
    }
}

#ifdef B_FP8
template <Fp8 TYPE>
struct Values {
    float of[256];
    Values() {
        for (int bits = 0; bits < 256; ++bits) of[bits] = of_fp8<TYPE>(bits);
    }
};
template <Fp8 TYPE>
inline const Values<TYPE> values;

// Of matrices at a pointer, or swizzled ones, whose addresses in shared memory are small.
inline uint8_t byte_of_right(uint64_t descriptor, int column, int k) {
    if (descriptor >> 32 == 0) return *swizzled(descriptor, column, k);
    return reinterpret_cast<const uint8_t*>(descriptor)[column / 8 * 256 + k / 16 * 128 + column % 8 * 16 + k % 16];
}

template <int COUNT>
void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int onto) {
    const Fragments* warp = shown(a);
    multiply<32>(d, onto, [&](int row, int column, int k) {
        const uint32_t left = warp[row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2] >> k % 4 * 8;
        return static_cast<double>(values<B_FP8>.of[left & 0xff]) * values<A_FP8>.of[byte_of_right(b, column, k)];
    });
    meet_group();
}

template <int COUNT>
void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, int onto) {
    const int first_row = threadIdx.x / 32 % 4 * 16;
    multiply<32>(d, onto, [&](int row, int column, int k) {
        return static_cast<double>(values<B_FP8>.of[*swizzled(a, first_row + row, k)]) *
               values<A_FP8>.of[*swizzled(b, column, k)];
    });
}
#endif

#ifdef WIDE
template <int COUNT>
void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int onto) {
    const Fragments* warp = shown(a);
    multiply<16>(d, onto, [&](int row, int column, int k) {
        const uint32_t left = warp[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
        const auto* right = reinterpret_cast<const uint16_t*>(swizzled(b, column, 2 * k));
        return static_cast<double>(of_pair<WIDE>(left, k % 2)) * of_pair<WIDE>(*right, 0);
    });
    meet_group();
}
#endif
#pragma GCC pop_options
