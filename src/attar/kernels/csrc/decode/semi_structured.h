// Products of weights that are 2:4: see linear.h for their bytes, matmul.h for dense ones.
//
// A row is a lane, and keeps inputs of its own: each lane picks them from the 16 inputs of a step, a byte shuffle for
// codes, a lane shuffle for floats. So a step has half the multiplications of a dense one, and as many shuffles.
//
// Codes are multiplied as w = q - z, signed, by activations c + 128, unsigned (VNNI needs one of each):
// sum w c = sum w (c + 128) - 128 sum w. Integer sums are those of the dense weight, and floats are added in its order:
// results are equal bit for bit. But products of bfloat16 by bfloat16 with an instruction of their own are
// rounded otherwise there.

#pragma once

#include "epilogue.h"

namespace attar {

constexpr int SPARSE_STEP = 16;  // inputs

// Where each lane finds values 4 c to 4 c + 3 of its eight in the 16 bytes of a step.
static inline I byte_positions(const I& positions, int half, int c) {
    return ((positions >> (4 * half + 2 * c)) & 0x03030303) | (c ? 0x0c0c0808 : 0x04040000);
}

// Values 4 c to 4 c + 3 of each lane, q - z as signed bytes; `values`: behind the positions, `zero`: z in each byte.
template <int BITS>
static inline I value_bytes(const std::uint8_t* values, const I& zero, int half, int c) {
    if (BITS == 8) return load_ints(values + 128 * c + 64 * half);
    const I nibbles = load_ints(values + 64 * half);
    return subtract_bytes((c ? nibbles >> 4 : nibbles) & 0x0f0f0f0f, zero);
}

// Per lane, the values of both vectors added to total.
template <int BITS>
static inline I sum_values(const I& total, const I (&w)[2]) {
    const I ones = broadcast_ints(0x01010101);
    if (BITS == 4) return dot4<true>(total, ones, add_bytes(w[0], w[1]));
    return dot4<true>(dot4<true>(total, ones, w[0]), ones, w[1]);
}

// Zero points of a group, as its head stores them; for halves of the panel.
struct GroupZeros {
    I points[2];  // z
    I bytes[2];   // z in each byte

    explicit GroupZeros(const Linear& linear) {
        points[0] = points[1] = broadcast_ints(linear.zero());
        bytes[0] = bytes[1] = points[0] * 0x01010101;
    }
    void read(const Linear& linear, const std::uint8_t* head) {
        for (int half = 0; half < 2 && linear.zeros != MIDDLE; half++) {
            points[half] = to_ints(load_fp16(head + 64 + 32 * half));
            bytes[half] = points[half] * 0x01010101;
        }
    }
};

// A 2:4 panel times M tokens from `token` on, added to `out`.
template <int M, int BITS, int PLANES>
static inline void sparse_codes(const Linear& linear, const std::uint8_t* panel, const Activations& in,
                                std::int64_t token, F (*out)[2]) {
    constexpr bool SMALL = BITS == 4 && one::SMALL_BY_EITHER;
    constexpr int LINES = BITS == 4 ? 3 : 5;  // of 64 bytes in a step
    const std::int64_t groups = linear.groups(), plane = in.plane();
    const int group = linear.group;
    const std::int8_t* codes = in.at(0, token);
    GroupZeros zeros(linear);
    for (std::int64_t g = 0; g < groups; g++, codes += in.step()) {
        const std::int64_t constants = g * in.tokens + token;
        const F scale[2] = {load_fp16(panel), load_fp16(panel + 32)};
        zeros.read(linear, panel);
        F float_zero[2] = {};
        if (linear.zeros != MIDDLE)
            for (int half = 0; half < 2; half++) float_zero[half] = load_fp16(panel + 64 + 32 * half);
        prefetch(panel + PREFETCH_AHEAD);
        panel += linear.zeros == MIDDLE ? 64 : 128;
        I total[M * PLANES][2] = {}, weights[2] = {};  // [m * PLANES + p] of token m and plane p; sums of w
        for (int k = 0; k < group; k += SPARSE_STEP, panel += 64 * LINES) {
            const I positions = load_ints(panel);
            ATTAR_UNROLL
            for (int line = 0; line < LINES; line++) prefetch(panel + PREFETCH_AHEAD + 64 * line);
            ATTAR_UNROLL
            for (int half = 0; half < 2; half++) {
                const I first = byte_positions(positions, half, 0), second = byte_positions(positions, half, 1);
                const I w[2] = {value_bytes<BITS>(panel + 64, zeros.bytes[half], half, 0),
                                value_bytes<BITS>(panel + 64, zeros.bytes[half], half, 1)};
                weights[half] = sum_values<BITS>(weights[half], w);
                ATTAR_UNROLL
                for (int m = 0; m < M * PLANES; m++) {
                    const std::int8_t* from = codes + m / PLANES * group + m % PLANES * plane + k;
                    const I x = repeat_16(from) ^ broadcast_ints(0x80808080);
                    const I sum = dot4<SMALL>(total[m][half], pick_bytes(x, first), w[0]);
                    total[m][half] = dot4<SMALL>(sum, pick_bytes(x, second), w[1]);
                }
            }
        }
        ATTAR_UNROLL
        for (int m = 0; m < M; m++) {
            const float t = in.scales[constants + m];
            const float offset = linear.zeros == MIDDLE ? 0.0f : in.offsets[constants + m];
            for (int half = 0; half < 2; half++) {
                const I planes = PLANES == 1 ? total[m][half] : (total[2 * m][half] << 8) + total[2 * m + 1][half];
                I sum = planes - weights[half] * (PLANES == 1 ? 128 : 128 * 257);
                if (linear.zeros != MIDDLE) sum -= zeros.points[half] * broadcast_ints(std::int32_t(offset));
                out[m][half] = add_group(linear.zeros, out[m][half], sum, scale[half], float_zero[half], t, offset);
            }
        }
    }
}

// The same of bf16, with activations in float32, rounded or not.
template <int M>
static inline void sparse_bf16(const std::uint8_t* panel, const Activations& in, std::int64_t token, F (*out)[2]) {
    constexpr int BYTES = 64 * 9;  // of a step
    const std::int64_t columns = in.columns;
    const float* x = in.fp32 + token * columns;
    for (std::int64_t k = 0; k < columns; k += SPARSE_STEP, panel += BYTES) {
        const I positions = load_ints(panel);
        ATTAR_UNROLL
        for (int line = 0; line < BYTES; line += 64) prefetch(panel + PREFETCH_AHEAD + line);
        ATTAR_UNROLL
        for (int part = 0; part < 8; part++) {
            const int four = part / 2, half = part % 2, shift = 16 * (four % 2) + 2 * (four / 2) + 4 * half;
            const I pair = load_ints(panel + 64 + 64 * part), first = positions >> shift;
            const I second = positions >> (shift + 8);
            const F low = (F)(pair << 16), high = (F)(pair & ~0xffff);
            ATTAR_UNROLL
            for (int m = 0; m < M; m++) {
                const F from = (F)repeat_16(x + m * columns + k + 4 * four);
                out[m][half] = fma(high, pick_floats(from, second), fma(low, pick_floats(from, first), out[m][half]));
            }
        }
    }
}

template <int M>
static inline void sparse_product(const Linear& linear, const std::uint8_t* panel, const Activations& in,
                                  std::int64_t token, F (*out)[2]) {
    if (linear.kind == INT4 && in.planes == 1) sparse_codes<M, 4, 1>(linear, panel, in, token, out);
    if (linear.kind == INT8 && in.planes == 1) sparse_codes<M, 8, 1>(linear, panel, in, token, out);
    if (linear.kind == INT4 && in.planes == 2) sparse_codes<M, 4, 2>(linear, panel, in, token, out);
    if (linear.kind == INT8 && in.planes == 2) sparse_codes<M, 8, 2>(linear, panel, in, token, out);
    if (linear.kind == BF16) sparse_bf16<M>(panel, in, token, out);
}

}  // namespace attar
