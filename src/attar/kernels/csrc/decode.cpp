// Products with packed weights and whole steps of a Llama-shaped model, for attar/kernels: see decode/*.h.

#include "decode/draft_block.h"
#include "decode/latents.h"
#include "decode/matmul.h"
#include "decode/mixture.h"
#include "decode/recurrence.h"
#include "decode/step.h"
#include "decode/thread_pool.h"

#include <new>
#include <stdexcept>

using namespace attar;

// No exception may leave the library. Returns 0 on success, 1 without memory, what is out of bounds (bounds.h), 2 on any
// other failure.
template <class Function>
static std::int32_t guarded(Function f) noexcept {
    try {
        f();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::length_error&) {  // more than a vector can hold
        return 1;
    } catch (OutOfBounds what) {
        return what;
    } catch (...) {
        return 2;
    }
}

extern "C" {

// Whether the library multiplies and sums bytes in one instruction.
std::int32_t attar_dot_products() { return one::DOT_PRODUCTS; }

// Whether many tokens are multiplied on the matrix unit: compiled in, and permitted by the system.
std::int32_t attar_tiles() { return tiles_permitted(); }

// A thread pool for `attar_multiply`; null: no memory.
ThreadPool* attar_thread_pool(std::int32_t size) {
    ThreadPool* pool = nullptr;
    guarded([&] { pool = new ThreadPool(size); });
    return pool;
}
void attar_thread_pool_free(ThreadPool* pool) { delete pool; }

// y (tokens, rows) = x (tokens, columns) W^T, x quantized to 8 or 16 bits; returns as `guarded` does.
std::int32_t attar_multiply(ThreadPool* pool, const Linear* linear, const float* x, std::int64_t tokens,
                            std::int32_t bits, float* y) {
    return guarded([&] {
        ActivationBuffer buffer;
        buffer.reserve(*linear, tokens, bits);
        const Activations in = buffer.view(*linear, bits);
        pool->run(2, [&](ThreadPool::Worker& worker) {
            worker.parallel_for(tokens, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t t = first; t < last; t++) in.set(t, 0, linear->columns, x + t * linear->columns);
            });
            worker.parallel_for(linear->panels(), Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
                multiply(*linear, in, first, last, tokens, Output{y, linear->rows, false});
            });
        });
    });
}

// null: no memory.
Runner* attar_runner(const Model* model, std::int32_t threads) {
    Runner* runner = nullptr;
    guarded([&] { runner = new Runner(*model, std::make_shared<ThreadPool>(threads)); });
    return runner;
}
// With the threads of another runner; they run one at a time.
Runner* attar_runner_with(const Model* model, const Runner* other) {
    Runner* runner = nullptr;
    guarded([&] { runner = new Runner(*model, other->threads()); });
    return runner;
}
void attar_runner_free(Runner* runner) { delete runner; }
std::int32_t attar_run(Runner* runner, const Batch* batch) {
    return guarded([&] { runner->run(*batch); });
}
std::int32_t attar_write_context(Runner* runner, const DrafterWeights* drafter, const ContextRows* rows) {
    return guarded([&] { runner->write_context(*drafter, *rows); });
}
std::int32_t attar_draft(Runner* runner, const DrafterWeights* drafter, const Batch* batch, const DraftRound* round) {
    return guarded([&] { runner->draft(*drafter, *batch, *round); });
}

// For tests: workers allocate `bytes` in one item of a phase (in every item with -1), or, if `outside`, after it; then
// another phase. Returns as `guarded` does; 3 if an item was not done.
std::int32_t attar_thread_pool_fails(ThreadPool* pool, std::int64_t bytes, std::int64_t item, std::int32_t outside) {
    std::atomic<std::int64_t> done{0};
    const auto allocate = [&] { ::operator delete(::operator new(std::size_t(bytes))); };
    const std::int32_t code = guarded([&] {
        pool->run(2, [&](ThreadPool::Worker& worker) {
            worker.parallel_for(64, Schedule::GUIDED, [&](std::int64_t first, std::int64_t last) {
                done += last - first;
                if (!outside && (item < 0 || (first <= item && item < last))) allocate();
            });
            if (outside) allocate();
            const auto count = [&](std::int64_t first, std::int64_t last) { done += last - first; };
            worker.parallel_for(64, Schedule::STATIC, count);
        });
    });
    return !outside && pool->size() > 1 && done.load() != 128 ? 3 : code;
}

// Copies keys and values between slots: `count` pairs (from, to), one after the other.
std::int32_t attar_copy_slots(const Model* model, const std::int64_t* pairs, std::int64_t count) {
    return guarded([&] {
        check_slots(*model, pairs, 2 * count);
        copy_slots(*model, pairs, count);
    });
}

// Reads all bytes, every worker its share in four streams, and sums them: measures memory bandwidth.
std::uint64_t attar_read(ThreadPool* pool, const std::uint8_t* data, std::int64_t bytes) {
    std::atomic<std::uint64_t> total{0};
    guarded([&] { pool->run(1, [&](ThreadPool::Worker& worker) {
        worker.parallel_for(bytes / 256, Schedule::STATIC, [&](std::int64_t first, std::int64_t last) {
            const std::int64_t quarter = (last - first) / 4 * 256;
            const std::uint8_t* from = data + first * 256;
            I sums[4] = {};
            for (std::int64_t i = 0; i < quarter; i += 64)
                for (int stream = 0; stream < 4; stream++) {
                    sums[stream] += load_ints(from + stream * quarter + i);
                    prefetch(from + stream * quarter + i + PREFETCH_AHEAD);
                }
            std::uint64_t own = 0;
            for (const I& lanes : sums)
                for (int i = 0; i < WIDTH; i++) own += std::uint32_t(lanes[i]);
            total += own;
        });
    }); });
    return total;
}
}
