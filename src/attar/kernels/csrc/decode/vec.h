// Sixteen numbers of 32 bits, in as many registers as the machine needs for them: see registers.h. A packed
// weight has one output row in each lane, so no sum ever crosses lanes but in norms.

#pragma once

#include <cmath>

#include "registers.h"

namespace attar {

constexpr int WIDTH = 16, PARTS = 4 * WIDTH / one::REGISTER;

#if defined(__AVX512BW__)

using F = one::Floats;
using I = one::Ints;

template <class V, class Function, class... Operands>
static inline V each(Function f, const Operands&... operands) {
    return f(operands...);
}
template <class V, class Function>
static inline V each_at(Function f, const void* from, int) {
    return f(from);
}
template <class V, class Function>
static inline void put_each(Function f, void* to, int, const V& value) {
    f(to, value);
}

#else

// The operators of a vector, of several. A single number stands for sixteen of it; F(i) and I(f) keep the bits.
template <class Number, class Register>
struct Wide {
    Register part[PARTS];

    Wide() : part{} {}
    Wide(Number value) {
        for (Register& one : part) one = value - Register{};
    }
    // Part by part, so that compilers keep arrays of these in registers.
    Wide(const Wide& other) { *this = other; }
    Wide& operator=(const Wide& other) {
        for (int i = 0; i < PARTS; i++) part[i] = other.part[i];
        return *this;
    }
    template <class Other, class Others>
    explicit Wide(const Wide<Other, Others>& bits) {
        for (int i = 0; i < PARTS; i++) part[i] = (Register)bits.part[i];
    }
    Number operator[](int lane) const { return part[lane * PARTS / WIDTH][lane % (WIDTH / PARTS)]; }
};

using F = Wide<float, one::Floats>;
using I = Wide<std::int32_t, one::Ints>;

// f of the operands, part by part.
template <class V, class Function, class... Operands>
static inline V each(Function f, const Operands&... operands) {
    V found;
    for (int i = 0; i < PARTS; i++) found.part[i] = f(operands.part[i]...);
    return found;
}

// f of memory, and f to memory, `step` bytes for each part.
template <class V, class Function>
static inline V each_at(Function f, const void* from, int step) {
    V found;
    for (int i = 0; i < PARTS; i++) found.part[i] = f((const std::uint8_t*)from + i * step);
    return found;
}
template <class V, class Function>
static inline void put_each(Function f, void* to, int step, const V& value) {
    for (int i = 0; i < PARTS; i++) f((std::uint8_t*)to + i * step, value.part[i]);
}

#define ATTAR_OPERATOR(V, op)                                                             \
    static inline V operator op(const V& a, const V& b) {                                 \
        return each<V>([](const auto& x, const auto& y) { return x op y; }, a, b);        \
    }                                                                                     \
    static inline V& operator op##=(V& a, const V& b) { return a = a op b; }
ATTAR_OPERATOR(F, +)
ATTAR_OPERATOR(F, -)
ATTAR_OPERATOR(F, *)
ATTAR_OPERATOR(F, /)
ATTAR_OPERATOR(I, +)
ATTAR_OPERATOR(I, -)
ATTAR_OPERATOR(I, *)
ATTAR_OPERATOR(I, &)
ATTAR_OPERATOR(I, |)
#undef ATTAR_OPERATOR
static inline F operator-(const F& a) {
    return each<F>([](const auto& x) { return -x; }, a);
}
static inline I operator<<(const I& a, int bits) {
    return each<I>([bits](const auto& x) { return x << bits; }, a);
}
static inline I operator>>(const I& a, int bits) {
    return each<I>([bits](const auto& x) { return x >> bits; }, a);
}

#endif

static inline F load(const float* from) { return each_at<F>(one::read<one::Floats>, from, one::REGISTER); }
static inline I load_ints(const void* from) { return each_at<I>(one::read<one::Ints>, from, one::REGISTER); }
static inline void store(float* to, const F& value) { put_each(one::write<one::Floats>, to, one::REGISTER, value); }

// The low 16 or 8 bits of each lane.
static inline void store_shorts(void* to, const I& value) {
    put_each(one::store_shorts, to, one::REGISTER / 2, value);
}
static inline void store_bytes(void* to, const I& value) {
    put_each(one::store_bytes, to, one::REGISTER / 4, value);
}

// (a - 0 is a, so nothing is computed.)
static inline F all(float value) { return value - F{}; }
static inline I all_ints(std::int32_t value) { return I{} + value; }
static inline F floats(const F& value) { return value; }
static inline F floats(const I& value) {
    return each<F>([](one::Ints x) { return __builtin_convertvector(x, one::Floats); }, value);
}
// Of floats that are whole.
static inline I ints(const F& value) {
    return each<I>([](one::Floats x) { return __builtin_convertvector(x, one::Ints); }, value);
}
static inline std::int32_t word(const void* from) {
    std::int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}
static inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 3); }

// a b + c
static inline F fma(const F& a, const F& b, const F& c) {
    return each<F>([](one::Floats x, one::Floats y, one::Floats z) { return one::fma(x, y, z); }, a, b, c);
}

// b where a is not a number
static inline F larger(const F& a, const F& b) { return each<F>(one::larger, a, b); }
static inline F smaller(const F& a, const F& b) { return each<F>(one::smaller, a, b); }
static inline F magnitude(const F& a) { return (F)((I)a & 0x7fffffff); }

// Half to even, for |a| < 2^22.
static inline F round_even(const F& a) { return (a + 0x1.8p23f) - 0x1.8p23f; }

static inline float sum(const F& a) {
    float parts[WIDTH];
    store(parts, a);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    return parts[0];
}

static inline float largest(const F& a) {
    float parts[WIDTH];
    store(parts, a);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] = parts[i] > parts[i + step] ? parts[i] : parts[i + step];
    return parts[0];
}

// Sixteen bfloat16 as floats.
static inline F from_bf16(const void* from) {
    return (F)(each_at<I>(one::from_shorts, from, one::REGISTER / 2) << 16);
}

// Rounded half to even; the bits of a bfloat16. Not for NaN.
static inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline void store_bf16(void* to, const F& value) {
    const I bits = (I)value;
    store_shorts(to, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sixteen float16, which are finite, as floats.
static inline F from_half(const void* from) { return each_at<F>(one::from_half, from, one::REGISTER / 2); }

// Rounded to float16, half to even; what is beyond it becomes its largest.
static inline void store_half(void* to, const F& value) {
    const F inside = smaller(larger(value, all(-65504.0f)), all(65504.0f));
    put_each(one::store_half, to, one::REGISTER / 2, inside);
}

// 32 signed bytes as int16, two in each lane.
static inline I widened(const void* from) { return each_at<I>(one::widened, from, one::REGISTER / 2); }

// Lane by lane, the sum of four unsigned bytes of w times the four signed bytes x, added to total. SMALL: no
// byte of w is above 15.
template <bool SMALL>
static inline I dot4(const I& total, const I& w, std::int32_t x) {
    return each<I>(one::dot4<SMALL>, total, w, all_ints(x));
}

// Lane by lane, the two int16 of w times the two of x, added to total.
static inline I dot_shorts(const I& total, const I& w, std::int32_t x) {
    return each<I>(one::dot_shorts, total, w, all_ints(x));
}

// Lane by lane, the two bfloat16 of w times the two of x, added to total.
static inline F dot2(const F& total, const I& w, std::int32_t x) {
    return each<F>(one::dot2, total, w, all_ints(x));
}

// Lane by lane -1 where it is so, else 0.
static inline I equal(const F& a, const F& b) {
    return each<I>([](one::Floats x, one::Floats y) { return (one::Ints)(x == y); }, a, b);
}
static inline I less(const F& a, const F& b) {
    return each<I>([](one::Floats x, one::Floats y) { return (one::Ints)(x < y); }, a, b);
}

// Lane by lane, a where `mask` is -1, b where it is 0.
static inline F choose(const I& mask, const F& a, const F& b) {
    return each<F>([](one::Ints yes, one::Floats x, one::Floats y) { return yes != 0 ? x : y; }, mask, a, b);
}

// e^a, to 2e-7 of its value; 0 below -87.
static inline F exponential(const F& a) {
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
    return choose(less(a, all(-87.3f)), F{}, (F)((I)p + (ints(n) << 23)));
}

static inline F tangent(const F& a) {
    const F twice = exponential(magnitude(a) * -2.0f);
    const F size = (1.0f - twice) / (1.0f + twice);
    return (F)((I)size | ((I)a & INT32_MIN));
}

}  // namespace attar
