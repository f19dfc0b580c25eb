// The values that a thread quantizes: 8 columns of ROWS rows, loaded from a tensor, or computed from two while loading.
//
// Macros: INPUT, ROWS, LOAD, EVEN, PARTIAL and ALIGNED as in quantize.cu; SOURCE, of the enum below.
#pragma once
#include "element.cuh"
#include "instructions.cuh"
#include "silu.cuh"

// PLAIN: x. SILU_MUL: silu(x) * other. RMS_NORM: x * rstd * other, where `other` is one row, the weight. SILU_MUL_GRAD:
// the gradient of silu(gate) * up, where `x` has gate and up side by side, as the gradient has, and `other` is the
// gradient of the product.
enum class Source { PLAIN, SILU_MUL, RMS_NORM, SILU_MUL_GRAD };

constexpr bool SIXTEEN_BITS = INPUT != Element::FP32;
constexpr int ELEMENT_BYTES = SIXTEEN_BITS ? 2 : 4;
constexpr int OCTET_WORDS = 8 * ELEMENT_BYTES / 4;
constexpr uint32_t MAGNITUDES = 0x7fff7fffu;

// 8 elements of a row, packed as in memory.
struct Octet {
    uint32_t word[OCTET_WORDS];

    // Keeps the compiler from holding unpacked values until their next use, for which there are no registers.
    INLINE void pack_again() {
#pragma unroll
        for (int w = 0; w < OCTET_WORDS; ++w) forget(word[w]);
    }

    INLINE float at(int column) const {
        if constexpr (INPUT == Element::FP32) {
            return __uint_as_float(word[column]);
        } else {
            return to_float(word[column / 2], column % 2);
        }
    }

    static INLINE float to_float(uint32_t pair, bool upper) {
        if constexpr (INPUT == Element::BF16) {
            return __uint_as_float(upper ? pair & 0xffff0000u : pair << 16);
        } else {
            return half_to_float(uint16_t(upper ? pair >> 16 : pair));
        }
    }
};

// Values of a 16-bit tensor, which stay packed. Maxima are taken of the bits of magnitudes, which as integers order as
// the magnitudes do, NaN last; they are returned as the bits of a float32.
struct PackedValues {
    Octet row[ROWS];

    INLINE float at(int r, int c) const { return row[r].at(c); }

    INLINE void pack_again() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) row[r].pack_again();
    }

    INLINE void clear() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) row[r] = Octet{};
    }

    // The largest of the even columns' magnitudes in the lower half, that of the odd columns' in the upper half.
    INLINE uint32_t row_words(int r) const {
        const auto& word = row[r].word;
        uint32_t largest = word[0] & MAGNITUDES;
#pragma unroll
        for (int w = 1; w < OCTET_WORDS; ++w) largest = __vmaxu2(largest, word[w] & MAGNITUDES);
        return largest;
    }

    INLINE uint32_t row_amax(int r) const {
        const uint32_t largest = row_words(r);
        return widened(max(largest >> 16, largest & 0xffffu), false);
    }

    INLINE uint32_t column_words(int w) const {
        uint32_t largest = row[0].word[w] & MAGNITUDES;
#pragma unroll
        for (int r = 1; r < ROWS; ++r) largest = __vmaxu2(largest, row[r].word[w] & MAGNITUDES);
        return largest;
    }

    INLINE void column_amax(uint32_t (&amax)[8]) const {
#pragma unroll
        for (int w = 0; w < OCTET_WORDS; ++w) {
            const uint32_t largest = column_words(w);
            amax[2 * w] = widened(largest, false);
            amax[2 * w + 1] = widened(largest, true);
        }
    }

    INLINE uint32_t amax() const {
        uint32_t largest = column_words(0);
#pragma unroll
        for (int w = 1; w < OCTET_WORDS; ++w) largest = __vmaxu2(largest, column_words(w));
        return widened(max(largest >> 16, largest & 0xffffu), false);
    }

    static INLINE uint32_t widened(uint32_t pair, bool upper) { return __float_as_uint(Octet::to_float(pair, upper)); }
};

struct FloatValues {
    float row[ROWS][8];

    INLINE float at(int r, int c) const { return row[r][c]; }

    INLINE void pack_again() {}

    INLINE void clear() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int c = 0; c < 8; ++c) row[r][c] = 0.0f;
        }
    }

    INLINE uint32_t row_amax(int r) const {
        uint32_t largest = 0;
#pragma unroll
        for (int c = 0; c < 8; ++c) largest = max(largest, magnitude(row[r][c]));
        return largest;
    }

    INLINE void column_amax(uint32_t (&amax)[8]) const {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            amax[c] = 0;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) amax[c] = max(amax[c], magnitude(row[r][c]));
        }
    }

    INLINE uint32_t amax() const {
        uint32_t largest = 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) largest = max(largest, row_amax(r));
        return largest;
    }

    static INLINE uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }
};

INLINE uint32_t load_element(const void* base, int64_t index) {
    if constexpr (SIXTEEN_BITS) {
        return __ldg(static_cast<const uint16_t*>(base) + index);
    } else {
        return __ldg(static_cast<const uint32_t*>(base) + index);
    }
}

// Loads those 16-byte parts of an octet that begin among the `columns` that are left of the row.
template <Load HOW>
INLINE void load_whole(Octet& octet, const void* base, int64_t index, int columns) {
    const char* address = static_cast<const char*>(base) + index * ELEMENT_BYTES;
#pragma unroll
    for (int w = 0; w < OCTET_WORDS; w += 4) {
        if (PARTIAL && columns * ELEMENT_BYTES <= 4 * w) break;
        // The two halves of a float32 octet share a sector: two instructions load it, the second one from L1.
        const uint4 v = load16<SIXTEEN_BITS ? HOW : Load::CACHED>(address + 4 * w);
        octet.word[w] = v.x, octet.word[w + 1] = v.y, octet.word[w + 2] = v.z, octet.word[w + 3] = v.w;
    }
}

INLINE void load_by_element(Octet& octet, const void* base, int64_t index, int columns) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const uint32_t element = c < columns ? load_element(base, index + c) : 0;
        if constexpr (SIXTEEN_BITS) {
            octet.word[c / 2] = c % 2 ? octet.word[c / 2] | element << 16 : element;
        } else {
            octet.word[c] = element;
        }
    }
}

// Loads COUNT rows of 8 columns from (row, column) on; zeros outside of (M, N). INSIDE asserts that all are in the
// matrix. Loads are predicated and not in a branch, so that all of them are in flight at once. 16 aligned bytes that
// begin in the matrix are loaded whole: they lie in one page, whatever follows the matrix.
template <Load HOW, bool INSIDE = EVEN, int COUNT>
INLINE void load_octets(Octet (&octets)[COUNT], const void* base, int64_t first_row, int row, int column, int M, int N,
                        int stride) {
    const int64_t first = (first_row + row) * stride + column;
    const int columns = N - column;
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
        const int64_t index = first + int64_t(r) * stride;
        if constexpr (INSIDE && ALIGNED) {
            load_whole<HOW>(octets[r], base, index, columns);
        } else if constexpr (ALIGNED) {
            octets[r] = Octet{};
            if (row + r < M && columns > 0) load_whole<HOW>(octets[r], base, index, columns);
        } else {
            load_by_element(octets[r], base, index, INSIDE ? 8 : row + r < M ? columns : 0);
        }
    }
    if (!INSIDE && PARTIAL && ALIGNED && columns < 8) {
#pragma unroll
        for (int w = 0; w < OCTET_WORDS; ++w) {
            const int inside = columns * ELEMENT_BYTES - 4 * w;  // bytes of the word that are in the matrix
            const uint32_t mask = inside >= 4 ? ~0u : inside == 2 ? 0xffffu : 0u;
#pragma unroll
            for (int r = 0; r < COUNT; ++r) octets[r].word[w] &= mask;
        }
    }
}

// The derivatives of silu(gate) * up by gate and by up.
INLINE float grad_of_gate(float gate, float up) {
    const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-gate));
    return up * sigmoid * (1.0f + gate * (1.0f - sigmoid));
}
INLINE float grad_of_up(float gate) { return silu(gate); }

// Loads the values of a thread that is INSIDE the matrix, or anywhere.
template <bool INSIDE>
INLINE auto load_values(const void* x, const void* other, const float* rstd, int64_t first_row, int row, int column,
                        int M, int N, int x_m, int other_m) {
    if constexpr (SOURCE == Source::PLAIN && SIXTEEN_BITS) {
        PackedValues values;
        load_octets<LOAD, INSIDE>(values.row, x, first_row, row, column, M, N, x_m);
        return values;
    } else {
        FloatValues values;
        Octet octets[ROWS];
        if (SOURCE != Source::SILU_MUL_GRAD || column < N / 2) {
            load_octets<LOAD, INSIDE>(octets, x, first_row, row, column, M, N, x_m);
        }
        if constexpr (SOURCE == Source::SILU_MUL) {
            Octet others[ROWS];
            load_octets<LOAD, INSIDE>(others, other, first_row, row, column, M, N, other_m);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int c = 0; c < 8; ++c) values.row[r][c] = silu(octets[r].at(c)) * others[r].at(c);
            }
        } else if constexpr (SOURCE == Source::SILU_MUL_GRAD) {
            const int half = N / 2;  // a multiple of 8: an octet lies on one side
            const bool of_up = column >= half;
            const int place = of_up ? column - half : column;
            if (of_up) load_octets<LOAD, INSIDE>(octets, x, first_row, row, place, M, half, x_m);
            Octet grads[ROWS];
            load_octets<LOAD, INSIDE>(grads, other, first_row, row, place, M, half, other_m);
            if (of_up) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int c = 0; c < 8; ++c) values.row[r][c] = grads[r].at(c) * grad_of_up(octets[r].at(c));
                }
            } else {
                Octet ups[ROWS];
                load_octets<LOAD, INSIDE>(ups, x, first_row, row, place + half, M, N, x_m);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        values.row[r][c] = grads[r].at(c) * grad_of_gate(octets[r].at(c), ups[r].at(c));
                    }
                }
            }
        } else if constexpr (SOURCE == Source::RMS_NORM) {
            Octet weight[1];
            load_octets<Load::CACHED, INSIDE>(weight, other, 0, 0, column, 1, N, 0);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const bool inside = INSIDE || row + r < M;
                const float by = inside ? __ldg(rstd + first_row + row + r) : 0.0f;
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    // Outside of the matrix are zeros, whose product with an Inf would be a NaN.
                    const bool there = inside && (INSIDE || column + (PARTIAL ? c : 0) < N);
                    values.row[r][c] = there ? octets[r].at(c) * by * weight[0].at(c) : 0.0f;
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int c = 0; c < 8; ++c) values.row[r][c] = octets[r].at(c);
            }
        }
        return values;
    }
}
