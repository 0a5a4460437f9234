// Rows of latents in the pool, and what a step of latent attention (latents.h) keeps.

#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"
#include "amx.h"
#include "kv_store.h"
#include "row_attention.h"

namespace attar {

constexpr std::int64_t BLOCK_ROWS = 4 * LANES;  // queries that a task has

// A row (latent_numbers,) to its slot; codes of as many numbers.
static inline void write_latent(const Cache& cache, std::int64_t slot, const float* row,
                                std::int8_t* codes) {
    std::uint8_t* to = cache.latent_row(slot);
    const std::int64_t numbers = cache.latent;
    if (cache.kind == STORED_FP32) std::memcpy(to, row, numbers * sizeof(float));
    if (cache.kind == STORED_FP16)
        for (std::int64_t d = 0; d < numbers; d += WIDTH) store_fp16(to + 2 * d, load(row + d));
    if (cache.kind == STORED_BF16)
        for (std::int64_t d = 0; d < numbers; d += WIDTH) store_bf16(to + 2 * d, load(row + d));
    if (cache.kind != STORED_INT8) return;
    const float scale = to_int8(row, numbers, codes);
    std::memcpy(to, codes, numbers);
    std::memcpy(to + numbers, &scale, sizeof scale);
}

static inline float latent_scale(const Cache& cache, const std::uint8_t* row) {
    float scale;
    std::memcpy(&scale, row + cache.latent, sizeof scale);
    return scale;
}

// Sixteen floats of 16 bytes, each times `scale`.
static inline void widen_bytes(const std::uint8_t* from, float scale, float* to) {
    for (int i = 0; i < WIDTH; i++) to[i] = float(std::int8_t(from[i])) * scale;
}

// A row as floats.
static inline void read_latent(const Cache& cache, const std::uint8_t* row, float* to) {
    const std::int64_t numbers = cache.latent;
    const float scale = cache.kind == STORED_INT8 ? latent_scale(cache, row) : 1.0f;
    for (std::int64_t d = 0; d < numbers; d += WIDTH) {
        if (cache.kind == STORED_FP32) store(to + d, load((const float*)row + d));
        if (cache.kind == STORED_FP16) store(to + d, load_fp16(row + 2 * d));
        if (cache.kind == STORED_BF16) store(to + d, load_bf16(row + 2 * d));
        if (cache.kind == STORED_INT8) widen_bytes(row + d, scale, to + d);
    }
}

// Queries [first, last) of a span's tokens in all heads, among those of all absorbed tokens.
struct QueryBlock {
    std::int64_t span, first, last;
};

// Memory of a worker.
struct LatentScratch {
    RowAttention<float> fp32;
    RowAttention<std::uint16_t> bf16;
    std::vector<float> queries_fp32, rows, keys, values, acc, merged, peaks, totals, scales;
    std::vector<std::uint16_t> queries_bf16, rows_bf16, pairs;
    std::vector<SoftmaxState> states;
    std::vector<std::int8_t> codes;
    ActivationBuffer key_input, value_input;

    RowAttention<float>& attention(float) { return fp32; }
    RowAttention<std::uint16_t>& attention(std::uint16_t) { return bf16; }
    std::vector<float>& queries(float) { return queries_fp32; }
    std::vector<std::uint16_t>& queries(std::uint16_t) { return queries_bf16; }
};

// What of a step is absorbed and what is expanded, and intermediate results.
struct LatentBuffers {
    std::vector<std::int64_t> place;   // (tokens,) the row of a token in `attended`: absorbed tokens come first
    std::int64_t absorbed = 0;         // tokens
    std::vector<QueryBlock> blocks;    // of the absorbed
    std::vector<std::int64_t> expanded;  // spans
    std::int64_t splits = 1;           // of the keys, among the tasks of a block
    std::vector<float> queries;        // (tokens, heads head_dim) of a second product
    std::vector<float> lowered;        // (absorbed, heads, latent_numbers) absorbed queries
    std::vector<float> acc;            // (absorbed heads, splits, latent_numbers)
    std::vector<float> attended;       // (tokens, heads wide)
    std::vector<SoftmaxState> states;  // (absorbed heads, splits)
    ActivationBuffer query_input, absorb_input, value_input;

    // Whether keys and values of every head take fewer multiplications for t queries over n entries.
    static bool expands(const Model& m, std::int64_t t, std::int64_t n) {
        const std::int64_t products = m.rank * (m.nope + m.wide);
        return n * (products + t * (m.head_dim + m.wide)) < t * (products + n * (m.rotary + 2 * m.rank));
    }

    void reserve(const Model& m, const Batch& batch, int threads) {
        plan(m, batch, threads);
        const std::int64_t rows = absorbed * m.heads, numbers = m.latent_numbers();
        grow(lowered, rows * numbers);
        grow(acc, rows * splits * numbers);
        grow(states, rows * splits);
        grow(attended, batch.tokens * m.heads * m.wide);
        for (std::int64_t i = 0; i < m.layers; i++) {
            if (!m.layer[i].latents) continue;
            const Latents& latents = *m.layer[i].latents;
            absorb_input.reserve(*latents.absorb, rows + TILE_ROWS, m.bits);
            value_input.reserve(*latents.up_values, rows + TILE_ROWS, m.bits);
            if (!latents.query.rows) continue;
            grow(queries, batch.tokens * latents.query.rows);
            query_input.reserve(latents.query, batch.tokens, m.bits);
        }
    }

private:
    void plan(const Model& m, const Batch& batch, int threads) {
        place.resize(batch.tokens);
        blocks.clear();
        expanded.clear();
        absorbed = 0;
        std::int64_t longest = 1;
        for (std::int64_t s = 0; s < batch.spans; s++) {
            const std::int64_t count = batch.count[s], keys = batch.past[s] + count;
            if (expands(m, count, keys)) {
                expanded.push_back(s);
                continue;
            }
            for (std::int64_t t = 0; t < count; t++) place[batch.first[s] + t] = absorbed + t;
            const std::int64_t begin = absorbed * m.heads, end = (absorbed += count) * m.heads;
            for (std::int64_t row = begin; row < end; row += BLOCK_ROWS)
                blocks.push_back({s, row, std::min(row + BLOCK_ROWS, end)});
            longest = std::max(longest, keys);
        }
        std::int64_t next = absorbed;
        for (const std::int64_t s : expanded)
            for (std::int64_t t = 0; t < batch.count[s]; t++) place[batch.first[s] + t] = next++;
        const bool enough = threads == 1 || std::int64_t(blocks.size()) >= 8 * threads;
        splits = enough ? 1 : (longest + SPLIT - 1) / SPLIT;
    }

    template <class T>
    static void grow(std::vector<T>& buffer, std::int64_t size) {
        if (std::int64_t(buffer.size()) < size) buffer.resize(size);
    }
};

}  // namespace attar
