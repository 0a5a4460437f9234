// From a product's integer sums to its output, whether matmul.h's loops or the tiles of amx.h computed them.

#pragma once

#include <algorithm>

#include "activations.h"

// Sums stay in registers only if the loops over tokens are unrolled.
#define ATTAR_UNROLL _Pragma("GCC unroll 16")

namespace attar {

// out + s t (sum q c - z sum c): a token and a group, sixteen rows. `offset` is of Activations.
static inline F add_group(int zeros, const F& out, const I& total, const F& scale, const F& zero, float t,
                           float offset) {
    F part = to_floats(total);
    if (zeros == POINTS) part = fma(zero, broadcast(offset), part);
    const F sum = fma(part, scale * broadcast(t), out);
    return zeros == PRODUCTS ? fma(zero, broadcast(offset), sum) : sum;
}

// Destination of a product: to[token * stride + row], overwritten, or added to.
struct Output {
    float* to;
    std::int64_t stride;
    bool add;
};

// Stores a token's sums of a panel.
static inline void store_output(const Linear& linear, const F& low, const F& high, std::int64_t panel,
                           std::int64_t token, const Output& output) {
    const std::int64_t row = panel * PANEL;
    const int rows = int(std::min<std::int64_t>(PANEL, linear.rows - row));
    float* to = output.to + token * output.stride + row;
    const F halves[2] = {low * linear.unit, high * linear.unit};
    if (rows == PANEL) {
        for (int i = 0; i < PANEL; i += WIDTH) {
            const F y = linear.factors ? halves[i / WIDTH] * load(linear.factors + row + i) : halves[i / WIDTH];
            const F sum = y + (linear.bias ? load(linear.bias + row + i) : F{});
            store(to + i, sum + (output.add ? load(to + i) : F{}));
        }
        return;
    }
    float sums[PANEL];
    for (int i = 0; i < PANEL; i += WIDTH) store(sums + i, halves[i / WIDTH]);
    for (int i = 0; i < rows; i++) {
        const float y = linear.factors ? sums[i] * linear.factors[row + i] : sums[i];
        to[i] = y + (linear.bias ? linear.bias[row + i] : 0.0f) + (output.add ? to[i] : 0.0f);
    }
}

}  // namespace attar
