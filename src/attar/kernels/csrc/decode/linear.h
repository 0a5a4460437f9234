// A packed weight.
//
// A panel is 32 rows of W in two halves, a lane for each row. Along the inputs it holds, as
// attar/kernels/packed.py lays it out,
//
//     bf16    for each 2 inputs: 16 pairs of rows 0..15, 16 pairs of rows 16..31               128 bytes
//     int8    for each group: 32 scales (float16), 32 zeros z or s z (float16) if there are any, then
//             for each 4 inputs: 16 quadruples of bytes of rows 0..15, then of rows 16..31          128 bytes
//     int4    the same, for each 8 inputs: inputs 0..3 in the low nibbles, 4..7 in the high ones
//
// Codes are unsigned. Activations are quantized to int8 or int16 in the same groups, each with its scale t and the
// sum of its codes c, so that with W = s (q - z) and x = t c a group adds  s t (sum q c - z sum c)  to y,
// with sums in integers. int16 codes are two planes of int8 (activations.h).
//
// bf16 weights multiply activations rounded to bf16, or, with 16-bit activations, float32 ones.
//
// A weight that is 2:4 (of each aligned four inputs at most two are not zero) holds two values of each four, with
// their positions in it, the smaller first. For each 16 inputs it holds 64 bytes of positions, then the values:
//
//     positions   16 words: bits 8b + 2c + 4h of word i are value 4c + b (of eight) of row 16h + i
//     bf16        for each 4 inputs: 16 pairs of rows 0..15, then of rows 16..31                         512 bytes
//     int8        for each 8 inputs: 16 quadruples of bytes q - z, signed, of rows 0..15, then 16..31    256 bytes
//     int4        16 quadruples of bytes q of rows 0..15, then of rows 16..31: inputs 0..7 in the low
//                 nibbles, 8..15 in the high ones                                                       128 bytes
//
// Scales and zeros z are those of the dense form; z is whole, and s z is not stored.

#pragma once

#include <cstdint>

#include "vector.h"

namespace attar {

constexpr int PANEL = 32;
constexpr std::int64_t PREFETCH_AHEAD = 2048;  // bytes: weights are prefetched so far ahead
constexpr std::int64_t CACHED_BYTES = 1 << 18;   // bytes of panels that stay in the second cache for all tokens

enum Kind : std::int32_t { BF16 = 16, INT8 = 8, INT4 = 4 };

// Stored zero points: none (all are 8, or 128), z, or s z, whichever float16 rounds less.
enum Zeros : std::int32_t { MIDDLE = 0, POINTS = 1, PRODUCTS = 2 };

struct Linear {
    const std::uint8_t* data;
    const float* bias;     // (rows,) or null
    const float* factors;  // (rows,) that sums are multiplied by, or null
    std::int64_t rows, columns;
    std::int32_t kind, group;
    std::int32_t zeros;  // of enum Zeros
    float unit;          // power of two that stored scales, and products s z, are multiplied by
    std::int32_t sparse;  // 2:4

    std::int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
    std::int64_t groups() const { return kind == BF16 ? 1 : columns / group; }
    int zero() const { return zeros != MIDDLE || kind == BF16 ? 1 : 1 << (kind - 1); }
    int weight_bits() const { return sparse ? kind / 2 + 1 : kind; }
    std::int64_t panel_bytes() const {
        if (kind == BF16) return columns * PANEL * weight_bits() / 8;
        return groups() * ((zeros != MIDDLE ? 128 : 64) + std::int64_t(group) * PANEL * weight_bits() / 8);
    }
};

}  // namespace attar
