// Scales of llama.cpp's block formats: least squared error, weighted by importance.
//
// Kawrakow and others, ggml, ggml-quants.c. There is no paper.
//
//     w' = s * level(q) - m ,    s = d * c ,   m = d_m * c_m          (formats of two levels of scales)
//                                s = d ,       m any float16          (formats of one)
//     e = sum v (w - w')^2
//
// Letters: w weights of a tile (x in the code), q codes, level(q) = q - h or T[q]; s, m scale and minimum of
// a tile; c, c_m integers; d, d_m float16, of a block; v importance of an input's squared error. Sums over a tile
// are weighted by v: V = sum v, Q = sum v q, QQ = sum v q^2, QX = sum v q x (q here the level).
//
// 1. Each tile alone: its range is mapped to more or fewer levels than there are, each time with the least-squares
//    scale and minimum of the resulting codes. The best is rounded and solved again twice.
// 2. d and c (d_m and c_m) of a block: d from the largest scale over its largest code, or near it, then
//    least squares; the best is kept.
// 3. Twice, alternating: c and c_m of each tile, all values within `effort` of the current ones (c within twice that
//    without a minimum; fewer the second time), by the true error with the resulting codes; then the least-squares d
//    and d_m of these codes, kept where they lower the block's error.
//
// Differs from the reference like quantization/grids/ggml_search.py, the same search in torch with fewer trials.
// c is never 0: q = h has the same value, and no scale is zero.
//
// LANES rows are searched at once, one per lane, in the same block of columns: loops are over weights or trials of
// that block, operations on all rows.

#pragma once

#include <algorithm>
#include <cmath>

#include "ggml_formats.h"
#include "lanes.h"

namespace {

constexpr int TRIALS = 20;      // of the range of a tile
constexpr int REFINEMENTS = 2;  // of the best of them
constexpr int SPREAD = 9;       // trials of d to either side
constexpr int ROUNDS = 2;       // of step 3
constexpr int LATER = 2;        // effort of later rounds, at most
constexpr float TINY = 1e-30f;  // lower bound of a range or scale that divides

struct Tile {
    const Lanes* x;
    const float* v;
};

// s and m of a tile before they are coded; stiffness: its error grows by stiffness times a change squared.
struct Fit {
    Lanes scale, minimum, scale_stiffness, minimum_stiffness;
};

template <class F>
struct Block {
    Lanes d, d_m, c[F::tiles], c_m[F::tiles];
    Lanes scale(int tile) const { return d * c[tile]; }
    Lanes minimum(int tile) const { return d_m * c_m[tile]; }
};

struct Sums {
    Lanes Q{}, QQ{}, QX{}, X{}, V{};
};

// The number of levels that a range is mapped to in each trial: from fewer than there are, which leaves the outer ones
// unused but tries other scales, to more, which clips.
template <class F>
struct Reaches {
    static constexpr float less = std::min(std::max(F::count / 8.0f, 0.75f), 16.0f) * F::step;
    static constexpr float more = 2.0f * F::step;
    static float of(int trial, float levels) { return levels - less + (less + more) * trial / TRIALS; }
};

// The error of a tile with s, m and the nearest codes.
template <class F>
Lanes error(Tile t, Lanes s, Lanes m) {
    const Lanes inverse = 1.0f / s;
    Lanes e{};
    for (int i = 0; i < F::tile; i++) {
        const Lanes y = F::minimum ? t.x[i] + m : t.x[i];
        const Lanes difference = F::level(y * inverse) * s - y;
        e += difference * difference * t.v[i];
    }
    return e;
}

template <class F>
Sums sums(Tile t, Lanes s, Lanes m) {
    const Lanes inverse = 1.0f / s;
    Sums of;
    for (int i = 0; i < F::tile; i++) {
        const Lanes q = F::level((F::minimum ? t.x[i] + m : t.x[i]) * inverse);
        const Lanes vq = q * t.v[i];
        of.Q += vq;
        of.QQ += vq * q;
        of.QX += vq * t.x[i];
        of.X += t.x[i] * t.v[i];
        of.V += t.v[i];
    }
    return of;
}

// ---- 1. each tile alone

// A tile without a minimum: s alone, of either sign.
struct Symmetric {
    Lanes error, scale, QQ;
};

// Codes with a scale s = 1 / inverse, then their least-squares scale. With l = x / s - q the
// error of (1 + a) s is s^2 (sum v l^2 - 2 a sum v l q + a^2 QQ): no large numbers cancel.
template <class F>
void try_symmetric(Tile t, Lanes inverse, Symmetric& best) {
    Lanes LL{}, LQ{}, QQ{};
    for (int i = 0; i < F::tile; i++) {
        const Lanes y = t.x[i] * inverse, q = F::level(y);
        const Lanes l = y - q, vl = l * t.v[i];
        LL += l * vl;
        LQ += q * vl;
        QQ += q * q * t.v[i];
    }
    const Lanes exact = (1.0f + LQ / QQ) / inverse;
    const Lanes scale = F::two_levels ? exact : to_half_scale(exact);
    const Lanes a = F::two_levels ? LQ / QQ : scale * inverse - 1.0f;
    const Lanes error = minus(LL, a, minus(2.0f * LQ, a, QQ)) / (inverse * inverse);
    const Mask better = (QQ > 0.0f) & (error < best.error);
    best = {better ? error : best.error, better ? scale : best.scale, better ? QQ : best.QQ};
}

template <class F>
Fit fit_symmetric(Tile t) {
    Lanes peak = t.x[0];
    for (int i = 1; i < F::tile; i++) peak = magnitude(t.x[i]) > magnitude(peak) ? t.x[i] : peak;
    peak = magnitude(peak) < TINY ? all(TINY) : peak;
    Symmetric best{all(INFINITY), peak / F::down, all(1.0f)};
    for (int trial = 0; trial <= TRIALS; trial++) {
        try_symmetric<F>(t, -Reaches<F>::of(trial, -F::down) / peak, best);
        if (F::down != -F::up) try_symmetric<F>(t, Reaches<F>::of(trial, F::up) / peak, best);
    }
    for (int i = 0; i < REFINEMENTS; i++) try_symmetric<F>(t, 1.0f / best.scale, best);
    return {best.scale, Lanes{}, best.QQ, Lanes{}};
}

// A tile with a minimum, relative to `low`: y = x - low, y' = s q + b.
template <class F>
struct Shifted {
    Lanes y[F::tile], low, Y{}, YY{}, V{};
    Lanes error, scale, base, QQ;
};

// Codes of (y - from) * inverse, then their least-squares s and b; a k-quant's minimum, -(b + low), is not negative.
template <class F>
void try_shifted(Shifted<F>& t, const float* v, Lanes inverse, Lanes from) {
    const Lanes offset = from * inverse;
    Lanes Q{}, QQ{}, QY{};
    for (int i = 0; i < F::tile; i++) {
        const Lanes q = F::level(t.y[i] * inverse - offset);
        const Lanes vq = q * v[i];
        Q += vq;
        QQ += vq * q;
        QY += vq * t.y[i];
    }
    const Lanes det = minus(t.V * QQ, Q, Q);
    Lanes b = minus(QQ * t.Y, Q, QY) / det;
    if (F::two_levels) b = ::minimum(b, -t.low);
    const Lanes s = (QY - b * Q) / QQ;
    const Lanes error = minus(minus(t.YY, b, minus(2.0f * t.Y, b, t.V)), s, minus(QY, b, Q));
    const Mask better = (det > 0.0f) & (s > 0.0f) & (error < t.error);
    t.error = better ? error : t.error;
    t.scale = better ? s : t.scale;
    t.base = better ? b : t.base;
    t.QQ = better ? QQ : t.QQ;
}

template <class F>
Fit fit_shifted(Tile t) {
    Shifted<F> shifted;
    Lanes high = t.x[0];
    shifted.low = F::two_levels ? ::minimum(t.x[0], Lanes{}) : t.x[0];
    for (int i = 1; i < F::tile; i++) {
        shifted.low = ::minimum(t.x[i], shifted.low);
        high = ::maximum(t.x[i], high);
    }
    for (int i = 0; i < F::tile; i++) {
        const Lanes y = t.x[i] - shifted.low;
        shifted.y[i] = y;
        shifted.Y += y * t.v[i];
        shifted.YY += y * y * t.v[i];
        shifted.V += t.v[i];
    }
    const Lanes range = ::maximum(high - shifted.low, all(TINY));
    shifted.error = all(INFINITY);
    shifted.scale = range / F::up;
    shifted.base = Lanes{};
    shifted.QQ = shifted.V;
    for (int trial = 0; trial <= TRIALS; trial++)
        try_shifted<F>(shifted, t.v, Reaches<F>::of(trial, F::up) / range, Lanes{});
    for (int i = 0; i < REFINEMENTS; i++)
        try_shifted<F>(shifted, t.v, 1.0f / shifted.scale, shifted.base);
    return {shifted.scale, -(shifted.base + shifted.low), shifted.QQ, shifted.V};
}

template <class F>
Fit fit(Tile t) {
    if constexpr (F::minimum) return fit_shifted<F>(t);
    else return fit_symmetric<F>(t);
}

// ---- 2. scales of scales

// d and integers c, at least `least` in magnitude, with values ~ d * c.
template <class F>
void code_scales(const Lanes* values, const Lanes* stiffness, float least, Lanes& d, Lanes* c) {
    constexpr float end = F::c_low < 0 ? F::c_low : F::c_high;
    Lanes peak = values[0];
    for (int j = 1; j < F::tiles; j++) peak = magnitude(values[j]) > magnitude(peak) ? values[j] : peak;
    peak = magnitude(peak) < TINY ? all(TINY) : peak;
    Lanes best = all(INFINITY);
    d = to_half_scale(peak / end);
    for (int j = 0; j < F::tiles; j++) c[j] = all(least);
    for (int trial = -SPREAD; trial <= SPREAD; trial++) {
        const Lanes inverse = 1.0f / to_half_scale(peak / (end + 0.1f * trial));
        Lanes codes[F::tiles], CX{}, CC{}, error{};
        for (int j = 0; j < F::tiles; j++) {
            const Lanes ratio = values[j] * inverse;
            codes[j] = round_even(clamp(ratio, F::c_low, F::c_high));
            if (least > 0.0f) codes[j] = codes[j] == 0.0f ? with_sign(all(least), ratio) : codes[j];
            CX += stiffness[j] * codes[j] * values[j];
            CC += stiffness[j] * codes[j] * codes[j];
        }
        const Lanes trial_d = to_half_scale(CX / ::maximum(CC, all(TINY)));
        for (int j = 0; j < F::tiles; j++) {
            const Lanes difference = values[j] - trial_d * codes[j];
            error += stiffness[j] * difference * difference;
        }
        const Mask better = error < best;
        best = better ? error : best;
        d = better ? trial_d : d;
        for (int j = 0; j < F::tiles; j++) c[j] = better ? codes[j] : c[j];
    }
}

// ---- 3. alternating

// c and c_m of a tile by the true error `e`. When c changes, the center of the search for c_m moves so that the tile's
// mean stays.
template <class F>
void improve_codes(Tile t, Lanes d, Lanes d_m, int effort, Lanes& c, Lanes& c_m, Lanes& e) {
    const Lanes c_start = c, c_m_start = c_m;
    const int window = F::minimum ? effort : 2 * effort, window_m = F::minimum ? effort : 0;
    Lanes drift{};
    if (F::minimum) {
        const Sums at = sums<F>(t, d * c, d_m * c_m);
        drift = (d * at.Q) / (d_m * at.V);
    }
    for (int move = -window; move <= window; move++) {
        Lanes codes = clamp(c_start + float(move), F::c_low, F::c_high);
        codes = codes == 0.0f ? c_start : codes;
        const Lanes middle = round_even(c_m_start + (codes - c_start) * drift);
        for (int move_m = -window_m; move_m <= window_m; move_m++) {
            const Lanes codes_m = clamp(middle + float(move_m), 0, F::c_high);
            const Lanes trial_e = error<F>(t, d * codes, d_m * codes_m);
            const Mask better = trial_e < e;
            e = better ? trial_e : e;
            c = better ? codes : c;
            c_m = better ? codes_m : c_m;
        }
    }
}

// Least-squares d and d_m of the codes that the current ones yield.
template <class F>
void solve_block(const Tile* tiles, Block<F>& block) {
    Lanes AA{}, AX{}, AM{}, MM{}, MX{};  // A = c level(q), M = c_m
    for (int j = 0; j < F::tiles; j++) {
        const Sums of = sums<F>(tiles[j], block.scale(j), block.minimum(j));
        const Lanes c = block.c[j], c_m = block.c_m[j];
        AA += of.QQ * c * c;
        AX += of.QX * c;
        AM += of.Q * c * c_m;
        MM += of.V * c_m * c_m;
        MX += of.X * c_m;
    }
    if (!F::minimum) {
        block.d = to_half_scale(AA > 0.0f ? AX / AA : block.d);
        return;
    }
    const Lanes det = minus(AA * MM, AM, AM);
    const Lanes d = minus(AX * MM, MX, AM) / det, d_m = minus(AX * AM, MX, AA) / det;
    block.d = to_half_scale(((det > 0.0f) & (d > 0.0f)) ? d : block.d);
    block.d_m = to_half_scale(det > 0.0f ? ::maximum(d_m, Lanes{}) : block.d_m);
}

template <class F>
Lanes errors(const Tile* tiles, const Block<F>& block, Lanes* e) {
    Lanes total{};
    for (int j = 0; j < F::tiles; j++) {
        e[j] = error<F>(tiles[j], block.scale(j), block.minimum(j));
        total += e[j];
    }
    return total;
}

template <class F>
void improve(const Tile* tiles, int effort, Block<F>& block) {
    Lanes e[F::tiles], trial_e[F::tiles];
    errors(tiles, block, e);
    for (int round = 0; round < ROUNDS; round++) {
        Lanes total{};
        const int reach = round == 0 ? effort : std::min(effort, LATER);
        for (int j = 0; j < F::tiles; j++) {
            improve_codes<F>(tiles[j], block.d, block.d_m, reach, block.c[j], block.c_m[j], e[j]);
            total += e[j];
        }
        Block<F> trial = block;
        solve_block(tiles, trial);
        const Mask better = errors(tiles, trial, trial_e) < total;
        block.d = better ? trial.d : block.d;
        block.d_m = better ? trial.d_m : block.d_m;
        for (int j = 0; j < F::tiles; j++) e[j] = better ? trial_e[j] : e[j];
    }
}

// ---- all steps

template <class F>
Block<F> search(const Tile* tiles, int effort) {
    Fit fits[F::tiles];
    for (int j = 0; j < F::tiles; j++) fits[j] = fit<F>(tiles[j]);
    Block<F> block{};
    if constexpr (!F::two_levels) {
        block.d = to_half_scale(fits[0].scale);
        block.c[0] = block.c_m[0] = all(1.0f);
        block.d_m = to_half(fits[0].minimum);
    } else {
        Lanes values[F::tiles], stiffness[F::tiles];
        for (int j = 0; j < F::tiles; j++) {
            values[j] = fits[j].scale;
            stiffness[j] = fits[j].scale_stiffness;
        }
        code_scales<F>(values, stiffness, 1.0f, block.d, block.c);
        for (int j = 0; j < F::tiles; j++) {
            values[j] = fits[j].minimum;
            stiffness[j] = fits[j].minimum_stiffness;
        }
        if (F::minimum) code_scales<F>(values, stiffness, 0.0f, block.d_m, block.c_m);
        improve(tiles, effort, block);
    }
    return block;
}

}  // namespace
