// Attention over a block table, with grouped heads: a token's heads that share keys read them together.
//
// The places that a token sees are cut into parts of PART, so that few tokens occupy all threads; a part ends as
//     peak = max s,   total = sum e^(s - peak),   mixed = sum e^(s - peak) v
// per head, and parts are put together in their order (`joined`): by whoever worked them off, or, where they
// were shared out, when the next product takes them, with the same result. Inside a part, chunks of CHUNK
// places are worked off with a running peak (Milakov and Gimelshein, arXiv 1805.02867). Keys and values are
// bfloat16 or float32, all else is float32.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "model.h"

namespace attar {

constexpr int CHUNK = 128;
constexpr int PART = 256;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Part {
    float peak, total;
};

// What one token and one key head need.
struct Look {
    const std::int64_t* blocks;  // the span's block table
    std::int64_t from, until;    // places [from, until) are seen
    std::int64_t place;          // where the span begins
    const std::uint8_t* tree;    // the token's row of the span's mask, or null
};

// Scores of Q heads with the 16 keys of a tile.
template <int Q, bool WIDE>
static inline void scores(const std::uint8_t* keys, const float* queries, std::int64_t dim, float* to) {
    F even[Q] = {}, odd[Q] = {};
    for (std::int64_t d = 0; d < dim; d += 2, keys += WIDE ? 128 : 64) {
        const I pair = load_ints(keys);
        const F first = WIDE ? (F)pair : (F)(pair << 16);
        const F second = WIDE ? (F)load_ints(keys + 64) : (F)(pair & ~0xffff);
        for (int q = 0; q < Q; q++) {
            even[q] = fma(first, all(queries[q * dim + d]), even[q]);
            odd[q] = fma(second, all(queries[q * dim + d + 1]), odd[q]);
        }
    }
    for (int q = 0; q < Q; q++) store(to + q * CHUNK, even[q] + odd[q]);
}

// mixed (Q, stride) += weights (Q, CHUNK) of `count` values, for V vectors of their dimensions.
template <int Q, int V, bool WIDE>
static inline void mix(const std::uint8_t* values, std::int64_t stride, int count, const float* weights,
                       float* mixed) {
    F sums[Q][V];
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) sums[q][v] = load(mixed + q * stride + v * WIDTH);
    constexpr int ITEM = WIDE ? 4 : 2;
    for (int i = 0; i < count; i++, values += stride * ITEM) {
        F row[V];
        for (int v = 0; v < V; v++) {
            const std::uint8_t* from = values + v * WIDTH * ITEM;
            row[v] = WIDE ? load((const float*)from) : from_bf16(from);
        }
        for (int q = 0; q < Q; q++) {
            const F weight = all(weights[q * CHUNK + i]);
            for (int v = 0; v < V; v++) sums[q][v] = fma(row[v], weight, sums[q][v]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) store(mixed + q * stride + v * WIDTH, sums[q][v]);
}

template <int Q, bool WIDE>
static inline void mix_all(const std::uint8_t* values, std::int64_t stride, int count, const float* weights,
                           float* mixed) {
    constexpr int ITEM = WIDE ? 4 : 2;
    std::int64_t d = 0;
    for (; d + 4 * WIDTH <= stride; d += 4 * WIDTH)
        mix<Q, 4, WIDE>(values + d * ITEM, stride, count, weights, mixed + d);
    for (; d + 2 * WIDTH <= stride; d += 2 * WIDTH)
        mix<Q, 2, WIDE>(values + d * ITEM, stride, count, weights, mixed + d);
    for (; d < stride; d += WIDTH) mix<Q, 1, WIDE>(values + d * ITEM, stride, count, weights, mixed + d);
}

// Dimensions [first, last) of a head's parts put together, each sum over parts in their order.
static inline Part joined(const Part* parts, const float* mixed, std::int64_t count, std::int64_t stride,
                          std::int64_t first, std::int64_t last, float* to) {
    Part all{NEVER, 0.0f};
    for (std::int64_t p = 0; p < count; p++) all.peak = std::max(all.peak, parts[p].peak);
    for (std::int64_t d = first; d < last; d++) to[d - first] = 0;
    if (all.peak == NEVER) return all;
    for (std::int64_t p = 0; p < count; p++) {
        const float share = std::exp(parts[p].peak - all.peak);
        if (share == 0.0f) continue;
        all.total += share * parts[p].total;
        const float* from = mixed + p * stride;
        for (std::int64_t d = first; d < last; d++) to[d - first] += share * from[d];
    }
    return all;
}

class Attention {
public:
    Attention(const Model& model, std::int64_t layer)
        : model_(model), layer_(layer), group_(model.heads / model.kv_heads), room_(group_ * CHUNK) {}

    // Part `index` of the places; queries (group, head_dim), scaled; into parts (group,) and mixed (group,
    // padded), head after head `apart` of them.
    void part(const Look& look, std::int64_t index, std::int64_t head, const float* queries, Part* parts,
              float* mixed, std::int64_t apart) {
        const std::int64_t stride = model_.padded();
        const std::int64_t from = std::max(look.from / WIDTH * WIDTH, index * PART);
        const std::int64_t until = std::min(look.until, (index + 1) * PART);
        own_.assign(group_ * stride, 0.0f);
        state_.assign(group_, Part{NEVER, 0.0f});
        for (std::int64_t start = from; start < until; start += CHUNK)
            chunk(look, head, queries, start, std::min(start + CHUNK, until));
        for (std::int64_t q = 0; q < group_; q++) {
            parts[q * apart] = state_[q];
            std::copy_n(own_.data() + q * stride, stride, mixed + q * apart * stride);
        }
    }

    // All parts, put together.
    void whole(const Look& look, std::int64_t head, const float* queries, Part* parts, float* mixed) {
        const std::int64_t first = look.from / PART, count = (look.until + PART - 1) / PART - first;
        if (count == 1) return part(look, first, head, queries, parts, mixed, 1);
        const std::int64_t stride = model_.padded();
        several_.resize(group_ * count);
        several_mixed_.resize(group_ * count * stride);
        for (std::int64_t p = 0; p < count; p++)
            part(look, first + p, head, queries, several_.data() + p, several_mixed_.data() + p * stride, count);
        for (std::int64_t q = 0; q < group_; q++)
            parts[q] = joined(several_.data() + q * count, several_mixed_.data() + q * count * stride, count, stride, 0,
                              stride, mixed + q * stride);
    }

private:
    void chunk(const Look& look, std::int64_t head, const float* queries, std::int64_t start, std::int64_t stop) {
        const std::int64_t size = model_.block_size;
        for (std::int64_t tile = start; tile < stop; tile += WIDTH) {
            const std::int64_t block = look.blocks[tile / size];
            const std::uint8_t* keys = model_.keys(layer_, block, head) + tile % size * model_.row_bytes();
            model_.wide ? tile_scores<true>(keys, queries, tile - start) : tile_scores<false>(keys, queries, tile - start);
            hide(look, tile, tile - start);
        }
        for (std::int64_t q = 0; q < group_; q++) weigh(q, (stop - start + WIDTH - 1) / WIDTH * WIDTH);
        for (std::int64_t tile = start; tile < stop; tile += WIDTH) {
            const std::int64_t block = look.blocks[tile / size];
            const std::uint8_t* values = model_.values(layer_, block, head) + tile % size * model_.row_bytes();
            const int count = int(std::min<std::int64_t>(WIDTH, stop - tile));
            model_.wide ? tile_values<true>(values, count, tile - start) : tile_values<false>(values, count, tile - start);
        }
    }

    template <bool WIDE>
    void tile_scores(const std::uint8_t* keys, const float* queries, std::int64_t column) {
        const std::int64_t dim = model_.head_dim;
        float* to = room_.data() + column;
        std::int64_t q = 0;
        for (; q + 4 <= group_; q += 4) scores<4, WIDE>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q + 2 <= group_; q += 2) scores<2, WIDE>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q < group_; q++) scores<1, WIDE>(keys, queries + q * dim, dim, to + q * CHUNK);
    }

    // Soft cap, and no score for what the token does not see.
    void hide(const Look& look, std::int64_t tile, std::int64_t column) {
        std::int32_t seen[WIDTH];
        bool whole = true;
        for (int i = 0; i < WIDTH; i++) {
            const std::int64_t place = tile + i;
            bool sees = place >= look.from && place < look.until;
            if (sees && look.tree && place >= look.place) sees = look.tree[place - look.place];
            seen[i] = sees ? -1 : 0;
            whole = whole && sees;
        }
        if (whole && model_.soft_cap == 0.0f) return;
        for (std::int64_t q = 0; q < group_; q++) {
            float* at = room_.data() + q * CHUNK + column;
            F score = load(at);
            if (model_.soft_cap != 0.0f) score = tangent(score / model_.soft_cap) * model_.soft_cap;
            store(at, load_ints(seen) != 0 ? score : all(NEVER));
        }
    }

    // Scores to e^(score - peak); what was mixed before is scaled to the new peak.
    void weigh(std::int64_t q, std::int64_t count) {
        float* row = room_.data() + q * CHUNK;
        F top = all(NEVER);
        for (std::int64_t i = 0; i < count; i += WIDTH) top = larger(top, load(row + i));
        Part& state = state_[q];
        const float peak = std::max(state.peak, largest(top));
        if (peak == NEVER) {
            std::fill_n(row, count, 0.0f);
            return;
        }
        F total{};
        for (std::int64_t i = 0; i < count; i += WIDTH) {
            const F weight = exponential(load(row + i) - peak);
            store(row + i, weight);
            total += weight;
        }
        if (peak > state.peak) {
            const float shrink = std::exp(state.peak - peak);
            state.total *= shrink;
            float* own = own_.data() + q * model_.padded();
            for (std::int64_t d = 0; d < model_.padded(); d += WIDTH) store(own + d, load(own + d) * shrink);
            state.peak = peak;
        }
        state.total += sum(total);
    }

    template <bool WIDE>
    void tile_values(const std::uint8_t* values, int count, std::int64_t column) {
        const std::int64_t stride = model_.padded();
        const float* weights = room_.data() + column;
        std::int64_t q = 0;
        for (; q + 4 <= group_; q += 4)
            mix_all<4, WIDE>(values, stride, count, weights + q * CHUNK, own_.data() + q * stride);
        for (; q + 2 <= group_; q += 2)
            mix_all<2, WIDE>(values, stride, count, weights + q * CHUNK, own_.data() + q * stride);
        for (; q < group_; q++) mix_all<1, WIDE>(values, stride, count, weights + q * CHUNK, own_.data() + q * stride);
    }

    const Model& model_;
    const std::int64_t layer_, group_;
    std::vector<float> room_, own_, several_mixed_;
    std::vector<Part> state_, several_;
};

// A token's key and value of a head to their slot.
static inline void remember(const Model& model, std::int64_t layer, std::int64_t head, std::int64_t slot,
                            const float* key, const float* value) {
    const std::int64_t block = slot / model.block_size, row = slot % model.block_size, dim = model.head_dim;
    std::uint8_t* tile = model.keys(layer, block, head) + row / WIDTH * WIDTH * model.row_bytes();
    std::uint8_t* values = model.values(layer, block, head) + row * model.row_bytes();
    for (std::int64_t d = 0; d < dim; d++) {
        if (model.wide) {
            ((float*)tile)[d * WIDTH + row % WIDTH] = key[d];
            ((float*)values)[d] = value[d];
        } else {
            ((std::uint16_t*)tile)[(d / 2 * WIDTH + row % WIDTH) * 2 + d % 2] = to_bf16(key[d]);
            ((std::uint16_t*)values)[d] = to_bf16(value[d]);
        }
    }
}

}  // namespace attar
