// A layer's mixture of experts: the router, the experts that were chosen, and the expert that all tokens share.
//
//     x += sum_i w_i expert_i(norm(x)) + sigmoid(g norm(x)) shared(norm(x))
//
// Pairs of a token and an expert are sorted by expert, so that an expert's weights are read once for all its tokens,
// and those of experts without tokens are not read. Work is divided by panels, whichever expert they belong to. The
// number of a phase's tasks follows from the number of tokens alone: a worker that comes late may not read what the
// router chose. A token's sum over its experts has the order of its own choice, whatever is in its batch.

#pragma once

#include "routing.h"
#include "step.h"

namespace attar {

// The product of every expert with its pairs, and of the shared expert with all tokens, whose panels come first.
inline void StepWorker::multiply_experts(const Linear* linears, const Activations& in, bool one_row, float* to,
                                         const Linear& shared, const Activations& shared_in, float* shared_to) {
    const Mixture& m = *layer().mixture;
    const Routes& routes = r.mixture_.routes;
    const std::int64_t panels = linears->panels(), before = m.has_shared() ? shared.panels() : 0;
    const std::int64_t experts = std::min(batch.tokens * m.active, m.experts);  // that may have tokens
    worker.parallel_for(before + experts * panels, Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
        if (first < before)
            attar::multiply(shared, shared_in, first, std::min(last, before), batch.tokens,
                            Output{shared_to, shared.rows, false});
        for (std::int64_t task = std::max(first - before, std::int64_t(0)), end; task < last - before; task = end) {
            const std::int64_t i = task / panels, row = routes.first[std::min(i, routes.experts)];
            end = std::min(last - before, (i + 1) * panels);
            if (i >= routes.experts) return;
            const Linear& linear = linears[routes.expert[i]];
            attar::multiply(linear, one_row ? in : in.from(row), task - i * panels, end - i * panels,
                            routes.first[i + 1] - row, Output{to + row * linear.rows, linear.rows, false});
        }
    });
}

inline void StepWorker::mixture() {
    const Mixture& m = *layer().mixture;
    MixtureBuffers& b = r.mixture_;
    const std::int64_t tokens = batch.tokens, pairs = tokens * m.active, hidden = model.hidden;
    const bool alone = tokens == 1;  // all experts read the same row
    const Activations in = b.input.view(*m.gate_up, model.bits), inner = b.inner.view(*m.down, model.bits);
    Activations shared_in{}, shared_inner{};
    if (m.has_shared()) {
        shared_in = b.shared_input.view(m.shared_gate_up, model.bits);
        shared_inner = b.shared_inner.view(m.shared_down, model.bits);
    }
    for_each_token(tokens, hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
        const float* x = r.x_.data() + t * hidden;
        float* to = r.normed_.data() + t * hidden + first;
        scale_by(x + first, layer().before_mlp + first, inverse_rms(x, hidden, model.eps), last - first, to);
        if (alone) in.set(0, first, last, to);
        if (m.has_shared()) shared_in.set(t, first, last, to);
    });
    route();
    if (!alone)
        worker.parallel_for(pairs, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t p = first; p < last; p++)
                in.set(p, 0, hidden, r.normed_.data() + b.routes.pair[p] / m.active * hidden);
        });
    float *gate_up = b.gate_up.data(), *shared_gate_up = gate_up + pairs * m.gate_up->rows;
    multiply_experts(m.gate_up, in, alone, gate_up, m.shared_gate_up, shared_in, shared_gate_up);
    activate_rows(pairs, m.down->columns, gate_up, inner, m.has_shared() ? tokens : 0, m.shared_down.columns,
                  shared_gate_up, shared_inner);
    float *outputs = b.outputs.data(), *shared = outputs + pairs * hidden;
    multiply_experts(m.down, inner, false, outputs, m.shared_down, shared_inner, shared);
    combine(outputs, m.has_shared() ? shared : nullptr);
}

// Logits of every token in float32, its experts and their weights, and the pairs by expert.
inline void StepWorker::route() {
    const Mixture& m = *layer().mixture;
    MixtureBuffers& b = r.mixture_;
    const std::int64_t hidden = model.hidden, rows = m.experts + 1;  // the last: the gate of the shared expert
    worker.parallel_for(batch.tokens * rows, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; i++) {
            const std::int64_t e = i % rows;
            const float* row = e < m.experts ? m.router + e * hidden : m.shared_gate;
            const float bias = m.bias && e < m.experts ? m.bias[e] : 0.0f;
            if (row) b.logits[i] = dot(row, r.normed_.data() + i / rows * hidden, hidden) + bias;
        }
    });
    worker.parallel_for(batch.tokens, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        ChoiceBuffers buffers;
        for (std::int64_t t = first; t < last; t++)
            choose(m, b.logits.data() + t * rows, buffers, b.routes.chosen.data() + t * m.active,
                   b.routes.weights.data() + t * m.active);
    });
    worker.parallel_for(1, Schedule::STATIC, [&](std::int64_t, std::int64_t) {
        b.routes.sort(batch.tokens * m.active, m.experts);
    });
}

// activation(gate) up of the experts' rows, and of the shared expert's, as inputs of their down products.
inline void StepWorker::activate_rows(std::int64_t rows, std::int64_t width, const float* from, const Activations& to,
                                      std::int64_t shared_rows, std::int64_t shared_width, const float* shared_from,
                                      const Activations& shared_to) {
    const std::int64_t grains = (width + GRAIN - 1) / GRAIN, shared_grains = (shared_width + GRAIN - 1) / GRAIN;
    const bool ungated = layer().mixture->gate_up->rows == width;
    scratch.resize(GRAIN);
    const auto fill = [&](std::int64_t row, std::int64_t grain, std::int64_t columns, const float* all,
                         const Activations& in) {
        const std::int64_t first = grain * GRAIN, last = std::min(first + GRAIN, columns);
        const std::int64_t gates = ungated ? 0 : columns;
        const float* gate = all + row * (gates + columns) + first;
        gated(gate, gate + gates, last - first, model.activation, scratch.data());
        in.set(row, first, last, scratch.data());
    };
    const std::int64_t own = rows * grains;
    worker.parallel_for(own + shared_rows * shared_grains, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < std::min(last, own); i++) fill(i / grains, i % grains, width, from, to);
        for (std::int64_t i = std::max(first, own) - own; i < last - own; i++)
            fill(i / shared_grains, i % shared_grains, shared_width, shared_from, shared_to);
    });
}

// The experts' weighted outputs, and the shared expert's, added to the residual stream.
inline void StepWorker::combine(const float* outputs, const float* shared) {
    const Mixture& m = *layer().mixture;
    const MixtureBuffers& b = r.mixture_;
    for_each_token(batch.tokens, model.hidden, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
        const float* weights = b.routes.weights.data() + t * m.active;
        const std::int64_t* places = b.routes.place.data() + t * m.active;
        const float gate = b.logits[t * (m.experts + 1) + m.experts];
        const float share = m.shared_gate ? 1.0f / (1.0f + std::exp(-gate)) : 1.0f;
        float* x = r.x_.data() + t * model.hidden;
        for (std::int64_t i = first; i < last; i += WIDTH) {
            F sum{};
            for (std::int64_t k = 0; k < m.active; k++)
                sum = fma(load(outputs + places[k] * model.hidden + i), broadcast(weights[k]), sum);
            if (shared) sum = fma(load(shared + t * model.hidden + i), broadcast(share), sum);
            store(x + i, load(x + i) + sum);
        }
    });
}

}  // namespace attar
