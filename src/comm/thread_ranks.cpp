// Ranks that are threads of one process: they read one another's memory in place.
//
// An exchange is two barriers. Between them every rank's published regions are stable, so peers read them without a copy:
//
//     rank 0: publish ──┐ arrive                    ┌─ consume ──┐ leave
//     rank 1: publish ──┤ ═══ all have published ═══╪─ consume ──┤ ═══ all have read: buffers may be reused ═══
//     rank 2: publish ──┘                           └─ consume ──┘
//
// Memory order: a rank publishes, arrives and leaves under one mutex, which orders its earlier writes before every peer's
// reads, and every peer's reads before its later writes.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/transport.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/shape.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

class ThreadGroup {
public:
    ThreadGroup(int world, int timeout_ms) : world_(world), timeout_(timeout_ms) {
        for (Meeting& meeting : meetings_) meeting.slots.resize(static_cast<std::size_t>(world));
    }

    int world() const noexcept { return world_; }
    std::chrono::milliseconds timeout() const noexcept { return timeout_; }

    void exchange(int rank, std::chrono::milliseconds timeout, Channel channel, const ExchangeHeader& header,
                  std::span<const Region> outgoing, Transport::Consume consume) {
        Meeting& meeting = meetings_[static_cast<std::size_t>(channel)];
        Slot& own = meeting.slots[static_cast<std::size_t>(rank)];
        {
            const std::lock_guard lock(mutex_);
            own = {header, outgoing.data()};
        }
        wait_for_all(meeting.arrived, rank, header.step, timeout);
        try {
            for (int left = 0; left + 1 < world_; ++left) {
                require_same(meeting.slots[static_cast<std::size_t>(left)].header, left,
                             meeting.slots[static_cast<std::size_t>(left) + 1].header, left + 1);
            }
            std::array<Region, max_world> incoming;
            for (int peer = 0; peer < world_; ++peer) {
                incoming[static_cast<std::size_t>(peer)] = meeting.slots[static_cast<std::size_t>(peer)].outgoing[rank];
            }
            consume(std::span(incoming.data(), static_cast<std::size_t>(world_)));
        } catch (const Error& error) {
            // Every rank sees a mismatch for itself: let each report it in its own words.
            if (error.code() != StatusCode::mismatch) abort(rank, error.what());
            throw;
        }
        wait_for_all(meeting.left, rank, header.step, timeout);
    }

    void all_gather_bytes(int rank, const void* send, void* received, std::size_t bytes) {
        const Region own{static_cast<const std::byte*>(send), 1, static_cast<std::int64_t>(bytes), 0};
        std::array<Region, max_world> outgoing;
        outgoing.fill(own);
        exchange(rank, timeout_, Channel::main, {}, std::span(outgoing.data(), static_cast<std::size_t>(world_)),
                 [&](std::span<const Region> incoming) { store_gathered(incoming, rank, received, bytes); });
    }

    void abort(int rank, const std::string& reason) noexcept {
        const std::lock_guard lock(mutex_);
        if (!fault_) fault_.emplace(StatusCode::aborted, fmt::format("rank {} gave up: {}", rank, reason), rank, Step::none);
        changed_.notify_all();
    }

private:
    struct Barrier {
        std::uint64_t arrived_mask = 0;
        std::uint64_t generation = 0;
    };
    struct Slot {
        ExchangeHeader header;
        const Region* outgoing = nullptr;
    };
    struct Meeting {
        Barrier arrived;
        Barrier left;
        std::vector<Slot> slots;
    };

    void wait_for_all(Barrier& barrier, int rank, Step step, std::chrono::milliseconds timeout) {
        std::unique_lock lock(mutex_);
        if (fault_) throw ExchangeError(*fault_);
        const std::uint64_t everyone = (std::uint64_t{1} << world_) - 1;
        barrier.arrived_mask |= std::uint64_t{1} << rank;
        if (barrier.arrived_mask == everyone) {
            barrier.arrived_mask = 0;
            ++barrier.generation;
            changed_.notify_all();
            return;
        }
        const std::uint64_t generation = barrier.generation;
        const auto deadline = std::chrono::steady_clock::now() + timeout;
        const bool woken = changed_.wait_until(lock, deadline, [&] { return barrier.generation != generation || fault_; });
        if (barrier.generation != generation) return;
        if (!woken) {
            const std::uint64_t missing = everyone & ~barrier.arrived_mask;
            fault_.emplace(
                StatusCode::timeout,
                fmt::format("{} did not arrive within {} ms at the {}", ranks_in(missing), timeout.count(), name(step)),
                std::countr_zero(missing), step);
            changed_.notify_all();
        }
        throw ExchangeError(*fault_);
    }

    std::string ranks_in(std::uint64_t mask) const {
        std::vector<int> missing;
        for (int rank = 0; rank < world_; ++rank) {
            if ((mask >> rank & 1U) != 0) missing.push_back(rank);
        }
        return fmt::format("{} {}", missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "));
    }

    const int world_;
    const std::chrono::milliseconds timeout_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::array<Meeting, channel_count> meetings_;
    std::optional<ExchangeError> fault_;  // sticky
};

class ThreadTransport final : public Transport {
public:
    ThreadTransport(std::shared_ptr<ThreadGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}

    int rank() const noexcept override { return rank_; }
    int world() const noexcept override { return group_->world(); }
    void exchange(Channel channel, const ExchangeHeader& header, std::span<const Region> outgoing,
                  Consume consume) override {
        group_->exchange(rank_, std::chrono::milliseconds(timeout_ms()), channel, header, outgoing, consume);
    }
    std::int64_t preferred_region_bytes() const noexcept override { return INT64_MAX; }
    bool concurrent_channels() const noexcept override { return true; }
    const char* description() const noexcept override { return "threads of one process"; }
    void abort(const std::string& reason) noexcept override { group_->abort(rank_, reason); }

private:
    std::shared_ptr<ThreadGroup> group_;
    int rank_;
};

Bootstrap thread_rank(const std::shared_ptr<ThreadGroup>& group, int rank) {
    const auto transport = std::make_shared<ThreadTransport>(group, rank);
    transport->set_timeout_ms(static_cast<int>(group->timeout().count()));
    return {.rank = rank,
            .world = group->world(),
            .all_gather_bytes = [group, rank](const void* send, void* received,
                                              std::size_t bytes) { group->all_gather_bytes(rank, send, received, bytes); },
            .transport = transport,
            .local_world = group->world()};
}

}  // namespace

Bootstrap single_rank() {
    return thread_ranks(1).front();
}

std::vector<Bootstrap> thread_ranks(int world, int timeout_ms) {
    if (world < 1 || world > max_world) {
        throw Error(StatusCode::invalid_argument, fmt::format("world is {}, expected 1 to {}", world, max_world));
    }
    if (timeout_ms < 1) {
        throw Error(StatusCode::invalid_argument, fmt::format("timeout_ms is {}, expected at least 1", timeout_ms));
    }
    const auto group = std::make_shared<ThreadGroup>(world, timeout_ms);
    std::vector<Bootstrap> ranks;
    for (int rank = 0; rank < world; ++rank) ranks.push_back(thread_rank(group, rank));
    return ranks;
}

void run_thread_ranks(int world, const std::function<void(const Bootstrap&)>& body, int timeout_ms) {
    const std::vector<Bootstrap> ranks = thread_ranks(world, timeout_ms);
    std::vector<std::exception_ptr> failures(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        try {
            threads.emplace_back([&, rank] {
                try {
                    body(ranks[rank]);
                } catch (const std::exception& failure) {
                    failures[rank] = std::current_exception();
                    ranks[rank].transport->abort(failure.what());
                } catch (...) {
                    failures[rank] = std::current_exception();
                    ranks[rank].transport->abort("an exception that is not a std::exception");
                }
            });
        } catch (const std::system_error& error) {
            failures[rank] = std::make_exception_ptr(
                Error(StatusCode::out_of_memory,
                      fmt::format("cannot start the thread of rank {} of {}: {}", rank, world, error.what())));
            ranks[rank].transport->abort("its thread could not be started");
        }
    }
    for (std::thread& thread : threads) thread.join();

    const auto is_echo = [](const std::exception_ptr& failure) {
        try {
            std::rethrow_exception(failure);
        } catch (const Error& error) {
            return error.code() == StatusCode::aborted;
        } catch (...) {
            return false;
        }
    };
    std::exception_ptr first;
    for (const std::exception_ptr& failure : failures) {
        if (!failure) continue;
        if (!is_echo(failure)) std::rethrow_exception(failure);
        if (!first) first = failure;
    }
    if (first) std::rethrow_exception(first);
}

}  // namespace latent_moe
