// Linear recurrences of heads behind a short convolution, in the place of attention or beside it: Mamba 2 (Dao and Gu
// 2024, arXiv 2405.21060) and the gated delta rule (Yang et al. 2024, arXiv 2412.06464). Of a token, with a head's
// state S of (keys, values) numbers:
//
//     S <- a S,   u = b v  or, with the delta rule,  b (v - S^T k),   S <- S + k u^T,   o = S^T q + D v
//
//     Mamba 2           a = e^(-A b), b = softplus(d + bias); k, q of a group of heads; y = norm(o silu(z)),
//                       or norm(o) silu(z), or o silu(z)
//     gated delta rule  a = e^(-A softplus(d + bias)), b = sigmoid(c); k = k / |k|, q = q / (|q| root of keys) of a
//                       group of heads; y = norm(o) silu(z) of each head
//
// where q, k, v = silu(convolution) of the channels that `first` makes, z is the gate, d and c are the steps.
//
// The columns of S do not know each other: a task takes sixteen, which stay in the first cache, through all tokens of
// a span. Form by chunks (2405.21060, section 6; the WY form of the delta rule) is for matrix units: for C tokens it
// takes 3 + 1 / C products for every number of S, and those among the tokens, where this takes four. So a token
// is computed the same, bit by bit, in whatever batch, chunk or draft it comes.
//
// A state is not moved over tokens that may be rejected: their inputs are kept, and those that stay come again before
// the tokens of the next span (`again`).

#pragma once

#include <cmath>

#include "step.h"

namespace attar {

static inline F silu(const F& x) { return x / (1.0f + exp_(-x)); }
static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x / root of its squares, times `factor`
static inline void to_length(float* x, std::int64_t n, float factor) {
    const float inverse = factor / std::sqrt(dot(x, x, n) + 1e-6f);
    for (std::int64_t i = 0; i < n; i += WIDTH) store(x + i, load(x + i) * inverse);
}

// Sixteen columns of S (keys, 16) over one token; o without D v. UNROLL sums, as one waits for itself.
constexpr int UNROLL = 4;
static inline F advance(float* S, std::int64_t keys, bool delta, const float* q, const float* k, const F& v, float a,
                        float b) {
    F u = v, o[UNROLL] = {};
    if (delta) {
        F seen[UNROLL] = {};
        for (std::int64_t i = 0; i < keys; i += UNROLL)
            for (int j = 0; j < UNROLL; j++)
                seen[j] = fma(load(S + (i + j) * WIDTH), broadcast(k[i + j]), seen[j]);
        u = v - ((seen[0] + seen[1]) + (seen[2] + seen[3])) * a;
    }
    u = u * b;
    for (std::int64_t i = 0; i < keys; i += UNROLL)
        for (int j = 0; j < UNROLL; j++) {
            float* row = S + (i + j) * WIDTH;
            const F s = fma(broadcast(k[i + j]), u, load(row) * a);
            store(row, s);
            o[j] = fma(s, broadcast(q[i + j]), o[j]);
        }
    return (o[0] + o[1]) + (o[2] + o[3]);
}

// The products of the residual stream, before attention adds to it.
inline void StepWorker::project(const Recurrence& m) {
    for (const auto& [linear, to] : {std::pair(&m.first, &r.projected_), std::pair(&m.steps, &r.steps_)}) {
        if (!linear->rows) continue;
        const Activations in = r.qkv_input_.view(*linear, model.bits);
        norm(layer().before_attention, batch.tokens, nullptr, in);
        multiply(*linear, in, batch.tokens, to->data(), linear->rows, false);
    }
}

inline void StepWorker::recur(const Recurrence& m) {
    const std::int64_t walked = r.walk_.back();
    worker.parallel_for(walked * m.groups, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t task = first; task < last; task++) mix(m, task / m.groups, task % m.groups);
    });
    worker.parallel_for(batch.kept, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t n = first; n < last; n++) {
            float* to = batch.inputs + (n * model.stateful + layer().state_index) * model.carried;
            std::copy_n(channels_of(m, batch.keep[n]), m.channels(), to);
            std::copy_n(steps_of(m, batch.keep[n]), m.step_numbers(), to + m.channels());
        }
    });
    const std::int64_t slices = m.heads * m.values / WIDTH;
    worker.parallel_for(batch.spans * slices, Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t task = first; task < last; task++) walk(m, task / slices, task % slices);
    });
    const Activations out = r.out_input_.view(m.out, model.bits);
    scratch.resize(m.heads * m.values);
    for_each_token(batch.tokens, m.heads * m.values, [&](std::int64_t t, std::int64_t first, std::int64_t last) {
        normed(m, t, first, last, scratch.data());
        out.set(t, first, last, scratch.data());
    });
    multiply_add(m.out, out, nullptr);
}

inline const float* StepWorker::channels_of(const Recurrence& m, std::int64_t t) const {
    return r.projected_.data() + t * m.first.rows + m.channels_at;
}
inline const float* StepWorker::steps_of(const Recurrence& m, std::int64_t t) const {
    return (m.steps.rows ? r.steps_.data() + t * m.steps.rows : r.projected_.data() + t * m.first.rows) + m.steps_at;
}

// One of the tokens that a span runs, those before it first, and one group of its heads: the convolution, a and b.
inline void StepWorker::mix(const Recurrence& m, std::int64_t row, std::int64_t group) {
    const std::int64_t span = std::upper_bound(r.walk_.begin(), r.walk_.end(), row) - r.walk_.begin() - 1;
    const std::int64_t again = batch.again[span], index = row - r.walk_[span], past = model.width - 1;
    const std::int64_t stride = model.stateful * model.carried;
    const float* history = (const float*)batch.history[span];
    const std::int64_t begin = layer().state_index * model.carried;
    const auto earlier = [&](std::int64_t at) { return history + (at + past) * stride + begin; };
    const auto token = [&](std::int64_t at) { return batch.first[span] + at - again; };
    const auto convolve = [&](std::int64_t first, std::int64_t count, float* to) {
        for (std::int64_t i = first; i < first + count; i += WIDTH) {
            F sum = layer().conv_bias ? load(layer().conv_bias + i) : F{};
            for (std::int64_t j = 0; j < model.width; j++) {
                const std::int64_t at = index + j - past;
                if (at < again && !history) continue;
                const float* x = at < again ? earlier(at) : channels_of(m, token(at));
                sum = fma(load(layer().kernel + j * m.channels() + i), load(x + i), sum);
            }
            store(to + i, silu(sum));
        }
    };
    float* to = r.mixed_.data() + row * (m.channels() + 2 * m.heads);
    const std::int64_t heads = m.heads / m.groups, head = group * heads;
    const std::int64_t q = m.queries_at + group * m.keys, k = m.keys_at + group * m.keys;
    convolve(q, m.keys, to);
    convolve(k, m.keys, to);
    convolve(m.values_at + head * m.values, heads * m.values, to);
    if (m.delta) {
        to_length(to + q, m.keys, 1.0f / std::sqrt(float(m.keys)));
        to_length(to + k, m.keys, 1.0f);
    }
    const float* steps = index < again ? earlier(index) + m.channels() : steps_of(m, token(index));
    float *a = to + m.channels(), *b = a + m.heads;
    for (std::int64_t h = head; h < head + heads; h++) {
        const float step = std::min(std::max(softplus(steps[h] + m.step_bias[h]), m.least), m.most);
        a[h] = std::exp(-m.decay[h] * step);
        b[h] = m.delta ? 1.0f / (1.0f + std::exp(-steps[m.heads + h])) : step;
    }
}

// Sixteen columns of a head's state, through the tokens of a span.
inline void StepWorker::walk(const Recurrence& m, std::int64_t span, std::int64_t slice) {
    const std::int64_t again = batch.again[span], tokens = again + batch.count[span];
    const std::int64_t head = slice * WIDTH / m.values, group = head / (m.heads / m.groups), width = m.heads * m.values;
    const std::int64_t numbers = m.keys * WIDTH, at = (layer().state_index * width / WIDTH + slice) * numbers;
    columns.resize(numbers);
    const float* before = (const float*)batch.states[span];
    if (before)
        std::copy_n(before + at, numbers, columns.data());
    else
        std::fill_n(columns.data(), numbers, 0.0f);
    std::int64_t save = batch.save[span];
    for (std::int64_t i = 0; i <= tokens; i++) {
        for (; save < batch.save[span + 1] && batch.save_after[save] == i; save++)
            std::copy_n(columns.data(), numbers, (float*)batch.save_to[save] + at);
        if (i == tokens) return;
        const float* row = r.mixed_.data() + (r.walk_[span] + i) * (m.channels() + 2 * m.heads);
        const float *q = row + m.queries_at + group * m.keys, *k = row + m.keys_at + group * m.keys;
        const F v = load(row + m.values_at + slice * WIDTH);
        const float a = row[m.channels() + head], b = row[m.channels() + m.heads + head];
        F o = advance(columns.data(), m.keys, m.delta, q, k, v, a, b);
        if (i < again) continue;
        if (m.skip) o = fma(v, broadcast(m.skip[head]), o);
        const std::int64_t t = batch.first[span] + i - again;
        if (m.gated_norm) o = o * silu(load(r.projected_.data() + t * m.first.rows + m.gate_at + slice * WIDTH));
        store(r.recurred_.data() + t * width + slice * WIDTH, o);
    }
}

// Columns [first, last) of y.
inline void StepWorker::normed(const Recurrence& m, std::int64_t t, std::int64_t first, std::int64_t last, float* to) {
    const float* o = r.recurred_.data() + t * m.heads * m.values;
    const float* gate = r.projected_.data() + t * m.first.rows + m.gate_at;
    for (std::int64_t i = first; i < last;) {
        const std::int64_t group = i / m.norm_size * m.norm_size, end = std::min(last, group + m.norm_size);
        const float inverse = m.norm ? inverse_rms(o + group, m.norm_size, m.eps) : 1.0f;
        for (; i < end; i += WIDTH) {
            const F y = m.norm ? load(o + i) * inverse * load(m.norm + i) : load(o + i);
            store(to + i - first, m.gated_norm ? y : y * silu(load(gate + i)));
        }
    }
}

}  // namespace attar
