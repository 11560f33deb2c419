// An all-gather of bytes between processes over Unix sockets, with a deadline: the bootstrap of the fault tests.
#pragma once

#include <cstddef>
#include <vector>

namespace latent_moe::faults {

class Sockets {
public:
    /// `descriptors[r]`: the socket to rank r; -1 for this rank itself. Closes them at its end.
    Sockets(int rank, std::vector<int> descriptors, int timeout_ms);
    Sockets(const Sockets&) = delete;
    Sockets& operator=(const Sockets&) = delete;
    ~Sockets();

    /// Throws `Error`: `aborted` where a peer's end has closed or a peer gave up, `timeout` where one is silent, `mismatch`
    /// where one sends another number of bytes. Whoever fails tells the others why, for some of them may have heard the
    /// last of the culprit and wait for this rank.
    void all_gather(const void* send, void* received, std::size_t bytes);

private:
    void gather(const void* send, void* received, std::size_t bytes);
    void say_farewell(const char* reason) noexcept;

    int rank_;
    std::vector<int> descriptors_;
    int timeout_ms_;
    std::vector<bool> in_message_;  ///< by peer: part of a message is sent, so that nothing else can be
};

}  // namespace latent_moe::faults
