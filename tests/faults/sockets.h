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

    /// Throws `Error`: `aborted` where a peer's end has closed, `timeout` where one is silent, `mismatch` where one sends
    /// another number of bytes.
    void all_gather(const void* send, void* received, std::size_t bytes);

private:
    int rank_;
    std::vector<int> descriptors_;
    int timeout_ms_;
};

}  // namespace latent_moe::faults
