// A vector with one number for each of LANES rows of a matrix, as wide as the machine's registers.
//
// GCC's and clang's vector extension has + - * /, comparisons and `mask ? a : b` per lane. No function mixes lanes:
// a row's result depends neither on other rows nor on the width of vectors.

#pragma once

#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using Lanes = float __attribute__((vector_size(4 * LANES)));
using Mask = std::int32_t __attribute__((vector_size(4 * LANES)));  // -1: yes, 0: no
using Bytes = std::int8_t __attribute__((vector_size(LANES)));

static inline Lanes all(float value) { return Lanes{} + value; }

// b where a is NaN. Compilers emit two instructions for `a < b ? a : b` where the machine has one.
#if defined(__AVX512F__)
static inline Lanes minimum(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)a, (__m512)b); }
static inline Lanes maximum(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
static inline Lanes minimum(Lanes a, Lanes b) { return (Lanes)_mm256_min_ps((__m256)a, (__m256)b); }
static inline Lanes maximum(Lanes a, Lanes b) { return (Lanes)_mm256_max_ps((__m256)a, (__m256)b); }
#else
static inline Lanes minimum(Lanes a, Lanes b) { return a < b ? a : b; }
static inline Lanes maximum(Lanes a, Lanes b) { return a > b ? a : b; }
#endif

// a - b c, rounded once. In a b - c d compilers may fuse either product, depending on the processor, and codes of
// nearly equal error would depend on it: this chooses.
static inline Lanes minus(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fnmadd_ps((__m512)b, (__m512)c, (__m512)a);
#elif defined(__FMA__)
    return (Lanes)_mm256_fnmadd_ps((__m256)b, (__m256)c, (__m256)a);
#elif defined(__ARM_NEON)
    return (Lanes)vfmsq_f32((float32x4_t)a, (float32x4_t)b, (float32x4_t)c);
#else
    return a - b * c;
#endif
}

// low where a is NaN
static inline Lanes clamp(Lanes a, float low, float high) { return minimum(maximum(a, all(low)), all(high)); }

// Half to even, for |a| < 2^22: adding 1.5 * 2^23 leaves no bit for a fraction.
static inline Lanes round_even(Lanes a) { return (a + 0x1.8p23f) - 0x1.8p23f; }

static inline Lanes magnitude(Lanes a) { return (Lanes)((Mask)a & 0x7fffffff); }

static inline Lanes with_sign(Lanes a, Lanes sign) {
    return (Lanes)((Mask)magnitude(a) | ((Mask)sign & INT32_MIN));
}

// Rounded to float16, half to even; 65504 where it would be infinite, 0 where a is NaN.
static inline Lanes to_half(Lanes a) {
    const Lanes size = clamp(magnitude(a), 0.0f, 65504.0f);
    const Mask bits = (Mask)size;
    const Lanes normal = (Lanes)((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff);
    const Lanes subnormal = (size + 0.5f) - 0.5f;  // multiples of 2^-24
    return with_sign(size < 0x1p-14f ? subnormal : normal, a);
}

// The same, but never 0.
static inline Lanes to_half_scale(Lanes a) {
    return with_sign(to_half(maximum(magnitude(a), all(0x1p-24f))), a);
}
