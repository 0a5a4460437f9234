// One vector register: all that differs between processors, but for amx.h.
//
//     AVX-512 with BW    16 lanes of 32 bits; dot products of bytes with VNNI, of bfloat16 with BF16
//     AVX2                8; dot products of bytes with AVX-VNNI
//     NEON                4; dot products of bytes with dotprod or i8mm, of bfloat16 with bf16
//     any other           4, with the compiler's vector extension
//
// Integer results are the same on all. Float results are the same wherever a b + c is rounded once (all but "any
// other"); instructions for bfloat16 round their sums differently.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace attar::one {

#if defined(__AVX512BW__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

using Floats = float __attribute__((vector_size(REGISTER)));
using Ints = std::int32_t __attribute__((vector_size(REGISTER)));
using Bytes = std::uint8_t __attribute__((vector_size(REGISTER)));
using Shorts = std::int16_t __attribute__((vector_size(REGISTER)));
using HalfShorts = std::uint16_t __attribute__((vector_size(REGISTER / 2)));  // one for each lane
using HalfBytes = std::int8_t __attribute__((vector_size(REGISTER / 2)));     // two for each lane
using QuarterBytes = std::int8_t __attribute__((vector_size(REGISTER / 4)));  // one for each lane

template <class Register>
static inline Register read(const void* from) {
    Register result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

template <class Register>
static inline void write(void* to, Register value) {
    std::memcpy(to, &value, sizeof value);
}

// a b + c, rounded once. In a b + c d compilers may fuse either product, depending on the processor: this chooses.
static inline float fma(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
static inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// b where a is NaN. Compilers emit two instructions for `a < b ? a : b` where the machine has one.
static inline Floats maximum(Floats a, Floats b) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
static inline Floats minimum(Floats a, Floats b) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

// Unsigned 16-bit numbers, one per lane.
static inline Ints from_shorts(const void* from) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_cvtepu16_epi32(read<__m256i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu16_epi32(read<__m128i>(from));
#elif defined(__ARM_NEON)
    return (Ints)vmovl_u16(read<uint16x4_t>(from));
#else
    return __builtin_convertvector(read<HalfShorts>(from), Ints);
#endif
}

// Finite float16 as floats.
static inline Floats load_fp16(const void* from) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#elif defined(__ARM_NEON)
    return (Floats)vcvt_f32_f16(read<float16x4_t>(from));
#else
    const Ints bits = from_shorts(from);
    const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Ints)size | (bits & 0x8000) << 16);
#endif
}

// Rounds half to even; for numbers in the range of float16.
static inline void store_fp16(void* to, Floats value) {
#if defined(__AVX512BW__)
    write(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
    write(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
    write(to, vcvt_f16_f32((float32x4_t)value));
#else
    const Ints bits = (Ints)value & 0x7fffffff, sign = (Ints)value >> 16 & 0x8000;
    const Ints normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    const Floats small = ((Floats)bits * 0x1p24f + 0x1.8p23f) - 0x1.8p23f;  // multiples of 2^-24
    write(to, __builtin_convertvector((bits < 0x38800000 ? __builtin_convertvector(small, Ints) : normal) | sign, HalfShorts));
#endif
}

// Signed bytes as int16, two per lane.
static inline Ints load_int8_pairs(const void* from) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_cvtepi8_epi16(read<__m256i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi16(read<__m128i>(from));
#elif defined(__ARM_NEON)
    return (Ints)vmovl_s8(read<int8x8_t>(from));
#else
    return (Ints)__builtin_convertvector(read<HalfBytes>(from), Shorts);
#endif
}

// The low 16 bits of each lane.
static inline void store_shorts(void* to, Ints value) {
    write(to, __builtin_convertvector(value, HalfShorts));
}

// The low 8 bits of each lane.
static inline void store_bytes(void* to, Ints value) {
#if defined(__ARM_NEON)
    const int16x4_t half = vmovn_s32((int32x4_t)value);
    vst1_lane_s32((std::int32_t*)to, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(half, half))), 0);
#else
    write(to, __builtin_convertvector(value, QuarterBytes));
#endif
}

// Whether dot4 is one instruction.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD) || \
    defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool DOT_PRODUCTS = true;
#else
constexpr bool DOT_PRODUCTS = false;
#endif

// Per lane, the sum of four unsigned bytes of w times four signed ones of x, added to total. SMALL: no byte
// of w is above 15.
template <bool SMALL>
static inline Ints dot4(Ints total, Ints w, Ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    // Pairs are summed in 16 bits, which seven bits of a weight never overflow; the eighth bit is added separately.
    const __m512i low = SMALL ? (__m512i)w : (__m512i)(w & 0x7f7f7f7f), ones = _mm512_set1_epi16(1);
    const Ints result = (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(low, (__m512i)x), ones);
    if (SMALL) return total + result;
    const __m512i top = (__m512i)((w >> 7) & 0x01010101);
    return total + result + ((Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(top, (__m512i)x), ones) << 7);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    const __m256i low = SMALL ? (__m256i)w : (__m256i)(w & 0x7f7f7f7f), ones = _mm256_set1_epi16(1);
    const Ints result = (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(low, (__m256i)x), ones);
    if (SMALL) return total + result;
    const __m256i top = (__m256i)((w >> 7) & 0x01010101);
    return total + result + ((Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(top, (__m256i)x), ones) << 7);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)total, (uint8x16_t)w, (int8x16_t)x);
#elif defined(__ARM_NEON)
    // Both operands are signed: w - 128 is multiplied, and 128 times the sum of x added. A small w needs no shift.
    const int8x16_t by = (int8x16_t)x, codes = SMALL ? (int8x16_t)w : veorq_s8((int8x16_t)w, vdupq_n_s8(-128));
#if defined(__ARM_FEATURE_DOTPROD)
    if (!SMALL) total -= (Ints)vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), by);
    return (Ints)vdotq_s32((int32x4_t)total, codes, by);
#else
    // A product has at most 15 bits, and two products of a small w fit 16.
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(by)), high = vmull_high_s8(codes, by);
    if (SMALL) return (Ints)vpadalq_s16((int32x4_t)total, vpaddq_s16(low, high));
    total += (Ints)vpaddlq_s16(vpaddlq_s8(by)) << 7;
    return total + (Ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
#else
    for (int i = 0; i < 4; i++) total += ((w >> 8 * i) & 255) * (x << (24 - 8 * i) >> 24);
    return total;
#endif
}

// dot4<true> of two words, added to total. No byte of w or v is above 15.
static inline Ints dot8(Ints total, Ints w, Ints x, Ints v, Ints y) {
#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
    const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x),
                                          _mm256_maddubs_epi16((__m256i)v, (__m256i)y));
    return total + (Ints)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#else
    return dot4<true>(dot4<true>(total, w, x), v, y);
#endif
}

// Whether dot4<true> also takes any unsigned byte w where no signed byte x is above 15 in size.
#if defined(__AVX2__) || !defined(__ARM_NEON)
constexpr bool SMALL_BY_EITHER = true;
#else
constexpr bool SMALL_BY_EITHER = false;
#endif

// Byte by byte, modulo 256.
static inline Ints add_bytes(Ints a, Ints b) { return (Ints)((Bytes)a + (Bytes)b); }
static inline Ints subtract_bytes(Ints a, Ints b) { return (Ints)((Bytes)a - (Bytes)b); }

// Sixteen bytes in every sixteen.
static inline Ints repeat_16(const void* from) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_broadcast_i32x4(read<__m128i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_broadcastsi128_si256(read<__m128i>(from));
#else
    return read<Ints>(from);
#endif
}

// Per byte, the byte at[i] (0 to 15) of its sixteen.
static inline Ints pick_bytes(Ints from, Ints at) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8((__m512i)from, (__m512i)at);
#elif defined(__AVX2__)
    return (Ints)_mm256_shuffle_epi8((__m256i)from, (__m256i)at);
#elif defined(__ARM_NEON)
    return (Ints)vqtbl1q_u8((uint8x16_t)from, (uint8x16_t)at);
#else
    std::uint8_t bytes[16], index[16], result[16];
    write(bytes, from), write(index, at);
    for (int i = 0; i < 16; i++) result[i] = bytes[index[i]];
    return read<Ints>(result);
#endif
}

// Per lane, the float of its four that the low two bits of `at` say.
static inline Floats pick_floats(Floats from, Ints at) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_permutevar_ps((__m512)from, (__m512i)at);
#elif defined(__AVX2__)
    return (Floats)_mm256_permutevar_ps((__m256)from, (__m256i)at);
#elif defined(__ARM_NEON)
    return (Floats)pick_bytes((Ints)from, (at & 3) * 0x04040404 + 0x03020100);
#else
    const Ints index = at & 3;
    return Floats{from[index[0]], from[index[1]], from[index[2]], from[index[3]]};
#endif
}

// Per lane, the two int16 of w times the two of x, added to total.
static inline Ints dot_shorts(Ints total, Ints w, Ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)total, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return total + (Ints)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    return total + (Ints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__ARM_NEON)
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)w), vget_low_s16((int16x8_t)x));
    return total + (Ints)vpaddq_s32(low, vmull_high_s16((int16x8_t)w, (int16x8_t)x));
#else
    return total + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}

// Whether that is one instruction.
#if (defined(__AVX512BF16__) && defined(__AVX512BW__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool DOT_PAIRS = true;
#else
constexpr bool DOT_PAIRS = false;
#endif

// Per lane, the two bfloat16 of w times the two of x, added to total.
static inline Floats dot2(Floats total, Ints w, Ints x) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)w, (__m512bh)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Floats)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)w, (bfloat16x8_t)x);
#else
    const Floats even = fma((Floats)(w << 16), (Floats)(x << 16), total);
    return fma((Floats)(w & ~0xffff), (Floats)(x & ~0xffff), even);
#endif
}

}  // namespace attar::one
