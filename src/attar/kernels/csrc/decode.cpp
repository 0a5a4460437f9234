// A packed product, and a whole step of a Llama-shaped model, for attar/kernels: see decode/*.h.

#include "decode/product.h"
#include "decode/team.h"
#include "decode/walk.h"

using namespace attar;

extern "C" {

// Threads for `attar_multiply`.
Team* attar_team(std::int32_t size) { return new Team(size); }
void attar_team_free(Team* team) { delete team; }

// y (tokens, rows) = x (tokens, columns) of `linear`.
void attar_multiply(Team* team, const Linear* linear, const float* x, std::int64_t tokens, std::int32_t exact,
                    float* y) {
    Input room;
    room.reserve(*linear, tokens, exact);
    const Taken in = room.taken(*linear, exact);
    team->run(2, [&](Team::Member& member) {
        member.share(tokens, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++) in.put(t, 0, linear->columns, x + t * linear->columns);
        });
        member.share(linear->panels(), Parts::GUIDED, [&](std::int64_t first, std::int64_t last) {
            multiply(*linear, in, first, last, tokens, Output{y, linear->rows, false});
        });
    });
}

Runner* attar_runner(const Model* model, std::int32_t threads) { return new Runner(*model, threads); }
void attar_runner_free(Runner* runner) { delete runner; }
void attar_run(Runner* runner, const Batch* batch) { runner->run(*batch); }

// Keys and values of slots to other slots: `count` pairs (from, to), one after the other.
void attar_move(const Model* model, const std::int64_t* pairs, std::int64_t count) { move(*model, pairs, count); }

// The sum of all bytes, each member reading its share in four streams: what reading costs.
std::uint64_t attar_read(Team* team, const std::uint8_t* data, std::int64_t bytes) {
    std::atomic<std::uint64_t> total{0};
    team->run(1, [&](Team::Member& member) {
        member.share(bytes / 256, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
            const std::int64_t part = (last - first) / 4 * 256;
            const std::uint8_t* from = data + first * 256;
            I sums[4] = {};
            for (std::int64_t i = 0; i < part; i += 64)
                for (int stream = 0; stream < 4; stream++) {
                    sums[stream] += load_ints(from + stream * part + i);
                    prefetch(from + stream * part + i + AHEAD);
                }
            std::uint64_t own = 0;
            for (const I& found : sums)
                for (int i = 0; i < WIDTH; i++) own += std::uint32_t(found[i]);
            total += own;
        });
    });
    return total;
}
}
