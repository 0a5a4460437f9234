// y = W x for packed weights and a few tokens x: see linear.h for the weights' bytes, activations.h for x.
//
// A token's y does not depend on the number of tokens: its sums always have the same order.

#pragma once

#include "amx.h"
#include "semi_structured.h"

namespace attar {

// A token's sum over its plane, or both.
template <int PLANES>
static inline I combine_planes(const I (*total)[2], int m, int half) {
    if (PLANES == 1) return total[m][half];
    return (total[2 * m][half] << 8) + total[2 * m + 1][half];
}

// A panel times M tokens from `token` on, added to `out`.
template <int M, int BITS, int PLANES>
static inline void product_codes(const Linear& linear, const std::uint8_t* panel, const Activations& in,
                                 std::int64_t token, F (*out)[2]) {
    constexpr int STEP = 32 / BITS;  // inputs in 128 bytes
    const std::int64_t groups = linear.groups(), plane = in.plane();
    const int group = linear.group;
    const std::int8_t* codes = in.at(0, token);
    for (std::int64_t g = 0; g < groups; g++, codes += in.step()) {
        const std::int64_t constants = g * in.tokens + token;
        const F low_scale = load_fp16(panel), high_scale = load_fp16(panel + 32);
        prefetch(panel + PREFETCH_AHEAD);
        panel += 64;
        I total[M * PLANES][2] = {};  // [m * PLANES + p] of token m and plane p
        F low_zero{}, high_zero{};
        if (linear.zeros != MIDDLE) {
            low_zero = load_fp16(panel), high_zero = load_fp16(panel + 32);
            panel += 64;
        } else {
            ATTAR_UNROLL
            for (int m = 0; m < M; m++) {
                const int last = m * PLANES + PLANES - 1;
                total[last][0] = total[last][1] = broadcast_ints(in.sums[constants + m]);
            }
        }
        for (int k = 0; k < group; k += STEP, panel += 128) {
            const I low = load_ints(panel), high = load_ints(panel + 64);
            prefetch(panel + PREFETCH_AHEAD);
            prefetch(panel + PREFETCH_AHEAD + 64);
            if (BITS == 8) {
                ATTAR_UNROLL
                for (int m = 0; m < M * PLANES; m++) {
                    const std::int32_t x = load_word(codes + m / PLANES * group + m % PLANES * plane + k);
                    total[m][0] = dot4<false>(total[m][0], low, x);
                    total[m][1] = dot4<false>(total[m][1], high, x);
                }
            } else {
                const I low_a = low & 0x0f0f0f0f, low_b = (low >> 4) & 0x0f0f0f0f;
                const I high_a = high & 0x0f0f0f0f, high_b = (high >> 4) & 0x0f0f0f0f;
                ATTAR_UNROLL
                for (int m = 0; m < M * PLANES; m++) {
                    const std::int8_t* x = codes + m / PLANES * group + m % PLANES * plane + k;
                    const std::int32_t a = load_word(x), b = load_word(x + 4);
                    total[m][0] = dot4<true>(dot4<true>(total[m][0], low_a, a), low_b, b);
                    total[m][1] = dot4<true>(dot4<true>(total[m][1], high_a, a), high_b, b);
                }
            }
        }
        ATTAR_UNROLL
        for (int m = 0; m < M; m++) {
            const float t = in.scales[constants + m];
            const float offset = linear.zeros == MIDDLE ? 0.0f : in.offsets[constants + m];
            const I low = combine_planes<PLANES>(total, m, 0), high = combine_planes<PLANES>(total, m, 1);
            out[m][0] = add_group(linear.zeros, out[m][0], low, low_scale, low_zero, t, offset);
            out[m][1] = add_group(linear.zeros, out[m][1], high, high_scale, high_zero, t, offset);
        }
    }
}

// Pairs without an instruction of their own: compilers keep one or two tokens in registers if pairs are taken apart here,
// more if dot2 does so; the sums are the same.
template <int M, bool ROUNDED>
static inline void product_bf16(const std::uint8_t* panel, const Activations& in, std::int64_t token, F (*out)[2]) {
    const std::int64_t columns = in.columns;
    const float* x = in.fp32 + token * columns;
    const std::uint16_t* bf16 = in.bf16 + token * columns;
    for (std::int64_t k = 0; k < columns; k += 2, panel += 128) {
        const I low = load_ints(panel), high = load_ints(panel + 64);
        prefetch(panel + PREFETCH_AHEAD);
        prefetch(panel + PREFETCH_AHEAD + 64);
        ATTAR_UNROLL
        for (int m = 0; m < M; m++) {
            const std::int32_t pair = ROUNDED ? load_word(bf16 + m * columns + k) : 0;
            if (ROUNDED && (one::DOT_PAIRS || M > 2)) {
                out[m][0] = dot2(out[m][0], low, pair);
                out[m][1] = dot2(out[m][1], high, pair);
            } else {
                const F even = ROUNDED ? (F)(broadcast_ints(pair) << 16) : broadcast(x[m * columns + k]);
                const F odd = ROUNDED ? (F)(broadcast_ints(pair) & ~0xffff) : broadcast(x[m * columns + k + 1]);
                out[m][0] = fma((F)(low & ~0xffff), odd, fma((F)(low << 16), even, out[m][0]));
                out[m][1] = fma((F)(high & ~0xffff), odd, fma((F)(high << 16), even, out[m][1]));
            }
        }
    }
}

template <int M>
static inline void product(const Linear& linear, const Activations& in, std::int64_t panel, std::int64_t token,
                           const Output& output) {
    F out[M][2] = {};
    const std::uint8_t* data = linear.data + panel * linear.panel_bytes();
    if (linear.sparse) {
        sparse_product<M>(linear, data, in, token, out);
        for (int m = 0; m < M; m++) store_output(linear, out[m][0], out[m][1], panel, token + m, output);
        return;
    }
    if (linear.kind == INT4 && in.planes == 1) product_codes<M, 4, 1>(linear, data, in, token, out);
    if (linear.kind == INT8 && in.planes == 1) product_codes<M, 8, 1>(linear, data, in, token, out);
    if (linear.kind == INT4 && in.planes == 2) product_codes<M, 4, 2>(linear, data, in, token, out);
    if (linear.kind == INT8 && in.planes == 2) product_codes<M, 8, 2>(linear, data, in, token, out);
    if (linear.kind == BF16 && in.rounded) product_bf16<M, true>(data, in, token, out);
    if (linear.kind == BF16 && !in.rounded) product_bf16<M, false>(data, in, token, out);
    for (int m = 0; m < M; m++) store_output(linear, out[m][0], out[m][1], panel, token + m, output);
}

// A panel times `count` tokens, 8 at most.
static inline void product_few(const Linear& linear, const Activations& in, std::int64_t panel, std::int64_t token,
                               std::int64_t count, const Output& output) {
    switch (count) {
        case 1: return product<1>(linear, in, panel, token, output);
        case 2: return product<2>(linear, in, panel, token, output);
        case 3: return product<3>(linear, in, panel, token, output);
        case 4: return product<4>(linear, in, panel, token, output);
        case 5: return product<5>(linear, in, panel, token, output);
        case 6: return product<6>(linear, in, panel, token, output);
        case 7: return product<7>(linear, in, panel, token, output);
        case 8: return product<8>(linear, in, panel, token, output);
    }
}

// A panel times tokens [first, last); `rows` as tile_rows returned it. Each part reads the panel once, so there are as
// few as registers allow, of nearly the same size: two planes of six tokens fill them.
static inline void product_all(const Linear& linear, const Activations& in, int rows, std::int64_t panel,
                               std::int64_t first, std::int64_t last, const Output& output) {
    if (rows) first = product_tiles(linear, in, rows, panel, first, last, output);
    const std::int64_t most = linear.kind == BF16 || in.planes == 1 ? 8 : 6;
    for (std::int64_t parts = (last - first + most - 1) / most; parts > 0; parts--) {
        const std::int64_t count = (last - first) / parts;
        product_few(linear, in, panel, first, count, output);
        first += count;
    }
}

// Panels [first, last) times all tokens, blocked: CACHED_BYTES of panels stay in the second cache for all tokens, and a
// few tokens in the first cache for these panels.
static inline void multiply(const Linear& linear, const Activations& in, std::int64_t first, std::int64_t last,
                            std::int64_t tokens, const Output& output) {
    const std::int64_t cached = std::max<std::int64_t>(1, CACHED_BYTES / linear.panel_bytes());
    const int rows = tile_rows(in, tokens);
    const Tiles tiles(linear.group, rows);
    const std::int64_t block = rows ? TOKEN_BLOCK : tokens <= 16 ? tokens : in.planes == 2 ? 12 : 8;
    for (std::int64_t start = first; start < last; start += cached)
        for (std::int64_t token = 0; token < tokens; token += block)
            for (std::int64_t panel = start; panel < std::min(start + cached, last); panel++)
                product_all(linear, in, rows, panel, token, std::min(token + block, tokens), output);
}

}  // namespace attar
