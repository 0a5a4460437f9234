// Attention over a block table, with grouped heads: a token's heads that share keys read them together.
//
// The places that a token sees are cut into parts of PART, so that few tokens occupy all threads; a part ends as
//     peak = max s,   total = sum e^(s - peak),   mixed = sum e^(s - peak) v
// per head, and parts are put together in their order (`joined`): by whoever worked them off, or, where they
// were shared out, when the next product takes them, with the same result. Inside a part, chunks of CHUNK
// places are worked off with a running peak (Milakov and Gimelshein, arXiv 1805.02867). tiles.h tells
// of their numbers.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "model.h"
#include "tiles.h"

namespace attar {

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
    const std::int64_t* positions;  // of the span's tokens: in a tree siblings share one
    std::int64_t earliest;          // position that is seen
};

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
        : model_(model), layer_(layer), group_(model.heads / model.kv_heads), room_(group_ * CHUNK), scales_(group_, 1.0f) {
        if (model.pool_kind == WIDE) return;
        halves_.resize(group_ * CHUNK);
        queries_.resize(group_ * model.head_dim + WIDTH);
        query_scales_.resize(group_);
    }

    // Part `index` of the places; queries (group, head_dim), scaled; into parts (group,) and mixed (group,
    // padded), head after head `apart` of them.
    void part(const Look& look, std::int64_t index, std::int64_t head, const float* queries, Part* parts,
              float* mixed, std::int64_t apart) {
        const std::int64_t stride = model_.padded();
        const std::int64_t from = std::max(look.from / WIDTH * WIDTH, index * PART);
        const std::int64_t until = std::min(look.until, (index + 1) * PART);
        round_queries(queries);
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
        const int count = int(stop - start), tiles = (count + WIDTH - 1) / WIDTH;
        for (int i = 0; i < tiles; i++) find(look, head, start + i * WIDTH, i);
        for (int i = 0; i < tiles; i++) {
            fetch(values_[i]);
            if (i + 1 < tiles) fetch(keys_[i + 1]);
            tile_scores(i, queries, room_.data() + i * WIDTH);
            hide(look, start + i * WIDTH, i * WIDTH);
        }
        for (std::int64_t q = 0; q < group_; q++) weigh(q, tiles * WIDTH);
        if (model_.pool_kind == WIDE) each_mix<Halves>(count, room_.data());
        if (model_.pool_kind == HALVES) each_mix<Halves>(count, halves_.data());
        if (model_.pool_kind == CODES) each_mix<Codes>(count, halves_.data());
    }

    // As keys take them.
    void round_queries(const float* queries) {
        const std::int64_t dim = model_.head_dim;
        if (model_.pool_kind == HALVES)
            for (std::int64_t i = 0; i < group_ * dim; i++) queries_[i] = to_bf16(queries[i]);
        if (model_.pool_kind != CODES) return;
        padded_.assign(model_.padded(), 0.0f);
        for (std::int64_t q = 0; q < group_; q++) {
            std::copy_n(queries + q * dim, dim, padded_.data());
            query_scales_[q] = to_shorts(padded_.data(), model_.padded(), queries_.data() + q * dim);
        }
    }

    // Where tile `index` of a chunk is.
    void find(const Look& look, std::int64_t head, std::int64_t place, int index) {
        const std::int64_t size = model_.block_size, block = look.blocks[place / size], row = place % size;
        const std::uint8_t *keys = model_.keys(layer_, block, head), *values = model_.values(layer_, block, head);
        keys_[index] = keys + row * model_.row_bytes();
        values_[index] = values + row * model_.row_bytes();
        key_scales_[index] = model_.scales(keys) + row;
        value_scales_[index] = model_.scales(values) + row;
        if (index == 0) fetch(keys_[index]);
    }

    void fetch(const std::uint8_t* tile) const {
        for (std::int64_t i = 0; i < WIDTH * model_.row_bytes(); i += 64) prefetch(tile + i);
    }

    void tile_scores(int index, const float* queries, float* to) {
        if (model_.pool_kind == WIDE) return each_scores<Halves>(keys_[index], queries, to);
        if (model_.pool_kind == HALVES) return each_scores<Halves>(keys_[index], queries_.data(), to);
        each_scores<Codes>(keys_[index], queries_.data(), to);
        const F scale = load(key_scales_[index]);
        for (std::int64_t q = 0; q < group_; q++, to += CHUNK) store(to, load(to) * (scale * query_scales_[q]));
    }

    template <class Kind, class Number>
    void each_scores(const std::uint8_t* keys, const Number* queries, float* to) {
        const std::int64_t dim = model_.head_dim;
        std::int64_t q = 0;
        for (; q + 8 <= group_; q += 8) scores<Kind, 8>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q + 4 <= group_; q += 4) scores<Kind, 4>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q + 2 <= group_; q += 2) scores<Kind, 2>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q < group_; q++) scores<Kind, 1>(keys, queries + q * dim, dim, to + q * CHUNK);
    }

    template <class Kind, class Number>
    void each_mix(int count, const Number* weights) {
        std::int64_t q = 0;
        for (; q + 4 <= group_; q += 4) mix_some<Kind, 4>(count, weights, q);
        for (; q + 2 <= group_; q += 2) mix_some<Kind, 2>(count, weights, q);
        for (; q < group_; q++) mix_some<Kind, 1>(count, weights, q);
    }

    template <class Kind, int Q, class Number>
    void mix_some(int count, const Number* weights, std::int64_t q) {
        const std::int64_t stride = model_.padded();
        mix_all<Kind, Q>(values_, stride, count, weights + q * CHUNK, scales_.data() + q, own_.data() + q * stride);
    }

    // Soft cap, and no score for what the token does not see.
    void hide(const Look& look, std::int64_t tile, std::int64_t column) {
        std::int32_t seen[WIDTH];
        bool whole = true;
        for (int i = 0; i < WIDTH; i++) {
            const std::int64_t place = tile + i;
            bool sees = place >= look.from && place < look.until;
            if (sees && look.tree && place >= look.place)
                sees = look.tree[place - look.place] && look.positions[place - look.place] >= look.earliest;
            seen[i] = sees ? -1 : 0;
            whole = whole && sees;
        }
        if (whole && model_.soft_cap == 0.0f) return;
        for (std::int64_t q = 0; q < group_; q++) {
            float* at = room_.data() + q * CHUNK + column;
            F score = load(at);
            if (model_.soft_cap != 0.0f) score = tangent(score / model_.soft_cap) * model_.soft_cap;
            store(at, choose(load_ints(seen), score, all(NEVER)));
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
            return round_weights(q, count);
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
        round_weights(q, count);
    }

    // As values take them; where these are codes, with their scales.
    void round_weights(std::int64_t q, std::int64_t count) {
        float* row = room_.data() + q * CHUNK;
        std::uint16_t* to = halves_.data() + q * CHUNK;
        if (model_.pool_kind == HALVES)
            for (std::int64_t i = 0; i < count; i += WIDTH) store_bf16(to + i, load(row + i));
        if (model_.pool_kind != CODES) return;
        for (std::int64_t i = 0; i < count; i += WIDTH) {
            const F weight = load(row + i);
            store(row + i, choose(equal(weight, F{}), F{}, weight * load(value_scales_[i / WIDTH])));
        }
        scales_[q] = to_shorts(row, count, to);
    }

    const Model& model_;
    const std::int64_t layer_, group_;
    std::vector<float> room_, scales_, own_, several_mixed_, query_scales_, padded_;
    std::vector<Part> state_, several_;
    std::vector<std::uint16_t> halves_, queries_;
    const std::uint8_t *keys_[TILES] = {}, *values_[TILES] = {};
    const float *key_scales_[TILES] = {}, *value_scales_[TILES] = {};
};

}  // namespace attar
