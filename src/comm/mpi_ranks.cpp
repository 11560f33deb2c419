// Ranks that are MPI processes. Point-to-point messages rather than MPI's collectives, so that a missing peer can be named:
//
//     to every peer:   header (call, tokens, layer, step, shape of the data)   tag 2c
//                      data                                                    tag 2c + 1      (c: the channel)
//
// Headers are compared before any data is received, so a peer that is in another call is an error, not a wrong answer. MPI
// keeps messages of one sender and tag in order, so a fast rank's next header waits its turn. MPI copies: once the sends
// have completed, buffers may be reused; no barrier is needed.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/transport.h"
#include "latent_moe/mpi.h"
#include "latent_moe/shape.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

void check(int result, const char* operation) {
    if (result == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(result, text.data(), &length);
    throw Error(StatusCode::aborted,
                fmt::format("{} failed: {}", operation, std::string_view(text.data(), static_cast<std::size_t>(length))));
}

struct Announcement {
    ExchangeHeader header;
    std::int64_t rows = 0;
    std::int64_t row_bytes = 0;
};

/// The requests of one exchange and whose they are.
struct Requests {
    std::vector<MPI_Request> handles;
    std::vector<int> peers;

    void clear() noexcept {
        handles.clear();
        peers.clear();
    }
};

class MpiGroup {
public:
    MpiGroup(MPI_Comm communicator, int timeout_ms) : timeout_(timeout_ms) {
        duplicate(communicator);
        MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
        MPI_Comm_rank(communicator_, &rank_);
        MPI_Comm_size(communicator_, &world_);
        int level = MPI_THREAD_SINGLE;
        MPI_Query_thread(&level);
        concurrent_ = level >= MPI_THREAD_SERIALIZED;
        count_ranks_of_this_host();
    }
    MpiGroup(const MpiGroup&) = delete;
    MpiGroup& operator=(const MpiGroup&) = delete;
    ~MpiGroup() {
        int finalized = 0;
        MPI_Finalized(&finalized);
        // A communicator with a dead peer cannot be freed: the process is expected to end. Freeing a sound one waits for
        // nobody, since every exchange has completed here what it began (Open MPI and MPICH let go of it locally).
        if (finalized == 0 && !broken_) MPI_Comm_free(&communicator_);
    }

    int rank() const noexcept { return rank_; }
    int world() const noexcept { return world_; }
    int local_world() const noexcept { return local_world_; }
    bool concurrent() const noexcept { return concurrent_; }
    std::chrono::milliseconds timeout() const noexcept { return timeout_; }

    void exchange(Channel channel, std::chrono::milliseconds timeout, const ExchangeHeader& header,
                  std::span<const Region> outgoing, Transport::Consume consume) {
        require_usable();
        try {
            exchange_once(channel, timeout, header, outgoing, consume);
        } catch (const Error& error) {
            abort(error.what());
            throw;
        }
    }

    void all_gather_bytes(const void* send, void* received, std::size_t bytes) {
        if (bytes > std::size_t{1} << 30) {
            throw Error(StatusCode::invalid_argument,
                        fmt::format("all_gather_bytes: {} bytes, expected at most 2^30", bytes));
        }
        const auto length = static_cast<std::int64_t>(bytes);
        std::array<Region, max_world> outgoing;
        outgoing.fill({static_cast<const std::byte*>(send), 1, length, length});
        exchange(Channel::main, timeout_, {}, std::span(outgoing.data(), static_cast<std::size_t>(world_)),
                 [&](std::span<const Region> incoming) { store_gathered(incoming, rank_, received, bytes); });
    }

    void abort(const std::string& reason) noexcept {
        const std::lock_guard lock(reason_mutex_);
        if (!broken_) reason_ = reason;
        broken_ = true;
    }

private:
    struct ChannelBuffers {
        std::array<Announcement, max_world> sent;
        std::array<Announcement, max_world> received;
        std::vector<std::byte> outgoing;  // packed rows for all peers, kept until their sends have completed
        std::vector<std::byte> incoming;
        Requests sends;
        Requests receives;
    };

    /// `MPI_Comm_dup` would wait for a peer without end.
    void duplicate(MPI_Comm communicator) {
        auto result = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Comm_idup(communicator, result.get(), &request), "MPI_Comm_idup");
        const auto deadline = std::chrono::steady_clock::now() + timeout_;
        for (int done = 0; done == 0; std::this_thread::yield()) {
            check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup");
            if (done == 0 && std::chrono::steady_clock::now() > deadline) {
                [[maybe_unused]] MPI_Comm* const kept = result.release();  // MPI writes there if the peer comes after all
                throw Error(StatusCode::timeout,
                            fmt::format("mpi_ranks: a rank did not come within {} ms to duplicate the communicator",
                                        timeout_.count()));
            }
        }
        communicator_ = *result;
    }

    void count_ranks_of_this_host() {
        using Name = std::array<char, MPI_MAX_PROCESSOR_NAME>;
        Name mine{};
        int length = 0;
        check(MPI_Get_processor_name(mine.data(), &length), "MPI_Get_processor_name");
        std::vector<Name> all(static_cast<std::size_t>(world_));
        all_gather_bytes(mine.data(), all.data(), sizeof mine);
        local_world_ = static_cast<int>(std::count(all.begin(), all.end(), mine));
    }

    void require_usable() const {
        if (!broken_) return;
        const std::lock_guard lock(reason_mutex_);
        throw Error(StatusCode::aborted, reason_);
    }

    template <typename Body>
    void for_each_peer(Body body) const {
        for (int peer = 0; peer < world_; ++peer) {
            if (peer != rank_) body(peer, static_cast<std::size_t>(peer));
        }
    }

    void send(Requests& requests, const void* data, std::int64_t bytes, int peer, int tag) {
        const std::lock_guard lock(mutex_);
        requests.peers.push_back(peer);
        requests.handles.push_back(MPI_REQUEST_NULL);
        check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_, &requests.handles.back()),
              "MPI_Isend");
    }

    void receive(Requests& requests, void* data, std::int64_t bytes, int peer, int tag) {
        const std::lock_guard lock(mutex_);
        requests.peers.push_back(peer);
        requests.handles.push_back(MPI_REQUEST_NULL);
        check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_, &requests.handles.back()),
              "MPI_Irecv");
    }

    void exchange_once(Channel channel, std::chrono::milliseconds timeout, const ExchangeHeader& header,
                       std::span<const Region> outgoing, Transport::Consume consume) {
        ChannelBuffers& buffers = buffers_[static_cast<std::size_t>(channel)];
        const int header_tag = 2 * static_cast<int>(channel);
        const int data_tag = header_tag + 1;
        buffers.sends.clear();
        buffers.receives.clear();

        std::int64_t packed_bytes = 0;
        for_each_peer([&](int, std::size_t at) { packed_bytes += outgoing[at].bytes(); });
        buffers.outgoing.resize(std::max(buffers.outgoing.size(), static_cast<std::size_t>(packed_bytes)));
        std::byte* packed = buffers.outgoing.data();
        for_each_peer([&](int peer, std::size_t at) {
            buffers.sent[at] = {header, outgoing[at].rows, outgoing[at].row_bytes};
            receive(buffers.receives, &buffers.received[at], sizeof(Announcement), peer, header_tag);
            send(buffers.sends, &buffers.sent[at], sizeof(Announcement), peer, header_tag);
            if (outgoing[at].bytes() == 0) return;
            std::byte* const begin = packed;
            packed = pack(outgoing[at], packed);
            send(buffers.sends, begin, outgoing[at].bytes(), peer, data_tag);
        });
        complete(buffers.receives, header.step, timeout);

        std::int64_t incoming_bytes = 0;
        for_each_peer([&](int peer, std::size_t at) {
            const bool peer_first = peer < rank_;
            require_same(peer_first ? buffers.received[at].header : header, peer_first ? peer : rank_,
                         peer_first ? header : buffers.received[at].header, peer_first ? rank_ : peer);
            incoming_bytes += buffers.received[at].rows * buffers.received[at].row_bytes;
        });
        buffers.incoming.resize(std::max(buffers.incoming.size(), static_cast<std::size_t>(incoming_bytes)));
        buffers.receives.clear();
        std::array<Region, max_world> incoming;
        std::byte* next = buffers.incoming.data();
        for_each_peer([&](int peer, std::size_t at) {
            const Announcement& from = buffers.received[at];
            incoming[at] = {next, from.rows, from.row_bytes, from.row_bytes};
            if (incoming[at].bytes() != 0) receive(buffers.receives, next, incoming[at].bytes(), peer, data_tag);
            next += incoming[at].bytes();
        });
        incoming[static_cast<std::size_t>(rank_)] = outgoing[static_cast<std::size_t>(rank_)];
        complete(buffers.receives, header.step, timeout);
        consume(std::span(incoming.data(), static_cast<std::size_t>(world_)));
        complete(buffers.sends, header.step, timeout);
    }

    /// Waits for all requests, or until the deadline; then names the peers that are missing.
    void complete(Requests& requests, Step step, std::chrono::milliseconds timeout) {
        const auto deadline = std::chrono::steady_clock::now() + timeout;
        for (std::int64_t polls = 0;; ++polls) {
            int done = 0;
            {
                const std::lock_guard lock(mutex_);
                check(MPI_Testall(static_cast<int>(requests.handles.size()), requests.handles.data(), &done,
                                  MPI_STATUSES_IGNORE),
                      "MPI_Testall");
            }
            if (done != 0) return;
            require_usable();
            // Ranks often outnumber cores: let the peer that is waited for run.
            if (polls > 64) std::this_thread::yield();
            if (polls % 1024 == 1023 && std::chrono::steady_clock::now() > deadline) break;
        }
        std::vector<int> missing;
        for (std::size_t index = 0; index < requests.handles.size(); ++index) {
            const std::lock_guard lock(mutex_);
            int done = 0;
            MPI_Test(&requests.handles[index], &done, MPI_STATUS_IGNORE);
            const int peer = requests.peers[index];
            if (done == 0 && peer >= 0 && std::find(missing.begin(), missing.end(), peer) == missing.end())
                missing.push_back(peer);
        }
        const std::string who = missing.empty()
                                    ? "a rank"
                                    : fmt::format("{} {}", missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "));
        const std::string message =
            fmt::format("{} did not arrive within {} ms at the {}", who, timeout.count(), name(step));
        abort(message);
        throw ExchangeError(StatusCode::timeout, message, missing.empty() ? -1 : missing.front(), step);
    }

    MPI_Comm communicator_ = MPI_COMM_NULL;
    int rank_ = 0;
    int world_ = 1;
    int local_world_ = 1;
    bool concurrent_ = false;
    const std::chrono::milliseconds timeout_;
    std::mutex mutex_;  // one thread inside MPI at a time: MPI_THREAD_SERIALIZED is enough for two channels
    std::array<ChannelBuffers, channel_count> buffers_;
    mutable std::mutex reason_mutex_;
    std::string reason_;
    std::atomic<bool> broken_ = false;
};

class MpiTransport final : public Transport {
public:
    explicit MpiTransport(std::shared_ptr<MpiGroup> group) : group_(std::move(group)) {}

    int rank() const noexcept override { return group_->rank(); }
    int world() const noexcept override { return group_->world(); }
    void exchange(Channel channel, const ExchangeHeader& header, std::span<const Region> outgoing,
                  Consume consume) override {
        group_->exchange(channel, std::chrono::milliseconds(timeout_ms()), header, outgoing, consume);
    }
    std::int64_t preferred_region_bytes() const noexcept override { return std::int64_t{1} << 20; }
    bool concurrent_channels() const noexcept override { return group_->concurrent(); }
    const char* description() const noexcept override { return "MPI"; }
    void abort(const std::string& reason) noexcept override { group_->abort(reason); }

private:
    std::shared_ptr<MpiGroup> group_;
};

}  // namespace

Bootstrap mpi_ranks(MPI_Comm communicator, int timeout_ms) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized == 0)
        throw Error(StatusCode::invalid_argument, "mpi_ranks: MPI is not initialised, expected MPI_Init before");
    int world = 0;
    MPI_Comm_size(communicator, &world);
    if (world > max_world) {
        throw Error(StatusCode::invalid_argument, fmt::format("world is {}, expected 1 to {}", world, max_world));
    }
    const auto group = std::make_shared<MpiGroup>(communicator, timeout_ms);
    const auto transport = std::make_shared<MpiTransport>(group);
    transport->set_timeout_ms(static_cast<int>(group->timeout().count()));
    return {.rank = group->rank(),
            .world = group->world(),
            .all_gather_bytes = [group](const void* send, void* received,
                                        std::size_t bytes) { group->all_gather_bytes(send, received, bytes); },
            .transport = transport,
            .local_world = group->local_world()};
}

}  // namespace latent_moe
