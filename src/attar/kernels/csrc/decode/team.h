// Threads that do one thing together, phase by phase: every member runs the same function, and `meet` waits
// for all. Between calls they sleep; inside one they spin, for phases last microseconds.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attar {

class Team {
public:
    explicit Team(int size) : size_(size < 1 ? 1 : size) {
        for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> held(mutex_);
            ended_ = true;
            calls_++;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // `work(member)` on every member; returns when all have returned. One caller at a time.
    void run(const std::function<void(int)>& work) {
        if (size_ > 1) {
            {
                std::lock_guard<std::mutex> held(mutex_);
                work_ = &work;
                calls_++;
            }
            wake_.notify_all();
        }
        work(0);
        meet();
    }

    // Returns when all members have come here.
    void meet() {
        if (size_ == 1) return;
        const std::uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            pause();
            if (spins > PATIENCE) std::this_thread::yield();
        }
    }

private:
    static constexpr int PATIENCE = 2000;  // spins before the processor is offered to others

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    void serve(int member) {
        for (std::uint64_t seen = 0;;) {
            const std::function<void(int)>* work;
            {
                std::unique_lock<std::mutex> held(mutex_);
                wake_.wait(held, [&] { return calls_ != seen; });
                if (ended_) return;
                seen = calls_;
                work = work_;
            }
            (*work)(member);
            meet();
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::uint64_t calls_ = 0;
    bool ended_ = false;
    const std::function<void(int)>* work_ = nullptr;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<std::uint32_t> round_{0};
};

// [first, last) of `count` things that are member `member`'s of `size`.
struct Share {
    std::int64_t first, last;
    Share(std::int64_t count, int member, int size)
        : first(count * member / size), last(count * (member + 1) / size) {}
};

}  // namespace attar
