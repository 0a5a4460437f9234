// Attention of rows of queries that read the same keys, sixteen together, a lane for each:
//
//     s_i = q_i . k,   peak_i = max s_i,   total_i = sum e^(s_i - peak_i),   acc_i = sum e^(s_i - peak_i) v
//
// Keys come as rows of numbers, a chunk after the other, and a number of a key is multiplied with those of sixteen
// queries. Values are rows of numbers, or of bfloat16 two rows together, as kv_tiles.h has them. What a row computes
// does not depend on the other rows. float: everything is float32; uint16: keys, queries, weights and values are
// bfloat16.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention.h"

namespace attar {

constexpr int LANES = WIDTH;  // rows together

// `count` rows (dim,) of queries, `stride` apart: (width / 2, 16, 2) bfloat16, or (width, 16); zeros elsewhere.
template <class Number>
static inline void pack_queries(const float* from, std::int64_t stride, std::int64_t count, std::int64_t dim,
                                std::int64_t width, Number* to) {
    constexpr int PAIR = 4 / sizeof(Number);
    std::fill_n(to, width * LANES, Number(0));
    for (std::int64_t i = 0; i < count; i++)
        for (std::int64_t d = 0; d < dim; d++) {
            const float value = from[i * stride + d];
            Number& number = to[(d / PAIR * LANES + i) * PAIR + d % PAIR];
            if constexpr (PAIR == 2) number = to_bf16(value);
            else number = value;
        }
}

// Queries, which keys each sees, and what is known of their softmax.
template <class Number>
struct QueryRows {
    const Number* queries;        // of pack_queries
    std::int64_t count;           // at most 16
    std::int64_t past;            // keys that all see
    std::int64_t until[LANES];     // the first key that a row does not see
    const std::uint8_t* tree[LANES];  // or a row of the tree mask over the keys from `past` on, or null
    float *peak, *total;          // (16,)
    float* acc;                   // (count, value_stride)
};

// A chunk of keys and values in tiles of sixteen.
template <class Number>
struct KeyRows {
    const Number* keys[TILES];           // rows
    const std::uint8_t* values[TILES];
    std::int64_t width, key_stride;      // numbers of a key, a multiple of 16
    std::int64_t wide, value_stride;     // of a value
    const float* scales;                 // (count,) of keys and values, or null
    std::int64_t first, count;           // the first key's index
};

// Rows of bfloat16 as pairs of rows: (rows / 2, stride, 2). `rows` is even.
static inline void pair_rows(const std::uint16_t* from, std::int64_t from_stride, std::int64_t rows, std::int64_t wide,
                             std::int64_t stride, std::uint16_t* to) {
    for (std::int64_t i = 0; i < rows; i += 2)
        for (std::int64_t d = 0; d < wide; d += WIDTH) {
            const std::uint16_t* row = from + i * from_stride + d;
            const I low = ((I)load_bf16(row) >> 16) & 0xffff, high = (I)load_bf16(row + from_stride);
            store((float*)(to + (i / 2 * stride + d) * 2), (F)(low | high));
        }
}

static inline F load_query(const float* from) { return load(from); }
static inline I load_query(const std::uint16_t* from) { return load_ints(from); }
static inline F add_product(const F& total, const F& query, const float* key) {
    return fma(query, broadcast(*key), total);
}
static inline F add_product(const F& total, const I& query, const std::uint16_t* key) {
    return dot2(total, query, load_word(key));
}

template <class Number>
class RowAttention {
public:
    RowAttention() : ones_(LANES, 1.0f) {}

    // `next`: a tile that will be read, or null.
    void attend(const KeyRows<Number>& chunk, const QueryRows<Number>& rows, const Number* next) {
        scores_.resize(CHUNK * LANES);
        weights_.resize(LANES * CHUNK);
        const int tiles = int(chunk.count + WIDTH - 1) / WIDTH;
        for (int i = 0; i < tiles; i++) {
            float* to = scores_.data() + i * WIDTH * LANES;
            score_tile(rows.queries, chunk, chunk.keys[i], i + 1 < tiles ? chunk.keys[i + 1] : next, to);
            if (chunk.scales)
                for (int k = 0; k < WIDTH && i * WIDTH + k < chunk.count; k++)
                    store(to + k * LANES, load(to + k * LANES) * chunk.scales[i * WIDTH + k]);
            hide(rows, chunk.first + i * WIDTH, to);
        }
        exponentiate(chunk, rows);
        std::int64_t q = 0;
        for (; q + 4 <= rows.count; q += 4) accumulate_rows<4>(chunk, rows, q);
        for (; q + 2 <= rows.count; q += 2) accumulate_rows<2>(chunk, rows, q);
        for (; q < rows.count; q++) accumulate_rows<1>(chunk, rows, q);
    }

private:
    using Kind = std::conditional_t<std::is_same_v<Number, float>, Float32, BFloat16Pairs>;
    static constexpr int PAIR = 4 / sizeof(Number);            // numbers in a lane
    static constexpr int TOGETHER = PARTS == 1 ? WIDTH : 4;  // keys whose sums are in registers

    // Scores (16 keys, 16 rows) of a tile; meanwhile the next tile is fetched.
    static void score_tile(const Number* queries, const KeyRows<Number>& chunk, const Number* keys, const Number* next,
                           float* to) {
        const std::int64_t stride = chunk.key_stride;
        for (int start = 0; start < WIDTH; start += TOGETHER) {
            F sums[TOGETHER] = {};
            const Number *query = queries, *row[TOGETHER / 4];
            for (int j = 0; j < TOGETHER / 4; j++) row[j] = keys + (start + 4 * j) * stride;
            for (std::int64_t d = 0; d < chunk.width; d += WIDTH) {
                if (next)
                    for (int i = 0; i < TOGETHER; i++) prefetch(next + (start + i) * stride + d);
                for (int step = 0; step < WIDTH; step += PAIR, query += LANES * PAIR) {
                    const auto x = load_query(query);
                    ATTAR_UNROLL
                    for (int i = 0; i < TOGETHER; i++) sums[i] = add_product(sums[i], x, row[i / 4] + i % 4 * stride);
                    ATTAR_UNROLL
                    for (int j = 0; j < TOGETHER / 4; j++) row[j] += PAIR;
                }
            }
            for (int i = 0; i < TOGETHER; i++) store(to + (start + i) * LANES, sums[i]);
        }
    }

    // A score of minus infinity where a row does not see a key.
    static void hide(const QueryRows<Number>& rows, std::int64_t first, float* scores) {
        std::int64_t all = rows.until[0];
        for (std::int64_t q = 0; q < rows.count; q++)
            all = std::min(all, rows.tree[q] ? std::min(rows.past, rows.until[q]) : rows.until[q]);
        if (first + WIDTH <= all) return;
        for (std::int64_t q = 0; q < rows.count; q++)
            for (int k = 0; k < WIDTH; k++) {
                const std::int64_t key = first + k;
                const bool sees = key < rows.until[q] &&
                                  (!rows.tree[q] || key < rows.past || rows.tree[q][key - rows.past]);
                if (!sees) scores[k * LANES + q] = MINUS_INFINITY;
            }
    }

    // Scores to weights (16 rows, CHUNK); acc is rescaled to the new peaks.
    void exponentiate(const KeyRows<Number>& chunk, const QueryRows<Number>& rows) {
        const F before = load(rows.peak);
        F top = before;
        for (std::int64_t k = 0; k < chunk.count; k++) top = maximum(load(scores_.data() + k * LANES), top);
        const F peak = select(equal(top, broadcast(MINUS_INFINITY)), F{}, top), factor = exp_(before - peak);
        F total{};
        float lanes[LANES];
        for (std::int64_t k = 0; k < chunk.count; k++) {
            F weight = exp_(load(scores_.data() + k * LANES) - peak);
            total += weight;
            if (chunk.scales) weight = weight * chunk.scales[k];
            store(lanes, weight);
            for (std::int64_t q = 0; q < rows.count; q++) {
                if constexpr (PAIR == 2) weights_[q * CHUNK + k] = to_bf16(lanes[q]);
                else weights_[q * CHUNK + k] = lanes[q];
            }
        }
        if (chunk.count % 2)  // the other of a pair
            for (std::int64_t q = 0; q < rows.count; q++) weights_[q * CHUNK + chunk.count] = 0;
        store(rows.peak, top);
        store(rows.total, fma(load(rows.total), factor, total));
        store(lanes, factor);
        for (std::int64_t q = 0; q < rows.count; q++) {
            if (lanes[q] == 1.0f) continue;
            float* acc = rows.acc + q * chunk.value_stride;
            for (std::int64_t d = 0; d < chunk.wide; d += WIDTH) store(acc + d, load(acc + d) * lanes[q]);
        }
    }

    template <int Q>
    void accumulate_rows(const KeyRows<Number>& chunk, const QueryRows<Number>& rows, std::int64_t q) {
        const Number* weights = weights_.data() + q * CHUNK;
        float* acc = rows.acc + q * chunk.value_stride;
        const std::int64_t stride = chunk.value_stride;
        const int count = int(chunk.count);
        std::int64_t d = 0;
        for (; d + 4 * WIDTH <= chunk.wide; d += 4 * WIDTH)
            accumulate<Kind, Q, 4>(chunk.values, stride, d, count, weights, ones_.data(), acc);
        for (; d < chunk.wide; d += WIDTH)
            accumulate<Kind, Q, 1>(chunk.values, stride, d, count, weights, ones_.data(), acc);
    }

    std::vector<float> scores_, ones_;
    std::vector<Number> weights_;
};

}  // namespace attar
