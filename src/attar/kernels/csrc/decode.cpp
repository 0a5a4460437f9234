// A packed product, and a whole step of a Llama-shaped model, for attar/kernels: see decode/*.h.

#include "decode/product.h"
#include "decode/team.h"
#include "decode/walk.h"

#include <new>
#include <stdexcept>

using namespace attar;

// No exception leaves the library, or it would end the process: 0 done, 1 no memory, 2 anything else.
template <class Function>
static std::int32_t guarded(Function f) noexcept {
    try {
        f();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::length_error&) {  // more than a vector can hold
        return 1;
    } catch (...) {
        return 2;
    }
}

extern "C" {

// Whether this processor sums products of bytes in one instruction.
std::int32_t attar_dot_products() { return one::DOT_PRODUCTS; }

// Whether enough tokens are multiplied by the matrix unit: the library was compiled for one, and the system permits.
std::int32_t attar_tiles() { return tiles_permitted(); }

// Threads for `attar_multiply`; null: no memory.
Team* attar_team(std::int32_t size) {
    Team* made = nullptr;
    guarded([&] { made = new Team(size); });
    return made;
}
void attar_team_free(Team* team) { delete team; }

// y (tokens, rows) = x (tokens, columns) of `linear`, x taken in 8 or 16 bits; the number is that of `guarded`.
std::int32_t attar_multiply(Team* team, const Linear* linear, const float* x, std::int64_t tokens,
                            std::int32_t bits, float* y) {
    return guarded([&] {
        Input room;
        room.reserve(*linear, tokens, bits);
        const Taken in = room.taken(*linear, bits);
        team->run(2, [&](Team::Member& member) {
            member.share(tokens, Parts::EVEN, [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t t = first; t < last; t++) in.put(t, 0, linear->columns, x + t * linear->columns);
            });
            member.share(linear->panels(), Parts::GUIDED, [&](std::int64_t first, std::int64_t last) {
                multiply(*linear, in, first, last, tokens, Output{y, linear->rows, false});
            });
        });
    });
}

// null: no memory.
Runner* attar_runner(const Model* model, std::int32_t threads) {
    Runner* made = nullptr;
    guarded([&] { made = new Runner(*model, threads); });
    return made;
}
void attar_runner_free(Runner* runner) { delete runner; }
std::int32_t attar_run(Runner* runner, const Batch* batch) {
    return guarded([&] { runner->run(*batch); });
}

// For tests: members that want so many bytes in one part of a phase (with -1 in every part), or where `outside`
// behind it, and then another phase. The number is that of `guarded`; 3 where a part was left undone.
std::int32_t attar_team_fails(Team* team, std::int64_t bytes, std::int64_t part, std::int32_t outside) {
    std::atomic<std::int64_t> done{0};
    const auto take = [&] { ::operator delete(::operator new(std::size_t(bytes))); };
    const std::int32_t code = guarded([&] {
        team->run(2, [&](Team::Member& member) {
            member.share(64, Parts::GUIDED, [&](std::int64_t first, std::int64_t last) {
                done += last - first;
                if (!outside && (part < 0 || (first <= part && part < last))) take();
            });
            if (outside) take();
            member.share(64, Parts::EVEN, [&](std::int64_t first, std::int64_t last) { done += last - first; });
        });
    });
    return !outside && team->size() > 1 && done.load() != 128 ? 3 : code;
}

// Keys and values of slots to other slots: `count` pairs (from, to), one after the other.
void attar_move(const Model* model, const std::int64_t* pairs, std::int64_t count) { move(*model, pairs, count); }

// The sum of all bytes, each member reading its share in four streams: what reading costs.
std::uint64_t attar_read(Team* team, const std::uint8_t* data, std::int64_t bytes) {
    std::atomic<std::uint64_t> total{0};
    guarded([&] { team->run(1, [&](Team::Member& member) {
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
    }); });
    return total;
}
}
