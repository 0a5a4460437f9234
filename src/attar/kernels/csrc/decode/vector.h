// Vectors of sixteen 32-bit numbers, in as many registers as the machine needs: see registers.h. A packed weight has
// one output row per lane, so only norms sum across lanes.

#pragma once

#include <cmath>

#include "registers.h"

namespace attar {

constexpr int WIDTH = 16, PARTS = 4 * WIDTH / one::REGISTER;

#if defined(__AVX512BW__)

using F = one::Floats;
using I = one::Ints;

template <class V, class Function, class... Operands>
static inline V apply(Function f, const Operands&... operands) {
    return f(operands...);
}
template <class V, class Function>
static inline V apply_load(Function f, const void* from, int) {
    return f(from);
}
template <class V, class Function>
static inline void apply_store(Function f, void* to, int, const V& value) {
    f(to, value);
}

#else

// Operators over several registers. A scalar stands for sixteen copies; F(i) and I(f) keep the bits.
template <class Number, class Register>
struct Vector {
    Register part[PARTS];

    Vector() : part{} {}
    Vector(Number value) {
        for (Register& one : part) one = value - Register{};
    }
    // Register by register, so that compilers keep arrays of vectors in registers.
    Vector(const Vector& other) { *this = other; }
    Vector& operator=(const Vector& other) {
        for (int i = 0; i < PARTS; i++) part[i] = other.part[i];
        return *this;
    }
    template <class Other, class Others>
    explicit Vector(const Vector<Other, Others>& bits) {
        for (int i = 0; i < PARTS; i++) part[i] = (Register)bits.part[i];
    }
    Number operator[](int lane) const { return part[lane * PARTS / WIDTH][lane % (WIDTH / PARTS)]; }
};

using F = Vector<float, one::Floats>;
using I = Vector<std::int32_t, one::Ints>;

// f of the operands, register by register.
template <class V, class Function, class... Operands>
static inline V apply(Function f, const Operands&... operands) {
    V result;
    for (int i = 0; i < PARTS; i++) result.part[i] = f(operands.part[i]...);
    return result;
}

// f from memory and to memory, `step` bytes per register.
template <class V, class Function>
static inline V apply_load(Function f, const void* from, int step) {
    V result;
    for (int i = 0; i < PARTS; i++) result.part[i] = f((const std::uint8_t*)from + i * step);
    return result;
}
template <class V, class Function>
static inline void apply_store(Function f, void* to, int step, const V& value) {
    for (int i = 0; i < PARTS; i++) f((std::uint8_t*)to + i * step, value.part[i]);
}

#define ATTAR_OPERATOR(V, op)                                                             \
    static inline V operator op(const V& a, const V& b) {                                 \
        return apply<V>([](const auto& x, const auto& y) { return x op y; }, a, b);        \
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
ATTAR_OPERATOR(I, ^)
#undef ATTAR_OPERATOR
static inline F operator-(const F& a) {
    return apply<F>([](const auto& x) { return -x; }, a);
}
static inline I operator<<(const I& a, int bits) {
    return apply<I>([bits](const auto& x) { return x << bits; }, a);
}
static inline I operator>>(const I& a, int bits) {
    return apply<I>([bits](const auto& x) { return x >> bits; }, a);
}

#endif

static inline F load(const float* from) { return apply_load<F>(one::read<one::Floats>, from, one::REGISTER); }
static inline I load_ints(const void* from) { return apply_load<I>(one::read<one::Ints>, from, one::REGISTER); }
static inline void store(float* to, const F& value) { apply_store(one::write<one::Floats>, to, one::REGISTER, value); }

// The low 16 or 8 bits of each lane.
static inline void store_shorts(void* to, const I& value) {
    apply_store(one::store_shorts, to, one::REGISTER / 2, value);
}
static inline void store_bytes(void* to, const I& value) {
    apply_store(one::store_bytes, to, one::REGISTER / 4, value);
}

// Sixteen copies. (a - 0 is a, so the compiler computes nothing.)
static inline F broadcast(float value) { return value - F{}; }
static inline I broadcast_ints(std::int32_t value) { return I{} + value; }
static inline F to_floats(const F& value) { return value; }
static inline F to_floats(const I& value) {
    return apply<F>([](one::Ints x) { return __builtin_convertvector(x, one::Floats); }, value);
}
// Of floats with integer values.
static inline I to_ints(const F& value) {
    return apply<I>([](one::Floats x) { return __builtin_convertvector(x, one::Ints); }, value);
}
static inline std::int32_t load_word(const void* from) {
    std::int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}
static inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 3); }

// a b + c
static inline F fma(const F& a, const F& b, const F& c) {
    return apply<F>([](one::Floats x, one::Floats y, one::Floats z) { return one::fma(x, y, z); }, a, b, c);
}

// b where a is NaN
static inline F maximum(const F& a, const F& b) { return apply<F>(one::maximum, a, b); }
static inline F minimum(const F& a, const F& b) { return apply<F>(one::minimum, a, b); }
static inline F absolute(const F& a) { return (F)((I)a & 0x7fffffff); }

// Half to even, for |a| < 2^22.
static inline F round_even(const F& a) { return (a + 0x1.8p23f) - 0x1.8p23f; }

static inline float sum_lanes(const F& a) {
    float parts[WIDTH];
    store(parts, a);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    return parts[0];
}

static inline float dot(const float* a, const float* b, std::int64_t n) {
    F sums[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH)
        for (int j = 0; j < 4; j++) sums[j] = fma(load(a + i + j * WIDTH), load(b + i + j * WIDTH), sums[j]);
    for (; i + WIDTH <= n; i += WIDTH) sums[0] = fma(load(a + i), load(b + i), sums[0]);
    float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

static inline float largest_lane(const F& a) {
    float parts[WIDTH];
    store(parts, a);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] = parts[i] > parts[i + step] ? parts[i] : parts[i + step];
    return parts[0];
}

// Sixteen bfloat16 as floats.
static inline F load_bf16(const void* from) {
    return (F)(apply_load<I>(one::from_shorts, from, one::REGISTER / 2) << 16);
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

// Sixteen finite float16 as floats.
static inline F load_fp16(const void* from) { return apply_load<F>(one::load_fp16, from, one::REGISTER / 2); }

// Rounded to float16, half to even, saturating.
static inline void store_fp16(void* to, const F& value) {
    const F inside = minimum(maximum(value, broadcast(-65504.0f)), broadcast(65504.0f));
    apply_store(one::store_fp16, to, one::REGISTER / 2, inside);
}

// 32 signed bytes as int16, two per lane.
static inline I load_int8_pairs(const void* from) {
    return apply_load<I>(one::load_int8_pairs, from, one::REGISTER / 2);
}

// Per lane, the sum of four unsigned bytes of w times the four signed bytes x, added to total. SMALL: no
// byte of w is above 15.
template <bool SMALL>
static inline I dot4(const I& total, const I& w, std::int32_t x) {
    return apply<I>(one::dot4<SMALL>, total, w, broadcast_ints(x));
}

// dot4<true> of w and x and of v and y, added to total.
static inline I dot8(const I& total, const I& w, std::int32_t x, const I& v, std::int32_t y) {
    return apply<I>(one::dot8, total, w, broadcast_ints(x), v, broadcast_ints(y));
}

// The same, where every lane has its own x.
template <bool SMALL>
static inline I dot4(const I& total, const I& w, const I& x) {
    return apply<I>(one::dot4<SMALL>, total, w, x);
}

// Sixteen bytes, or four floats, in every four lanes; and per byte or lane one of these, at a position.
static inline I repeat_16(const void* from) { return apply_load<I>(one::repeat_16, from, 0); }
static inline I pick_bytes(const I& from, const I& at) { return apply<I>(one::pick_bytes, from, at); }
static inline F pick_floats(const F& from, const I& at) {
    return apply<F>([](one::Floats x, one::Ints i) { return one::pick_floats(x, i); }, from, at);
}

// Sums and differences byte by byte.
static inline I add_bytes(const I& a, const I& b) { return apply<I>(one::add_bytes, a, b); }
static inline I subtract_bytes(const I& a, const I& b) { return apply<I>(one::subtract_bytes, a, b); }

// Per lane, the two int16 of w times the two of x, added to total.
static inline I dot_shorts(const I& total, const I& w, std::int32_t x) {
    return apply<I>(one::dot_shorts, total, w, broadcast_ints(x));
}

// Per lane, the two bfloat16 of w times the two of x, added to total.
static inline F dot2(const F& total, const I& w, std::int32_t x) {
    return apply<F>(one::dot2, total, w, broadcast_ints(x));
}

// Per lane -1 where true, else 0.
static inline I equal(const F& a, const F& b) {
    return apply<I>([](one::Floats x, one::Floats y) { return (one::Ints)(x == y); }, a, b);
}
static inline I less(const F& a, const F& b) {
    return apply<I>([](one::Floats x, one::Floats y) { return (one::Ints)(x < y); }, a, b);
}

// Per lane a where `mask` is -1, b where it is 0.
static inline F select(const I& mask, const F& a, const F& b) {
    return apply<F>([](one::Ints yes, one::Floats x, one::Floats y) { return yes != 0 ? x : y; }, mask, a, b);
}

// e^a, with a relative error of 2e-7; 0 below -87.
static inline F exp_(const F& a) {
    const F inside = minimum(maximum(a, broadcast(-87.3f)), broadcast(88.3f));
    const F n = round_even(inside * 1.44269504f);
    const F r = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), inside));
    F p = broadcast(1.38888889e-3f);
    p = fma(p, r, broadcast(8.33333333e-3f));
    p = fma(p, r, broadcast(4.16666667e-2f));
    p = fma(p, r, broadcast(1.66666667e-1f));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    return select(less(a, broadcast(-87.3f)), F{}, (F)((I)p + (to_ints(n) << 23)));
}

static inline F tanh_(const F& a) {
    const F twice = exp_(absolute(a) * -2.0f);
    const F size = (1.0f - twice) / (1.0f + twice);
    return (F)((I)size | ((I)a & INT32_MIN));
}

}  // namespace attar
