// How the ranks of one context find each other. The library needs a rank, a size and an all-gather of bytes; adapters supply
// them for the threads of one process (here) and for MPI processes (`latent_moe/mpi.h`).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "latent_moe/export.h"

namespace latent_moe {

class Transport;  // moves host memory between ranks; supplied by the adapters

struct Bootstrap {
    int rank = 0;
    int world = 1;

    /// Gathers `bytes` bytes from every rank, in rank order, into `received` (`world * bytes` bytes) on every rank.
    /// Collective. Used while a context is created, sealed, suspended or resumed, by tails on the CPU if there is no
    /// `transport`, never by a tail on a GPU; in the thread that called the library, one at a time for a context; for some
    /// bytes to some megabytes.
    ///
    /// How long it waits for a rank is its own affair: let it give up. It reports failure by throwing, and what it throws
    /// during set-up is what the caller gets: `Error(timeout)`, say. In a call an `Error` keeps its code, and another
    /// std::exception becomes `unavailable`.
    std::function<void(const void* send, void* received, std::size_t bytes)> all_gather_bytes = {};

    /// How CPU tails move their data. Adapters set it; when null, `all_gather_bytes` is used (right, but slow).
    std::shared_ptr<Transport> transport = {};

    /// Ranks of this group that run on this machine (they share its cores and its GPUs).
    int local_world = 1;
};

/// One rank alone.
LATENT_MOE_API Bootstrap single_rank();

/// `world` ranks, each to be used by a thread of its own in this process. Element r is rank r's. A rank that is late by more
/// than `timeout_ms` makes the others throw `Error(timeout)` that names it.
LATENT_MOE_API std::vector<Bootstrap> thread_ranks(int world, int timeout_ms = 30'000);

/// Runs `body(bootstrap of that rank)` on `world` threads and returns when all have returned. If ranks throw, the error of
/// the lowest rank whose error is not just the echo of another rank's is thrown.
LATENT_MOE_API void run_thread_ranks(int world, const std::function<void(const Bootstrap&)>& body, int timeout_ms = 30'000);

}  // namespace latent_moe
