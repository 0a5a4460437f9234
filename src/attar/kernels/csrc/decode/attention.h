// Attention over a block table with grouped query heads: the heads of a token that share keys read them together.
//
// The keys that a token sees are divided into splits of SPLIT (flash-decoding), so that few tokens occupy all
// threads. A split yields, per head,
//     peak = max s,   total = sum e^(s - peak),   acc = sum e^(s - peak) v
// and splits are merged in their order (`merge_splits`): by the worker that computed them all, or, where they were
// divided among workers, when the input of the next product is prepared, with the same result. Inside a split,
// chunks of CHUNK keys share a running peak (online softmax: Milakov and Gimelshein, arXiv 1805.02867).
// kv_tiles.h describes the number formats.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "kv_codes.h"
#include "kv_tiles.h"
#include "model.h"

namespace attar {

constexpr int SPLIT = 256, AHEAD = 2;  // tiles whose keys are fetched before they are read
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct SoftmaxState {
    float peak, total;
};

// The keys that one token sees.
struct KeyRange {
    const std::int64_t* blocks;     // the sequence's block table
    std::int64_t from, until;       // indices [from, until) are seen
    std::int64_t past;              // keys in the cache before this step
    const std::uint8_t* tree;       // the token's row of the tree mask over the step's tokens, or null
    const std::int64_t* positions;  // of the step's tokens: siblings in a tree share one
    std::int64_t earliest;          // position that is seen
};

// Dimensions [first, last) of a head's splits merged, each sum over the splits in their order.
static inline SoftmaxState merge_splits(const SoftmaxState* states, const float* acc, std::int64_t count,
                                        std::int64_t stride, std::int64_t first, std::int64_t last, float* to) {
    SoftmaxState merged{MINUS_INFINITY, 0.0f};
    for (std::int64_t p = 0; p < count; p++) merged.peak = std::max(merged.peak, states[p].peak);
    for (std::int64_t d = first; d < last; d++) to[d - first] = 0;
    if (merged.peak == MINUS_INFINITY) return merged;
    for (std::int64_t p = 0; p < count; p++) {
        const float factor = std::exp(states[p].peak - merged.peak);
        if (factor == 0.0f) continue;
        merged.total += factor * states[p].total;
        const float* from = acc + p * stride;
        for (std::int64_t d = first; d < last; d++) to[d - first] += factor * from[d];
    }
    return merged;
}

class Attention {
public:
    Attention(const Model& model, const Cache& cache)
        : model_(model),
          cache_(cache),
          group_(model.heads / model.kv_heads),
          scores_(group_ * CHUNK),
          scales_(group_, 1.0f) {
        if (cache.plain()) return;
        if (cache.four_bits()) bytes_.resize(group_ * (CHUNK + cache.padded()));
        weights_.resize(group_ * CHUNK);
        queries_.resize(group_ * model.head_dim + WIDTH);
        query_scales_.resize(group_);
        query_sums_.resize(group_);
        query_rests_.resize(group_);
        offsets_.resize(2 * group_);
    }

    // Split `index` of the keys; queries (group, head_dim), scaled; into states (group,) and acc (group, padded),
    // whose heads are `splits` rows apart.
    void attend_split(const KeyRange& range, std::int64_t index, std::int64_t head, const float* queries,
                      SoftmaxState* states, float* acc, std::int64_t splits) {
        const std::int64_t stride = cache_.padded();
        const std::int64_t from = std::max(range.from / WIDTH * WIDTH, index * SPLIT);
        const std::int64_t until = std::min(range.until, (index + 1) * SPLIT);
        quantize_queries(queries, head);
        acc_.assign(group_ * stride, 0.0f);
        state_.assign(group_, SoftmaxState{MINUS_INFINITY, 0.0f});
        for (std::int64_t start = from; start < until; start += CHUNK)
            chunk(range, head, queries, start, std::min(start + CHUNK, until));
        for (std::int64_t q = 0; q < group_; q++) {
            states[q * splits] = state_[q];
            std::copy_n(acc_.data() + q * stride, stride, acc + q * splits * stride);
        }
    }

    // All splits, merged.
    void attend(const KeyRange& range, std::int64_t head, const float* queries, SoftmaxState* states, float* acc) {
        const std::int64_t first = range.from / SPLIT, count = (range.until + SPLIT - 1) / SPLIT - first;
        if (count == 1) return attend_split(range, first, head, queries, states, acc, 1);
        const std::int64_t stride = cache_.padded();
        split_states_.resize(group_ * count);
        split_acc_.resize(group_ * count * stride);
        for (std::int64_t p = 0; p < count; p++)
            attend_split(range, first + p, head, queries, split_states_.data() + p, split_acc_.data() + p * stride,
                         count);
        for (std::int64_t q = 0; q < group_; q++)
            states[q] = merge_splits(split_states_.data() + q * count, split_acc_.data() + q * count * stride, count,
                                     stride, 0, stride, acc + q * stride);
    }

private:
    void chunk(const KeyRange& range, std::int64_t head, const float* queries, std::int64_t start, std::int64_t stop) {
        const int count = int(stop - start), tiles = (count + WIDTH - 1) / WIDTH;
        for (int i = 0; i < tiles; i++) locate_tile(range, head, start + i * WIDTH, i);
        for (int i = 0; i < tiles; i++) {
            prefetch_tile(values_[i], value_scales_[i]);
            prefetch_keys(range, head, start + (i + AHEAD) * WIDTH);
            tile_scores(i, queries, scores_.data() + i * WIDTH);
            apply_mask(range, start + i * WIDTH, i * WIDTH);
        }
        for (std::int64_t q = 0; q < group_; q++) exponentiate(q, tiles * WIDTH);
        if (cache_.kind == STORED_FP32) accumulate_values<Float32>(count, scores_.data());
        if (cache_.kind == STORED_FP16) accumulate_values<Float16>(count, scores_.data());
        if (cache_.kind == STORED_BF16) accumulate_values<BFloat16Pairs>(count, weights_.data());
        if (cache_.kind == STORED_INT8) accumulate_values<Int8Pairs>(count, weights_.data());
        if (cache_.four_bits()) accumulate_values<Int4Codes>(count, weight_bytes());
    }

    // Numbers between two heads' queries in their format.
    std::int64_t query_stride() const { return cache_.four_bits() ? cache_.padded() : cache_.head_dim; }

    // Of four bits: queries (group, padded) and weights (group, CHUNK).
    std::int8_t* query_bytes() { return bytes_.data(); }
    std::int8_t* weight_bytes() { return bytes_.data() + group_ * cache_.padded(); }

    // Queries in the number format of the keys.
    void quantize_queries(const float* queries, std::int64_t head) {
        const std::int64_t dim = cache_.head_dim, padded = cache_.padded();
        if (cache_.kind == STORED_BF16)
            for (std::int64_t i = 0; i < group_ * dim; i++) queries_[i] = to_bf16(queries[i]);
        if (cache_.kind != STORED_INT8 && !cache_.four_bits()) return;
        padded_.assign(2 * padded, 0.0f);
        float* ones = padded_.data() + padded;
        std::fill_n(ones, padded, 1.0f);
        for (std::int64_t q = 0; q < group_; q++) {
            std::copy_n(queries + q * dim, dim, padded_.data());
            if (!cache_.four_bits()) {
                query_scales_[q] = to_int16(padded_.data(), padded, queries_.data() + q * dim);
                continue;
            }
            query_scales_[q] = to_bytes<false>(padded_.data(), padded, query_bytes() + q * padded, query_rests_[q]);
            query_sums_[q] = dot(padded_.data(), ones, padded);
            for (int i = 0; i < 2; i++)
                offsets_[2 * q + i] = dot(padded_.data(), cache_.basis_of(head, CENTERS) + i * padded, padded);
        }
    }

    std::int64_t constant_bytes() const { return cache_.four_bits() ? 2 : 4; }

    // Addresses of tile `index` of a chunk, which begins at key `key`.
    void locate_tile(const KeyRange& range, std::int64_t head, std::int64_t key, int index) {
        const std::int64_t size = cache_.block_size, block = range.blocks[key / size], row = key % size;
        const std::uint8_t *keys = cache_.keys(block, head), *values = cache_.values(block, head);
        keys_[index] = keys + row * cache_.row_bytes();
        values_[index] = values + row * cache_.row_bytes();
        key_scales_[index] = (const std::uint8_t*)cache_.scales(keys) + row * constant_bytes();
        value_scales_[index] = (const std::uint8_t*)cache_.scales(values) + row * constant_bytes();
    }

    // Of the tile that begins at key `key`, if it is seen.
    void prefetch_keys(const KeyRange& range, std::int64_t head, std::int64_t key) const {
        if (key >= range.until) return;
        const std::int64_t size = cache_.block_size, row = key % size;
        const std::uint8_t* keys = cache_.keys(range.blocks[key / size], head);
        prefetch_tile(keys + row * cache_.row_bytes(), (const std::uint8_t*)cache_.scales(keys) + row * constant_bytes());
    }

    void prefetch_tile(const std::uint8_t* tile, const std::uint8_t* scales) const {
        for (std::int64_t i = 0; i < WIDTH * cache_.row_bytes(); i += 64) prefetch(tile + i);
        if (cache_.coded()) prefetch(scales);
    }

    void tile_scores(int index, const float* queries, float* to) {
        if (cache_.kind == STORED_FP32) return score_heads<Float32>(keys_[index], queries, to);
        if (cache_.kind == STORED_FP16) return score_heads<Float16>(keys_[index], queries, to);
        if (cache_.kind == STORED_BF16) return score_heads<BFloat16Pairs>(keys_[index], queries_.data(), to);
        if (cache_.four_bits()) return tile_scores_of_codes(index, to);
        score_heads<Int8Pairs>(keys_[index], queries_.data(), to);
        const F scale = load((const float*)key_scales_[index]);
        for (std::int64_t q = 0; q < group_; q++, to += CHUNK) store(to, load(to) * (scale * query_scales_[q]));
    }

    // s (q' . codes) + m sum q' + q' . c'
    void tile_scores_of_codes(int index, float* to) {
        score_heads<Int4Codes>(keys_[index], query_bytes(), to);
        const std::uint16_t* constants = (const std::uint16_t*)key_scales_[index];
        const F sign = load_fp16(constants), scale = absolute(sign), m = load_fp16(constants + cache_.block_size);
        const I second = less(sign, F{});
        for (std::int64_t q = 0; q < group_; q++, to += CHUNK) {
            const F center = select(second, broadcast(offsets_[2 * q + 1]), broadcast(offsets_[2 * q]));
            const F offset = fma(m, broadcast(query_sums_[q]), center);
            const F codes = fma(load(to), broadcast(query_scales_[q]), broadcast(CENTER * query_rests_[q]));
            store(to, fma(codes, scale, offset));
        }
    }

    template <class Kind, class Number>
    void score_heads(const std::uint8_t* keys, const Number* queries, float* to) {
        const std::int64_t dim = query_stride();
        std::int64_t q = 0;
        for (; q + 8 <= group_; q += 8) scores<Kind, 8>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q + 4 <= group_; q += 4) scores<Kind, 4>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q + 3 <= group_; q += 3) scores<Kind, 3>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q + 2 <= group_; q += 2) scores<Kind, 2>(keys, queries + q * dim, dim, to + q * CHUNK);
        for (; q < group_; q++) scores<Kind, 1>(keys, queries + q * dim, dim, to + q * CHUNK);
    }

    template <class Kind, class Number>
    void accumulate_values(int count, const Number* weights) {
        std::int64_t q = 0;
        for (; q + 4 <= group_; q += 4) accumulate_heads<Kind, 4>(count, weights, q);
        for (; q + 3 <= group_; q += 3) accumulate_heads<Kind, 3>(count, weights, q);
        for (; q + 2 <= group_; q += 2) accumulate_heads<Kind, 2>(count, weights, q);
        for (; q < group_; q++) accumulate_heads<Kind, 1>(count, weights, q);
    }

    template <class Kind, int Q, class Number>
    void accumulate_heads(int count, const Number* weights, std::int64_t q) {
        const std::int64_t stride = cache_.padded();
        accumulate_dims<Kind, Q>(values_, stride, count, weights + q * CHUNK, scales_.data() + q,
                                 acc_.data() + q * stride);
    }

    // Soft cap, and a score of minus infinity for the keys that the token does not see.
    void apply_mask(const KeyRange& range, std::int64_t tile, std::int64_t column) {
        std::int32_t seen[WIDTH];
        bool all_seen = true;
        const bool after = range.tree && tile + WIDTH > range.past;
        if (!after && tile >= range.from && tile + WIDTH <= range.until && model_.soft_cap == 0.0f) return;
        for (int i = 0; i < WIDTH; i++) {
            const std::int64_t key = tile + i;
            bool sees = key >= range.from && key < range.until;
            if (sees && range.tree && key >= range.past)
                sees = range.tree[key - range.past] && range.positions[key - range.past] >= range.earliest;
            seen[i] = sees ? -1 : 0;
            all_seen = all_seen && sees;
        }
        if (all_seen && model_.soft_cap == 0.0f) return;
        for (std::int64_t q = 0; q < group_; q++) {
            float* row = scores_.data() + q * CHUNK + column;
            F score = load(row);
            if (model_.soft_cap != 0.0f) score = tanh_(score / model_.soft_cap) * model_.soft_cap;
            store(row, select(load_ints(seen), score, broadcast(MINUS_INFINITY)));
        }
    }

    // Scores to e^(score - peak); acc is rescaled to the new peak.
    void exponentiate(std::int64_t q, std::int64_t count) {
        float* row = scores_.data() + q * CHUNK;
        F top = broadcast(MINUS_INFINITY);
        for (std::int64_t i = 0; i < count; i += WIDTH) top = maximum(top, load(row + i));
        SoftmaxState& state = state_[q];
        const float peak = std::max(state.peak, largest_lane(top));
        if (peak == MINUS_INFINITY) {
            std::fill_n(row, count, 0.0f);
            return quantize_weights(q, count);
        }
        F total{};
        for (std::int64_t i = 0; i < count; i += WIDTH) {
            const F weight = exp_(load(row + i) - peak);
            store(row + i, weight);
            total += weight;
        }
        if (peak > state.peak) {
            const float factor = std::exp(state.peak - peak);
            state.total *= factor;
            float* acc = acc_.data() + q * cache_.padded();
            for (std::int64_t d = 0; d < cache_.padded(); d += WIDTH) store(acc + d, load(acc + d) * factor);
            state.peak = peak;
        }
        state.total += sum_lanes(total);
        quantize_weights(q, count);
    }

    // Weights in the number format of the values; codes' with the values' scales multiplied in. Of four bits the sum
    // of weights times minima is added to every dimension.
    void quantize_weights(std::int64_t q, std::int64_t count) {
        float* row = scores_.data() + q * CHUNK;
        std::uint16_t* to = weights_.data() + q * CHUNK;
        if (cache_.kind == STORED_BF16)
            for (std::int64_t i = 0; i < count; i += WIDTH) store_bf16(to + i, load(row + i));
        if (cache_.kind != STORED_INT8 && !cache_.four_bits()) return;
        F minima{};
        for (std::int64_t i = 0; i < count; i += WIDTH) {
            const F weight = load(row + i);
            const std::uint8_t* constants = value_scales_[i / WIDTH];
            const F scale = cache_.four_bits() ? load_fp16(constants) : load((const float*)constants);
            store(row + i, select(equal(weight, F{}), F{}, weight * scale));
            if (cache_.four_bits()) minima = fma(weight, load_fp16(constants + 2 * cache_.block_size), minima);
        }
        if (!cache_.four_bits()) {
            scales_[q] = to_int16(row, count, to);
            return;
        }
        float left;
        scales_[q] = to_bytes<true>(row, count, weight_bytes() + q * CHUNK, left);
        const float offset = sum_lanes(minima) + CENTER * left;
        float* acc = acc_.data() + q * cache_.padded();
        for (std::int64_t d = 0; d < cache_.padded(); d += WIDTH) store(acc + d, load(acc + d) + offset);
    }

    const Model& model_;
    const Cache& cache_;
    const std::int64_t group_;
    std::vector<float> scores_, scales_, acc_, split_acc_, query_scales_, query_sums_, query_rests_, offsets_, padded_;
    std::vector<std::int8_t> bytes_;
    std::vector<SoftmaxState> state_, split_states_;
    std::vector<std::uint16_t> weights_, queries_;
    const std::uint8_t *keys_[TILES] = {}, *values_[TILES] = {};
    const std::uint8_t *key_scales_[TILES] = {}, *value_scales_[TILES] = {};  // float32; float16 of four bits
};

}  // namespace attar
