// One pass through a model for the tokens of several sequences: all members of the team go through the same
// phases, each with its share, and meet between them.
//
// Phases of a layer: norm, q k v, turn and remember, attend, join, out, norm, gate and up, activate, down.
// Before a product its input is prepared once (quantized, where weights are): each member does its tokens, or
// with few tokens its columns.

#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "model.h"
#include "norm.h"
#include "team.h"

namespace attar {

constexpr std::int64_t GRAIN = 128;  // columns that members share out are multiples of it, as of every group

class Runner {
public:
    Runner(const Model& model, int threads) : model_(model), team_(threads) {}

    void run(const Batch& batch);

private:
    class Member;

    void make_room() {
        const Model& m = model_;
        const std::int64_t tokens = batch_->tokens;
        parts_ = parts();
        grow(x_, tokens * m.hidden);
        grow(side_, tokens * m.hidden);
        grow(qkv_, tokens * (m.heads + 2 * m.kv_heads) * m.head_dim);
        grow(wide_, tokens * 2 * m.intermediate);
        grow(mixed_, tokens * m.heads * parts_ * m.padded());
        if (std::int64_t(part_.size()) < tokens * m.heads * parts_) part_.resize(tokens * m.heads * parts_);
        const Layer& any = m.layer[0];
        const bool exact = m.exact;
        to_qkv_.shape(any.qkv, tokens, exact);
        to_out_.shape(any.out, tokens, exact);
        to_gate_up_.shape(any.gate_up, tokens, exact);
        to_down_.shape(any.down, tokens, exact);
        if (batch_->wanted) to_head_.shape(m.head, batch_->wanted, exact);
    }

    // Parts that are shared out: those of the longest sequence, or one where there are tasks enough.
    std::int64_t parts() const {
        if (team_.size() == 1 || batch_->tokens * model_.kv_heads >= 8 * team_.size()) return 1;
        std::int64_t longest = 1;
        for (std::int64_t s = 0; s < batch_->spans; s++)
            longest = std::max(longest, batch_->place[s] + batch_->count[s]);
        return (longest + PART - 1) / PART;
    }

    static void grow(std::vector<float>& room, std::int64_t size) {
        if (std::int64_t(room.size()) < size) room.resize(size);
    }

    const Model& model_;
    Team team_;
    const Batch* batch_ = nullptr;
    std::int64_t parts_ = 1;
    std::vector<float> x_, side_, qkv_, wide_, mixed_;
    std::vector<Part> part_;
    Input to_qkv_, to_out_, to_gate_up_, to_down_, to_head_;
    std::atomic<std::int64_t> next_{0};
};

class Runner::Member {
public:
    Member(Runner& all, int member)
        : r(all), model(all.model_), batch(*all.batch_), member_(member), size_(all.team_.size()) {}

    void step() {
        copy_blocks();
        embed();
        meet();
        for (at = 0; at < model.layers; at++) {
            attend();
            feed();
        }
        if (batch.wanted) logits();
    }

private:
    void meet() { r.team_.meet(); }
    const Layer& layer() const { return model.layer[at]; }
    std::int64_t q_width() const { return model.heads * model.head_dim; }
    std::int64_t qkv_width() const { return (model.heads + 2 * model.kv_heads) * model.head_dim; }

    // f(token, first, last) for this member's tokens, or with fewer tokens than members for its columns.
    template <class Function>
    void each(std::int64_t tokens, std::int64_t columns, Function f) {
        if (tokens >= size_) {
            const Share own(tokens, member_, size_);
            for (std::int64_t t = own.first; t < own.last; t++) f(t, std::int64_t(0), columns);
            return;
        }
        const Share own((columns + GRAIN - 1) / GRAIN, member_, size_);
        const std::int64_t first = own.first * GRAIN, last = std::min(own.last * GRAIN, columns);
        for (std::int64_t t = 0; t < tokens && first < last; t++) f(t, first, last);
    }

    void copy_blocks() {
        if (!batch.copies) return;
        const std::int64_t bytes = 2 * model.half_bytes() * model.kv_heads;
        const Share own(model.layers, member_, size_);
        for (std::int64_t c = 0; c < batch.copies; c++)
            for (std::int64_t l = own.first; l < own.last; l++)
                std::memcpy(model.keys(l, batch.copy[2 * c + 1], 0), model.keys(l, batch.copy[2 * c], 0), bytes);
    }

    void embed() {
        each(batch.tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const std::int64_t row = batch.ids[t] * model.hidden;
            float* x = r.x_.data() + t * model.hidden;
            for (std::int64_t i = first; i < last; i++) {
                const std::uint32_t bits = model.embedding_exact ? 0 : std::uint32_t(model.embedding[row + i]) << 16;
                float value;
                std::memcpy(&value, &bits, 4);
                x[i] = (model.embedding_exact ? model.embedding_exact[row + i] : value) * model.embedding_scale;
            }
        });
    }

    // Normed rows of x to a product's input; row t of the input is token rows[t], or t.
    void norm(const float* weight, std::int64_t tokens, const std::int64_t* rows, Input& to) {
        scratch.resize(model.hidden);
        each(tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* x = r.x_.data() + (rows ? rows[t] : t) * model.hidden;
            const float by = inverse_rms(x, model.hidden, model.eps);
            scaled(x + first, weight + first, by, last - first, scratch.data());
            to.put(t, first, last, scratch.data());
        });
        meet();
    }

    void multiply(const Linear& linear, const Input& in, std::int64_t tokens, float* to, std::int64_t stride,
                  bool add) {
        const Share own(linear.panels(), member_, size_);
        attar::multiply(linear, in, own.first, own.last, tokens, Output{to, stride, add});
        meet();
    }

    // A product that ends in the residual stream, through a norm where the model has one there.
    void multiply_add(const Linear& linear, const Input& in, const float* weight) {
        float* to = weight ? r.side_.data() : r.x_.data();
        multiply(linear, in, batch.tokens, to, model.hidden, !weight);
        if (!weight) return;
        scratch.resize(model.hidden);
        const Share own(batch.tokens, member_, size_);
        for (std::int64_t t = own.first; t < own.last; t++) {
            const float* side = to + t * model.hidden;
            float* x = r.x_.data() + t * model.hidden;
            scaled(side, weight, inverse_rms(side, model.hidden, model.eps), model.hidden, scratch.data());
            for (std::int64_t i = 0; i < model.hidden; i++) x[i] += scratch[i];
        }
        meet();
    }

    void attend() {
        norm(layer().before_attention, batch.tokens, nullptr, r.to_qkv_);
        if (member_ == 0) r.next_.store(0, std::memory_order_relaxed);
        multiply(layer().qkv, r.to_qkv_, batch.tokens, r.qkv_.data(), qkv_width(), false);
        turn();
        look();
        join();
        multiply_add(layer().out, r.to_out_, layer().after_attention);
    }

    void feed() {
        const std::int64_t wide = model.intermediate;
        norm(layer().before_mlp, batch.tokens, nullptr, r.to_gate_up_);
        multiply(layer().gate_up, r.to_gate_up_, batch.tokens, r.wide_.data(), 2 * wide, false);
        scratch.resize(wide);
        each(batch.tokens, wide, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
            const float* gate = r.wide_.data() + t * 2 * wide + first;
            gated(gate, gate + wide, last - first, model.activation, scratch.data());
            r.to_down_.put(t, first, last, scratch.data());
        });
        meet();
        multiply_add(layer().down, r.to_down_, layer().after_mlp);
    }

    void prepare_head(float* head, const float* weight, std::int64_t position) {
        const std::int64_t dim = model.head_dim;
        if (weight) scaled(head, weight, inverse_rms(head, dim, model.eps), dim, head);
        if (model.rotary) rotate_(head, layer().rotary + position * model.rotary, model.rotary);
    }

    // Norms of heads, rotary embedding, scale; keys and values to their slots.
    void turn() {
        const std::int64_t dim = model.head_dim, group = model.heads / model.kv_heads;
        const Share own(batch.tokens * model.kv_heads, member_, size_);
        for (std::int64_t task = own.first; task < own.last; task++) {
            const std::int64_t t = task / model.kv_heads, head = task % model.kv_heads;
            float* row = r.qkv_.data() + t * qkv_width();
            float *queries = row + head * group * dim, *key = row + q_width() + head * dim;
            for (std::int64_t q = 0; q < group; q++) {
                prepare_head(queries + q * dim, layer().query_norm, batch.positions[t]);
                for (std::int64_t d = 0; d < dim; d++) queries[q * dim + d] *= model.scale;
            }
            prepare_head(key, layer().key_norm, batch.positions[t]);
            remember(model, at, head, batch.slots[t], key, key + model.kv_heads * dim);
        }
        meet();
    }

    // Tasks are taken as members get free: long sequences beside short ones leave nobody waiting.
    void look() {
        Attention attention(model, at);
        const std::int64_t tasks = batch.tokens * model.kv_heads * r.parts_;
        for (std::int64_t task; (task = r.next_.fetch_add(1, std::memory_order_relaxed)) < tasks;)
            look_at(attention, task);
        meet();
    }

    void look_at(Attention& attention, std::int64_t task) {
        const std::int64_t group = model.heads / model.kv_heads, parts = r.parts_, part = task % parts;
        const std::int64_t head = task / parts % model.kv_heads, t = batch.tokens - 1 - task / parts / model.kv_heads;
        const std::int64_t span = batch.span[t], inside = t - batch.first[span];
        const std::int64_t until = batch.place[span] + inside + 1, window = layer().window;
        const std::int64_t from = window && until > window ? until - window : 0;
        Look look{batch.block + batch.table[span], from, until, batch.place[span], nullptr};
        if (batch.tree[span] >= 0) look.tree = batch.mask + batch.tree[span] + inside * batch.count[span];
        const std::int64_t place = (t * model.heads + head * group) * parts + part;
        const float* queries = r.qkv_.data() + t * qkv_width() + head * group * model.head_dim;
        Part* to = r.part_.data() + place;
        float* mixed = r.mixed_.data() + place * model.padded();
        if (parts == 1) return attention.whole(look, head, queries, to, mixed);
        attention.part(look, part, head, queries, to, mixed, parts);
    }

    void join() {
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
            r.to_out_.put(t, first, last, scratch.data());
        });
        meet();
    }

    void logits() {
        norm(model.norm, batch.wanted, batch.rows, r.to_head_);
        multiply(model.head, r.to_head_, batch.wanted, batch.logits, model.vocabulary, false);
        if (model.final_soft_cap == 0.0f) return;
        const Share own(batch.wanted * model.vocabulary, member_, size_);
        soft_cap_(batch.logits + own.first, own.last - own.first, model.final_soft_cap);
    }

    Runner& r;
    const Model& model;
    const Batch& batch;
    const int member_, size_;
    std::int64_t at = 0;
    std::vector<float> scratch;
};

inline void Runner::run(const Batch& batch) {
    batch_ = &batch;
    make_room();
    team_.run([this](int member) { Member(*this, member).step(); });
}

}  // namespace attar
