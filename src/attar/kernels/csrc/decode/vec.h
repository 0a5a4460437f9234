// Sixteen numbers of 32 bits, whatever the machine's vectors are: GCC's and clang's vector extension splits
// them where it must. A packed weight has one output row in each lane, so no sum ever crosses lanes but in
// norms.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace attar {

constexpr int WIDTH = 16;

using F = float __attribute__((vector_size(64)));
using I = std::int32_t __attribute__((vector_size(64)));
using H = std::uint16_t __attribute__((vector_size(32)));
using B = std::int8_t __attribute__((vector_size(16)));
using Shorts = std::int16_t __attribute__((vector_size(64)));
using LooseBytes = std::int8_t __attribute__((vector_size(32), aligned(1), may_alias));
using LooseF = float __attribute__((vector_size(64), aligned(1), may_alias));
using LooseI = std::int32_t __attribute__((vector_size(64), aligned(1), may_alias));
using LooseH = std::uint16_t __attribute__((vector_size(32), aligned(1), may_alias));
using LooseB = std::int8_t __attribute__((vector_size(16), aligned(1), may_alias));

static inline F load(const float* from) { return *(const LooseF*)from; }
static inline void store(float* to, F value) { *(LooseF*)to = value; }
static inline I load_ints(const void* from) { return *(const LooseI*)from; }
static inline F all(float value) { return F{} + value; }
static inline I all_ints(std::int32_t value) { return I{} + value; }
static inline F floats(I value) { return __builtin_convertvector(value, F); }
static inline F floats(F value) { return value; }
static inline std::int32_t word(const void* from) {
    std::int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}
static inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 3); }

// a b + c
static inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline F larger(F a, F b) { return a > b ? a : b; }
static inline F smaller(F a, F b) { return a < b ? a : b; }
static inline F magnitude(F a) { return (F)((I)a & 0x7fffffff); }

// Half to even, for |a| < 2^22.
static inline F round_even(F a) { return (a + 0x1.8p23f) - 0x1.8p23f; }

static inline float sum(F a) {
    float parts[WIDTH], total = 0;
    store(parts, a);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    total = parts[0];
    return total;
}

static inline float largest(F a) {
    float parts[WIDTH];
    store(parts, a);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] = parts[i] > parts[i + step] ? parts[i] : parts[i + step];
    return parts[0];
}

// Sixteen bfloat16 as floats.
static inline F from_bf16(const void* from) {
    return (F)(__builtin_convertvector(*(const LooseH*)from, I) << 16);
}

// Rounded half to even; the bits of a bfloat16. Not for NaN.
static inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline void store_bf16(void* to, F value) {
    const I bits = (I)value;
    *(LooseH*)to = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, H);
}

// Sixteen float16, which are finite, as floats.
static inline F from_half(const void* from) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    union { F all; __m256 half[2]; } found;
    for (int i = 0; i < 2; i++) found.half[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + i));
    return found.all;
#else
    const I bits = __builtin_convertvector(*(const LooseH*)from, I);
    const F size = (F)((bits & 0x7fff) << 13) * 0x1p112f;
    return (F)((I)size | (bits & 0x8000) << 16);
#endif
}

// Rounded to float16, half to even; what is beyond it becomes its largest.
static inline void store_half(void* to, F value) {
    const F inside = smaller(larger(value, all(-65504.0f)), all(65504.0f));
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)inside, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    union { F all; __m256 half[2]; } parts{inside};
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i*)to + i, _mm256_cvtps_ph(parts.half[i], _MM_FROUND_TO_NEAREST_INT));
#else
    const F size = magnitude(inside);
    const I bits = (I)size, normal = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    const I small = __builtin_convertvector(round_even(size * 0x1p24f), I);  // multiples of 2^-24
    const I found = (size < 0x1p-14f ? small : normal - (112 << 10)) | ((I)inside >> 16 & 0x8000);
    *(LooseH*)to = __builtin_convertvector(found, H);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool DOT_PRODUCTS = true;
#else
constexpr bool DOT_PRODUCTS = false;
#endif

// Lane by lane, the sum of four unsigned bytes of w times the four signed bytes x, added to total. SMALL: no
// byte of w is above 15.
template <bool SMALL>
static inline I dot4(I total, I w, std::int32_t x) {
#if defined(__AVX512VNNI__)
    return (I)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
    union { I all; __m256i half[2]; } in, out;
    in.all = w, out.all = total;
    for (int i = 0; i < 2; i++) out.half[i] = _mm256_dpbusd_avx_epi32(out.half[i], in.half[i], _mm256_set1_epi32(x));
    return out.all;
#elif defined(__AVX2__)
    // Pairs are summed in 16 bits, which seven bits of a weight never overflow; the eighth goes by itself.
    union { I all; __m256i half[2]; } in, out;
    in.all = w;
    const __m256i signs = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; i++) {
        const __m256i low = SMALL ? in.half[i] : _mm256_and_si256(in.half[i], _mm256_set1_epi8(127));
        __m256i found = _mm256_madd_epi16(_mm256_maddubs_epi16(low, signs), ones);
        if (!SMALL) {
            const __m256i top = _mm256_and_si256(_mm256_srli_epi16(in.half[i], 7), _mm256_set1_epi8(1));
            const __m256i more = _mm256_madd_epi16(_mm256_maddubs_epi16(top, signs), ones);
            found = _mm256_add_epi32(found, _mm256_slli_epi32(more, 7));
        }
        out.half[i] = found;
    }
    return total + out.all;
#else
    for (int i = 0; i < 4; i++) total += ((w >> 8 * i) & 255) * std::int32_t(std::int8_t(x >> 8 * i));
    return total;
#endif
}

// 32 signed bytes as int16, two in each lane.
static inline I widened(const void* from) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#else
    return (I)__builtin_convertvector(*(const LooseBytes*)from, Shorts);
#endif
}

// Lane by lane, the two int16 of w times the two of x, added to total.
static inline I dot_shorts(I total, I w, std::int32_t x) {
#if defined(__AVX512VNNI__)
    return (I)_mm512_dpwssd_epi32((__m512i)total, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    union { I all; __m256i half[2]; } in, out;
    in.all = w;
    for (int i = 0; i < 2; i++) out.half[i] = _mm256_madd_epi16(in.half[i], _mm256_set1_epi32(x));
    return total + out.all;
#else
    return total + (w << 16 >> 16) * std::int32_t(std::int16_t(x)) + (w >> 16) * (x >> 16);
#endif
}

// Lane by lane, the two bfloat16 of w times the two of x, added to total.
static inline F dot2(F total, I w, std::int32_t x) {
#if defined(__AVX512BF16__)
    return (F)_mm512_dpbf16_ps((__m512)total, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else
    const F even = (F)all_ints(x << 16), odd = (F)all_ints(x & ~0xffff);
    return fma((F)(w & ~0xffff), odd, fma((F)(w << 16), even, total));
#endif
}

// e^a, to 2e-7 of its value; 0 below -87.
static inline F exponential(F a) {
    const F inside = smaller(larger(a, all(-87.3f)), all(88.3f));
    const F n = round_even(inside * 1.44269504f);
    const F r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), inside));
    F p = all(1.38888889e-3f);
    p = fma(p, r, all(8.33333333e-3f));
    p = fma(p, r, all(4.16666667e-2f));
    p = fma(p, r, all(1.66666667e-1f));
    p = fma(p, r, all(0.5f));
    p = fma(p, r, all(1.0f));
    p = fma(p, r, all(1.0f));
    const F found = (F)((I)p + (__builtin_convertvector(n, I) << 23));
    return a < -87.3f ? F{} : found;
}

static inline F tangent(F a) {
    const F twice = exponential(magnitude(a) * -2.0f);
    const F size = (1.0f - twice) / (1.0f + twice);
    return (F)((I)size | ((I)a & INT32_MIN));
}

}  // namespace attar
