// The arguments of a step: a model and a batch, as attar/kernels/structures.py mirrors them, field by field.

#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"

namespace attar {

enum Scoring : std::int32_t { SOFTMAX = 0, SIGMOID = 1 };

// A mixture of experts; routing.h has the formulas. All experts are of one shape and kind.
struct Mixture {
    std::int64_t experts, active;  // active: of a token
    std::int64_t groups, active_groups, group_scores;  // groups of neighbours; 1: no groups
    std::int32_t scoring, normalized;
    float scaling;
    const float* router;               // (experts, hidden)
    const float *bias, *correction;    // (experts,) of logits, and of the choice alone; or null
    const float* shared_gate;          // (hidden,) or null
    const Linear *gate_up, *down;      // (experts,)
    Linear shared_gate_up, shared_down;  // of no rows: there is no shared expert

    bool has_shared() const { return shared_down.rows > 0; }
};

// Latent attention (MLA) of a layer; latents.h has the formulas. The lists have a matrix for each head.
struct Latents {
    Linear query;                                // (heads head_dim, query rank); of no rows: `qkv` makes the queries
    const Linear *absorb, *up_keys, *up_values;  // U^T (rank, nope), U (nope, rank), V (wide, rank)
};

// A linear recurrence of a layer behind its convolution; recurrence.h has the formulas. Where things are in a row of
// `first`, and, from the first channel on, in the channels of the convolution: q and k of groups of heads, v of heads.
struct Recurrence {
    std::int64_t heads, groups, keys, values;  // multiples of 16 but for heads and groups
    std::int64_t channels_at, queries_at, keys_at, values_at, gate_at;
    std::int64_t steps_at;                  // in a row of `steps`, or `first`: d (heads), with the delta rule c (heads)
    std::int64_t norm_size;                 // numbers that are normed together
    Linear first, steps, out;               // steps of no rows: `first` makes them
    const float *decay, *step_bias, *skip;  // A, bias, D (heads,); skip: or null
    const float* norm;                      // (heads values,), or null
    float eps, least, most;                 // of the softplus
    std::int32_t delta, gated_norm;         // whether it is the delta rule; whether what is gated is normed

    std::int64_t channels() const { return 2 * groups * keys + heads * values; }
    std::int64_t step_numbers() const { return delta ? 2 * heads : heads; }
};

struct Layer {
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // weights of norms; after_*: or null
    const float *query_norm, *key_norm;  // (head_dim,), or of all heads (wide_norms), or null; of latents (their rank,)
    const float* sinks;                  // (heads,) scores that no value has, or null
    const float* rotary;  // (context, rotary): cosines of half a head, then sines
    std::int64_t window;  // keys that a token sees, its own included; 0: all
    Linear qkv, out, gate_up, down;  // of no rows where there is none; gate_up without a gate: rows of up alone
    const Mixture* mixture;          // or null
    const Latents* latents;          // in every layer, or null
    // Of a short convolution, in the place of attention or before a recurrence, else null.
    const float *kernel, *conv_bias;  // (width, channels), the oldest input first; (channels,) or null
    const Recurrence* recurrence;     // behind the convolution, in the place of attention or beside it; or null
    std::int64_t index, state_index;  // among the layers with keys and values; among those with a convolution
};

// Number format of the KV cache, and of the embedding.
enum Storage : std::int32_t { STORED_INT8 = 1, STORED_BF16 = 2, STORED_FP16 = 3, STORED_FP32 = 4, STORED_INT4 = 5 };
enum BasisRow { KEY_FACTORS, QUERY_FACTORS, CENTERS, BASIS_ROWS = CENTERS + 2 };
enum Activation : std::int32_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, RELU = 3 };

// The keys and values of a layer: blocks of the pool, in its own number format. The keys and then the values of a block
// and head are contiguous, in the layout of kv_tiles.h, each followed by its scales where they are int8, its scales and
// then its minima where they are int4. head_dim is rounded up to whole vectors, two where they are int4.
struct Cache {
    std::int64_t kv_heads, head_dim, block_size, blocks;
    std::int64_t latent;  // numbers of a token's row of latents: c (rank), r (rotary), zeros up to whole vectors. Or 0
    std::uint8_t* pool;
    // Of four bits, else null: H (head_dim, padded) and (kv_heads, BASIS_ROWS, padded) of kv_codes.h.
    const float *rotation, *basis;
    std::int32_t kind;  // of enum Storage

    bool four_bits() const { return kind == STORED_INT4; }
    bool coded() const { return kind == STORED_INT8 || four_bits(); }
    // Queries and weights stay float32.
    bool plain() const { return kind == STORED_FP32 || kind == STORED_FP16; }
    std::int64_t padded() const {
        const std::int64_t unit = four_bits() ? 2 * WIDTH : WIDTH;
        return (head_dim + unit - 1) / unit * unit;
    }
    std::int64_t bytes_of(std::int64_t numbers) const {
        return four_bits() ? numbers / 2 : numbers * (kind == STORED_FP32 ? 4 : kind == STORED_INT8 ? 1 : 2);
    }
    std::int64_t row_bytes() const { return bytes_of(padded()); }
    std::int64_t half_bytes() const { return block_size * (row_bytes() + (coded() ? 4 : 0)); }
    float* scales(const std::uint8_t* half) const { return (float*)(half + block_size * row_bytes()); }
    std::uint16_t* half_scales(const std::uint8_t* half) const { return (std::uint16_t*)scales(half); }
    std::int64_t block_bytes() const { return latent ? block_size * latent_bytes() : kv_heads * 2 * half_bytes(); }
    std::uint8_t* at_block(std::int64_t block) const { return pool + block * block_bytes(); }
    std::uint8_t* keys(std::int64_t block, std::int64_t head) const { return at_block(block) + head * 2 * half_bytes(); }
    std::uint8_t* values(std::int64_t block, std::int64_t head) const { return keys(block, head) + half_bytes(); }
    // Of latents a block is one row for each token, and the scale of int8.
    std::int64_t latent_bytes() const { return bytes_of(latent) + (coded() ? 4 : 0); }
    std::uint8_t* latent_row(std::int64_t slot) const {
        return at_block(slot / block_size) + slot % block_size * latent_bytes();
    }
    const float* basis_of(std::int64_t head, BasisRow row) const { return basis + (head * BASIS_ROWS + row) * padded(); }
};

struct Model {
    std::int64_t layers, hidden, heads, kv_heads, head_dim, rotary, vocabulary;
    std::int64_t rank, nope, wide;  // of latents: their numbers; of a head's key without positions; of its value. Or 0
    std::int64_t cached, stateful, width;  // layers with keys and values; with a convolution, and inputs of an output
    std::int64_t carried;                  // numbers of a token that a layer with a convolution keeps
    std::int64_t block_size, blocks;
    std::int64_t embeddings, context;  // rows of the embedding, and of every layer's table `rotary`
    float eps, scale, soft_cap, final_soft_cap, embedding_scale, latent_eps;
    std::int32_t activation, bits;  // bits of activations, 8 or 16
    std::int32_t embedding_kind;             // of enum Storage
    std::int32_t wide_norms;                 // queries and keys are normed over all heads together
    std::int32_t interleaved;                // of latents: positions turn neighbours, not halves
    const void* embedding;                   // (embeddings, hidden)
    const float* mask;                       // (hidden,) what a token of id -1 begins as, or null
    const float* norm;
    Linear head;
    const Layer* layer;
    const std::int64_t* hidden_layer;  // (hidden_states,) ascending: states after this layer are kept; `layers`: normed
    std::uint16_t* hidden_pool;        // bf16 (slots, hidden_states, hidden), or null
    std::int64_t hidden_states;
    const Cache* cache;  // (cached,)

    // Numbers of the widest head in the caches.
    std::int64_t padded() const {
        std::int64_t most = 0;
        for (std::int64_t i = 0; i < cached; i++) most = std::max(most, cache[i].padded());
        return most;
    }
    std::int64_t latent_numbers() const { return (rank + rotary + WIDTH - 1) / WIDTH * WIDTH; }
    std::int64_t hidden_width() const { return hidden_states * hidden; }
    std::uint16_t* hidden_at(std::int64_t slot) const { return hidden_pool + slot * hidden_width(); }
};

struct Batch {
    std::int64_t tokens, spans, logit_rows, copies;  // a span: the tokens of one sequence
    std::int64_t block_count, mask_size;             // numbers in `block`, in `mask`
    std::int64_t kept, saves;                        // tokens whose inputs of convolutions are returned; states
    const std::int64_t *ids, *positions, *slots;  // (tokens,)
    const std::int64_t* span;                     // (tokens,) the span of each token
    const std::int64_t *first, *past;             // (spans,) first token; keys in the cache before this step
    const std::int64_t* table;                    // (spans,) where its block table begins in `block`
    const std::int64_t* block;
    const std::int64_t* tree;   // (spans,) where its tree mask begins in `mask`; -1: no tree
    const std::uint8_t* mask;   // (count, count) of a span: the row's token sees the column's
    const std::int64_t* count;  // (spans,) tokens
    const std::int64_t* rows;   // (logit_rows,) tokens
    const std::int64_t* copy;   // (copies, 2) from, to
    const std::int64_t* keep;   // (kept,) tokens
    // What sequences carry from token to token, by addresses, 0 for zeros. `again`: tokens just before a span that its
    // states have not seen; history: inputs (width - 1 + again, stateful, carried) before it; states: of recurrences,
    // in the layout of recurrence.h; those after save_after tokens, ascending, are written to save_to.
    const std::int64_t *again, *history, *states, *save;  // (spans,); save: (spans + 1,) the first of each, their end
    const std::int64_t *save_after, *save_to;             // (saves,)
    float* inputs;                                        // (kept, stateful, carried)
    float* logits;              // (logit_rows, vocabulary)
};

}  // namespace attar
