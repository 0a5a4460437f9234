// Latent attention (MLA): the cache has of a token one latent c and one rotated key r, of which all heads' keys and values
// are products. DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
//
//     k_h = [U_h c | r],   v_h = V_h c,   q_h = [n_h | r_h]
//     absorbed    q_h' = [U_h^T n_h | r_h];   o_h = V_h (sum_t softmax(q_h' . [c_t | r_t]) c_t)
//     expanded    k_h and v_h of every entry, then attention of each head
//
// A span takes the form with fewer multiplications: absorbed for few tokens, whose heads are rows of queries over one key
// head; expanded for many, an entry once for all of the span's tokens, whose rows are the queries. Neither depends on
// what else is in the batch.

#pragma once

#include "latent_rows.h"
#include "step.h"

namespace attar {

// to (numbers,) and its state += those of the next split.
static inline void fold_split(SoftmaxState& state, float* to, const SoftmaxState& next, const float* from,
                              std::int64_t numbers) {
    const float peak = std::max(state.peak, next.peak);
    if (peak == MINUS_INFINITY) return;
    const float before = std::exp(state.peak - peak), after = std::exp(next.peak - peak);
    state = {peak, one::fma(state.total, before, next.total * after)};
    for (std::int64_t d = 0; d < numbers; d += WIDTH)
        store(to + d, fma(load(from + d), broadcast(after), load(to + d) * before));
}

// f(head, first, last) for panels of a matrix for each head.
template <class Function>
static inline void for_each_head(std::int64_t panels, std::int64_t first, std::int64_t last, Function f) {
    for (std::int64_t task = first, end; task < last; task = end) {
        const std::int64_t head = task / panels;
        end = std::min(last, (head + 1) * panels);
        f(head, task - head * panels, end - head * panels);
    }
}

inline void StepWorker::latent_attention() {
    const Latents& m = *layer().latents;
    LatentBuffers& b = r.latents_;
    const std::int64_t heads = model.heads, tokens = batch.tokens, dim = model.head_dim, width = heads * model.wide;
    const std::int64_t stride = layer().qkv.rows, numbers = model.latent_numbers();
    const Activations in = r.qkv_input_.view(layer().qkv, model.bits);
    norm(layer().before_attention, tokens, nullptr, in);
    multiply(layer().qkv, in, tokens, r.qkv_.data(), stride, false);
    float* queries = r.qkv_.data();
    std::int64_t query_stride = stride;
    if (m.query.rows) {
        const Activations inner = b.query_input.view(m.query, model.bits);
        scratch.resize(m.query.columns);
        for_each_token(tokens, m.query.columns, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* row = r.qkv_.data() + t * stride;
            const float inverse = inverse_rms(row, m.query.columns, model.latent_eps);
            scale_by(row + first, layer().query_norm + first, inverse, last - first, scratch.data());
            inner.set(t, first, last, scratch.data());
        });
        multiply(m.query, inner, tokens, b.queries.data(), q_width(), false);
        queries = b.queries.data();
        query_stride = q_width();
    }
    const Activations absorb_in = b.absorb_input.view(*m.absorb, model.bits);
    worker.parallel_for(tokens * (heads + 1), Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t task = first; task < last; task++) {
            const std::int64_t t = task / (heads + 1), head = task % (heads + 1), place = b.place[t];
            if (head == heads) {
                store_row(t, r.qkv_.data() + t * stride + stride - model.rank - model.rotary);
                continue;
            }
            float* query = queries + t * query_stride + head * dim;
            rotate_part(query + model.nope, batch.positions[t]);
            for (std::int64_t d = 0; d < dim; d++) query[d] *= model.scale;
            if (place >= b.absorbed) continue;
            absorb_in.set(head * b.absorbed + place, 0, model.nope, query);
            std::copy_n(query + model.nope, model.rotary, b.lowered.data() + (place * heads + head) * numbers + model.rank);
        }
    });
    const auto of_heads = [&](const Linear* linears, const Activations& inputs, float* to, std::int64_t head_stride,
                              std::int64_t token_stride) {
        if (!b.absorbed) return;
        const std::int64_t panels = linears->panels();
        worker.parallel_for(heads * panels, Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
            for_each_head(panels, first, last, [&](std::int64_t head, std::int64_t begin, std::int64_t end) {
                attar::multiply(linears[head], inputs.from(head * b.absorbed), begin, end, b.absorbed,
                                Output{to + head * head_stride, token_stride, false});
            });
        });
    };
    const bool plain = cache().plain();
    of_heads(m.absorb, absorb_in, b.lowered.data(), numbers, heads * numbers);
    worker.parallel_for(std::int64_t(b.blocks.size()) * b.splits, Schedule::GUIDED,
                        [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t task = first; task < last; task++)
            plain ? attend_block<float>(task) : attend_block<std::uint16_t>(task);
    });
    worker.parallel_for(std::int64_t(b.expanded.size()) * heads, Schedule::GUIDED,
                        [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t task = first; task < last; task++) {
            const std::int64_t span = b.expanded[task / heads], head = task % heads;
            if (plain) attend_expanded<float>(queries, query_stride, span, head);
            else attend_expanded<std::uint16_t>(queries, query_stride, span, head);
        }
    });
    const Activations value_in = b.value_input.view(*m.up_values, model.bits);
    worker.parallel_for(b.absorbed * heads, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t row = first; row < last; row++) {
            SoftmaxState state{MINUS_INFINITY, 0.0f};
            scratch.assign(numbers, 0.0f);
            for (std::int64_t split = row * b.splits; split < (row + 1) * b.splits; split++)
                fold_split(state, scratch.data(), b.states[split], b.acc.data() + split * numbers, model.rank);
            for (std::int64_t d = 0; d < model.rank; d++) scratch[d] /= state.total;
            value_in.set(row % heads * b.absorbed + row / heads, 0, model.rank, scratch.data());
        }
    });
    of_heads(m.up_values, value_in, b.attended.data(), model.wide, width);
    const Activations out = r.out_input_.view(layer().out, model.bits);
    for_each_token(tokens, width, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
        out.set(t, first, last, b.attended.data() + b.place[t] * width + first);
    });
    multiply_add(layer().out, out, layer().after_attention);
}

// Positions turn `rotary` numbers, neighbours or halves.
inline void StepWorker::rotate_part(float* x, std::int64_t position) {
    const float* angles = layer().rotary + position * model.rotary;
    if (!model.interleaved) return rotate(x, angles, model.rotary);
    const std::int64_t half = model.rotary / 2;
    for (std::int64_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1], c = angles[i], s = angles[i + half];
        x[2 * i] = one::fma(-b, s, a * c);
        x[2 * i + 1] = one::fma(a, s, b * c);
    }
}

// [c | r] of a token, c not normed yet, to its slot.
inline void StepWorker::store_row(std::int64_t t, float* from) {
    LatentScratch& s = latent_scratch;
    s.rows.resize(std::max(s.rows.size(), std::size_t(model.latent_numbers())));
    s.codes.resize(model.latent_numbers());
    float* row = s.rows.data();
    std::fill_n(row, model.latent_numbers(), 0.0f);
    scale_by(from, layer().key_norm, inverse_rms(from, model.rank, model.latent_eps), model.rank, row);
    std::copy_n(from + model.rank, model.rotary, row + model.rank);
    rotate_part(row + model.rank, batch.positions[t]);
    write_latent(cache(), batch.slots[t], row, s.codes.data());
}

// Entries [first, first + count) of a span as they are multiplied, in tiles. What is not stored so is in the scratch.
template <class Number>
KeyRows<Number> StepWorker::latent_chunk(std::int64_t span, std::int64_t first, std::int64_t count) {
    LatentScratch& s = latent_scratch;
    const std::int64_t numbers = model.latent_numbers(), bytes = cache().latent_bytes(), size = model.block_size;
    const std::int64_t* blocks = batch.block + batch.table[span];
    KeyRows<Number> chunk{{}, {}, numbers, numbers, model.rank, numbers, nullptr, first, count};
    s.rows.resize(CHUNK * numbers);
    s.pairs.resize(CHUNK * numbers);
    s.rows_bf16.resize(CHUNK * numbers);
    s.scales.resize(CHUNK);
    for (std::int64_t i = 0; i * WIDTH < count; i++) {
        const std::int64_t key = first + i * WIDTH;
        const std::uint8_t* tile = cache().latent_row(blocks[key / size] * size + key % size);
        if constexpr (std::is_same_v<Number, float>) {
            chunk.keys[i] = (const float*)tile;
            if (cache().kind == STORED_FP16) {
                float* rows = s.rows.data() + i * WIDTH * numbers;
                for (int k = 0; k < WIDTH; k++) read_latent(cache(), tile + k * bytes, rows + k * numbers);
                chunk.keys[i] = rows;
            }
            chunk.values[i] = (const std::uint8_t*)chunk.keys[i];
        } else {
            chunk.keys[i] = (const std::uint16_t*)tile;
            if (cache().kind == STORED_INT8) {  // the codes: bfloat16 holds them
                std::uint16_t* rows = s.rows_bf16.data() + i * WIDTH * numbers;
                float some[WIDTH];
                for (int k = 0; k < WIDTH; k++) {
                    for (std::int64_t d = 0; d < numbers; d += WIDTH) {
                        widen_bytes(tile + k * bytes + d, 1.0f, some);
                        store_bf16(rows + k * numbers + d, load(some));
                    }
                    s.scales[i * WIDTH + k] = latent_scale(cache(), tile + k * bytes);
                }
                chunk.keys[i] = rows;
                chunk.scales = s.scales.data();
            }
            std::uint16_t* pairs = s.pairs.data() + i * WIDTH * numbers;
            pair_rows(chunk.keys[i], numbers, WIDTH, model.rank, numbers, pairs);
            chunk.values[i] = (const std::uint8_t*)pairs;
        }
    }
    return chunk;
}

// The keys that token `index` of a span sees, as row q.
template <class Number>
void StepWorker::see(std::int64_t span, std::int64_t index, std::int64_t q, QueryRows<Number>& rows) const {
    const std::int64_t past = batch.past[span], count = batch.count[span];
    const bool tree = batch.tree[span] >= 0;
    rows.past = past;
    rows.until[q] = tree ? past + count : past + index + 1;
    rows.tree[q] = tree ? batch.mask + batch.tree[span] + index * count : nullptr;
}

// A block of absorbed queries over a split of the keys, or over all of them.
template <class Number>
void StepWorker::attend_block(std::int64_t task) {
    LatentBuffers& b = r.latents_;
    LatentScratch& s = latent_scratch;
    const QueryBlock& block = b.blocks[task / b.splits];
    const std::int64_t numbers = model.latent_numbers(), heads = model.heads, count = block.last - block.first;
    const std::int64_t span = block.span, first_token = b.place[batch.first[span]];
    auto& queries = s.queries(Number());
    queries.resize(BLOCK_ROWS * numbers);
    s.acc.resize(BLOCK_ROWS * numbers);
    s.peaks.resize(BLOCK_ROWS);
    s.totals.resize(BLOCK_ROWS);
    QueryRows<Number> groups[BLOCK_ROWS / LANES];
    std::int64_t until = 0;
    for (std::int64_t start = 0; start < count; start += LANES) {
        QueryRows<Number>& rows = groups[start / LANES];
        rows.count = std::min<std::int64_t>(LANES, count - start);
        pack_queries(b.lowered.data() + (block.first + start) * numbers, numbers, rows.count, numbers, numbers,
                     queries.data() + start * numbers);
        rows.queries = queries.data() + start * numbers;
        rows.peak = s.peaks.data() + start, rows.total = s.totals.data() + start;
        rows.acc = s.acc.data() + start * numbers;
        for (std::int64_t q = 0; q < rows.count; q++) {
            see(span, (block.first + start + q) / heads - first_token, q, rows);
            until = std::max(until, rows.until[q]);
        }
    }
    const std::int64_t splits = (until + SPLIT - 1) / SPLIT, only = task % b.splits;
    s.merged.assign(b.splits == 1 ? count * numbers : 0, 0.0f);
    s.states.assign(count, SoftmaxState{MINUS_INFINITY, 0.0f});
    for (std::int64_t split = b.splits == 1 ? 0 : only; split < (b.splits == 1 ? splits : only + 1); split++) {
        std::fill_n(s.acc.data(), count * numbers, 0.0f);
        std::fill_n(s.peaks.data(), BLOCK_ROWS, MINUS_INFINITY);
        std::fill_n(s.totals.data(), BLOCK_ROWS, 0.0f);
        for (std::int64_t first = split * SPLIT; first < std::min(until, (split + 1) * SPLIT); first += CHUNK) {
            const auto chunk = latent_chunk<Number>(span, first, std::min<std::int64_t>(CHUNK, until - first));
            for (std::int64_t g = 0; g * LANES < count; g++) s.attention(Number()).attend(chunk, groups[g], nullptr);
        }
        for (std::int64_t row = 0; row < count; row++) {
            const SoftmaxState state{s.peaks[row], s.totals[row]};
            const float* acc = s.acc.data() + row * numbers;
            if (b.splits == 1) {
                fold_split(s.states[row], s.merged.data() + row * numbers, state, acc, model.rank);
            } else {
                const std::int64_t to = (block.first + row) * b.splits + split;
                b.states[to] = state;
                std::copy_n(acc, model.rank, b.acc.data() + to * numbers);
            }
        }
    }
    if (b.splits > 1) return;
    std::copy_n(s.states.data(), count, b.states.data() + block.first);
    std::copy_n(s.merged.data(), count * numbers, b.acc.data() + block.first * numbers);
}

// All of a span's queries of a head; queries (tokens, heads head_dim), `stride` apart.
template <class Number>
void StepWorker::attend_expanded(const float* queries, std::int64_t stride, std::int64_t span, std::int64_t head) {
    const Latents& m = *layer().latents;
    LatentBuffers& b = r.latents_;
    LatentScratch& s = latent_scratch;
    const Linear &up_keys = m.up_keys[head], &up_values = m.up_values[head];
    const std::int64_t dim = model.head_dim, count = batch.count[span], end = batch.past[span] + count;
    const std::int64_t width = (dim + WIDTH - 1) / WIDTH * WIDTH, wide = (model.wide + WIDTH - 1) / WIDTH * WIDTH;
    const std::int64_t numbers = model.latent_numbers(), size = model.block_size, padded = (count + LANES - 1) / LANES * LANES;
    const std::int64_t *blocks = batch.block + batch.table[span], token = batch.first[span];
    // a cache of bfloat16 is multiplied as it is
    const auto bits = [&](const Linear& linear) { return cache().kind == STORED_BF16 && linear.kind == BF16 ? 8 : model.bits; };
    s.key_input.reserve(up_keys, CHUNK, bits(up_keys));
    s.value_input.reserve(up_values, CHUNK, bits(up_values));
    const Activations key_in = s.key_input.view(up_keys, bits(up_keys));
    const Activations value_in = s.value_input.view(up_values, bits(up_values));
    auto& packed = s.queries(Number());
    packed.resize(padded * width);
    for (std::int64_t start = 0; start < count; start += LANES)
        pack_queries(queries + (token + start) * stride + head * dim, stride, std::min<std::int64_t>(LANES, count - start),
                     dim, width, packed.data() + start * width);
    s.peaks.assign(padded, MINUS_INFINITY);
    s.totals.assign(padded, 0.0f);
    s.acc.assign(count * wide, 0.0f);
    s.rows.resize(std::max<std::size_t>(s.rows.size(), numbers));
    s.keys.assign(CHUNK * width, 0.0f);
    s.values.assign(CHUNK * wide, 0.0f);
    s.rows_bf16.resize(CHUNK * std::max(width, wide));
    s.pairs.resize(CHUNK * wide);
    for (std::int64_t first = 0; first < end; first += CHUNK) {
        const std::int64_t entries = std::min<std::int64_t>(CHUNK, end - first);
        for (std::int64_t i = 0; i < entries; i++) {
            const std::int64_t slot = blocks[(first + i) / size] * size + (first + i) % size;
            read_latent(cache(), cache().latent_row(slot), s.rows.data());
            key_in.set(i, 0, model.rank, s.rows.data());
            value_in.set(i, 0, model.rank, s.rows.data());
            std::copy_n(s.rows.data() + model.rank, model.rotary, s.keys.data() + i * width + model.nope);
        }
        attar::multiply(up_keys, key_in, 0, up_keys.panels(), entries, Output{s.keys.data(), width, false});
        attar::multiply(up_values, value_in, 0, up_values.panels(), entries, Output{s.values.data(), wide, false});
        KeyRows<Number> chunk{{}, {}, width, width, wide, wide, nullptr, first, entries};
        const std::int64_t tiles = (entries + WIDTH - 1) / WIDTH;
        if constexpr (std::is_same_v<Number, float>) {
            for (std::int64_t i = 0; i < tiles; i++) {
                chunk.keys[i] = s.keys.data() + i * WIDTH * width;
                chunk.values[i] = (const std::uint8_t*)(s.values.data() + i * WIDTH * wide);
            }
        } else {
            for (std::int64_t i = 0; i < tiles * WIDTH * wide; i += WIDTH) store_bf16(s.rows_bf16.data() + i, load(s.values.data() + i));
            pair_rows(s.rows_bf16.data(), wide, tiles * WIDTH, wide, wide, s.pairs.data());
            for (std::int64_t i = 0; i < tiles * WIDTH * width; i += WIDTH) store_bf16(s.rows_bf16.data() + i, load(s.keys.data() + i));
            for (std::int64_t i = 0; i < tiles; i++) {
                chunk.keys[i] = s.rows_bf16.data() + i * WIDTH * width;
                chunk.values[i] = (const std::uint8_t*)(s.pairs.data() + i * WIDTH * wide);
            }
        }
        for (std::int64_t start = 0; start < count; start += LANES) {
            QueryRows<Number> rows;
            rows.queries = packed.data() + start * width;
            rows.count = std::min<std::int64_t>(LANES, count - start);
            rows.peak = s.peaks.data() + start, rows.total = s.totals.data() + start;
            rows.acc = s.acc.data() + start * wide;
            for (std::int64_t q = 0; q < rows.count; q++) see(span, start + q, q, rows);
            if (first >= rows.until[rows.count - 1]) continue;
            s.attention(Number()).attend(chunk, rows, nullptr);
        }
    }
    for (std::int64_t t = 0; t < count; t++) {
        float* to = b.attended.data() + (b.place[token + t] * model.heads + head) * model.wide;
        for (std::int64_t d = 0; d < model.wide; d++) to[d] = s.acc[t * wide + d] / s.totals[t];
    }
}

}  // namespace attar
