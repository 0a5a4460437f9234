// How a token's key and value of a head go to their slot: see tiles.h.

#pragma once

#include <vector>

#include "model.h"
#include "tiles.h"

namespace attar {

// At most 16 numbers to float16.
static inline void store_halves(const float* from, std::int64_t count, std::uint16_t* to) {
    float padded[WIDTH] = {};
    std::memcpy(padded, from, count * sizeof(float));
    store_half(to, load(padded));
}

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
    } else if (model.pool_kind == FLOAT16) {
        std::uint16_t *key_tile = (std::uint16_t*)(keys + tile), *value_row = (std::uint16_t*)(values + tile) + row * stride;
        for (std::int64_t start = 0; start < dim; start += WIDTH) {
            const std::int64_t count = std::min<std::int64_t>(WIDTH, dim - start);
            std::uint16_t some[WIDTH];
            store_halves(key + start, count, some);
            for (std::int64_t i = 0; i < count; i++) key_tile[(start + i) * WIDTH + row] = some[i];
            store_halves(value + start, count, some);
            std::memcpy(value_row + start, some, count * sizeof(some[0]));
        }
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

// What a slot holds of a head goes to another slot, bit for bit.
template <class Number>
static inline void move(const Model& model, std::int64_t layer, std::int64_t head, std::int64_t from, std::int64_t to) {
    const std::int64_t size = model.block_size, stride = model.padded(), bytes = model.row_bytes();
    const auto at = [&](std::int64_t slot, bool values) {
        std::uint8_t* half = (values ? model.values(layer, slot / size, head) : model.keys(layer, slot / size, head));
        return (Number*)(half + slot % size / WIDTH * WIDTH * bytes);
    };
    const std::int64_t source = from % size % WIDTH, target = to % size % WIDTH;
    const bool wide = model.plain();
    const auto key = [&](std::int64_t row, std::int64_t d) {
        return wide ? d * WIDTH + row : (d / 2 * WIDTH + row) * 2 + d % 2;
    };
    const auto value = [&](std::int64_t row, std::int64_t d) {
        return wide ? row * stride + d : (row / 2 * stride + d) * 2 + row % 2;
    };
    for (std::int64_t d = 0; d < model.head_dim; d++) {
        at(to, false)[key(target, d)] = at(from, false)[key(source, d)];
        at(to, true)[value(target, d)] = at(from, true)[value(source, d)];
    }
    if (model.pool_kind != CODES) return;
    for (const bool values : {false, true}) {
        const auto scale = [&](std::int64_t slot) {
            const auto half = values ? model.values(layer, slot / size, head) : model.keys(layer, slot / size, head);
            return model.scales(half) + slot % size;
        };
        *scale(to) = *scale(from);
    }
}

// The same in every layer and head, for `count` pairs (from, to), one after the other.
static inline void move(const Model& model, const std::int64_t* pairs, std::int64_t count) {
    for (std::int64_t layer = 0; layer < model.layers; layer++)
        for (std::int64_t i = 0; i < count; i++)
            for (std::int64_t head = 0; head < model.kv_heads; head++) {
                const std::int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
                if (model.pool_kind == WIDE) move<float>(model, layer, head, from, to);
                else if (model.pool_kind == CODES) move<std::uint8_t>(model, layer, head, from, to);
                else move<std::uint16_t>(model, layer, head, from, to);
            }
}

}  // namespace attar
