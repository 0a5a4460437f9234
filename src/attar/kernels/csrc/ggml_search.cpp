// The search of ggml_search.h over a matrix in memory, divided among threads; and the nearest codes.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "ggml_formats.h"
#include "ggml_search.h"
#include "lanes.h"

namespace {

// The arguments of a call, as ggml_search.py describes them. shrink and codes are optional.
struct Job {
    const float* weight;
    const float* v;
    std::int64_t rows, columns;
    int effort;
    const float* shrink;
    std::uint16_t *d, *minimum;
    std::uint8_t *scale_codes, *minimum_codes, *codes;
};

// The bits of a float16 that a float holds exactly.
std::uint16_t half_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    const float magnitude = std::fabs(value);
    if (magnitude < 0x1p-14f) return std::uint16_t(sign | std::uint32_t(magnitude * 0x1p24f));
    return std::uint16_t(sign | ((size >> 13) - (112 << 10)));
}

// A block of the rows from `row` on, one per lane; lanes beyond the last row repeat it. False: a weight is not
// finite.
template <class F>
bool load(const Job& job, std::int64_t row, std::int64_t column, Lanes* x) {
    for (int lane = 0; lane < LANES; lane++) {
        const float* from = job.weight + std::min(row + lane, job.rows - 1) * job.columns + column;
        for (int i = 0; i < F::block; i++) x[i][lane] = from[i];
    }
    Mask not_finite{};
    for (int i = 0; i < F::block; i++) not_finite |= ~(magnitude(x[i]) <= FLT_MAX);
    for (int lane = 0; lane < LANES; lane++)
        if (not_finite[lane]) return false;
    return true;
}

// Clips each tile to its `shrink` of its range.
template <class F>
void clip(const Job& job, std::int64_t row, std::int64_t column, Lanes* x) {
    for (int j = 0; j < F::tiles; j++, x += F::tile) {
        Lanes fraction{}, low{}, high{};
        for (int lane = 0; lane < LANES; lane++) {
            const std::int64_t at = std::min(row + lane, job.rows - 1) * job.columns + column;
            fraction[lane] = job.shrink[at / F::tile + j];
        }
        for (int i = 0; i < F::tile; i++) {
            low = ::minimum(x[i], low);
            high = ::maximum(x[i], high);
        }
        for (int i = 0; i < F::tile; i++) x[i] = ::maximum(::minimum(x[i], high * fraction), low * fraction);
    }
}

template <class F>
void store_scales(const Job& job, std::int64_t row, std::int64_t column, const Block<F>& block) {
    const std::int64_t lanes = std::min<std::int64_t>(LANES, job.rows - row);
    for (std::int64_t lane = 0; lane < lanes; lane++) {
        const std::int64_t at = ((row + lane) * job.columns + column) / F::block;
        job.d[at] = half_bits(block.d[lane]);
        if (F::minimum) job.minimum[at] = half_bits(F::two_levels ? block.d_m[lane] : -block.d_m[lane]);
        if (!F::two_levels) continue;
        for (int j = 0; j < F::tiles; j++) {
            job.scale_codes[at * F::tiles + j] = std::uint8_t(int(block.c[j][lane]) + F::bias);
            if (F::minimum) job.minimum_codes[at * F::tiles + j] = std::uint8_t(block.c_m[j][lane]);
        }
    }
}

// The codes, computed with the same division as a grid's `encode`.
template <class F>
void store_codes(const Job& job, std::int64_t row, std::int64_t column, const Tile* tiles,
                 const Block<F>& block) {
    Bytes codes[F::block];
    for (int j = 0; j < F::tiles; j++) {
        const Lanes s = block.scale(j), m = block.minimum(j);
        for (int i = 0; i < F::tile; i++) {
            const Lanes y = F::minimum ? tiles[j].x[i] + m : tiles[j].x[i];
            const Mask whole = __builtin_convertvector(F::code(y / s), Mask);
            codes[j * F::tile + i] = __builtin_convertvector(whole, Bytes);
        }
    }
    const std::int64_t lanes = std::min<std::int64_t>(LANES, job.rows - row);
    for (std::int64_t lane = 0; lane < lanes; lane++) {
        std::uint8_t* to = job.codes + (row + lane) * job.columns + column;
        for (int i = 0; i < F::block; i++) to[i] = std::uint8_t(codes[i][lane]);
    }
}

// Blocks of LANES rows, numbers [first, last) counted along the rows. False: a weight is not finite.
template <class F>
bool run(const Job& job, std::int64_t first, std::int64_t last) {
    const std::int64_t across = job.columns / F::block;
    Lanes x[F::block];
    Tile tiles[F::tiles];
    for (std::int64_t unit = first; unit < last; unit++) {
        const std::int64_t row = unit / across * LANES, column = unit % across * F::block;
        if (!load<F>(job, row, column, x)) return false;
        if (job.shrink) clip<F>(job, row, column, x);
        for (int j = 0; j < F::tiles; j++) tiles[j] = {x + j * F::tile, job.v + column + j * F::tile};
        const Block<F> block = search<F>(tiles, job.effort);
        store_scales(job, row, column, block);
        if (job.codes) store_codes(job, row, column, tiles, block);
    }
    return true;
}

struct Kind {
    const char* name;
    int block;
    bool (*run)(const Job&, std::int64_t, std::int64_t);
};

#define KIND(name) {#name, name::block, run<name>}
constexpr Kind KINDS[] = {KIND(Q4_0), KIND(Q4_1), KIND(Q5_0), KIND(Q5_1), KIND(Q8_0),   KIND(Q2_K),
                          KIND(Q3_K), KIND(Q4_K), KIND(Q5_K), KIND(Q6_K), KIND(IQ4_NL), KIND(IQ4_XS)};
#undef KIND

// Equal parts, a thread each; this thread runs the parts for which no thread could be started.
bool run_threaded(const Kind& kind, const Job& job, int threads) {
    const std::int64_t units = (job.rows + LANES - 1) / LANES * (job.columns / kind.block);
    const std::int64_t parts = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, units));
    std::vector<char> finite(parts, 1);
    std::vector<std::thread> others;
    others.reserve(parts);
    const auto part = [&](std::int64_t i) {
        finite[i] = kind.run(job, units * i / parts, units * (i + 1) / parts);
    };
    for (std::int64_t i = 1; i < parts; i++) {
        try {
            others.emplace_back(part, i);
        } catch (...) {  // no thread, or no memory for one
            part(i);
        }
    }
    part(0);
    for (std::thread& other : others) other.join();
    return std::all_of(finite.begin(), finite.end(), [](char one) { return one; });
}

}  // namespace

// Returns 0 on success, 1 if a weight is not finite, 2 for an unknown kind or columns that its block does not divide,
// 3 without memory.
extern "C" int attar_ggml_search(const char* name, const float* weight, const float* v, std::int64_t rows,
                                 std::int64_t columns, int effort, int threads, const float* shrink,
                                 std::uint16_t* d, std::uint16_t* minimum, std::uint8_t* scale_codes,
                                 std::uint8_t* minimum_codes, std::uint8_t* codes) {
    const Job job{weight, v, rows, columns, effort, shrink, d, minimum, scale_codes, minimum_codes, codes};
    for (const Kind& kind : KINDS) {
        if (std::strcmp(kind.name, name) || columns % kind.block) continue;
        try {
            return run_threaded(kind, job, threads) ? 0 : 1;
        } catch (...) {
            return 3;
        }
    }
    return 2;
}
