// How a token's key and value of a head go to their slot: see tiles.h.

#pragma once

#include <vector>

#include "model.h"
#include "tiles.h"

namespace attar {

static inline void remember(const Model& model, std::int64_t layer, std::int64_t head, std::int64_t slot,
                            const float* key, const float* value, std::int8_t* codes) {
    const std::int64_t block = slot / model.block_size, place = slot % model.block_size, dim = model.head_dim;
    const std::int64_t row = place % WIDTH, stride = model.padded(), tile = (place - row) * model.row_bytes();
    std::uint8_t *keys = model.keys(layer, block, head), *values = model.values(layer, block, head);
    const auto key_at = [&](std::int64_t d) { return (d / 2 * WIDTH + row) * 2 + d % 2; };
    const auto value_at = [&](std::int64_t d) { return (row / 2 * stride + d) * 2 + row % 2; };
    if (model.pool_kind == WIDE) {
        for (std::int64_t d = 0; d < dim; d++) ((float*)(keys + tile))[d * WIDTH + row] = key[d];
        std::memcpy(values + tile + row * model.row_bytes(), value, dim * sizeof(float));
    } else if (model.pool_kind == CODES) {
        model.scales(keys)[place] = narrow(key, dim, codes);
        for (std::int64_t d = 0; d < dim; d++) (keys + tile)[key_at(d)] = std::uint8_t(codes[d]);
        model.scales(values)[place] = narrow(value, dim, codes);
        for (std::int64_t d = 0; d < dim; d++) (values + tile)[value_at(d)] = std::uint8_t(codes[d]);
    } else {
        for (std::int64_t d = 0; d < dim; d++) ((std::uint16_t*)(keys + tile))[key_at(d)] = to_bf16(key[d]);
        for (std::int64_t d = 0; d < dim; d++) ((std::uint16_t*)(values + tile))[value_at(d)] = to_bf16(value[d]);
    }
}

}  // namespace attar
