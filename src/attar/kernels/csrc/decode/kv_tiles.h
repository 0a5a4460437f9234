// Tiles of 16 keys and values in the cache: their layout, attention scores and weighted sums.
//
//     keys      bfloat16 (head_dim / 2, 16, 2)     a lane for each token
//     values    bfloat16 (8, padded, 2)            a lane for each dimension, two tokens together
//
// With these, queries and weights are bfloat16. An int8 cache has codes in the same layout and a float32 scale per
// token, multiplied into scores and weights; queries and weights are int16 with a scale, so that sums are exact.
// An int4 cache has words of codes (kv_codes.h), which are unpacked in registers to bytes; queries and weights are int8
// with a scale. What rounding takes from a sum is given back at the middle code, CENTER.
// A float16 or float32 cache has keys (head_dim, 16) and values (16, padded); all else is float32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vector.h"

namespace attar {

constexpr int CHUNK = 128;
constexpr int TILES = CHUNK / WIDTH;
constexpr float CENTER = 7.5f;

// bfloat16 in pairs.
struct BFloat16Pairs {
    using Sum = F;
    static constexpr int BYTES = 2;
    static I pair(const std::uint8_t* from) { return load_ints(from); }
    static F dot(F total, I row, std::int32_t x) { return dot2(total, row, x); }
};

// int8 in pairs.
struct Int8Pairs {
    using Sum = I;
    static constexpr int BYTES = 1;
    static I pair(const std::uint8_t* from) { return load_int8_pairs(from); }
    static I dot(I total, I row, std::int32_t x) { return dot_shorts(total, row, x); }
};

// Four bits: of a word, four bytes of the low nibbles and four of the high ones.
struct Int4Codes {
    static I low(const I& words) { return words & 0x0f0f0f0f; }
    static I high(const I& words) { return (words >> 4) & 0x0f0f0f0f; }
};

// One number per lane.
struct Float16 {
    static constexpr int BYTES = 2;
    static F row(const std::uint8_t* from) { return load_fp16(from); }
};
struct Float32 {
    static constexpr int BYTES = 4;
    static F row(const std::uint8_t* from) { return load((const float*)from); }
};

// Scores of Q heads with a tile of keys; queries (Q, dim). Of codes: before multiplication by both scales.
template <class Kind, int Q>
static inline void scores(const std::uint8_t* keys, const std::uint16_t* queries, std::int64_t dim, float* to) {
    constexpr int STEP = 32 * Kind::BYTES;
    typename Kind::Sum sums[Q][2] = {};
    std::int64_t d = 0;
    for (; d + 4 <= dim; d += 4, keys += 2 * STEP) {
        const I first = Kind::pair(keys), second = Kind::pair(keys + STEP);
        for (int q = 0; q < Q; q++) {
            sums[q][0] = Kind::dot(sums[q][0], first, load_word(queries + q * dim + d));
            sums[q][1] = Kind::dot(sums[q][1], second, load_word(queries + q * dim + d + 2));
        }
    }
    for (; d < dim; d += 2, keys += STEP)
        for (int q = 0; q < Q; q++)
            sums[q][0] = Kind::dot(sums[q][0], Kind::pair(keys), load_word(queries + q * dim + d));
    for (int q = 0; q < Q; q++) store(to + q * CHUNK, to_floats(sums[q][0] + sums[q][1]));
}

// The same of four bits: words of eight dimensions, and queries of int8.
template <class Kind, int Q>
static inline void scores(const std::uint8_t* keys, const std::int8_t* queries, std::int64_t dim, float* to) {
    I sums[Q] = {};
    for (std::int64_t d = 0; d < dim; d += 8, keys += 4 * WIDTH) {
        const I words = load_ints(keys), low = Kind::low(words), high = Kind::high(words);
        for (int q = 0; q < Q; q++) {
            const std::int8_t* query = queries + q * dim + d;
            sums[q] = dot8(sums[q], low, load_word(query), high, load_word(query + 4));
        }
    }
    for (int q = 0; q < Q; q++) store(to + q * CHUNK, to_floats(sums[q]));
}

template <class Kind, int Q>
static inline void scores(const std::uint8_t* keys, const float* queries, std::int64_t dim, float* to) {
    constexpr int STEP = WIDTH * Kind::BYTES;
    F sums[Q][2] = {};
    for (std::int64_t d = 0; d < dim; d += 2, keys += 2 * STEP) {
        const F first = Kind::row(keys), second = Kind::row(keys + STEP);
        for (int q = 0; q < Q; q++) {
            sums[q][0] = fma(first, broadcast(queries[q * dim + d]), sums[q][0]);
            sums[q][1] = fma(second, broadcast(queries[q * dim + d + 1]), sums[q][1]);
        }
    }
    for (int q = 0; q < Q; q++) store(to + q * CHUNK, sums[q][0] + sums[q][1]);
}

// acc (Q, stride) += weights (Q, CHUNK) times scales (Q,) of the first `count` values of some tiles, for V
// vectors from dimension `at` on.
template <class Kind, int Q, int V>
static inline void accumulate(const std::uint8_t* const* tiles, std::int64_t stride, std::int64_t at, int count,
                       const std::uint16_t* weights, const float* scales, float* acc) {
    typename Kind::Sum sums[Q][V] = {};
    for (int i = 0; i < count; i += 2) {
        const std::int32_t valid = i + 1 < count ? -1 : 0xffff;  // a free slot may hold anything
        I row[V];
        const std::uint8_t* from = tiles[i / WIDTH] + (i % WIDTH / 2 * stride + at) * 2 * Kind::BYTES;
        for (int v = 0; v < V; v++) row[v] = Kind::pair(from + v * WIDTH * 2 * Kind::BYTES) & valid;
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < V; v++) sums[q][v] = Kind::dot(sums[q][v], row[v], load_word(weights + q * CHUNK + i));
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) {
            float* to = acc + q * stride + at + v * WIDTH;
            store(to, fma(to_floats(sums[q][v]), broadcast(scales[q]), load(to)));
        }
}

template <class Kind, int Q, int V>
static inline void accumulate(const std::uint8_t* const* tiles, std::int64_t stride, std::int64_t at, int count,
                       const float* weights, const float*, float* acc) {
    F sums[Q][V];
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) sums[q][v] = load(acc + q * stride + at + v * WIDTH);
    for (int i = 0; i < count; i++) {
        const std::uint8_t* from = tiles[i / WIDTH] + (i % WIDTH * stride + at) * Kind::BYTES;
        F row[V];
        for (int v = 0; v < V; v++) row[v] = Kind::row(from + v * WIDTH * Kind::BYTES);
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < V; v++) sums[q][v] = fma(row[v], broadcast(weights[q * CHUNK + i]), sums[q][v]);
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) store(acc + q * stride + at + v * WIDTH, sums[q][v]);
}

// The same of four bits, for 32 dimensions: words of four tokens, weights of int8, which are zero behind the last one.
template <class Kind, int Q>
static inline void accumulate_words(const std::uint8_t* const* tiles, std::int64_t stride, std::int64_t at, int count,
                                    const std::int8_t* weights, const float* scales, float* acc) {
    I sums[Q][2] = {};
    for (int i = 0; i < count; i += 8) {
        const std::uint8_t* from = tiles[i / WIDTH] + (i % WIDTH * stride + 4 * at) / 2;
        const I first = load_ints(from), second = load_ints(from + 2 * stride);
        const I low[2] = {Kind::low(first), Kind::low(second)}, high[2] = {Kind::high(first), Kind::high(second)};
        for (int q = 0; q < Q; q++) {
            const std::int32_t x = load_word(weights + q * CHUNK + i), y = load_word(weights + q * CHUNK + i + 4);
            sums[q][0] = dot8(sums[q][0], low[0], x, low[1], y);
            sums[q][1] = dot8(sums[q][1], high[0], x, high[1], y);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < 2; v++) {
            float* to = acc + q * stride + at + v * WIDTH;
            store(to, fma(to_floats(sums[q][v]), broadcast(scales[q]), load(to)));
        }
}

template <class Kind, int Q>
static inline void accumulate_dims(const std::uint8_t* const* tiles, std::int64_t stride, int count,
                                   const std::int8_t* weights, const float* scales, float* acc) {
    for (std::int64_t d = 0; d < stride; d += 2 * WIDTH)
        accumulate_words<Kind, Q>(tiles, stride, d, count, weights, scales, acc);
}

template <class Kind, int Q, class Number>
static inline void accumulate_dims(const std::uint8_t* const* tiles, std::int64_t stride, int count,
                                   const Number* weights, const float* scales, float* acc) {
    std::int64_t d = 0;
    for (; d + 4 * WIDTH <= stride; d += 4 * WIDTH)
        accumulate<Kind, Q, 4>(tiles, stride, d, count, weights, scales, acc);
    for (; d + 2 * WIDTH <= stride; d += 2 * WIDTH)
        accumulate<Kind, Q, 2>(tiles, stride, d, count, weights, scales, acc);
    for (; d < stride; d += WIDTH) accumulate<Kind, Q, 1>(tiles, stride, d, count, weights, scales, acc);
}

// `count` numbers, a multiple of 16, to int16 codes; returns their scale.
static inline float to_int16(const float* from, std::int64_t count, std::uint16_t* to) {
    F peak{};
    for (std::int64_t i = 0; i < count; i += WIDTH) peak = maximum(peak, absolute(load(from + i)));
    const float top = largest_lane(peak), inverse = top > 0 ? 32767.0f / top : 0.0f;
    for (std::int64_t i = 0; i < count; i += WIDTH) {
        const I code = to_ints(round_even(load(from + i) * inverse));
        store_shorts(to + i, code);
    }
    return top / 32767.0f;
}

// `count` numbers, a multiple of 16, to int8 codes; returns their scale. What rounding changes is carried to the number
// sixteen further on, where CARRY, so that the sums of many small numbers stay; `left` is what is lost of the sum.
template <bool CARRY>
static inline float to_bytes(const float* from, std::int64_t count, std::int8_t* to, float& left) {
    F peak{}, lost{};
    for (std::int64_t i = 0; i < count; i += WIDTH) peak = maximum(peak, absolute(load(from + i)));
    const float top = largest_lane(peak), inverse = top > 0 ? 127.0f / top : 0.0f;
    for (std::int64_t i = 0; i < count; i += WIDTH) {
        F x = load(from + i) * inverse;
        if (CARRY) x += lost;
        const F code = minimum(round_even(x), broadcast(127.0f));
        lost = CARRY ? x - code : lost + (x - code);
        store_bytes(to + i, to_ints(code));
    }
    left = sum_lanes(lost) * top / 127.0f;
    return top / 127.0f;
}

// `dim` numbers to int8 codes; returns their scale.
static inline float to_int8(const float* from, std::int64_t dim, std::int8_t* codes) {
    float top = 0;
    for (std::int64_t d = 0; d < dim; d++) top = std::max(top, std::fabs(from[d]));
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (std::int64_t d = 0; d < dim; d++) codes[d] = std::int8_t(std::nearbyint(from[d] * inverse));
    return top / 127.0f;
}

}  // namespace attar
