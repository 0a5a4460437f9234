// Activations as a Linear multiplies them: float32, bfloat16, or integer codes in groups, each group with its scale
// and the sum of its codes.
//
// A 16-bit code is  c = 256 high + low,  two planes of int8, so that byte dot products serve both. Every pair of
// bytes is a code; the largest whose negative is one too is 127 * 256 + 127, so a number is rounded by at most its
// group's peak / 65278.

#pragma once

#include <vector>

#include "linear.h"

namespace attar {

// (tokens, columns), filled by `set`.
struct Activations {
    std::int64_t columns, groups;
    int group;     // 0: not quantized
    int planes;    // of the codes: 1 (int8) or 2 (int16)
    bool rounded;  // to bfloat16
    bool sparse;   // the weight is 2:4: rounded activations are kept as float32
    int zeros;     // how the weights' zero points are stored
    int zero;      // the weights' zero point, where all have the same
    float* fp32;
    std::uint16_t* bf16;
    std::int64_t tokens;  // capacity
    std::int8_t* codes;   // (groups, planes, tokens, group), the high plane first
    float* scales;        // (groups, tokens), as are sums and offsets
    std::int32_t* sums;   // of codes, times -zero; where weights have no zero points of their own
    float* offsets;       // what zero points are multiplied by: -sum, or -sum times the scale for products s z

    // Distance between the planes of a token's codes, and between groups.
    std::int64_t plane() const { return tokens * group; }
    std::int64_t step() const { return planes * plane(); }
    const std::int8_t* at(std::int64_t g, std::int64_t token) const { return codes + g * step() + token * group; }

    // The same from a token on.
    Activations from(std::int64_t token) const {
        Activations rest = *this;
        rest.fp32 += token * columns, rest.bf16 += token * columns, rest.codes += token * group;
        rest.scales += token, rest.sums += token, rest.offsets += token;
        return rest;
    }

    // Inputs [first, last) of a token; `first` a multiple of the group, and of 16.
    void set(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) const {
        if (group && planes == 2) return quantize<2>(token, first, last, from);
        if (group) return quantize<1>(token, first, last, from);
        const std::int64_t offset = token * columns + first, count = last - first;
        if (!rounded) {
            std::memcpy(fp32 + offset, from, count * sizeof(float));
            return;
        }
        std::int64_t i = 0;
        if (sparse) {
            std::uint16_t bits[WIDTH];
            for (; i < count; i += WIDTH) {
                store_bf16(bits, load(from + i));
                store(fp32 + offset + i, load_bf16(bits));
            }
            return;
        }
        for (; i + WIDTH <= count; i += WIDTH) store_bf16(bf16 + offset + i, load(from + i));
        for (; i < count; i++) bf16[offset + i] = to_bf16(from[i]);
    }

private:
    static constexpr float TINY = 1e-30f;  // a group whose peak is not above it counts as zeros

    template <int PLANES>
    void quantize(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) const {
        constexpr float TOP = PLANES == 2 ? 127 * 257 : 127;
        for (std::int64_t start = first; start < last; start += group, from += group) {
            F peak{};
            for (int i = 0; i < group; i += WIDTH) peak = maximum(peak, absolute(load(from + i)));
            const float top = largest_lane(peak), inverse = top > TINY ? TOP / top : 0.0f;
            std::int8_t* high = codes + start / group * step() + token * group;
            I total{};
            for (int i = 0; i < group; i += WIDTH) {
                const I code = to_ints(round_even(load(from + i) * inverse));
                const I upper = PLANES == 2 ? (code + 128) >> 8 : code;
                total += code;
                store_bytes(high + i, upper);
                if (PLANES == 2) store_bytes(high + plane() + i, code - (upper << 8));
            }
            const std::int64_t index = start / group * tokens + token;
            scales[index] = top / TOP;
            std::int32_t sum = 0;
            for (int i = 0; i < WIDTH; i++) sum += total[i];
            if (zeros == MIDDLE)
                sums[index] = -zero * sum;
            else
                offsets[index] = zeros == POINTS ? float(-sum) : float(-sum) * scales[index];
        }
    }
};

// Their memory, reused from step to step.
class ActivationBuffer {
public:
    // Quantized tokens are padded to whole blocks of the matrix unit (amx.h).
    void reserve(const Linear& linear, std::int64_t tokens, int bits) {
        const std::int64_t size = tokens * linear.columns + 64;
        if (linear.kind != BF16) {
            tokens_ = tokens <= 8 ? tokens : (tokens + 15) / 16 * 16;
            const std::int64_t constants = tokens_ * linear.groups();
            grow(codes_, tokens_ * bits / 8 * linear.columns + LINE);
            grow(scales_, constants);
            if (linear.zeros == MIDDLE) grow(sums_, constants);
            if (linear.zeros != MIDDLE) grow(offsets_, constants);
        } else if (bits == 16 || linear.sparse) {
            grow(fp32_, size);
        } else {
            grow(bf16_, size);
        }
    }

    Activations view(const Linear& linear, int bits) {
        const bool bf16 = linear.kind == BF16;
        return {linear.columns,    linear.groups(), bf16 ? 0 : linear.group, bits / 8,
                bf16 && bits < 16, linear.sparse != 0, linear.zeros, linear.zero(), fp32_.data(),
                bf16_.data(),      tokens_,         aligned(),               scales_.data(),
                sums_.data(),      offsets_.data()};
    }

private:
    static constexpr std::uintptr_t LINE = 64;  // bytes of a cache line

    std::int8_t* aligned() { return codes_.data() + (-std::uintptr_t(codes_.data())) % LINE; }

    template <class T>
    static void grow(std::vector<T>& buffer, std::int64_t size) {
        if (std::int64_t(buffer.size()) < size) buffer.resize(size);
    }

    std::int64_t tokens_ = 0;
    std::vector<float> fp32_, scales_, offsets_;
    std::vector<std::uint16_t> bf16_;
    std::vector<std::int8_t> codes_;
    std::vector<std::int32_t> sums_;
};

}  // namespace attar
