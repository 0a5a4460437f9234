// Products of codes by the matrix unit of x86, AMX: sixteen tokens times a group of a panel at a time.
//
// A tile is 16 rows of 64 bytes. Tokens' codes are tiles as they lie, a row for each token; a panel's int8 codes
// are too, a row for each 4 inputs. int4 codes are spread to bytes, once for SOME tokens. What comes out are the
// same integers as of product.h's loops, and what becomes of them is the same code: results are equal bit for bit.
//
// A tile's product takes 52 cycles and its way through memory to the other registers 16 more, while the next ones
// are under way: so half 0 of a group is started, then half 1 of the one before is stored and its half 0, stored
// earlier, added up, and so on by turns.

#pragma once

#include "sums.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__linux__)
#define ATTAR_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attar {

// Rows of codes (planes of tokens) that a block is worth its tiles for: of fewer they spend as long on their way.
constexpr int FEWEST = 16;
constexpr std::int64_t SOME = 64;  // tokens for which codes are spread once: their sums stay in the first cache

#if defined(ATTAR_AMX)

// Whether the system lets this process use tiles: Linux wants to be asked (since 5.16).
static inline bool tiles_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return permitted;
}

// A thread's tiles while it lives: sums 0 to 3, a panel's halves 4 and 5, planes of tokens 6 and 7. 0 rows: none.
class Tiles {
public:
    Tiles(int group, int rows) : rows_(rows) {
        if (!rows) return;
        const int depth = group < 64 ? group : 64;  // inputs
        Shape shape{};
        shape.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            shape.bytes[tile] = std::uint16_t(tile < 6 ? 64 : depth);
            shape.rows[tile] = std::uint8_t(tile == 4 || tile == 5 ? depth / 4 : rows);
        }
        _tile_loadconfig(&shape);
    }
    ~Tiles() {
        if (rows_) _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

private:
    struct alignas(64) Shape {
        std::uint8_t palette, start, reserved[14];
        std::uint16_t bytes[16];
        std::uint8_t rows[16];
    };
    int rows_;
};

// A group's codes as int8 has them: where they lie, or in `room`. Fetches what comes AHEAD.
static inline const std::uint8_t* byte_codes(const Linear& linear, const std::uint8_t* from, std::uint8_t* room) {
    const std::int64_t bytes = std::int64_t(linear.group) * PANEL * linear.kind / 8;
    for (std::int64_t at = 0; at < bytes; at += 64) prefetch(from + AHEAD + at);
    if (linear.kind == INT8) return from;
    std::uint8_t* to = room;
    for (std::int64_t at = 0; at < bytes; at += 128, to += 256)
        for (int half = 0; half < 128; half += 64) {
            const I pairs = load_ints(from + at + half);
            one::write(to + half, pairs & 0x0f0f0f0f);
            one::write(to + half + 128, (pairs >> 4) & 0x0f0f0f0f);
        }
    return room;
}

template <int PLANES, int ZEROS, int ROWS>
class TileProduct {
public:
    TileProduct(const Linear& linear, const Taken& in) : linear_(linear), in_(in), groups_(linear.groups()) {}

    // A panel times `count` tokens from `token` on, whole blocks, added to `out`.
    void run(const std::uint8_t* panel, std::int64_t token, std::int64_t count, float (*out)[PANEL]) {
        alignas(64) std::uint8_t room[2][128 * PANEL];
        const std::int64_t head = ZEROS == MIDDLE ? 64 : 128, bytes = linear_.panel_bytes() / groups_;
        const std::uint8_t* codes = byte_codes(linear_, panel + head, room[0]);
        Part last{};
        for (std::int64_t g = 0; g < groups_; g++, panel += bytes) {
            const std::uint8_t* now = codes;
            if (g + 1 < groups_) codes = byte_codes(linear_, panel + bytes + head, room[(g + 1) % 2]);
            asm volatile("" ::: "memory");  // tiles are loaded from what has been written
            for (std::int64_t t = 0; t < count; t += ROWS) {
                const std::int8_t* x = in_.at(g, token + t);
                start<0>(now, x);
                if (last.head) keep<1>(), add<0>(last);
                start<1>(now, x);
                keep<0>();
                if (last.head) add<1>(last);
                last = {panel, g * in_.tokens + token + t, out + t};
            }
        }
        keep<1>();
        add<0>(last);
        add<1>(last);
    }

private:
    // A block's product with a group: the panel's scales, the tokens' constants, where it goes.
    struct Part {
        const std::uint8_t* head;
        std::int64_t constants;
        float (*out)[PANEL];
    };

    // Sums of a half of the panel's rows.
    template <int HALF>
    void start(const std::uint8_t* codes, const std::int8_t* x) {
        if constexpr (HALF == 0) {
            _tile_zero(0);
            if constexpr (PLANES == 2) _tile_zero(1);
        } else {
            _tile_zero(2);
            if constexpr (PLANES == 2) _tile_zero(3);
        }
        for (int k = 0; k < linear_.group; k += 64) {
            const bool there = HALF == 1 && linear_.group <= 64;  // the tokens' tiles
            if (!there) _tile_loadd(6, x + k, linear_.group);
            if (PLANES == 2 && !there) _tile_loadd(7, x + in_.plane() + k, linear_.group);
            if constexpr (HALF == 0) {
                _tile_loadd(4, codes + k * PANEL, 128);
                _tile_dpbsud(0, 6, 4);
                if constexpr (PLANES == 2) _tile_dpbsud(1, 7, 4);
            } else {
                _tile_loadd(5, codes + k * PANEL + 64, 128);
                _tile_dpbsud(2, 6, 5);
                if constexpr (PLANES == 2) _tile_dpbsud(3, 7, 5);
            }
        }
    }

    template <int HALF>
    void keep() {
        if constexpr (HALF == 0) {
            _tile_stored(0, sums_[0][0], 64);
            if constexpr (PLANES == 2) _tile_stored(1, sums_[0][1], 64);
        } else {
            _tile_stored(2, sums_[1][0], 64);
            if constexpr (PLANES == 2) _tile_stored(3, sums_[1][1], 64);
        }
    }

    template <int HALF>
    void add(const Part& part) const {
        const F scale = from_half(part.head + 32 * HALF);
        const F zero = ZEROS == MIDDLE ? F{} : from_half(part.head + 64 + 32 * HALF);
        const float* scales = in_.scales + part.constants;
        const std::int32_t* sums = in_.sums + part.constants;
        const float* offsets = in_.offsets + part.constants;
        ATTAR_UNROLL
        for (int m = 0; m < ROWS; m++) {
            I total = load_ints(sums_[HALF][0] + 16 * m);
            if (PLANES == 2) total = (total << 8) + load_ints(sums_[HALF][PLANES - 1] + 16 * m);
            if (ZEROS == MIDDLE) total += all_ints(sums[m]);
            float* to = part.out[m] + WIDTH * HALF;
            const float offset = ZEROS == MIDDLE ? 0.0f : offsets[m];
            store(to, with_group(ZEROS, load(to), total, scale, zero, scales[m], offset));
        }
    }

    alignas(64) std::int32_t sums_[2][PLANES][ROWS * 16];
    const Linear& linear_;
    const Taken& in_;
    const std::int64_t groups_;
};

// Tokens of a block: 0 where the loops of product.h are to be taken.
static inline int tile_rows(const Taken& in, std::int64_t tokens) {
    if (!in.group || tokens * in.planes < FEWEST || !tiles_permitted()) return 0;
    return tokens > 8 ? 16 : 8;
}

template <int ROWS, int PLANES>
static inline void panel_by_tiles(const Linear& linear, const Taken& in, const std::uint8_t* panel, std::int64_t token,
                                  std::int64_t count, float (*out)[PANEL]) {
    if (linear.zeros == MIDDLE) TileProduct<PLANES, MIDDLE, ROWS>(linear, in).run(panel, token, count, out);
    if (linear.zeros == POINTS) TileProduct<PLANES, POINTS, ROWS>(linear, in).run(panel, token, count, out);
    if (linear.zeros == PRODUCTS) TileProduct<PLANES, PRODUCTS, ROWS>(linear, in).run(panel, token, count, out);
}

// A panel times tokens [first, last), at most SOME, in blocks of 8 or 16; returns the first that is left over.
static inline std::int64_t product_tiles(const Linear& linear, const Taken& in, int rows, std::int64_t panel,
                                         std::int64_t first, std::int64_t last, const Output& output) {
    const std::int64_t tokens = last - first, blocks = (tokens + rows - FEWEST / in.planes) / rows;
    if (!blocks) return first;
    alignas(64) float out[SOME][PANEL];
    std::memset(out, 0, blocks * rows * sizeof *out);
    const std::uint8_t* data = linear.data + panel * linear.panel_bytes();
    const std::int64_t count = blocks * rows, done = std::min(count, tokens);
    if (rows == 16 && in.planes == 2) panel_by_tiles<16, 2>(linear, in, data, first, count, out);
    if (rows == 16 && in.planes == 1) panel_by_tiles<16, 1>(linear, in, data, first, count, out);
    if (rows == 8 && in.planes == 2) panel_by_tiles<8, 2>(linear, in, data, first, count, out);
    if (rows == 8 && in.planes == 1) panel_by_tiles<8, 1>(linear, in, data, first, count, out);
    for (std::int64_t m = 0; m < done; m++)
        put_out(linear, load(out[m]), load(out[m] + WIDTH), panel, first + m, output);
    return first + done;
}

#else

static inline bool tiles_permitted() { return false; }
struct Tiles {
    Tiles(int, int) {}
};
static inline int tile_rows(const Taken&, std::int64_t) { return 0; }
static inline std::int64_t product_tiles(const Linear&, const Taken&, int, std::int64_t, std::int64_t first,
                                         std::int64_t, const Output&) {
    return first;
}

#endif

}  // namespace attar
