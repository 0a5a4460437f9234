// Operations between products: RMS norm, rotary embedding, activation functions.

#pragma once

#include "model.h"

namespace attar {

// 1 / root of the mean square; n a multiple of 8.
static inline float inverse_rms(const float* x, std::int64_t n, float eps) {
    F total{};
    std::int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) total = fma(load(x + i), load(x + i), total);
    float squares = sum_lanes(total);
    for (; i < n; i++) squares += x[i] * x[i];
    return 1.0f / std::sqrt(squares / float(n) + eps);
}

// x factor weight, element by element
static inline void scale_by(const float* x, const float* weight, float factor, std::int64_t n, float* to) {
    std::int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(x + i) * factor * load(weight + i));
    for (; i < n; i++) to[i] = x[i] * factor * weight[i];
}

// Rotary embedding of a head, pairs (i, i + rotary / 2). `angles`: cosines, then sines.
static inline void rotate(float* head, const float* angles, std::int64_t rotary) {
    const std::int64_t half = rotary / 2;
    for (std::int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half], c = angles[i], s = angles[i + half];
        head[i] = one::fma(-b, s, a * c);
        head[i + half] = one::fma(a, s, b * c);
    }
}

static inline F activate(F gate, std::int32_t kind) {
    if (kind == SILU) return gate / (1.0f + exp_(-gate));
    if (kind == RELU) return maximum(gate, F{});
    const F inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanh_(inner));
}

// gpt-oss: both sides are clamped, and up is moved by 1.
static inline F clamped_swiglu(const F& gate, const F& up) {
    constexpr float LIMIT = 7.0f, ALPHA = 1.702f;
    const F g = minimum(gate, broadcast(LIMIT));
    const F u = minimum(maximum(up, broadcast(-LIMIT)), broadcast(LIMIT));
    return g / (1.0f + exp_(g * -ALPHA)) * (u + 1.0f);
}

static inline F gated(const F& gate, const F& up, std::int32_t kind) {
    return kind == CLAMPED_SWIGLU ? clamped_swiglu(gate, up) : activate(gate, kind) * up;
}

// activation(gate) up; where up is the gate itself, relu makes the squared relu
static inline void gated(const float* gate, const float* up, std::int64_t n, std::int32_t kind, float* to) {
    std::int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(to + i, gated(load(gate + i), load(up + i), kind));
    for (; i < n; i++) to[i] = gated(broadcast(gate[i]), broadcast(up[i]), kind)[0];
}

// cap tanh(x / cap)
static inline void soft_cap(float* x, std::int64_t n, float cap) {
    std::int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(x + i, tanh_(load(x + i) / cap) * cap);
    for (; i < n; i++) x[i] = tanh_(broadcast(x[i] / cap))[0] * cap;
}

}  // namespace attar
