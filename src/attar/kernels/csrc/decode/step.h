// One pass through a model for the tokens of several sequences: what the members of a team have in common in
// it. walk.h has each one's way through the phases.

#pragma once

#include <vector>

#include "attention.h"
#include "model.h"
#include "norm.h"
#include "product.h"
#include "team.h"

namespace attar {

class Runner {
public:
    Runner(const Model& model, int threads) : model_(model), team_(threads) {}

    void run(const Batch& batch);

private:
    friend class Walk;

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
        for (std::int64_t at = 0; at < m.layers; at++) {
            const Layer& layer = m.layer[at];
            to_qkv_.reserve(layer.qkv, tokens, m.bits);
            to_out_.reserve(layer.out, tokens, m.bits);
            to_gate_up_.reserve(layer.gate_up, tokens, m.bits);
            to_down_.reserve(layer.down, tokens, m.bits);
        }
        to_head_.reserve(m.head, batch_->wanted, m.bits);
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
};

}  // namespace attar
