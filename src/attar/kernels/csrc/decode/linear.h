// A packed weight.
//
// A panel is 32 rows of W, the two halves of it a lane for each row. Along the inputs it holds, as
// attar/kernels/packed.py lays it out,
//
//     bf16    for each 2 inputs: 16 pairs of rows 0..15, 16 pairs of rows 16..31               128 bytes
//     int8    for each group: 32 scales (float16), 32 zeros z or s z (float16) if there are any, then
//             for each 4 inputs: 16 fours of bytes of rows 0..15, then of rows 16..31          128 bytes
//     int4    the same, for each 8 inputs: inputs 0..3 in the low halves of the bytes, 4..7 in the high ones
//
// Codes are unsigned. Tokens come quantized to int8 or int16 in the same groups, each with its scale and the sum
// of its codes, so that with W = s (q - z) and x = t c a group's part of y is  s t (sum q c - z sum c),  the sums
// in integers. int16 codes lie in two planes of int8 (taken.h).
//
// bf16 weights take tokens rounded to bf16, or, with activations of 16 bits, float32.

#pragma once

#include <cstdint>

#include "vec.h"

namespace attar {

constexpr int PANEL = 32;
constexpr std::int64_t AHEAD = 4096;  // bytes that weights are fetched before they are needed
constexpr std::int64_t HELD = 1 << 18;   // bytes of panels that are kept near while tokens go by

enum Kind : std::int32_t { BF16 = 16, INT8 = 8, INT4 = 4 };

// Zero points: none (8, or 128), z, or s z, whichever float16 holds better.
enum Zeros : std::int32_t { MIDDLE = 0, POINTS = 1, PRODUCTS = 2 };

struct Linear {
    const std::uint8_t* data;
    const float* bias;  // (rows,) or null
    std::int64_t rows, columns;
    std::int32_t kind, group;
    std::int32_t zeros;  // how zero points are stored
    float unit;          // what the stored scales (and products with them) are multiples of, a power of two

    std::int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
    std::int64_t groups() const { return kind == BF16 ? 1 : columns / group; }
    int zero() const { return zeros != MIDDLE || kind == BF16 ? 1 : 1 << (kind - 1); }
    std::int64_t panel_bytes() const {
        if (kind == BF16) return columns / 2 * 128;
        return groups() * ((zeros != MIDDLE ? 128 : 64) + std::int64_t(group) * PANEL * kind / 8);
    }
};

}  // namespace attar
