// Ranks that are processes, forked and watched. mpirun ends the survivors of a death; here they live on and are asked what
// they saw.
//
//     launcher ── fork ──▶ rank 0 ◀─ socket ─▶ rank 1 ◀─ … ─▶ rank N-1      every pair has a socket for each group
//        ▲                   │ report (pipe)
//        └───────────────────┘
//
// A rank that has failed stays until all have reported, so that nobody mistakes its end for the fault. The launcher itself
// touches no GPU: what is forked from a process that has cannot.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "latent_moe/bootstrap.h"
#include "latent_moe/status.h"

namespace latent_moe::faults {

/// What the processes share.
struct Shared {
    std::atomic<std::int64_t> fault_ns{0};  ///< when the fault happened, on the steady clock; 0 before
    std::atomic<int> prepared{0};           ///< ranks that are
};

std::int64_t now_ns();

/// How one rank ended.
struct Report {
    StatusCode code = StatusCode::ok;
    std::string message;
    double seconds = 0;         ///< from the fault to the error
    double seconds_to_end = 0;  ///< and to the end of all that the rank had
    int files_left = 0;         ///< open files and threads more than before the body
    int threads_left = 0;
};

/// One rank's view: a bootstrap for each group, and what is shared.
struct Rank {
    int rank;
    std::vector<Bootstrap> groups;
    Shared& shared;
    std::int64_t error_ns = 0;  ///< when this rank learnt of it; 0: not marked

    /// Marks the moment of the fault.
    void fault_now() const { shared.fault_ns = now_ns(); }
    void error_now() { error_ns = now_ns(); }
};

struct Launch {
    int world = 3;
    int groups = 1;
    int timeout_ms = 700;                  ///< of the sockets: a peer that is silent for so long is reported
    int patience_ms = 60'000;              ///< with a rank that is not done
    std::function<void(Rank&)> prepare{};  ///< what takes long once a process; all ranks wait for all in front of the body
    std::function<void(Rank&)> body;
};

/// A report for each rank, or nothing where it ended without one. Throws if a rank is not done in time, or if something is
/// left: a file, a process, an entry in /dev/shm.
std::vector<std::optional<Report>> launch(const Launch& launch);

}  // namespace latent_moe::faults
