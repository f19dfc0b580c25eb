// The CPU's version of ops/cuda/include/mma.cuh.
#pragma once
#include "convert.cuh"
#include "overlap.cuh"

LINKED uint4 load_ahead(const void* address) { return load16<Load::PAST_L1>(address); }

LINKED uint32_t load_constant(const uint32_t* address) { return __ldg(address); }
LINKED float load_constant(const float* address) { return __ldg(address); }

LINKED uint4 load_written(const void* address, bool inside) {
    return inside ? *static_cast<const uint4*>(address) : make_uint4(0, 0, 0, 0);
}

LINKED uint32_t load_byte_ahead(const void* address) { return __ldg(static_cast<const uint8_t*>(address)); }

// A thread's copies are made when it waits for them, as late as they may be; `end_copies` marks those that a wait is
// for.
struct Copy {
    char* to;
    const char* from;
    int bytes;  // the rest of 16 becomes zeros
    bool ended;
};
inline List<Copy> copies[MOST_THREADS];

LINKED void copy16(void* to, const void* from, int bytes) {
    if (bytes > 0 && !allowed("copy", from, 16, bytes)) return;
    if (bytes > 0) read_ahead(from);
    if (early) {
        memset(to, 0, 16);
        memcpy(to, from, bytes);
        return;
    }
    memset(to, 0xff, 16);
    copies[current].add({static_cast<char*>(to), static_cast<const char*>(from), bytes, false});
}
LINKED void end_copies() {
    for (Copy& copy : copies[current]) copy.ended = true;
}
LINKED void wait_for_copies() {
    copies[current].take_out([](const Copy& copy) {
        if (!copy.ended) return false;
        memset(copy.to, 0, 16);
        memcpy(copy.to, copy.from, copy.bytes);
        return true;
    });
}

LINKED void store_to_block(float2* to, uint32_t rank, float2 value) {
    if (rank != cluster_rank()) reach_block(rank);
    const int64_t blocks = int64_t(rank) - cluster_rank();
    *reinterpret_cast<float2*>(reinterpret_cast<char*>(to) + blocks * BLOCK_MEMORY) = value;
}
LINKED void prefetch(const void* address, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += 16) may_load(static_cast<const char*>(address) + i, 16);
}
LINKED void prefetch_line(const void* address) { may_load(address, 1); }

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
LINKED_TEMPLATE float of_fp8<Fp8::E4M3>(uint8_t);
LINKED_TEMPLATE float of_fp8<Fp8::E5M2>(uint8_t);
template <typename T, Fp8 TYPE>
void widen(uint32_t bytes, uint32_t& low, uint32_t& high, float scale = 1.0f) {
    float value[4];
    for (int i = 0; i < 4; ++i) value[i] = of_fp8<TYPE>(bytes >> 8 * i) * scale;
    low = pack<T>(value[0], value[1]);
    high = pack<T>(value[2], value[3]);
}
template <Fp8 TYPE>
void widen_scaled(uint32_t bytes, float scale, uint32_t& low, uint32_t& high) {
    widen<Bf16, TYPE>(bytes, low, high, scale);
}

template <typename T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<Bf16> = true;

template <typename T>
float of_pair(uint32_t pair, int upper) {
    return float(T{uint16_t(pair >> 16 * upper)});
}
template <Fp8 TYPE>
void to_halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
    widen<Fp16, TYPE>(bytes, low, high);
}
LINKED uint32_t halves_to_e4m3(uint32_t low, uint32_t high) {
    return pack<Fp8::E4M3>(of_pair<Fp16>(low, 0), of_pair<Fp16>(low, 1), of_pair<Fp16>(high, 0),
                           of_pair<Fp16>(high, 1));
}
LINKED uint32_t difference(uint32_t a, uint32_t b) {
    return pack<Fp16>(of_pair<Fp16>(a, 0) - of_pair<Fp16>(b, 0), of_pair<Fp16>(a, 1) - of_pair<Fp16>(b, 1));
}
LINKED uint32_t difference_times_32(uint32_t a, uint32_t b) {
    auto of = [&](int i) { return (of_pair<Fp16>(a, i) - of_pair<Fp16>(b, i)) * 32.0f; };
    return pack<Fp16>(of(0), of(1));
}
template <typename T>
uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    return pack<T>(of_pair<T>(a, 0) * of_pair<T>(b, 0), of_pair<T>(a, 1) * of_pair<T>(b, 1));
}

// The fragments of a warp's lanes, readable by all of them.
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
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const int pair = k % 8 / 2;
            sum += double(of_pair<T>(warp[row % 8 * 4 + pair].a[row / 8 + k / 8 * 2], k % 2)) *
                   of_pair<T>(warp[column * 4 + pair].b[k / 8], k % 2);
        }
        d[i] = float(sum);
    }
    meet_warp();
}
LINKED_TEMPLATE void mma<Bf16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);
LINKED_TEMPLATE void mma<Fp16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);

// ---- wgmma: until a product is waited for, its result is not visible, and its operands must not change --------------

#pragma GCC push_options
#pragma GCC optimize("O2")
inline constexpr int MOST_SUMS = 128, MOST_IN_FLIGHT = 8;
inline constexpr uint32_t POISON = 0x7fc0dead;

// Accumulators of a thread, at address `at`, where POISON stands while products are in flight.
struct Sums {
    float* at;
    int count, group;
    float values[MOST_SUMS];
};
struct LeftRegisters {
    const uint32_t* at;
    uint32_t values[4];
    int group;
};
// Part of an operand in shared memory, and how often it had been written when the product started.
struct Operand {
    uint32_t first, stop;  // in KiB
    uint32_t writings;
    int group;
};
struct InFlight {
    int group, count;  // committed groups; accumulators in flight
    bool fenced;
    Sums sums[MOST_IN_FLIGHT];
    List<LeftRegisters> registers;
    List<Operand> operands;
};
inline InFlight in_flight[MOST_THREADS];

LINKED uint32_t writings_of(uint32_t first, uint32_t stop) {
    uint32_t sum = 0;
    for (uint32_t i = first; i < stop; ++i) sum += writings[i];
    return sum;
}
// Notes that a product reads `rows` rows of 128 bytes.
LINKED void take_operand(uint64_t descriptor, int rows) {
    const uint32_t address = uint32_t(descriptor) * 16, first = address / 1024, stop = first + (rows + 7) / 8;
    read_by_engine("wgmma", first * 1024, rows * 128);
    if (current % 32 == 0)  // once a warp
        in_flight[current].operands.add({first, stop, writings_of(first, stop), in_flight[current].group});
}
LINKED void take_registers_of_left(const uint32_t (&a)[4]) {
    in_flight[current].registers.add({a, {a[0], a[1], a[2], a[3]}, in_flight[current].group});
}

// The accumulators that a product adds to: those in flight, or those at `d`.
LINKED float* begin_product(float* d, int count) {
    InFlight& mine = in_flight[current];
    if (!mine.fenced) break_off("wgmma without wgmma_fence before its group");
    int i = 0;
    while (i < mine.count && mine.sums[i].at != d) ++i;
    if (i == mine.count) {
        if (i == MOST_IN_FLIGHT || count > MOST_SUMS)
            break_off("more products in flight than the emulator has room for");
        ++mine.count;
        mine.sums[i].at = d, mine.sums[i].count = count;
        memcpy(mine.sums[i].values, d, count * sizeof(float));
        for (int j = 0; j < count; ++j) memcpy(&d[j], &POISON, sizeof(float));
    }
    mine.sums[i].group = mine.group;
    return mine.sums[i].values;
}
LINKED void wgmma_fence() { in_flight[current].fenced = true; }
LINKED void wgmma_commit() {
    ++in_flight[current].group;
    in_flight[current].fenced = false;
}
LINKED void end_products(int pending) {
    InFlight& mine = in_flight[current];
    const int stop = mine.group - pending;
    for (const Operand& operand : mine.operands)
        if (operand.group < stop && writings_of(operand.first, operand.stop) != operand.writings)
            break_off("shared memory that wgmma reads is written before the product was waited for");
    mine.operands.take_out([&](const Operand& operand) { return operand.group < stop; });
    for (const LeftRegisters& left : mine.registers)
        if (left.group < stop && memcmp(left.at, left.values, sizeof(left.values)) != 0)
            break_off("registers that wgmma reads are written before the product was waited for");
    mine.registers.take_out([&](const LeftRegisters& left) { return left.group < stop; });
    int left = 0;
    for (int i = 0; i < mine.count; ++i) {
        Sums& sums = mine.sums[i];
        if (sums.group >= stop) {
            if (left != i) mine.sums[left] = sums;
            ++left;
            continue;
        }
        for (int j = 0; j < sums.count; ++j)
            if (memcmp(&sums.at[j], &POISON, sizeof(float)) != 0)
                break_off("accumulators are written before the product was waited for");
        memcpy(sums.at, sums.values, sums.count * sizeof(float));
    }
    mine.count = left;
}
#pragma GCC pop_options
template <int PENDING>
void wgmma_wait() {
    meet_warp();
    end_products(PENDING);
}
template <int COUNT>
void fence_registers(float (&)[COUNT]) {}
LINKED uint64_t descriptor_of_matrices(const void* first) { return reinterpret_cast<uint64_t>(first); }

inline const bool watches_mma = watch({
    [] {
        for (int i = 0; i < thread_count * block_count; ++i) {
            copies[i].count = 0;
            in_flight[i].count = in_flight[i].group = 0;
            in_flight[i].fenced = false;
            in_flight[i].operands.count = in_flight[i].registers.count = 0;
        }
    },
    [] {
        if (in_flight[current].count > 0) break_off("a thread ends while its products are in flight");
        if (copies[current].count > 0) break_off("a thread ends while its copies may still write to shared memory");
    },
    [] {},
});

// A kernel is compiled without optimization, where nothing else is inlined.
#define ALWAYS_INLINE __attribute__((always_inline))

#pragma GCC push_options
#pragma GCC optimize("O2")
// A byte of an operand in rows of 128 bytes, swizzled by TMA.
[[gnu::always_inline]] inline const uint8_t* swizzled(uint64_t descriptor, int row, int byte) {
    const uint32_t address = uint32_t(descriptor) * 16, within = address % 128 + byte;
    return reinterpret_cast<const uint8_t*>(memories[0]) + address / 128 * 128 + row * 128 + (within ^ row % 8 * 16);
}

// The fragments of the warp's lanes, when all lanes have arrived; the warps of a warpgroup do not wait for each other.
LINKED const Fragments* shown(const uint32_t (&a)[4]) {
    fragments[current] = {{a[0], a[1], a[2], a[3]}, {}};
    take_registers_of_left(a);
    meet_warp();
    return fragments + current / 32 * 32;
}
// Computes a thread's elements, two by two, of a warp's 16 rows and all columns. `left` gives the value at a row and k,
// `right` the value at a column and k.
template <int OF_K, int COUNT, typename Left, typename Right>
void multiply(float (&accumulators)[COUNT], int onto, Left left, Right right) {
    const int lane = current % 32;
    float* const d = begin_product(accumulators, COUNT);
    double rows[2][OF_K], columns[2][OF_K];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < OF_K; ++k) rows[i][k] = left(lane / 4 + 8 * i, k);
    for (int first = 0; first < COUNT; first += 4) {
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < OF_K; ++k) columns[i][k] = right(2 * first + lane % 4 * 2 + i, k);
        double sums[4];
        for (int i = 0; i < 4; ++i) sums[i] = onto ? d[first + i] : 0.0;
        for (int k = 0; k < OF_K; ++k)
            for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2][k] * columns[i % 2][k];
        for (int i = 0; i < 4; ++i) d[first + i] = float(sums[i]);
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

// The right operand: matrices at a pointer, which all threads of the block wrote before their last barrier, or swizzled
// ones, whose addresses in shared memory are small numbers.
inline void take_right(uint64_t descriptor, int columns) {
    if (descriptor >> 32 == 0) return take_operand(descriptor, columns);
    const int block = cluster_rank();
    for (int i = 0; i < thread_count; ++i)
        if (fences[block * thread_count + i] != int(block_round[block]) - 1)
            break_off("wgmma reads what thread %d wrote without fence_async", i);
}
[[gnu::always_inline]] inline uint8_t byte_of_right(uint64_t descriptor, int column, int k) {
    if (descriptor >> 32 == 0) return *swizzled(descriptor, column, k);
    return reinterpret_cast<const uint8_t*>(descriptor)[column / 8 * 256 + k / 16 * 128 + column % 8 * 16 + k % 16];
}

template <int COUNT>
void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int onto) {
    const Fragments* warp = shown(a);
    take_right(b, 2 * COUNT);
    multiply<32>(
        d, onto,
        [&](int row, int k) ALWAYS_INLINE {
            const uint32_t word = warp[row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2];
            return values<B_FP8>.of[word >> k % 4 * 8 & 0xff];
        },
        [&](int column, int k) ALWAYS_INLINE { return values<A_FP8>.of[byte_of_right(b, column, k)]; });
    meet_warp();
}

template <int COUNT>
void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, int onto) {
    const int first_row = threadIdx.x / 32 % 4 * 16;
    take_operand(a, 64);
    take_operand(b, 2 * COUNT);
    multiply<32>(
        d, onto, [&](int row, int k) ALWAYS_INLINE { return values<B_FP8>.of[*swizzled(a, first_row + row, k)]; },
        [&](int column, int k) ALWAYS_INLINE { return values<A_FP8>.of[*swizzled(b, column, k)]; });
}
#endif

#ifdef WIDE
template <int COUNT>
void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int onto) {
    const Fragments* warp = shown(a);
    take_operand(b, 2 * COUNT);
    multiply<16>(
        d, onto,
        [&](int row, int k) { return of_pair<WIDE>(warp[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2); },
        [&](int column, int k) {
            return of_pair<WIDE>(*reinterpret_cast<const uint16_t*>(swizzled(b, column, 2 * k)), 0);
        });
    meet_warp();
}
#endif
#pragma GCC pop_options
