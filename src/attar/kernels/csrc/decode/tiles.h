// Scores and sums of tiles of 16 keys and values.
//
//     keys      bfloat16 (head_dim / 2, 16, 2)     a lane for each token
//     values    bfloat16 (8, padded, 2)            a lane for each dimension, two tokens together
//
// Queries and weights are bfloat16 then. A pool of int8 has codes in the same places, and a float32 scale for
// each token that goes into scores and weights; queries and weights are int16 of a scale then, so that sums are
// exact. A pool of float32 has keys (head_dim, 16) and values (16, padded), and all else is float32, too.

#pragma once

#include <algorithm>

#include "vec.h"

namespace attar {

constexpr int CHUNK = 128;
constexpr int TILES = CHUNK / WIDTH;

// bfloat16 in pairs.
struct Halves {
    using Sum = F;
    static constexpr int BYTES = 2;
    static I pair(const std::uint8_t* from) { return load_ints(from); }
    static F dot(F total, I row, std::int32_t x) { return dot2(total, row, x); }
};

// int8 in pairs.
struct Codes {
    using Sum = I;
    static constexpr int BYTES = 1;
    static I pair(const std::uint8_t* from) { return widened(from); }
    static I dot(I total, I row, std::int32_t x) { return dot_shorts(total, row, x); }
};

// Scores of Q heads with a tile of keys; queries (Q, dim). Codes: to be multiplied by both scales.
template <class Kind, int Q>
static inline void scores(const std::uint8_t* keys, const std::uint16_t* queries, std::int64_t dim, float* to) {
    constexpr int STEP = 32 * Kind::BYTES;
    typename Kind::Sum sums[Q][2] = {};
    std::int64_t d = 0;
    for (; d + 4 <= dim; d += 4, keys += 2 * STEP) {
        const I first = Kind::pair(keys), second = Kind::pair(keys + STEP);
        for (int q = 0; q < Q; q++) {
            sums[q][0] = Kind::dot(sums[q][0], first, word(queries + q * dim + d));
            sums[q][1] = Kind::dot(sums[q][1], second, word(queries + q * dim + d + 2));
        }
    }
    for (; d < dim; d += 2, keys += STEP)
        for (int q = 0; q < Q; q++)
            sums[q][0] = Kind::dot(sums[q][0], Kind::pair(keys), word(queries + q * dim + d));
    for (int q = 0; q < Q; q++) store(to + q * CHUNK, floats(sums[q][0] + sums[q][1]));
}

template <class Kind, int Q>
static inline void scores(const std::uint8_t* keys, const float* queries, std::int64_t dim, float* to) {
    F sums[Q] = {};
    for (std::int64_t d = 0; d < dim; d++) {
        const F row = load((const float*)keys + d * WIDTH);
        for (int q = 0; q < Q; q++) sums[q] = fma(row, all(queries[q * dim + d]), sums[q]);
    }
    for (int q = 0; q < Q; q++) store(to + q * CHUNK, sums[q]);
}

// mixed (Q, stride) += weights (Q, CHUNK) times scales (Q,) of the first `count` values of some tiles, for V
// vectors from dimension `at` on.
template <class Kind, int Q, int V>
static inline void mix(const std::uint8_t* const* tiles, std::int64_t stride, std::int64_t at, int count,
                       const std::uint16_t* weights, const float* scales, float* mixed) {
    typename Kind::Sum sums[Q][V] = {};
    for (int i = 0; i < count; i += 2) {
        const std::uint8_t* from = tiles[i / WIDTH] + (i % WIDTH / 2 * stride + at) * 2 * Kind::BYTES;
        const std::int32_t known = i + 1 < count ? -1 : 0xffff;  // nobody knows what is in a free place
        I row[V];
        for (int v = 0; v < V; v++) row[v] = Kind::pair(from + v * 32 * Kind::BYTES) & known;
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < V; v++) sums[q][v] = Kind::dot(sums[q][v], row[v], word(weights + q * CHUNK + i));
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) {
            float* to = mixed + q * stride + at + v * WIDTH;
            store(to, fma(floats(sums[q][v]), all(scales[q]), load(to)));
        }
}

template <class Kind, int Q, int V>
static inline void mix(const std::uint8_t* const* tiles, std::int64_t stride, std::int64_t at, int count,
                       const float* weights, const float*, float* mixed) {
    F sums[Q][V];
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) sums[q][v] = load(mixed + q * stride + at + v * WIDTH);
    for (int i = 0; i < count; i++) {
        const float* from = (const float*)tiles[i / WIDTH] + i % WIDTH * stride + at;
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < V; v++)
                sums[q][v] = fma(load(from + v * WIDTH), all(weights[q * CHUNK + i]), sums[q][v]);
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) store(mixed + q * stride + at + v * WIDTH, sums[q][v]);
}

template <class Kind, int Q, class Number>
static inline void mix_all(const std::uint8_t* const* tiles, std::int64_t stride, int count, const Number* weights,
                           const float* scales, float* mixed) {
    std::int64_t d = 0;
    for (; d + 4 * WIDTH <= stride; d += 4 * WIDTH) mix<Kind, Q, 4>(tiles, stride, d, count, weights, scales, mixed);
    for (; d + 2 * WIDTH <= stride; d += 2 * WIDTH) mix<Kind, Q, 2>(tiles, stride, d, count, weights, scales, mixed);
    for (; d < stride; d += WIDTH) mix<Kind, Q, 1>(tiles, stride, d, count, weights, scales, mixed);
}

// Numbers, `count` a multiple of 16 in room for it, to int16; returns their scale.
static inline float to_shorts(const float* from, std::int64_t count, std::uint16_t* to) {
    F peak{};
    for (std::int64_t i = 0; i < count; i += WIDTH) peak = larger(peak, magnitude(load(from + i)));
    const float top = largest(peak), inverse = top > 0 ? 32767.0f / top : 0.0f;
    for (std::int64_t i = 0; i < count; i += WIDTH) {
        const I code = ints(round_even(load(from + i) * inverse));
        store_shorts(to + i, code);
    }
    return top / 32767.0f;
}

// `dim` numbers to int8 codes; returns their scale.
static inline float narrow(const float* from, std::int64_t dim, std::int8_t* codes) {
    float top = 0;
    for (std::int64_t d = 0; d < dim; d++) top = std::max(top, std::fabs(from[d]));
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (std::int64_t d = 0; d < dim; d++) codes[d] = std::int8_t(std::nearbyint(from[d] * inverse));
    return top / 127.0f;
}

}  // namespace attar
