// Replaces ops/hip/wave.h to run kernels on CPU tensors: the lanes of a block are coroutines of one CPU thread, and an
// operation of a wave takes place when all of its lanes have reached it, on the values of all lanes.
//
// Faults, the first of which `emulate` returns, are: an operation that not all lanes of a wave reach, a value that is
// not uniform, a barrier that only part of a wave reaches, a load that is misaligned, or that is within its buffer but
// outside of all tensors.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#define INLINE inline
#define KERNEL(THREADS) extern "C"
// In a section of its own, so that what a block left there can be poisoned.
#define __shared__ static __attribute__((section("lds")))

enum class Element { NONE, BF16, FP16, FP32 };  // NONE, which 0 is too: there is no such tensor

#ifndef LANES
#define LANES 64
#endif
constexpr int WAVE = LANES;
constexpr int MOST_THREADS = 1024, STACK = 128 << 10;

template <typename To, typename From>
To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    memcpy(&bits, &value, sizeof(To));
    return bits;
}

struct Pair {
    float x, y;
};
struct alignas(16) Words {
    uint32_t x, y, z, w;
};
struct alignas(16) Sums {
    float x, y, z, w;
};
inline Sums operator+(Sums a, Sums b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

struct Bf16 {
    uint16_t bits;
    explicit Bf16(float value) {
        const uint32_t whole = bits_of<uint32_t>(value);
        bits = value != value ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    explicit operator float() const { return bits_of<float>(uint32_t(bits) << 16); }
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
    using type = _Float16;
};

// ---- lanes: each runs until it waits for others ---------------------------------------------------------------------

using Operation = void (*)(void* (&of_lanes)[WAVE]);

enum State { READY, AT_OPERATION, AT_BARRIER, DONE };

struct Lane {
    jmp_buf at;  // where it waits: a jump there takes no system call, as swapcontext does
    bool begun;
    State state;
    Operation operation;
    void* value;
};
inline Lane lanes[MOST_THREADS];
alignas(64) inline char stacks[MOST_THREADS][STACK];
inline jmp_buf scheduler;
inline int current, block[3];
inline char fault[240];

template <typename... Values>
void report(const char* format, Values... values) {
    if (fault[0]) return;
    const int length = snprintf(fault, sizeof(fault), format, values...);
    snprintf(fault + length, sizeof(fault) - length, "; block (%d, %d, %d), thread %d", block[0], block[1], block[2],
             current);
}

inline void wait_as(State state) {
    lanes[current].state = state;
    if (_setjmp(lanes[current].at) == 0) _longjmp(scheduler, 1);
}

// Called by all lanes of the wave with the same operation, which replaces their values.
template <typename T>
void together(Operation operation, T& value) {
    lanes[current].operation = operation;
    lanes[current].value = &value;
    wait_as(AT_OPERATION);
}

inline int thread_index() { return current; }
inline int block_x() { return block[0]; }
inline int block_y() { return block[1]; }
inline void keep_order() {}
inline void block_barrier() { wait_as(AT_BARRIER); }

inline int uniform(int value) {
    together(
        [](void*(&of_lanes)[WAVE]) {
            for (void* lane : of_lanes) {
                if (*static_cast<int*>(lane) != *static_cast<int*>(of_lanes[0])) report("a value is not uniform");
            }
        },
        value);
    return value;
}

template <int MASK>
float exchanged(float value) {
    together(
        [](void*(&of_lanes)[WAVE]) {
            float before[WAVE];
            for (int i = 0; i < WAVE; ++i) before[i] = *static_cast<float*>(of_lanes[i]);
            // Within eight lanes the fourth bit is exchanged by reversing the order of the lanes.
            for (int i = 0; i < WAVE; ++i) *static_cast<float*>(of_lanes[i]) = before[i ^ (MASK == 4 ? 7 : MASK)];
        },
        value);
    return value;
}

template <int MASK>
float folded(float low, float high) {
    const bool upper = current & MASK;
    return (upper ? high : low) + exchanged<MASK>(upper ? low : high);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Span {
    uint64_t start, end;
};
inline const Span* tensors;
inline int tensor_count;

struct Buffer {
    const uint8_t* from;
    uint32_t size;
};
constexpr uint32_t OUTSIDE = 0x80000000;

inline Buffer buffer_of(const uint8_t* from, int size) { return {from, uint32_t(size)}; }

// Loads `bytes` at an offset; zero past the end of the buffer, where alone a load may be outside of all tensors.
inline uint32_t loaded(Buffer buffer, uint32_t offset, uint32_t bytes) {
    uint32_t value = 0;
    if (uint64_t(offset) + bytes > buffer.size) return value;
    const auto address = reinterpret_cast<uint64_t>(buffer.from) + offset;
    bool inside = false;
    for (int i = 0; i < tensor_count; ++i) inside |= address >= tensors[i].start && address + bytes <= tensors[i].end;
    if (!inside) report("a load of %u bytes at %u of %u is outside of all tensors", bytes, offset, buffer.size);
    if (inside) memcpy(&value, buffer.from + offset, bytes);
    return value;
}
inline Words load16(Buffer buffer, uint32_t offset) {
    const bool aligned = reinterpret_cast<uint64_t>(buffer.from + offset) % 16 == 0;
    if (!aligned && offset != OUTSIDE) report("a load at %u is misaligned", offset);
    return {loaded(buffer, offset, 4), loaded(buffer, offset + 4, 4), loaded(buffer, offset + 8, 4),
            loaded(buffer, offset + 12, 4)};
}
inline uint32_t load1(Buffer buffer, uint32_t offset) { return loaded(buffer, offset, 1); }

// ---- numbers --------------------------------------------------------------------------------------------------------

inline float of_e4m3(uint32_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float sign = byte & 0x80 ? -1.0f : 1.0f;
    if (exponent == 15 && mantissa == 7) return NAN;
    return sign * (exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9));
}
template <bool UPPER>
Pair widened(uint32_t word) {
    const uint32_t half = UPPER ? word >> 16 : word;
    return {of_e4m3(half & 0xff), of_e4m3(half >> 8 & 0xff)};
}
inline Pair multiply_add(Pair a, Pair b, Pair c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
inline float scaled(float value, int exponent) { return ldexpf(value, exponent); }
inline float not_a_number() { return NAN; }

// ---- the matrix instruction: summed in double precision and rounded once --------------------------------------------

struct Product {
    const Words *a, *b;
    uint32_t a_scale, b_scale;
    Sums sums;
};

inline double of_e8m0(uint32_t byte) { return (byte & 0xff) == 255 ? NAN : ldexp(1.0, int(byte & 0xff) - 127); }

// Element k of line `line` of the left or the right operand, times its scale.
inline double element(void* (&of_lanes)[WAVE], bool right, int line, int k) {
    auto lane = [&](int group) { return static_cast<Product*>(of_lanes[line + 16 * group]); };
    const Product* holder = lane(k % 64 / 16);
    const auto* bytes = reinterpret_cast<const uint8_t*>((right ? holder->b : holder->a) + k / 64);
    const Product* scale = lane(k / 32);
    return of_e4m3(bytes[k % 16]) * of_e8m0(right ? scale->b_scale : scale->a_scale);
}

inline void multiply_all(void* (&of_lanes)[WAVE]) {
    static double a[16][128], b[16][128];
    for (int line = 0; line < 16; ++line) {
        for (int k = 0; k < 128; ++k) {
            a[line][k] = element(of_lanes, false, line, k);
            b[line][k] = element(of_lanes, true, line, k);
        }
    }
    for (int i = 0; i < WAVE; ++i) {
        Sums& sums = static_cast<Product*>(of_lanes[i])->sums;
        float* const four[] = {&sums.x, &sums.y, &sums.z, &sums.w};
        for (int r = 0; r < 4; ++r) {
            double total = *four[r];
            for (int k = 0; k < 128; ++k) total += a[i / 16 * 4 + r][k] * b[i % 16][k];
            *four[r] = total;
        }
    }
}
inline Sums multiply_scaled(const Words (&a)[2], const Words (&b)[2], uint32_t a_scale, uint32_t b_scale, Sums sums) {
    Product product{a, b, a_scale, b_scale, sums};
    together(multiply_all, product);
    return product.sums;
}

// ---- launches -------------------------------------------------------------------------------------------------------

extern "C" {
extern char __start_lds[] __attribute__((weak));
extern char __stop_lds[] __attribute__((weak));
}
inline void (*kernel)(void*);
inline void* parameters;

inline void run_lane() {
    kernel(parameters);
    wait_as(DONE);
}

// Returns when the current lane waits or is done.
[[gnu::noinline]] inline void resume() {
    Lane& lane = lanes[current];
    if (_setjmp(scheduler) != 0) return;
    lane.state = READY;
    if (lane.begun) _longjmp(lane.at, 1);
    lane.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[current];
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_lane, 0);
    setcontext(&context);
}

// Runs a wave up to a barrier or its end.
inline void run_wave(Lane* wave, bool backwards) {
    while (!fault[0]) {
        for (int i = 0; i < WAVE; ++i) {
            current = wave - lanes + (backwards ? WAVE - 1 - i : i);
            resume();
        }
        for (int i = 1; i < WAVE; ++i) {
            const bool apart = wave[i].state != wave[0].state ||
                               (wave[0].state == AT_OPERATION && wave[i].operation != wave[0].operation);
            if (apart) report("lanes 0 and %d of a wave do different things", i);
        }
        if (fault[0] || wave[0].state != AT_OPERATION) return;
        void* of_lanes[WAVE];
        for (int i = 0; i < WAVE; ++i) of_lanes[i] = wave[i].value;
        wave[0].operation(of_lanes);
    }
}

// `backwards` lets the last wave and lane run first: a kernel that is right in both orders has the barriers it needs.
inline const char* launch(void (*run)(void*), void* with, const int* grid, int threads, bool backwards) {
    kernel = run;
    parameters = with;
    fault[0] = 0;
    for (block[2] = 0; block[2] < grid[2]; ++block[2])
        for (block[1] = 0; block[1] < grid[1]; ++block[1])
            for (block[0] = 0; block[0] < grid[0]; ++block[0]) {
                if (__start_lds) memset(__start_lds, 0xff, __stop_lds - __start_lds);  // NaN
                for (Lane& lane : lanes) lane.begun = false, lane.state = READY;
                for (bool left = true; left && !fault[0];) {
                    left = false;
                    for (int i = 0; i < threads / WAVE; ++i) {
                        Lane* wave = lanes + WAVE * (backwards ? threads / WAVE - 1 - i : i);
                        if (wave->state == DONE) continue;
                        left = true;
                        run_wave(wave, backwards);
                    }
                }
            }
    return fault;
}
