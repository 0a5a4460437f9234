// Threads that do one thing together, phase by phase: every member runs the same function, and in it `share`
// hands out the parts of a phase to whoever comes for them.
//
// A phase ends when its parts are done, not when all members have come: a thread that the system has put
// aside is waited for only while it holds a part, and goes through what was done without it in no time. So
// a crowded machine costs what it takes, not a standstill at each phase.
//
// What a member throws (there is no memory) ends its own way, never a phase of others: the part counts as done,
// and `run` throws it again when all are out.

#pragma once

#include <algorithm>
#include <cassert>
#include <exception>
#include <functional>
#include <memory>
#include <system_error>
#include <vector>

#include "gate.h"

namespace attar {

// How a phase is handed out. EVEN: as many parts as members. GUIDED: large parts first, small ones at the end.
enum class Parts { EVEN, GUIDED };

class Team {
public:
    // So many threads, this one among them; fewer where the system has no more.
    explicit Team(int size) {
        threads_.reserve(size < 1 ? 1 : size);
        try {
            for (int i = 1; i < size; i++) threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
        }
        size_ = int(threads_.size()) + 1;
    }

    ~Team() {
        ended_.store(true);
        calls_.fetch_add(1);
        idle_.wake();
        for (std::thread& thread : threads_) thread.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // A member's way through the phases.
    class Member {
    public:
        explicit Member(Team& team) : team_(team) {}

        int size() const { return team_.size_; }

        // f(first, last) for parts of [0, count), by all members; returns when all of it is done.
        template <class Function>
        void share(std::int64_t count, Parts parts, Function f) {
            if (count <= 0) return;
            if (team_.size_ == 1) return f(std::int64_t(0), count);
            assert(at_ < team_.room_);
            Phase& phase = team_.phases_[at_++];
            for (std::int64_t first = phase.next.load(std::memory_order_relaxed); first < count;) {
                const std::int64_t last = first + part(count, first, parts);
                if (!phase.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
                try {
                    f(first, last);
                } catch (...) {
                    team_.failed();
                }
                if (phase.done.fetch_add(last - first) + last - first == count) team_.busy_.wake();
                first = phase.next.load(std::memory_order_relaxed);
            }
            team_.busy_.wait(LOOKS, [&] { return phase.done.load() >= count; });
        }

    private:
        std::int64_t part(std::int64_t count, std::int64_t first, Parts parts) const {
            const std::int64_t left = count - first, size = team_.size_;
            if (parts == Parts::EVEN) return std::min(left, (count + size - 1) / size);
            return std::max<std::int64_t>(1, left / (2 * size));
        }

        Team& team_;
        std::int64_t at_ = 0;
    };

    // `work(member)` on all members, with at most `phases` phases; returns when all have returned, and throws
    // what one of them threw. One caller at a time.
    void run(std::int64_t phases, const std::function<void(Member&)>& work) {
        failure_ = nullptr;
        if (size_ > 1) open(phases, work);
        enter(work);
        if (size_ > 1) close();
        if (failure_) std::rethrow_exception(failure_);
    }

private:
    static constexpr int LOOKS = 2000;        // some 30 to 60 microseconds
    static constexpr int IDLE_LOOKS = 20000;  // what lies between two steps, sampling among it

    struct alignas(64) Phase {
        std::atomic<std::int64_t> next{0}, done{0};
    };

    void enter(const std::function<void(Member&)>& work) {
        Member own(*this);
        try {
            work(own);
        } catch (...) {
            failed();
        }
    }

    // Called while an exception is handled; the first one is kept.
    void failed() {
        std::lock_guard<std::mutex> held(failing_);
        if (!failure_) failure_ = std::current_exception();
    }

    void open(std::int64_t phases, const std::function<void(Member&)>& work) {
        if (phases > room_) {
            phases_ = std::make_unique<Phase[]>(phases);
            room_ = phases;
        }
        for (std::int64_t i = 0; i < phases; i++) {
            phases_[i].next.store(0, std::memory_order_relaxed);
            phases_[i].done.store(0, std::memory_order_relaxed);
        }
        work_ = &work;
        open_.store(true);
        calls_.fetch_add(1);
        idle_.wake();
    }

    // Nobody comes in any more; who is in goes out.
    void close() {
        open_.store(false);
        busy_.wait(LOOKS, [&] { return inside_.load() == 0; });
    }

    void serve() {
        for (std::uint64_t seen = 0; !ended_.load();) {
            idle_.wait(IDLE_LOOKS, [&] { return calls_.load() != seen; });
            seen = calls_.load();
            inside_.fetch_add(1);
            if (open_.load()) enter(*work_);
            inside_.fetch_sub(1);
            busy_.wake();
        }
    }

    int size_ = 1;
    std::vector<std::thread> threads_;
    std::exception_ptr failure_;
    std::mutex failing_;
    std::unique_ptr<Phase[]> phases_;
    std::int64_t room_ = 0;
    const std::function<void(Member&)>* work_ = nullptr;
    Gate idle_, busy_;
    alignas(64) std::atomic<std::uint64_t> calls_{0};
    std::atomic<bool> open_{false}, ended_{false};
    alignas(64) std::atomic<int> inside_{0};
};

}  // namespace attar
