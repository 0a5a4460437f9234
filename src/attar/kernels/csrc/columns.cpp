// One block of columns of a rounding that goes column by column: every error inside the block reaches the
// columns after it before these are rounded. What reaches the columns behind the block is the caller's: one
// matrix product.
//
//     round:    t_i = w_i - sum_{j<i} F_ij e_j ;              e_i = (t_i - w'_i) * step_i
//     descend:  t_i = w'_i - step_i (g_i + sum_{j<i} F_ij e_j) ;  e_i = new w'_i - old w'_i
//     both:     q_i = nearest((t_i + m) / s + z) ;            w'_i = s (level(q_i) - z) - m
//
// Letters: N rows, n columns of the block, everything stored column by column (n, N); w weights, w' decoded
// codes, q codes; g gradient, e errors, F (n, n) what an error in column j does to column i; s, z, m scale,
// zero and minimum of a tile, (G, N). attar/quantization/columns.py and refine.py are the same in torch.
//
// LANES rows are rounded at once, a lane each, WIDE vectors of them side by side so that sums do not wait.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "lanes.h"

namespace {

constexpr int WIDE = 4;     // vectors of rows
constexpr int LEVELS = 16;  // uneven levels, at most

// What one call works on; columns.py describes the arguments. Missing: zeros, minimum, mask, first, gradient
// (without it columns are rounded, with it they descend).
struct Job {
    std::int64_t rows;
    int columns;
    float low, high, zero;
    int levels;
    const float* table;
    const float *scale, *zeros, *minimum;
    const std::int64_t* tile;
    const float *inner, *step, *gradient;
    float* current;
    const std::uint8_t* mask;
    const float* first;
    float *codes, *errors;
};

using Errors = std::vector<std::array<Lanes, WIDE>>;  // of each column of a block

// `count` numbers, further lanes 0.
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

// Whole numbers from low to high.
struct Even {
    const Job& job;
    Lanes code(Lanes y) const { return round_even(clamp(y, job.low, job.high)); }
    Lanes level(Lanes code) const { return code; }
};

// Ascending levels; half way between two of them belongs to the upper one.
struct Uneven {
    const Job& job;
    Lanes code(Lanes y) const {
        Lanes found{};
        for (int q = 1; q < job.levels; q++)
            found = y >= 0.5f * (job.table[q - 1] + job.table[q]) ? all(float(q)) : found;
        return found;
    }
    Lanes level(Lanes code) const {
        Lanes found = all(job.table[0]);
        for (int q = 1; q < job.levels; q++) found = code >= float(q) ? all(job.table[q]) : found;
        return found;
    }
};

// sum_{j<i} F_ij e_j for all vectors of a unit.
void gather(const float* factor, int i, const Errors& e, Lanes* sum) {
    Lanes even[WIDE]{}, odd[WIDE]{};
    int j = 0;
    for (; j + 1 < i; j += 2)
        for (int w = 0; w < WIDE; w++) {
            even[w] += factor[j] * e[j][w];
            odd[w] += factor[j + 1] * e[j + 1][w];
        }
    for (int w = 0; w < WIDE; w++) {
        if (j < i) even[w] += factor[j] * e[j][w];
        sum[w] = even[w] + odd[w];
    }
}

// Column i of the `count` rows from `row` on; `sum` is what the columns before it add.
template <class Book, bool DESCEND>
Lanes column(const Job& job, const Book& book, int i, std::int64_t row, int count, Lanes sum) {
    const std::int64_t at = i * job.rows + row, tile = job.tile[i] * job.rows + row;
    const Lanes s = load(job.scale + tile, count);
    const Lanes m = job.minimum ? load(job.minimum + tile, count) : Lanes{};
    const Lanes z = job.zeros ? load(job.zeros + tile, count) : all(job.zero);
    const Lanes now = load(job.current + at, count);
    const Lanes target =
        DESCEND ? now - (load(job.gradient + at, count) + sum) * job.step[i] : now - sum;
    Lanes aim = !DESCEND && i == 0 && job.first ? load(job.first + row, count) : target;
    if (job.mask)
        for (int lane = 0; lane < std::min(count, LANES); lane++)
            if (!job.mask[at + lane]) aim[lane] = 0.0f;
    const Lanes code = book.code((aim + m) / s + z);
    const Lanes decoded = (book.level(code) - z) * s - m;
    const Lanes e = DESCEND ? decoded - now : (target - decoded) * job.step[i];
    store(job.codes + at, code, count);
    store(job.errors + at, e, count);
    if (DESCEND) store(job.current + at, decoded, count);
    return e;
}

// All columns of WIDE * LANES rows.
template <class Book, bool DESCEND>
void unit(const Job& job, const Book& book, std::int64_t row, Errors& e) {
    Lanes sum[WIDE];
    const int left = int(std::min<std::int64_t>(job.rows - row, WIDE * LANES));
    for (int i = 0; i < job.columns; i++) {
        gather(job.inner + i * job.columns, i, e, sum);
        for (int w = 0; w < WIDE; w++) {
            const int count = left - w * LANES;
            e[i][w] = count > 0 ? column<Book, DESCEND>(job, book, i, row + w * LANES, count, sum[w]) : Lanes{};
        }
    }
}

// ---- the error of tiles under trial scales

// What a call for the errors of tiles works on; columns.py describes the arguments.
struct Trials {
    std::int64_t rows, width, columns, groups, count;  // N, c, K, G, T
    const float *weight, *blocks, *scale, *zeros;
    float* errors;
};

// e H e^T of one tile of WIDE * LANES rows under one trial of its scales.
template <class Book>
void tile_error(const Trials& on, const Job& job, const Book& book, std::int64_t trial, std::int64_t group,
                std::int64_t row, Errors& e) {
    const int left = int(std::min<std::int64_t>(on.rows - row, WIDE * LANES));
    const int width = int(std::min(on.width, on.columns - group * on.width));
    const std::int64_t at = (trial * on.groups + group) * on.rows + row;
    Lanes total[WIDE]{}, sum[WIDE];
    for (int i = 0; i < width; i++) {
        const float* factor = on.blocks + (group * on.width + i) * on.width;
        gather(factor, i, e, sum);
        for (int w = 0; w < WIDE; w++) {
            const int count = left - w * LANES;
            if (count <= 0) break;
            const Lanes x = load(on.weight + (group * on.width + i) * on.rows + row + w * LANES, count);
            const Lanes s = load(on.scale + at + w * LANES, count);
            const Lanes z = on.zeros ? load(on.zeros + at + w * LANES, count) : all(job.zero);
            e[i][w] = x - (book.level(book.code(x / s + z)) - z) * s;
            total[w] += e[i][w] * (factor[i] * e[i][w] + 2.0f * sum[w]);
        }
    }
    for (int w = 0; w < WIDE && left > w * LANES; w++)
        store(on.errors + at + w * LANES, total[w], left - w * LANES);
}

template <class Book>
void run_trials(const Trials& on, const Job& job, std::int64_t first, std::int64_t last, Errors& e) {
    const Book book{job};
    for (std::int64_t number = first; number < last; number++)
        for (std::int64_t trial = 0; trial < on.count; trial++)
            tile_error(on, job, book, trial, number % on.groups, number / on.groups * WIDE * LANES, e);
}

// ---- both

template <class Book>
void run(const Job& job, std::int64_t first, std::int64_t last, Errors& e) {
    const Book book{job};
    for (std::int64_t number = first; number < last; number++) {
        const std::int64_t row = number * WIDE * LANES;
        if (job.gradient) unit<Book, true>(job, book, row, e);
        else unit<Book, false>(job, book, row, e);
    }
}

// `units` in parts of equal length, a thread each; this thread takes what no other could be had for.
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

// 0: done; 2: more levels than there is room for; 3: no memory.
extern "C" int attar_columns(std::int64_t rows, int columns, int threads, float low, float high, float zero,
                             int levels, const float* table, const float* scale, const float* zeros,
                             const float* minimum, const std::int64_t* tile, const float* inner,
                             const float* step, const float* gradient, float* current,
                             const std::uint8_t* mask, const float* first, float* codes, float* errors) {
    if (levels > LEVELS) return 2;
    const Job job{rows,    columns, low,      high,    zero,  levels, table, scale, zeros,
                  minimum, tile,    inner,    step,    gradient, current, mask,  first, codes, errors};
    const auto part = levels ? run<Uneven> : run<Even>;
    const std::int64_t units = (rows + WIDE * LANES - 1) / (WIDE * LANES);
    try {
        run_threaded(units, threads, columns,
                     [&](std::int64_t from, std::int64_t to, Errors& e) { part(job, from, to, e); });
    } catch (...) {
        return 3;
    }
    return 0;
}

// The same answers.
extern "C" int attar_tile_errors(std::int64_t rows, std::int64_t width, std::int64_t columns,
                                 std::int64_t groups, std::int64_t trials, int threads, float low, float high,
                                 float zero, int levels, const float* table, const float* weight,
                                 const float* blocks, const float* scale, const float* zeros, float* errors) {
    if (levels > LEVELS) return 2;
    Job job{};
    job.low = low, job.high = high, job.zero = zero, job.levels = levels, job.table = table;
    const Trials on{rows, width, columns, groups, trials, weight, blocks, scale, zeros, errors};
    const auto part = levels ? run_trials<Uneven> : run_trials<Even>;
    const std::int64_t units = (rows + WIDE * LANES - 1) / (WIDE * LANES) * groups;
    try {
        run_threaded(units, threads, width,
                     [&](std::int64_t from, std::int64_t to, Errors& e) { part(on, job, from, to, e); });
    } catch (...) {
        return 3;
    }
    return 0;
}
