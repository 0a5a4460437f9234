// One step of a model: a forward pass over the tokens of several sequences.
//
// Phases of a layer: norm, q k v, rope and KV store, attention, merge of KV splits, out, norm, gate and up,
// activation, down; mixtures of experts are in mixture.h, latent attention is in latents.h, recurrences are in
// recurrence.h. A layer has each part or none of it; a recurrence beside attention reads the same residual stream. The
// input of a product is prepared once (quantized, where weights are): the workers divide the tokens, or with few
// tokens the columns.

#pragma once

#include <algorithm>
#include <vector>

#include "bounds.h"
#include "elementwise.h"
#include "kv_store.h"
#include "matmul.h"
#include "runner.h"

namespace attar {

constexpr std::int64_t GRAIN = 128;  // columns are divided at multiples of it, as it is of every group size

// What one worker does in a step.
class StepWorker {
public:
    static constexpr std::int64_t LAYER_PHASES = 28, MORE_PHASES = 6;  // at most

    StepWorker(Runner& runner, ThreadPool::Worker& worker)
        : r(runner), model(runner.model_), batch(*runner.batch_), worker(worker),
          codes(runner.model_.padded()), rotated(runner.model_.padded()) {}

    void step() {
        copy_blocks();
        embed();
        for (layer_index = 0; layer_index < model.layers; layer_index++) {
            if (layer().recurrence)
                project(*layer().recurrence);
            else if (layer().kernel)
                short_convolution();
            if (attends()) model.rank ? latent_attention() : attention();
            if (layer().recurrence) recur(*layer().recurrence);
            if (layer().mixture)
                mixture();
            else if (layer().down.rows)
                mlp();
            keep_hidden(layer_index, nullptr);
        }
        keep_hidden(model.layers, model.norm);
        if (batch.logit_rows) logits();
    }

protected:
    const Layer& layer() const { return model.layer[layer_index]; }
    const Cache& cache() const { return model.cache[layer().index]; }
    bool attends() const { return layer().qkv.rows && (!layer().kernel || layer().recurrence); }
    std::int64_t q_width() const { return model.heads * model.head_dim; }
    std::int64_t qkv_width() const { return layer().qkv.rows; }
    // Of a head's output, which is multiplied by its sigmoid; 0: there are none. They follow the values.
    std::int64_t gates_at() const {
        const std::int64_t plain = (model.heads + 2 * model.kv_heads) * model.head_dim;
        return !model.rank && layer().qkv.rows > plain ? plain : 0;
    }

    // f(token, first, last) for all tokens; with fewer tokens than workers the columns [first, last) are divided.
    template <class Function>
    void for_each_token(std::int64_t tokens, std::int64_t columns, Function f) {
        if (tokens >= worker.size()) {
            worker.parallel_for(tokens, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t t = first; t < last; t++) f(t, std::int64_t(0), columns);
            });
            return;
        }
        const std::int64_t grains = (columns + GRAIN - 1) / GRAIN;
        worker.parallel_for(grains, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = 0; t < tokens; t++) f(t, first * GRAIN, std::min(last * GRAIN, columns));
        });
    }

    void copy_blocks() {
        if (!batch.copies) return;
        worker.parallel_for(model.cached, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t c = 0; c < batch.copies; c++) {
                const std::int64_t from = batch.copy[2 * c], to = batch.copy[2 * c + 1], slots = model.block_size;
                for (std::int64_t l = first; l < last; l++) {
                    const Cache& cache = model.cache[l];
                    std::memcpy(cache.at_block(to), cache.at_block(from), cache.block_bytes());
                }
                if (!first && model.hidden_pool)
                    std::memcpy(model.hidden_at(to * slots), model.hidden_at(from * slots),
                                slots * model.hidden_width() * sizeof(std::uint16_t));
            }
        });
    }

    void embed() {
        for_each_token(batch.tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const std::int64_t row = batch.ids[t] * model.hidden;
            const float* fp32 = (const float*)model.embedding + row;
            const std::uint16_t* bits16 = (const std::uint16_t*)model.embedding + row;
            float* x = r.x_.data() + t * model.hidden;
            if (batch.ids[t] < 0) {
                std::copy(model.mask + first, model.mask + last, x + first);
                return;
            }
            for (std::int64_t i = first; i < last; i += WIDTH) {
                const F value = model.embedding_kind == STORED_FP32   ? load(fp32 + i)
                                : model.embedding_kind == STORED_FP16 ? load_fp16(bits16 + i)
                                                                      : load_bf16(bits16 + i);
                store(x + i, value * model.embedding_scale);
            }
        });
    }

    // RMS-normed rows of x as a product's input; row t of the input is token rows[t], or t.
    void norm(const float* weight, std::int64_t tokens, const std::int64_t* rows, const Activations& to) {
        scratch.resize(model.hidden);
        for_each_token(tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* x = r.x_.data() + (rows ? rows[t] : t) * model.hidden;
            const float inverse = inverse_rms(x, model.hidden, model.eps);
            scale_by(x + first, weight + first, inverse, last - first, scratch.data());
            to.set(t, first, last, scratch.data());
        });
    }

    void multiply(const Linear& linear, const Activations& in, std::int64_t tokens, float* to, std::int64_t stride,
                  bool add) {
        worker.parallel_for(linear.panels(), Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
            attar::multiply(linear, in, first, last, tokens, Output{to, stride, add});
        });
    }

    // A product added to the residual stream, through a norm where the model has one there.
    void multiply_add(const Linear& linear, const Activations& in, const float* weight) {
        float* to = weight ? r.normed_.data() : r.x_.data();
        multiply(linear, in, batch.tokens, to, model.hidden, !weight);
        if (!weight) return;
        scratch.resize(model.hidden);
        worker.parallel_for(batch.tokens, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++) {
                const float* y = to + t * model.hidden;
                float* x = r.x_.data() + t * model.hidden;
                scale_by(y, weight, inverse_rms(y, model.hidden, model.eps), model.hidden, scratch.data());
                for (std::int64_t i = 0; i < model.hidden; i++) x[i] += scratch[i];
            }
        });
    }

    void attention() {
        const Activations in = r.qkv_input_.view(layer().qkv, model.bits);
        norm(layer().before_attention, batch.tokens, nullptr, in);
        multiply(layer().qkv, in, batch.tokens, r.qkv_.data(), qkv_width(), false);
        if (model.wide_norms) norm_rows();
        rope();
        attend();
        const Activations out = r.out_input_.view(layer().out, model.bits);
        merge(out);
        multiply_add(layer().out, out, layer().after_attention);
    }

    // y = out(C * sum_j kernel_j (B x)_(t - j)), where `qkv` makes [B | C | x]; earlier inputs are the sequence's state.
    void short_convolution() {
        const std::int64_t hidden = model.hidden, stride = 3 * hidden, width = model.width;
        const Activations in = r.qkv_input_.view(layer().qkv, model.bits);
        const Activations out = r.out_input_.view(layer().out, model.bits);
        norm(layer().before_attention, batch.tokens, nullptr, in);
        multiply(layer().qkv, in, batch.tokens, r.qkv_.data(), stride, false);
        const auto input = [&](std::int64_t t, std::int64_t i) {
            const float* row = r.qkv_.data() + t * stride + i;
            return load(row) * load(row + 2 * hidden);
        };
        const auto earlier = [&](std::int64_t span, std::int64_t k, std::int64_t i) {
            if (!batch.history[span]) return F{};
            const std::int64_t row = (batch.again[span] + k) * model.stateful + layer().state_index;
            return load((const float*)batch.history[span] + row * hidden + i);
        };
        scratch.resize(hidden);
        for_each_token(batch.tokens, hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const std::int64_t span = batch.span[t], index = t - batch.first[span];
            for (std::int64_t i = first; i < last; i += WIDTH) {
                F sum = layer().conv_bias ? load(layer().conv_bias + i) : F{};
                for (std::int64_t j = 0; j < width; j++) {
                    const std::int64_t at = index + j - width + 1;  // in the span; before it: in the state
                    const F x = at < 0 ? earlier(span, at + width - 1, i) : input(t - index + at, i);
                    sum = fma(load(layer().kernel + j * hidden + i), x, sum);
                }
                store(scratch.data() + i - first, load(r.qkv_.data() + t * stride + hidden + i) * sum);
            }
            out.set(t, first, last, scratch.data());
        });
        worker.parallel_for(batch.kept, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t n = first; n < last; n++) {
                float* to = batch.inputs + (n * model.stateful + layer().state_index) * hidden;
                for (std::int64_t i = 0; i < hidden; i += WIDTH) store(to + i, input(batch.keep[n], i));
            }
        });
        multiply_add(layer().out, out, nullptr);
    }

    void mlp() {
        const std::int64_t width = layer().down.columns, rows = layer().gate_up.rows;  // twice as many with a gate
        const Activations in = r.gate_up_input_.view(layer().gate_up, model.bits);
        const Activations inner = r.down_input_.view(layer().down, model.bits);
        norm(layer().before_mlp, batch.tokens, nullptr, in);
        multiply(layer().gate_up, in, batch.tokens, r.gate_up_.data(), rows, false);
        scratch.resize(width);
        for_each_token(batch.tokens, width, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* gate = r.gate_up_.data() + t * rows + first;
            gated(gate, gate + rows - width, last - first, model.activation, scratch.data());
            inner.set(t, first, last, scratch.data());
        });
        multiply_add(layer().down, inner, layer().after_mlp);
    }

    // mixture.h
    void mixture();
    void route();
    void multiply_experts(const Linear* linears, const Activations& in, bool one_row, float* to, const Linear& shared,
                          const Activations& shared_in, float* shared_to);
    void activate_rows(std::int64_t rows, std::int64_t width, const float* from, const Activations& to,
                       std::int64_t shared_rows, std::int64_t shared_width, const float* shared_from,
                       const Activations& shared_to);
    void combine(const float* outputs, const float* shared);

    // recurrence.h
    void project(const Recurrence& m);
    void recur(const Recurrence& m);
    const float* channels_of(const Recurrence& m, std::int64_t t) const;
    const float* steps_of(const Recurrence& m, std::int64_t t) const;
    void mix(const Recurrence& m, std::int64_t row, std::int64_t group);
    void walk(const Recurrence& m, std::int64_t span, std::int64_t slice);
    void normed(const Recurrence& m, std::int64_t t, std::int64_t first, std::int64_t last, float* to);

    // latents.h
    void latent_attention();
    void rotate_part(float* x, std::int64_t position);
    void store_row(std::int64_t t, float* row);
    template <class Number>
    KeyRows<Number> latent_chunk(std::int64_t span, std::int64_t first, std::int64_t count);
    template <class Number>
    void see(std::int64_t span, std::int64_t index, std::int64_t q, QueryRows<Number>& rows) const;
    template <class Number>
    void attend_block(std::int64_t task);
    template <class Number>
    void attend_expanded(const float* queries, std::int64_t stride, std::int64_t span, std::int64_t head);

    // Norms of queries and of keys, over all heads together.
    void norm_rows() {
        const std::int64_t keys = model.kv_heads * model.head_dim;
        worker.parallel_for(batch.tokens, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++) {
                float *query = r.qkv_.data() + t * qkv_width(), *key = query + q_width();
                scale_by(query, layer().query_norm, inverse_rms(query, q_width(), model.eps), q_width(), query);
                scale_by(key, layer().key_norm, inverse_rms(key, keys, model.eps), keys, key);
            }
        });
    }

    // Norms of heads, rotary embedding and scale of queries and keys; keys and values to their slots.
    void rope() {
        const std::int64_t tasks = batch.tokens * model.kv_heads;
        worker.parallel_for(tasks, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t task = first; task < last; task++)
                rope_group(task / model.kv_heads, task % model.kv_heads);
        });
    }

    // The queries that share key head `head`, and it.
    void rope_group(std::int64_t t, std::int64_t head) {
        const std::int64_t dim = model.head_dim, group = model.heads / model.kv_heads;
        float* row = r.qkv_.data() + t * qkv_width();
        float *queries = row + head * group * dim, *key = row + q_width() + head * dim;
        for (std::int64_t q = 0; q < group; q++) {
            rope_head(queries + q * dim, model.wide_norms ? nullptr : layer().query_norm, batch.positions[t]);
            for (std::int64_t d = 0; d < dim; d++) queries[q * dim + d] *= model.scale;
            if (cache().four_bits())
                rotate_in_place(queries + q * dim, cache().basis_of(head, QUERY_FACTORS));
        }
        rope_head(key, model.wide_norms ? nullptr : layer().key_norm, batch.positions[t]);
        store_kv(cache(), head, batch.slots[t], key, key + model.kv_heads * dim, codes.data(),
                 rotated.data());
    }

    // A head times factors (head_dim,) or null, times H.
    void rotate_in_place(float* x, const float* factors) {
        rotate_head(x, factors, cache().rotation, model.head_dim, cache().padded(), rotated.data());
        std::copy_n(rotated.data(), model.head_dim, x);
    }

    void rope_head(float* head, const float* weight, std::int64_t position) {
        const std::int64_t dim = model.head_dim;
        if (weight) scale_by(head, weight, inverse_rms(head, dim, model.eps), dim, head);
        if (model.rotary) rotate(head, layer().rotary + position * model.rotary, model.rotary);
    }

    // A task is a token, a key head and a KV split.
    void attend() {
        Attention kernel(model, cache());
        const std::int64_t tasks = batch.tokens * model.kv_heads * r.splits_;
        worker.parallel_for(tasks, Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t task = first; task < last; task++) attend_task(kernel, task);
        });
    }

    // The last tokens, which have the longest contexts, come first.
    void attend_task(Attention& kernel, std::int64_t task) {
        const std::int64_t group = model.heads / model.kv_heads, splits = r.splits_, split = task % splits;
        const std::int64_t head = task / splits % model.kv_heads, t = batch.tokens - 1 - task / splits / model.kv_heads;
        const std::int64_t span = batch.span[t], index = t - batch.first[span];
        const std::int64_t past = batch.past[span], until = past + index + 1, window = layer().window;
        const std::int64_t after = batch.positions[t] + 1, earliest = window && after > window ? after - window : 0;
        const std::int64_t* positions = batch.positions + batch.first[span];
        KeyRange range{batch.block + batch.table[span], earliest, until, past, nullptr, positions, earliest};
        if (batch.tree[span] >= 0) {
            range.tree = batch.mask + batch.tree[span] + index * batch.count[span];
            range.from = std::min(earliest, past);
            range.until = past + batch.count[span];  // a block of drafts sees later tokens too
            while (range.until > past && !range.tree[range.until - past - 1]) range.until--;
        }
        const std::int64_t row = (t * model.heads + head * group) * splits + split;
        const float* queries = r.qkv_.data() + t * qkv_width() + head * group * model.head_dim;
        SoftmaxState* state = r.states_.data() + row;
        float* acc = r.acc_.data() + row * cache().padded();
        if (splits == 1) return kernel.attend(range, head, queries, state, acc);
        kernel.attend_split(range, split, head, queries, state, acc, splits);
    }

    // Dimensions [first, last) of a head's output, whose splits begin at `row`.
    void merge_head(std::int64_t head, std::int64_t row, std::int64_t first, std::int64_t last, float* to) {
        const std::int64_t stride = cache().padded();
        const SoftmaxState state = merge_splits(r.states_.data() + row, r.acc_.data() + row * stride, r.splits_, stride,
                                                first, last, to);
        const float sink = layer().sinks ? std::exp(layer().sinks[head] - state.peak) : 0.0f;
        for (std::int64_t d = 0; d < last - first; d++) to[d] /= state.total + sink;
    }

    // Merges the KV splits of each head into the input of the output projection.
    void merge(const Activations& out) {
        const std::int64_t dim = model.head_dim;
        scratch.resize(q_width());
        for_each_token(batch.tokens, q_width(), [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            for (std::int64_t head = first / dim; head * dim < last; head++) {
                const std::int64_t row = (t * model.heads + head) * r.splits_, begin = head * dim;
                const std::int64_t low = std::max(first, begin), high = std::min(last, begin + dim);
                float* to = scratch.data() + low - first;
                if (cache().four_bits()) {
                    merged.resize(dim);
                    merge_head(head, row, 0, dim, merged.data());
                    rotate_in_place(merged.data(), nullptr);
                    std::copy_n(merged.data() + low - begin, high - low, to);
                } else {
                    merge_head(head, row, low - begin, high - begin, to);
                }
            }
            if (gates_at()) {
                const float* gate = r.qkv_.data() + t * qkv_width() + gates_at() + first;
                for (std::int64_t i = 0; i < last - first; i++) scratch[i] /= 1.0f + std::exp(-gate[i]);
            }
            out.set(t, first, last, scratch.data());
        });
    }

    // The states after a layer to the slots of their tokens, where they are asked for; through a norm after the last.
    void keep_hidden(std::int64_t after, const float* weight) {
        const std::int64_t* end = model.hidden_layer + model.hidden_states;
        const std::int64_t* found = std::find(model.hidden_layer, end, after);
        if (found == end) return;
        scratch.resize(model.hidden);
        for_each_token(batch.tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float *x = r.x_.data() + t * model.hidden, *states = x + first;
            if (weight) {
                scale_by(states, weight + first, inverse_rms(x, model.hidden, model.eps), last - first, scratch.data());
                states = scratch.data();
            }
            std::uint16_t* to = model.hidden_at(batch.slots[t]) + (found - model.hidden_layer) * model.hidden + first;
            for (std::int64_t i = 0; i < last - first; i++) to[i] = to_bf16(states[i]);
        });
    }

    void logits() {
        const Activations in = r.head_input_.view(model.head, model.bits);
        norm(model.norm, batch.logit_rows, batch.rows, in);
        multiply(model.head, in, batch.logit_rows, batch.logits, model.vocabulary, false);
        if (model.final_soft_cap == 0.0f) return;
        const std::int64_t count = batch.logit_rows * model.vocabulary;
        worker.parallel_for(count, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            soft_cap(batch.logits + first, last - first, model.final_soft_cap);
        });
    }

    Runner& r;
    const Model& model;
    const Batch& batch;
    ThreadPool::Worker& worker;
    std::int64_t layer_index = 0;
    std::vector<float> scratch, columns;  // columns: of a recurrence's state
    std::vector<std::int8_t> codes;
    std::vector<float> rotated, merged;  // heads of padded numbers
    LatentScratch latent_scratch;
};

inline void Runner::run(const Batch& batch) {
    check(model_, batch);
    batch_ = &batch;
    reserve();
    pool_->run(StepWorker::MORE_PHASES + StepWorker::LAYER_PHASES * model_.layers,
               [this](ThreadPool::Worker& worker) { StepWorker(*this, worker).step(); });
}

}  // namespace attar
