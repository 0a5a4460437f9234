// llama.cpp's block formats: how many weights share what, and the code nearest to a number on the unit scale.
//
// A level is what a code stands for: q - h, or T[q] (the letters are those of ggml_search.cpp).

#pragma once

#include "lanes.h"

// What formats of one and of two levels of scales have in common. C_LOW, C_HIGH: ends of c - k; both 0: the
// scale is d itself.
template <int BLOCK, int TILE, bool MINIMUM, int C_LOW, int C_HIGH, int BIAS>
struct Format {
    static constexpr int block = BLOCK, tile = TILE, tiles = BLOCK / TILE;
    static constexpr bool minimum = MINIMUM;
    static constexpr bool two_levels = C_LOW != C_HIGH;
    static constexpr int c_low = C_LOW, c_high = C_HIGH, bias = BIAS;
};

// Codes low to high a step of 1 apart.
template <int BLOCK, int TILE, int LOW, int HIGH, int ZERO, bool MINIMUM, int C_LOW = 0, int C_HIGH = 0,
          int BIAS = 0>
struct Even : Format<BLOCK, TILE, MINIMUM, C_LOW, C_HIGH, BIAS> {
    static constexpr float down = LOW - ZERO, up = HIGH - ZERO, step = 1.0f;
    static constexpr int count = HIGH - LOW + 1;
    static Lanes level(Lanes y) { return round_even(clamp(y, down, up)); }
    static Lanes code(Lanes y) { return round_even(clamp(y + float(ZERO), LOW, HIGH)); }
};

// The sixteen levels of IQ4_NL and IQ4_XS; half way between two of them belongs to the upper one.
template <int BLOCK, int C_LOW = 0, int C_HIGH = 0, int BIAS = 0>
struct Uneven : Format<BLOCK, 32, false, C_LOW, C_HIGH, BIAS> {
    static constexpr float T[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
    static constexpr float down = T[0], up = T[15], step = T[1] - T[0];
    static constexpr int count = 16;
    static Lanes level(Lanes y) {
        Lanes found = all(T[0]);
        for (int q = 1; q < 16; q++) found = y >= 0.5f * (T[q - 1] + T[q]) ? all(T[q]) : found;
        return found;
    }
    static Lanes code(Lanes y) {
        Mask found{};
        for (int q = 1; q < 16; q++) found -= y >= 0.5f * (T[q - 1] + T[q]);
        return __builtin_convertvector(found, Lanes);
    }
};

using Q4_0 = Even<32, 32, 0, 15, 8, false>;
using Q4_1 = Even<32, 32, 0, 15, 0, true>;
using Q5_0 = Even<32, 32, 0, 31, 16, false>;
using Q5_1 = Even<32, 32, 0, 31, 0, true>;
using Q8_0 = Even<32, 32, -127, 127, 0, false>;
using Q2_K = Even<256, 16, 0, 3, 0, true, 0, 15>;
using Q3_K = Even<256, 16, 0, 7, 4, false, -32, 31, 32>;
using Q4_K = Even<256, 32, 0, 15, 0, true, 0, 63>;
using Q5_K = Even<256, 32, 0, 31, 0, true, 0, 63>;
using Q6_K = Even<256, 16, 0, 63, 32, false, -128, 127>;
using IQ4_NL = Uneven<32>;
using IQ4_XS = Uneven<256, -32, 31, 32>;
