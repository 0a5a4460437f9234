// llama.cpp's block formats: their blocks and tiles, and the nearest code of a number at scale 1.
//
// A level is the value of a code: q - h, or T[q] (letters as in ggml_search.h).

#pragma once

#include "lanes.h"

// Common to formats of one and two levels of scales. C_LOW, C_HIGH: range of c - k; both 0: the scale is d itself.
template <int BLOCK, int TILE, bool MINIMUM, int C_LOW, int C_HIGH, int BIAS>
struct Format {
    static constexpr int block = BLOCK, tile = TILE, tiles = BLOCK / TILE;
    static constexpr bool minimum = MINIMUM;
    static constexpr bool two_levels = C_LOW != C_HIGH;
    static constexpr int c_low = C_LOW, c_high = C_HIGH, bias = BIAS;
};

// Uniform codes from LOW to HIGH.
template <int BLOCK, int TILE, int LOW, int HIGH, int ZERO, bool MINIMUM, int C_LOW = 0, int C_HIGH = 0,
          int BIAS = 0>
struct Uniform : Format<BLOCK, TILE, MINIMUM, C_LOW, C_HIGH, BIAS> {
    static constexpr float down = LOW - ZERO, up = HIGH - ZERO, step = 1.0f;
    static constexpr int count = HIGH - LOW + 1;
    static Lanes level(Lanes y) { return round_even(clamp(y, down, up)); }
    static Lanes code(Lanes y) { return round_even(clamp(y + float(ZERO), LOW, HIGH)); }
};

// The sixteen levels of IQ4_NL and IQ4_XS; ties go to the upper one.
template <int BLOCK, int C_LOW = 0, int C_HIGH = 0, int BIAS = 0>
struct NonUniform : Format<BLOCK, 32, false, C_LOW, C_HIGH, BIAS> {
    static constexpr float T[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
    static constexpr float down = T[0], up = T[15], step = T[1] - T[0];
    static constexpr int count = 16;
    static Lanes level(Lanes y) {
        Lanes result = all(T[0]);
        for (int q = 1; q < 16; q++) result = y >= 0.5f * (T[q - 1] + T[q]) ? all(T[q]) : result;
        return result;
    }
    static Lanes code(Lanes y) {
        Mask result{};
        for (int q = 1; q < 16; q++) result -= y >= 0.5f * (T[q - 1] + T[q]);
        return __builtin_convertvector(result, Lanes);
    }
};

using Q4_0 = Uniform<32, 32, 0, 15, 8, false>;
using Q4_1 = Uniform<32, 32, 0, 15, 0, true>;
using Q5_0 = Uniform<32, 32, 0, 31, 16, false>;
using Q5_1 = Uniform<32, 32, 0, 31, 0, true>;
using Q8_0 = Uniform<32, 32, -127, 127, 0, false>;
using Q2_K = Uniform<256, 16, 0, 3, 0, true, 0, 15>;
using Q3_K = Uniform<256, 16, 0, 7, 4, false, -32, 31, 32>;
using Q4_K = Uniform<256, 32, 0, 15, 0, true, 0, 63>;
using Q5_K = Uniform<256, 32, 0, 31, 0, true, 0, 63>;
using Q6_K = Uniform<256, 16, 0, 63, 32, false, -128, 127>;
using IQ4_NL = NonUniform<32>;
using IQ4_XS = NonUniform<256, -32, 31, 32>;
