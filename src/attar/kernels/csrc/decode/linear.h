// y = W x for packed weights and a few tokens x.
//
// A panel is 32 rows of W, the two halves of it a lane for each row. Along the inputs it holds, as
// attar/kernels/packing.py lays it out,
//
//     bf16    for each 2 inputs: 16 pairs of rows 0..15, 16 pairs of rows 16..31               128 bytes
//     int8    for each group: 32 scales (float16), 32 zeros (int16) if there are any, then
//             for each 4 inputs: 16 fours of bytes of rows 0..15, then of rows 16..31          128 bytes
//     int4    the same, for each 8 inputs: inputs 0..3 in the low halves of the bytes, 4..7 in the high ones
//
// Codes are unsigned. Tokens come quantized to int8 in the same groups, each with its scale and the sum of its
// codes, so that with W = s (q - z) and x = t c a group's part of y is  s t (sum q c - z sum c),  in integers
// but for the last two products.
//
// bf16 weights take tokens rounded to bf16, or, where `exact` is asked for, float32.
//
// A row of y does not depend on how many tokens come with it: it is summed in the same order always.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vec.h"

namespace attar {

constexpr int PANEL = 32;
constexpr std::int64_t AHEAD = 4096;  // bytes that weights are fetched before they are needed

enum Kind : std::int32_t { BF16 = 16, INT8 = 8, INT4 = 4 };

struct Linear {
    const std::uint8_t* data;
    const float* bias;  // (rows,) or null
    std::int64_t rows, columns;
    std::int32_t kind, group;
    std::int32_t zeros;  // zero points are stored; else the middle: 8, or 128
    float unit;          // what the stored scales are multiples of, a power of two

    std::int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
    std::int64_t groups() const { return kind == BF16 ? 1 : columns / group; }
    std::int64_t panel_bytes() const {
        if (kind == BF16) return columns / 2 * 128;
        return groups() * ((zeros ? 128 : 64) + std::int64_t(group) * PANEL * kind / 8);
    }
};

// Tokens as a Linear takes them: (tokens, columns), prepared by `put`.
class Input {
public:
    void shape(const Linear& linear, std::int64_t tokens, bool exact) {
        columns = linear.columns;
        group = linear.kind == BF16 ? 0 : linear.group;
        rounded = linear.kind == BF16 && !exact;
        const std::int64_t whole = tokens * columns + 64;
        if (group) {
            grow(codes, whole);
            grow(scales, tokens * linear.groups());
            grow(sums, tokens * linear.groups());
        } else if (rounded) {
            grow(halves, whole);
        } else {
            grow(values, whole);
        }
    }

    // Inputs [first, last) of a token; `first` a multiple of the group, and of 16.
    void put(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) {
        if (group) return quantize(token, first, last, from);
        const std::int64_t base = token * columns;
        if (!rounded) {
            std::memcpy(values.data() + base + first, from, (last - first) * sizeof(float));
        } else {
            for (std::int64_t i = first; i < last; i++) halves[base + i] = to_bf16(from[i - first]);
        }
    }

    std::int64_t columns = 0;
    int group = 0;  // 0: not quantized
    bool rounded = false;
    std::vector<float> values, scales;
    std::vector<std::uint16_t> halves;
    std::vector<std::int8_t> codes;
    std::vector<std::int32_t> sums;

private:
    template <class T>
    static void grow(std::vector<T>& room, std::int64_t size) {
        if (std::int64_t(room.size()) < size) room.resize(size);
    }

    void quantize(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) {
        for (std::int64_t start = first; start < last; start += group, from += group) {
            F peak{};
            for (int i = 0; i < group; i += WIDTH) peak = larger(peak, magnitude(load(from + i)));
            const float top = largest(peak), inverse = top > 0 ? 127.0f / top : 0.0f;
            I total{};
            for (int i = 0; i < group; i += WIDTH) {
                const I code = __builtin_convertvector(round_even(load(from + i) * inverse), I);
                total += code;
                *(LooseB*)(codes.data() + token * columns + start + i) = __builtin_convertvector(code, B);
            }
            const std::int64_t place = (token * columns + start) / group;
            scales[place] = top / 127.0f;
            sums[place] = 0;
            for (int i = 0; i < WIDTH; i++) sums[place] += total[i];
        }
    }
};

// A panel times M tokens from `token` on, added to `out`.
template <int M, int BITS>
static inline void product_codes(const Linear& linear, const std::uint8_t* panel, const Input& in,
                                 std::int64_t token, F (*out)[2]) {
    constexpr int STEP = 32 / BITS;  // inputs in 128 bytes
    constexpr std::int32_t MIDDLE = 1 << (BITS - 1);
    const std::int64_t groups = linear.groups(), columns = in.columns;
    const int group = linear.group;
    const std::int8_t* codes = in.codes.data() + token * columns;
    const float* scales = in.scales.data() + token * groups;
    const std::int32_t* sums = in.sums.data() + token * groups;
    for (std::int64_t g = 0; g < groups; g++, codes += group, scales++, sums++) {
        const F low_scale = from_half(panel), high_scale = from_half(panel + 32);
        prefetch(panel + AHEAD);
        panel += 64;
        I total[M][2];
        if (linear.zeros) {
            const I low_zero = from_shorts(panel), high_zero = from_shorts(panel + 32);
            panel += 64;
            for (int m = 0; m < M; m++) {
                total[m][0] = low_zero * -sums[m * groups];
                total[m][1] = high_zero * -sums[m * groups];
            }
        } else {
            for (int m = 0; m < M; m++) total[m][0] = total[m][1] = all_ints(-MIDDLE * sums[m * groups]);
        }
        for (int k = 0; k < group; k += STEP, panel += 128) {
            const I low = load_ints(panel), high = load_ints(panel + 64);
            prefetch(panel + AHEAD);
            prefetch(panel + AHEAD + 64);
            if (BITS == 8) {
                for (int m = 0; m < M; m++) {
                    const std::int32_t x = word(codes + m * columns + k);
                    total[m][0] = dot4<false>(total[m][0], low, x);
                    total[m][1] = dot4<false>(total[m][1], high, x);
                }
            } else {
                const I low_a = low & 0x0f0f0f0f, low_b = (low >> 4) & 0x0f0f0f0f;
                const I high_a = high & 0x0f0f0f0f, high_b = (high >> 4) & 0x0f0f0f0f;
                for (int m = 0; m < M; m++) {
                    const std::int32_t a = word(codes + m * columns + k), b = word(codes + m * columns + k + 4);
                    total[m][0] = dot4<true>(dot4<true>(total[m][0], low_a, a), low_b, b);
                    total[m][1] = dot4<true>(dot4<true>(total[m][1], high_a, a), high_b, b);
                }
            }
        }
        for (int m = 0; m < M; m++) {
            const F t = all(scales[m * groups]);
            out[m][0] = fma(floats(total[m][0]), low_scale * t, out[m][0]);
            out[m][1] = fma(floats(total[m][1]), high_scale * t, out[m][1]);
        }
    }
}

template <int M, bool ROUNDED>
static inline void product_bf16(const std::uint8_t* panel, const Input& in, std::int64_t token, F (*out)[2]) {
    const std::int64_t columns = in.columns;
    const float* x = in.values.data() + token * columns;
    const std::uint16_t* halves = in.halves.data() + token * columns;
    for (std::int64_t k = 0; k < columns; k += 2, panel += 128) {
        const I low = load_ints(panel), high = load_ints(panel + 64);
        prefetch(panel + AHEAD);
        prefetch(panel + AHEAD + 64);
        for (int m = 0; m < M; m++) {
            if (ROUNDED) {
                const std::int32_t pair = word(halves + m * columns + k);
                out[m][0] = dot2(out[m][0], low, pair);
                out[m][1] = dot2(out[m][1], high, pair);
            } else {
                const F even = all(x[m * columns + k]), odd = all(x[m * columns + k + 1]);
                out[m][0] = fma((F)(low & ~0xffff), odd, fma((F)(low << 16), even, out[m][0]));
                out[m][1] = fma((F)(high & ~0xffff), odd, fma((F)(high << 16), even, out[m][1]));
            }
        }
    }
}

// Where products go: to[token * stride + row], added to what is there if ADD.
struct Output {
    float* to;
    std::int64_t stride;
    bool add;
};

template <int M>
static inline void product(const Linear& linear, const Input& in, std::int64_t panel, std::int64_t token,
                           const Output& output) {
    F out[M][2] = {};
    const std::uint8_t* data = linear.data + panel * linear.panel_bytes();
    if (linear.kind == INT4) product_codes<M, 4>(linear, data, in, token, out);
    if (linear.kind == INT8) product_codes<M, 8>(linear, data, in, token, out);
    if (linear.kind == BF16 && in.rounded) product_bf16<M, true>(data, in, token, out);
    if (linear.kind == BF16 && !in.rounded) product_bf16<M, false>(data, in, token, out);
    const std::int64_t row = panel * PANEL;
    const int rows = int(std::min<std::int64_t>(PANEL, linear.rows - row));
    for (int m = 0; m < M; m++) {
        float found[PANEL];
        store(found, out[m][0] * linear.unit);
        store(found + WIDTH, out[m][1] * linear.unit);
        float* to = output.to + (token + m) * output.stride + row;
        for (int i = 0; i < rows; i++)
            to[i] = found[i] + (linear.bias ? linear.bias[row + i] : 0.0f) + (output.add ? to[i] : 0.0f);
    }
}

// Panels [first, last) times all tokens. A panel stays in the cache for all of them.
static inline void multiply(const Linear& linear, const Input& in, std::int64_t first, std::int64_t last,
                            std::int64_t tokens, const Output& output) {
    for (std::int64_t panel = first; panel < last; panel++) {
        std::int64_t token = 0;
        for (; token + 8 <= tokens; token += 8) product<8>(linear, in, panel, token, output);
        for (; token + 4 <= tokens; token += 4) product<4>(linear, in, panel, token, output);
        for (; token + 2 <= tokens; token += 2) product<2>(linear, in, panel, token, output);
        for (; token < tokens; token++) product<1>(linear, in, panel, token, output);
    }
}

}  // namespace attar
