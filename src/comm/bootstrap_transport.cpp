#include "comm/bootstrap_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "latent_moe/shape.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

struct RegionShape {
    std::int64_t rows = 0;
    std::int64_t row_bytes = 0;
};

/// What a rank announces before it sends: the header, and the shape of what it has for each rank.
struct Announcement {
    ExchangeHeader header;
    std::array<RegionShape, max_world> outgoing;

    std::int64_t bytes_before(int rank) const noexcept {
        std::int64_t bytes = 0;
        for (int peer = 0; peer < rank; ++peer) {
            const RegionShape& shape = outgoing[static_cast<std::size_t>(peer)];
            bytes += shape.rows * shape.row_bytes;
        }
        return bytes;
    }
};

class BootstrapTransport final : public Transport {
public:
    explicit BootstrapTransport(const Bootstrap& bootstrap)
        : rank_(bootstrap.rank), world_(bootstrap.world), all_gather_(bootstrap.all_gather_bytes) {}

    int rank() const noexcept override { return rank_; }
    int world() const noexcept override { return world_; }
    std::int64_t preferred_region_bytes() const noexcept override { return std::int64_t{1} << 20; }
    bool concurrent_channels() const noexcept override { return false; }
    const char* description() const noexcept override { return "all-gather of bytes"; }

    void exchange(Channel, const ExchangeHeader& header, std::span<const Region> outgoing, Consume consume) override {
        if (broken_) throw Error(StatusCode::aborted, reason());
        try {
            exchange_once(header, outgoing, consume);
        } catch (const Error& error) {
            abort(error.what());
            throw;
        } catch (const std::bad_alloc&) {
            abort(fmt::format("out of memory on rank {}", rank_));
            throw;
        }
    }

    void abort(const std::string& reason) noexcept override {
        const std::lock_guard lock(mutex_);
        if (!broken_) reason_ = reason;
        broken_ = true;
    }

private:
    /// The all-gather is the caller's, and may throw anything.
    void gather(const void* send, void* received, std::size_t bytes) const {
        const auto failed = [this](const char* what) {
            return Error(StatusCode::unavailable,
                         fmt::format("the bootstrap's all_gather_bytes failed on rank {}: {}", rank_, what));
        };
        try {
            all_gather_(send, received, bytes);
        } catch (const Error&) {
            throw;
        } catch (const std::bad_alloc&) {
            throw;
        } catch (const std::exception& error) {
            throw failed(error.what());
        } catch (...) {
            throw failed("an exception that is not a std::exception");
        }
    }

    // Message of a rank: its rows for every rank, in rank order, padded to the longest message of all ranks.
    void exchange_once(const ExchangeHeader& header, std::span<const Region> outgoing, Consume consume) {
        const auto ranks = static_cast<std::size_t>(world_);
        Announcement mine{header, {}};
        for (std::size_t peer = 0; peer < ranks; ++peer)
            mine.outgoing[peer] = {outgoing[peer].rows, outgoing[peer].row_bytes};
        std::vector<Announcement> announced(ranks);
        gather(&mine, announced.data(), sizeof mine);
        std::int64_t longest = 0;
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            require_same(announced[0].header, 0, announced[peer].header, static_cast<int>(peer));
            longest = std::max(longest, announced[peer].bytes_before(world_));
        }

        const auto message_bytes = static_cast<std::size_t>(longest);
        send_.assign(message_bytes, std::byte{0});
        received_.resize(message_bytes * ranks);
        std::byte* out = send_.data();
        for (const Region& region : outgoing) out = pack(region, out);
        gather(send_.data(), received_.data(), message_bytes);

        std::array<Region, max_world> incoming;
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            const RegionShape& shape = announced[peer].outgoing[static_cast<std::size_t>(rank_)];
            const std::byte* message = received_.data() + peer * message_bytes;
            incoming[peer] = {message + announced[peer].bytes_before(rank_), shape.rows, shape.row_bytes, shape.row_bytes};
        }
        consume(std::span(incoming.data(), ranks));
    }

    std::string reason() const {
        const std::lock_guard lock(mutex_);
        return reason_;
    }

    const int rank_;
    const int world_;
    const std::function<void(const void*, void*, std::size_t)> all_gather_;
    std::vector<std::byte> send_;
    std::vector<std::byte> received_;
    mutable std::mutex mutex_;
    std::string reason_;
    std::atomic<bool> broken_ = false;
};

}  // namespace

std::shared_ptr<Transport> make_bootstrap_transport(const Bootstrap& bootstrap) {
    return std::make_shared<BootstrapTransport>(bootstrap);
}

}  // namespace latent_moe
