// Writes keys and values to their slots, in the layout of kv_tiles.h, and copies slots.

#pragma once

#include <vector>

#include "kv_codes.h"
#include "kv_tiles.h"
#include "model.h"

namespace attar {

// At most 16 numbers to float16.
static inline void store_some_fp16(const float* from, std::int64_t count, std::uint16_t* to) {
    float padded[WIDTH] = {};
    std::memcpy(padded, from, count * sizeof(float));
    store_fp16(to, load(padded));
}

// The codes of a key and value.
static inline void store_int4(const Cache& cache, std::int64_t head, std::int64_t slot, const float* key, const float* value,
                              std::uint8_t* codes, float* rotated) {
    const std::int64_t block = slot / cache.block_size, index = slot % cache.block_size, dim = cache.head_dim;
    const std::int64_t row = index % WIDTH, padded = cache.padded(), tile = (index - row) * cache.row_bytes();
    for (const bool values : {false, true}) {
        std::uint8_t* half = values ? cache.values(block, head) : cache.keys(block, head);
        std::uint16_t* constants = cache.half_scales(half) + index;
        const float* factors = values ? nullptr : cache.basis_of(head, KEY_FACTORS);
        rotate_head(values ? value : key, factors, cache.rotation, dim, padded, rotated);
        bool second = false;
        if (!values) {
            const float *center = cache.basis_of(head, CENTERS), *other = center + padded;
            second = spread(rotated, other, dim) < spread(rotated, center, dim);
            for (std::int64_t d = 0; d < dim; d++) rotated[d] -= second ? other[d] : center[d];
        }
        to_int4(rotated, dim, padded, second, codes, constants, constants + cache.block_size);
        if (values) store_value_codes(codes, padded, row, half + tile);
        else store_key_codes(codes, padded, row, half + tile);
    }
}

// The key and value of a token and head. codes and rotated (padded,).
static inline void store_kv(const Cache& cache, std::int64_t head, std::int64_t slot, const float* key, const float* value,
                            std::int8_t* codes, float* rotated) {
    if (cache.four_bits()) return store_int4(cache, head, slot, key, value, (std::uint8_t*)codes, rotated);
    const std::int64_t block = slot / cache.block_size, index = slot % cache.block_size, dim = cache.head_dim;
    const std::int64_t row = index % WIDTH, stride = cache.padded(), tile = (index - row) * cache.row_bytes();
    std::uint8_t *keys = cache.keys(block, head), *values = cache.values(block, head);
    const auto key_at = [&](std::int64_t d) { return (d / 2 * WIDTH + row) * 2 + d % 2; };
    const auto value_at = [&](std::int64_t d) { return (row / 2 * stride + d) * 2 + row % 2; };
    if (cache.kind == STORED_FP32) {
        for (std::int64_t d = 0; d < dim; d++) ((float*)(keys + tile))[d * WIDTH + row] = key[d];
        std::memcpy(values + tile + row * cache.row_bytes(), value, dim * sizeof(float));
    } else if (cache.kind == STORED_FP16) {
        std::uint16_t* key_tile = (std::uint16_t*)(keys + tile);
        std::uint16_t* value_row = (std::uint16_t*)(values + tile) + row * stride;
        for (std::int64_t start = 0; start < dim; start += WIDTH) {
            const std::int64_t count = std::min<std::int64_t>(WIDTH, dim - start);
            std::uint16_t some[WIDTH];
            store_some_fp16(key + start, count, some);
            for (std::int64_t i = 0; i < count; i++) key_tile[(start + i) * WIDTH + row] = some[i];
            store_some_fp16(value + start, count, some);
            std::memcpy(value_row + start, some, count * sizeof(some[0]));
        }
    } else if (cache.kind == STORED_INT8) {
        cache.scales(keys)[index] = to_int8(key, dim, codes);
        for (std::int64_t d = 0; d < dim; d++) (keys + tile)[key_at(d)] = std::uint8_t(codes[d]);
        cache.scales(values)[index] = to_int8(value, dim, codes);
        for (std::int64_t d = 0; d < dim; d++) (values + tile)[value_at(d)] = std::uint8_t(codes[d]);
    } else {
        for (std::int64_t d = 0; d < dim; d++) ((std::uint16_t*)(keys + tile))[key_at(d)] = to_bf16(key[d]);
        for (std::int64_t d = 0; d < dim; d++) ((std::uint16_t*)(values + tile))[value_at(d)] = to_bf16(value[d]);
    }
}

// The key and value of a head from one slot to another, four bits.
static inline void copy_int4_slot(const Cache& cache, std::int64_t head, std::int64_t from, std::int64_t to) {
    const std::int64_t size = cache.block_size, padded = cache.padded();
    for (const bool values : {false, true}) {
        const auto half = [&](std::int64_t slot) {
            return values ? cache.values(slot / size, head) : cache.keys(slot / size, head);
        };
        const auto tile = [&](std::int64_t slot) { return half(slot) + slot % size / WIDTH * WIDTH * padded / 2; };
        const std::int64_t source = from % size % WIDTH, target = to % size % WIDTH;
        if (values)
            for (std::int64_t i = 0; i < padded / 2; i++)
                tile(to)[value_byte(padded, target, i)] = tile(from)[value_byte(padded, source, i)];
        else
            for (std::int64_t w = 0; w < padded / 8; w++)
                std::memcpy(tile(to) + (w * WIDTH + target) * 4, tile(from) + (w * WIDTH + source) * 4, 4);
        for (const std::int64_t plane : {std::int64_t(0), size})
            cache.half_scales(half(to))[plane + to % size] = cache.half_scales(half(from))[plane + from % size];
    }
}

// The key and value of a head from one slot to another, bit for bit.
template <class Number>
static inline void copy_slot(const Cache& cache, std::int64_t head, std::int64_t from, std::int64_t to) {
    const std::int64_t size = cache.block_size, stride = cache.padded(), bytes = cache.row_bytes();
    const auto at = [&](std::int64_t slot, bool values) {
        std::uint8_t* half = (values ? cache.values(slot / size, head) : cache.keys(slot / size, head));
        return (Number*)(half + slot % size / WIDTH * WIDTH * bytes);
    };
    const std::int64_t source = from % size % WIDTH, target = to % size % WIDTH;
    const bool plain = cache.plain();
    const auto key = [&](std::int64_t row, std::int64_t d) {
        return plain ? d * WIDTH + row : (d / 2 * WIDTH + row) * 2 + d % 2;
    };
    const auto value = [&](std::int64_t row, std::int64_t d) {
        return plain ? row * stride + d : (row / 2 * stride + d) * 2 + row % 2;
    };
    for (std::int64_t d = 0; d < cache.head_dim; d++) {
        at(to, false)[key(target, d)] = at(from, false)[key(source, d)];
        at(to, true)[value(target, d)] = at(from, true)[value(source, d)];
    }
    if (cache.kind != STORED_INT8) return;
    for (const bool values : {false, true}) {
        const auto scale = [&](std::int64_t slot) {
            const auto half = values ? cache.values(slot / size, head) : cache.keys(slot / size, head);
            return cache.scales(half) + slot % size;
        };
        *scale(to) = *scale(from);
    }
}

// In every layer and head, and the hidden states, for `count` pairs (from, to), one after the other.
static inline void copy_slots(const Model& model, const std::int64_t* pairs, std::int64_t count) {
    if (model.hidden_pool)
        for (std::int64_t i = 0; i < count; i++)
            std::memmove(model.hidden_at(pairs[2 * i + 1]), model.hidden_at(pairs[2 * i]),
                         model.hidden_width() * sizeof(std::uint16_t));
    for (std::int64_t layer = 0; layer < model.cached; layer++) {
        const Cache& cache = model.cache[layer];
        for (std::int64_t i = 0; i < count; i++)
            for (std::int64_t head = 0; head < model.kv_heads; head++) {
                const std::int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
                if (cache.latent) std::memmove(cache.latent_row(to), cache.latent_row(from), cache.latent_bytes());
                else if (cache.four_bits()) copy_int4_slot(cache, head, from, to);
                else if (cache.kind == STORED_FP32) copy_slot<float>(cache, head, from, to);
                else if (cache.kind == STORED_INT8) copy_slot<std::uint8_t>(cache, head, from, to);
                else copy_slot<std::uint16_t>(cache, head, from, to);
            }
    }
}

}  // namespace attar
