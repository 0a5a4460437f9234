// A model with its threads, and the buffers of its steps.

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "latent_rows.h"
#include "model.h"
#include "routing.h"
#include "thread_pool.h"

namespace attar {

struct DrafterWeights;
struct ContextRows;
struct DraftRound;

// A model with its threads and buffers. Runners that share threads run one at a time.
class Runner {
public:
    Runner(const Model& model, std::shared_ptr<ThreadPool> pool) : model_(model), pool_(std::move(pool)) {}

    const std::shared_ptr<ThreadPool>& threads() const { return pool_; }
    void run(const Batch& batch);
    void write_context(const DrafterWeights& drafter, const ContextRows& rows);     // draft_block.h
    void draft(const DrafterWeights& drafter, const Batch& batch, const DraftRound& round);  // the same

private:
    friend class StepWorker;
    friend class DraftWorker;

    void reserve() {
        const Model& m = model_;
        const std::int64_t tokens = batch_->tokens;
        splits_ = splits();
        walk_.assign(1, 0);
        for (std::int64_t s = 0; s < batch_->spans; s++)
            walk_.push_back(walk_.back() + batch_->again[s] + batch_->count[s]);
        grow(x_, tokens * m.hidden);
        grow(normed_, tokens * m.hidden);
        if (m.rank) {
            latents_.reserve(m, *batch_, pool_->size());
        } else {
            grow(acc_, tokens * m.heads * splits_ * m.padded());
            if (std::int64_t(states_.size()) < tokens * m.heads * splits_) states_.resize(tokens * m.heads * splits_);
        }
        for (std::int64_t i = 0; i < m.layers; i++) {
            const Layer& layer = m.layer[i];
            if (layer.recurrence) reserve(*layer.recurrence);
            grow(qkv_, tokens * layer.qkv.rows);
            if (layer.qkv.rows) qkv_input_.reserve(layer.qkv, tokens, m.bits);
            if (layer.out.rows) out_input_.reserve(layer.out, tokens, m.bits);
            if (layer.mixture) {
                mixture_.reserve(*layer.mixture, tokens, m.hidden, m.bits);
                continue;
            }
            if (!layer.down.rows) continue;
            grow(gate_up_, tokens * layer.gate_up.rows);
            gate_up_input_.reserve(layer.gate_up, tokens, m.bits);
            down_input_.reserve(layer.down, tokens, m.bits);
        }
        head_input_.reserve(m.head, batch_->logit_rows, m.bits);
    }

    void reserve(const Recurrence& m) {
        const std::int64_t tokens = batch_->tokens;
        grow(projected_, tokens * m.first.rows);
        grow(steps_, tokens * m.steps.rows);
        grow(mixed_, walk_.back() * (m.channels() + 2 * m.heads));
        grow(recurred_, tokens * m.heads * m.values);
        qkv_input_.reserve(m.first, tokens, model_.bits);
        if (m.steps.rows) qkv_input_.reserve(m.steps, tokens, model_.bits);
        out_input_.reserve(m.out, tokens, model_.bits);
    }

    // KV splits of every token: those of the longest sequence, or one where there are tasks enough.
    std::int64_t splits() const {
        if (pool_->size() == 1 || batch_->tokens * model_.kv_heads >= 8 * pool_->size()) return 1;
        std::int64_t longest = 1;
        for (std::int64_t s = 0; s < batch_->spans; s++)
            longest = std::max(longest, batch_->past[s] + batch_->count[s]);
        return (longest + SPLIT - 1) / SPLIT;
    }

    static void grow(std::vector<float>& buffer, std::int64_t size) {
        if (std::int64_t(buffer.size()) < size) buffer.resize(size);
    }

    const Model& model_;
    const std::shared_ptr<ThreadPool> pool_;
    const Batch* batch_ = nullptr;
    std::int64_t splits_ = 1;
    std::vector<float> x_, normed_, qkv_, gate_up_, acc_;  // acc_: attention's, of each token, head and split
    std::vector<SoftmaxState> states_;                     // of the same rows
    ActivationBuffer qkv_input_, out_input_, gate_up_input_, down_input_, head_input_;
    MixtureBuffers mixture_;
    std::vector<std::int64_t> walk_;  // (spans + 1,) where the tokens that a recurrence runs for a span begin
    std::vector<float> projected_, steps_, mixed_, recurred_;  // of recurrence.h: products; q, k, v, a, b of these; o
    LatentBuffers latents_;
    ActivationBuffer context_input_, markov_input_;  // of draft_block.h
};

}  // namespace attar
