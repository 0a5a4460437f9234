// Products of codes on AMX, the matrix unit of x86: sixteen tokens times a group of a panel at a time.
//
// A tile is 16 rows of 64 bytes. Tokens' codes are tiles in memory, a row per token; so are a panel's int8 codes, a
// row per 4 inputs. int4 codes are unpacked to bytes, once for TOKEN_BLOCK tokens. The sums are the same integers as
// those of matmul.h's loops and share epilogue.h, so results are equal bit for bit.
//
// A tile product takes 52 cycles and its store 16 more, during which others can run: so half 0 of a group is started,
// then half 1 of the previous group is stored and its half 0, stored earlier, is added to the output, and so on.
//
// Of up to eight tokens both planes are rows of one tile (FewTiles).

#pragma once

#include "semi_structured.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__linux__)
#define ATTAR_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attar {

// Rows of codes (tokens times planes) from which tiles are faster than the loops.
constexpr int MIN_ROWS = 16;
constexpr std::int64_t TILE_ROWS = 16;  // tokens of a block, at most
constexpr std::int64_t TOKEN_BLOCK = 64;  // tokens per unpacking of codes: their sums stay in the first cache

#if defined(ATTAR_AMX)

// Whether this process may use tiles: Linux (5.16 and later) requires a request.
static inline bool tiles_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return permitted;
}

// Configures the thread's tiles in its scope: sums 0 to 3, a panel's halves 4 and 5, planes of tokens 6 and 7. With 0
// rows it does nothing.
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
        asm volatile("" ::"r"(&shape) : "memory");  // the intrinsic tells compilers of its first 8 bytes alone
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

// Where the bytes of a dense four come from, by the positions p0 + 4 p1 (p0 < p1) of its pair of values: byte p0 is the
// pair's first, p1 its second, others are zero.
struct ExpansionTable {
    alignas(64) std::uint8_t source[16][4];

    constexpr ExpansionTable() : source{} {
        for (int index = 0; index < 16; index++) {
            for (int i = 0; i < 4; i++) source[index][i] = 0x80;
            source[index][index & 3] = 0;
            source[index][index >> 2] = 1;
        }
    }
};
static constexpr ExpansionTable EXPANSION;

// A group of a 2:4 panel as the bytes of a dense one.
template <int BITS>
static inline void expand_codes(const Linear& linear, const std::uint8_t* head, const std::uint8_t* from,
                                std::uint8_t* to) {
    GroupZeros zeros(linear);
    zeros.read(linear, head);
    const __m512i table = _mm512_load_si512(EXPANSION.source);
    const I lanes = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12}, pairs = lanes * 0x01010101;
    for (int k = 0; k < linear.group; k += SPARSE_STEP, from += BITS == 4 ? 192 : 320, to += 512) {
        const I positions = load_ints(from);
        ATTAR_UNROLL
        for (int part = 0; part < 4; part++) {
            const int half = part / 2, c = part % 2;
            const I w = value_bytes<BITS>(from + 64, zeros.bytes[half], half, c);
            const I at = (positions >> (4 * half + 2 * c)) & 0x03030303, both = at | at >> 6;
            ATTAR_UNROLL
            for (int four = 0; four < 2; four++) {
                const I source = (I)_mm512_permutexvar_epi32((__m512i)(both >> (16 * four)), table);
                const I dense = pick_bytes(w, source | (pairs + 0x02020202 * four));
                one::write(to + 256 * c + 128 * four + 64 * half, add_bytes(dense, zeros.bytes[half]));
            }
        }
    }
}

// A group's codes as bytes: in place, or unpacked to `buffer`. Prefetches PREFETCH_AHEAD.
static inline const std::uint8_t* byte_codes(const Linear& linear, const std::uint8_t* head, std::uint8_t* buffer) {
    const std::uint8_t* from = head + (linear.zeros == MIDDLE ? 64 : 128);
    const std::int64_t bytes = std::int64_t(linear.group) * PANEL * linear.weight_bits() / 8;
    for (std::int64_t at = 0; at < bytes; at += 64) prefetch(from + PREFETCH_AHEAD + at);
    if (linear.sparse && linear.kind == INT8) return expand_codes<8>(linear, head, from, buffer), buffer;
    if (linear.sparse) return expand_codes<4>(linear, head, from, buffer), buffer;
    if (linear.kind == INT8) return from;
    std::uint8_t* to = buffer;
    for (std::int64_t at = 0; at < bytes; at += 128, to += 256)
        for (int half = 0; half < 128; half += 64) {
            const I pairs = load_ints(from + at + half);
            one::write(to + half, pairs & 0x0f0f0f0f);
            one::write(to + half + 128, (pairs >> 4) & 0x0f0f0f0f);
        }
    return buffer;
}

template <int PLANES, int ZEROS, int ROWS>
class TileProduct {
public:
    TileProduct(const Linear& linear, const Activations& in) : linear_(linear), in_(in), groups_(linear.groups()) {}

    // A panel times `count` tokens from `token` on, whole blocks, added to `out`.
    void run(const std::uint8_t* panel, std::int64_t token, std::int64_t count, float (*out)[PANEL]) {
        alignas(64) std::uint8_t buffer[2][128 * PANEL];
        const std::int64_t bytes = linear_.panel_bytes() / groups_;
        const std::uint8_t* codes = byte_codes(linear_, panel, buffer[0]);
        Block last{};
        for (std::int64_t g = 0; g < groups_; g++, panel += bytes) {
            const std::uint8_t* current = codes;
            if (g + 1 < groups_) codes = byte_codes(linear_, panel + bytes, buffer[(g + 1) % 2]);
            asm volatile("" ::: "memory");  // the unpacked codes are written before tiles load them
            for (std::int64_t t = 0; t < count; t += ROWS) {
                const std::int8_t* x = in_.at(g, token + t);
                start<0>(current, x);
                if (last.head) store_sums<1>(), add<0>(last);
                start<1>(current, x);
                store_sums<0>();
                if (last.head) add<1>(last);
                last = {panel, g * in_.tokens + token + t, out + t};
            }
        }
        store_sums<1>();
        add<0>(last);
        add<1>(last);
    }

private:
    // The product of a token block and a group: the panel's scales, the tokens' constants, the destination.
    struct Block {
        const std::uint8_t* head;
        std::int64_t constants;
        float (*out)[PANEL];
    };

    // Multiplies a half of the panel's rows.
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
            const bool loaded = HALF == 1 && linear_.group <= 64;  // the tokens' tiles are loaded
            if (!loaded) _tile_loadd(6, x + k, linear_.group);
            if (PLANES == 2 && !loaded) _tile_loadd(7, x + in_.plane() + k, linear_.group);
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
    void store_sums() {
        if constexpr (HALF == 0) {
            _tile_stored(0, sums_[0][0], 64);
            if constexpr (PLANES == 2) _tile_stored(1, sums_[0][1], 64);
        } else {
            _tile_stored(2, sums_[1][0], 64);
            if constexpr (PLANES == 2) _tile_stored(3, sums_[1][1], 64);
        }
    }

    template <int HALF>
    void add(const Block& block) const {
        const F scale = load_fp16(block.head + 32 * HALF);
        const F zero = ZEROS == MIDDLE ? F{} : load_fp16(block.head + 64 + 32 * HALF);
        const float* scales = in_.scales + block.constants;
        const std::int32_t* sums = in_.sums + block.constants;
        const float* offsets = in_.offsets + block.constants;
        ATTAR_UNROLL
        for (int m = 0; m < ROWS; m++) {
            I total = load_ints(sums_[HALF][0] + 16 * m);
            if (PLANES == 2) total = (total << 8) + load_ints(sums_[HALF][PLANES - 1] + 16 * m);
            if (ZEROS == MIDDLE) total += broadcast_ints(sums[m]);
            float* to = block.out[m] + WIDTH * HALF;
            const float offset = ZEROS == MIDDLE ? 0.0f : offsets[m];
            store(to, add_group(ZEROS, load(to), total, scale, zero, scales[m], offset));
        }
    }

    alignas(64) std::int32_t sums_[2][PLANES][ROWS * 16];
    const Linear& linear_;
    const Activations& in_;
    const std::int64_t groups_;
};

// All tokens of a product, M of them: their planes are one behind the other in memory, PLANES M rows of a tile.
template <int M, int PLANES, int ZEROS>
class FewTiles {
public:
    FewTiles(const Linear& linear, const Activations& in) : linear_(linear), in_(in), groups_(linear.groups()) {}

    // A panel times the tokens, added to `out`.
    void run(const std::uint8_t* panel, F (*out)[2]) {
        alignas(64) std::uint8_t buffer[2][128 * PANEL];
        const std::int64_t bytes = linear_.panel_bytes() / groups_;
        const std::uint8_t *head = panel, *last = nullptr;
        const std::uint8_t* codes = byte_codes(linear_, head, buffer[0]);
        for (std::int64_t g = 0; g < groups_; g++, last = head, head += bytes) {
            const std::uint8_t* current = codes;
            if (g + 1 < groups_) codes = byte_codes(linear_, head + bytes, buffer[(g + 1) % 2]);
            asm volatile("" ::: "memory");  // the unpacked codes are written before tiles load them
            start(current, in_.at(g, 0));
            if (last) add(last, g - 1, out);
            _tile_stored(0, sums_[0], 64);
            _tile_stored(1, sums_[1], 64);
        }
        add(last, groups_ - 1, out);
    }

private:
    // Multiplies a group: half h of the panel's rows to tile h.
    void start(const std::uint8_t* codes, const std::int8_t* x) {
        const bool two = linear_.group > 64;
        const std::uint8_t* second = codes + 64 * PANEL;
        _tile_loadd(6, x, linear_.group);
        if (two) _tile_loadd(7, x + 64, linear_.group);
        _tile_zero(0);
        _tile_loadd(4, codes, 128);
        _tile_dpbsud(0, 6, 4);
        if (two) _tile_loadd(5, second, 128);
        if (two) _tile_dpbsud(0, 7, 5);
        _tile_zero(1);
        _tile_loadd(4, codes + 64, 128);
        _tile_dpbsud(1, 6, 4);
        if (two) _tile_loadd(5, second + 64, 128);
        if (two) _tile_dpbsud(1, 7, 5);
    }

    // A group's sums, which were stored, to the output.
    void add(const std::uint8_t* head, std::int64_t g, F (*out)[2]) const {
        ATTAR_UNROLL
        for (int half = 0; half < 2; half++) {
            const F scale = load_fp16(head + 32 * half);
            const F zero = ZEROS == MIDDLE ? F{} : load_fp16(head + 64 + 32 * half);
            ATTAR_UNROLL
            for (int m = 0; m < M; m++) {
                const std::int64_t constants = g * in_.tokens + m;
                I total = load_ints(sums_[half] + 16 * m);
                if (PLANES == 2) total = (total << 8) + load_ints(sums_[half] + 16 * (M + m));
                if (ZEROS == MIDDLE) total += broadcast_ints(in_.sums[constants]);
                const float offset = ZEROS == MIDDLE ? 0.0f : in_.offsets[constants];
                out[m][half] = add_group(ZEROS, out[m][half], total, scale, zero, in_.scales[constants], offset);
            }
        }
    }

    alignas(64) std::int32_t sums_[2][PLANES * M * 16];
    const Linear& linear_;
    const Activations& in_;
    const std::int64_t groups_;
};

// Whether all tokens of a product are one tile. Short groups, whose sums are added more often, are faster in the loops
// of matmul.h while tokens are few.
static inline bool few_tiles(const Activations& in, std::int64_t tokens) {
    const std::int64_t from = in.group < 128 ? 4 : 3;
    return in.group && tokens >= from && tokens <= 8 && (in.planes == 1 || tokens == in.tokens) && tiles_permitted();
}

// Tokens of a tile block; 0: use the loops of matmul.h.
static inline int tile_rows(const Activations& in, std::int64_t tokens) {
    if (few_tiles(in, tokens)) return int(tokens * in.planes);
    if (!in.group || tokens * in.planes < MIN_ROWS || !tiles_permitted()) return 0;
    return tokens > 8 ? 16 : 8;
}

template <int M, int PLANES>
static inline void multiply_few(const Linear& linear, const Activations& in, std::int64_t panel, const Output& output) {
    F out[M][2] = {};
    const std::uint8_t* data = linear.data + panel * linear.panel_bytes();
    if (linear.zeros == MIDDLE) FewTiles<M, PLANES, MIDDLE>(linear, in).run(data, out);
    if (linear.zeros == POINTS) FewTiles<M, PLANES, POINTS>(linear, in).run(data, out);
    if (linear.zeros == PRODUCTS) FewTiles<M, PLANES, PRODUCTS>(linear, in).run(data, out);
    ATTAR_UNROLL
    for (int m = 0; m < M; m++) store_output(linear, out[m][0], out[m][1], panel, m, output);
}

// A panel times all `tokens`, of which few_tiles() is true.
static inline void multiply_few(const Linear& linear, const Activations& in, std::int64_t panel, std::int64_t tokens,
                                const Output& output) {
    switch (tokens * 2 + in.planes) {
        case 7: return multiply_few<3, 1>(linear, in, panel, output);
        case 8: return multiply_few<3, 2>(linear, in, panel, output);
        case 9: return multiply_few<4, 1>(linear, in, panel, output);
        case 10: return multiply_few<4, 2>(linear, in, panel, output);
        case 11: return multiply_few<5, 1>(linear, in, panel, output);
        case 12: return multiply_few<5, 2>(linear, in, panel, output);
        case 13: return multiply_few<6, 1>(linear, in, panel, output);
        case 14: return multiply_few<6, 2>(linear, in, panel, output);
        case 15: return multiply_few<7, 1>(linear, in, panel, output);
        case 16: return multiply_few<7, 2>(linear, in, panel, output);
        case 17: return multiply_few<8, 1>(linear, in, panel, output);
        case 18: return multiply_few<8, 2>(linear, in, panel, output);
    }
}

template <int ROWS, int PLANES>
static inline void multiply_tiles(const Linear& linear, const Activations& in, const std::uint8_t* panel,
                                  std::int64_t token, std::int64_t count, float (*out)[PANEL]) {
    if (linear.zeros == MIDDLE) TileProduct<PLANES, MIDDLE, ROWS>(linear, in).run(panel, token, count, out);
    if (linear.zeros == POINTS) TileProduct<PLANES, POINTS, ROWS>(linear, in).run(panel, token, count, out);
    if (linear.zeros == PRODUCTS) TileProduct<PLANES, PRODUCTS, ROWS>(linear, in).run(panel, token, count, out);
}

// A panel times tokens [first, last), at most SOME, in blocks of 8 or 16; returns the first
// token that is left.
static inline std::int64_t product_tiles(const Linear& linear, const Activations& in, int rows, std::int64_t panel,
                                         std::int64_t first, std::int64_t last, const Output& output) {
    const std::int64_t tokens = last - first;
    if (first == 0 && few_tiles(in, tokens)) {
        multiply_few(linear, in, panel, tokens, output);
        return last;
    }
    const std::int64_t blocks = (tokens + rows - MIN_ROWS / in.planes) / rows;
    if (!blocks) return first;
    alignas(64) float out[TOKEN_BLOCK][PANEL];
    std::memset(out, 0, blocks * rows * sizeof *out);
    const std::uint8_t* data = linear.data + panel * linear.panel_bytes();
    const std::int64_t count = blocks * rows, done = std::min(count, tokens);
    if (rows == 16 && in.planes == 2) multiply_tiles<16, 2>(linear, in, data, first, count, out);
    if (rows == 16 && in.planes == 1) multiply_tiles<16, 1>(linear, in, data, first, count, out);
    if (rows == 8 && in.planes == 2) multiply_tiles<8, 2>(linear, in, data, first, count, out);
    if (rows == 8 && in.planes == 1) multiply_tiles<8, 1>(linear, in, data, first, count, out);
    for (std::int64_t m = 0; m < done; m++)
        store_output(linear, load(out[m]), load(out[m] + WIDTH), panel, first + m, output);
    return first + done;
}

#else

static inline bool tiles_permitted() { return false; }
struct Tiles {
    Tiles(int, int) {}
};
static inline int tile_rows(const Activations&, std::int64_t) { return 0; }
static inline std::int64_t product_tiles(const Linear&, const Activations&, int, std::int64_t, std::int64_t first,
                                         std::int64_t, const Output&) {
    return first;
}

#endif

}  // namespace attar
