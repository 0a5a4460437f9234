// Tokens as a Linear takes them: rounded to bfloat16, float32, or int8 in groups, each with its scale and the
// sum of its codes.

#pragma once

#include <vector>

#include "linear.h"

namespace attar {

// (tokens, columns), prepared by `put`.
struct Taken {
    std::int64_t columns, groups;
    int group;     // 0: not quantized
    bool rounded;  // to bfloat16
    int zero;      // the weights' zero point, where all have the same; else 1
    float* values;
    std::uint16_t* halves;
    std::int8_t* codes;
    float* scales;
    std::int32_t* sums;  // of codes, times -zero

    // Inputs [first, last) of a token; `first` a multiple of the group, and of 16.
    void put(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) const {
        if (group) return quantize(token, first, last, from);
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
    void quantize(std::int64_t token, std::int64_t first, std::int64_t last, const float* from) const {
        for (std::int64_t start = first; start < last; start += group, from += group) {
            F peak{};
            for (int i = 0; i < group; i += WIDTH) peak = larger(peak, magnitude(load(from + i)));
            const float top = largest(peak), inverse = top > 0 ? 127.0f / top : 0.0f;
            I total{};
            for (int i = 0; i < group; i += WIDTH) {
                const I code = ints(round_even(load(from + i) * inverse));
                total += code;
                store_bytes(codes + token * columns + start + i, code);
            }
            const std::int64_t place = token * groups + start / group;
            scales[place] = top / 127.0f;
            std::int32_t whole = 0;
            for (int i = 0; i < WIDTH; i++) whole += total[i];
            sums[place] = -zero * whole;
        }
    }
};

// The room for them.
class Input {
public:
    void reserve(const Linear& linear, std::int64_t tokens, bool exact) {
        const std::int64_t whole = tokens * linear.columns + 64;
        if (linear.kind != BF16) {
            grow(codes_, whole);
            grow(scales_, tokens * linear.groups());
            grow(sums_, tokens * linear.groups());
        } else if (exact) {
            grow(values_, whole);
        } else {
            grow(halves_, whole);
        }
    }

    Taken taken(const Linear& linear, bool exact) {
        const bool bf16 = linear.kind == BF16;
        return {linear.columns, linear.groups(), bf16 ? 0 : linear.group, bf16 && !exact, linear.zero(),
                values_.data(), halves_.data(),  codes_.data(),           scales_.data(), sums_.data()};
    }

private:
    template <class T>
    static void grow(std::vector<T>& room, std::int64_t size) {
        if (std::int64_t(room.size()) < size) room.resize(size);
    }

    std::vector<float> values_, scales_;
    std::vector<std::uint16_t> halves_;
    std::vector<std::int8_t> codes_;
    std::vector<std::int32_t> sums_;
};

}  // namespace attar
