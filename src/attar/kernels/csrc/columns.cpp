// One block of columns of a column-by-column rounding: every error inside the block is propagated to the later
// columns of the block before these are rounded. Propagation to the columns after the block is the caller's: one
// matrix product.
//
//     round:    t_i = w_i - sum_{j<i} F_ij e_j ;              e_i = (t_i - w'_i) * step_i
//     descend:  t_i = w'_i - step_i (g_i + sum_{j<i} F_ij e_j) ;  e_i = new w'_i - old w'_i
//     both:     q_i = nearest((t_i + m) / s + z) ;            w'_i = s (level(q_i) - z) - m
//     N of M:   before the first of M columns is rounded, each row keeps the N of largest |t_i| * step_i; the
//               others become zero: t_i = 0 is rounded
//
// Letters: N rows, n columns of the block, everything stored by columns, (n, N); w weights, w' decoded
// codes, q codes; g gradient, e errors, F (n, n) what an error in column j does to column i; s, z, m scale,
// zero and minimum of a tile, (G, N). attar/quantization/columns.py and refine.py are the same in torch.
//
// LANES rows are rounded at once, one per lane, in VECTORS independent vectors so that sums are not bound by latency.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "lanes.h"

namespace {

constexpr int VECTORS = 4;  // of rows
constexpr int LEVELS = 16;  // non-uniform levels, at most

// The arguments of a call, as columns.py describes them. Optional: zeros, minimum, mask, first, gradient (with it
// columns descend, without it they are rounded). With `of`, the mask is narrowed here.
struct Job {
    std::int64_t rows;
    int columns;
    int keep, of;
    float low, high, zero;
    int levels;
    const float* table;
    const float *scale, *zeros, *minimum;
    const std::int64_t* tile;
    const float *inner, *step, *gradient;
    float* current;
    std::uint8_t* mask;
    const float* first;
    float *codes, *errors;
};

using Errors = std::vector<std::array<Lanes, VECTORS>>;  // of the columns of a block; then `of` scores

// `count` numbers, the other lanes 0.
Lanes load(const float* from, int count) {
    Lanes value{};
    if (count >= LANES) std::memcpy(&value, from, sizeof value);
    else std::memcpy(&value, from, sizeof(float) * count);
    return value;
}

void store(float* to, Lanes value, int count) {
    if (count >= LANES) std::memcpy(to, &value, sizeof value);
    else std::memcpy(to, &value, sizeof(float) * count);
}

// `other` in the lanes whose mask is 0.
Lanes masked(Lanes value, const std::uint8_t* mask, int count, Lanes other) {
    Bytes bytes{};
    std::memcpy(&bytes, mask, std::min(count, LANES));
    return __builtin_convertvector(bytes, Mask) != 0 ? value : other;
}

// The weights themselves.
struct Real {
    const Job& job;
    Lanes code(Lanes y) const { return y; }
    Lanes level(Lanes code) const { return code; }
};

// Integers from low to high.
struct Uniform {
    const Job& job;
    Lanes code(Lanes y) const { return round_even(clamp(y, job.low, job.high)); }
    Lanes level(Lanes code) const { return code; }
};

// Ascending levels; ties go to the upper one.
struct NonUniform {
    const Job& job;
    Lanes code(Lanes y) const {
        Lanes result{};
        for (int q = 1; q < job.levels; q++)
            result = y >= 0.5f * (job.table[q - 1] + job.table[q]) ? all(float(q)) : result;
        return result;
    }
    Lanes level(Lanes code) const {
        Lanes result = all(job.table[0]);
        for (int q = 1; q < job.levels; q++) result = code >= float(q) ? all(job.table[q]) : result;
        return result;
    }
};

// e2m1: codes 0 to 7 of 0 .5 1 1.5 2 3 4 6, and 8 more where the sign is set; halves to the even code. Steps are 1/2
// below 2, 1 below 4 and 2 beyond: the code is the least of three roundings, the level the largest of three lines.
struct Float4 {
    const Job& job;
    Lanes code(Lanes y) const {
        const Lanes size = minimum(magnitude(y), all(8.0f));
        const Lanes fine = round_even(size * 2.0f), middle = round_even(size - 2.0f) + 4.0f;
        const Lanes coarse = round_even((size - 4.0f) * 0.5f) + 6.0f;
        const Lanes index = minimum(minimum(minimum(fine, middle), coarse), all(7.0f));
        return (Mask)y < 0 ? index + 8.0f : index;
    }
    Lanes level(Lanes code) const {
        const Lanes index = code >= 8.0f ? code - 8.0f : code;
        const Lanes size = maximum(maximum(index * 0.5f, index - 2.0f), index * 2.0f - 8.0f);
        return code >= 8.0f ? -size : size;
    }
};

// Floats of BITS bits of fraction and exponents from LEAST on, half to even, clamped to the largest; the code is the
// value. Below 2^LEAST they are multiples of 2^(LEAST - BITS), which no bit of 2^(LEAST - BITS + 23) is less than.
template <int BITS, int LEAST>
struct Float8 {
    const Job& job;
    Lanes code(Lanes y) const {
        constexpr int dropped = 23 - BITS, mask = (1 << dropped) - 1;
        const Lanes size = clamp(magnitude(y), 0.0f, job.high);
        const Mask bits = (Mask)size;
        const Lanes normal = (Lanes)((bits + (mask >> 1) + ((bits >> dropped) & 1)) & ~mask);
        const float unit = power(LEAST - BITS + 23), least = power(LEAST);
        return with_sign(size < least ? (size + unit) - unit : normal, y);
    }
    Lanes level(Lanes code) const { return code; }
    static float power(int exponent) {
        const std::int32_t bits = (exponent + 127) << 23;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

// What `levels` says that is no number of levels.
enum : int { REAL = -1, E2M1 = -2, E4M3 = -3, E5M2 = -4 };

// `work` with the code book that `levels` says. Returns 0, 2 with more than LEVELS levels, 3 without memory.
template <class Work>
int with_code_book(const Job& job, Work work) {
    if (job.levels > LEVELS) return 2;
    try {
        switch (job.levels) {
            case 0: work(Uniform{job}); break;
            case REAL: work(Real{job}); break;
            case E2M1: work(Float4{job}); break;
            case E4M3: work(Float8<3, -6>{job}); break;
            case E5M2: work(Float8<2, -14>{job}); break;
            default: work(NonUniform{job});
        }
    } catch (...) {
        return 3;
    }
    return 0;
}

// sum_{first<=j<i} F_ij e_j for all vectors of a unit.
void gather(const float* factor, int first, int i, const Errors& e, Lanes* sum) {
    Lanes even[VECTORS]{}, odd[VECTORS]{};
    int j = first;
    for (; j + 1 < i; j += 2)
        for (int w = 0; w < VECTORS; w++) {
            even[w] += factor[j] * e[j][w];
            odd[w] += factor[j + 1] * e[j + 1][w];
        }
    for (int w = 0; w < VECTORS; w++) {
        if (j < i) even[w] += factor[j] * e[j][w];
        sum[w] = even[w] + odd[w];
    }
}

// Column i of `count` rows from `row` on; `sum` is from the columns before it.
template <class CodeBook, bool DESCEND>
Lanes column(const Job& job, const CodeBook& book, int i, std::int64_t row, int count, Lanes sum) {
    const std::int64_t offset = i * job.rows + row, tile = job.tile[i] * job.rows + row;
    const Lanes s = load(job.scale + tile, count);
    const Lanes m = job.minimum ? load(job.minimum + tile, count) : Lanes{};
    const Lanes z = job.zeros ? load(job.zeros + tile, count) : all(job.zero);
    const Lanes weight = load(job.current + offset, count);
    const Lanes target =
        DESCEND ? weight - (load(job.gradient + offset, count) + sum) * job.step[i] : weight - sum;
    Lanes rounded = !DESCEND && i == 0 && job.first ? load(job.first + row, count) : target;
    if (job.mask) rounded = masked(rounded, job.mask + offset, count, Lanes{});
    const Lanes code = book.code((rounded + m) / s + z);
    const Lanes decoded = (book.level(code) - z) * s - m;
    const Lanes e = DESCEND ? decoded - weight : (target - decoded) * job.step[i];
    store(job.codes + offset, code, count);
    store(job.errors + offset, e, count);
    if (DESCEND) store(job.current + offset, decoded, count);
    return e;
}

// The mask of columns i to i + M - 1: a column stays where fewer than N of the others are larger, or equal and
// before it; columns that are masked already come last. Leaves in e[c] what the columns before i add to column c.
void choose(const Job& job, int i, std::int64_t row, int left, Errors& e) {
    auto* score = &e[job.columns];
    for (int c = 0; c < job.of; c++) {
        gather(job.inner + (i + c) * job.columns, 0, i, e, e[i + c].data());
        for (int w = 0; w < VECTORS && left > w * LANES; w++) {
            const std::int64_t offset = (i + c) * job.rows + row + w * LANES;
            const Lanes weight = load(job.current + offset, left - w * LANES) - e[i + c][w];
            score[c][w] = masked(magnitude(weight * job.step[i + c]), job.mask + offset, left - w * LANES, all(-1.0f));
        }
    }
    for (int c = 0; c < job.of; c++)
        for (int w = 0; w < VECTORS && left > w * LANES; w++) {
            Mask ahead{};  // how many, negative
            for (int other = 0; other < c; other++) ahead += score[other][w] >= score[c][w];
            for (int other = c + 1; other < job.of; other++) ahead += score[other][w] > score[c][w];
            const Mask stays = (ahead > -job.keep) & (score[c][w] >= 0.0f);
            const Bytes kept = __builtin_convertvector(stays, Bytes) & 1;
            std::memcpy(job.mask + (i + c) * job.rows + row + w * LANES, &kept,
                        std::min(left - w * LANES, LANES));
        }
}

// All columns of VECTORS * LANES rows.
template <class CodeBook, bool DESCEND>
void unit(const Job& job, const CodeBook& book, std::int64_t row, Errors& e) {
    Lanes sum[VECTORS];
    const int left = int(std::min<std::int64_t>(job.rows - row, VECTORS * LANES));
    for (int i = 0; i < job.columns; i++) {
        if (job.of && i % job.of == 0) choose(job, i, row, left, e);
        gather(job.inner + i * job.columns, job.of ? i / job.of * job.of : 0, i, e, sum);
        for (int w = 0; w < VECTORS; w++) {
            const int count = left - w * LANES;
            if (job.of) sum[w] += e[i][w];
            e[i][w] = count > 0 ? column<CodeBook, DESCEND>(job, book, i, row + w * LANES, count, sum[w]) : Lanes{};
        }
    }
}

// ---- the error of tiles under trial scales

// The arguments of a call for tile errors, as columns.py describes them.
struct Trials {
    std::int64_t rows, width, columns, groups, count;  // N, c, K, G, T
    const float *weight, *blocks, *scale, *zeros;
    float* errors;
};

// e H e^T of one tile of VECTORS * LANES rows under one trial of its scales.
template <class CodeBook>
void tile_error(const Trials& trials, const Job& job, const CodeBook& book, std::int64_t trial, std::int64_t group,
                std::int64_t row, Errors& e) {
    const int left = int(std::min<std::int64_t>(trials.rows - row, VECTORS * LANES));
    const int width = int(std::min(trials.width, trials.columns - group * trials.width));
    const std::int64_t at = (trial * trials.groups + group) * trials.rows + row;
    Lanes total[VECTORS]{}, sum[VECTORS];
    for (int i = 0; i < width; i++) {
        const float* factor = trials.blocks + (group * trials.width + i) * trials.width;
        gather(factor, 0, i, e, sum);
        for (int w = 0; w < VECTORS; w++) {
            const int count = left - w * LANES;
            if (count <= 0) break;
            const Lanes x = load(trials.weight + (group * trials.width + i) * trials.rows + row + w * LANES, count);
            const Lanes s = load(trials.scale + at + w * LANES, count);
            const Lanes z = trials.zeros ? load(trials.zeros + at + w * LANES, count) : all(job.zero);
            e[i][w] = x - (book.level(book.code(x / s + z)) - z) * s;
            total[w] += e[i][w] * (factor[i] * e[i][w] + 2.0f * sum[w]);
        }
    }
    for (int w = 0; w < VECTORS && left > w * LANES; w++)
        store(trials.errors + at + w * LANES, total[w], left - w * LANES);
}

template <class CodeBook>
void run_trials(const Trials& trials, const Job& job, const CodeBook& book, std::int64_t first, std::int64_t last,
                Errors& e) {
    for (std::int64_t number = first; number < last; number++)
        for (std::int64_t trial = 0; trial < trials.count; trial++)
            tile_error(trials, job, book, trial, number % trials.groups, number / trials.groups * VECTORS * LANES, e);
}

// ---- descent under a Kronecker product

// One pass over the columns of a block and, in each, over the rows in turn: what row r moves by, d, changes the slopes
// of all rows of column i by d O_r,: F_ii. Rows that do not move cost a comparison. Leaves in errors (n, N) the sums
// u_i of d O_r,: over the rows of column i; a later column's slopes have F_ij u_j added.
template <class CodeBook>
void descend_rows(const Job& job, const CodeBook& book, const float* output) {
    const std::int64_t N = job.rows;
    std::vector<float> reciprocal(N), slope(N);
    for (std::int64_t r = 0; r < N; r++) reciprocal[r] = 1.0f / output[r * N + r];
    for (int i = 0; i < job.columns; i++) {
        const float *factor = job.inner + i * job.columns, *scale = job.scale + job.tile[i] * N;
        float *moved = job.errors + i * N, *current = job.current + i * N, *codes = job.codes + i * N;
        std::copy_n(job.gradient + i * N, N, slope.data());
        for (int j = 0; j < i; j++)
            for (std::int64_t r = 0; r < N; r++) slope[r] += factor[j] * job.errors[j * N + r];
        std::fill_n(moved, N, 0.0f);
        for (std::int64_t row = 0; row < N; row += LANES) {
            const int count = int(std::min<std::int64_t>(N - row, LANES));
            const std::int64_t tile = job.tile[i] * N + row;
            const Lanes s = load(scale + row, count), step = load(reciprocal.data() + row, count);
            const Lanes m = job.minimum ? load(job.minimum + tile, count) : Lanes{};
            const Lanes z = job.zeros ? load(job.zeros + tile, count) : all(job.zero);
            const Lanes weight = load(current + row, count), old = load(codes + row, count);
            for (int lane = 0; lane < count; lane++) {
                const Lanes pull = load(slope.data() + row, count) * job.step[i] + load(moved + row, count);
                Lanes target = weight - pull * step;
                if (job.mask) target = masked(target, job.mask + i * N + row, count, Lanes{});
                const Lanes code = book.code((target + m) / s + z);
                const Lanes decoded = (book.level(code) - z) * s - m;
                while (lane < count && code[lane] == old[lane]) lane++;
                if (lane == count) break;
                const float d = decoded[lane] - weight[lane];
                codes[row + lane] = code[lane], current[row + lane] = decoded[lane];
                const float* reached = output + (row + lane) * N;
                for (std::int64_t r = 0; r < N; r++) moved[r] += d * reached[r];
            }
        }
    }
}

// ---- entry points

template <class CodeBook>
void run(const Job& job, const CodeBook& book, std::int64_t first, std::int64_t last, Errors& e) {
    for (std::int64_t number = first; number < last; number++) {
        const std::int64_t row = number * VECTORS * LANES;
        if (job.gradient) unit<CodeBook, true>(job, book, row, e);
        else unit<CodeBook, false>(job, book, row, e);
    }
}

// `units` divided into equal parts, a thread each; this thread runs the parts for which no thread could be started.
template <class Part>
void run_threaded(std::int64_t units, int threads, std::int64_t columns, Part part) {
    const std::int64_t parts = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, units));
    std::vector<Errors> errors(parts, Errors(columns));
    std::vector<std::thread> others;
    others.reserve(parts);
    for (std::int64_t i = 1; i < parts; i++) {
        const std::int64_t from = units * i / parts, to = units * (i + 1) / parts;
        Errors& e = errors[i];
        try {
            others.emplace_back([&e, &part, from, to] { part(from, to, e); });
        } catch (...) {  // no thread, or no memory for one
            part(from, to, e);
        }
    }
    part(0, units / parts, errors[0]);
    for (std::thread& other : others) other.join();
}

}  // namespace

// `levels` < 0: REAL and so on. Returns 0 on success, 2 with more than LEVELS levels, 3 without memory.
extern "C" int attar_columns(std::int64_t rows, int columns, int keep, int of, int threads, float low, float high, float zero,
                             int levels, const float* table, const float* scale, const float* zeros,
                             const float* minimum, const std::int64_t* tile, const float* inner,
                             const float* step, const float* gradient, float* current,
                             std::uint8_t* mask, const float* first, float* codes, float* errors) {
    const Job job{rows,    columns, keep,  of,   low,      high,    zero, levels, table, scale, zeros,
                  minimum, tile,    inner, step, gradient, current, mask, first,  codes, errors};
    const std::int64_t units = (rows + VECTORS * LANES - 1) / (VECTORS * LANES);
    return with_code_book(job, [&](const auto& book) {
        run_threaded(units, threads, columns + of,
                     [&](std::int64_t from, std::int64_t to, Errors& e) { run(job, book, from, to, e); });
    });
}

// Returns the same.
extern "C" int attar_descend_rows(std::int64_t rows, int columns, int /* threads */, float low, float high, float zero,
                                  int levels, const float* table, const float* scale, const float* zeros,
                                  const float* minimum, const std::int64_t* tile, const float* inner,
                                  const float* step, const float* output, const float* gradient,
                                  float* current, std::uint8_t* mask, float* codes, float* moved) {
    const Job job{rows,    columns, 0,     0,    low,      high,    zero, levels,  table, scale, zeros,
                  minimum, tile,    inner, step, gradient, current, mask, nullptr, codes, moved};
    return with_code_book(job, [&](const auto& book) { descend_rows(job, book, output); });
}

// Returns the same.
extern "C" int attar_tile_errors(std::int64_t rows, std::int64_t width, std::int64_t columns,
                                 std::int64_t groups, std::int64_t trials, int threads, float low, float high,
                                 float zero, int levels, const float* table, const float* weight,
                                 const float* blocks, const float* scale, const float* zeros, float* errors) {
    Job job{};
    job.low = low, job.high = high, job.zero = zero, job.levels = levels, job.table = table;
    const Trials args{rows, width, columns, groups, trials, weight, blocks, scale, zeros, errors};
    const std::int64_t units = (rows + VECTORS * LANES - 1) / (VECTORS * LANES) * groups;
    return with_code_book(job, [&](const auto& book) {
        run_threaded(units, threads, width,
                     [&](std::int64_t from, std::int64_t to, Errors& e) { run_trials(args, job, book, from, to, e); });
    });
}
