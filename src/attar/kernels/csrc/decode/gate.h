// Something that some wait for and another brings about: waiting looks for a while, then sleeps.
//
// Phases of a step last microseconds, and waking a sleeper costs as much: so who waits looks first. But with
// more threads than processors it may be waiting for one that has none to run on, and must give its own away.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attar {

class Gate {
public:
    // Wakes whoever sleeps here, to look again. What it looks at has been changed before, sequentially
    // consistent.
    void wake() {
        if (!sleepers_.load()) return;
        { std::lock_guard<std::mutex> held(mutex_); }  // whoever saw the old state is asleep by now
        awake_.notify_all();
    }

    // Returns when `ready()`, after looking `looks` times before it sleeps.
    template <class Ready>
    void wait(int looks, Ready ready) {
        for (int look = 0; look < looks; look++) {
            if (ready()) return;
            pause();
        }
        std::unique_lock<std::mutex> held(mutex_);
        sleepers_.fetch_add(1);
        awake_.wait(held, ready);
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
    std::condition_variable awake_;
};

}  // namespace attar
