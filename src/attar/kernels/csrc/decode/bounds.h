// Whether everything that a step's arguments index lies inside the model's tables. Checked before the threads begin, so
// that no caller can make the library read or write beyond them: what is out of bounds is thrown, and nothing is done.

#pragma once

#include <algorithm>
#include <cstdint>

#include "model.h"

namespace attar {

// What is out of bounds; structures.py has their names.
enum OutOfBounds : std::int32_t { SPANS = 3, TOKENS, POSITIONS, SLOTS, BLOCKS, TREES, ROWS, STATES };

static inline void require(bool holds, OutOfBounds what) {
    if (!holds) throw what;
}

static inline bool inside(std::int64_t index, std::int64_t size) { return 0 <= index && index < size; }

static inline void check_slot(const Model& model, std::int64_t slot) {
    require(inside(slot, model.blocks * model.block_size), SLOTS);
}

constexpr std::int64_t FAR = std::int64_t(1) << 40;  // behind every position and before every window

static inline void check_position(const Model& model, std::int64_t position) {
    require(inside(position, model.rotary ? model.context : FAR), POSITIONS);
}

// The blocks that a span's tokens read. Those before every layer's window may be gone.
static inline void check_blocks(const Model& model, const Batch& batch, std::int64_t span) {
    const std::int64_t past = batch.past[span], count = batch.count[span], table = batch.table[span];
    require(inside(past, model.blocks * model.block_size + 1) && inside(table, batch.block_count + 1), SPANS);
    const std::int64_t end = (past + count + model.block_size - 1) / model.block_size;
    require(end <= batch.block_count - table, BLOCKS);
    std::int64_t widest = 0, narrowest = FAR, low = past;
    for (std::int64_t i = 0; i < model.layers; i++) {
        const std::int64_t window = model.layer[i].window ? model.layer[i].window : FAR;
        widest = std::max(widest, window);
        narrowest = std::min(narrowest, window);
    }
    for (std::int64_t i = 0; i < count; i++) {
        const std::int64_t after = batch.positions[batch.first[span] + i] + 1;
        require(after - narrowest <= past + i, POSITIONS);  // a window that begins behind the keys
        low = std::min(low, after - widest);
    }
    for (std::int64_t i = std::max<std::int64_t>(0, low) / model.block_size; i < end; i++)
        require(inside(batch.block[table + i], model.blocks), BLOCKS);
}

// What a span carries, and where its states are written.
static inline void check_states(const Batch& batch, std::int64_t span) {
    const std::int64_t again = batch.again[span], first = batch.save[span], last = batch.save[span + 1];
    require(again >= 0 && (!again || batch.history[span]), STATES);
    require(0 <= first && first <= last && last <= batch.saves, STATES);
    for (std::int64_t i = first, after = 0; i < last; after = batch.save_after[i++])
        require(after <= batch.save_after[i] && batch.save_after[i] <= again + batch.count[span], STATES);
}

static inline void check(const Model& model, const Batch& batch) {
    for (std::int64_t t = 0; t < batch.tokens; t++) {
        require(inside(batch.ids[t], model.embeddings) || (batch.ids[t] == -1 && model.mask), TOKENS);
        check_position(model, batch.positions[t]);
        check_slot(model, batch.slots[t]);
    }
    std::int64_t first = 0;
    for (std::int64_t s = 0; s < batch.spans; s++) {
        const std::int64_t count = batch.count[s];
        require(count > 0 && batch.first[s] == first && count <= batch.tokens - first, SPANS);
        for (std::int64_t t = first; t < first + count; t++) require(batch.span[t] == s, SPANS);
        check_blocks(model, batch, s);
        check_states(batch, s);
        require(batch.tree[s] == -1 || (batch.tree[s] >= 0 && batch.tree[s] + count * count <= batch.mask_size), TREES);
        first += count;
    }
    require(first == batch.tokens, SPANS);
    for (std::int64_t i = 0; i < batch.logit_rows; i++) require(inside(batch.rows[i], batch.tokens), ROWS);
    for (std::int64_t i = 0; i < batch.kept; i++) require(inside(batch.keep[i], batch.tokens), ROWS);
    for (std::int64_t i = 0; i < 2 * batch.copies; i++) require(inside(batch.copy[i], model.blocks), BLOCKS);
}

static inline void check_slots(const Model& model, const std::int64_t* slots, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i++) check_slot(model, slots[i]);
}

}  // namespace attar
