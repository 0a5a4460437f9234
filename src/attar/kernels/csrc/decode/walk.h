// A member's way through the phases of a step.
//
// Phases of a layer: norm, q k v, turn and remember, attend, join, out, norm, gate and up, activate, down.
// Before a product its input is prepared once (quantized, where weights are): each part is some tokens, or
// with few tokens some columns.

#pragma once

#include "remember.h"
#include "step.h"

namespace attar {

constexpr std::int64_t GRAIN = 128;  // columns that members share out are multiples of it, as of every group

class Walk {
public:
    static constexpr std::int64_t LAYER_PHASES = 12, MORE_PHASES = 5;  // at most

    Walk(Runner& all, Team::Member& member) : r(all), model(all.model_), batch(*all.batch_), team(member), codes(all.model_.head_dim) {}

    void step() {
        copy_blocks();
        embed();
        for (at = 0; at < model.layers; at++) {
            attend();
            feed();
        }
        if (batch.wanted) logits();
    }

private:
    const Layer& layer() const { return model.layer[at]; }
    std::int64_t q_width() const { return model.heads * model.head_dim; }
    std::int64_t qkv_width() const { return (model.heads + 2 * model.kv_heads) * model.head_dim; }

    // f(token, first, last) for tokens, or with fewer tokens than members for their columns.
    template <class Function>
    void each(std::int64_t tokens, std::int64_t columns, Function f) {
        if (tokens >= team.size()) {
            team.share(tokens, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t t = first; t < last; t++) f(t, std::int64_t(0), columns);
            });
            return;
        }
        team.share((columns + GRAIN - 1) / GRAIN, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = 0; t < tokens; t++) f(t, first * GRAIN, std::min(last * GRAIN, columns));
        });
    }

    void copy_blocks() {
        if (!batch.copies) return;
        const std::int64_t bytes = 2 * model.half_bytes() * model.kv_heads;
        team.share(model.layers, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t c = 0; c < batch.copies; c++)
                for (std::int64_t l = first; l < last; l++)
                    std::memcpy(model.keys(l, batch.copy[2 * c + 1], 0), model.keys(l, batch.copy[2 * c], 0), bytes);
        });
    }

    void embed() {
        each(batch.tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const std::int64_t row = batch.ids[t] * model.hidden;
            const float* floats = (const float*)model.embedding + row;
            const std::uint16_t* halves = (const std::uint16_t*)model.embedding + row;
            float* x = r.x_.data() + t * model.hidden;
            for (std::int64_t i = first; i < last; i += WIDTH) {
                const F value = model.embedding_kind == WIDE      ? load(floats + i)
                                : model.embedding_kind == FLOAT16 ? from_half(halves + i)
                                                                  : from_bf16(halves + i);
                store(x + i, value * model.embedding_scale);
            }
        });
    }

    // Normed rows of x to a product's input; row t of the input is token rows[t], or t.
    void norm(const float* weight, std::int64_t tokens, const std::int64_t* rows, const Taken& to) {
        scratch.resize(model.hidden);
        each(tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* x = r.x_.data() + (rows ? rows[t] : t) * model.hidden;
            const float by = inverse_rms(x, model.hidden, model.eps);
            scaled(x + first, weight + first, by, last - first, scratch.data());
            to.put(t, first, last, scratch.data());
        });
    }

    void multiply(const Linear& linear, const Taken& in, std::int64_t tokens, float* to, std::int64_t stride,
                  bool add) {
        team.share(linear.panels(), Parts::GUIDED, [&](std::int64_t first, std::int64_t last) {
            attar::multiply(linear, in, first, last, tokens, Output{to, stride, add});
        });
    }

    // A product that ends in the residual stream, through a norm where the model has one there.
    void multiply_add(const Linear& linear, const Taken& in, const float* weight) {
        float* to = weight ? r.side_.data() : r.x_.data();
        multiply(linear, in, batch.tokens, to, model.hidden, !weight);
        if (!weight) return;
        scratch.resize(model.hidden);
        team.share(batch.tokens, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++) {
                const float* side = to + t * model.hidden;
                float* x = r.x_.data() + t * model.hidden;
                scaled(side, weight, inverse_rms(side, model.hidden, model.eps), model.hidden, scratch.data());
                for (std::int64_t i = 0; i < model.hidden; i++) x[i] += scratch[i];
            }
        });
    }

    void attend() {
        const Taken in = r.to_qkv_.taken(layer().qkv, model.bits);
        norm(layer().before_attention, batch.tokens, nullptr, in);
        multiply(layer().qkv, in, batch.tokens, r.qkv_.data(), qkv_width(), false);
        turn();
        look();
        const Taken mixed = r.to_out_.taken(layer().out, model.bits);
        join(mixed);
        multiply_add(layer().out, mixed, layer().after_attention);
    }

    void feed() {
        const std::int64_t wide = model.intermediate;
        const Taken in = r.to_gate_up_.taken(layer().gate_up, model.bits);
        const Taken inner = r.to_down_.taken(layer().down, model.bits);
        norm(layer().before_mlp, batch.tokens, nullptr, in);
        multiply(layer().gate_up, in, batch.tokens, r.wide_.data(), 2 * wide, false);
        scratch.resize(wide);
        each(batch.tokens, wide, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* gate = r.wide_.data() + t * 2 * wide + first;
            gated(gate, gate + wide, last - first, model.activation, scratch.data());
            inner.put(t, first, last, scratch.data());
        });
        multiply_add(layer().down, inner, layer().after_mlp);
    }

    void prepare_head(float* head, const float* weight, std::int64_t position) {
        const std::int64_t dim = model.head_dim;
        if (weight) scaled(head, weight, inverse_rms(head, dim, model.eps), dim, head);
        if (model.rotary) rotate_(head, layer().rotary + position * model.rotary, model.rotary);
    }

    // Norms of heads, rotary embedding, scale; keys and values to their slots.
    void turn() {
        team.share(batch.tokens * model.kv_heads, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t task = first; task < last; task++) turn_at(task / model.kv_heads, task % model.kv_heads);
        });
    }

    void turn_at(std::int64_t t, std::int64_t head) {
        const std::int64_t dim = model.head_dim, group = model.heads / model.kv_heads;
        float* row = r.qkv_.data() + t * qkv_width();
        float *queries = row + head * group * dim, *key = row + q_width() + head * dim;
        for (std::int64_t q = 0; q < group; q++) {
            prepare_head(queries + q * dim, layer().query_norm, batch.positions[t]);
            for (std::int64_t d = 0; d < dim; d++) queries[q * dim + d] *= model.scale;
        }
        prepare_head(key, layer().key_norm, batch.positions[t]);
        remember(model, at, head, batch.slots[t], key, key + model.kv_heads * dim, codes.data());
    }

    void look() {
        Attention attention(model, at);
        team.share(batch.tokens * model.kv_heads * r.parts_, Parts::GUIDED, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t task = first; task < last; task++) look_at(attention, task);
        });
    }

    void look_at(Attention& attention, std::int64_t task) {
        const std::int64_t group = model.heads / model.kv_heads, parts = r.parts_, part = task % parts;
        const std::int64_t head = task / parts % model.kv_heads, t = batch.tokens - 1 - task / parts / model.kv_heads;
        const std::int64_t span = batch.span[t], inside = t - batch.first[span];
        const std::int64_t begin = batch.place[span], until = begin + inside + 1, window = layer().window;
        const std::int64_t after = batch.positions[t] + 1, earliest = window && after > window ? after - window : 0;
        const std::int64_t* positions = batch.positions + batch.first[span];
        Look look{batch.block + batch.table[span], earliest, until, begin, nullptr, positions, earliest};
        if (batch.tree[span] >= 0) {
            look.tree = batch.mask + batch.tree[span] + inside * batch.count[span];
            look.from = std::min(earliest, begin);
        }
        const std::int64_t place = (t * model.heads + head * group) * parts + part;
        const float* queries = r.qkv_.data() + t * qkv_width() + head * group * model.head_dim;
        Part* to = r.part_.data() + place;
        float* mixed = r.mixed_.data() + place * model.padded();
        if (parts == 1) return attention.whole(look, head, queries, to, mixed);
        attention.part(look, part, head, queries, to, mixed, parts);
    }

    void join(const Taken& taken) {
        const std::int64_t dim = model.head_dim, stride = model.padded();
        scratch.resize(q_width());
        each(batch.tokens, q_width(), [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            for (std::int64_t head = first / dim; head * dim < last; head++) {
                const std::int64_t place = (t * model.heads + head) * r.parts_, begin = head * dim;
                const std::int64_t low = std::max(first, begin), high = std::min(last, begin + dim);
                float* to = scratch.data() + low - first;
                const Part whole = joined(r.part_.data() + place, r.mixed_.data() + place * stride, r.parts_, stride,
                                          low - begin, high - begin, to);
                for (std::int64_t d = 0; d < high - low; d++) to[d] /= whole.total;
            }
            taken.put(t, first, last, scratch.data());
        });
    }

    void logits() {
        const Taken in = r.to_head_.taken(model.head, model.bits);
        norm(model.norm, batch.wanted, batch.rows, in);
        multiply(model.head, in, batch.wanted, batch.logits, model.vocabulary, false);
        if (model.final_soft_cap == 0.0f) return;
        team.share(batch.wanted * model.vocabulary, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            soft_cap_(batch.logits + first, last - first, model.final_soft_cap);
        });
    }

    Runner& r;
    const Model& model;
    const Batch& batch;
    Team::Member& team;
    std::int64_t at = 0;
    std::vector<float> scratch;
    std::vector<std::int8_t> codes;
};

inline void Runner::run(const Batch& batch) {
    batch_ = &batch;
    make_room();
    team_.run(Walk::MORE_PHASES + Walk::LAYER_PHASES * model_.layers,
              [this](Team::Member& member) { Walk(*this, member).step(); });
}

}  // namespace attar
