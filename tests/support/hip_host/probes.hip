// One kernel for each kind of function of `wave.h`, to compare the host's model and the instructions with what it says.
#include "wave.h"

// The matrix instruction: each lane's two fragments of 16 bytes of each operand, its scales, and its four sums.
KERNEL(WAVE)
void matrix(const Words* a, const Words* b, const uint8_t* a_scale, const uint8_t* b_scale, Sums* sums) {
    const int lane = thread_index();
    const Words left[2] = {a[2 * lane], a[2 * lane + 1]}, right[2] = {b[2 * lane], b[2 * lane + 1]};
    sums[lane] = multiply_scaled(left, right, a_scale[lane], b_scale[lane], sums[lane]);
}

KERNEL(WAVE) void lanes_of_a_wave(const float* low, const float* high, float* out) {
    const int lane = thread_index();
    const float x = low[lane], y = high[lane];
    const float found[] = {folded<32>(x, y), folded<16>(x, y), folded<8>(x, y), folded<4>(x, y), folded<2>(x, y),
                           folded<1>(x, y),  exchanged<8>(x),  exchanged<4>(x), exchanged<2>(x), exchanged<1>(x)};
    for (int i = 0; i < 10; ++i) out[WAVE * i + lane] = found[i];
}

// Four bytes of e4m3 a lane, and a number times a power of two.
KERNEL(WAVE)
void numbers(const uint32_t* words, const float* values, const int* exponents, float* out, float* scaled_out) {
    const int lane = thread_index();
    const Pair low = widened<false>(words[lane]), high = widened<true>(words[lane]);
    const Pair sum = multiply_add(low, high, low);
    const float found[] = {low.x, low.y, high.x, high.y, sum.x, sum.y};
    for (int i = 0; i < 6; ++i) out[6 * lane + i] = found[i];
    scaled_out[lane] = scaled(values[lane], exponents[lane]);
}

// Loads at offsets of a buffer of `size` bytes.
KERNEL(WAVE) void bounds(const uint8_t* data, const int* offsets, uint32_t* out, int size) {
    const int lane = thread_index();
    const Buffer buffer = buffer_of(data, size);
    const uint32_t offset = offsets[lane] < 0 ? OUTSIDE : offsets[lane];
    const Words words = load16(buffer, offset);
    const uint32_t found[] = {words.x, words.y, words.z, words.w, load1(buffer, offset)};
    for (int i = 0; i < 5; ++i) out[5 * lane + i] = found[i];
}

// Conversions to the types of outputs and biases.
KERNEL(WAVE)
void rounded(const float* values, TypeOf<Element::BF16>::type* bf16, TypeOf<Element::FP16>::type* fp16, float* back) {
    const int lane = thread_index();
    bf16[lane] = TypeOf<Element::BF16>::type(values[lane]);
    fp16[lane] = TypeOf<Element::FP16>::type(values[lane]);
    back[lane] = float(bf16[lane]) + float(fp16[lane]);
}

// The sum over two waves through LDS; wrong with BARRIER 0.
#ifndef BARRIER
#define BARRIER 1
#endif
KERNEL(2 * WAVE) void local_memory(const float* values, float* out) {
    __shared__ float seen[2][WAVE];
    const int wave = uniform(thread_index() / WAVE), lane = thread_index() % WAVE;
    seen[wave][lane] = values[thread_index()];
#if BARRIER
    block_barrier();
#endif
    out[thread_index()] = seen[0][lane] + seen[1][WAVE - 1 - lane];
}

// Programs that the host's model refuses.
#ifdef WRONG
KERNEL(WAVE) void wrong(const uint8_t* data, float* out) {
    const int lane = thread_index();
    float value = lane;
#if WRONG == 1
    value = uniform(lane);
#elif WRONG == 2
    if (lane < 3) value = exchanged<1>(value);
#elif WRONG == 3
    value = load16(buffer_of(data, 1 << 20), 8).x;
#elif WRONG == 4
    value = load1(buffer_of(data, 1 << 20), 1 << 19);
#else
    if (lane < 3) block_barrier();
#endif
    out[lane] = value;
}
#endif
