// Which experts a token goes to, and the tokens of each expert.
//
//     scores     softmax(W x + b) or sigmoid(W x + b), of E experts
//     chosen     the k experts of the largest score + correction; where experts are in groups, of the best groups alone
//     weights    the scores of the chosen, divided by their sum where they are normalized, times a scaling
//
// A softmax over the k largest logits (gpt-oss) is the normalized softmax over all.

#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "activations.h"
#include "amx.h"
#include "model.h"

namespace attar {

// Moves to `chosen` the k indices of the largest of n values, largest first; values that were taken become -infinity.
static inline void take_largest(float* values, std::int64_t n, std::int64_t k, std::int64_t* chosen) {
    for (std::int64_t i = 0; i < k; i++) {
        chosen[i] = std::max_element(values, values + n) - values;
        values[chosen[i]] = -std::numeric_limits<float>::infinity();
    }
}

// Experts outside of the best groups become -infinity. A group's score is the sum of its largest values.
static inline void limit_groups(const Mixture& mixture, float* values, std::vector<float>& group_scores,
                                std::vector<std::int64_t>& best) {
    const std::int64_t size = mixture.experts / mixture.groups;
    group_scores.resize(mixture.groups + size);
    float* sorted = group_scores.data() + mixture.groups;
    for (std::int64_t g = 0; g < mixture.groups; g++) {
        std::copy_n(values + g * size, size, sorted);
        std::partial_sort(sorted, sorted + mixture.group_scores, sorted + size, std::greater<float>());
        group_scores[g] = 0;
        for (std::int64_t i = 0; i < mixture.group_scores; i++) group_scores[g] += sorted[i];
    }
    best.resize(mixture.active_groups);
    take_largest(group_scores.data(), mixture.groups, mixture.active_groups, best.data());
    for (std::int64_t g = 0; g < mixture.groups; g++)
        if (std::find(best.begin(), best.end(), g) == best.end())
            std::fill_n(values + g * size, size, -std::numeric_limits<float>::infinity());
}

// Memory of `choose`, reused.
struct ChoiceBuffers {
    std::vector<float> values, group_scores;
    std::vector<std::int64_t> best;
};

// The experts and weights (active,) of a token, from its logits (experts,), which become scores.
static inline void choose(const Mixture& mixture, float* logits, ChoiceBuffers& buffers, std::int64_t* chosen,
                          float* weights) {
    const std::int64_t n = mixture.experts, k = mixture.active;
    if (mixture.scoring == SIGMOID) {
        for (std::int64_t e = 0; e < n; e++) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    } else {
        const float peak = *std::max_element(logits, logits + n);
        float total = 0;
        for (std::int64_t e = 0; e < n; e++) total += logits[e] = std::exp(logits[e] - peak);
        for (std::int64_t e = 0; e < n; e++) logits[e] /= total;
    }
    buffers.values.assign(logits, logits + n);
    if (mixture.correction)
        for (std::int64_t e = 0; e < n; e++) buffers.values[e] += mixture.correction[e];
    if (mixture.groups > 1) limit_groups(mixture, buffers.values.data(), buffers.group_scores, buffers.best);
    take_largest(buffers.values.data(), n, k, chosen);
    float sum = 0;
    for (std::int64_t i = 0; i < k; i++) sum += logits[chosen[i]];
    const float factor = mixture.scaling / (mixture.normalized ? sum + 1e-20f : 1.0f);
    for (std::int64_t i = 0; i < k; i++) weights[i] = logits[chosen[i]] * factor;
}

// The pairs of a token and one of its experts, in the order of experts. Pair p is expert p % active of token p / active.
struct Routes {
    std::vector<std::int64_t> chosen, pair, place;  // (tokens, active): experts; sorted pairs; each pair's place there
    std::vector<float> weights;                     // (tokens, active)
    std::vector<std::int64_t> expert, first;        // experts with tokens, and where their pairs begin in `pair`
    std::int64_t experts = 0;                       // number of those

    void reserve(std::int64_t pairs, std::int64_t most) {
        for (auto* list : {&chosen, &pair, &place})
            if (std::int64_t(list->size()) < pairs) list->resize(pairs);
        if (std::int64_t(weights.size()) < pairs) weights.resize(pairs);
        for (auto* list : {&expert, &first})
            if (std::int64_t(list->size()) < most + 1) list->resize(most + 1);
    }

    // Sorts the pairs of `chosen` by expert, stable.
    void sort(std::int64_t pairs, std::int64_t most) {
        std::fill_n(first.data(), most + 1, 0);
        for (std::int64_t p = 0; p < pairs; p++) first[chosen[p] + 1]++;
        for (std::int64_t e = 0; e < most; e++) first[e + 1] += first[e];
        for (std::int64_t p = 0; p < pairs; p++) {
            place[p] = first[chosen[p]]++;
            pair[place[p]] = p;
        }
        experts = 0;  // first[e] is the end of expert e now
        for (std::int64_t e = 0, begin = 0; e < most; e++) {
            const std::int64_t end = first[e];
            if (end > begin) {
                expert[experts] = e;
                first[experts++] = begin;
            }
            begin = end;
        }
        first[experts] = pairs;
    }
};

// Intermediate results of a layer's mixture.
struct MixtureBuffers {
    Routes routes;
    std::vector<float> logits;            // (tokens, experts + 1), the last column of the shared expert's gate
    std::vector<float> gate_up, outputs;  // rows of the sorted pairs, then those of the shared expert
    ActivationBuffer input, inner, shared_input, shared_inner;

    // An expert's rows begin anywhere, and the matrix unit reads whole blocks of tokens (amx.h). A token that is alone
    // has one row of inputs.
    void reserve(const Mixture& m, std::int64_t tokens, std::int64_t hidden, int bits) {
        const std::int64_t pairs = tokens * m.active, spare = tokens > 1 ? TILE_ROWS : 0;
        routes.reserve(pairs, m.experts);
        grow(logits, tokens * (m.experts + 1));
        grow(gate_up, pairs * m.gate_up->rows + tokens * m.shared_gate_up.rows);
        grow(outputs, (pairs + tokens) * hidden);
        input.reserve(*m.gate_up, tokens > 1 ? pairs + spare : 1, bits);
        inner.reserve(*m.down, pairs + spare, bits);
        if (!m.has_shared()) return;
        shared_input.reserve(m.shared_gate_up, tokens, bits);
        shared_inner.reserve(m.shared_down, tokens, bits);
    }

private:
    static void grow(std::vector<float>& buffer, std::int64_t size) {
        if (std::int64_t(buffer.size()) < size) buffer.resize(size);
    }
};

}  // namespace attar
