#include "cpu/workers.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "latent_moe/status.h"

namespace latent_moe {

Workers::Workers(int count) {
    for (int worker = 1; worker < count; ++worker) {
        try {
            threads_.emplace_back([this, worker] { serve(worker); });
        } catch (const std::system_error& error) {
            stop();
            throw Error(StatusCode::out_of_memory,
                        fmt::format("cannot start worker thread {} of {}: {}", worker, count, error.what()));
        }
    }
}

Workers::~Workers() {
    stop();
}

void Workers::stop() noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    started_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Workers::for_each(std::int64_t items, FunctionRef<void(int worker, std::int64_t item)> body) {
    if (threads_.empty() || items <= 1) {
        for (std::int64_t item = 0; item < items; ++item) body(0, item);
        return;
    }
    std::unique_lock lock(mutex_);
    body_ = body;
    items_ = items;
    next_ = 0;
    failure_ = nullptr;
    ++loop_;
    started_.notify_all();
    take_items(0, lock);
    finished_.wait(lock, [this] { return running_ == 0; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Workers::take_items(int worker, std::unique_lock<std::mutex>& lock) {
    while (next_ < items_) {
        const std::int64_t item = next_++;
        ++running_;
        lock.unlock();
        std::exception_ptr failure;
        try {
            body_(worker, item);
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        --running_;
        if (failure) {
            if (!failure_) failure_ = failure;
            next_ = items_;
        }
    }
    if (running_ == 0) finished_.notify_all();
}

void Workers::serve(int worker) {
    std::unique_lock lock(mutex_);
    std::uint64_t seen = 0;
    while (true) {
        started_.wait(lock, [&] { return stopping_ || loop_ != seen; });
        if (stopping_) return;
        seen = loop_;
        take_items(worker, lock);
    }
}

SideWorker::SideWorker() : thread_([this] { serve(); }) {}

SideWorker::~SideWorker() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void SideWorker::start(FunctionRef<void()> work) {
    const std::lock_guard lock(mutex_);
    work_ = work;
    busy_ = true;
    changed_.notify_all();
}

void SideWorker::join() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void SideWorker::serve() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopping_ || busy_; });
        if (stopping_) return;
        lock.unlock();
        std::exception_ptr failure;
        try {
            work_();
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        failure_ = failure;
        busy_ = false;
        changed_.notify_all();
    }
}

}  // namespace latent_moe
