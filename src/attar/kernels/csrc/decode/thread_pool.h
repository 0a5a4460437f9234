// A pool of threads that run one function together, phase by phase: every worker runs the same function, and
// `parallel_for` in it hands out the chunks of a phase to the workers that reach it.
//
// A phase ends when all its chunks are done, not when all workers have arrived: a thread that the system has
// descheduled is waited for only while it holds a chunk, and afterwards skips the phases that were done without
// it. So on a busy machine a phase costs its work, not a time slice.
//
// An exception in a worker (out of memory) does not end a phase for the others: its chunk counts as done, and
// `run` rethrows the exception when all workers have returned.

#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attar {

// An event count: a waiter spins on its condition for a while, then sleeps until it is notified.
//
// Phases last microseconds, as long as waking a thread, so waiters spin first. With more threads than
// processors the awaited thread may have no processor to run on: then the waiter must sleep.
class EventCount {
public:
    // Wakes the sleepers to test their conditions again. The state that these read was changed before,
    // sequentially consistent.
    void notify() {
        if (!sleepers_.load()) return;
        { std::lock_guard<std::mutex> lock(mutex_); }  // a waiter that read the old state sleeps by now
        changed_.notify_all();
    }

    // Returns when `ready()`, which is tested `spins` times before the thread sleeps.
    template <class Ready>
    void wait(int spins, Ready ready) {
        for (int spin = 0; spin < spins; spin++) {
            if (ready()) return;
            pause();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        changed_.wait(lock, ready);
        sleepers_.fetch_sub(1);
    }

private:
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

// Sizes of a phase's chunks. STATIC: one chunk per worker. GUIDED: large chunks first, small ones at the end.
enum class Schedule { STATIC, GUIDED };

class ThreadPool {
public:
    // `size` threads with the calling one among them; fewer where the system has no more.
    explicit ThreadPool(int size) {
        threads_.reserve(size < 1 ? 1 : size);
        try {
            for (int i = 1; i < size; i++) threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
        }
        size_ = int(threads_.size()) + 1;
    }

    ~ThreadPool() {
        ended_.store(true);
        runs_.fetch_add(1);
        idle_.notify();
        for (std::thread& thread : threads_) thread.join();
    }

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // A thread's progress through the phases of a run.
    class Worker {
    public:
        explicit Worker(ThreadPool& pool) : pool_(pool) {}

        int size() const { return pool_.size_; }

        // f(first, last) for chunks of [0, count), by all workers; returns when all chunks are done.
        template <class Function>
        void parallel_for(std::int64_t count, Schedule schedule, Function f) {
            if (count <= 0) return;
            if (pool_.size_ == 1) return f(std::int64_t(0), count);
            assert(phase_ < pool_.capacity_);
            Phase& phase = pool_.phases_[phase_++];
            for (std::int64_t first = phase.next.load(std::memory_order_relaxed); first < count;) {
                const std::int64_t last = first + chunk(count, first, schedule);
                if (!phase.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
                try {
                    f(first, last);
                } catch (...) {
                    pool_.keep_exception();
                }
                if (phase.done.fetch_add(last - first) + last - first == count) pool_.busy_.notify();
                first = phase.next.load(std::memory_order_relaxed);
            }
            pool_.busy_.wait(SPINS, [&] { return phase.done.load() >= count; });
        }

    private:
        std::int64_t chunk(std::int64_t count, std::int64_t first, Schedule schedule) const {
            const std::int64_t left = count - first, size = pool_.size_;
            if (schedule == Schedule::STATIC) return std::min(left, (count + size - 1) / size);
            return std::max<std::int64_t>(1, left / (2 * size));
        }

        ThreadPool& pool_;
        std::int64_t phase_ = 0;
    };

    // `work(worker)` on all threads, with at most `phases` phases; returns when all have returned, and rethrows
    // the first of their exceptions. One caller at a time.
    void run(std::int64_t phases, const std::function<void(Worker&)>& work) {
        exception_ = nullptr;
        if (size_ > 1) open(phases, work);
        enter(work);
        if (size_ > 1) close();
        if (exception_) std::rethrow_exception(exception_);
    }

private:
    static constexpr int SPINS = 2000;        // 30 to 60 microseconds
    static constexpr int IDLE_SPINS = 20000;  // the time between two steps, sampling included

    struct alignas(64) Phase {
        std::atomic<std::int64_t> next{0}, done{0};
    };

    void enter(const std::function<void(Worker&)>& work) {
        Worker worker(*this);
        try {
            work(worker);
        } catch (...) {
            keep_exception();
        }
    }

    // Called while an exception is handled; the first one is kept.
    void keep_exception() {
        std::lock_guard<std::mutex> lock(exception_mutex_);
        if (!exception_) exception_ = std::current_exception();
    }

    void open(std::int64_t phases, const std::function<void(Worker&)>& work) {
        if (phases > capacity_) {
            phases_ = std::make_unique<Phase[]>(phases);
            capacity_ = phases;
        }
        for (std::int64_t i = 0; i < phases; i++) {
            phases_[i].next.store(0, std::memory_order_relaxed);
            phases_[i].done.store(0, std::memory_order_relaxed);
        }
        work_ = &work;
        open_.store(true);
        runs_.fetch_add(1);
        idle_.notify();
    }

    // No further thread enters the run; waits for those inside.
    void close() {
        open_.store(false);
        busy_.wait(SPINS, [&] { return inside_.load() == 0; });
    }

    void serve() {
        for (std::uint64_t seen = 0; !ended_.load();) {
            idle_.wait(IDLE_SPINS, [&] { return runs_.load() != seen; });
            seen = runs_.load();
            inside_.fetch_add(1);
            if (open_.load()) enter(*work_);
            inside_.fetch_sub(1);
            busy_.notify();
        }
    }

    int size_ = 1;
    std::vector<std::thread> threads_;
    std::exception_ptr exception_;
    std::mutex exception_mutex_;
    std::unique_ptr<Phase[]> phases_;
    std::int64_t capacity_ = 0;
    const std::function<void(Worker&)>* work_ = nullptr;
    EventCount idle_, busy_;
    alignas(64) std::atomic<std::uint64_t> runs_{0};
    std::atomic<bool> open_{false}, ended_{false};
    alignas(64) std::atomic<int> inside_{0};
};

}  // namespace attar
