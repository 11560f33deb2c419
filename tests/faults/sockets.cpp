#include "faults/sockets.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "latent_moe/status.h"

namespace latent_moe::faults {
namespace {

using Clock = std::chrono::steady_clock;

/// What is still to be sent to and received from one peer: a length, then so many bytes.
struct Traffic {
    std::vector<std::byte> out;
    std::size_t sent = 0;
    std::vector<std::byte> in;
    std::size_t got = 0;

    bool done() const noexcept { return sent == out.size() && got == in.size(); }
};

/// A length that is none: the sender has failed, and a text of this size says why.
constexpr std::uint64_t farewell = UINT64_MAX;
constexpr std::size_t farewell_bytes = 512;

[[noreturn]] void gone(std::size_t peer) {
    throw Error(StatusCode::aborted, fmt::format("rank {} is gone: its connection has closed", peer));
}

bool would_block() noexcept {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

Sockets::Sockets(int rank, std::vector<int> descriptors, int timeout_ms)
    : rank_(rank), descriptors_(std::move(descriptors)), timeout_ms_(timeout_ms), in_message_(descriptors_.size()) {}

Sockets::~Sockets() {
    for (const int descriptor : descriptors_) {
        if (descriptor >= 0) ::close(descriptor);
    }
}

void Sockets::all_gather(const void* send, void* received, std::size_t bytes) {
    try {
        gather(send, received, bytes);
    } catch (const Error& error) {
        say_farewell(error.what());
        throw;
    }
}

void Sockets::say_farewell(const char* reason) noexcept {
    std::array<char, sizeof farewell + farewell_bytes> message{};
    std::memcpy(message.data(), &farewell, sizeof farewell);
    std::strncpy(message.data() + sizeof farewell, reason, farewell_bytes - 1);
    for (std::size_t peer = 0; peer < descriptors_.size(); ++peer) {
        if (descriptors_[peer] >= 0 && !in_message_[peer])
            static_cast<void>(::send(descriptors_[peer], message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
    }
}

void Sockets::gather(const void* send, void* received, std::size_t bytes) {
    const std::uint64_t length = bytes;
    std::vector<Traffic> traffic(descriptors_.size());
    for (Traffic& each : traffic) {
        each.out.resize(sizeof length + bytes);
        std::memcpy(each.out.data(), &length, sizeof length);
        if (bytes != 0) std::memcpy(each.out.data() + sizeof length, send, bytes);
        each.in.resize(each.out.size());
    }
    traffic[static_cast<std::size_t>(rank_)].in = traffic[static_cast<std::size_t>(rank_)].out;
    traffic[static_cast<std::size_t>(rank_)].sent = traffic[static_cast<std::size_t>(rank_)].out.size();
    traffic[static_cast<std::size_t>(rank_)].got = traffic[static_cast<std::size_t>(rank_)].in.size();

    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms_);
    for (;;) {
        std::vector<pollfd> waits;
        std::vector<std::size_t> peers;
        for (std::size_t peer = 0; peer < traffic.size(); ++peer) {
            if (traffic[peer].done()) continue;
            const bool sends = traffic[peer].sent < traffic[peer].out.size();
            const bool gets = traffic[peer].got < traffic[peer].in.size();
            waits.push_back({descriptors_[peer], static_cast<short>((sends ? POLLOUT : 0) | (gets ? POLLIN : 0)), 0});
            peers.push_back(peer);
        }
        if (waits.empty()) break;
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        if (left <= 0) {
            throw Error(StatusCode::timeout,
                        fmt::format("{} {} did not answer within {} ms", peers.size() == 1 ? "rank" : "ranks",
                                    fmt::join(peers, ", "), timeout_ms_));
        }
        ::poll(waits.data(), waits.size(), static_cast<int>(left) + 1);
        for (std::size_t i = 0; i < waits.size(); ++i) {
            Traffic& each = traffic[peers[i]];
            if ((waits[i].revents & POLLOUT) != 0) {
                const ssize_t count = ::send(waits[i].fd, each.out.data() + each.sent, each.out.size() - each.sent,
                                             MSG_NOSIGNAL | MSG_DONTWAIT);
                if (count < 0 && !would_block()) gone(peers[i]);
                if (count > 0) each.sent += static_cast<std::size_t>(count);
                in_message_[peers[i]] = each.sent > 0 && each.sent < each.out.size();
            }
            if ((waits[i].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
            const ssize_t count = ::recv(waits[i].fd, each.in.data() + each.got, each.in.size() - each.got, MSG_DONTWAIT);
            if (count == 0 || (count < 0 && !would_block())) gone(peers[i]);
            if (count > 0) each.got += static_cast<std::size_t>(count);
            std::uint64_t theirs = 0;
            if (each.got < sizeof theirs) continue;
            std::memcpy(&theirs, each.in.data(), sizeof theirs);
            if (theirs == farewell) {
                std::array<char, farewell_bytes> reason{};
                const std::size_t early = std::min(each.got - sizeof theirs, farewell_bytes - 1);
                std::memcpy(reason.data(), each.in.data() + sizeof theirs, early);
                static_cast<void>(::recv(waits[i].fd, reason.data() + early, farewell_bytes - 1 - early, MSG_DONTWAIT));
                throw Error(StatusCode::aborted, fmt::format("rank {} gave up: {}", peers[i], reason.data()));
            }
            if (theirs != length) {
                throw Error(StatusCode::mismatch,
                            fmt::format("rank {} sends {} bytes, rank {} {}: they are at different steps", peers[i], theirs,
                                        rank_, length));
            }
        }
    }
    for (std::size_t peer = 0; peer < traffic.size() && bytes != 0; ++peer)
        std::memcpy(static_cast<std::byte*>(received) + peer * bytes, traffic[peer].in.data() + sizeof length, bytes);
}

}  // namespace latent_moe::faults
