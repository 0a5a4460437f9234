// What a step is made of: a model and a batch, as attar/kernels/decode.py fills them in, field by field.

#pragma once

#include <cstdint>

#include "linear.h"

namespace attar {

struct Layer {
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // norms' weights; after: or null
    const float *query_norm, *key_norm;                                        // (head_dim,) or null
    const float* rotary;  // (context, rotary): cosines of half a head, then sines
    std::int64_t window;  // keys that a token sees, itself among them; 0: all
    Linear qkv, out, gate_up, down;
};

// Keys and values, and the embedding: int8, bfloat16, float16, float32.
enum Pool : std::int32_t { CODES = 1, HALVES = 2, FLOAT16 = 3, WIDE = 4 };
enum Activation : std::int32_t { SILU = 0, GELU_TANH = 1 };

struct Model {
    std::int64_t layers, hidden, heads, kv_heads, head_dim, rotary, intermediate, vocabulary;
    std::int64_t block_size, blocks;
    float eps, scale, soft_cap, final_soft_cap, embedding_scale;
    std::int32_t activation, bits;  // bits: of activations, 8 or 16
    std::int32_t pool_kind, embedding_kind;  // of enum Pool
    const void* embedding;                   // (vocabulary, hidden)
    const float* norm;
    Linear head;
    const Layer* layer;
    std::uint8_t* pool;

    // Keys and values of a block and a head lie together, as tiles.h says; behind each half its scales, where
    // they are codes. head_dim is rounded up to whole vectors.
    std::int64_t padded() const { return (head_dim + WIDTH - 1) / WIDTH * WIDTH; }
    std::int64_t row_bytes() const { return padded() * (pool_kind == WIDE ? 4 : pool_kind == CODES ? 1 : 2); }
    bool plain() const { return pool_kind == WIDE || pool_kind == FLOAT16; }  // queries and weights stay float32
    std::int64_t half_bytes() const { return block_size * (row_bytes() + (pool_kind == CODES ? 4 : 0)); }
    float* scales(const std::uint8_t* half) const { return (float*)(half + block_size * row_bytes()); }
    std::uint8_t* keys(std::int64_t at, std::int64_t block, std::int64_t head) const {
        return pool + ((at * blocks + block) * kv_heads + head) * 2 * half_bytes();
    }
    std::uint8_t* values(std::int64_t at, std::int64_t block, std::int64_t head) const {
        return keys(at, block, head) + half_bytes();
    }
};

struct Batch {
    std::int64_t tokens, spans, wanted, copies;
    const std::int64_t *ids, *positions, *slots;  // (tokens,)
    const std::int64_t* span;                     // (tokens,) the span of each token
    const std::int64_t *first, *place;            // (spans,) first token; places in use before the span
    const std::int64_t* table;                    // (spans,) where its blocks begin in `block`
    const std::int64_t* block;
    const std::int64_t* tree;   // (spans,) where its mask begins in `mask`; -1: a chain
    const std::uint8_t* mask;   // (count, count) of a span: row sees column
    const std::int64_t* count;  // (spans,)
    const std::int64_t* rows;   // (wanted,)
    const std::int64_t* copy;   // (copies, 2) from, to
    float* logits;              // (wanted, vocabulary)
};

}  // namespace attar
