// Tokens as a Linear takes them: rounded to bfloat16, float32, or to integers in groups, each with its scale and
// the sum of its codes.
//
// A code of 16 bits is  c = 256 high + low,  two planes of int8, so that the instructions for bytes serve both.
// Of all radices this one wastes nothing: every pair of bytes is a code, the largest that has its negative is
// 127 * 256 + 127, and a number is rounded by at most its group's peak / 65278.

#pragma once

#include <vector>

#include "linear.h"

namespace attar {

// (tokens, columns), prepared by `put`.
struct Taken {
    std::int64_t columns, groups;
    int group;     // 0: not quantized
    int planes;    // of codes: 1 (int8) or 2 (int16)
    bool rounded;  // to bfloat16
    int zeros;     // how the weights' zero points are stored
    int zero;      // the weights' zero point, where all have the same
    float* values;
    std::uint16_t* halves;
    std::int64_t tokens;  // that there is room for
    std::int8_t* codes;   // (groups, planes, tokens, group), the high plane first
    float* scales;        // (groups, tokens), as the next two
    std::int32_t* sums;   // of codes, times -zero; of weights without zero points
    float* offsets;       // what zero points are multiplied by: -sum, or -sum times the scale for products s z

    // From a token's codes of one plane to the other, and of one group to the next.
    std::int64_t plane() const { return tokens * group; }
    std::int64_t step() const { return planes * plane(); }
    const std::int8_t* at(std::int64_t g, std::int64_t token) const { return codes + g * step() + token * group; }

    // Inputs [first, last) of a token; `first` a multiple of the group, and of 16.
    void put(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) const {
        if (group && planes == 2) return quantize<2>(token, first, last, from);
        if (group) return quantize<1>(token, first, last, from);
        const std::int64_t place = token * columns + first, count = last - first;
        if (!rounded) {
            std::memcpy(values + place, from, count * sizeof(float));
            return;
        }
        std::int64_t i = 0;
        for (; i + WIDTH <= count; i += WIDTH) store_bf16(halves + place + i, load(from + i));
        for (; i < count; i++) halves[place + i] = to_bf16(from[i]);
    }

private:
    static constexpr float TINY = 1e-30f;  // a group of numbers below it counts as zeros

    template <int PLANES>
    void quantize(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) const {
        constexpr float TOP = PLANES == 2 ? 127 * 257 : 127;
        for (std::int64_t start = first; start < last; start += group, from += group) {
            F peak{};
            for (int i = 0; i < group; i += WIDTH) peak = larger(peak, magnitude(load(from + i)));
            const float top = largest(peak), inverse = top > TINY ? TOP / top : 0.0f;
            std::int8_t* high = codes + start / group * step() + token * group;
            I total{};
            for (int i = 0; i < group; i += WIDTH) {
                const I code = ints(round_even(load(from + i) * inverse));
                const I upper = PLANES == 2 ? (code + 128) >> 8 : code;
                total += code;
                store_bytes(high + i, upper);
                if (PLANES == 2) store_bytes(high + plane() + i, code - (upper << 8));
            }
            const std::int64_t place = start / group * tokens + token;
            scales[place] = top / TOP;
            std::int32_t whole = 0;
            for (int i = 0; i < WIDTH; i++) whole += total[i];
            if (zeros == MIDDLE)
                sums[place] = -zero * whole;
            else
                offsets[place] = zeros == POINTS ? float(-whole) : float(-whole) * scales[place];
        }
    }
};

// The room for them.
class Input {
public:
    // Of quantized tokens a whole block of the matrix unit (amx.h), which reads more than there are.
    void reserve(const Linear& linear, std::int64_t tokens, int bits) {
        const std::int64_t whole = tokens * linear.columns + 64;
        if (linear.kind != BF16) {
            tokens_ = tokens < 8 ? tokens : (tokens + 15) / 16 * 16;
            const std::int64_t constants = tokens_ * linear.groups();
            grow(codes_, tokens_ * bits / 8 * linear.columns + LINE);
            grow(scales_, constants);
            if (linear.zeros == MIDDLE) grow(sums_, constants);
            if (linear.zeros != MIDDLE) grow(offsets_, constants);
        } else if (bits == 16) {
            grow(values_, whole);
        } else {
            grow(halves_, whole);
        }
    }

    Taken taken(const Linear& linear, int bits) {
        const bool bf16 = linear.kind == BF16;
        return {linear.columns,    linear.groups(), bf16 ? 0 : linear.group, bits / 8,
                bf16 && bits < 16, linear.zeros,    linear.zero(),           values_.data(),
                halves_.data(),    tokens_,         aligned(),               scales_.data(),
                sums_.data(),      offsets_.data()};
    }

private:
    static constexpr std::uintptr_t LINE = 64;  // bytes, of the cache

    std::int8_t* aligned() { return codes_.data() + (-std::uintptr_t(codes_.data())) % LINE; }

    template <class T>
    static void grow(std::vector<T>& room, std::int64_t size) {
        if (std::int64_t(room.size()) < size) room.resize(size);
    }

    std::int64_t tokens_ = 0;
    std::vector<float> values_, scales_, offsets_;
    std::vector<std::uint16_t> halves_;
    std::vector<std::int8_t> codes_;
    std::vector<std::int32_t> sums_;
};

}  // namespace attar
