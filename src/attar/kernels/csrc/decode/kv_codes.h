// Four bits in the cache: keys less a constant vector, scaled, and values are rotated, and have codes with a scale and a
// minimum for each token and head. runtime/kv/store/rotated.py has the sources.
//
//     y = (k - c) D H,   z = v H,       m = a - r b,  s = 2 r b / 15,  codes = round((y - m) / s)   (z the same)
//     q . k            ~ s (q' . codes) + m sum q' + q' . c'           q' = q D^-1 H,   c' = c D H
//     sum_t w_t v_t    ~ (sum_t w_t s_t codes_t + sum_t w_t m_t) H
//
// a, b: middle and half of the range of y; r: the one of RANGES with the least squared error.
// H is symmetric and its own inverse; D is diagonal. c is the one of two with the smaller s, which is negative
// where it is the second. s and m are float16. kv_tiles.h has the layout.

#pragma once

#include <algorithm>
#include <limits>

#include "model.h"
#include "vector.h"

namespace attar {

constexpr int LEVELS = 15;  // the largest code of four bits
constexpr float RANGES[] = {1.0f, 0.94f, 0.88f, 0.82f};
constexpr float LARGEST_FP16 = 65504.0f, SMALLEST_NORMAL_FP16 = 6.103515625e-5f;

// to (columns) = x times factors, times H (dim, columns); columns a multiple of 32; factors (dim,) or null.
static inline void rotate_head(const float* x, const float* factors, const float* matrix, std::int64_t dim,
                               std::int64_t columns, float* to) {
    for (std::int64_t j = 0; j < columns; j += 2 * WIDTH) {
        F sums[2][2] = {};
        for (std::int64_t i = 0; i < dim; i += 2)
            for (int odd = 0; odd < 2; odd++) {
                const F factor = broadcast(factors ? x[i + odd] * factors[i + odd] : x[i + odd]);
                const float* row = matrix + (i + odd) * columns + j;
                for (int v = 0; v < 2; v++) sums[odd][v] = fma(load(row + v * WIDTH), factor, sums[odd][v]);
            }
        for (int v = 0; v < 2; v++) store(to + j + v * WIDTH, sums[0][v] + sums[1][v]);
    }
}

// Largest less smallest of x - center.
static inline float spread(const float* x, const float* center, std::int64_t dim) {
    float low = x[0] - center[0], high = low;
    for (std::int64_t d = 1; d < dim; d++) {
        low = std::min(low, x[d] - center[d]);
        high = std::max(high, x[d] - center[d]);
    }
    return high - low;
}

static inline float through_fp16(float value, std::uint16_t* bits) {
    std::uint16_t lanes[WIDTH];
    store_fp16(lanes, broadcast(value));
    *bits = lanes[0];
    return load_fp16(lanes)[0];
}

// Codes (padded,), scale and minimum of y (padded,), of which `dim` numbers count; y is overwritten. `second`: the scale
// is negated.
static inline void to_int4(float* y, std::int64_t dim, std::int64_t padded, bool second, std::uint8_t* codes,
                           std::uint16_t* scale, std::uint16_t* minimum_bits) {
    for (std::int64_t d = dim; d < padded; d++) y[d] = y[0];
    F low = broadcast(LARGEST_FP16), high = broadcast(-LARGEST_FP16);
    for (std::int64_t d = 0; d < padded; d += WIDTH) {
        const F inside = minimum(maximum(load(y + d), broadcast(-LARGEST_FP16)), broadcast(LARGEST_FP16));
        store(y + d, inside);
        low = minimum(low, inside), high = maximum(high, inside);
    }
    const float least = -largest_lane(-low), most = largest_lane(high), a = (least + most) / 2, b = (most - least) / 2;
    float best = std::numeric_limits<float>::infinity();
    for (const float r : RANGES) {
        std::uint16_t bits[2];
        const float m = through_fp16(a - r * b, bits);
        const float step = through_fp16(std::max((a + r * b - m) / LEVELS, SMALLEST_NORMAL_FP16), bits + 1);
        const auto code = [&](std::int64_t d) {
            const F rounded = round_even((load(y + d) - m) / step);
            return minimum(maximum(rounded, F{}), broadcast(float(LEVELS)));
        };
        F errors{};
        for (std::int64_t d = 0; d < dim; d += WIDTH) {
            float lanes[WIDTH];
            store(lanes, fma(code(d), broadcast(step), broadcast(m)) - load(y + d));
            for (std::int64_t i = dim - d; i < WIDTH; i++) lanes[i] = 0.0f;
            errors = fma(load(lanes), load(lanes), errors);
        }
        const float error = sum_lanes(errors);
        if (!(error < best)) continue;
        best = error, *minimum_bits = bits[0], *scale = std::uint16_t(bits[1] | (second ? 0x8000 : 0));
        for (std::int64_t d = 0; d < padded; d += WIDTH) store_bytes(codes + d, to_ints(code(d)));
    }
}

// Codes of a key to row `row` of a tile of words (padded / 8, 16): dimensions 8 w to 8 w + 3 are the low nibbles of a
// word's bytes, the next four the high ones.
static inline void store_key_codes(const std::uint8_t* codes, std::int64_t padded, std::int64_t row,
                                   std::uint8_t* tile) {
    for (std::int64_t d = 0; d < padded; d += 8)
        for (int i = 0; i < 4; i++)
            tile[d / 8 * 4 * WIDTH + 4 * row + i] = std::uint8_t(codes[d + i] | codes[d + i + 4] << 4);
}

// Where bytes of a value's row are in a tile of words (4, padded / 32, 16) of four tokens, a byte for each: dimension i of
// 32 has the low nibble, i + 16 the high one.
static inline std::int64_t value_byte(std::int64_t padded, std::int64_t row, std::int64_t i) {
    return row / 4 * 2 * padded + 4 * i + row % 4;
}

static inline void store_value_codes(const std::uint8_t* codes, std::int64_t padded, std::int64_t row,
                                     std::uint8_t* tile) {
    for (std::int64_t i = 0; i < padded / 2; i++) {
        const std::int64_t d = i / WIDTH * 2 * WIDTH + i % WIDTH;
        tile[value_byte(padded, row, i)] = std::uint8_t(codes[d] | codes[d + WIDTH] << 4);
    }
}

}  // namespace attar
