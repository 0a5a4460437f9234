// The nearest path on a trellis whose values are a table of its 2^16 states, for tiles of 256 numbers.
//
//     minimise  sum_i (v(s_i) - w_i)^2   over rings of states:  s_{i+1} = (s_i << b | new bits) mod 2^16
//
// Letters: w the numbers of a tile, v values, s states, b bits of a step. A node is the 16 - b bits that two neighbours
// share; 2^b states lead to it. Viterbi's algorithm gives the best path from any node, or from a given one to itself.
// A ring has to end where it began: a first pass over the numbers around the seam decides the node there, and a
// second one goes from it once around. attar/kernels/trellis.py is the same in torch.
//
// LANES nodes are computed at once; a tile is the work of one thread.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include "lanes.h"

namespace {

constexpr int TILE = 256;
constexpr int STATES = 1 << 16;

// Lane i has from[i >> BITS]; LANES numbers may be read.
template <int BITS>
Lanes spread(const float* from) {
    if constexpr ((1 << BITS) >= LANES) return all(*from);
    Mask lane{};
    for (int i = 0; i < LANES; i++) lane[i] = i >> BITS;
    Lanes value;
#if defined(__AVX512F__)
    value = (Lanes)_mm512_permutexvar_ps((__m512i)lane, _mm512_loadu_ps(from));
#elif defined(__AVX2__)
    value = (Lanes)_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), (__m256i)lane);
#else
    for (int i = 0; i < LANES; i++) value[i] = from[lane[i]];
#endif
    return value;
}

template <int BITS>
struct Search {
    static constexpr int NODES = STATES >> BITS;
    static constexpr int STEP = NODES >> BITS;  // between two nodes that lead to the same one
    const float* table;
    std::vector<float> costs, next;        // of the best path to each node
    std::vector<std::uint8_t> branches;    // (steps, nodes): the high bits of the state that led there

    explicit Search(const float* values)
        : table(values), costs(NODES + LANES), next(NODES + LANES), branches(std::size_t(TILE) * NODES) {}

    void step(float number, std::uint8_t* branch) {
        for (int node = 0; node < NODES; node += LANES) {
            Lanes best = all(std::numeric_limits<float>::infinity());
            Mask chosen{};
            for (int high = 0; high < 1 << BITS; high++) {
                const int state = high * NODES + node;
                Lanes value;
                std::memcpy(&value, table + state, sizeof value);
                const Lanes off = value - number;
                const Lanes cost = spread<BITS>(costs.data() + (state >> BITS)) + off * off;
                const Mask better = cost < best;
                best = minimum(cost, best);
                chosen = better ? Mask{} + high : chosen;
            }
            std::memcpy(next.data() + node, &best, sizeof best);
            const Bytes narrow = __builtin_convertvector(chosen, Bytes);
            std::memcpy(branch + node, &narrow, sizeof narrow);
        }
        std::swap(costs, next);
    }

    // The numbers from `first` on, `count` of them: from a node, or from any where it is negative.
    void forward(const float* numbers, int first, int count, int node) {
        const float start = node < 0 ? 0.0f : std::numeric_limits<float>::infinity();
        std::fill(costs.begin(), costs.end(), start);
        if (node >= 0) costs[node] = 0.0f;
        for (int i = 0; i < count; i++)
            step(numbers[(first + i) % TILE], branches.data() + std::size_t(i) * NODES);
    }

    // The node before step `until` of the path that ends in a node; its states go to `path`, where there is one.
    int back(int count, int until, int node, std::uint16_t* path) const {
        for (int i = count - 1; i >= until; i--) {
            const int state = branches[std::size_t(i) * NODES + node] * NODES + node;
            if (path) path[i] = std::uint16_t(state);
            node = state >> BITS;
        }
        return node;
    }

    void solve(const float* numbers, int around, std::uint16_t* path) {
        forward(numbers, TILE - around, 2 * around, -1);
        const int end = int(std::min_element(costs.begin(), costs.begin() + NODES) - costs.begin());
        const int seam = back(2 * around, around, end, nullptr);
        forward(numbers, 0, TILE, seam);
        back(TILE, 0, seam, path);
    }
};

template <int BITS>
int run(const float* table, const float* numbers, std::int64_t count, int around, int threads, std::uint16_t* paths) {
    std::atomic<std::int64_t> taken{0};
    std::atomic<bool> failed{false};
    const auto work = [&] {
        try {
            Search<BITS> search(table);
            for (std::int64_t tile; (tile = taken++) < count;)
                search.solve(numbers + tile * TILE, around, paths + tile * TILE);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    };
    std::vector<std::thread> others;
    for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, count); i++) others.emplace_back(work);
    work();
    for (auto& other : others) other.join();
    return failed ? 3 : 0;
}

}  // namespace

// States (count, 256) of tiles. 0: done; 2: no such bits; 3: no memory.
extern "C" int attar_trellis_search(const float* table, const float* numbers, std::int64_t count, int bits, int around,
                                    int threads, std::uint16_t* paths) {
    switch (bits) {
        case 1: return run<1>(table, numbers, count, around, threads, paths);
        case 2: return run<2>(table, numbers, count, around, threads, paths);
        case 3: return run<3>(table, numbers, count, around, threads, paths);
        case 4: return run<4>(table, numbers, count, around, threads, paths);
        case 5: return run<5>(table, numbers, count, around, threads, paths);
        case 6: return run<6>(table, numbers, count, around, threads, paths);
        case 7: return run<7>(table, numbers, count, around, threads, paths);
        case 8: return run<8>(table, numbers, count, around, threads, paths);
        default: return 2;
    }
}
