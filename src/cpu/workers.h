// The threads of one rank.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/function_ref.h"

namespace latent_moe {

/// A fixed set of threads that share loops. The calling thread is worker 0.
class Workers {
public:
    explicit Workers(int count);
    ~Workers();
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    int count() const noexcept { return static_cast<int>(threads_.size()) + 1; }

    /// Runs `body(worker, item)` for every item from 0 to `items` and returns when all are done; rethrows the first
    /// exception. Which worker takes which item is not fixed: results must not depend on it. One loop at a time.
    void for_each(std::int64_t items, FunctionRef<void(int worker, std::int64_t item)> body);

private:
    void stop() noexcept;
    void serve(int worker);
    void take_items(int worker, std::unique_lock<std::mutex>& lock);

    std::mutex mutex_;
    std::condition_variable started_;
    std::condition_variable finished_;
    FunctionRef<void(int, std::int64_t)> body_;
    std::uint64_t loop_ = 0;
    std::int64_t items_ = 0;
    std::int64_t next_ = 0;
    std::int64_t running_ = 0;
    std::exception_ptr failure_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

/// One thread beside the caller, for work that overlaps with the caller's.
class SideWorker {
public:
    SideWorker();
    ~SideWorker();
    SideWorker(const SideWorker&) = delete;
    SideWorker& operator=(const SideWorker&) = delete;

    /// `work` must live until `join`. One at a time.
    void start(FunctionRef<void()> work);
    /// Waits for the work; rethrows what it threw.
    void join();

private:
    void serve();

    std::mutex mutex_;
    std::condition_variable changed_;
    FunctionRef<void()> work_;
    bool busy_ = false;
    bool stopping_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

/// Owns one of these. A child process that was forked off has a copy without its threads, whose conditions would wait for
/// them for ever when they are destroyed: there it is left behind.
template <typename Threads>
class OwnThreads {
public:
    template <typename... Arguments>
    explicit OwnThreads(Arguments... arguments) : threads_(std::make_unique<Threads>(arguments...)) {}
    ~OwnThreads() {
        if (::getpid() != process_) static_cast<void>(threads_.release());
    }
    OwnThreads(const OwnThreads&) = delete;
    OwnThreads& operator=(const OwnThreads&) = delete;

    Threads& operator*() const noexcept { return *threads_; }
    Threads* operator->() const noexcept { return threads_.get(); }

private:
    pid_t process_ = ::getpid();
    std::unique_ptr<Threads> threads_;
};

}  // namespace latent_moe
