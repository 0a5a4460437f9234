// A block of drafts in one call: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).
//
// A drafter is a model of few layers (model.h) whose tokens are a block: the last decided one, then mask tokens.
// They see each other both ways, and the keys and values of earlier positions. Those are not its own tokens':
//
//     c_j = norm(W_c states_j),   K_j, V_j = the rows of each layer's qkv times c_j          `write_context`
//
// Then the tokens of a block, k from 0, from its logits z_k (`draft`):
//
//     z_k += W2 W1[x_(k-1)]                                    Markov head; x_(-1) is the last decided token
//     x_k = argmax z_k,  or at temperature T  argmax_v  log(u_v) / exp((z_kv - max z_k) / T)
//     s_k = s_(k-1) sigmoid((w . [h_k, W1[x_(k-1)]] + b) / t_k)   the draft ends before the first s_k < least_k
//
// u are those of sampling/sample.py: the draft of a seeded request is drawn with the noise of its token. Whether a
// draft goes on is decided before its next token is drawn.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "step.h"

namespace attar {

struct DrafterWeights {
    Linear context;              // W_c (hidden, columns of the states)
    const float* context_norm;   // (hidden,)
    std::int64_t rank;           // of the Markov head; 0: none
    const std::uint16_t* previous;  // W1 bfloat16 (target's vocabulary, rank)
    Linear markov;               // W2 (vocabulary of the drafter, rank)
    const std::int64_t* chosen;  // (vocabulary,) the target's id of each token, or null: the same
    const float* confidence;     // w (hidden + rank,), then b; or null
    const float* calibration;    // t (drafts,)
};

// States of decided positions, whose keys and values are written.
struct ContextRows {
    std::int64_t count;
    const float* states;                    // (count, columns)
    const std::int64_t *positions, *slots;  // (count,)
};

// What is drawn of the blocks of a batch: `rows` of it are `drafts` of each block, in order.
struct DraftRound {
    std::int64_t blocks, drafts;
    const std::int64_t *last, *most;  // (blocks,) the last decided token; drafts at most
    const float* temperature;         // (blocks,) 0: the likeliest token
    const float* least;               // (blocks, drafts) lowest survival that pays; 0: any
    const std::uint64_t* key;         // (blocks, drafts) noise
    std::int64_t *token, *count;      // out: (blocks, drafts) in the target's ids; (blocks,)
    float* survival;                  // out: (blocks, drafts); without confidence untouched
    float* states;                    // out: (blocks, drafts, hidden) h_k; then nothing is drawn. Or null
};

// Uniform in (0, 1): SplitMix64 seeded with `key`, output `index`.
static inline std::uint64_t noise_bits(std::uint64_t key, std::uint64_t index) {
    std::uint64_t z = (index + 1) * 0x9E3779B97F4A7C15ull + key;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (z ^ z >> 31) >> 11;
}
static inline double uniform(std::uint64_t bits) { return (double(bits) + 0.5) * 0x1p-53; }

// The largest of n numbers, the first among equals; -1 where it is not finite.
static inline std::int64_t likeliest(const float* z, std::int64_t n) {
    F top = broadcast(MINUS_INFINITY);
    std::int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) top = maximum(top, load(z + i));
    float peak = largest_lane(top);
    for (; i < n; i++) peak = std::max(peak, z[i]);
    if (!std::isfinite(peak)) return -1;
    return std::find(z, z + n, peak) - z;
}

// A draw from softmax(z / T); `best` is the likeliest. With c = -log u_best, a token v that wins has
// 1 - u_v <= c exp((z_v - z_best) / T), so few logarithms are taken.
static inline std::int64_t drawn(const float* z, std::int64_t n, std::int64_t best, float temperature,
                                 std::uint64_t key, const std::int64_t* chosen) {
    const auto bits = [&](std::int64_t v) { return noise_bits(key, std::uint64_t(chosen ? chosen[v] : v)); };
    const float peak = z[best], inverse = 1.0f / temperature;
    const double c = -std::log(uniform(bits(best)));
    double highest = -c;
    std::int64_t winner = best;
    float weights[WIDTH], padded[WIDTH];
    for (std::int64_t start = 0; start < n; start += WIDTH) {
        const std::int64_t count = std::min<std::int64_t>(WIDTH, n - start);
        const float* from = z + start;
        if (count < WIDTH) {
            std::fill_n(padded, WIDTH, MINUS_INFINITY);
            std::copy_n(from, count, padded);
            from = padded;
        }
        store(weights, exp_((load(from) - peak) * inverse));
        for (std::int64_t i = 0; i < count; i++) {
            if (!(weights[i] > 0.0f)) continue;
            const double u = uniform(bits(start + i));
            if (1.0 - u > 1.00001 * c * weights[i]) continue;
            const double race = std::log(u) / weights[i];
            if (race > highest) highest = race, winner = start + i;
        }
    }
    return winner;
}

class DraftWorker : public StepWorker {
public:
    DraftWorker(Runner& runner, ThreadPool::Worker& worker, const DrafterWeights& drafter)
        : StepWorker(runner, worker), drafter(drafter) {}

    // Phases at most, of all layers in `context`, and of a draft in `draft`, which begins with one.
    static constexpr std::int64_t CONTEXT_PHASES = 3, DRAFT_PHASES = 3;

    void context(const ContextRows& rows) {
        const Activations in = r.context_input_.view(drafter.context, model.bits);
        const std::int64_t columns = drafter.context.columns;
        each_token(rows.count, [&](std::int64_t t) { in.set(t, 0, columns, rows.states + t * columns); });
        multiply(drafter.context, in, rows.count, r.x_.data(), model.hidden, false);
        for (layer_index = 0; layer_index < model.layers; layer_index++) {
            const Linear& qkv = layer().qkv;
            const Activations inner = r.qkv_input_.view(qkv, model.bits);
            norm(drafter.context_norm, rows.count, nullptr, inner);
            const std::int64_t before = q_width() / PANEL;  // panels of queries alone
            worker.parallel_for(qkv.panels() - before, Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
                attar::multiply(qkv, inner, before + first, before + last, rows.count,
                                Output{r.qkv_.data(), qkv_width(), false});
            });
            const std::int64_t tasks = rows.count * model.kv_heads, dim = model.head_dim;
            worker.parallel_for(tasks, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t task = first; task < last; task++) {
                    const std::int64_t t = task / model.kv_heads, head = task % model.kv_heads;
                    float* key = r.qkv_.data() + t * qkv_width() + q_width() + head * dim;
                    rope_head(key, layer().key_norm, rows.positions[t]);
                    store_kv(cache(), head, rows.slots[t], key, key + model.kv_heads * dim, codes.data(),
                             rotated.data());
                }
            });
        }
    }

    void draft(const DraftRound& round) {
        step();
        if (round.states) return copy_states(round.states);
        each_token(round.blocks, [&](std::int64_t block) {
            set_count(round, block, 0);
            foresee(round, block, 0);
        });
        for (std::int64_t k = 0; k < round.drafts && any_open(round, k); k++) {
            if (drafter.rank) add_markov(round, k);
            each_token(round.blocks, [&](std::int64_t block) { choose(round, block, k); });
        }
    }

private:
    template <class Function>
    void each_token(std::int64_t tokens, Function f) {
        worker.parallel_for(tokens, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++) f(t);
        });
    }

    const std::uint16_t* embedding_before(const DraftRound& round, std::int64_t block, std::int64_t k) const {
        const std::int64_t token = k ? round.token[block * round.drafts + k - 1] : round.last[block];
        return drafter.previous + token * drafter.rank;
    }

    // Behind the final norm.
    void copy_states(float* to) {
        each_token(batch.logit_rows, [&](std::int64_t row) {
            const float* x = r.x_.data() + batch.rows[row] * model.hidden;
            const float inverse = inverse_rms(x, model.hidden, model.eps);
            scale_by(x, model.norm, inverse, model.hidden, to + row * model.hidden);
        });
    }

    // The Markov head's part of the logits of draft k.
    void add_markov(const DraftRound& round, std::int64_t k) {
        const Activations in = r.markov_input_.view(drafter.markov, model.bits);
        const std::int64_t rank = drafter.rank, vocabulary = model.vocabulary;
        scratch.resize(std::max(std::int64_t(scratch.size()), rank));
        each_token(round.blocks, [&](std::int64_t block) {
            const std::uint16_t* row = embedding_before(round, block, k);
            for (std::int64_t i = 0; i < rank; i++) scratch[i] = one_bf16(row[i]);
            in.set(block, 0, rank, scratch.data());
        });
        multiply(drafter.markov, in, round.blocks, batch.logits + k * vocabulary, round.drafts * vocabulary, true);
    }

    // Counts grow while late threads read them, of drafts whose phase is done.
    static void set_count(const DraftRound& round, std::int64_t block, std::int64_t count) {
        __atomic_store_n(round.count + block, count, __ATOMIC_RELAXED);
    }

    // Whether draft k of a block is made: those before it were, and it is likely enough.
    static bool open(const DraftRound& round, std::int64_t block, std::int64_t k) {
        return k < round.most[block] && __atomic_load_n(round.count + block, __ATOMIC_RELAXED) >= k &&
               !(round.survival[block * round.drafts + k] < round.least[block * round.drafts + k]);
    }
    static bool any_open(const DraftRound& round, std::int64_t k) {
        for (std::int64_t block = 0; block < round.blocks; block++)
            if (open(round, block, k)) return true;
        return false;
    }

    // The survival of token k, from all that is known before it is drawn.
    void foresee(const DraftRound& round, std::int64_t block, std::int64_t k) const {
        const std::int64_t at = block * round.drafts + k;
        if (drafter.confidence) round.survival[at] = (k ? round.survival[at - 1] : 1.0f) * sure(round, block, k);
    }

    // Token k of a block, unless its draft has ended.
    void choose(const DraftRound& round, std::int64_t block, std::int64_t k) {
        const std::int64_t at = block * round.drafts + k;
        round.token[at] = k ? round.token[at - 1] : round.last[block];  // whatever it is, an id
        if (!open(round, block, k)) return;
        const float* z = batch.logits + at * model.vocabulary;
        std::int64_t token = likeliest(z, model.vocabulary);
        if (token < 0) return;
        if (round.temperature[block] > 0.0f)
            token = drawn(z, model.vocabulary, token, round.temperature[block], round.key[at], drafter.chosen);
        round.token[at] = drafter.chosen ? drafter.chosen[token] : token;
        if (k + 1 < round.drafts) foresee(round, block, k + 1);
        set_count(round, block, k + 1);
    }

    // The probability that token k is accepted if all before it are, before it is drawn.
    float sure(const DraftRound& round, std::int64_t block, std::int64_t k) const {
        const std::int64_t hidden = model.hidden, rank = drafter.rank;
        const float* x = r.x_.data() + batch.rows[block * round.drafts + k] * hidden;
        const float inverse = inverse_rms(x, hidden, model.eps);
        const float* w = drafter.confidence;
        double sum = w[hidden + rank];
        for (std::int64_t i = 0; i < hidden; i++) sum += double(w[i]) * (x[i] * inverse * model.norm[i]);
        if (rank) {
            const std::uint16_t* row = embedding_before(round, block, k);
            for (std::int64_t i = 0; i < rank; i++) sum += double(w[hidden + i]) * one_bf16(row[i]);
        }
        return float(1.0 / (1.0 + std::exp(-sum / drafter.calibration[k])));
    }

    static float one_bf16(std::uint16_t bits) {
        const std::uint32_t wide = std::uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }

    const DrafterWeights& drafter;
};

inline void Runner::write_context(const DrafterWeights& drafter, const ContextRows& rows) {
    check_slots(model_, rows.slots, rows.count);
    for (std::int64_t t = 0; t < rows.count; t++) check_position(model_, rows.positions[t]);
    Batch batch{};
    batch.tokens = rows.count;
    batch_ = &batch;
    reserve();
    context_input_.reserve(drafter.context, rows.count, model_.bits);
    pool_->run(2 + DraftWorker::CONTEXT_PHASES * model_.layers,
               [&](ThreadPool::Worker& worker) { DraftWorker(*this, worker, drafter).context(rows); });
    batch_ = nullptr;
}

inline void Runner::draft(const DrafterWeights& drafter, const Batch& batch, const DraftRound& round) {
    check(model_, batch);
    require(round.blocks * round.drafts == batch.logit_rows, ROWS);
    for (std::int64_t i = 0; round.last && i < round.blocks; i++)
        require(inside(round.last[i], model_.embeddings), TOKENS);
    batch_ = &batch;
    reserve();
    if (drafter.rank) markov_input_.reserve(drafter.markov, round.blocks, model_.bits);
    pool_->run(StepWorker::MORE_PHASES + StepWorker::LAYER_PHASES * model_.layers +
                   1 + DraftWorker::DRAFT_PHASES * round.drafts,
               [&](ThreadPool::Worker& worker) { DraftWorker(*this, worker, drafter).draft(round); });
}

}  // namespace attar
