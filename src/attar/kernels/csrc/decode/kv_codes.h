// Four bits in the cache: keys less a constant vector, and values, are rotated, and have codes with a scale and a minimum
// for each token and head. runtime/kv/store/rotated.py has the sources.
//
//     y = (k - c) H,   z = v H,     m = min y,  s = (max y - m) / 15,  codes = round((y - m) / s)   (z the same)
//     q . k            ~ s (q' . codes) + m sum q' + q' . c'           q' = q H,   c' = c H
//     sum_t w_t v_t    ~ (sum_t w_t s_t codes_t + sum_t w_t m_t) H
//
// H is symmetric and its own inverse. s and m are float16. kv_tiles.h has the layout.

#pragma once

#include <algorithm>

#include "model.h"
#include "vector.h"

namespace attar {

constexpr int LEVELS = 15;  // the largest code of four bits
constexpr float LARGEST_FP16 = 65504.0f, SMALLEST_NORMAL_FP16 = 6.103515625e-5f;

// to (columns) = (x - shift) H (dim, columns); columns a multiple of 32; shift (dim,) or null.
static inline void rotate_head(const float* x, const float* shift, const float* matrix, std::int64_t dim,
                               std::int64_t columns, float* to) {
    for (std::int64_t j = 0; j < columns; j += 2 * WIDTH) {
        F sums[2][2] = {};
        for (std::int64_t i = 0; i < dim; i += 2)
            for (int odd = 0; odd < 2; odd++) {
                const F factor = broadcast(x[i + odd] - (shift ? shift[i + odd] : 0.0f));
                const float* row = matrix + (i + odd) * columns + j;
                for (int v = 0; v < 2; v++) sums[odd][v] = fma(load(row + v * WIDTH), factor, sums[odd][v]);
            }
        for (int v = 0; v < 2; v++) store(to + j + v * WIDTH, sums[0][v] + sums[1][v]);
    }
}

static inline float through_fp16(float value, std::uint16_t* bits) {
    std::uint16_t lanes[WIDTH];
    store_fp16(lanes, broadcast(value));
    *bits = lanes[0];
    return load_fp16(lanes)[0];
}

// Codes (padded,), scale and minimum of y (padded,), of which `dim` numbers count; y is overwritten.
static inline void to_int4(float* y, std::int64_t dim, std::int64_t padded, std::uint8_t* codes, std::uint16_t* scale,
                           std::uint16_t* minimum_bits) {
    for (std::int64_t d = dim; d < padded; d++) y[d] = y[0];
    F low = broadcast(LARGEST_FP16), high = broadcast(-LARGEST_FP16);
    for (std::int64_t d = 0; d < padded; d += WIDTH) {
        const F inside = minimum(maximum(load(y + d), broadcast(-LARGEST_FP16)), broadcast(LARGEST_FP16));
        store(y + d, inside);
        low = minimum(low, inside), high = maximum(high, inside);
    }
    const float m = through_fp16(-largest_lane(-low), minimum_bits);
    const float s = through_fp16((largest_lane(high) - m) / LEVELS, scale);
    const float step = std::max(s, SMALLEST_NORMAL_FP16);
    for (std::int64_t d = 0; d < padded; d += WIDTH) {
        const F code = round_even((load(y + d) - m) / step);
        store_bytes(codes + d, to_ints(minimum(maximum(code, F{}), broadcast(float(LEVELS)))));
    }
}

// Codes of a key to row `row` of a tile of words (padded / 8, 16): dimensions 8 w + 2 j and 8 w + 2 j + 1 are at bits
// 4 j and 16 + 4 j.
static inline void store_key_codes(const std::uint8_t* codes, std::int64_t padded, std::int64_t row,
                                   std::uint8_t* tile) {
    for (std::int64_t w = 0; w < padded / 8; w++) {
        std::uint32_t word = 0;
        for (int i = 0; i < 8; i++) word |= std::uint32_t(codes[8 * w + i]) << (i / 2 * 4 + i % 2 * 16);
        std::memcpy(tile + (w * WIDTH + row) * 4, &word, 4);
    }
}

// Codes of a value to row `row` of a tile of bytes (8, padded / 32, 16, 2), a byte for each token of a pair: dimensions
// i and i + 16 of 32.
static inline void store_value_codes(const std::uint8_t* codes, std::int64_t padded, std::int64_t row,
                                     std::uint8_t* tile) {
    for (std::int64_t d = 0; d < padded; d += 2 * WIDTH)
        for (int i = 0; i < WIDTH; i++)
            tile[row / 2 * padded + d + 2 * i + row % 2] = std::uint8_t(codes[d + i] | codes[d + i + WIDTH] << 4);
}

}  // namespace attar
